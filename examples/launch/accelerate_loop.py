"""Named entities with BERT in a loop of one's own, prepared by Accelerate.

memest fits examples/launch/accelerate_loop.py --gpu t4
accelerate launch examples/launch/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, AutoTokenizer

MODEL = "bert-base-cased"
LENGTH = 128


def rows(split):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def tokenize(row):
        words = tokenizer(
            row["tokens"],
            is_split_into_words=True,
            truncation=True,
            padding="max_length",
            max_length=LENGTH,
        )
        tags = [-100 if at is None else row["ner_tags"][at] for at in words.word_ids()]
        return {**words, "labels": tags}

    read = load_dataset("conll2003", split=split)
    return read.map(tokenize, remove_columns=read.column_names).with_format("torch")


def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    loader = DataLoader(rows("train"), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
