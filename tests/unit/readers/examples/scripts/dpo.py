raise SystemExit("this file is data: it must never run")
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name = "Qwen/Qwen2.5-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
ref_model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(name)
train_dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")

training_args = DPOConfig(
    output_dir="dpo", per_device_train_batch_size=2, max_length=1024, beta=0.1, bf16=True
)
trainer = DPOTrainer(
    model=model,
    ref_model=ref_model,
    args=training_args,
    processing_class=tokenizer,
    train_dataset=train_dataset,
)
trainer.train()
