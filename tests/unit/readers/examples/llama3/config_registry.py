# ruff: noqa: F821, TID252
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

from . import model_registry

raise SystemExit("this file is data: it must never run")


def llama3_1b() -> Trainer.Config:
    model_spec = model_registry("1B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.2-1B",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 4096,
            max_context_length=4096,
            steps=1000,
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8),
        compile=CompileConfig(enable=USE_COMPILE),
        activation_checkpoint=FullAC.Config(),
    )


def llama3_1b_long() -> Trainer.Config:
    config = llama3_1b()
    config.training.max_context_length = 8192
    config.training.num_tokens_per_microbatch_per_dp_rank = tokens_of_the_day()
    return config
