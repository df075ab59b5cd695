"""Sentiment with BERT in Lightning.

memest fits examples/launch/lightning_module.py --gpu t4

What the Trainer is told is read, and the module: its model, whose loss is all that the step
returns. examples/lightning_callback.py predicts this very module before its first step, and
measures beside it.
"""

import lightning
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = "bert-base-uncased"
LENGTH = 256


class Sentiment(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)
        self.model.train()  # from_pretrained leaves it in eval mode, and Lightning does not ask

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-5)


def rows():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def tokenize(row):
        words = tokenizer(row["text"], truncation=True, padding="max_length", max_length=LENGTH)
        return {**words, "labels": row["label"]}

    read = load_dataset("imdb", split="train")
    return read.map(tokenize, remove_columns=read.column_names).with_format("torch")


def main():
    trainer = lightning.Trainer(
        max_epochs=1, precision="16-mixed", accumulate_grad_batches=2, gradient_clip_val=1.0
    )
    trainer.fit(Sentiment(), DataLoader(rows(), batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
