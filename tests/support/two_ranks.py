"""A Trainer on two processes of this machine; run by torchrun, prints what each rank saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers

from memest.calibration.live import MemestCallback, counters
from memest.calibration.measurement import Environment, MemoryReading, StepReading


class Fake:
    """Counters of a rank: rank 1 needs more."""

    gpu, total_bytes = "Tesla T4", 15_828_320_256

    def __init__(self):
        self.rank = int(os.environ["RANK"])

    def environment(self):
        return Environment(gpu=self.gpu, meter="process")

    def reset(self):
        pass

    first = None

    def read(self, name):
        return MemoryReading(name=name, process_bytes=(900 + self.rank) << 20)

    def step(self, seconds):
        size = (100 + self.rank) << 20
        return StepReading(seconds=seconds, allocated_bytes=size, reserved_bytes=2 * size)

    def reserved_peak(self):
        return 2 * (100 + self.rank) << 20

    def now(self):
        return 50 << 20, (100 + self.rank) << 20, 2 * (100 + self.rank) << 20

    def ooms(self):
        return 0


class Spy(transformers.TrainerCallback):
    def __init__(self):
        self.memest_logs = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.memest_logs.update({k: v for k, v in logs.items() if k.startswith("memest/")})


counters.open_counters = Fake
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=64,
)  # fmt: skip
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(32)]
callback, spy = MemestCallback(store=sys.argv[1]), Spy()
trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config),
    args=transformers.TrainingArguments(
        sys.argv[2], max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    ),
    train_dataset=rows, callbacks=[callback, spy],
)  # fmt: skip
trainer.train()
prediction = callback.prediction
result = {
    "rank": int(os.environ["RANK"]), "problem": callback.problem, "logs": spy.memest_logs,
    "gpus": prediction.setup.distributed.num_gpus if prediction else None,
    "measured": callback.measured.allocated_bytes,
}  # fmt: skip
Path(f"{sys.argv[3]}-{result['rank']}.json").write_text(json.dumps(result), encoding="utf-8")
