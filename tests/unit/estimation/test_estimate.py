"""``memest.estimate``: what holds for every answer."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import memest
from memest.config.setup import Setup
from memest.errors import ConfigError, UnfitGpuError, UnknownGpuError, UnknownModelError
from memest.events import Category
from memest.report.result import Verdict

TINY = "prajjwal1/bert-tiny"
GIB = 1 << 30


def ask(**options):
    options.setdefault("batch", 4)
    options.setdefault("seq_len", 64)
    return memest.estimate(options.pop("model", TINY), **options)


def bytes_of(result, category):
    return sum(row.bytes for row in result.breakdown if row.category is category)


@pytest.mark.slow(
    "{'checkpointing': 'full', 'attn_implementation': 'eager'}",
    "{'dtype': 'bfloat16', 'master_weights': True}",
    "{'fp16': True}",
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fp16": True},
        {"bf16": True, "loop": "accelerate", "grad_accum": 2},
        {"checkpointing": "full", "attn_implementation": "eager"},
        {"dtype": "bfloat16", "master_weights": True},
        {"optim": "sgd_momentum", "loop": "plain", "zero_grad": "zero"},
        {"optim": "adafactor", "freeze": ("embeddings",)},
        {"alloc_conf": "expandable_segments:True", "grad_accum": 6},
    ],
    ids=str,
)
def test_the_numbers_add_up(options):
    result = ask(**options)
    peak = result.peak

    assert sum(row.bytes for row in result.breakdown) == peak.allocated_bytes
    assert all(row.bytes > 0 for row in result.breakdown)
    assert peak.reserved_bytes >= peak.allocated_bytes
    assert peak.device_bytes == peak.reserved_bytes + result.context_bytes
    assert result.interval.low_bytes <= peak.device_bytes <= result.interval.high_bytes
    assert max(t.allocated_bytes for t in result.timeline) == peak.allocated_bytes
    assert max(t.reserved_bytes for t in result.timeline) == peak.reserved_bytes
    activations = sum(layer.activation_bytes for layer in result.layers)
    assert activations == bytes_of(result, Category.ACTIVATIONS)
    parameters = sum(layer.parameter_bytes for layer in result.layers)
    assert parameters == result.model.parameter_bytes


@pytest.mark.slow
def test_the_same_question_has_the_same_answer_bit_for_bit():
    assert ask(fp16=True, gpu="T4").to_json() == ask(fp16=True, gpu="T4").to_json()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_more_samples_or_tokens_never_take_less(precision, checkpointing):
    common = {"precision": precision, "checkpointing": checkpointing}
    by_batch = [ask(batch=b, **common).peak for b in (1, 2, 3, 8, 21, 64)]
    by_length = [ask(seq_len=s, **common).peak for s in (16, 33, 128, 256, 512)]

    for series in (by_batch, by_length):
        allocated = [p.allocated_bytes for p in series]
        assert allocated == sorted(allocated)


@pytest.mark.slow(
    but=(
        "fp32-google/vit-base-patch16-224",
        "fp16-google/vit-base-patch16-224",
    )
)
@pytest.mark.parametrize("model", [TINY, "distilgpt2", "google/vit-base-patch16-224"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_checkpointing_never_raises_activations(model, precision):
    plain = memest.estimate(model, batch=4, precision=precision)
    checkpointed = memest.estimate(model, batch=4, precision=precision, checkpointing="full")

    assert bytes_of(checkpointed, Category.ACTIVATIONS) <= bytes_of(plain, Category.ACTIVATIONS)
    assert checkpointed.peak.allocated_bytes <= plain.peak.allocated_bytes


@pytest.mark.slow
def test_a_gpu_gets_a_verdict_a_headroom_and_a_largest_batch():
    result = ask(gpu="T4")

    assert result.verdict is Verdict.FITS
    assert result.gpu.headroom_bytes == result.gpu.usable_bytes - result.peak.device_bytes
    assert 0 < result.safe_batch <= result.max_batch

    at_most = ask(batch=result.max_batch, gpu="T4", max_batch=False)
    beyond = ask(batch=result.max_batch + 1, gpu="T4", max_batch=False)
    safe = ask(batch=result.safe_batch, gpu="T4", max_batch=False)
    unsafe = ask(batch=result.safe_batch + 1, gpu="T4", max_batch=False)
    assert at_most.verdict is not Verdict.DOES_NOT_FIT
    assert beyond.verdict is not Verdict.FITS
    assert safe.verdict is Verdict.FITS
    assert unsafe.verdict in (Verdict.TIGHT, Verdict.RELEASES_CACHE)


@pytest.mark.slow
def test_a_card_too_small_is_said_to_be_so():
    result = ask(batch=64, seq_len=512, gpu="T4", gpu_memory="600MiB")

    assert result.verdict is Verdict.DOES_NOT_FIT
    assert result.max_batch < 64


@pytest.mark.slow
def test_the_document_is_json_and_lists_what_the_contract_names():
    document = json.loads(ask(gpu="RTX 3090").to_json())

    assert {
        "schema_version", "model", "setup", "gpu", "peak", "interval", "ranges", "breakdown",
        "peak_at", "layers", "verdict", "max_batch", "notes",
    } <= set(document)  # fmt: skip
    assert document["setup"]["seq_len"] == 64
    assert document["model"]["class"] == "BertForSequenceClassification"
    assert "max_batch" not in json.loads(ask().to_json())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "bert-large-uncasd"}, UnknownModelError, "bert-large-uncased"),
        ({"gpu": "RTX 3091"}, UnknownGpuError, "3090"),
        ({"batch": 0}, ConfigError, "--batch 0"),
        ({"seq_len": 513}, ConfigError, "512"),
        ({"fp16": True, "bf16": True}, ConfigError, "bf16"),
        ({"optim": "adamw_torch_fuse"}, ConfigError, "adamw_torch_fused"),
        ({"optim": "adamw_apex_fused"}, ConfigError, "not modelled yet"),
        ({"freeze": ("no-such-layer",)}, ConfigError, "matches no parameter"),
        ({"bathc": 3}, ConfigError, "batch"),
        ({"attn_implementation": "flash_attention_2"}, ConfigError, "fp16"),
        ({"checkpointing": "every_n:0"}, ConfigError, "every_n"),
        ({"master_weights": True}, ConfigError, "--"),
        ({"max_grad_norm": float("inf")}, ConfigError, "--"),
        ({"gpu_memory": 0}, ConfigError, "--"),
        ({"gpu_memory": -5}, ConfigError, "--"),
        ({"device_context": -1}, ConfigError, "--"),
        ({"setup": Setup()}, ConfigError, "not both"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_way_out(options, error, words):
    with pytest.raises(error) as caught:
        ask(**options)
    assert words in str(caught.value)


@pytest.mark.slow
def test_cards_that_cannot_run_what_is_asked_are_left_out_and_said_to_be():
    plain = ask(bf16=True)
    flash = ask(bf16=True, attn_implementation="flash_attention_2")

    left_out = {fit.name for fit in plain.common_gpus} - {fit.name for fit in flash.common_gpus}
    assert "Tesla T4" in left_out
    assert len(flash.common_gpus) > 5
    assert "left out, because FlashAttention 2 needs compute capability 8.0: Tesla T4" in " ".join(
        flash.assumptions
    )
    assert "left out" not in " ".join(plain.assumptions)
    with pytest.raises(ConfigError, match="or newer"):
        ask(bf16=True, attn_implementation="flash_attention_2", gpu="T4")


def test_sizes_that_a_model_does_not_have_are_said_to_have_no_effect():
    result = ask(image_size=32, target_len=4)

    said = " ".join(result.assumptions)
    assert "--image-size 32 has no effect" in said
    assert result.setup.image_size is None
    assert "32 px" not in str(result)
    assert "--target-len 4 has no effect" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sdpa_backend": "flash"}, "takes no float32"),
        ({"sdpa_backend": "flash", "bf16": True, "gpu": "T4"}, "needs compute capability 8.0"),
        ({"bf16": True, "gpu": "T4", "software": "torch=2.2"}, "torch 2.2 refuses it"),
        (
            {"bf16": True, "gpu": "T4", "software": "torch=2.4,transformers=4.34"},
            "TrainingArguments of transformers 4.34",
        ),
    ],
    ids=str,
)
def test_what_stops_on_a_card_is_refused_for_it(options, words):
    with pytest.raises(UnfitGpuError, match=words):
        ask(max_batch=False, **options)


@pytest.mark.slow
def test_a_kernel_that_some_cards_lack_leaves_them_out():
    result = ask(sdpa_backend="flash", bf16=True)

    assert "the flash kernel cannot run this model's attention on them: Tesla T4" in " ".join(
        result.assumptions
    )
    assert "Tesla T4" not in {fit.name for fit in result.common_gpus}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "attention", "emulated"),
    [
        ({"gpu": "T4", "bf16": True}, "math kernel (flash needs compute capability 8.0", True),
        ({"gpu": "T4", "fp16": True}, "efficient kernel (flash needs compute", False),
        ({"gpu": "a100-40gb", "bf16": True}, "attention: sdpa; flash kernel", False),
        ({"gpu": "a100-40gb"}, "efficient kernel (flash takes no float32)", False),
        ({"gpu": "a100-40gb", "sdpa_backend": "math"}, "attention: sdpa; math kernel", False),
        ({"gpu": "T4", "dtype": "bfloat16"}, "math kernel", True),
    ],
    ids=str,
)
def test_what_a_card_makes_of_dtype_and_attention_is_said(options, attention, emulated):
    result = ask(max_batch=False, **options)

    assert attention in " ".join(result.assumptions)
    notes = " ".join(result.notes)
    assert ("bf16 is emulated on Tesla T4" in notes) == emulated
    if emulated:
        assert "Use --dtype float32 --fp16" in notes or "Use --fp16 instead" in notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"fsdp": "full_shard", "fsdp_wrap": ("BertLayer",)},
            "float32 shards, to which accelerate upcasts what trains under FSDP with --bf16",
        ),
        (
            {"zero": 2},
            "as DeepSpeed makes them for --bf16, and float32 master copies of what trains",
        ),
        ({"zero": 2, "offload_optimizer": True}, "master copies in host memory"),
        ({"fsdp": "full_shard", "loop": "plain"}, "with float32 weights"),
    ],
    ids=str,
)
def test_what_is_held_of_weights_that_are_shared_is_said(options, words):
    result = ask(num_gpus=2, bf16=True, max_batch=False, **options)

    assert words in " ".join(result.assumptions)


def test_the_largest_batch_of_a_loss_over_all_pairs_is_traced():
    """A contrastive loss is quadratic in the batch: the line through two traces is not enough."""

    class Pairs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            return (out @ out.T).square().mean()

    options = {"inputs": {"x": torch.randn(16, 8)}, "gpu": "T4", "gpu_memory": "1200MiB"}
    result = memest.estimate(Pairs(), **options)

    batch = result.max_batch
    options["max_batch"] = False
    at_most = memest.estimate(Pairs(), **options | {"inputs": {"x": torch.randn(batch, 8)}})
    beyond = memest.estimate(Pairs(), **options | {"inputs": {"x": torch.randn(batch + 1, 8)}})
    assert at_most.verdict is not Verdict.DOES_NOT_FIT
    assert at_most.gpu.headroom_bytes >= 0
    assert beyond.gpu.headroom_bytes < 0 or beyond.verdict is not Verdict.FITS


def test_fp16_autocast_over_fp16_weights_of_the_config_is_refused_with_advice(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "bert", "dtype": "float16", "num_hidden_layers": 1, "hidden_size": 64, '
        '"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}'
    )

    with pytest.raises(ConfigError, match="gradient scaler refuses"):
        ask(model=path, fp16=True)


BF16 = {"fp16": True, "dtype": "bfloat16", "optim": "adamw_torch"}


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, True),
        ({"loop": "plain"}, True),
        ({"lora_r": 4, "lora_target_modules": "c_attn", "autocast_adapter_dtype": False}, True),
        ({"lora_r": 4, "lora_target_modules": "c_attn"}, False),
        ({"cast_weights": "trainable=float32"}, False),
        ({"dtype": "float32"}, False),
        ({"bf16": True, "fp16": False}, False),
        ({"num_gpus": 2, "zero": 2}, False),
        ({"optim": "none"}, False),
    ],
    ids=str,
)
def test_the_gradient_scaler_takes_no_bfloat16(options, scales):
    """CUDA has no kernel that unscales such gradients; adapters of peft are float32 mostly."""
    question = {"seq_len": 16, "max_batch": False, **BF16, **options}
    refused = pytest.raises(ConfigError, match="--fp16 with bfloat16 weights that train stops")
    with refused if scales else nullcontext():
        memest.estimate("gpt2?n_layer=1", **question)


def test_what_keeps_gradients_alive_is_said_of_each_loop() -> None:
    """Lightning drops them behind the forward; a script that accumulates, behind the step."""
    late, accumulated = "between forward and backward", "accumulation keeps the gradients alive"
    words = {
        loop: " ".join(memest.estimate("gpt2?n_layer=2", batch=2, seq_len=64, **options).notes)
        for loop, options in {
            "lightning": {"loop": "lightning"},
            "kept": {"loop": "lightning", "zero_grad": "zero", "checkpointing": "full"},
            "plain": {"loop": "plain", "grad_accum": 2},
        }.items()
    }
    assert late in words["lightning"]
    assert late not in words["kept"]
    assert "taken to be in training mode" in words["kept"]
    assert "in training mode" not in words["lightning"]
    assert accumulated in words["plain"]
    assert accumulated not in words["lightning"]
