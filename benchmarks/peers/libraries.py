"""Peers that are libraries, asked as their documentation says, offline."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from memest.setup import Task
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


def _model(q: Question) -> Any:
    import torch
    import transformers

    name = _AUTO.get(q.setup.task)
    if name is None:
        raise NotForThisError(f"no head for {q.setup.task.value} here")
    kind = q.config["model_type"]
    values = {k: v for k, v in q.config.items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **values)
    dtype = q.setup.dtype.value
    weights = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return getattr(transformers, name).from_config(config, dtype=weights or torch.float32)


def accelerate_estimate(q: Question) -> int:
    """What ``accelerate estimate-memory`` prints as training with Adam: the largest stage."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = _model(q)
    total, _ = calculate_maximum_sizes(model)
    kind = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[q.setup.precision.value]
    return max(estimate_training_usage(total, kind).values())


def mem_tracker(q: Question) -> int:
    """Peak of PyTorch's MemTracker over two steps under FakeTensorMode."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    name = _OPTIMIZERS.get(q.setup.optim)
    if name is None:
        raise NotForThisError(f"{q.setup.optim} is not PyTorch's own")
    batch, length = q.setup.batch or 1, q.length
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(q).train()
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
                    with torch.autocast("cpu", kind, enabled=q.mixed):
                        # scripts keep a step's outputs until the next one's are there
                        outputs = model(input_ids=ids, labels=labels)
                    outputs.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks = tracker.get_tracker_snapshot("peak")
    return int(sum(device["Total"] for device in peaks.values()))


def fitcheck(q: Question) -> int:
    """fitcheck-llm's total for full fine-tuning, from the model's own config.json."""
    try:
        from fitcheck import GPU_DB, TrainingConfig, config_parser, estimate
    except ImportError:
        raise NotForThisError("fitcheck-llm is not installed") from None
    if q.config.get("model_type") in ("bert", "t5"):
        raise NotForThisError("decoders only")
    precision = "fp32" if q.setup.precision.value == "fp32" else q.setup.precision.value
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
                precision=precision, optimizer=optimizer, batch_size=q.setup.batch or 1,
                seq_len=q.length, lora_rank=None, grad_checkpoint=q.checkpointed,
                grad_accum_steps=q.setup.grad_accum,
            )  # fmt: skip
            gpu = GPU_DB[keys.get(q.record.gpu, "3060-12")]
            return round(estimate(config, training, gpu).total_mib * (1 << 20))
        except ValueError as error:
            raise NotForThisError(str(error).partition(". ")[0]) from None
        finally:
            config_parser.hf_hub_download, config_parser._reported_param_count = downloads
