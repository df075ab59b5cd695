import copy
import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

TEACHER = "bert-large-uncased"
STUDENT = "distilbert-base-uncased"
NUM_LABELS = 77
device = torch.device("cuda")

student = AutoModelForSequenceClassification.from_pretrained(STUDENT, num_labels=NUM_LABELS).to(device)
teacher = AutoModelForSequenceClassification.from_pretrained(TEACHER, num_labels=NUM_LABELS).to(device)
teacher.eval()
for p in teacher.parameters():
    p.requires_grad = False

ema = copy.deepcopy(student).to(device)
for p in ema.parameters():
    p.requires_grad_(False)

for name, param in student.named_parameters():
    if "embeddings" in name:
        param.requires_grad = False

tokenizer = AutoTokenizer.from_pretrained(STUDENT)


def collate(batch):
    texts, labels = zip(*batch)
    enc = tokenizer(list(texts), padding="max_length", truncation=True, max_length=256, return_tensors="pt")
    enc["labels"] = torch.tensor(labels)
    return enc


train_loader = DataLoader(train_ds, batch_size=48, shuffle=True, collate_fn=collate, num_workers=4, pin_memory=True)
optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=5e-5, weight_decay=0.01, foreach=False)
scheduler = get_linear_schedule_with_warmup(optimizer, 100, 10000)
scaler = GradScaler()
accum = 4
T = 2.0

student.train()
for epoch in range(3):
    for step, batch in enumerate(train_loader):
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        with autocast(dtype=torch.float16):
            with torch.no_grad():
                t_logits = teacher(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            out = student(**batch)
            kd = F.kl_div(F.log_softmax(out.logits / T, -1), F.softmax(t_logits / T, -1), reduction="batchmean") * T * T
            loss = (0.5 * out.loss + 0.5 * kd) / accum
        scaler.scale(loss).backward()
        if (step + 1) % accum == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), student.parameters()):
                    e.mul_(0.999).add_(p, alpha=0.001)
