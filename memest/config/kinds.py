"""Kinds of training runs: what an option of a closed list can be."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from memest.errors import ConfigError, hint, not_legal

__all__ = [
    "SDPA",
    "Attention",
    "Dtype",
    "Fsdp",
    "LogProbs",
    "Loop",
    "Method",
    "ModelPart",
    "Precision",
    "Prefetch",
    "Rotate",
    "Schedule",
    "SdpaBackend",
    "Strategy",
    "Task",
    "ZeroGrad",
    "ZeroGradAt",
    "check_whole_number",
    "choose",
    "read_fsdp",
    "read_method",
    "read_rotate",
    "read_schedule",
    "read_split",
]


class Precision(enum.StrEnum):
    """What autocast does; the dtype of the weights is a matter of its own."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Dtype(enum.StrEnum):
    """The dtype of the weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def is_half(self) -> bool:
        """Whether a number takes two bytes."""
        return self in (Dtype.FLOAT16, Dtype.BFLOAT16)


class ModelPart(enum.StrEnum):
    """A part of a multimodal model."""

    VISION = "vision"
    """Towers, of images or of sounds."""
    PROJECTOR = "projector"
    LANGUAGE = "language"
    """All else."""


class Attention(enum.StrEnum):
    """The attention implementation that transformers is asked for."""

    AUTO = "auto"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_ATTENTION_2 = "flash_attention_2"


SDPA = (Attention.AUTO, Attention.SDPA)
"""Attention by PyTorch's own function."""


class SdpaBackend(enum.StrEnum):
    """The kernel behind scaled_dot_product_attention; ``auto`` follows PyTorch's own choice."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


class Loop(enum.StrEnum):
    """Whose training loop runs: it decides what is still referenced when."""

    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"
    PLAIN = "plain"


class ZeroGrad(enum.StrEnum):
    """What zero_grad does: ``none`` drops the gradients, ``zero`` keeps them allocated."""

    AUTO = "auto"
    NONE = "none"
    ZERO = "zero"


class ZeroGradAt(enum.StrEnum):
    """Where a script calls zero_grad: old gradients are alive until then."""

    AFTER_STEP = "after-step"
    BEFORE_FORWARD = "before-forward"
    BEFORE_BACKWARD = "before-backward"


class Task(enum.StrEnum):
    """Which head the model gets."""

    AUTO = "auto"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    IMAGE_CLASSIFICATION = "image-classification"
    IMAGE_SEGMENTATION = "image-segmentation"
    MASKED_IMAGE_MODELING = "masked-image-modeling"
    AUDIO_CLASSIFICATION = "audio-classification"
    CTC = "ctc"
    SPEECH_SEQ2SEQ = "speech-seq2seq"
    CONTRASTIVE = "contrastive"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
    BASE = "base"


class Method(enum.StrEnum):
    """What is trained for, and by which of TRL's trainers where it is no supervised step."""

    SUPERVISED = "supervised"
    DPO = "dpo"
    IPO = "ipo"
    KTO = "kto"
    ORPO = "orpo"
    CPO = "cpo"
    SIMPO = "simpo"
    REWARD = "reward"
    GRPO = "grpo"
    RLOO = "rloo"
    ONLINE_DPO = "online-dpo"

    @property
    def is_supervised(self) -> bool:
        """Whether a step is forward, loss and backward of samples, and no trainer of TRL's."""
        return self is Method.SUPERVISED

    @property
    def is_in_trl_trainer(self) -> bool:
        """Whether its trainer is in ``trl.trainer``, not in ``trl.experimental`` (TRL 1.16).

        Those treat adapters alike, as SFTTrainer does; ORPO's and CPO's have peft prepare a base.
        """
        return not self.is_supervised and not self.makes_all_logits

    @property
    def generates(self) -> bool:
        """Whether it learns from what the model writes in the run itself."""
        return self in (Method.GRPO, Method.RLOO, Method.ONLINE_DPO)

    @property
    def writes_pairs(self) -> bool:
        """Whether every micro-batch of prompts gets two completions of each, in the step itself."""
        return self is Method.ONLINE_DPO

    @property
    def has_reference(self) -> bool:
        """Whether a step scores answers by a second model too, that of before the training."""
        return self in (Method.DPO, Method.IPO, Method.KTO, Method.ONLINE_DPO)

    @property
    def makes_all_logits(self) -> bool:
        """Whether the logits of all tokens are there at once."""
        return self in (Method.ORPO, Method.CPO, Method.SIMPO, Method.ONLINE_DPO)


