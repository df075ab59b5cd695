#!/bin/bash
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
MODEL=${MODEL:-Qwen/Qwen3-8B}
GPUS=8

NPROC_PER_NODE=$GPUS \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
swift sft \
    --model $MODEL \
    --train_type full \
    --dataset 'swift/Qwen3-SFT-Mixin#2000' \
              'swift/self-cognition:qwen3#600' \
    --load_from_cache_file true \
    --split_dataset_ratio 0.01 \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps 2 \
    --packing true \
    --max_length 16384 \
    --attn_impl flash_attn \
    --use_liger_kernel true \
    --sequence_parallel_size 2 \
    --warmup_ratio 0.05 \
    --eval_steps 50 \
    --save_steps 50 \
    --output_dir output \
    --deepspeed zero3_offload
