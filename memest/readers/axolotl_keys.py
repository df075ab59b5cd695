"""Keys of axolotl's YAML that do not matter for memory, and those that are not priced.

Source: ``utils/schemas/`` of axolotl at July 2026.
"""

from __future__ import annotations

from memest.readers.mapping import by_key
from memest.readers.training_arguments import IGNORED_KEYS, UNMODELLED_KEYS
from memest.readers.values import Bounded, Either, Saving

__all__ = ["AXOLOTL_IGNORED_KEYS", "AXOLOTL_UNMODELLED_KEYS"]

AXOLOTL_IGNORED_KEYS = {
    **IGNORED_KEYS,
    **by_key(
        {
            "data is prepared on the host": """base_model_config cls_model_config tokenizer_config
                tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files
                processor_type special_tokens tokens dataset_prepared_path dataset_processes
                test_datasets shuffle_merged_datasets pretraining_dataset dataset_shard_num
                dataset_shard_idx skip_prepare_dataset chat_template_jinja default_system_message
                eot_tokens max_prompt_len min_sample_len sample_packing_group_size
                sample_packing_bin_size sample_packing_sequentially pad_to_sequence_len
                eval_sample_packing excess_length_strategy dataset_exact_deduplication
                roles_to_train roles_to_mask field_messages
                added_tokens_overrides chat_template_kwargs
                curriculum_sampling dataset_keep_in_memory dataset_exact_deduplication is_preprocess
                pose_max_context_len pose_num_chunks pose_split_on_token_ids use_pose
                preprocess_iterable pretrain_multipack_attn pretrain_multipack_buffer_size
                pretraining_sample_concatenation push_dataset_to_hub sample_packing_eff_est
                sample_packing_mp_start_method shuffle_before_merging_datasets
                streaming_multipack_buffer_size total_num_tokens total_supervised_tokens
                image_resize_algorithm role_boundaries processor_kwargs
                tokenizer_use_mistral_common num_dataset_shards_to_save max_packed_sequence_len
                hf_use_auth_token fix_untrained_tokens mean_resizing_embeddings""",
            "names, logging and saving allocate nothing on the GPU": """saves_per_epoch
                evals_per_epoch save_first_step wandb_viz early_stopping_patience
                loss_watchdog_threshold loss_watchdog_patience
                eval_max_new_tokens use_wandb use_mlflow use_comet mlflow_tracking_uri
                mlflow_experiment_name comet_project_name profiler_steps
                auto_resume_from_checkpoints strict
                axolotl_config_path bench_dataset bench_split
                dynamic_checkpoint include_tkps profiler_steps_start save_safetensors
                hf_mlflow_log_artifacts mlflow_run_name use_trackio trackio_project_name
                trackio_run_name use_otel_metrics otel_metrics_host otel_metrics_port use_ray
                ray_run_name ray_num_workers resources_per_worker""",
            "the model's own config says it": """model_type type_of_model is_llama_derived_model
                is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model
                trust_remote_code""",
            "Python's collector": "gc_steps gc_collect_steps",
            "changes no size": "lora_fan_in_fan_out peft_init_lora_weights lora_alpha_pattern",
            "adapters that are there already have the sizes named here": "lora_model_dir",
            "speed only": "tf32",
            "after training": "merge_lora",
            "the launch command says it": "world_size ddp device device_map",
            "rates and schedules are numbers of the host": """adam_beta3 adam_epsilon2
                cosine_constant_lr_ratio lr_groups lr_div_factor lr_quadratic_warmup
                jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps
                eaft_alpha eaft_k""",
            "how weights are loaded": """lora_on_cpu qlora_sharded_model_loading reinit_weights
                merge_method peft_ensure_weight_tying revision_of_model
                experimental_skip_move_to_device""",
            "a setting of the method that rl names, which changes no memory": """trl vllm dpo_beta
                dpo_generate_during_eval dpo_norm_loss dpo_use_logits_to_keep
                dpo_label_smoothing dpo_loss_type
                dpo_loss_weights dpo_padding_free dpo_use_liger_kernel dpo_use_weighting
                kto_desirable_weight kto_undesirable_weight orpo_alpha cpo_alpha simpo_gamma rl_beta
                rpo_alpha precompute_ref_log_probs center_rewards_coefficient""",
            "with its own switch": """chunked_cross_entropy_num_chunks tiled_mlp_num_shards
                tiled_mlp_use_original_mlp torch_compile_options flex_attn_compile_kwargs
                ring_attn_func heads_k_stride lisa_step_interval lisa_layers_attribute
                relora_cpu_offload relora_prune_method relora_prune_ratio dion_lr dion_momentum
                dion_rank_fraction dion_rank_multiple_of peft_layers_pattern loftq_bits
                generation_do_sample generation_max_new_tokens generation_prompt_ratio
                generation_temperature generation_top_k generation_top_p num_generation_samples""",
        }
    ),
}
AXOLOTL_UNMODELLED_KEYS = {
    **UNMODELLED_KEYS,
    "flash_attn_cross_entropy": Saving("flash-attn's cross entropy"),
    "flash_attn_fuse_mlp": Bounded("flash-attn's MLP"),
    "chunked_cross_entropy": Saving("logits come in chunks; priced is all at once"),
    "tiled_mlp": Saving("the MLP works in tiles"),
    "unfrozen_parameters": Saving(
        "only these parameters train; all are priced: --freeze names the others"
    ),
    "layer_offloading": Saving("layers move to the host"),
    "selective_checkpointing": Either(
        "what is recomputed is chosen by operator: all or nothing is priced"
    ),
    "lora_rank_pattern": "ranks by module",
    "peft_layers_to_transform": Bounded("adapters on some layers only; priced on all"),
    "peft_layer_replication": "layers are repeated",
    "relora": "ReLoRA",
    "use_eaft": "a loss of its own on copies of all logits",
    "use_dynamic_finetuning": "a loss of its own on copies of all logits",
    "diffusion": Either("a loss and a mask of its own"),
    "llmcompressor": Either("weights that are pruned or quantised on the way"),
    "gptq": Either("GPTQ bases"),
    "qat": "quantisation-aware training",
    "fp8": Either("fp8"),
    "process_reward_model": "a reward model",
    "model_quantization_config": Either("a base quantised otherwise"),
    "quantize_moe_experts": Saving("experts are quantised"),
    "batch_flattening": Either("batches are flattened"),
    "lisa_n_layers": Saving("LISA trains a few layers at a time; all are priced"),
    "expert_parallel_size": Either("experts are shared by a plugin's own dispatch"),
    "experts_implementation": Either("how experts are computed"),
    "llama4_linearized_experts": Either("experts as linear layers"),
    "freeze_mm_modules": Saving("parts for images do not train; all are priced"),
    "fused_attn_kernel": Bounded("norm and positions in one kernel"),
    "gemma4_hybrid_attn_impl": Either("two kinds of attention: priced is one"),
    "large_head_attention": Either("a kernel for large heads"),
    "flash_attn_d512": Either("a kernel for large heads"),
    "flash_optimum": Either("BetterTransformer"),
    "s2_attention": Either("shifted sparse attention"),
    "scaling_softmax": "attention with a scale for each row",
    "sdpa_varlen": Saving("packed rows without a mask"),
    "fp32_norms": "norms are float32",
    "embeddings_skip_upcast": Bounded("embeddings are not float32"),
    "shrink_embeddings": Bounded("the embeddings have fewer rows"),
    "peft_trainable_token_indices": "rows of the embeddings train",
    "loftq_config": "LoftQ",
    "generate_samples": "samples are generated between the steps",
    "do_causal_lm_eval": "the evaluation generates",
    "eval_table_size": "the evaluation generates",
    "eval_sequence_len": "samples of the evaluation have another length",
    "trainer_cls": Either("a trainer of its own"),
    "ebft": "EBFT, which generates",
    "use_kernels": Either("kernels of the hub"),
    "use_onebitllms": Either("1-bit linears"),
    "noisy_embedding_alpha": "noise on the embeddings in forward",
    "resize_token_embeddings_to_32x": Bounded("a few rows of the embeddings"),
    "eval_causal_lm_metrics": "the evaluation generates",
    "do_bench_eval": "the evaluation generates",
    "gpu_memory_limit": Bounded("a limit of the process"),
    "max_memory": Saving("weights are placed on several devices"),
    "deepcompile": Either("compilation"),
}
