import os
from dataclasses import dataclass

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training, TaskType
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

ORG = "Qwen"
SIZE = 7
MODEL_ID = f"{ORG}/Qwen2.5-{SIZE}B"
MAX_LEN = 2 ** 12
EFFECTIVE_BATCH = 32
MICRO = 2

compute_dtype = getattr(torch, "bfloat16")

bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=compute_dtype,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_storage=torch.bfloat16,
)


def load(model_id=MODEL_ID, attn="flash_attention_2"):
    model = AutoModelForCausalLM.from_pretrained(
        model_id,
        quantization_config=bnb_config,
        device_map={"": int(os.environ.get("LOCAL_RANK", 0))},
        attn_implementation=attn,
        dtype=compute_dtype,
        use_cache=False,
    )
    tok = AutoTokenizer.from_pretrained(model_id)
    tok.add_special_tokens({"additional_special_tokens": ["<tool>", "</tool>"]})
    model.resize_token_embeddings(len(tok), pad_to_multiple_of=64)
    return model, tok


model, tokenizer = load()
model = prepare_model_for_kbit_training(
    model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
)

peft_config = LoraConfig(
    task_type=TaskType.CAUSAL_LM,
    r=(rank := 64),
    lora_alpha=rank * 2,
    target_modules="all-linear",
    modules_to_save=["embed_tokens", "lm_head"],
    use_dora=True,
    lora_dropout=0.05,
    bias="none",
    init_lora_weights="pissa_niter_16",
)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()

args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=MICRO,
    gradient_accumulation_steps=EFFECTIVE_BATCH // MICRO,
    max_length=MAX_LEN,
    packing=True,
    bf16=True,
    optim="paged_adamw_32bit",
    learning_rate=2e-4,
    max_grad_norm=0.3,
    eval_strategy="steps",
    per_device_eval_batch_size=MICRO * 2,
    eval_accumulation_steps=4,
    torch_compile=False,
    loss_type="nll",
)

ds = load_dataset("HuggingFaceH4/ultrachat_200k")
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=ds["train_sft"],
    eval_dataset=ds["test_sft"],
    processing_class=tokenizer,
)
trainer.train()
