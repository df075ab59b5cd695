"""Axes and grids: every syntax, every slip of the pen, and the order of points. No torch."""

import itertools

import pytest

from memest.config.option import Kind, Panel
from memest.config.option_table import OPTIONS
from memest.config.setup import Precision, Software
from memest.errors import ConfigError
from memest.search.axes import MAX_POINTS, parse_axis
from memest.search.grid import gpus_of, json_value, read_grid, setup_options


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("batch=1,2,4", "batch", (1, 2, 4)),
        ("batch=4,2,4", "batch", (4, 2)),
        ("b=1", "batch", (1,)),
        ("--batch=1", "batch", (1,)),
        ("per_device_train_batch_size=1,2", "batch", (1, 2)),
        ("per-device-train-batch-size=1", "batch", (1,)),
        ("max_seq_length=64", "seq_len", (64,)),
        ("seq-len=128:512:128", "seq_len", (128, 256, 384, 512)),
        ("seq-len=100:350:100", "seq_len", (100, 200, 300)),
        ("batch=1:4", "batch", (1, 2, 3, 4)),
        ("batch=1:64:x2", "batch", (1, 2, 4, 8, 16, 32, 64)),
        ("batch=1:100:x10", "batch", (1, 10, 100)),
        ("batch=1:4,8:32:x2", "batch", (1, 2, 3, 4, 8, 16, 32)),
        ("audio-seconds=0.1:0.5:0.1", "audio_seconds", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("bf16", "bf16", (False, True)),
        ("use-cache", "use_cache", (False, True)),
        ("padded=true,False", "padded", (True, False)),
        ("checkpointing", "checkpointing", ("none", "full")),
        ("checkpointing=none,every_n:2", "checkpointing", ("none", "every_n:2")),
        ("gpu=t4, local:1", "gpu", ("t4", "local:1")),
        ("software=torch=2.6;torch=2.10,cuda=12.8", "software",
         ("torch=2.6", "torch=2.10,cuda=12.8")),
        ("freeze=layer\\.[0-9]{1,2};", "freeze", ("layer\\.[0-9]{1,2}",)),
        ("gpu-memory=8GiB,24GiB", "gpu_memory", ("8GiB", "24GiB")),
    ],
)  # fmt: skip
def test_an_axis_of_the_command_line(text, name, values):
    assert parse_axis(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no option"),
        ("=1", "names no option"),
        ("batch", "names no values"),
        ("batch=", "no values to sweep over"),
        ("batch=,", "no values to sweep over"),
        ("bach=1", "Did you mean batch"),
        ("zzzz=1", "'zzzz' is not an option to sweep over"),
        ("trust-remote-code=true", "cannot be an axis"),
        ("batch=x", "'x' is not a whole number"),
        ("batch=1.5", "'1.5' is not a whole number"),
        ("batch=1:2:3:4", "is not a range"),
        ("batch=1:x2", "is not a range"),
        ("batch=8:1", "write the smaller number first, 1:8"),
        ("batch=1:8:0", "its step must be above 0"),
        ("batch=1:8:-1", "its step must be above 0"),
        ("batch=1:8:x1", "a factor is above 1"),
        ("batch=0:8:x2", "a factor is above 1"),
        ("batch=1:8:0.5", "has 1.5 in it"),
        ("batch=1:9999999", f"more than {MAX_POINTS:,} values"),
        ("audio-seconds=1:1.5:x1.0000001", "more than 1,000 values: take a larger factor"),
        ("audio-seconds=x", "'x' is not a number"),
        ("padded=perhaps", "neither true nor false"),
        ("gpu-memory=12x", "--gpu-memory"),
    ],
)
def test_a_wrong_axis_says_what_to_write(text, words):
    with pytest.raises(ConfigError, match=words.replace("(", "\\(")):
        parse_axis(text)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_but_one_can_be_an_axis_in_every_spelling(option):
    value = {
        Kind.WHOLE: "2", Kind.NUMBER: "2", Kind.SWITCH: "true", Kind.EITHER: "true",
        Kind.MODE: "full", Kind.LIST: "t4", Kind.TEXT: "1",
    }[option.kind]  # fmt: skip
    value = "8GiB" if option.name in ("gpu_memory", "device_context") else value
    spelt = [flag for flag in option.flags if not flag.startswith("--no-")]
    for name in (*spelt, *(k for k in option.keywords if not k.startswith("no_"))):
        if option.name == "trust_remote_code" or option.panel is Panel.OWN_MODULE:
            with pytest.raises(ConfigError):
                parse_axis(f"{name}={value}")
        else:
            assert parse_axis(f"{name}={value}")[0] == option.name