class LogProbs(enum.StrEnum):
    """Where a preference method has the log-probabilities of answers from."""

    FUSED = "fused"
    """Head and logarithms tile by tile, as TRL 1.15 and later have them."""
    LOGITS = "logits"
    """All logits, in the dtype of the model, as TRL 1.6 to 1.13 made them."""
    FLOAT32 = "float32"
    """All logits in float32, and the logarithms of all of them, as LLaMA-Factory has it."""
    TORCHTUNE = "torchtune"
    """The same in a loop of its own, which keeps the reference's logits, as torchtune has it."""
    SWIFT = "ms-swift"
    """All logits, in the dtype of the model, as ms-swift's own trainers make them."""
    VERL = "verl"
    """All logits of one row of tokens, in verl's own loop around its FSDP."""

    @property
    def is_put_together(self) -> bool:
        """Whether chosen and rejected answers come as one batch with labels."""
        return self in (LogProbs.FLOAT32, LogProbs.TORCHTUNE, LogProbs.SWIFT)

    @property
    def has_own_loop(self) -> bool:
        """Whether the loop around it is not the Trainer's."""
        return self in (LogProbs.TORCHTUNE, LogProbs.VERL)


class Strategy(enum.StrEnum):
    """Who wraps the model."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO = "zero"


class Fsdp(enum.StrEnum):
    """What ``fully_shard`` does with parameters that a forward has gathered."""

    NONE = "none"
    FULL_SHARD = "full_shard"
    """They are given back after each unit's forward (``reshard_after_forward=True``)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """They stay until its backward (``reshard_after_forward=False``)."""
    NO_SHARD = "no_shard"
    """Nothing is cut: FSDP1's ``ShardingStrategy.NO_SHARD``, flat parameters that are whole."""


class Prefetch(enum.StrEnum):
    """When FSDP1 gathers the unit that autograd comes to next (``BackwardPrefetch``)."""

    NO_PREFETCH = "no_prefetch"
    """When autograd is there."""
    BACKWARD_PRE = "backward_pre"
    """Before the backward of the unit in front of it."""
    BACKWARD_POST = "backward_post"
    """Behind it, when its own parameters are given back."""


class Schedule(enum.StrEnum):
    """Who of a pipeline runs what when, as ``torch.distributed.pipelining`` has it."""

    GPIPE = "gpipe"
    """All forwards, then all backwards (``ScheduleGPipe``)."""
    ONE_F_ONE_B = "1f1b"
    """A backward after each forward once the pipeline is full (``Schedule1F1B``)."""
    LOOPED_BFS = "looped-bfs"
    """Stage after stage, each with all micro-batches (``ScheduleLoopedBFS``)."""
    INTERLEAVED = "interleaved"
    """1F1B with several stages on each GPU (``ScheduleInterleaved1F1B``)."""

    @property
    def several_stages(self) -> bool:
        """Whether a GPU has more than one stage."""
        return self in (Schedule.LOOPED_BFS, Schedule.INTERLEAVED)


class Rotate(enum.StrEnum):
    """How keys and values of a sequence come to all its GPUs (``cp_comm_strategy``)."""

    ALLGATHER = "allgather"
    """Each gathers all of them at once."""
    ALLTOALL = "alltoall"
    """They go round, one neighbour at a time."""


_SCHEDULES = {
    **{schedule.value.replace("-", ""): schedule for schedule in Schedule},
    "interleaved1f1b": Schedule.INTERLEAVED,
}
_ZERO_BUBBLE_SCHEDULES = (
    "interleavedzerobubble",
    "interleavedzb",
    "zbh1",
    "zbvzerobubble",
    "zbv",
    "dualpipev",
)


def choose(option: str, value: Any, kind: type[enum.StrEnum]) -> Any:
    """Turn text into a member of ``kind``; the error lists what is legal, closest first."""
    if isinstance(value, kind):
        return value
    text = str(value).strip().lower().replace("_", "-")
    for member in kind:
        if member.value.replace("_", "-") == text:
            return member
    raise not_legal(f"{option} {value!r}", value, list(kind))


_METHODS = {
    **{method.value: method for method in Method},
    **dict.fromkeys(("sft", "none", "pt", "full"), Method.SUPERVISED),
    **dict.fromkeys(("rm", "reward-model", "reward-modeling"), Method.REWARD),
    # other losses over the same tensors (GRPOConfig.loss_type, importance_sampling_level)
    **dict.fromkeys(("gspo", "dapo", "dr-grpo"), Method.GRPO),
}
_GONE_METHODS = "ppo nash-md xpo bco prm".split()
_UNPRICED_METHODS = [*_GONE_METHODS, "reinforce++", "gkd", "rlhf"]
_OF_COMPLETIONS = "--method rloo or grpo learns from completions too, without a model of values. "
_CLOSEST = {
    **dict.fromkeys(("reinforce++", "rlhf"), _OF_COMPLETIONS),
    "ppo": "verl's is --method grpo --log-probs verl --critic actor (memest help rollouts); "
    "--method rloo or grpo learns from completions without a model of values. ",
    **dict.fromkeys(("nash-md", "xpo"), "--method online-dpo compares two completions too. "),
    "bco": "--method kto learns from single answers too. ",
}
"""What is priced of the kind of a method that is not."""
_BESIDE_A_METHOD = {
    **dict.fromkeys(("lora", "peft", "adapter", "adapters"), "--peft lora"),
    "qlora": "--qlora",
    "dora": "--use-dora",
}
"""Which weights train, which goes with any method."""


