"""What ranks import, imported once, in the process that they are forked from.

Nothing is built or run here: threads would not survive a fork, and profilers remember addresses.
What is there is nobody's garbage, so the collections of a rank need not look at it.
"""

import gc
from importlib import import_module

_OF_LIBRARIES = (
    "accelerate.big_modeling", "peft.tuners.lora.bnb", "peft.utils.transformers_weight_conversion",
    "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental._attention", "torch.distributed.tensor.parallel",
    "torch.profiler._cupti_monitor", "torch.testing._internal.distributed.fake_pg",
    "transformers.distributed.expert_parallel", "transformers.generation.utils",
    "transformers.integrations.bitsandbytes", "transformers.trainer",
)  # fmt: skip
_MODELS = ("bert", "gpt2", "gpt_neox", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe", "t5",
           "vit")  # fmt: skip
_OURS = (
    "memest.calibration.running.loops", "memest.calibration.running.material",
    "memest.estimation.pipeline", "memest.trace.parallel.context_parallel",
    "memest.trace.losses.fused_loss", "memest.trace.generation",
    "memest.trace.parallel.sequence_parallel", "memest.trace.session",
    "memest.trace.parallel.pipeline_stage", "memest.trace.parallel.tensor_parallel",
    "memest.trace.training", "support.context_ranks", "support.evaluation_ranks",
    "support.expert_ranks", "support.pipeline_ranks", "support.sequence_ranks",
    "support.tensor_ranks",
)  # fmt: skip

for name in (
    *_OF_LIBRARIES, *(f"transformers.models.{kind}.modeling_{kind}" for kind in _MODELS), *_OURS
):  # fmt: skip
    import_module(name)
gc.collect()
gc.freeze()
