"""torch.compile in a trace: PyTorch's own graphs, partition and buffer plan, without a GPU."""

from __future__ import annotations

import functools

import pytest
import torch

import memest
from memest.catalog.resolve import ModelSource
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.events import ALLOC, FREE, MARK, Phase
from memest.trace.cuda.inductor import inductor_without_gpu
from memest.trace.meta_model import build
from memest.trace.session import trace_built
from memest.trace.training import TracePlan
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec
from memest.workspaces.registry import workspaces_of
from support.small_llama import peak_of

GPU = GpuTraits(capability=(9, 0), sm_count=132, max_threads_per_sm=2048)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 2000, "max_position_embeddings": 256,
}  # fmt: skip


class Small(torch.nn.Module):
    """What transformers are made of, with nothing that depends on the device."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(320, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.qkv = torch.nn.Linear(64, 192)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)
        self.head = torch.nn.Linear(64, 320, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2) / 8).float().cumsum(-1).sigmoid()
        x = x + scores.to(value.dtype) @ value
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits.view(-1, 320), ids.view(-1))


def _saved(model, ids, backend):
    """Bytes of each tensor that is saved for backward, weights left out; and the gradients."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = (storage.nbytes(), tensor.dtype)
        return tensor

    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend=backend, dynamic=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = compiled(ids)
        loss.backward()
    finally:
        torch._dynamo.reset()
    return sorted(found.values(), key=str), [p.grad is not None for p in model.parameters()]


def _uncompiled(gm, example_inputs):
    """Inductor as it compiles for this CPU, its graphs run by PyTorch instead of by kernels."""
    from functorch.compile import make_boxed_func
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(force_disable_caches=True):
        return compile_fx(
            gm, example_inputs, inner_compile=lambda graph, *_, **__: make_boxed_func(graph.forward)
        )


@pytest.mark.slow
def test_what_is_saved_is_what_a_compiled_step_on_the_cpu_saves():
    torch.manual_seed(0)
    real = Small()
    ids = torch.randint(0, 320, (3, 32))
    with torch.device("meta"):
        model = Small()
    expected = _saved(real, ids, _uncompiled)
    with inductor_without_gpu(GPU, lambda _: None) as backend:
        found = _saved(model, ids.to("meta"), backend)

    assert found == expected
    assert all(found[1])


def _trace(config=LLAMA, **options):
    setup = Setup(
        **{"batch": 2, "seq_len": 128, "dtype": "bfloat16", "optim": "none",
           "torch_compile": True, **options}
    )  # fmt: skip
    source = ModelSource(kind="file", id="small", config=config, provenance="test")
    run = build(setup, source, None, None, None)
    return trace_built(run, setup, GPU, TracePlan(steps=1))


_traced = functools.cache(_trace)


def _alive(trace, phase):
    """Bytes of what is born in a phase, or before it, and alive when the next phase begins."""
    alive, inside = {}, False
    for kind, index in trace.decode():
        if kind == MARK:
            if inside:
                break
            inside = trace.marks[index].phase is phase
        elif kind == ALLOC:
            alive[index] = trace.sizes[index]
        elif kind == FREE:
            alive.pop(index, None)
    return sum(alive.values())


@pytest.mark.slow
def test_fusion_keeps_less_and_needs_less():
    compiled, eager = _traced(), _trace(torch_compile=False)

    assert _alive(compiled, Phase.FORWARD) < _alive(eager, Phase.FORWARD)
    assert peak_of(compiled) < peak_of(eager)
    assert len(compiled.sizes) < len(eager.sizes)


@pytest.mark.slow
def test_the_gradients_of_all_weights_are_there():
    trace = _traced()
    weights = _alive(trace, Phase.LOAD)
    gradients = _alive(trace, Phase.BACKWARD)

    assert gradients >= 2 * sum(2 * w.numel() for w in _weights())
    assert weights < gradients


def _weights():
    setup = Setup(dtype="bfloat16")
    source = ModelSource(kind="file", id="small", config=LLAMA, provenance="test")
    return list(build(setup, source, None, None, None).model.parameters())


@pytest.mark.slow
def test_a_trace_is_the_same_again_and_leaves_nothing_behind():
    from torch._inductor.compile_fx import compile_fx_inner, fake_tensor_prop
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import FakeTensorMode

    def things():
        return (
            compile_fx_inner, fake_tensor_prop, GraphLowering.compile_to_module,
            FakeTensorMode.dispatch, torch.cuda.get_device_properties, torch.cuda.set_device,
            dict(torch.ops.aten.nll_loss.default.py_kernels),
        )  # fmt: skip

    before = things()
    first, second = _trace(), _trace()

    assert things() == before
    assert first.events == second.events
    assert first.sizes == second.sizes


