from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    model_id: str = field(default="Qwen/Qwen2.5-7B-Instruct")
    dataset_id: str = field(default="HuggingFaceH4/ultrachat_200k")
    max_length: int = field(default=4096)
    lora_r: int = field(default=32)


def main():
    (script_args,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()

    train = load_dataset(script_args.dataset_id, split="train_sft[:20000]")
    test = load_dataset(script_args.dataset_id, split="test_sft[:500]")
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_id)

    model = AutoModelForCausalLM.from_pretrained(
        script_args.model_id,
        dtype=torch.bfloat16,
        attn_implementation="flash_attention_2",
    )
    peft_config = LoraConfig(
        r=script_args.lora_r,
        lora_alpha=2 * script_args.lora_r,
        lora_dropout=0.05,
        target_modules="all-linear",
        modules_to_save=["lm_head", "embed_tokens"],
        task_type="CAUSAL_LM",
    )
    args = SFTConfig(
        output_dir="qwen2.5-7b-ultrachat",
        max_length=script_args.max_length,
        packing=True,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        learning_rate=1e-4,
        bf16=True,
        optim="adamw_torch_fused",
        eval_strategy="steps",
        eval_steps=200,
        per_device_eval_batch_size=2,
        report_to="tensorboard",
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
