"""Training arguments that are no options of an estimate: why they do not matter, what is missing.

Names are those of ``TrainingArguments`` of transformers 5.23, ``SFTConfig`` and ``ModelConfig`` of
TRL, and the example scripts of both.
"""

from __future__ import annotations

__all__ = ["LOAD", "MATTERS", "REASONS", "SIZES"]

_GROUPS = {
    "names, logging and saving allocate nothing on the GPU": """output_dir overwrite_output_dir
        logging_dir logging_strategy logging_steps logging_first_step logging_nan_inf_filter
        log_level log_level_replica log_on_each_node report_to run_name project disable_tqdm
        trackio_space_id trackio_bucket_id trackio_static_space_id save_strategy save_steps
        save_total_limit save_on_each_node save_only_model save_safetensors hub_model_id
        hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub
        push_to_hub_model_id push_to_hub_organization push_to_hub_token resume_from_checkpoint
        load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
        restore_callback_states_from_checkpoint enable_jit_checkpoint skip_memory_metrics debug
        include_tokens_per_second include_num_input_tokens_seen mp_parameters
        use_mps_device no_cuda use_cpu plot_loss log_completions wandb_project wandb_entity
        wandb_name wandb_watch wandb_run_id wandb_log_model wandb_mode swanlab_project
        include_inputs_for_metrics include_for_metrics
        use_tensorboard logging""",
    "rates and schedules are numbers of the host": """learning_rate lr lr_scheduler_type
        lr_scheduler lr_scheduler_kwargs warmup_steps warmup_ratio adam_beta1 adam_beta2
        adam_epsilon label_smoothing_factor num_train_epochs num_epochs max_steps epochs
        cosine_min_lr_ratio embedding_lr embedding_lr_scale loraplus_lr_ratio
        loraplus_lr_embedding average_tokens_across_devices beta label_smoothing loss_weights
        early_stopping_patience early_stopping_steps""",
    "data is prepared on the host": """dataloader_drop_last
        dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
        group_by_length length_column_name train_sampling_strategy sortish_sampler dataset_name
        dataset_config dataset_config_name dataset dataset_path datasets dataset_text_field
        dataset_num_proc dataset_kwargs dataset_train_split dataset_test_split dataset_streaming
        dataset_batch_size dataset_column tokenizer padding dataset_dir dataset_mixer
        dataset_split train_file validation_file
        test_file task_name max_train_samples max_eval_samples max_predict_samples
        preprocessing_num_workers overwrite_cache streaming buffer_size chat_template
        chat_template_path tokenizer_name tokenizer_name_or_path use_fast_tokenizer cache_dir
        validation_split_percentage text_column summary_column source_lang target_lang
        source_prefix truncation_mode shuffle_dataset completion_only_loss assistant_only_loss
        eos_token pad_token packing_strategy pad_to_max_length data_path train_on_inputs
        val_set_size add_eos_token line_by_line keep_linebreaks mlm_probability
        mix_strategy interleave_probs template num_proc image_column_name label_column_name
        ignore_pad_token_for_loss forced_bos_token image_processor_name feature_extractor_name
        accelerator_config data_seed""",
    "seeds change no size": "seed full_determinism",
    "which stages run is the script's matter: the estimate is of training": """do_train do_eval
        do_predict eval_steps eval_delay eval_on_start eval_do_concat_batches
        eval_use_gather_object batch_eval_metrics""",
    "processes find each other by it": """local_rank ddp_timeout ddp_backend main_process_port
        master_addr master_port log_on_each_node tpu_num_cores past_index""",
    "where weights come from changes no size": """model_revision revision token use_auth_token
        model_type_hint config_name low_cpu_mem_usage""",
    "speed only": "tf32 torch_compile_backend torch_compile_mode liger_kernel_config",
}
REASONS = {key: why for why, keys in _GROUPS.items() for key in keys.split()}
"""Why a key does not matter for memory."""

MATTERS = {
    "neftune_noise_alpha": "NEFTune adds noise to the embeddings in forward",
    "auto_find_batch_size": "the batch is halved where memory runs out; the one named is priced",
    "torch_empty_cache_steps": "empty_cache gives reserved blocks back between steps",
    "activation_offloading": "activations move to the host between forward and backward",
    "bf16_full_eval": "weights are bfloat16 in evaluation",
    "fp16_full_eval": "weights are float16 in evaluation",
    "parallelism_config": "tensor, context and sequence parallelism",
    "generation_config": "of generation in evaluation",
    "ddp_static_graph": "DDP's static graph",
    "ddp_broadcast_buffers": "DDP sends buffers before each forward",
    "lora_target_parameters": "LoRA on parameters that are not modules",
    "router_aux_loss_coef": "the loss of a mixture's router",
    "use_unsloth": "Unsloth replaces kernels and checkpointing by its own",
    "xla_fsdp_config": "FSDP on TPUs",
    "reward_model_path": "a second model in memory",
    "ref_model": "a second model in memory",
    "teacher_model_name_or_path": "a second model in memory",
    "use_vllm": "a generation engine in the same memory",
}
"""What of a key is not modelled."""

SIZES = {
    "block_size": "seq_len",
    "max_source_length": "seq_len",
    "model_max_length": "seq_len",
    "max_position_length": "seq_len",
    "max_duration_in_seconds": "audio_seconds",
}
"""Sizes as the example scripts of transformers call them."""

LOAD = ("dtype", "torch_dtype", "attn_implementation")
"""Keys of ``model_init_kwargs`` that matter."""
