"""Steps with losses of TRL and torchtune: real ones on the CPU, and the libraries' own Python.

A real step on the CPU says whether the trace is right about what these operators allocate and keep;
the libraries' own code, run on meta as a trace runs ours, says whether it is the same step: the
same bytes are born and die in the same order.
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from memest.catalog.resolve import ModelSource
from memest.config.compilation import loss_and_chunks
from memest.config.setup import Setup
from memest.events import ALLOC, FREE, MARK
from memest.trace import session
from memest.trace.cuda.known_values import attach
from memest.trace.cuda.no_triton import Library, without_triton
from memest.trace.losses.fused_loss import apply_fused_loss
from memest.trace.losses.torchtune import torchtune_chunked, torchtune_linear
from memest.trace.losses.trl import trl_chunked, trl_fused
from memest.trace.meta_model import build
from memest.trace.model.adapters import base_of
from memest.trace.training import TracePlan
from support.cases import GPU
from support.real_steps import RNG_STATE, run_both
from support.small_llama import LLAMA

LOSSES = ("trl-fused", "trl-chunked", "torchtune-linear", "torchtune-chunked:3")


# -- real steps -----------------------------------------------------------------------------------


def _on_cpu(model, loss):
    name, chunks = loss_and_chunks(loss)
    if name.startswith("trl"):
        return {"trl-fused": trl_fused, "trl-chunked": trl_chunked}[name](model)
    made = {"torchtune-linear": torchtune_linear, "torchtune-chunked": torchtune_chunked}[name]
    forward = made(model, chunks)

    def shifted(labels=None, **inputs):
        # the host's part of the work: nothing on meta knows it
        labels = labels.clone() if name == "torchtune-chunked" else labels
        if name == "torchtune-linear":
            labels[:, -1] = -100
        return forward(labels=labels, **inputs)

    return shifted


@pytest.mark.slow(
    but=(
        "trainer-torchtune-chunked:3",
        "frozen-torchtune-chunked:3",
    )
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"loop": "trainer"}),
        ("llama-tied", {"loop": "trainer", "grad_accum": 2}),
        ("llama", {"freeze": ("lm_head", "embed"), "loop": "plain"}),
        ("llama", {"checkpointing": "full", "loop": "trainer"}),
        ("gemma2", {"loop": "accelerate"}),
    ],
    ids=["trainer", "tied", "frozen", "checkpointing", "softcap"],
)
def test_a_real_step_allocates_the_same(loss, model, options):
    @contextmanager
    def around(twins):
        with (
            mock.patch.object(twins.real, "forward", _on_cpu(twins.real, loss)),
            apply_fused_loss(twins.built_model.trained_model, GPU, loss),
        ):
            yield

    real, trace, host = run_both(model, {"fused_loss": loss, "batch": 6, **options}, around)
    # what the losses recompute keeps random states too, whether layers are recomputed or not
    host += RNG_STATE * (2 * 8 - 2 * 4 * ("checkpointing" in options))

    assert abs(trace.peak - real.peak) <= 0.005 * real.peak
    measured = {phase.name: phase for phase in real.phases}
    for phase in trace.phases:
        assert abs(phase.alive - measured[phase.name].alive) <= host, phase.name


# -- the libraries' own code ----------------------------------------------------------------------

RUNS = [
    ({}, {}),
    ({}, {"precision": "bf16", "dtype": "float32", "batch": 48, "seq_len": 129}),
    ({"tie_word_embeddings": True, "vocab_size": 70_000}, {"grad_accum": 2}),
    ({}, {"adapter": {"peft_type": "LORA", "r": 8}}),
    ({}, {"freeze": ("lm_head",), "dtype": "float32", "checkpointing": "full"}),
    ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 32}, {}),
    ({"model_type": "cohere", "architectures": ["CohereForCausalLM"]}, {}),
    ({"model_type": "phi", "architectures": ["PhiForCausalLM"]}, {"loop": "plain"}),
]  # fmt: skip
_TRL = Library(
    "trl", "trl.",
    (('device.type in ("cuda", "xpu")', 'device.type == "meta"'),
     ('acc.device.type == "cuda"', 'acc.device.type == "meta"'),
     ("torch.get_autocast_dtype(device.type)", 'torch.get_autocast_dtype("cuda")'),
     ("torch.is_autocast_enabled(device.type)", 'torch.is_autocast_enabled("cuda")'),
     ("is_triton_available()", "True")),
)  # fmt: skip


@contextmanager
def _trl(model, gpu, name):
    """SFTTrainer's forward and ``compute_loss``, around the real ``add_fused_lm_head``."""
    base = base_of(model)
    with without_triton(_TRL, lambda: importlib.import_module("trl.trainer.utils")):
        utils = importlib.import_module("trl.trainer.utils")
        utils.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        fused = base.forward

        def forward(num_items_in_batch=None, **inputs):
            outputs = fused(**inputs, num_items_in_batch=num_items_in_batch, fused_lm_head=True)
            losses = -outputs.log_probs
            items = num_items_in_batch
            items = outputs.label_mask.sum() if items is None else items
            loss = losses.sum() / torch.as_tensor(items).clamp(min=1)
            outputs["own"], outputs["loss"] = outputs.loss, loss
            return outputs

        base.forward = forward
        try:
            yield
        finally:
            del base.forward


