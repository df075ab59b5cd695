"""Each mechanism of older software on a small model: what it changes, and where it ends."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.inputs import ModuleInputs
from memest.config.setup import Attention, Setup, Software
from memest.errors import ConfigError
from memest.estimation.profiler import Profiler
from memest.events import ALLOC, FREE, Weight
from memest.replay.replay import replay
from memest.trace.legacy.torch import torch_as_before
from memest.trace.legacy.transformers import attention_of
from memest.trace.meta_model import build
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.training import trace_updates

LAYERS, BATCH, LENGTH = 2, 3, 16
GPT2 = {
    "model_type": "gpt2", "n_layer": LAYERS, "n_embd": 32, "n_head": 4, "n_positions": 64,
    "vocab_size": 120,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "num_hidden_layers": LAYERS, "hidden_size": 32, "vocab_size": 120,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
}  # fmt: skip
GEMMA2 = {
    **QWEN2, "model_type": "gemma2", "head_dim": 8, "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 8,
}  # fmt: skip
OPT = {
    "model_type": "opt", "num_hidden_layers": LAYERS, "hidden_size": 32, "vocab_size": 120,
    "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    def make(config, software, **setup):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        known = {"task": "causal-lm", "loop": "plain", "batch": BATCH, "seq_len": LENGTH}
        values = {**known, "dtype": "float32", "optim": "sgd", **setup}
        wanted = Setup(software=Software.parse(software), **values)
        gpu = traits(find_gpu("RTX 3090"), wanted.software.torch or (2, 13))
        return Profiler(source=resolve_model(str(path))).trace(wanted, gpu)

    return make


def steps(found):
    """The traced micro-steps behind an answer."""
    return found.program.micro_steps.at(found.point)


def made(trace, module=""):
    """How many storages each operator makes in the modules whose path ends so."""
    counts = Counter()
    trace = steps(trace)
    for event in trace.events:
        if event & 3 == ALLOC:
            number = event >> 2
            if trace.module_names[trace.modules[number]].endswith(module):
                name = trace.op_names[trace.ops[number]].removeprefix("aten.")
                counts[name.partition(".")[0]] += 1
    return counts


def peak(found):
    stream = found.stream
    return replay(stream.events, stream.sizes).peak_allocated_bytes


@pytest.mark.parametrize(
    ("family", "software", "expected"),
    [
        ("bert", "torch=1.10,transformers=4.18", Attention.EAGER),
        ("bert", "transformers=4.40", Attention.EAGER),
        ("bert", "transformers=4.41", Attention.AUTO),
        ("llama", "transformers=4.36", Attention.AUTO),
        ("t5", "transformers=4.57", Attention.EAGER),
        ("t5", "transformers=5.0", Attention.EAGER),
        ("gemma2", "transformers=5.20", Attention.SDPA),
        ("qwen3", "transformers=4.51", Attention.AUTO),
        ("qwen3", "", Attention.AUTO),
        ("llama", "torch=1.13,transformers=4.48", Attention.EAGER),
    ],
)
def test_attention_of_the_time(family, software, expected):
    assert attention_of(family, Setup(software=Software.parse(software))) is expected


def test_attention_that_was_asked_for_stays():
    setup = Setup(attn_implementation="sdpa", software=Software.parse("transformers=4.18"))
    assert attention_of("bert", setup) is Attention.SDPA


def test_caches_kept_the_first_keys_without_a_copy(trace):
    eager = {"attn_implementation": "eager", "use_cache": True}
    old, new = (trace(GPT2, f"transformers={v}", **eager) for v in ("4.54", "4.56"))
    assert made(new, "attn")["cat"] - made(old, "attn")["cat"] == 2 * LAYERS * 2  # two steps


def test_operands_of_sdpa_were_made_contiguous(trace):
    old, new = (trace(GPT2, f"transformers={v}", use_cache=False) for v in ("4.55", "4.56"))
    assert made(old, "attn")["clone"] - made(new, "attn")["clone"] == 3 * LAYERS * 2


def test_opt_scaled_its_queries_inside_sdpa(trace):
    old, new = (trace(OPT, f"transformers={v}", padded=True) for v in ("4.52", "4.53"))
    assert made(old, "self_attn")["mul"] < made(new, "self_attn")["mul"]
    assert made(old, "self_attn")["clone"] < made(new, "self_attn")["clone"]


def test_soft_caps_were_left_out_by_sdpa(trace):
    now, then = (made(trace(GEMMA2, f"transformers={v}"), "self_attn") for v in ("5.22", "5.20"))
    assert now["tanh"]
    assert not then["tanh"]


def test_grouped_heads_were_repeated(trace):
    old, new = (trace(QWEN2, f"transformers={v},torch=2.6") for v in ("4.53", "4.54"))
    assert not any(call.grouped for call, _ in steps(old).attention_choices)
    assert any(call.grouped for call, _ in steps(new).attention_choices)


@pytest.mark.parametrize(
    ("config", "last"),
    [(QWEN2, "4.52"), (GPT2, "4.53"), (OPT, "5.0")],
    ids=["qwen2", "gpt2", "opt"],
)
def test_masks_were_additive_and_shared(trace, config, last):
    major, minor = map(int, last.split("."))
    following = f"{major}.{minor + 1}"
    old, new = (
        trace(config, f"transformers={v},torch=2.6", padded=True) for v in (last, following)
    )
    assert made(new, "attn")["where"] == LAYERS * 2
    assert made(old, "attn")["where"] == 0
    assert made(old)["zeros"] > made(new)["zeros"]


def test_dense_batches_need_no_mask_in_any_version(trace):
    old, new = (made(trace(QWEN2, f"transformers={v}")) for v in ("4.52", "4.53"))
    assert old["where"] == new["where"] == 0


def test_loss_copied_the_shifted_logits(trace):
    def copies(version):
        found = steps(trace(GPT2, f"transformers={version}"))
        size = BATCH * (LENGTH - 1) * GPT2["vocab_size"] * 4
        return sum(
            1
            for number, nbytes in enumerate(found.sizes)
            if nbytes == size and found.op_names[found.ops[number]].startswith("aten.clone")
        )

    assert copies("4.48") == 2
    assert copies("4.49") == 0


def test_gpt2_had_a_causal_buffer_in_every_layer(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))

    def buffers(version):
        setup = Setup(software=Software.parse(f"transformers={version}"), task="causal-lm")
        return build(setup, resolve_model(str(path)), None, None, None).counts[2]

    assert buffers("5.1") == 0
    assert buffers("5.0") == LAYERS * GPT2["n_positions"] ** 2
    assert buffers("4.57") == LAYERS * (GPT2["n_positions"] ** 2 + 1)


class Gelu(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)))


def _gelu(torch_version):
    setup = Setup(
        precision="fp16", loop="plain", optim="none", batch=8, num_steps=1,
        software=Software(torch=torch_version),
    )  # fmt: skip
    tracer = Profiler(
        module=Gelu(),
        module_inputs=ModuleInputs(
            inputs={"x": torch.randn(8, 32)}, loss=lambda out, batch: out.float().sum()
        ),
    )  # fmt: skip
    return Counter(steps(tracer.trace(setup, traits(find_gpu("V100"), torch_version))).sizes)


def test_autocast_ran_gelu_in_fp32_until_torch_1_9():
    wide = 8 * 64 * 4
    assert _gelu((1, 9))[wide] > _gelu((1, 10))[wide]
    assert _gelu((1, 10)) == _gelu((1, 11))


@pytest.mark.slow("accelerate")
@pytest.mark.parametrize("loop", ["plain", "accelerate"])
def test_where_zero_grad_is_called(trace, loop):
    peaks = [
        peak(trace(GPT2, "torch=2.6", loop=loop, zero_grad_at=at))
        for at in ("after-step", "before-forward", "before-backward")
    ]
    assert peaks[0] == peaks[1] < peaks[2]


@pytest.mark.parametrize("loop", ["plain", "accelerate"])
def test_outputs_that_are_deleted_are_not_there_in_the_next_forward(trace, loop):
    kept, deleted = (
        peak(trace(GPT2, "torch=2.6", loop=loop, del_outputs=said)) for said in (False, True)
    )
    assert deleted < kept


def test_the_trainer_has_no_outputs_to_delete():
    with pytest.raises(ConfigError, match="--del-outputs is a matter of scripts"):
        Setup(del_outputs=True)


def test_trainer_decides_itself_where_gradients_go():
    with pytest.raises(ConfigError, match="--zero-grad-at before-forward"):
        Setup(zero_grad_at="before-forward")


@pytest.mark.parametrize(
    ("name", "version", "foreach"),
    [("adafactor_torch", (2, 6), False), ("adamw_torch", (2, 6), True), ("sgd", (1, 13), False)],
)
def test_implementation_that_torch_takes_by_default(name, version, foreach):
    model = torch.nn.Linear(4, 4, device="meta")
    optimizer = make_optimizer(model, Setup(optim=name), None, version)
    assert bool(optimizer.defaults["foreach"]) is foreach


class Dispatched(TorchDispatchMode):
    """The operators that something comes to."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("index", "forward", "backward"),
    [
        # as torch 2.8.0 dispatches them
        (np.s_[:, -1, :], "slice select slice", "slice select slice"),
        (np.s_[:, 1:], "slice slice", "slice slice"),
        (np.s_[..., :3], "slice", "slice"),
        (np.s_[:, None, :, 2], "slice unsqueeze slice select", "select slice slice"),
        (np.s_[0, :, 1:3], "select slice slice", "slice slice select"),
        (np.s_[:, torch.tensor([0, 2])], "slice index", "slice"),
        (np.s_[:, :, torch.tensor([0, 2])], "slice slice index", "slice slice"),
        (np.s_[..., 0], "select", "select"),
        (np.s_[:, ..., :], "slice slice", "slice slice"),
        (np.s_[:], "slice", "slice"),
        (np.s_[:, 0], "slice select", "select slice"),
    ],
    ids=str,
)
def test_whole_dimensions_were_sliced_until_torch_2_8(index, forward, backward):
    leaf = torch.randn(4, 5, 6, requires_grad=True)
    with torch_as_before((2, 8)), Dispatched() as there:
        taken = leaf[index]
    with Dispatched() as back:
        taken.sum().backward()
    with torch_as_before((2, 9)), Dispatched() as now:
        assert torch.equal(leaf[index], taken)

    assert there.names == forward.split()
    made = [n.removesuffix("_backward") for n in back.names if n.endswith("_backward")]
    assert made == backward.split()
    parts = [each for each in index if isinstance(each, slice)] if type(index) is tuple else []
    assert now.names.count("slice") == forward.split().count("slice") - parts.count(slice(None))


