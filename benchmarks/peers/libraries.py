"""Peers that are libraries, asked as their documentation says, offline."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from memest.config.setup import Task
from peers.question import NotForThisError, Question

__all__ = ["accelerate_estimate", "fitcheck", "mem_tracker"]

_AUTO = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
}
_OPTIMIZERS = {
    "adam": "Adam", "adamw_torch": "AdamW", "adamw_hf": "AdamW", "adamw_torch_loop": "AdamW",
    "adamw_torch_fused": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad",
    "adafactor_torch": "Adafactor",
}  # fmt: skip


def _model(q: Question, dtype: str) -> Any:
    import torch
    import transformers

    if q.record.code or "model_type" not in q.config:
        raise NotForThisError("models of transformers only")
    name = _AUTO.get(q.setup.task)
    if name is None:
        raise NotForThisError(f"no head for {q.setup.task.value} here")
    kind = q.config["model_type"]
    values = {k: v for k, v in q.config.items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **values)
    weights = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return getattr(transformers, name).from_config(config, dtype=weights or torch.float32)


def accelerate_estimate(q: Question) -> int:
    """What ``accelerate estimate-memory`` prints as training with Adam: the largest stage.

    It counts from the weights in float32, whatever dtype it is asked about.
    """
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    q.must_be()
    with torch.device("meta"):
        model = _model(q, "float32")
    total, _ = calculate_maximum_sizes(model)
    kind = {"": "float32", "fp16": "float16", "bf16": "bfloat16"}[q.half]
    return max(estimate_training_usage(total, kind).values())


def mem_tracker(q: Question) -> int:
    """Peak of PyTorch's MemTracker over two steps under FakeTensorMode."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    q.must_be()
    name = _OPTIMIZERS.get(q.setup.optim)
    if name is None:
        raise NotForThisError(f"no step of the optimizer {q.setup.optim} here")
    batch, length = q.setup.batch or 1, q.length
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(q, q.setup.dtype.value).train()
        if q.checkpointed:
            model.gradient_checkpointing_enable()
        more = {} if name == "Adafactor" else {"foreach": q.setup.optim != "adamw_hf"}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **more)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                for _ in range(q.setup.grad_accum):
                    tracker.reset_mod_stats()
                    ids = torch.ones(batch, length, dtype=torch.int64)
                    labels = ids
                    if q.setup.task is Task.SEQUENCE_CLASSIFICATION:
                        labels = torch.zeros(batch, dtype=torch.int64)
                    kind = {"fp16": torch.float16}.get(q.setup.precision.value, torch.bfloat16)
                    with torch.autocast("cpu", kind, enabled=q.setup.precision.value != "fp32"):
                        # scripts keep a step's outputs until the next one's are there
                        outputs = model(input_ids=ids, labels=labels)
                    outputs.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks = tracker.get_tracker_snapshot("peak")
    return int(sum(device["Total"] for device in peaks.values()))


def fitcheck(q: Question) -> int:
    """fitcheck-llm's total, from the model's own config.json."""
    try:
        from fitcheck import GPU_DB, TrainingConfig, config_parser, estimate
    except ImportError:
        raise NotForThisError("fitcheck-llm is not installed") from None
    if q.config.get("model_type") in ("bert", "t5"):
        raise NotForThisError("decoders only")
    q.must_be(full=False)
    rank, targets = _lora(q)
    more = {} if targets is None else {"lora_targets": targets}
    keys = {"RTX 3060": "3060-12", "RTX 3090": "3090", "A100-SXM4-40GB": "a100-40"}
    optimizer = {"sgd": "sgd", "adafactor_torch": "adafactor"}.get(q.setup.optim, "adamw")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(q.config), encoding="utf-8")
        downloads = config_parser.hf_hub_download, config_parser._reported_param_count
        config_parser.hf_hub_download = lambda **_: str(path)
        config_parser._reported_param_count = lambda *_: q.parameters
        try:
            config = config_parser.fetch_model_config(q.record.model)
            training = TrainingConfig(
                precision=q.half or "fp32", optimizer=optimizer, batch_size=q.setup.batch or 1,
                seq_len=q.length, lora_rank=rank, grad_checkpoint=q.checkpointed,
                grad_accum_steps=q.setup.grad_accum, quantization=_quantization(q),
                double_quant=q.setup.quantization is not None and q.setup.quantization.double_quant,
                **more,
            )  # fmt: skip
            gpu = GPU_DB[keys.get(q.record.gpu, "3060-12")]
            return round(estimate(config, training, gpu).total_mib * (1 << 20))
        except ValueError as error:
            raise NotForThisError(str(error).partition(". ")[0]) from None
        finally:
            config_parser.hf_hub_download, config_parser._reported_param_count = downloads


def _lora(q: Question) -> tuple[int | None, list[str] | None]:
    """The rank and the layers of LoRA adapters; no rank for full fine-tuning."""
    adapter = q.setup.adapter
    if adapter is None:
        return None, None
    if adapter.method != "lora":
        raise NotForThisError("no adapters but LoRA")
    targets = adapter.settings.get("target_modules")
    return adapter.settings.get("r", 8), targets if isinstance(targets, list) else None


def _quantization(q: Question) -> str:
    """fitcheck-llm's name of how the base is stored."""
    base = q.setup.quantization
    if base is None:
        return "none"
    names = {"bnb-4bit": base.quant_type, "bnb-8bit": "int8"}
    if names.get(base.format.value) not in ("nf4", "int8"):
        raise NotForThisError("no quantised bases but NF4 and int8")
    return names[base.format.value]
