import torch
from datasets import load_dataset
from torch.cuda.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (AutoModelForQuestionAnswering, AutoTokenizer, default_data_collator,
                          get_linear_schedule_with_warmup)

MODEL_NAME = "bert-large-uncased"
MAX_LENGTH = 384
STRIDE = 128
TRAIN_BS = 12
VALID_BS = 32
ACCUM = 2
EPOCHS = 2

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(MODEL_NAME)
model = AutoModelForQuestionAnswering.from_pretrained(MODEL_NAME).to(device)

squad = load_dataset("squad")


def prepare(examples):
    tok = tokenizer(examples["question"], examples["context"], truncation="only_second", max_length=MAX_LENGTH,
                    stride=STRIDE, return_overflowing_tokens=True, return_offsets_mapping=True,
                    padding="max_length")
    sample_map = tok.pop("overflow_to_sample_mapping")
    offsets = tok.pop("offset_mapping")
    starts, ends = [], []
    for i, off in enumerate(offsets):
        ans = examples["answers"][sample_map[i]]
        s = ans["answer_start"][0]
        e = s + len(ans["text"][0])
        ids = [k for k, (a, b) in enumerate(off) if a <= s < b or a < e <= b]
        starts.append(ids[0] if ids else 0)
        ends.append(ids[-1] if ids else 0)
    tok["start_positions"], tok["end_positions"] = starts, ends
    return tok


train = squad["train"].map(prepare, batched=True, remove_columns=squad["train"].column_names)
valid = squad["validation"].map(prepare, batched=True, remove_columns=squad["validation"].column_names)
train_loader = DataLoader(train, batch_size=TRAIN_BS, shuffle=True, collate_fn=default_data_collator,
                          num_workers=4, pin_memory=True)
valid_loader = DataLoader(valid, batch_size=VALID_BS, collate_fn=default_data_collator)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.01)
total = len(train_loader) // ACCUM * EPOCHS
scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total)
scaler = GradScaler()

for epoch in range(EPOCHS):
    model.train()
    optimizer.zero_grad()
    for step, batch in enumerate(tqdm(train_loader)):
        batch = {k: v.to(device) for k, v in batch.items()}
        with autocast():
            outputs = model(**batch)
            loss = outputs.loss / ACCUM
        scaler.scale(loss).backward()
        if (step + 1) % ACCUM == 0:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    val_loss = 0.0
    start_logits, end_logits = [], []
    for batch in valid_loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            out = model(**batch)
        val_loss += out.loss.item()
        start_logits.append(out.start_logits.cpu())
        end_logits.append(out.end_logits.cpu())
    print(epoch, val_loss / len(valid_loader))
    torch.save(model.state_dict(), f"bert_squad_{epoch}.pt")
