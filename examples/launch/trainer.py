"""Sentiment with DistilBERT and transformers' Trainer.

memest fits examples/launch/trainer.py --gpu t4 && python examples/launch/trainer.py
"""

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

MODEL = "distilbert-base-uncased"
LENGTH = 256

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, padding="max_length", max_length=LENGTH)


reviews = load_dataset("imdb", split="train").map(tokenize, batched=True)

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=32,
        fp16=True,
        num_train_epochs=1,
    ),
    train_dataset=reviews,
)
trainer.train()
