import argparse

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="google/flan-t5-large")
    parser.add_argument("--max_source_length", type=int, default=1024)
    parser.add_argument("--max_target_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"])
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.mixed_precision,
                              gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False

    raw = load_dataset("samsum")

    def pre(ex):
        inputs = tokenizer(["summarize: " + d for d in ex["dialogue"]], max_length=args.max_source_length,
                           truncation=True)
        inputs["labels"] = tokenizer(text_target=ex["summary"], max_length=args.max_target_length,
                                     truncation=True)["input_ids"]
        return inputs

    with accelerator.main_process_first():
        ds = raw.map(pre, batched=True, remove_columns=raw["train"].column_names)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100,
                                      pad_to_multiple_of=8 if accelerator.mixed_precision != "no" else None)
    train_dl = DataLoader(ds["train"], shuffle=True, collate_fn=collator,
                          batch_size=args.per_device_train_batch_size)
    eval_dl = DataLoader(ds["validation"], collate_fn=collator, batch_size=args.per_device_eval_batch_size)

    no_decay = ["bias", "LayerNorm.weight", "layer_norm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
         "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    lr_scheduler = get_scheduler("linear", optimizer, 0, args.num_train_epochs * len(train_dl))
    model, optimizer, train_dl, eval_dl, lr_scheduler = accelerator.prepare(model, optimizer, train_dl, eval_dl,
                                                                            lr_scheduler)
    rouge = evaluate.load("rouge")

    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in tqdm(train_dl, disable=not accelerator.is_local_main_process):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                gen = accelerator.unwrap_model(model).generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"],
                    max_length=args.max_target_length, num_beams=args.num_beams)
            gen = accelerator.pad_across_processes(gen, dim=1, pad_index=tokenizer.pad_token_id)
            gen = accelerator.gather_for_metrics(gen).cpu().numpy()
            rouge.add_batch(predictions=tokenizer.batch_decode(gen, skip_special_tokens=True),
                            references=[""] * len(gen))
        accelerator.print(rouge.compute())


if __name__ == "__main__":
    main()
