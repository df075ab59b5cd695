import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="mistralai/Mistral-7B-v0.3",
    args=SFTConfig(output_dir="out", max_length=1024, per_device_train_batch_size=1, gradient_accumulation_steps=8,
                   model_init_kwargs={"dtype": torch.bfloat16}, bf16=True, optim="adamw_torch", loss_type="nll"),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                           bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True),
    peft_config=LoraConfig(r=128, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
