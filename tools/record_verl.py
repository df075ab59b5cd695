"""Record what verl's own functions allocate of a micro-batch, for ``tests/proof/test_verl.py``.

verl's ``forward_step`` with ``ppo_loss`` and ``value_loss`` run on the CPU around a small model, on
real nested tensors; flash-attn's kernel, which needs a GPU, is that of the trace. verl is not a
dependency: give this program a folder with it, ``python tools/record_verl.py FOLDER``, made by
``pip install --no-deps --target FOLDER`` of verl==0.9.1, tensordict, ray, codetiming, hydra-core,
omegaconf, antlr4-python3-runtime==4.9.3, pyvers, orjson, msgpack and torchdata.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from memest.calibration.running.cpu_memory import CpuRun, mark, measure
from memest.trace.losses import verl as ours

RECORDED = Path(__file__).parents[1] / "tests" / "proof" / "recorded_verl.json"
CASES = {
    "one sequence": {"samples": 1, "prompt": 700, "answer": 1100, "diverges": True},
    "one sequence without a divergence": {
        "samples": 1, "prompt": 700, "answer": 1100, "diverges": False,
    },
    "four sequences": {"samples": 4, "prompt": 700, "answer": 1100, "diverges": True},
    "one sequence of a critic": {"samples": 1, "prompt": 700, "answer": 1100, "values": True},
    "four sequences of a critic": {"samples": 4, "prompt": 700, "answer": 1100, "values": True},
}  # fmt: skip
_WORDS, _WIDTH = 3000, 8


class Toy(nn.Module):
    """Embeddings and a head: as much of a model as logits, or values, need."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.head = nn.Linear(_WIDTH, words, bias=words == 1)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Logits of every token."""
        return SimpleNamespace(logits=self.head(self.embed(input_ids)))


def batch_of(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch: values of nested ones."""
    samples, answer = case["samples"], case["answer"]
    length = case["prompt"] + answer
    row, answers = samples * length, samples * answer
    numbers: tuple[str, ...] = ("values", "returns")
    if not case.get("values"):
        numbers = ("old_log_probs", "advantages", *(("ref_log_prob",) * case["diverges"]))
    return {
        "prompts": torch.zeros(row - answers, dtype=torch.int64),
        "responses": torch.zeros(answers, dtype=torch.int64),
        "response_mask": torch.ones(answers, dtype=torch.int64),
        "input_ids": torch.zeros(row, dtype=torch.int64),
        "offsets": torch.arange(samples + 1) * length,
        "position_ids": torch.arange(length).repeat(samples),
        **{name: torch.zeros(answers) for name in numbers},
    }


def run(step: Any, case: dict[str, Any], prepare: Any = dict) -> CpuRun:
    """Forward and backward of a step, measured.

    Args:
        step: ``step(model, batch)``; returns the loss, and what stays until the backward is done.
        case: sizes.
        prepare: what makes the batch of the tensors of one.
    """
    torch.manual_seed(0)
    model, batch = Toy(1 if case.get("values") else _WORDS), prepare(batch_of(case))

    def once() -> None:
        mark("forward")
        nonlocal batch
        loss, kept = step(model, batch)
        del batch  # what is on the device is the step's own
        mark("backward")
        loss.backward()
        mark("rest")
        del kept

    return measure(once)


def summary(measured: CpuRun) -> dict[str, Any]:
    """Births from 2 KiB on with their phases, in order; what is alive as a phase begins, its peak.

    Which of the loss's numbers of tokens dies first where a function returns is left out.
    """
    births = [[e.phase, e.nbytes] for e in measured.events if e.nbytes >= 2048]
    return {"births": births, "phases": [[p.name, p.alive, p.peak] for p in measured.phases]}


def _nested(batch: dict[str, torch.Tensor]) -> Any:
    """A ``TensorDict`` of the same, as the actor's worker is given it."""
    tensors = importlib.import_module("verl.utils.tensordict_utils")
    samples = len(batch.pop("offsets")) - 1
    data: Any = tensors.get_tensordict(
        {
            name: torch.nested.as_nested_tensor(list(each.chunk(samples)), layout=torch.jagged)
            for name, each in batch.items()
        },
        {
            "use_remove_padding": True, "use_fused_kernels": False, "temperature": 1.0,
            "calculate_entropy": False, "dp_size": 8, "batch_num_tokens": 4096,
            "global_batch_size": 32, "max_response_len": len(batch["responses"]) // samples,
        },
    )  # fmt: skip
    return data


def _by_verl(model: Toy, data: Any) -> tuple[torch.Tensor, Any]:
    """``forward_step`` of the engine's class with its loss, as the actor's or critic's worker."""
    engine_room = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    losses = importlib.import_module("verl.workers.utils.losses")
    values = "values" in data
    kind = engine_room.FSDPEngineWithValueHead if values else engine_room.FSDPEngineWithLMHead
    engine = kind.__new__(kind)
    vars(engine).update(
        use_ulysses_sp=False, pad_to_length=False, pass_packed_cu_seqlens=False, module=model,
        _autocast_dtype=torch.float32, get_data_parallel_group=lambda: None,
    )  # fmt: skip
    config = _Config(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0,
        loss_scale_factor=None, global_batch_info={}, loss_agg_mode="token-mean",
        policy_loss={"loss_mode": "vanilla"}, entropy_coeff=0, kl_loss_coef=0.001,
        use_kl_loss="ref_log_prob" in data, kl_loss_type="low_var_kl", cliprange_value=0.5,
    )  # fmt: skip
    loss: tuple[torch.Tensor, Any]
    with (
        mock.patch.object(engine_room, "get_device_id", return_value="cpu"),
        mock.patch.object(engine_room, "get_device_name", return_value="cpu"),
        mock.patch.object(engine_room, "logprobs_from_logits", _log_probs),
    ):
        loss_of = losses.value_loss if values else losses.ppo_loss
        loss = engine.forward_step(data, partial(loss_of, config=config), False)
    return loss


class _Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def _log_probs(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """``logprobs_from_logits`` where flash-attn is."""
    assert inplace_backward
    losses, _ = ours._CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    out: torch.Tensor = -losses
    return out


def main(folder: str) -> None:
    """Write what each case allocates and frees."""
    sys.path.append(folder)
    recorded = {name: summary(run(_by_verl, case, _nested)) for name, case in CASES.items()}
    text = json.dumps(recorded, separators=(",", ":"))
    RECORDED.write_text(text + "\n", encoding="utf-8")
    for name, record in recorded.items():
        print(name, len(record["births"]))


if __name__ == "__main__":
    main(sys.argv[1])
