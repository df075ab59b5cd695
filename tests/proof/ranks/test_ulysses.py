"""Sequences and heads shared by GPUs: DeepSpeed's Ulysses, recorded, and what memest adds."""

from __future__ import annotations

import json

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Phase
from support.ranks import as_run, predicted_rank
from support.recorded import check_recorded
from support.recorded_ranks import case_of, names_of, recorded_run

HOST = 1024
"""Numbers of no dimension, and a mask of tokens that a CPU's sum makes whole numbers of."""
HELD = 4096
"""What was freed too early among them, and small."""
GLOO = 8192
"""What gloo still holds of its last collective."""
RNG = 5056
"""What a CPU keeps of its generator for each checkpoint; a GPU's is in host memory too."""
REAL = names_of("sp_*_gloo")


@pytest.mark.slow("sp_2_zero_3_lora")
@pytest.mark.parametrize("name", names_of("sp_*", "*_evaluated", *REAL))
def test_a_rank_allocates_what_deepspeed_does(name):
    """Every phase; where nothing is offloaded, every allocation and free of the steps, in order."""
    case = case_of(name)
    setup = case["setup"]
    # of a graph that holds packed weights the order of frees is not ours
    held = "quantization" in setup and case["spread"]["zero"] == 3
    host = HOST + 3 * RNG * ("checkpointing" in setup) + HELD * held
    # Adam's states are there from the first update
    check_recorded(
        recorded_run(name), predicted_rank(case), host, slack=0, fewest=500, any_order=held,
        untold=lambda phase: phase.endswith((" 1 1", "optimizer 1 0")),
    )  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_processes_under_gloo_allocate_the_same(name):
    """What real processes allocate in forward and backward is predicted, in order.

    gloo works on copies and lets go of them in threads of its own, where the profiler does not
    look; so frees are not compared, and phases are until it has missed the first.
    """
    real, predicted = recorded_run(name), as_run(predicted_rank(case_of(name)))

    def allocated(run):
        return [
            (event.phase, event.nbytes)
            for event in run.events
            if event.nbytes >= 8192 and event.phase.startswith(("forward", "backward"))
        ]

    assert len(allocated(predicted)) > 500
    assert allocated(real) == allocated(predicted)
    measured = {phase.name: phase for phase in real.phases}
    for phase in predicted.phases:
        if phase.name.endswith(" 1 1"):
            assert abs(phase.alive - measured[phase.name].alive) <= GLOO, phase.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small decoder."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("decoder")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)


SHARED = {"num_gpus": 4, "zero": 2, "sp": 2}


def run(model, **options):
    options = {
        "batch": 2, "seq_len": 256, "max_batch": False, "bf16": True, "gpu": "a100-40gb", **options,
    }  # fmt: skip
    return memest.estimate(model, **options)


def tracer_and(folder, **options):
    from memest.config.options import merge_options
    from memest.estimation.gpu_target import target_gpus
    from memest.estimation.profiler import Profiler

    given = {"bf16": True, "batch": 2, "seq_len": 256, **SHARED}
    setup = merge_options(None, {**given, **options})
    return Profiler.of(folder), setup, target_gpus(setup).main.traits


def rows(answer):
    return {row.category.value: row.bytes for row in answer.breakdown}


def test_activations_are_shared_and_states_are_those_of_zero(folder):
    whole, shared = run(folder, num_gpus=4, zero=2), run(folder, **SHARED)
    one, two = rows(whole), rows(shared)
    for name in ("parameters", "optimizer states", "master weights"):
        assert two[name] == one[name]
    assert one["activations"] / 2 < two["activations"] < one["activations"] * 0.6
    assert "sequences and heads shared by 2, 128 tokens each" in str(shared)
    assert shared.model.parameters == whole.model.parameters


def test_gradients_are_reduced_in_float32(folder):
    """The bucket of stage 3 is twice as large as in bfloat16."""
    settings = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000}}
    plain, shared = (
        rows(run(folder, num_gpus=4, zero_settings=settings, **more)) for more in ({}, {"sp": 2})
    )
    more = shared["communication buffers"] - plain["communication buffers"]
    assert 100_000_000 <= more < 102_000_000


def traced(folder, **options):
    """A trace of the micro-steps, as it was asked for, and the setup that was."""
    from memest.catalog.resolve import resolve_model
    from memest.profiles.axes import traced_setup
    from memest.trace.meta_model import build
    from memest.trace.session import trace_built

    tracer, setup, traits = tracer_and(folder, **options)
    whole = traced_setup(tracer.resolve(setup))
    return trace_built(build(whole, resolve_model(folder), None, None, None), whole, traits)


