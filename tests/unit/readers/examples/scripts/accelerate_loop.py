raise SystemExit("this file is data: it must never run")
# ruff: noqa: B007
import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32


def get_dataloaders(accelerator, batch_size=16):
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    datasets = load_dataset("glue", "mrpc")

    def tokenize_function(examples):
        return tokenizer(
            examples["sentence1"], examples["sentence2"], truncation=True, max_length=128
        )

    with accelerator.main_process_first():
        tokenized = datasets.map(tokenize_function, batched=True)

    def collate_fn(examples):
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    train = DataLoader(
        tokenized["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    test = DataLoader(tokenized["validation"], collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train, test


def training_function(config):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, int(config["batch_size"]))
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", return_dict=True)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    metric = evaluate.load("glue", "mrpc")
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                output = model(**batch)
                accelerator.backward(output.loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            metric.add_batch(predictions=outputs.logits.argmax(dim=-1), references=batch["labels"])


def main():
    config = {"lr": 2e-5, "num_epochs": 3, "seed": 42, "batch_size": MAX_GPU_BATCH_SIZE}
    training_function(config)


if __name__ == "__main__":
    main()
