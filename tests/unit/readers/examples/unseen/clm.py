import math
from itertools import chain

import torch
from datasets import load_dataset
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer,
                          TrainingArguments)

MODEL = "EleutherAI/pythia-1.4b"
BLOCK = 1024

tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.float32, attn_implementation="sdpa")
model.config.use_cache = False

raw = load_dataset("wikitext", "wikitext-103-raw-v1")


def tokenize(examples):
    return tokenizer(examples["text"])


def group_texts(examples):
    concatenated = {k: list(chain(*examples[k])) for k in examples.keys()}
    total = len(concatenated[list(examples.keys())[0]])
    if total >= BLOCK:
        total = (total // BLOCK) * BLOCK
    result = {k: [t[i:i + BLOCK] for i in range(0, total, BLOCK)] for k, t in concatenated.items()}
    result["labels"] = result["input_ids"].copy()
    return result


tok = raw.map(tokenize, batched=True, num_proc=8, remove_columns=["text"])
lm = tok.map(group_texts, batched=True, num_proc=8)


def preprocess_logits_for_metrics(logits, labels):
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    return {"acc": float((preds[:, :-1] == labels[:, 1:]).mean())}


args = TrainingArguments(
    "pythia-wt103",
    per_device_train_batch_size=8,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    optim="adafactor",
    bf16=True,
    tf32=True,
    max_steps=5000,
    eval_strategy="steps",
    eval_steps=500,
    learning_rate=2e-5,
    lr_scheduler_type="cosine",
    save_total_limit=2,
    dataloader_num_workers=4,
)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=lm["train"],
    eval_dataset=lm["validation"].select(range(200)),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=preprocess_logits_for_metrics,
)
trainer.train()
print(f"ppl: {math.exp(trainer.evaluate()['eval_loss']):.2f}")