def read_method(value: Any) -> Method:
    """A way of training by its name here or elsewhere.

    Raises:
        ConfigError: there is none of the name, or it is not priced.
    """
    if isinstance(value, Method):
        return value
    text = str(value).strip().lower().replace("_", "-")
    if text in _METHODS:
        return _METHODS[text]
    if text in _BESIDE_A_METHOD:
        raise ConfigError(
            f"--method {value} is not what is trained for but which weights train: write "
            f"{_BESIDE_A_METHOD[text]}, with --method or without."
        )
    if text in _UNPRICED_METHODS:
        gone = "TRL 1.16 has no trainer of it any more, and " if text in _GONE_METHODS else ""
        raise ConfigError(
            f"--method {value} is not priced: {gone}what it takes beside a step (generation, "
            f"rewards, further models) is not modelled. {_CLOSEST.get(text, '')}Legal: "
            f"{', '.join(Method)}. A lower bound is the step alone: leave --method out and add "
            f"--unpriced {text}."
        )
    raise not_legal(f"--method {value!r}", text, [*Method, "sft"])


def check_whole_number(option: str, value: Any, low: int, high: int) -> int:
    """A whole number in a range.

    Raises:
        ConfigError: it is none, or outside.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{option} {value!r} is not a whole number.")
    if not low <= value <= high:
        raise ConfigError(f"{option} {value} is out of range: it must be {low} to {high:,}.")
    return value


def read_schedule(value: Any) -> Schedule | None:
    """A schedule by its name here or in torch.

    Raises:
        ConfigError: no such schedule.
    """
    if value is None or isinstance(value, Schedule):
        return value
    text = str(value).strip().lower().replace("_", "-").removeprefix("schedule")
    letters = text.replace("-", "")
    if letters in _SCHEDULES:
        return _SCHEDULES[letters]
    if letters in _ZERO_BUBBLE_SCHEDULES:
        raise ConfigError(
            f"--pp-schedule {value!r} is not modelled: it computes gradients of weights apart from "
            f"those of inputs. Legal: {', '.join(Schedule)}."
        )
    raise not_legal(f"--pp-schedule {value!r}", text, list(Schedule))


def read_rotate(value: Any) -> Rotate:
    """A way of rotating keys and values by its name here or in torch (``_RotateMethod``).

    Raises:
        ConfigError: no such way.
    """
    if isinstance(value, Rotate):
        return value
    letters = str(value).replace("_", "").replace("-", "")
    rotate: Rotate = choose("--cp-rotate", letters, Rotate)
    return rotate


def read_split(value: Any) -> tuple[int, ...]:
    """Layers of each stage, also as text with commas.

    Raises:
        ConfigError: something that is no list of numbers.
    """
    if value is None or value == "":
        return ()
    parts: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    try:
        counts = tuple(int(str(part).strip()) for part in parts)
    except (TypeError, ValueError):
        counts = (-1,)
    if any(count < 0 for count in counts):
        raise ConfigError(
            f"--pp-split {value!r} is no list of layers: give how many each stage has, in order, "
            "for example --pp-split 7,8,8,9."
        )
    return counts


def read_fsdp(value: Any) -> Fsdp:
    """The mode, also in the words of ``TrainingArguments.fsdp`` ("full_shard auto_wrap").

    Raises:
        ConfigError: no such mode.
    """
    if isinstance(value, Fsdp):
        return value
    if isinstance(value, bool):
        return Fsdp.FULL_SHARD if value else Fsdp.NONE
    words = [w for w in str(value).lower().replace("-", "_").replace(",", " ").split() if w]
    modes = [word for word in words if word != "auto_wrap"]
    if modes in ([], ["no"]):
        return Fsdp.FULL_SHARD if words else Fsdp.NONE
    if len(modes) == 1 and modes[0] in list(Fsdp):
        return Fsdp(modes[0])
    legal = ", ".join(Fsdp)
    suggestion = hint(modes[0], list(Fsdp))
    extra = " For offloading write --fsdp-offload." if "offload" in modes else ""
    if any(mode.startswith("hybrid_shard") for mode in modes):
        extra = " Hybrid sharding is --fsdp full_shard --fsdp-shard-size GPUS_OF_A_COPY."
        suggestion = ""
    raise ConfigError(f"--fsdp {value!r} is not known.{suggestion}{extra} Legal: {legal}.")
