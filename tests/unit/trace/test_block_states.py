"""bitsandbytes' states on meta against the library's own classes, the Trainer's among them."""

from __future__ import annotations

import warnings

import pytest
import torch

from memest.config.setup import Setup
from memest.trace.optimizers.bitsandbytes import block_states, blocks_of
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.recorder import Recorder

bitsandbytes = pytest.importorskip("bitsandbytes")

NEW, OLD = (0, 50), (0, 43)
SHAPES = ((1024, 768), (768,), (5000,), (64, 63))
NAMES = [
    f"{name}{bits}" for name in ("adamw", "lion", "ademamix", "rmsprop_bnb")
    for bits in ("_8bit", "_32bit")
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_overrides():
    """The library goes by id(parameter), which an earlier test's parameters may have had."""
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


def _parameters(shapes=SHAPES, dtype=torch.float32):
    parameters = [
        torch.nn.Parameter(torch.empty(shape, device="meta", dtype=dtype)) for shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters


def _stream(make, **how):
    """What two steps allocate and free beyond parameters and gradients, and managed bytes."""
    recorder = Recorder()
    with recorder:
        parameters = _parameters(**how)
        before = len(recorder.trace.sizes)
        optimizer = make(parameters, recorder)
        optimizer.step()
        optimizer.step()
        events = [(kind, recorder.trace.sizes[i]) for kind, i in recorder.trace.decode()]
        recorder.forget()
    return events[before:], recorder.trace.managed_bytes


def _ours(name, version=NEW, full=frozenset()):
    def make(parameters, recorder):
        chosen = frozenset(id(parameters[i]) for i in full)
        return block_states([{"params": parameters}], blocks_of(name), chosen, recorder, version)

    return make


def _theirs(name):
    blocks = blocks_of(name)
    more = {} if blocks.algorithm == "RMSprop" else {"is_paged": blocks.paged}

    def make(parameters, _):
        kind = getattr(bitsandbytes.optim, blocks.algorithm)
        return kind(parameters, lr=1e-3, optim_bits=blocks.bits, **more)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_allocates_what_the_library_does_in_its_order(name, dtype):
    ours, theirs = _stream(_ours(name), dtype=dtype), _stream(_theirs(name), dtype=dtype)

    assert ours == theirs
    assert ours[0]


def test_blocks_had_2048_elements_before_0_44():
    new = sum(size for _, size in _stream(_ours("lion_8bit"))[0])
    old = sum(size for _, size in _stream(_ours("lion_8bit", OLD))[0])

    assert new - old == 4 * (1024 * 768 // 256 - 1024 * 768 // 2048 + 20 - 3)


def test_paged_states_are_managed_memory_from_100_000_elements_on(monkeypatch):
    asked = []

    class Paged:
        is_paged = True
        nbytes = 0

        def __init__(self, *shape, dtype, device):
            asked.append(torch.Size(shape).numel() * dtype.itemsize)
            self.dtype = dtype

    monkeypatch.setattr(bitsandbytes.functional, "get_paged", Paged)
    monkeypatch.setattr(bitsandbytes.functional, "fill", lambda *_: None)
    monkeypatch.setattr(bitsandbytes.functional, "prefetch_tensor", lambda *_: None)
    for name in ("optimizer_update_32bit", "optimizer_update_8bit_blockwise"):
        monkeypatch.setattr(bitsandbytes.functional, name, lambda *_, **__: None)
    for name in NAMES:
        if "rmsprop" in name:  # the library has no paged one
            continue
        asked.clear()
        theirs = _stream(_theirs(f"paged_{name}"))[0]
        ours, managed = _stream(_ours(f"paged_{name}"))

        assert managed == sum(asked) > 0, name
        assert ours == theirs, name


SMALL_BERT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 256, "vocab_size": 997, "max_position_embeddings": 128,
}  # fmt: skip
SMALL_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 997, "n_positions": 128}


def _config(kind):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(SMALL_GPT2 if kind == "gpt2" else SMALL_BERT))


def _real_states(kind, name, tmp_path):
    """Bytes of the states that a real Trainer has after a step on the CPU, by parameter."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            words = torch.arange(8) + index
            return {"input_ids": words, "labels": words}

    model = AutoModelForCausalLM.from_config(_config(kind))
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, optim=name, report_to=[], disable_tqdm=True,
        save_strategy="no", per_device_train_batch_size=2,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
        trainer.train()
    names = {id(p): n for n, p in model.named_parameters()}
    found = trainer.optimizer.optimizer.state
    return {
        names[id(p)]: sum(
            v.nbytes for k, v in state.items()
            if isinstance(v, torch.Tensor) and not k.startswith("qmap")
        )
        for p, state in found.items()
    }  # fmt: skip


def _priced_states(kind, name, loop="trainer"):
    from transformers import AutoModelForCausalLM

    recorder = Recorder()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(kind))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = make_optimizer(model, Setup(optim=name, loop=loop), recorder, (2, 13))
    optimizer.step()
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
        for p, state in optimizer.state.items()
    }, recorder.notes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])  # gpt2: the head is the embedding
@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit", "ademamix_8bit", "rmsprop_bnb_8bit"])
def test_states_under_the_trainer_are_those_of_a_real_run(kind, name, tmp_path):
    priced, notes = _priced_states(kind, name)

    assert priced == _real_states(kind, name, tmp_path)
    assert any("embeddings in fp32" in note for note in notes)


def test_only_the_trainer_makes_an_exception_of_embeddings():
    word = "bert.embeddings.word_embeddings.weight"
    trainer, script = (
        _priced_states("bert", "adamw_8bit", loop)[0] for loop in ("trainer", "plain")
    )

    assert trainer[word] == 2 * 4 * 997 * 64
    assert script[word] == 2 * (997 * 64 + 4 * -(-997 * 64 // 256))
    assert {n: b for n, b in trainer.items() if "embeddings." not in n} == {
        n: b for n, b in script.items() if "embeddings." not in n
    }


def test_a_real_device_gets_the_library_itself():
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100))
    optimizer = make_optimizer(model, Setup(optim="adamw_8bit"), Recorder(), (2, 13))

    assert isinstance(optimizer, bitsandbytes.optim.AdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    embedding, matrix = model[0].weight, model[1].weight
    assert optimizer.state[embedding]["state1"].dtype is torch.float32
    assert optimizer.state[matrix]["state1"].dtype is torch.uint8
