# DPO with QLoRA on 2 GPUs
CUDA_VISIBLE_DEVICES=0,1 trl dpo \
    --model_name_or_path mistralai/Mistral-7B-Instruct-v0.2 \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --dtype bfloat16 \
    --attn_implementation flash_attention_2 \
    --load_in_4bit --use_bnb_nested_quant \
    --use_peft --lora_r 16 --lora_alpha 32 --lora_target_modules q_proj k_proj v_proj o_proj \
    --learning_rate 5e-6 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --max_length 2048 \
    --optim paged_adamw_8bit \
    --bf16 \
    --eval_strategy steps --eval_steps 100 \
    --num_train_epochs 1 \
    --no_remove_unused_columns \
    --num_processes 2 \
    --output_dir mistral-dpo
