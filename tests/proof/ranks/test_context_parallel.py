"""Context parallelism: a real rank, run by torch and transformers, against the predicted one."""

from __future__ import annotations

import json

import pytest

import memest
from memest.errors import ConfigError
from memest.estimation.whole_run import steps_run
from memest.replay.replay import check_events
from support.context_ranks import predicted, real_rank
from support.evaluation_ranks import check_evaluation
from support.phases import check_rank, check_talking_rank
from support.ranks import as_run

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices: host memory where there is a GPU."""
RNG_STATES = 8 * 5056
FOREACH = 512_000
"""What the CPU's foreach kernels copy of the largest weight; they are not CUDA's."""

CASES = [
    ("llama", {"loop": "plain"}, 2, "allgather"),
    ("llama", {"loop": "plain", "grad_accum": 2}, 4, "alltoall"),
    ("llama", {"loop": "plain", "dtype": "bfloat16"}, 2, "allgather"),
    ("qwen3", {"loop": "plain", "checkpointing": "full"}, 3, "allgather"),
    ("llama", {"loop": "trainer", "grad_accum": 2, "optim": "adamw_torch_loop"}, 2, "allgather"),
    ("llama-gqa", {"loop": "trainer", "padded": True, "optim": "adamw_torch_loop"}, 2, "alltoall"),
]


@pytest.mark.slow(but=("llama-setup2-2-allgather",))
@pytest.mark.parametrize(("model", "setup", "ways", "rotate"), CASES)
def test_a_rank_allocates_what_a_real_one_does(model, setup, ways, rotate):
    """Cut batches, local queries, keys and values that go round: every event, in order."""
    case = {"model": model, "ways": ways, "rotate": rotate, "setup": setup}
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    # the Trainer says nothing when it begins to split the batches behind the first
    told = setup["loop"] != "trainer"
    check_rank(real_rank(case), predicted(case), host, FOREACH, at_least=6144, all_told=told)


@pytest.mark.slow
def test_shards_over_those_who_share_a_sequence():
    """FSDP2 on the same mesh: parameters are gathered from the GPUs of the sequence."""
    case = {"model": "llama", "ways": 2, "shards": True, "setup": {"loop": "plain"}}
    check_rank(real_rank(case), predicted(case), HOST, FOREACH, at_least=6144)


@pytest.mark.slow("allgather")
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_two_processes_that_talk(rotate):
    """Real processes allocate what is predicted, in order."""
    case = {"model": "llama", "ways": 2, "rotate": rotate, "gloo": True}
    case["setup"] = {"loop": "plain"}
    check_talking_rank(real_rank(case), predicted(case), at_least=6144, more_than=500)


EVALUATED = [
    ("llama", {"loop": "plain"}, 2, True, True),
    ("llama-gqa", {"loop": "plain", "padded": True}, 3, False, True),
]


@pytest.mark.slow("llama-setup0-2-True-True")
@pytest.mark.parametrize(("model", "setup", "ways", "shards", "keeps"), EVALUATED)
def test_ranks_evaluate_their_parts_of_sequences(model, setup, ways, shards, keeps):
    """The Trainer's own evaluation cuts batches as training does, and gathers what parts give."""
    case = {
        "model": model, "ways": ways, "shards": shards, "setup": setup, "evaluation": [6, keeps],
    }  # fmt: skip
    stream, real = predicted(case), real_rank(case)
    check_events(stream.events, stream.sizes)
    check_evaluation(real, as_run(stream))


def run(model, **options):
    options = {
        "batch": 2, "seq_len": 256, "max_batch": False, "bf16": True, "num_gpus": 4,
        "fsdp": "full_shard", "gpu": "a100-40gb", **options,
    }  # fmt: skip
    return memest.estimate(model, **options)


@pytest.mark.slow
def test_parts_of_predictions_are_kept(folder):
    """The GPUs of a sequence evaluate its parts: what piles up is what whole sequences would be."""
    from memest.config.parallelism import Distributed
    from memest.config.setup import Setup
    from memest.profiles.axes import eval_batches

    asked = {"eval_batch": 32, "eval_samples": 256}
    spread = Distributed(num_gpus=4, fsdp="full_shard", cp=2)
    assert eval_batches(Setup(distributed=spread, seq_len=256, **asked)) == 4
    whole, shared = (run(folder, **asked, **more).peak.allocated_bytes for more in ({}, {"cp": 2}))
    assert abs(shared - whole) < 0.02 * whole


def tracer_and(folder, **options):
    from memest.config.options import merge_options
    from memest.estimation.gpu_target import target_gpus
    from memest.estimation.profiler import Profiler

    given = {"bf16": True, "num_gpus": 4, "fsdp": "full_shard", "batch": 2, "seq_len": 256}
    setup = merge_options(None, {**given, **options})
    return Profiler.of(folder), setup, target_gpus(setup).main.traits


def peak_of(stream):
    now = peak = 0
    for event in stream.events:
        now += stream.sizes[event] if event >= 0 else -stream.sizes[~event]
        peak = max(peak, now)
    return peak


