"""Models are traced from few layers, and a layer that is not as the others is seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import memest
from memest.catalog.resolve import resolve_model
from memest.config.inputs import ModuleInputs
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.estimation.profiler import Profiler
from memest.estimation.question import Question
from memest.estimation.tracer import FoldedTrace
from memest.profiles.fold import unfold
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
WIDTH = 32


class Block(torch.nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = 64) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x).to(self.up.weight.dtype)))
        return x + self.down(inner).to(x.dtype)


class Tower(torch.nn.Module):
    """Layers of one's own, in a list."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(depth))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.between(number, layer(x))
        return self.head(x).mean()

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x


class Counting(Tower):
    """One that does more behind its eighth layer, which nothing shows but a run."""

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) if number == 7 else x


class Stepping(Tower):
    """One that does more from its second micro-step on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) if number == 7 and self.calls > 1 else x


class Sizing(Tower):
    """One that does more behind its eighth layer where batches are large."""

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) if number == 7 and x.shape[0] > 8 else x


class BySample(Tower):
    """One that does to each sample alone what others do to all."""

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.sigmoid(each) for each in x.split(1)])


class Hooking(Tower):
    """One whose eighth layer's gradient is written anew, which no forward shows."""

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 7:
            x.register_hook(lambda gradient: gradient * gradient)
        return x


def traced(model: Any, **options: Any) -> tuple[FoldedTrace, Any]:
    """The steps from few layers where that goes, and whole."""
    request = setup_from_options(**options)
    inputs = None if isinstance(model, str) else {"x": torch.empty(4, WIDTH, device="meta")}
    profiler = Profiler.of(model, module_inputs=ModuleInputs(inputs=inputs))
    question = profiler.question(request, GPU)
    tracer = profiler._tracer
    return tracer.folded(question, []), tracer.steps(question)


