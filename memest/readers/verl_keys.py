"""Keys of verl: what of them changes no memory, what is not modelled, and how its program is told.

Source: verl 0.9.1 ``trainer/config/ppo_trainer.yaml`` with its parts.
"""

from __future__ import annotations

import re

from memest.readers.values import Bounded, Either, Saving

__all__ = [
    "ACTOR",
    "DTYPES",
    "FSDP",
    "MODEL",
    "OPTIM",
    "OPTIMIZERS",
    "ROLLOUT",
    "UNMODELLED",
    "VERL_CONFIGS",
    "is_of_driver",
    "is_verl",
    "why_ignored",
]

VERL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
"""Configurations that come with verl, by hydra's names."""
_PROGRAM = re.compile(r"(?:.*[/\\])?verl[./\\]trainer[./\\]main_ppo(\.py)?")

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}." for part in ("actor", "model", "rollout"))
FSDP = f"{ACTOR}fsdp_config."
OPTIM = f"{ACTOR}optim."
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "16"), "float16"),
}
_NUMBERS = "numbers of the loss and of rates, which no size depends on"
_PASSED_OVER = (
    (re.compile(r"(trainer|ray_kwargs|global_profiler|transfer_queue)\."), "of the driver"),
    (re.compile(r"data\.|custom_reward_function\.|reward(_model|_manager)?\."), "of the host"),
    (re.compile(r"critic\."), "of a critic, and changes no memory or none is trained"),
    (re.compile(r"actor_rollout_ref\.ref\."), "the reference lies on the host, and takes less"),
    (re.compile(r"actor_rollout_ref\.actor\.megatron\.|.*\.veomni\."), "of another engine"),
    (re.compile(r".*\.(checkpoint|profiler|npu_profile)\."), "saving and profiling"),
    (re.compile(r"actor_rollout_ref\.rollout\."), "of the engine, in its share"),
    (
        re.compile(
            r"actor_rollout_ref\.(hybrid_engine|nccl_timeout)|actor_rollout_ref\.model\.(use_shm|"
            r"trust_remote_code|external_lib|tokenizer_path|hf_config_path|lora\.|mtp\.|"
            r"custom_chat_template|fused_kernel_options|use_remove_padding)"
        ),
        "how the model is found and loaded",
    ),
    (re.compile(r"algorithm\.|actor_rollout_ref\.actor\.(policy_loss|optim)\."), _NUMBERS),
)
"""Sections whose other keys change no memory of the actor's GPU."""
_SIZES = (
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "reward.reward_model.enable",
    "reward_model.enable",
)
"""Keys of the first two that do."""
_IGNORED = {
    **dict.fromkeys(
        """clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c kl_loss_type loss_agg_mode
        loss_scale_factor ppo_epochs shuffle data_loader_seed tau_pos tau_neg grad_clip""".split(),
        _NUMBERS,
    ),
    "use_torch_compile": "the entropy's function alone is compiled",
    "rollout_n": "counted with the engine",
    "entropy_from_logits_chunk_size": "no entropy is trained",
}
"""Keys of the actor."""
UNMODELLED = {
    f"{ACTOR}calculate_entropy": "the entropy's softmax of all logits, and gradients beside them",
    f"{ACTOR}calculate_sum_pi_squared": "a softmax of all logits",
    f"{ACTOR}use_prefix_grouper": Either("prompts that are computed once"),
    f"{FSDP}forward_prefetch": "a unit is gathered while the one before it runs",
    f"{FSDP}use_no_sync_for_gradient_accumulation": "gradients wait whole for the last micro-step",
    f"{FSDP}pad_to_length": "rows are padded",
    f"{ACTOR}pad_to_length": "rows are padded",
    f"{FSDP}full_determinism": Either("kernels that give the same numbers again"),
    f"{FSDP}qat.enable": Either("quantisation-aware training"),
    f"{ACTOR}qat.enable": Either("quantisation-aware training"),
    f"{MODEL}enable_activation_offload": Saving("activations wait on the host"),
    f"{MODEL}use_liger": Saving("Liger's kernels, without its loss"),
    f"{MODEL}use_fused_kernels": Saving("the head by pieces, without all logits"),
    f"{MODEL}tiled_mlp.enabled": Saving("layers by pieces of the row"),
    f"{MODEL}mtp.enable": "further layers that predict",
    f"{MODEL}exclude_modules": Bounded("modules without adapters"),
    f"{MODEL}lora_adapter_path": Either("the adapters of a folder: their rank is not read"),
    "reward.reward_model.enable": "a reward model by an engine of its own",
    "reward_model.enable": "a reward model by an engine of its own",
    "distillation.enabled": "a teacher",
}
"""What switches it on is named; off, nothing is said."""


OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch",
    "torch.optim.Adam": "adamw_torch",
    "torch.optim.SGD": "sgd",
}


def is_verl(program: str) -> bool:
    """Whether a command starts verl's trainer, as a module or by its path.

    Example:
        >>> is_verl("verl.trainer.main_ppo"), is_verl("verl.trainer.sft_trainer")
        (True, False)
    """
    return _PROGRAM.fullmatch(program) is not None


def why_ignored(key: str) -> str:
    """Why a key that nobody has asked for changes no memory of the actor's GPU; "" where it may."""
    own = _IGNORED.get(key.removeprefix(ACTOR))
    return own or next((why for pattern, why in _PASSED_OVER if pattern.match(key)), "")


def is_of_driver(key: str) -> bool:
    """Whether a key of verl's says nothing of the actor's GPU, whatever its value is.

    Example:
        >>> is_of_driver("data.train_files"), is_of_driver("data.max_prompt_length")
        (True, False)
    """
    return key not in _SIZES and any(pattern.match(key) for pattern, _ in _PASSED_OVER[:2])