class TestGrid:
    def test_the_last_axis_runs_fastest_and_models_slowest(self):
        grid = read_grid({"batch": [1, 2], "seq_len": "32,64,96"}, {"fp16": True})
        questions = list(grid.questions(2))
        assert [q.index for q in questions] == list(range(12))
        assert [(q.model, *(v for _, v in q.options)) for q in questions] == [
            (m, b, s, True) for m, b, s in itertools.product((0, 1), (1, 2), (32, 64, 96))
        ]
        assert questions[0].options == (("batch", 1), ("seq_len", 32), ("fp16", True))

    def test_values_of_python(self):
        numpy = pytest.importorskip("numpy")
        grid = read_grid(
            {
                "micro_batch_size": numpy.array([1, 2]), "seq_len": range(32, 97, 32),
                "fp16": True, "software": {"torch": "2.6"}, "freeze": [("a", "b"), "c"],
                "optim": "sgd", "use_cache": [None, False],
            },
            {},
        )  # fmt: skip
        assert {axis.name: axis.values for axis in grid.axes} == {
            "batch": (1, 2), "seq_len": (32, 64, 96), "fp16": (True,),
            "software": ({"torch": "2.6"},), "freeze": (("a", "b"), "c"), "optim": ("sgd",),
            "use_cache": (None, False),
        }  # fmt: skip
        assert type(grid.axes[0].values[0]) is int

    def test_several_gpus_are_an_axis_and_one_is_not(self):
        both = read_grid({"batch": [1]}, {"gpu": ["t4", "a100-40gb"]})
        assert [axis.name for axis in both.axes] == ["batch", "gpu"]
        assert gpus_of(both) == ("t4", "a100-40gb")
        one = read_grid({"batch": [1]}, {"gpu": ("t4",)})
        assert one.fixed == (("gpu", "t4"),)
        assert gpus_of(one) == ("t4",)
        assert one.has_gpu
        assert not read_grid({"batch": [1]}, {}).has_gpu

    def test_arguments_without_a_say_in_memory_are_passed_over(self):
        assert read_grid({"batch": [1]}, {"learning_rate": 1e-4, "fp16": None}).fixed == ()

    @pytest.mark.parametrize(
        ("grid", "options", "words"),
        [
            ({"batch": [1], "batch_size": [2]}, {}, "swept over twice"),
            ({"batch": [1]}, {"batch_size": 2}, "is given and --batch swept over"),
            ({"precision": ["fp32"]}, {"fp16": True}, "--fp16 is given and --precision"),
            ({"gpu": ["t4"]}, {"gpu": ["t4", "a100"]}, "--gpu is given and swept over"),
            ({"batch": [1]}, {"seq_len": 1, "max_length": 2}, "the same option"),
            ({"batch": []}, {}, "no values"),
            ({"batch": [1, 0]}, {}, "--batch 0 is out of range"),
            ({"optim": ["sgd", "adamm"]}, {}, "Did you mean 'adam'"),
            ({"optim": ["sgd", "adamw_apex_fused"]}, {}, "not modelled yet"),
            ({"batch": [1]}, {"optim": "adamm"}, "Did you mean 'adam'"),
            ({}, {"optim": "adamm"}, "Did you mean 'adam'"),
            ({"batch": [1]}, {"nonsense": 1}, "'nonsense' is not an option"),
            ({"batch": "1:1000", "seq_len": "1:1000"}, {}, "1,000,000 points"),
        ],
    )
    def test_what_is_wrong_everywhere_is_refused_at_once(self, grid, options, words):
        with pytest.raises(ConfigError, match=words):
            read_grid(grid, options)

    @pytest.mark.slow
    def test_models_count_for_the_limit(self):
        read_grid({"batch": "1:60000"}, {})
        with pytest.raises(ConfigError, match="2 models, 60,000 x batch"):
            read_grid({"batch": "1:60000"}, {}, num_models=2)

    def test_a_value_that_is_possible_somewhere_stays(self):
        # fp16 autocast refuses float16 weights, and both have other partners
        grid = read_grid({"precision": "fp16,fp32", "dtype": "float16,float32"}, {})
        assert grid.num_points == 4
        with pytest.raises(ConfigError, match="float16"):
            read_grid({"precision": "fp16", "dtype": "float16,float32"}, {})


def test_options_that_are_no_part_of_the_setup():
    options = (("batch", 1), ("gpu", "t4"), ("gpu_memory", "1GiB"), ("device_context", "1MiB"))
    assert setup_options(options) == {"batch": 1}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Precision.FP16, "fp16"), (Software(torch=(2, 6)), "torch=2.6"), (("a", "b"), ["a", "b"]),
        ({"use_reentrant": False}, "use_reentrant=False"), (None, None), (True, True), (3, 3),
        (object, "<class 'object'>"),
    ],
)  # fmt: skip
def test_values_as_json_has_them(value, plain):
    assert json_value(value) == plain
