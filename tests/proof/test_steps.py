"""Real steps against traced ones: the same bytes at every boundary, the same peak.

Each case runs two optimizer steps of a real model on the CPU, under PyTorch's memory profiler, in
the loop of the library that owns it, and traces the same two steps on meta with the CPU's operator
choices. Whatever differs must be host memory, which a CPU run cannot tell apart from the device's.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from memest.calibration.running.cpu_memory import mark, measure
from memest.config.optimizers import OPTIMIZER_FACTS
from memest.config.setup import Loop
from memest.trace.inputs.batch import nested
from support.real_steps import check_order, check_step

PLAIN, ACCELERATE, TRAINER = (loop.value for loop in (Loop.PLAIN, Loop.ACCELERATE, Loop.TRAINER))
LIGHTNING = Loop.LIGHTNING.value


def _case(model, slow=False, **setup):
    loop = setup.setdefault("loop", PLAIN)
    words = [f"{k}={v}" for k, v in setup.items() if k != "loop"]
    name = "-".join([model, loop, *words]).replace(" ", "")
    return pytest.param(model, setup, id=name, marks=[pytest.mark.slow] if slow else [])


CASES = [
    # architectures
    _case("bert"),
    _case("roberta", padded=True),
    _case("deberta", slow=True),
    _case("modernbert"),
    _case("gpt2"),
    _case("llama-gqa", slow=True),
    _case("llama-tied", slow=True),
    _case("qwen3", loop=TRAINER, slow=True),
    _case("gemma2", loop=ACCELERATE, slow=True),
    _case("gpt_neox", slow=True),
    _case("bloom", slow=True),
    _case("phi", slow=True),
    _case("t5", loop=TRAINER, grad_accum=2, slow=True),
    _case("bart", loop=ACCELERATE, slow=True),
    _case("vit", loop=TRAINER, slow=True),
    _case("swin", loop=TRAINER, slow=True),
    _case("convnext", slow=True),
    _case("resnet", loop=ACCELERATE, slow=True),
    _case("segformer", loop=TRAINER, slow=True),
    _case("clip", slow=True),
    _case("whisper", loop=TRAINER, grad_accum=2, slow=True),
    _case("wav2vec2", loop=TRAINER, slow=True),
    _case("mixtral", dtype="bfloat16", slow=True),
    _case("qwen3_moe", dtype="bfloat16", loop=TRAINER, slow=True),
    _case("videomae", slow=True),
    _case("timesformer", slow=True),
    _case("trocr", loop=TRAINER, attn_implementation="eager", slow=True),
    _case("idefics3", slow=True),
    _case("internvl", loop=TRAINER, slow=True),
    _case("git", slow=True),
    _case("granite_speech"),
    # loops, accumulation, clipping, zero_grad
    _case("bert", loop=TRAINER, grad_accum=3, optim="adamw_torch_fused", slow=True),
    _case("bert", loop=TRAINER, max_grad_norm=0.0, slow=True),
    _case("bert", loop=ACCELERATE, grad_accum=3, max_grad_norm=1.0, slow=True),
    _case("gpt2", grad_accum=2, zero_grad="zero", slow=True),
    _case("gpt2", loop=ACCELERATE, grad_accum=2, slow=True),
    _case("gpt2", grad_accum=2, del_outputs=True, slow=True),
    _case("llama-gqa", loop=ACCELERATE, del_outputs=True),
    _case("bert", loop=LIGHTNING, grad_accum=2),
    _case("gpt2", loop=LIGHTNING, max_grad_norm=1.0, optim="adamw_torch_foreach", slow=True),
    _case("t5", loop=LIGHTNING, zero_grad="zero", slow=True),
    _case("llama-gqa", loop=LIGHTNING, precision="bf16", checkpointing="full"),
    _case("llama", loop=LIGHTNING, precision="bf16", grad_accum=3, dtype="bfloat16", slow=True),
    _case("vit", loop=LIGHTNING, optim="none", slow=True),
    # optimizers
    _case("bert", optim="sgd_momentum_loop"),
    _case("bert", optim="adamw_torch_foreach", max_grad_norm=1.0),
    _case("bert", optim="adagrad_loop"),
    _case("bert", optim="nadam"),
    _case("bert", optim="adafactor_torch", slow=True),
    _case("bert", optim="adafactor", loop=TRAINER, slow=True),
    _case("bert", optim="none"),
    _case("bert", optim="sgd_loop", weight_decay=0.1),
    _case("bert", optim="adam_loop", weight_decay=0.1, loop=TRAINER),
    _case("llama", optim="muon", slow=True),
    # checkpointing, frozen weights, half weights, eager attention
    _case("llama", checkpointing="full"),
    _case("llama", checkpointing="full", use_reentrant=True, loop=TRAINER),
    _case("llama", checkpointing="selective"),
    _case("gpt2", checkpointing="selective", slow=True),
    _case("llama-gqa", precision="bf16", checkpointing="selective", loop=TRAINER, slow=True),
    _case("qwen3_moe", dtype="bfloat16", checkpointing="selective", slow=True),
    _case("bert", checkpointing="full", use_reentrant=True, slow=True),
    _case("llama", freeze=("embed", "layers.[01]")),
    _case("bert", dtype="bfloat16", slow=True),
    _case("t5", dtype="bfloat16", loop=TRAINER, slow=True),
    _case("gpt2", attn_implementation="eager"),
    _case("llama", attn_implementation="eager", padded=True),
    # noise on the embeddings, by the hook that the Trainer registers
    _case("llama", neftune_noise_alpha=5.0, loop=TRAINER),
    _case("gpt2", neftune_noise_alpha=5.0, checkpointing="full", use_reentrant=True, slow=True),
    _case("bert", neftune_noise_alpha=0.0, dtype="bfloat16", slow=True),
    # autocast, with the CPU's lists: casts, cache and recompute are the same code as CUDA's
    _case("bert", precision="bf16", loop=ACCELERATE, slow=True),
    _case("llama-gqa", precision="bf16", checkpointing="full", loop=TRAINER, slow=True),
    _case("llama-gqa", precision="bf16", checkpointing="full", use_reentrant=True, slow=True),
    _case("llama", precision="bf16", freeze=("layers.0", "embed"), loop=TRAINER, slow=True),
    _case("t5", precision="bf16", grad_accum=2, loop=ACCELERATE, slow=True),
    _case("clip", precision="bf16", slow=True),
]


@pytest.mark.parametrize(("model", "setup"), CASES)
def test_step_allocates_what_a_real_one_does(model, setup):
    check_step(model, setup)


@pytest.mark.parametrize("model", ["yolos", pytest.param("detr", marks=pytest.mark.slow)])
def test_step_of_a_detector_allocates_what_a_real_one_does(model):
    """Its labels are dicts in a list, which a run puts together as it calls the model."""

    @contextmanager
    def nesting(twins):
        def nest(_module, args, batch):
            return args, nested(batch)

        models = twins.real, twins.built_model.model
        hooks = [each.register_forward_pre_hook(nest, with_kwargs=True) for each in models]
        yield
        for hook in hooks:
            hook.remove()

    check_step(model, {"loop": PLAIN, "attn_implementation": "eager"}, around=nesting)


LIBRARIES = [
    ("galore_torch", "galore_adamw", "all-linear"),
    ("galore_torch", "galore_adafactor", ".*mlp.*"),
    ("apollo_torch", "apollo_adamw", ("attn", "mlp")),
    ("schedulefree", "schedule_free_adamw", ()),
    ("schedulefree", "schedule_free_radam", ()),
    ("schedulefree", "schedule_free_sgd", ()),
]


@pytest.mark.slow(
    but=(
        "apollo_torch-apollo_adamw-targets2-float32",
        "schedulefree-schedule_free_adamw-targets3-float32",
        "schedulefree-schedule_free_radam-targets4-float32",
        "schedulefree-schedule_free_sgd-targets5-float32",
    )
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("library", "optim", "targets"), LIBRARIES)
def test_step_of_a_library_allocates_what_a_real_one_does(library, optim, targets, dtype):
    pytest.importorskip(library)
    check_step(
        "llama", {"optim": optim, "optim_target_modules": targets, "dtype": dtype, "loop": PLAIN}
    )


IN_BACKWARD = [
    ("llama", {"optim": "lomo", "loop": PLAIN}),
    ("llama", {"optim": "lomo", "loop": TRAINER, "grad_accum": 2}),
    ("gpt2", {"optim": "lomo", "loop": PLAIN, "checkpointing": "full"}),
    ("bert", {"optim": "adalomo", "loop": PLAIN}),
    ("llama", {"optim": "adalomo", "loop": ACCELERATE, "dtype": "bfloat16"}),
    ("llama", {"optim": "galore_adamw_layerwise", "loop": TRAINER}),
    ("llama", {"optim": "apollo_adamw_layerwise", "loop": TRAINER, "dtype": "bfloat16"}),
    ("bert", {"optim": "adamw_torch_loop", "loop": PLAIN}),
    ("llama-tied", {"optim": "sgd_momentum_loop", "loop": PLAIN, "weight_decay": 0.1}),
    ("t5", {"optim": "adamw_torch_fused", "loop": ACCELERATE}),
    ("llama", {"optim": "adafactor", "loop": PLAIN, "checkpointing": "full"}),
    ("bert", {"optim": "adamw_torch_loop", "loop": PLAIN, "freeze": ("embeddings",)}),
    ("vit", {"optim": "adamw_torch_loop", "loop": PLAIN}),
]


@pytest.mark.slow(
    but=(
        "llama-{'optim': 'lomo', 'loop': 'plain'}",
        "bert-{'optim': 'adamw_torch_loop', 'loop': 'plain'}",
        "llama-tied-{'optim': 'sgd_momentum_loop', 'loop': 'plain', 'weight_decay': 0.1}",
        "bert-{'optim': 'adamw_torch_loop', 'loop': 'plain', 'freeze': ('embeddings',)}",
        "vit-{'optim': 'adamw_torch_loop', 'loop': 'plain'}",
    )
)
@pytest.mark.parametrize(("model", "setup"), IN_BACKWARD, ids=str)
def test_step_in_backward_allocates_what_a_real_one_does(model, setup):
    """Each gradient lives until its parameter is updated, as the hooks of a real run have it."""
    facts = OPTIMIZER_FACTS[setup["optim"]]
    if facts.package:
        pytest.importorskip(facts.module)
    if facts.targets:
        setup = {**setup, "optim_target_modules": "all-linear"}
    if not facts.layerwise:
        setup = {**setup, "optim_in_backward": True}
    check_step(model, setup)


@pytest.mark.slow("llama-setup4", "gemma2-setup7")
@pytest.mark.parametrize(
    ("model", "setup"),
    [
        ("bert", {}),
        ("albert", {}),
        ("distilbert", {}),
        ("opt", {}),
        ("llama", {"grad_accum": 2}),
        ("llama", {"grad_accum": 2, "loop": LIGHTNING}),
        ("llama-gqa", {}),
        ("gemma2", {}),
        ("gpt_neox", {}),
        ("gpt_neox", {"attn_implementation": "eager"}),
    ],
)
def test_every_allocation_is_the_same_and_in_the_same_order(model, setup):
    check_order(model, {"loop": PLAIN, **setup}, count=200)


def test_the_harness_sees_an_allocation_that_lives_for_an_instant():
    def step():
        mark("forward 1 1")
        x = torch.zeros(1000)
        torch.ones(500_000)
        mark("backward 1 1")
        del x
        mark("end 0 0")

    run = measure(step)

    assert [(p.name, p.alive, p.peak) for p in run.phases] == [
        ("forward 1 1", 0, 2_004_000),
        ("backward 1 1", 4000, 4000),
    ]
