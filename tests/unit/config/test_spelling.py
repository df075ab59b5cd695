"""A question is spelt as a scenario, a command line and Python; all mean the same."""

import shlex
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import memest
from memest.cli.argv import normalise
from memest.config.option import Kind
from memest.config.option_table import OPTIONS
from memest.config.options import argument, find_option, setup_from_options
from memest.config.spelling import command_words, python_snippet, read_scenario, write_scenario
from memest.errors import ConfigError

_NAMES = [
    option.name for option in OPTIONS
    if option.kind not in (Kind.SWITCH, Kind.EITHER)
]  # fmt: skip
_WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(_NAMES), _WORDS, min_size=1, max_size=5))
@example({"task": "0", "zero_settings": "0"})
def test_a_scenario_reads_as_it_was_written(options: dict[str, str]) -> None:
    assert read_scenario(write_scenario(options)) == options


@given(
    st.dictionaries(
        st.sampled_from([o.name for o in OPTIONS if o.kind is Kind.SWITCH]), st.just(True),
        min_size=1, max_size=3,
    )
)  # fmt: skip
def test_switches_have_no_value(options: dict[str, bool]) -> None:
    text = write_scenario(options)
    assert "=" not in text
    assert read_scenario(text) == options


def test_either_way_keeps_its_side() -> None:
    either = next(option for option in OPTIONS if option.kind is Kind.EITHER)
    for side in (True, False):
        assert read_scenario(write_scenario({either.name: side})) == {either.name: side}


def test_what_takes_several_values_is_named_several_times() -> None:
    options = {"gpu": ("t4", "rtx-4090"), "batch": 4}
    text = write_scenario(options)
    assert text == "gpu=t4 gpu=rtx-4090 batch=4"
    assert read_scenario(text) == {"gpu": ("t4", "rtx-4090"), "batch": "4"}
    with pytest.raises(ConfigError, match="twice"):
        read_scenario("batch=4 batch=5")


def test_the_command_line_and_python_ask_the_same() -> None:
    options: dict[str, Any] = {
        "batch": 4, "seq_len": 64, "fp16": True, "gpu": ("t4", "v100-16gb"), "max_grad_norm": 0.5,
    }  # fmt: skip
    words = command_words("estimate", "gpt2", options)
    assert shlex.join(words) == (
        "memest estimate gpt2 --batch 4 --seq-len 64 --fp16 --gpu t4 --gpu v100-16gb "
        "--max-grad-norm 0.5"
    )
    asked: list[tuple[str, dict[str, Any]]] = []

    class Recorded:
        @staticmethod
        def estimate(model: str, **given: Any) -> Any:
            asked.append((model, given))
            raise StopIteration

    code = python_snippet("gpt2", options).replace("import memest\n", "")
    with pytest.raises(StopIteration):
        exec(code, {"memest": Recorded})
    assert asked == [("gpt2", {**options, "gpu": ["t4", "v100-16gb"]})]
    own = {name: value for name, value in asked[0][1].items() if name != "gpu"}
    assert setup_from_options(**own).precision == "fp16"
    assert callable(memest.estimate)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch"):
        write_scenario({"bacth": 3})
    assert find_option("batch").name == "batch"


def test_a_calibration_has_a_former_name() -> None:
    options: dict[str, Any] = {"profile": "none"}
    assert argument("calibration", None, options) == "none"
    assert options == {}
    with pytest.raises(ConfigError, match="same option"):
        argument("calibration", "a.json", {"profile": "b.json"})
    assert read_scenario("profile=none") == {"calibration": "none"}
    assert normalise(["--profile", "none"]) == ["--calibration", "none"]
