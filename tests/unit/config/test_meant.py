"""What people type that is no option is answered by what to type."""

import re
import shlex

import pytest

from memest.config.meant import _SAYS, what_says
from memest.config.options import find_option
from memest.errors import ConfigError


@pytest.mark.parametrize("name", _SAYS)
def test_what_says_it_is_an_option_and_the_name_is_none(name):
    for flag in re.findall(r"--([a-z0-9-]+)", what_says(name)):
        assert find_option(flag.replace("-", "_"))
    with pytest.raises(ConfigError, match="What says it: "):
        find_option(name)


@pytest.mark.parametrize("typed", shlex.split("--LoRA --use-peft lora"))
def test_names_are_known_however_they_are_written(typed):
    assert what_says(typed) == "--peft lora, or --lora-r 16"


def test_others_say_nothing():
    assert what_says("--bacth-size") == ""


@pytest.mark.parametrize(
    ("typed", "said"),
    [("--use-vllm", "--engine vllm"), ("--rloo-k", "--num-generations N")],
)
def test_words_of_trainers_that_write_completions(typed, said):
    assert what_says(typed).startswith(said)
