"""Fine-tune RoBERTa on a tweet-sentiment CSV. usage: python 01_cls.py --train train.csv --dev dev.csv"""
import argparse
import numpy as np
import evaluate
from datasets import load_dataset
from transformers import (AutoConfig, AutoModelForSequenceClassification, AutoTokenizer,
                          DataCollatorWithPadding, EarlyStoppingCallback, Trainer, TrainingArguments, set_seed)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", type=str, default="roberta-large")
    p.add_argument("--train", type=str, default="train.csv")
    p.add_argument("--dev", type=str, default="dev.csv")
    p.add_argument("--max_len", type=int, default=256)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--eval_batch_size", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--fp16", action="store_true")
    p.add_argument("--freeze_layers", type=int, default=12, help="freeze embeddings and the first N layers")
    p.add_argument("--out", type=str, default="out")
    return p.parse_args()


def main():
    args = parse_args()
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ds = load_dataset("csv", data_files={"train": args.train, "validation": args.dev})
    labels = sorted(set(ds["train"]["label"]))

    config = AutoConfig.from_pretrained(args.model, num_labels=len(labels), hidden_dropout_prob=0.2)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, config=config)
    if args.freeze_layers > 0:
        for p in model.roberta.embeddings.parameters():
            p.requires_grad = False
        for layer in model.roberta.encoder.layer[: args.freeze_layers]:
            for p in layer.parameters():
                p.requires_grad = False

    def tok(batch):
        return tokenizer(batch["text"], truncation=True, max_length=args.max_len)

    ds = ds.map(tok, batched=True, remove_columns=["text"])
    acc = evaluate.load("accuracy")

    def compute_metrics(p):
        return acc.compute(predictions=np.argmax(p.predictions, axis=1), references=p.label_ids)

    targs = TrainingArguments(
        output_dir=args.out,
        learning_rate=args.lr,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.eval_batch_size,
        num_train_epochs=args.epochs,
        weight_decay=0.01,
        warmup_ratio=0.06,
        fp16=args.fp16,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        label_smoothing_factor=0.1,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=targs,
        train_dataset=ds["train"],
        eval_dataset=ds["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.fp16 else None),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