@pytest.mark.parametrize(
    ("kernel", "op", "dims"),
    [
        ("sdpa", "aten._scaled_dot_product_flash_attention.default", (2, 1)),
        ("flash_attention_2", "aten._flash_attention_forward.default", (1, 2)),
    ],
)
@pytest.mark.parametrize("ways", [2, 4])
def test_the_kernel_sees_all_tokens_and_some_heads(folder, kernel, op, dims, ways):
    """Four heads, two of keys: with four ways each of these is there twice."""
    trace = traced(folder, sp=ways, attn_implementation=kernel)
    (call,) = [call for call in trace.calls if call.op == op]
    tokens, heads = dims
    assert [value.shape[tokens] for value in call.args[:3]] == [256] * 3
    assert [value.shape[heads] for value in call.args[:3]] == [4 // ways, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**SHARED, "zero": 0}, "add --zero 1, 2 or 3"),
        ({**SHARED, "zero": 0, "fsdp": "full_shard"}, "write --cp 2"),
        ({**SHARED, "cp": 2}, "shares sequences in one way"),
        ({**SHARED, "num_gpus": 3}, "write --num-gpus 2"),
        ({**SHARED, "seq_len": 65}, "such as 64 or 66"),
        ({**SHARED, "seq_len": 1}, "such as 2"),
        ({**SHARED, "sp": 4, "num_gpus": 6}, "write --num-gpus 4"),
        ({**SHARED, "attn_implementation": "eager"}, "sdpa or flash_attention_2"),
        ({**SHARED, "tp": 2, "loop": "plain"}, "--tp"),
        ({**SHARED, "use_liger_kernel": True}, "--use-liger-kernel is not priced"),
        ({**SHARED, "peft": "ia3"}, "an adapter other than LoRA is not priced"),
        ({**SHARED, "lora_r": 8, "load_in_8bit": True}, "not bitsandbytes. 4-bit one"),
        ({**SHARED, "sp": 4, "eval_batch": 2}, "Write --sp 2 or less, or --attn"),
        ({**SHARED, "loss": "mse"}, "a loss of one's own"),
        ({**SHARED, "software": "transformers=4.57"}, "before 5 is not priced"),
        ({**SHARED, "task": "sequence-classification"}, "not trained as a causal language model"),
        ({**SHARED, "sp": 3, "num_gpus": 3, "seq_len": 255}, "Legal: 2, 4"),
        (
            {**SHARED, "zero_settings": {
                "seq_parallel_communication_data_type": "bf16", "zero_optimization": {"stage": 2},
            }},
            "reduced in fp32, DeepSpeed's default",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        run(folder, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("gpt_neox", {}), "does not say how many heads|does not hand position_ids"),
        (
            ("qwen3", {"layer_types": ["linear_attention", *["full_attention"] * 2]}),
            "linear_attention",
        ),
        (("bert", {}), "does not say how many heads"),
    ],
)
def test_models_that_deepspeed_would_not_share_are_refused(tmp_path, changes, words):
    from support.cases import CONFIGS

    kind, other = changes
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[kind], **other}))
    with pytest.raises(ConfigError, match=words):
        run(str(tmp_path), **{**SHARED, "seq_len": 64})


def test_adapters_train_on_shared_sequences(folder):
    """What trains is small, and what is kept for it is a share."""
    whole, shared = (
        rows(run(folder, num_gpus=4, zero=2, lora_r=8, **more)) for more in ({}, {"sp": 2})
    )
    assert shared["optimizer states"] == whole["optimizer states"]
    assert whole["activations"] / 2 < shared["activations"] < whole["activations"] * 0.6


def test_evaluations_are_of_whole_sequences(folder):
    """DeepSpeed's attention and its loader stand aside, so the logits are those of all tokens."""
    asked = {"eval_batch": 32, "eval_samples": 256}
    whole, shared = (
        run(folder, num_gpus=4, zero=2, **asked, **more).peak.allocated_bytes
        for more in ({}, {"sp": 2})
    )
    # training's leftovers and the positions of a batch apart
    assert abs(shared - whole) < whole * 0.01


def test_evaluations_find_heads_as_training_left_them(folder):
    """Flash attention does not ask for the groups that DeepSpeed changes where heads are copied."""
    options = {**SHARED, "sp": 4, "attn_implementation": "flash_attention_2"}
    phases = {point.phase for point in run(folder, **options, eval_batch=2).timeline}
    assert phases - {point.phase for point in run(folder, **options).timeline} == {Phase.EVALUATION}


def test_attention_is_left_as_it_was(folder):
    """A trace leaves nothing behind, also one that ends in an error."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    before = TABLE["sdpa"]
    run(folder, **{**SHARED, "sp": 4})
    with pytest.raises(ConfigError):
        run(folder, **{**SHARED, "sp": 3, "num_gpus": 3, "seq_len": 255})
    assert TABLE["sdpa"] is before
    assert not TABLE._local_mapping


def test_max_batch_of_lengths_says_what_to_ask(folder):
    with pytest.raises(ConfigError, match="memest sweep --over seq_len=128,256,512"):
        memest.max_batch(folder, gpu="t4", seq_len=256, of="seq-len", fp16=True, **SHARED)


def test_a_group_of_its_own_shares_a_sequence():
    """``parallel_state_sp`` makes one, also where it is all GPUs."""
    from memest.config.parallelism import Distributed
    from memest.sharding.nccl import communicators

    plain, shared = (
        communicators(Distributed(num_gpus=4, zero=2, sp=ways), (8, 0)) for ways in (1, 4)
    )
    assert shared.low_bytes == 3 * plain.low_bytes
    assert shared.high_bytes > plain.high_bytes