@pytest.mark.slow
def test_checkpointing_recomputes_inside_the_graph():
    whole, checkpointed = _traced(), _trace(checkpointing="full")

    assert _alive(checkpointed, Phase.FORWARD) < _alive(whole, Phase.FORWARD)


@pytest.mark.slow
def test_the_answer_says_what_is_approximate_and_has_a_range_for_it():
    model = "meta-llama/Llama-3.2-1B?num_hidden_layers=1&hidden_size=128&intermediate_size=256"
    options = {"seq_len": 64, "batch": 2, "gpu": "A100", "max_batch": False}
    found = memest.estimate(model, torch_compile=True, **options)
    eager = memest.estimate(model, **options)

    assert any("temporaries are approximate" in note for note in found.notes)
    assert found.interval.high_bytes - found.peak.device_bytes > (
        eager.interval.high_bytes - eager.peak.device_bytes
    )
    assert found.setup.torch_compile


def test_an_unaligned_matmul_may_be_padded():
    def product(columns):
        first = TensorSpec((256, 64), (64, 1), "bfloat16")
        second = TensorSpec((64, columns), (1, 64), "bfloat16")
        call = OpCall("inductor.matmul", (first, second), (), (), "main")
        return workspaces_of(call, GPU)

    assert product(1000) == ()
    (found,) = product(1001)
    assert found.nbytes == 0
    assert found.high_nbytes == 2 * (256 * 64 + 64 * 1008 + 256 * 1008)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"torch_compile_mode": "reduce-overhead"}, "CUDA graphs"),
        ({"torch_compile_mode": "max-autotune"}, "measures matmul templates"),
        ({"torch_compile_mode": "defualt"}, "Did you mean 'default'"),
        ({"torch_compile_backend": "eager"}, "TorchInductor"),
        ({"torch_compile": True, "use_liger_kernel": True}, "--use-liger-kernel is not priced"),
        ({"torch_compile": True, "distributed": Distributed(num_gpus=2)}, "--num-gpus is not"),
        ({"torch_compile": True, "optim": "lomo"}, "steps in backward"),
        ({"torch_compile": True, "attn_implementation": "flash_attention_2"}, "sdpa takes"),
    ],
)
def test_what_is_not_priced_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Setup(**options)


def test_a_mode_or_a_backend_switches_compilation_on():
    assert Setup(torch_compile_mode="default").torch_compile
    assert Setup(torch_compile_backend="inductor").torch_compile
    assert not Setup().torch_compile


def test_another_release_is_refused():
    with pytest.raises(ConfigError, match="graphs are those of the installed torch"):
        memest.estimate("gpt2?n_layer=1", torch_compile=True, software="torch=2.4")


@pytest.mark.slow
def test_bf16_before_ampere_stays_eager():
    with pytest.raises(ConfigError, match="before Ampere"):
        memest.estimate(
            "gpt2?n_layer=1&n_embd=64&n_head=2&vocab_size=500", torch_compile=True, gpu="T4",
            dtype="bfloat16", seq_len=32, batch=2, max_batch=False,
        )  # fmt: skip


@pytest.mark.slow
def test_a_live_module_is_compiled():
    """What reads ``cuda`` as meta in a user's code is no part of the model that Dynamo sees."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    asked = {"inputs": ("input:float32[B,64]", "y:int64[B]"), "loss": "cross_entropy",
             "batch": 512, "loop": "plain", "gpu": "rtx-4090"}  # fmt: skip
    eager = memest.estimate(module, **asked)
    answer = memest.estimate(module, torch_compile=True, **asked)
    assert sum(row.bytes for row in answer.breakdown) == answer.peak.allocated_bytes
    assert any("Triton kernels" in note for note in answer.notes)
    assert answer.peak.allocated_bytes != eager.peak.allocated_bytes
    assert torch._C._len_torch_function_stack() == 0


class NamesCuda(torch.nn.Module):
    """A layer, and a constant and a bias that are made on a device by name."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        scale = torch.tensor(2.0, device="cuda")
        return self.layer(x) * scale + 2 ** torch.ones(64, device="cuda")


@pytest.mark.slow
def test_a_compiled_model_may_name_the_device():
    answer = memest.estimate(
        NamesCuda(), inputs={"x": "float32[B,64]"}, loss="mean", batch=8, torch_compile=True,
        max_batch=False,
    )  # fmt: skip
    assert answer.peak.allocated_bytes > 0
