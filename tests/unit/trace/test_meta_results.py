"""What operators returned is made anew, and a trace is the same as where they all ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memest.config.options import setup_from_options
from memest.estimation.profiler import Profiler
from memest.trace.meta_results import MetaResults
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
aten = torch.ops.aten
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prajjwal1/bert-mini", {"fp16": True}),
    ("gpt2?n_layer=2", {"bf16": True, "checkpointing": True}),
    ("t5-small?num_layers=2&num_decoder_layers=2", {"bf16": True, "seq_len": 32}),
    ("openai/whisper-tiny", {"bf16": True}),
    ("Qwen/Qwen2.5-0.5B?num_hidden_layers=2", {"bf16": True, "qlora": True, "lora_r": 8}),
    ("microsoft/resnet-18", {}),
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.slow("t5", "whisper", "resnet")
@pytest.mark.parametrize(
    ("model", "options"), MODELS, ids=["bert", "gpt2", "t5", "whisper", "qlora", "resnet"]
)
def test_traces_are_those_of_operators_that_all_ran(
    model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = Profiler.of(model)
    question = profiler.question(setup_from_options(batch=2, **options), GPU)
    remembered = profiler._tracer.steps(question)

    def run(_: MetaResults, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(MetaResults, "call", run)
    assert profiler._tracer.steps(question) == remembered


def test_a_result_is_a_new_tensor_every_time() -> None:
    results = MetaResults()
    first, second = (results.call(aten.add.Tensor, (meta(3, 4), meta(4)), None) for _ in range(2))
    assert (second.shape, second.stride(), second.dtype) == (
        first.shape,
        first.stride(),
        first.dtype,
    )
    assert second.untyped_storage()._cdata != first.untyped_storage()._cdata


def test_what_is_written_into_comes_back_itself() -> None:
    results = MetaResults()
    for _ in range(2):
        tensor = meta(3, 4)
        assert results.call(aten.add_.Tensor, (tensor, meta(4)), None) is tensor


def test_what_shares_memory_is_not_made_anew() -> None:
    results = MetaResults()
    for _ in range(2):
        tensor = meta(3, 4)
        view = results.call(aten._unsafe_view.default, (tensor, [4, 3]), None)
        assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_values_on_the_host_are_computed() -> None:
    results = MetaResults()
    for number in (1, 2):
        out = results.call(aten.add.Tensor, (torch.tensor(number), torch.tensor(1)), None)
        assert out.item() == number + 1


def test_the_default_dtype_tells_results_apart() -> None:
    results, whole = MetaResults(), (meta(2, dtype=torch.int64), meta(2, dtype=torch.int64))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert results.call(aten.div.Tensor, whole, None).dtype is dtype
    finally:
        torch.set_default_dtype(before)


def test_numbers_of_other_kinds_are_other_arguments() -> None:
    results, tensor = MetaResults(), meta(2, dtype=torch.int64)
    for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
        assert results.call(aten.mul.Tensor, (tensor, number), None).dtype is dtype
