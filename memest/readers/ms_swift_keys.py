"""Keys of ms-swift: former names, what does not matter, defaults, what configurations it brings.

Source: see :mod:`memest.readers.ms_swift`.
"""

from __future__ import annotations

import re

from memest.readers.mapping import by_key
from memest.readers.published_deepspeed import zero_stages
from memest.readers.training_arguments import IGNORED_KEYS, UNMODELLED_KEYS
from memest.readers.values import IMAGES, Bounded, Either, Saving

__all__ = [
    "ATTENTION",
    "FSDP2",
    "IMAGE_CAP",
    "IMAGE_VARIABLES",
    "LORA",
    "MARKS_OF_2",
    "OF_METHODS",
    "OF_OTHER_TUNERS",
    "OLD_NAMES",
    "OPTIMIZERS",
    "PARTS",
    "PRESETS",
    "SAMPLES",
    "SETTINGS_OF_TUNERS",
    "SWIFT_IGNORED_KEYS",
    "SWIFT_UNMODELLED_KEYS",
    "TARGETS",
    "TRAINERS",
    "TUNERS",
]

IMAGE_CAP = "MAX_PIXELS"
"""The variable by which it caps their pixels."""
IMAGE_VARIABLES = frozenset(
    """MIN_PIXELS VIDEO_MAX_PIXELS VIDEO_TOTAL_PIXELS FPS FPS_MAX_FRAMES
    IMAGE_MAX_TOKEN_NUM VIDEO_MAX_TOKEN_NUM IMAGE_FACTOR MAX_SLICE_NUMS INPUT_SIZE MAX_NUM
    VIDEO_SEGMENTS VIDEO_MAX_SLICE_NUMS MAX_NUM_FRAMES""".split()
)
"""Variables by which templates of multimodal models are told how large images become."""

SAMPLES = 16
"""Samples of an optimizer step over all GPUs, where nobody says how many micro-batches it has."""

OLD_NAMES = {
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "model_id_or_path": "model",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "quantization_bit": "quant_bits",
    "bnb_4bit_comp_dtype": "bnb_4bit_compute_dtype",
    "use_liger": "use_liger_kernel",
    "lora_target_modules": "target_modules",
    "lora_target_regex": "target_regex",
    "lora_modules_to_save": "modules_to_save",
    "lora_dropout_p": "lora_dropout",
    "lora_bias_trainable": "lora_bias",
    "init_lora_weights": "init_weights",
    "neftune_alpha": "neftune_noise_alpha",
    "dataset_test_ratio": "split_dataset_ratio",
    "additional_trainable_parameters": "trainable_parameters",
    "vit_use_gc": "vit_gradient_checkpointing",
    "ref_model_id_or_path": "ref_model",
    "reward_model_id_or_path": "reward_model",
}
"""Present names by former ones: of ms-swift 3 the first, of ms-swift 2 the others."""
MARKS_OF_2 = ("sft_type", "model_id_or_path", "template_type", "quantization_bit")