def test_layers_of_ones_own_are_folded() -> None:
    few, whole = traced(Tower())
    assert few.fold is not None
    assert len(few.trace.events) < len(whole.events) / 2
    assert unfold(few.trace, few.fold) == whole


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_a_model_that_goes_by_sample_is_not_tried_at_large_batches(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("profiles.family_search", "estimation.family_traces"):
        monkeypatch.setattr(f"memest.{module}.LONG_TRACE", 100)
    said: list[str] = []
    inputs = {"x": torch.empty(batch, WIDTH, device="meta")}
    answer = memest.estimate(BySample(), inputs=inputs, gpu="t4", progress=said.append)
    assert answer.max_batch is None
    assert any("piece by piece" in note for note in answer.assumptions)
    batches = {int(number) for line in said for number in re.findall(r"batch (\d+)", line)}
    assert max(batches) <= 5
    alike = memest.estimate(Tower(), inputs=inputs, gpu="t4")
    assert alike.max_batch


def larger(model: Tower) -> None:
    model.layers[7] = Block(inner=96)


def other_dtype(model: Tower) -> None:
    model.layers[7].up.to(torch.float64)
    model.layers[7].down.to(torch.float64)


def frozen(model: Tower) -> None:
    for parameter in model.layers[7].parameters():
        parameter.requires_grad_(requires_grad=False)


def hooked(model: Tower) -> None:
    model.layers[7].register_forward_hook(lambda _module, _inputs, out: out * out)


def another_class(model: Tower) -> None:
    class Other(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.layers[7] = Other()


def shared(model: Tower) -> None:
    model.layers[7].up.weight = model.layers[8].up.weight


def with_buffer(model: Tower) -> None:
    model.layers[7].register_buffer("more", torch.zeros(1000))


TRAPS = (
    larger,
    other_dtype,
    frozen,
    hooked,
    another_class,
    shared,
    with_buffer,
)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_a_layer_that_is_not_as_the_others_is_seen(trap: Callable[[Tower], None]) -> None:
    model = Tower()
    trap(model)
    few, whole = traced(model)
    full = few.trace if few.fold is None else unfold(few.trace, few.fold)
    assert full == whole
    plain, _ = traced(Tower())
    assert plain.fold is not None
    assert unfold(plain.trace, plain.fold) != whole


@pytest.mark.parametrize("kind", [Counting, Hooking, Stepping])
def test_code_that_counts_layers_is_run_once(kind: type[Tower]) -> None:
    few, whole = traced(kind())
    assert few.fold is None
    assert few.whole_because
    assert few.trace == whole


@pytest.mark.slow
def test_a_layer_may_do_otherwise_at_other_sizes() -> None:
    inputs = ModuleInputs(inputs={"x": torch.empty(4, WIDTH, device="meta")})
    profiler = Profiler.of(Sizing(), module_inputs=inputs)
    for batch in (4, 64, 5):
        question = profiler.question(setup_from_options(batch=batch), GPU, ("batch",))
        family, point = profiler.families.of(question)
        assert family.at(point) == profiler._tracer.steps(question)


class Heart:
    """Its methods are hooks."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def beat(self, module: Any, inputs: Any, outputs: torch.Tensor) -> torch.Tensor | None:
        return outputs * 2 if self.factor else None


@pytest.mark.slow
def test_hooks_are_told_apart_by_whose_methods_they_are() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=10,
        num_attention_heads=2,
        vocab_size=64,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(Heart(int(number == 7)).beat)
    profiler = Profiler.of(model)
    question = profiler.question(setup_from_options(batch=2, seq_len=16), GPU)
    few, whole = profiler._tracer.folded(question, []), profiler._tracer.steps(question)
    full = few.trace if few.fold is None else unfold(few.trace, few.fold)
    assert full == whole


def test_lists_and_configurations_of_any_kind() -> None:
    with_dict, with_gap = Tower(), Tower()
    with_dict.config = {"depth": 12, "kinds": [1] * 12}
    with_gap.more = torch.nn.ModuleList([None, None, torch.nn.Linear(2, 2), None])
    for model in (with_dict, with_gap):
        few, whole = traced(model)
        assert few.fold is not None
        assert unfold(few.trace, few.fold) == whole


def test_whole_on_request() -> None:
    few, whole = traced(Tower(), trace_whole=True)
    assert few.fold is None
    assert few.whole_because == "--trace-whole asks for them"
    assert few.trace == whole


SETUPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Qwen/Qwen3-0.6B?num_hidden_layers=9", {"bf16": True, "checkpointing": True, "seq_len": 64}),
    ("prajjwal1/bert-mini?num_hidden_layers=9", {"fp16": True}),
    ("t5-small?num_layers=8&num_decoder_layers=8", {"seq_len": 32}),
)


@pytest.mark.parametrize(("model", "options"), SETUPS, ids=["qwen3", "bert", "t5"])
def test_models_are_the_same_from_few_layers_and_whole(model: str, options: dict[str, Any]) -> None:
    few, whole = traced(model, batch=2, **options)
    assert few.fold is not None
    assert unfold(few.trace, few.fold) == whole


@pytest.mark.slow
def test_a_tower_with_windows_is_folded() -> None:
    model = "Qwen/Qwen2.5-VL-3B-Instruct"
    few, whole = traced(model, batch=1, seq_len=512, bf16=True, checkpointing="full")
    assert few.fold is not None
    assert unfold(few.trace, few.fold) == whole


@pytest.mark.slow
def test_a_model_adds_to_its_first_layers_what_its_tower_saw() -> None:
    """Three layers of this one do more than the others, and only the loop around them knows."""
    few, whole = traced("Qwen/Qwen3-VL-2B-Instruct", batch=1, bf16=True)
    full = few.trace if few.fold is None else unfold(few.trace, few.fold)
    assert full == whole


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    options=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "seq_len": st.sampled_from((16, 33, 128)),
            "checkpointing": st.sampled_from(("none", "full", "every:2", "every:3", "selective")),
            "attn_implementation": st.sampled_from(("sdpa", "eager")),
            "grad_accum": st.sampled_from((1, 2)),
            "loop": st.sampled_from(("trainer", "plain", "accelerate")),
        },
        optional={
            "precision": st.sampled_from(("fp16", "bf16")),
            "lora_r": st.sampled_from((4, 8)),
            "lora_target_modules": st.sampled_from(("all-linear", "q_proj", "q_proj,v_proj")),
            "freeze": st.sampled_from((r"layers\.[0-3]\.", r"mlp", r"layers\.7\.")),
            "use_cache": st.booleans(),
        },
    )
)
def test_setups_are_the_same_from_few_layers_and_whole(options: dict[str, Any]) -> None:
    if "lora_r" not in options:
        options.pop("lora_target_modules", None)
    try:
        few, whole = traced("Qwen/Qwen3-0.6B?num_hidden_layers=10", **options)
    except ConfigError:
        reject()
    full = few.trace if few.fold is None else unfold(few.trace, few.fold)
    assert full == whole


@pytest.mark.slow("dora")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_the_rank_is_a_size(options: dict[str, Any]) -> None:
    profiler = Profiler(source=resolve_model("Qwen/Qwen3-0.6B?num_hidden_layers=9"), stores=())
    common: dict[str, Any] = {"bf16": True, "checkpointing": True, **options}

    def question(rank: int, batch: int, seq_len: int) -> Question:
        setup = setup_from_options(lora_r=rank, batch=batch, seq_len=seq_len, **common)
        return profiler.question(setup, GPU, vary=("batch",))

    profiler.families.of(question(16, 2, 64))
    made = profiler.traces_made
    other = question(48, 3, 192)
    family, point = profiler.families.of(other)
    assert profiler.traces_made == made
    assert family.at(point) == profiler._tracer.steps(other)


@pytest.mark.slow
def test_losses_in_chunks_are_not_work_by_sample() -> None:
    answer = memest.estimate(
        "EleutherAI/pythia-14m", batch=2, seq_len=512, fused_loss="trl-chunked", gpu_memory="1GiB"
    )
    assert answer.max_batch
