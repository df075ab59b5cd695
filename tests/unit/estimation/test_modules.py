"""Live modules and factories: what is asked of them counts, and what cannot be had is said."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import memest
from memest.errors import ConfigError, MemestError
from memest.events import Category


class Net(torch.nn.Module):
    """Two layers, and a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(256, 512)
        self.second = torch.nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        hidden = torch.relu(self.first(x))
        return self.second(hidden), {"hidden": hidden}


def make() -> torch.nn.Module:
    return Net()


def ask(model, batch=32, **options):
    options.setdefault("inputs", {"x": torch.randn(batch, 256)})
    return memest.estimate(model, gpu="T4", max_batch=False, **options)


def bytes_of(result, category):
    return sum(row.bytes for row in result.breakdown if row.category is category)


@pytest.mark.parametrize("batch", [8, 64, 1000])
@pytest.mark.parametrize("factory", [False, True])
def test_the_step_has_the_batch_of_the_example_inputs(batch, factory):
    result = ask(f"{__name__}:make" if factory else Net(), batch)

    assert result.setup.batch == batch
    assert bytes_of(result, Category.INPUTS) >= batch * 256 * 4


def test_frozen_parameters_of_a_live_module_have_no_states():
    module = Net()

    result = ask(module, freeze="first")

    assert result.model.trainable_parameters == 512 * 8 + 8
    assert all(p.requires_grad for p in module.parameters())


def test_a_live_module_takes_the_dtype_asked_for():
    module = Net()

    result = ask(module, inputs={"x": torch.randn(32, 256, dtype=torch.bfloat16)}, dtype="bfloat16")

    assert bytes_of(result, Category.PARAMETERS) == 2 * result.model.parameters
    assert next(module.parameters()).dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": lambda outputs, batch: outputs[0]}, "shape"),
        ({"loss": lambda outputs, batch: torch.zeros(())}, "no parameter"),
        ({"loss": lambda outputs, batch: 3.0}, "float"),
        ({"loss": "mse"}, r"one target.*--input"),
        ({"attn_implementation": "eager"}, "--attn-implementation eager"),
        ({"freeze": "third"}, "matches no parameter"),
    ],
    ids=("not a number", "detached", "float", "name", "attention", "freeze"),
)
def test_what_the_module_cannot_do_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ask(Net(), **options)


def test_weights_computed_from_parameters_can_be_copied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.nn.utils.weight_norm(torch.nn.Linear(256, 8))

    result = ask(module, inputs={"input": torch.randn(4, 256)})

    assert result.model.parameters == 256 * 8 + 8 + 8


def test_what_is_no_module_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(torch.nn.Linear(4, 4), torch.randn(2, 4))

    with pytest.raises(ConfigError, match="TorchScript"):
        ask(scripted, inputs={"input": torch.randn(2, 4)})
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        ask(3)


@pytest.fixture(scope="module")
def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
def test_checkpointing_that_is_on_already_stays_on(llama):
    options = {"inputs": None, "seq_len": 128}
    plain = ask(llama, **options)
    asked = ask(llama, checkpointing="full", **options)
    llama.activation_checkpointing_enable({"use_reentrant": False})
    try:
        own = ask(llama, **options)
    finally:
        llama.activation_checkpointing_disable()

    assert own.setup.checkpointing == "full"
    assert own.peak == asked.peak
    assert own.peak.allocated_bytes < plain.peak.allocated_bytes


FACTORIES = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x)


def with_inputs():
    return Net(), {"x": torch.empty(4, 64)}, lambda out, batch: out.pow(2).mean()


def alone():
    return Net()


def nothing():
    return 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "memest_test_factories.py").write_text(FACTORIES, encoding="utf-8")
    (tmp_path / "memest_test_broken.py").write_text("def build(:", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_factory_brings_its_inputs_and_takes_any_batch(factories):
    small = memest.estimate("memest_test_factories:with_inputs", batch=16, loop="plain")
    large = memest.estimate("memest_test_factories:with_inputs", batch=32, loop="plain")

    assert (small.setup.batch, large.setup.batch) == (16, 32)
    assert large.peak.allocated_bytes >= small.peak.allocated_bytes


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("memest_test_factories:alone", "example inputs"),
        ("memest_test_factories:nothing", "not a torch.nn.Module"),
        ("memest_test_broken:build", "SyntaxError"),
    ],
)
def test_a_factory_that_does_not_do_is_told_so(factories, reference, words):
    with pytest.raises(MemestError, match=words):
        memest.estimate(reference)


@pytest.mark.slow
def test_the_setup_of_an_answer_can_be_asked_again(llama):
    first = ask(llama, inputs=None, seq_len=64)
    again = memest.estimate(llama, first.setup, gpu="T4", max_batch=False)

    assert first.setup.task == "causal-lm"
    assert again.peak == first.peak
    with pytest.raises(ConfigError, match="--task masked-lm is for models"):
        ask(llama, inputs=None, seq_len=64, task="masked-lm")