SWIFT_IGNORED_KEYS = {
    **IGNORED_KEYS,
    **by_key(
        {
            "data is prepared on the host": """val_dataset cached_dataset cached_val_dataset
                split_dataset_ratio dataset_num_proc load_from_cache_file dataset_shuffle
                val_dataset_shuffle interleave_prob stopping_strategy shuffle_buffer_size
                download_mode columns strict disable_auto_column_mapping model_name model_author
                custom_dataset_info template system truncation_strategy agent_template norm_bbox
                use_chat_template padding_side template_backend response_prefix enable_thinking
                preserve_thinking add_non_thinking_prefix disable_ignore_empty_think lazy_tokenize
                packing_num_proc packing_strategy train_dataloader_shuffle dataset_seed
                train_dataset_sample val_dataset_sample preprocess_num_proc template_type
                tools_prompt self_cognition_sample custom_register_path external_plugins
                load_data_args tokenizer_path max_epochs train_dataset_mix_ratio new_special_tokens
                streaming_val_size streaming_buffer_size check_dataset_strategy logprobs
                decision_drop_instructions decision_subsample_options decision_state_as_text
                decision_shuffle_fields is_binary_loss_scale custom_train_dataset_path
                custom_val_dataset_path train_dataset_mix_ds problem_type use_loss_scale
                loss_scale_config_path""",
            "not of a training step": """add_version create_checkpoint_symlink max_new_tokens
                temperature top_k top_p repetition_penalty num_beams stream stop_words logprobs
                top_logprobs load_args ckpt_dir merge_lora safe_serialization max_shard_size
                eval_metric metric eval_limit eval_dataset_args eval_generation_config
                extra_eval_args early_stop_interval callbacks check_model acc_strategy
                resume_only_model use_flash_ckpt ds3_gather_for_generation ignore_args_error
                enable_npu_model_patch swanlab_token swanlab_workspace swanlab_exp_name
                swanlab_notification_method swanlab_webhook_url swanlab_secret swanlab_sender_email
                swanlab_receiver_email swanlab_smtp_server swanlab_smtp_port swanlab_email_language
                swanlab_mode only_save_model save_missing_weights loss_name run_name
                test_oom_error add_output_dir_suffix push_hub_strategy metric_warmup_step
                neftune_backend merge_device_map hqq_axis gpu_memory_fraction""",
            "rates and schedules are numbers of the host": """vit_lr aligner_lr min_lr
                lora_lr_ratio lorap_lr_ratio lisa_step_interval""",
            "where weights come from changes no size": """model_type use_hf local_repo_path
                init_strategy max_model_len adapters device_map_config
                model_cache_dir check_model_is_latest load_dataset_config""",
            "what the run found itself": """swift_version model_info model_meta model_dir
                model_suffix hub rank local_rank global_world_size local_world_size
                training_args lora_modules mcore_adapter mcore_adapters use_ray ray_exp_name
                device_groups""",
            "logits of what trains are what it leaves out": "use_logits_to_keep",
            "changes no size": "use_rslora",
            "how experts are looped over is transformers' matter": "experts_impl",
        }
    ),
}
SWIFT_UNMODELLED_KEYS = {
    **UNMODELLED_KEYS,
    "rescale_image": IMAGES,
    "device_map": Saving("the model is spread over several GPUs; all of it is priced on one"),
    "max_memory": Saving("the model is spread over several GPUs; all of it is priced on one"),
    "rope_scaling": Bounded("the position tables"),
    "zero_hpz_partition_size": "ZeRO++ keeps a second copy of weights in a node",
    "deepspeed_autotp_size": Either("DeepSpeed's tensor parallelism"),
    "use_swift_lora": "LoRA of ms-swift's own; peft's is priced",
    "lora_bias": "biases train too",
    "target_parameters": UNMODELLED_KEYS["lora_target_parameters"],
    "enable_dft_loss": "a loss of each token by itself",
    "enable_channel_loss": "a loss of each token by itself",
    "loss_type": "a loss of its own; the model's is priced",
    "mrl_dims": "a loss for each size of an embedding",
    "eval_use_evalscope": "generation in evaluation",
    "eval_dataset": "generation in evaluation",
    "lisa_activated_layers": Saving("LISA trains a few layers at a time"),
    "router_aux_loss_coef": "the loss of a mixture's router",
    "train_backend": Either("Megatron"),
}
TUNERS = {
    "full": "",
    "lora": "lora",
    "longlora": "lora",
    "adalora": "adalora",
    "boft": "boft",
}
"""Ways to train by ms-swift's names, and the peft method that they are priced as."""
SETTINGS_OF_TUNERS = {
    "adalora": {
        "adalora_init_r": ("init_r", 12),
        "adalora_target_r": ("target_r", 8),
        "adalora_tinit": ("tinit", 0),
        "adalora_tfinal": ("tfinal", 0),
        "adalora_deltaT": ("deltaT", 1),
        "lora_dropout": ("lora_dropout", 0.05),
    },
    "boft": {
        "boft_block_size": ("boft_block_size", 4),
        "boft_block_num": ("boft_block_num", 0),
        "boft_n_butterfly_factor": ("boft_n_butterfly_factor", 1),
        "boft_dropout": ("boft_dropout", 0.0),
    },
}
"""Settings of peft's classes by ms-swift's names, with ms-swift's defaults."""
OF_METHODS = re.compile(
    r"""(vllm|use_vllm|ref_model|ref_adapter|reward|teacher|cosine|chord|soft|rollout|repetition|
    multi_turn|structured_outputs|log_|importance|sync_ref|simpo|cpo|rpo|ld_|discopop|num_gen|
    num_iter|num_ppo|num_mini|num_sample_gen|steps_per_gen|generation_batch|epsilon|tau_|kl_|
    offload_(optimizer|model|teacher)|sleep_level|move_model|async_generate|loss_type|loss_weights|
    beta$|label_smoothing$|(un)?desirable|center_rewards|sft_alpha|lmbda|seq_kd|gkd|whiten|cliprange|
    vf_coef|gamma$|lam$|response_length|max_completion|missing_eos|dynamic_sample|max_resample|
    overlong|scale_rewards|top_entropy|advantage|delta$|max_turns|completion_length|wandb_log_uni|
    off_policy|local_rollout|orm_|prm_|gym_env|use_gym_env|enable_flattened|reference_free)""",
    re.VERBOSE,
)
"""Keys of rewards, references and generation; some have the names of other things elsewhere."""
OF_OTHER_TUNERS = re.compile(
    r"(adalora|boft|vera|fourier|reft|llamapro|adapter|lora_ga|longlora|ia3)_"
)
LORA = {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05}
TARGETS = ("target_modules", "target_regex", "modules_to_save")
ATTENTION = {
    "flash_attn": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "sdpa": "sdpa",
    "eager": "eager",
}
TRAINERS = {"rm": "reward"}
"""Ways of training by the word of METHODS, where it is another one."""
OPTIMIZERS = {
    "default": "",
    "lorap": "",
    "multimodal": "",
    "galore": "",
    "muon": Either("Muon of its own kind: name one with --optim"),
    "muonclip": Either("Muon of its own kind: name one with --optim"),
}
PARTS = {"freeze_vit": "vision", "freeze_aligner": "projector", "freeze_llm": "language"}
PRESETS = {name.replace("z", "zero", 1): stage for name, stage in zero_stages(2e8).items()}
"""``zero_optimization`` of the DeepSpeed configurations that come along; all else there is auto."""
FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": True,
    },
}
"""The FSDP configuration that comes along."""
