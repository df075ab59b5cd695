raise SystemExit("this file is data: it must never run")
import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import build_dataset


def parse_args():
    parser = argparse.ArgumentParser(description="A loop of its own")
    parser.add_argument("--model_name", type=str, default="gpt2-medium")
    parser.add_argument("-b", "--batch-size", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    model = AutoModelForCausalLM.from_pretrained(args.model_name).cuda()
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    dataset = build_dataset(
        lambda text: tokenizer(text, max_length=args.max_length, truncation=True)
    )
    loader = DataLoader(dataset, args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    model.train()
    for step, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.bf16):
            loss = model(**batch).loss / args.accumulate
        loss.backward()
        if (step + 1) % args.accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
