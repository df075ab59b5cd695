"""How long the samples of a model may be, as its configuration says: positions that are learned.

Configurations are asked by attribute, so that those of transformers and :class:`RawConfig`, which
is a ``config.json`` as it was read, give the same answer by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memest.config.kinds import Task
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError

__all__ = [
    "DEFAULT_SEQ_LEN",
    "TARGET_POSITIONS",
    "RawConfig",
    "assumed_length",
    "check_length",
    "check_lengths",
    "check_text_length",
    "length_limit",
    "max_positions",
    "max_targets",
    "more_positions",
    "text_part",
]

DEFAULT_SEQ_LEN = 512
"""Tokens of a sample where nobody names them."""

# n_positions is there but positions are relative, or sinusoidal without a table
_UNBOUNDED = frozenset(
    """t5 mt5 umt5 longt5 xlnet bloom mpt mamba mamba2 falcon_mamba pix2struct xglm m2m_100
    recurrent_gemma jamba zamba zamba2 nemotron_h speecht5""".split()
)
# the table begins after the padding index
_POSITION_OFFSET = frozenset(
    """roberta xlm-roberta xlm-roberta-xl camembert bertweet longformer mpnet data2vec-text
    roberta-prelayernorm esm layoutlmv3 luke xmod""".split()
)
_LIMITS = (
    "max_position_embeddings",
    "max_encoder_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
)
_ROTATES = """rope_theta rope_parameters rope_scaling rotary_pct rotary_dim rotary_emb_base
    partial_rotary_factor global_rope_theta""".split()
"""Entries of configurations whose positions are angles, computed for any length: no table ends."""
_TARGET_LIMITS = (
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_position_embeddings",
)
_TEXT_TASKS = {
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
    Task.MULTIPLE_CHOICE: "AutoModelForMultipleChoice",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
}
TARGET_POSITIONS = "target positions of this model"
_ANY_HEAD = (None, "AutoModel", "AutoModelForPreTraining")


class RawConfig:
    """A ``config.json`` as it was read: what it does not name is not there.

    Args:
        values: of the file.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def reads_text(self, auto_class: str | None) -> bool:
        """Whether it is surely one of a model that reads text alone, and says so at its top."""
        parts = any(
            isinstance(value, Mapping) and name.endswith("_config")
            for name, value in self._values.items()
            if name != "quantization_config"
        )
        of_text = auto_class in (*_ANY_HEAD, *_TEXT_TASKS.values())
        return of_text and not parts and isinstance(self._values.get("vocab_size"), int)


def text_part(config: Any) -> Any:
    """The part of a configuration that is the text's; the whole where no part alone is."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # two parts read text (MusicGen): transformers does not choose
        return config


def max_positions(config: Any) -> int | None:
    """How many tokens the position table holds, None where there is no bound."""
    text = text_part(config)
    if text.model_type in _UNBOUNDED or config.model_type in _UNBOUNDED:
        return None
    for name in _LIMITS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value - 2 if text.model_type in _POSITION_OFFSET else value
    return None


def max_targets(config: Any) -> int | None:
    """How many tokens of a target the decoder's position table holds, None without a bound."""
    if config.model_type in _UNBOUNDED:
        return None
    values = (getattr(config, name, None) for name in _TARGET_LIMITS)
    return next((value for value in values if isinstance(value, int)), None)


def length_limit(config: Any, setup: TrainingRun) -> tuple[int | None, str]:
    """The longest sample that a model of text takes beside what a setup adds, and what bounds it.

    None where there is no bound.
    """
    limit = max_positions(config)
    virtual = 0 if setup.adapter is None else setup.adapter.virtual_tokens
    if limit and virtual:
        limit = max(limit - virtual, 1)
    beside = f" beside {virtual} virtual tokens" if virtual else ""
    return limit, f"positions of this model{beside}"


def more_positions(config: Any, setup: TrainingRun) -> str:
    """How to ask for a length beyond the positions that a configuration names; "" where it cannot.

    Angles of rotary embeddings are computed from the position (``RotaryEmbedding`` of
    transformers 5.23): the entry is what a model was trained with, and no size of anything.

    Args:
        config: the model's.
        setup: names the length.
    """
    name = next((each for each in _LIMITS if isinstance(getattr(config, each, None), int)), "")
    rotates = config.model_type == "llama" or any(hasattr(config, each) for each in _ROTATES)
    if not (name and rotates) or setup.seq_len is None:
        return ""
    virtual = 0 if setup.adapter is None else setup.adapter.virtual_tokens
    return (
        f" Its positions are rotary (RoPE): MODEL?{name}={setup.seq_len + virtual} in the place "
        "of MODEL asks beyond them, as a configuration that is extended does."
    )


def assumed_length(length: int) -> str:
    """What is said of the tokens of a sample where nobody named their number."""
    return f"sequence length {length} (not given; --seq-len sets it)"


def check_length(
    option: str, length: float | None, limit: float | None, what: str, more: str = ""
) -> None:
    """Refuse what is longer than a model takes.

    Args:
        option: without its dashes.
        length: that was asked for; None where none was.
        limit: None where there is none.
        what: the limit is counted in.
        more: how to ask beyond it all the same, as :func:`more_positions` has it.

    Raises:
        ConfigError: it is longer than the limit.
    """
    if length is not None and limit and length > limit:
        asked, most = f"{length:.15g}", f"{limit:.15g}"  # six digits would be rounded to
        raise ConfigError(
            f"--{option} {asked} is longer than the {most} {what}. Use --{option} {most} or less."
            f"{more}"
        )


def check_text_length(setup: TrainingRun, limit: int | None, what: str, more: str = "") -> None:
    """Refuse samples that are longer than a model takes, each of those that a file has.

    Args:
        setup: names a length, or a file of them.
        limit: None where there is none.
        what: the limit is counted in.
        more: how to ask beyond it all the same, as :func:`more_positions` has it.

    Raises:
        ConfigError: one is longer than the limit.
    """
    batching, length = setup.batching, setup.seq_len
    if batching is not None:
        # laid end to end each sample has positions of its own
        longest = batching.cut.longest
        length = longest if batching.flat else batching.padded_length(longest)
        if batching.max_length is None and limit and length > limit:
            raise ConfigError(
                f"Samples of up to {length} tokens are longer than the {limit} {what}: say to how "
                f"many they are cut, --max-length {limit}."
            )
    check_length("seq-len", length, limit, what, more)


def check_lengths(values: Mapping[str, Any], auto_class: str | None, setup: TrainingRun) -> None:
    """Refuse lengths of which a ``config.json`` alone tells that they are too long.

    What it does not tell (of images, of sound, of limits that only the code has) is told by the
    model, when it is built.

    Args:
        values: of the file.
        auto_class: the head that the checkpoint has; None where that is not known.
        setup: names lengths.

    Raises:
        ConfigError: one of them is longer than the positions of the model.
    """
    config = RawConfig(values)
    is_of_text = setup.task is Task.AUTO or setup.task in _TEXT_TASKS or setup.task is Task.BASE
    if not is_of_text or not isinstance(values.get("model_type"), str):
        return
    if not config.reads_text(auto_class):
        return
    limit, what = length_limit(config, setup)
    check_text_length(setup, limit, what, more_positions(config, setup))
    if _TEXT_TASKS.get(setup.task, auto_class) == _TEXT_TASKS[Task.SEQ2SEQ_LM]:
        check_length("target-len", setup.target_len, max_targets(config), TARGET_POSITIONS)
