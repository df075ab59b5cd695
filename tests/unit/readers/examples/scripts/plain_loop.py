raise SystemExit("this file is data: it must never run")
# ruff: noqa: B007
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

checkpoint = "bert-large-uncased"
BATCH = 8
raw = load_dataset("yelp_review_full")
tokenizer = AutoTokenizer.from_pretrained(checkpoint)


def tokenize(examples):
    return tokenizer(examples["text"], padding="max_length", truncation=True, max_length=512)


ds = raw.map(tokenize, batched=True)
train_dataloader = DataLoader(ds["train"], shuffle=True, batch_size=BATCH)
eval_dataloader = DataLoader(ds["test"], batch_size=BATCH * 2)
model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
num_epochs = 3
lr_scheduler = get_scheduler(
    "linear",
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=num_epochs * len(train_dataloader),
)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model.to(device)
model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
