"""What an error says to type next, as a click; fast: no model is built."""

import pytest

pytest.importorskip("streamlit")

from memest.app.question import ExplorerQuestion
from memest.app.remedy import remedies
from memest.errors import ConfigError, UnknownModelError

QUESTION = ExplorerQuestion.of("gpt2", {"seq_len": 1024, "lora_r": 16, "qlora": True})


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--seq-len 1024 is too long. Use --seq-len 512 or less.", {"seq_len": 512}),
        ("add --llm-int8-skip-modules classifier.", {"llm_int8_skip_modules": ("classifier",)}),
        ("Use --dtype float32 (in a script dtype=torch.float32).", {"dtype": "float32"}),
        ("Add --no-prepare-kbit, which leaves them.", {"prepare_kbit": False}),
    ],
)
def test_what_an_error_says_is_a_question(text: str, options: dict[str, object]) -> None:
    ((_, other),) = remedies(QUESTION, ConfigError(text))
    assert {name: dict(other.options)[name] for name in options} == options
    assert other.model == QUESTION.model


@pytest.mark.parametrize(
    "text",
    [
        "--seq-len 1024 is too long.",
        "Use --seq-len 1024.",  # is asked already
        "Use --seq-len 0.",
        "add --num-gpus.",
        "add --lengths FILE (one length a line).",
        "add --trust-remote-code to run it.",
        "add --tokenizer with a name.",
        "add --no-such-flag 3.",
    ],
)
def test_what_cannot_be_asked_here_is_not_offered(text: str) -> None:
    assert remedies(QUESTION, ConfigError(text)) == []


def test_a_model_of_nearly_the_name_is_a_click() -> None:
    mistyped = ExplorerQuestion.of("gtp2", {"batch": 4})
    (words, other), *_ = remedies(mistyped, UnknownModelError("there is none"))
    assert words == other.model == "gpt2"
    assert other.options == mistyped.options
