import argparse
from dataclasses import dataclass, asdict, field

import numpy as np
from datasets import load_dataset
from transformers import (AutoConfig, AutoModelForSequenceClassification, AutoTokenizer,
                          DataCollatorWithPadding, Trainer, TrainingArguments, set_seed)


@dataclass
class Cfg:
    model_name: str = "roberta-large"
    max_len: int = 384
    bs: int = 12
    accum: int = 2
    optim: str = "adafactor"
    fp16: bool = True
    train_kwargs: dict = field(default_factory=lambda: {"gradient_checkpointing": True,
                                                        "gradient_checkpointing_kwargs": {"use_reentrant": False}})


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--freeze_layers", type=int, default=12)
    parser.add_argument("--num-labels", dest="nl", type=int, default=28)
    parser.add_argument("--eval_bs", type=int, default=64)
    parser.add_argument("--dynamic", action="store_true")
    return parser.parse_args()


def build_model(cfg: Cfg, n_labels: int, freeze: int):
    config = AutoConfig.from_pretrained(cfg.model_name, num_labels=n_labels, problem_type="multi_label_classification")
    model = AutoModelForSequenceClassification.from_pretrained(cfg.model_name, config=config)
    for p in model.roberta.embeddings.parameters():
        p.requires_grad = False
    for layer in model.roberta.encoder.layer[:freeze]:
        for p in layer.parameters():
            p.requires_grad = False
    return model


def compute_metrics(pred):
    logits, labels = pred
    return {"acc": ((logits > 0) == labels).mean()}


def main():
    a = parse_args()
    cfg = Cfg()
    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_name)
    ds = load_dataset("go_emotions")

    def tok(b):
        return tokenizer(b["text"], truncation=True, max_length=cfg.max_len)

    ds = ds.map(tok, batched=True)
    model = build_model(cfg, a.nl, a.freeze_layers)
    common = dict(output_dir="o", per_device_train_batch_size=cfg.bs, gradient_accumulation_steps=cfg.accum,
                  optim=cfg.optim, fp16=cfg.fp16, learning_rate=1e-5)
    common.update(cfg.train_kwargs)
    args = TrainingArguments(**common, eval_strategy="epoch", per_device_eval_batch_size=a.eval_bs, save_strategy="no",
                             torch_compile=False, group_by_length=True)
    trainer = Trainer(model=model, args=args, train_dataset=ds["train"], eval_dataset=ds["validation"],
                      data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8), compute_metrics=compute_metrics)
    trainer.train()


if __name__ == "__main__":
    main()
