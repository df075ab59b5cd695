"""Training scripts with places for what a test is about."""

from pathlib import Path

import memest
from memest.readers.run_config import RunConfig

__all__ = ["LOADED", "LOOP", "STEP", "TRAINER", "read"]

TRAINER = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{before}
model = AutoModelForCausalLM.from_pretrained({model})
args = TrainingArguments("out", {arguments})
{between}
Trainer(model=model, args=args{trainer}).train()
{after}
"""
"""By transformers' Trainer."""
LOOP = """
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased").cuda()
loader = DataLoader([], batch_size=4)
optimizer = {optimizer}
for batch in loader:
{body}
"""
"""By a loop of its own."""
STEP = ["loss = model(**batch).loss", "loss.backward()", "optimizer.step()"]
"""The body of such a loop."""
LOADED = """
import copy, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("gpt2")
{}
Trainer(model, TrainingArguments("o", per_device_train_batch_size=2), train_dataset=d).train()
"""
"""By a Trainer again, from a model to which something is done before."""


def read(folder: Path, text: str) -> RunConfig:
    """What is read of a script, with samples of eight tokens."""
    path = folder / "train.py"
    path.write_text(text)
    return memest.read_config(path, seq_len=8)
