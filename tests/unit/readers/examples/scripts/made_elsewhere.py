raise SystemExit("this file is data: it must never run")
from models import build_model
from transformers import Trainer, TrainingArguments

model = build_model("large")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, bf16=True)
trainer = Trainer(model=model, args=args)
trainer.train()