@pytest.mark.parametrize("name", ["adam", "adamw_torch_foreach"])
def test_adam_kept_roots_beside_denominators_in_torch_2_0(name):
    """One more temporary of all weights at the end of an update."""
    weights = tuple(
        Weight(
            name=f"w{n}", shape=(1024, n), stride=(n, 1), dtype="float32", trains=True,
            decays=True, has_grad=True, kept_dtype=None,
        )
        for n in (1, 3)
    )  # fmt: skip
    setup = Setup(optim=name, loop="plain", max_grad_norm=0)

    def height(torch_version):
        trace = trace_updates(weights, setup, traits(find_gpu("RTX 3090"), torch_version))
        now = most = 0
        for event in trace.events:
            if event & 3 in (ALLOC, FREE):
                now += trace.sizes[event >> 2] * (1 if event & 3 == ALLOC else -1)
                most = max(most, now)
        return most

    assert height((2, 0)) - height((2, 1)) == 4 * 4 * 1024


def test_models_cast_their_logits_themselves(trace):
    """A script that keeps ``outputs`` kept them at four bytes an element."""
    old, new = (peak(trace(QWEN2, f"transformers={v}", dtype="bfloat16")) for v in ("4.45", "4.46"))
    assert old - new == 2 * BATCH * LENGTH * QWEN2["vocab_size"] // 512 * 512


def test_layers_held_tables_of_cosines(trace):
    old, new = (trace(QWEN2, f"transformers={v}").counts[2] for v in ("4.42", "4.43"))
    assert old - new == 2 * LAYERS * 32768 * 8


def test_layers_made_cosines_of_their_own(trace):
    old, new = (trace(QWEN2, f"transformers={v}") for v in ("4.44", "4.45"))
    assert made(old, "attn")["clone"] - made(new, "attn")["clone"] == 2 * LAYERS * 2


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_the_mask_of_an_eager_encoder_is_in_the_dtype_of_its_weights(trace, dtype, itemsize):
    bert = {"model_type": "bert", "num_hidden_layers": LAYERS, "hidden_size": 32,
            "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 120}  # fmt: skip
    setup = {"task": "sequence-classification", "attn_implementation": "eager", "dtype": dtype}
    traced = steps(trace(bert, "transformers=4.40", **setup))

    softmaxes = {
        size
        for size, operator in zip(traced.sizes, traced.ops, strict=True)
        if traced.op_names[operator].startswith("aten._softmax.")
    }
    # the scores take the dtype of what is added to them
    assert softmaxes == {BATCH * 4 * LENGTH * LENGTH * itemsize}
