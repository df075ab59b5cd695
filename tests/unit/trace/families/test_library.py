"""What Python code does on a GPU and would not do on meta tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memest.errors import ConfigError
from memest.events import Category
from memest.trace.cuda.autocast import autocast_on_meta
from memest.trace.cuda.known_values import evaluate
from memest.trace.cuda.transformers_patches import transformers_on_meta
from memest.trace.cuda.value_answers import answer_handlers
from memest.trace.isolation import restore_model
from memest.trace.model.adjust import keep_all_layers
from memest.trace.recorder import Recorder
from memest.workspaces.operator_call import GpuTraits

A100 = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
V100 = GpuTraits(capability=(7, 0), sm_count=80, max_threads_per_sm=2048)


@pytest.fixture
def on_meta():
    recorder = Recorder(answer_handlers())
    model = torch.nn.Linear(1, 1, device="meta")
    with (
        autocast_on_meta(recorder, (2, 13)),
        transformers_on_meta(recorder, model, A100),
        recorder,
    ):
        yield recorder


# -- autocast --------------------------------------------------------------------------------------


def test_maybe_autocast_switches_autocast_off_for_its_region(on_meta):
    from transformers.models.gpt2 import modeling_gpt2

    x = torch.empty(4, 4, device="meta")

    with torch.autocast("cuda", dtype=torch.bfloat16):
        outside = x @ x
        with modeling_gpt2.maybe_autocast(device_type="meta", enabled=False):
            inside = x @ x

    assert (outside.dtype, inside.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_of_the_input_s_device_is_cuda_s(on_meta):
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled("meta")
        assert torch.get_autocast_dtype("meta") == torch.float16
    assert not torch.is_autocast_enabled("meta")


def test_everything_is_put_back():
    from transformers.models.gpt2 import modeling_gpt2

    before = (modeling_gpt2.maybe_autocast, torch.tensor, torch._weight_norm)
    with transformers_on_meta(Recorder(), torch.nn.Linear(1, 1), A100):
        assert modeling_gpt2.maybe_autocast is not before[0]

    assert (modeling_gpt2.maybe_autocast, torch.tensor, torch._weight_norm) == before


def test_routers_compute_in_fp32_under_autocast(trace):
    """The router's region has autocast off: its matmul keeps fp32 operands, and no other does."""
    _, traced, _ = trace("baidu/ERNIE-4.5-21B-A3B-PT", precision="bf16", seq_len=16)

    single = {
        traced.module_names[module].rpartition(".")[2]
        for site, module in zip(traced.call_of_site, traced.site_modules, strict=True)
        if (call := traced.calls[site]).op == "aten.mm.default"
        and call.args[0].dtype == call.args[1].dtype == "float32"
    }

    assert single == {"gate"}


# -- constants and random masks --------------------------------------------------------------------


def test_constants_made_on_the_device_keep_their_values(on_meta):
    device = torch.device("meta")
    length = torch.tensor([2, 3], device=device)

    assert evaluate(length * 2).tolist() == [4, 6]
    assert torch.tensor([length[0], length[1]], device=device).tolist() == [2, 3]
    assert evaluate(length.new_tensor([7])).tolist() == [7]


def test_floats_made_of_known_values_are_known(on_meta):
    rows = torch.nn.functional.one_hot(torch.tensor([1, 0], device="meta"), 3).float() / 2

    assert evaluate((rows == 0).all(dim=0)).tolist() == [False, False, True]


def test_global_attention_on_the_first_token_is_seen(trace):
    """Longformer's classifier puts it there by writing into a slice of zeros."""
    _, traced, _ = trace("allenai/longformer-base-4096", seq_len=64)

    assert not any("depends on values" in note for note in traced.notes)


def test_what_a_weight_enters_is_not_known(on_meta):
    weight = torch.empty(3, device="meta")

    assert evaluate(weight + torch.tensor([1.0, 2.0, 3.0], device="meta")) is None


def test_random_masks_are_the_same_in_every_trace(trace):
    first = trace("facebook/wav2vec2-base", audio_seconds=2.0)[1]
    second = trace("facebook/wav2vec2-base", audio_seconds=2.0)[1]

    assert list(first.sizes) == list(second.sizes)


def test_absent_kernels_are_noted(trace):
    _, traced, _ = trace("AntonV/mamba2-130m-hf", seq_len=32)

    assert any("as without mamba_ssm" in note for note in traced.notes)


def test_layers_that_drop_at_random_do_not(build):
    built, _ = build("facebook/wav2vec2-base", changes={"layerdrop": 0.1})

    assert built.config.layerdrop == 0
    assert any("layerdrop" in note for note in built.notes)


