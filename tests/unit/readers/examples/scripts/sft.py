raise SystemExit("this file is data: it must never run")
# ruff: noqa: C408
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
common = dict(logging_steps=10, learning_rate=1e-4)

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=SFTConfig(
        output_dir="Qwen2.5-0.5B-SFT",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_length=2048,
        packing=True,
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
        **common,
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=32, lora_alpha=16, target_modules="all-linear"),
)
trainer.train()
