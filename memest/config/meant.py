"""Names that people give options, which have others or none: what says the same."""

from __future__ import annotations

__all__ = ["what_says"]

_PREFERENCES = (
    "{} is read from a configuration, a script or a launch command of TRL, axolotl, LLaMA-Factory, "
    "ms-swift or torchtune; what it holds beside the model is named there and not priced"
)
_SAYS: dict[str, str] = {
    **dict.fromkeys("lora use_lora use_peft".split(), "--peft lora, or --lora-r 16"),
    **dict.fromkeys(
        "flash flash_attn flash_attention flash_attention_2 use_flash_attention_2 fa2".split(),
        "--attn-implementation flash_attention_2",
    ),
    **{name: f"--attn-implementation {name}" for name in ("sdpa", "eager")},
    "ddp": "--num-gpus N, which is DDP unless --fsdp or --zero is named",
    **{f"zero{stage}": f"--zero {stage}" for stage in (1, 2, 3)},
    "deepspeed_stage": "--zero 3",
    **dict.fromkeys("fsdp2 fsdp1 fsdp_2".split(), "--fsdp full_shard, with --fsdp-version 1 or 2"),
    **dict.fromkeys(
        "tokens context_length context_len context ctx ctx_len max_tokens block_size".split(),
        "--seq-len N",
    ),
    **dict.fromkeys("vram memory gpu_mem gpu_ram".split(), "--gpu-memory 24GiB"),
    **dict.fromkeys(
        "ram host_ram host_mem cpu_memory cpu_mem cpu_ram system_memory node_memory sysmem".split(),
        "--host-memory 64GiB",
    ),
    **dict.fromkeys("gpus n_gpus ngpus".split(), "--num-gpus N"),
    **dict.fromkeys("bs micro_batch train_batch".split(), "--batch N"),
    **dict.fromkeys(
        "optimizer_name adamw_8bit adamw8bit adam8bit 8bit_adam".split(), "--optim adamw_8bit"
    ),
    **dict.fromkeys(["8bit", "int8"], "--load-in-8bit"),
    **dict.fromkeys(["4bit", "nf4"], "--qlora, or --load-in-4bit"),
    **dict.fromkeys(
        "fp8 fp4 mxfp8 nvfp4".split(),
        "nothing, training in 8 or 4 bits is not priced; a base of so many is (--qlora)",
    ),
    **dict.fromkeys(
        "grad_ckpt gradient_ckpt recompute activation_recompute grad_checkpoint".split(),
        "--checkpointing full",
    ),
    "sample_packing": "--packing bfd, rows end to end, with the --seq-len that they are filled to",
    **dict.fromkeys(
        "pad_to_max_length pad_to_sequence_len".split(), "--padding max_length, with --max-length N"
    ),
    "save": "--with save",
    "resume": "--with resume",
    "full": "nothing: all weights are trained unless adapters are named",
    "sft": "--method sft for TRL's SFTTrainer; a supervised step of the Trainer is the default",
    **dict.fromkeys("use_vllm vllm".split(), "--engine vllm, or --engine server"),
    "rloo_k": "--num-generations N; --batch counts completions, not prompts",
    "unsloth": "a script of Unsloth's as the question: memest fits train.py",
    "ppo": "verl's PPO: --method grpo --log-probs verl --critic actor (memest help rollouts)",
    "rlhf": _PREFERENCES.format("RLHF"),
    **{name: f"--method {name}" for name in "dpo ipo kto orpo cpo simpo grpo rloo".split()},
    "online_dpo": "--method online-dpo",
    **dict.fromkeys("rm reward_model reward".split(), "--method reward"),
    **dict.fromkeys(
        "trainer trl_trainer training_method rl".split(),
        "--method dpo, kto, reward, grpo ...; --loop trainer for transformers' own",
    ),
}
"""By the name that is no option."""


def what_says(name: str) -> str:
    """What to type for what somebody named; empty where that is not known.

    Args:
        name: as it was given, with dashes or without.
    """
    return _SAYS.get(name.lower().lstrip("-").replace("-", "_"), "")