def test_layers_of_any_part_are_kept():
    """Of a module that keeps the probability itself, and of a part's configuration."""
    module = torch.nn.Linear(1, 1)
    module.layerdrop = 0.1
    module.config = SimpleNamespace(model_type="x", speech_encoder_layerdrop=0.1)

    assert len(keep_all_layers(module)) == 1
    assert module.layerdrop == module.config.speech_encoder_layerdrop == 0
    assert keep_all_layers(module) == []


# -- mixtures of experts ---------------------------------------------------------------------------


def test_experts_in_fp32_trace(trace):
    built, traced, _ = trace("mistralai/Mixtral-8x7B-v0.1", dtype="float32", seq_len=16)

    assert built.dtype == torch.float32
    assert "aten._grouped_mm.default" in traced.op_names


def test_routing_by_loop_gets_equal_shares_and_says_so(trace):
    _, traced, _ = trace("databricks/dbrx-base", seq_len=16)

    assert any("equal shares" in note for note in traced.notes)


# -- FlashAttention 2 ------------------------------------------------------------------------------


def activations(traced):
    """Bytes that a forward leaves for its backward."""
    kept = (
        size
        for number, size in enumerate(traced.sizes)
        if traced.category(number) is Category.ACTIVATIONS
    )
    return sum(kept)


@pytest.mark.parametrize("padded", [False, True])
def test_flash_attention_keeps_no_score_matrix(trace, padded):
    options = {"precision": "bf16", "seq_len": 128, "padded": padded}
    _, eager, _ = trace("bert-base-uncased", attn_implementation="eager", **options)
    _, flash, _ = trace("bert-base-uncased", attn_implementation="flash_attention_2", **options)

    assert "aten._flash_attention_forward.default" in flash.op_names
    assert activations(flash) < activations(eager)


def test_flash_attention_keeps_what_the_package_keeps(on_meta):
    from memest.trace.cuda.flash import flash_attn_func

    shape = (2, 16, 4, 64)
    q, k, v = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in "qkv"
    )

    out = flash_attn_func(q, k, v)
    saved = [t for t in out.grad_fn.saved_tensors if t is not None]

    assert [tuple(t.shape) for t in saved] == [shape] * 4 + [(2, 4, 16), (2,)]
    out.sum().backward()
    assert q.grad.shape == shape


def test_odd_heads_are_padded(on_meta):
    from memest.trace.cuda.flash import flash_attn_func

    q, k, v = (
        torch.empty(1, 8, 2, 20, dtype=torch.float16, device="meta").requires_grad_() for _ in "qkv"
    )

    out = flash_attn_func(q, k, v)
    out.sum().backward()

    assert out.shape[-1] == q.grad.shape[-1] == 20


def test_flash_attention_refuses_fp32(build):
    with pytest.raises(ConfigError, match=r"fp16 or bf16.*--bf16"):
        build("bert-base-uncased", attn_implementation="flash_attention_2")


def test_flash_attention_refuses_old_gpus(trace):
    with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
        trace(
            "bert-base-uncased",
            attn_implementation="flash_attention_2",
            precision="fp16",
            seq_len=16,
            gpu=V100,
        )


def test_a_model_without_flash_attention_names_what_it_has(build):
    with pytest.raises(ConfigError, match=r"does not support it.*Legal: eager"):
        build("t5-base", attn_implementation="flash_attention_2", precision="bf16")


# -- state-space layers ----------------------------------------------------------------------------


@pytest.mark.slow(but=("state-spaces/mamba-130m-hf",))
@pytest.mark.parametrize(
    "model_id", ["state-spaces/mamba-130m-hf", "ai21labs/Jamba-v0.1", "Zyphra/Zamba-7B-v1"]
)
def test_state_space_layers_do_not_loop_over_the_sequence(trace, model_id):
    _, short, _ = trace(model_id, seq_len=16)
    _, long, _ = trace(model_id, seq_len=64)

    assert len(long.events) < 1.5 * len(short.events)
    assert any("mamba-ssm" in note for note in long.notes)


def test_a_short_sequence_does_not_change_the_model(build):
    """BigBird gives its sparse attention up when a sequence is short: only for that trace."""
    built, _ = build("google/bigbird-roberta-base")
    encoder = built.model.bert.encoder

    with restore_model(built.model):
        built.model.bert.set_attention_type("original_full")
        assert encoder.attention_type == "original_full"

    assert encoder.attention_type == "block_sparse"
    assert encoder.layer[0].attention.attention_type == "block_sparse"