def _torchtune(file, kind):
    """A module of torchtune that needs nothing else of it."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torchtune is not installed")
    path = Path(spec.submodule_search_locations[0], "modules", "loss", file)
    if not path.is_file():
        pytest.skip(f"this torchtune has no {kind}")
    module = types.ModuleType("loss")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return getattr(module, kind)()


@contextmanager
def _chunked(model, gpu, name):
    base, loss = base_of(model), _torchtune("ce_chunked_output_loss.py", "CEWithChunkedOutputLoss")

    def pieces(inputs):
        hidden = base.get_decoder()(**{**inputs, "use_cache": False}).last_hidden_state
        return [base.get_output_embeddings()(piece) for piece in hidden.chunk(8, dim=1)]

    def forward(labels=None, num_items_in_batch=None, **inputs):
        logits = pieces(inputs)
        end = (labels.shape[0], 1)
        labels = torch.hstack((labels[..., 1:], torch.full(end, -100, device=labels.device)))
        return types.SimpleNamespace(loss=loss(logits, labels))

    with mock.patch.object(base, "forward", forward):
        yield


@contextmanager
def _linear(model, gpu, name):
    base, loss = base_of(model), _torchtune("cross_entropy_loss.py", "LinearCrossEntropyLoss")
    loss.linear_projection = base.get_output_embeddings()

    def forward(labels=None, num_items_in_batch=None, **inputs):
        hidden = base.get_decoder()(**{**inputs, "use_cache": False}).last_hidden_state
        shifted = torch.zeros(labels.shape, dtype=labels.dtype)
        shifted[:, -1] = -100
        attach(labels, shifted)
        return types.SimpleNamespace(loss=loss(hidden, labels))

    with mock.patch.object(base, "forward", forward):
        yield


def _events(config, options, loss):
    setup = Setup(
        **{"batch": 4, "seq_len": 96, "dtype": "bfloat16", "optim": "none", **options},
        fused_loss=loss,
    )
    source = ModelSource(kind="file", id="small", config={**LLAMA, **config}, provenance="test")
    run = build(setup, source, None, None, None)
    trace = session.trace_built(run, setup, GPU, TracePlan(steps=1))
    return [
        (kind, str(trace.marks[index].phase) if kind == MARK else trace.sizes[index])
        for kind, index in trace.decode()
        if kind in (ALLOC, FREE, MARK)
    ]


@pytest.mark.parametrize(("config", "options"), RUNS)
def test_trl_does_the_same(config, options):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    ours = _events(config, options, "trl-fused")
    with mock.patch.object(session, "apply_fused_loss", _trl):
        try:
            theirs = _events(config, options, "trl-fused")
        except (ImportError, AttributeError) as error:
            pytest.skip(f"this TRL has no fused head: {error}")

    assert ours == theirs


@pytest.mark.parametrize(
    ("loss", "real"), [("torchtune-chunked", _chunked), ("torchtune-linear", _linear)]
)
@pytest.mark.parametrize(
    ("config", "options"),
    [(c, o) for c, o in RUNS if c.get("model_type") not in ("gemma2", "cohere")],
)
def test_torchtune_does_the_same(config, options, loss, real):
    ours = _events(config, options, loss)
    with mock.patch.object(session, "apply_fused_loss", real):
        theirs = _events(config, options, loss)

    assert ours == theirs