def test_activations_are_shared_and_states_are_those_of_fsdp(folder):
    one, two = run(folder), run(folder, cp=2)
    rows = [{r.category.value: r.bytes for r in e.breakdown} for e in (one, two)]
    for name in ("parameters", "optimizer states"):
        assert rows[1][name] == rows[0][name]
    assert rows[0]["activations"] / 2 < rows[1]["activations"] < rows[0]["activations"] * 0.6
    assert "sequences shared by 2, 128 tokens each" in str(two)
    assert two.model.parameters == one.model.parameters


@pytest.mark.slow
def test_the_traced_rank_needs_as_much_as_any(folder, monkeypatch):
    """Ranks differ in which halves they attend to, and hardly in what they need."""
    from memest.trace.parallel import context_parallel

    traced = context_parallel.fullest_rank(4)
    peaks = {}
    for rank in range(4):
        monkeypatch.setattr(context_parallel, "fullest_rank", lambda _, rank=rank: rank)
        tracer, setup, traits = tracer_and(folder, cp=4, checkpointing="full")
        peaks[rank] = peak_of(tracer.trace(setup, traits).stream)
    assert len(set(peaks.values())) > 1
    assert max(peaks.values()) <= 1.005 * peaks[traced]


def test_what_the_trainer_adds_to_its_batches_stays_for_the_step(folder):
    """Shifted labels and positions pile up over the micro-steps: two tensors in each batch."""
    found = {}
    for count in (1, 2, 7):
        tracer, setup, traits = tracer_and(folder, cp=2, grad_accum=count, loop="trainer")
        stream = steps_run(tracer, setup, traits).stream
        check_events(stream.events, stream.sizes)
        inputs = {"aten.clone.default", "aten.resize_.default", "aten.arange.default"}
        now = most = 0
        for event in stream.events:
            number = event if event >= 0 else ~event
            label = stream.label_names[stream.labels[number]]
            if label in inputs and stream.categories[number] == _inputs():
                now += stream.sizes[number] if event >= 0 else -stream.sizes[number]
                most = max(most, now)
        found[count] = most
    each = 2 * 256 * 8 + 2 * 128 * 8
    assert found[2] - found[1] == each
    assert found[7] - found[2] == 5 * each


def _inputs():
    from memest.events import CATEGORY_ORDER, Category

    return CATEGORY_ORDER.index(Category.INPUTS)


SHARED = {"num_gpus": 4, "fsdp": "full_shard", "cp": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**SHARED, "fsdp": "none"}, "add --fsdp full_shard"),
        ({**SHARED, "fsdp": "none", "zero": 2}, "in place of --zero"),
        ({**SHARED, "num_gpus": 3}, "write --num-gpus 2"),
        ({**SHARED, "fsdp_version": 1}, "Drop --fsdp-version"),
        ({**SHARED, "fsdp_shard_size": 2}, "write --fsdp-shard-size 4"),
        ({**SHARED, "seq_len": 66}, "such as 64 or 68"),
        ({**SHARED, "seq_len": 2}, "such as 4"),
        ({**SHARED, "attn_implementation": "eager"}, "Write --attn-implementation sdpa"),
        ({**SHARED, "tp": 2, "loop": "plain"}, "--tp 2 is not priced together with --cp"),
        ({**SHARED, "torch_compile": True}, "--torch-compile is not priced"),
        ({**SHARED, "use_liger_kernel": True}, "leave one of them out"),
        ({**SHARED, "cp_rotate": "allto"}, "Did you mean 'alltoall'"),
        ({"cp": 1, "cp_rotate": "alltoall"}, "add --cp 2 or more"),
        ({**SHARED, "bf16": False, "seq_len": 160}, "multiples of 128, such as 128 or 256"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        run(folder, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("llama", {"model_type": "mistral", "sliding_window": 64}), "sliding_attention"),
        (("gpt_neox", {}), "no modules named self_attn"),
    ],
)
def test_models_that_accelerate_would_train_otherwise_are_refused(tmp_path, changes, words):
    from support.cases import CONFIGS

    kind, other = changes
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[kind], **other}))
    with pytest.raises(ConfigError, match=words):
        run(str(tmp_path), **SHARED)


def test_the_same_models_are_refused_that_accelerate_refuses():
    """``_attach_context_parallel_hooks``, asked about real models."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    from memest.trace.parallel.context_parallel import check_attends_fully
    from support.cases import twin

    seen = set()
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    for name, config in (("llama", {}), ("qwen3", {}), ("qwen3", windows), ("phi", {})):
        model = twin(name, config=config, attn_implementation="sdpa").real
        answers = []
        for ask, error in (
            (_attach_context_parallel_hooks, ValueError), (check_attends_fully, ConfigError),
        ):  # fmt: skip
            try:
                ask(model)
            except error:
                answers.append(False)
            else:
                answers.append(True)
        assert answers[0] == answers[1], name
        seen.add(answers[0])
    assert seen == {True, False}


def test_grouped_heads_in_float32_have_no_ring_kernel(tmp_path):
    from support.cases import CONFIGS

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-gqa"]))
    with pytest.raises(ConfigError, match=r"math kernel .*grouped heads"):
        run(str(tmp_path), **SHARED, bf16=False, software="torch=2.13")


def test_max_batch_of_lengths_says_what_to_ask(folder):
    with pytest.raises(ConfigError, match="memest sweep --over seq_len=256,512,1024"):
        memest.max_batch(folder, gpu="t4", seq_len=256, of="seq-len", bf16=True, **SHARED)
