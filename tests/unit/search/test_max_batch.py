"""The largest size that fits, held against estimates of the sizes around it."""

import json
from dataclasses import replace

import pytest

import memest
from memest.config.options import setup_from_options
from memest.config.setup import MAX_BATCH
from memest.errors import ConfigError
from memest.report.max_batch_result import CurveEnd, SizeAxis
from memest.report.result import Verdict
from memest.units import MIB, parse_size
from support.small_llama import LLAMA

TINY = "prajjwal1/bert-tiny"
CARD = {"gpu": "t4", "gpu_memory": "1200MiB"}
SHORT = {"seq_len": 64, "fp16": True}


def runs(options, **size):
    """Whether a size runs with the context expected, by an estimate of it alone.

    An estimate is tight down to the lower end of the context's range; on a card that is smaller
    by what lies between that and the middle, down to the middle.
    """
    first = memest.estimate(TINY, max_batch=False, **options, **size)
    between = first.peak.device_bytes - first.interval.low_bytes
    smaller = options | {"gpu_memory": parse_size(options["gpu_memory"]) - between}
    answer = memest.estimate(TINY, max_batch=False, **smaller, **size)
    return answer.verdict is not Verdict.DOES_NOT_FIT


def fits(options, **size):
    return memest.estimate(TINY, max_batch=False, **options, **size).verdict is Verdict.FITS


@pytest.fixture(scope="module")
def answer():
    return memest.max_batch(TINY, **CARD, **SHORT)


@pytest.mark.slow
def test_the_largest_runs_and_the_next_does_not(answer):
    largest, safe = answer.largest, answer.safe
    assert 1 < safe <= largest
    assert answer.answers[0].end is CurveEnd.GPU
    assert runs(CARD | SHORT, batch=largest)
    assert not runs(CARD | SHORT, batch=largest + 1)
    assert fits(CARD | SHORT, batch=safe)
    assert not fits(CARD | SHORT, batch=safe + 1)


def test_it_is_at_least_what_estimate_says(answer):
    estimate = memest.estimate(TINY, **CARD, **SHORT)
    assert answer.largest >= estimate.max_batch
    assert answer.safe >= estimate.safe_batch


@pytest.mark.slow(but=("500",))
@pytest.mark.parametrize("start", [1, 3, 500])
def test_where_the_search_begins_is_no_matter(answer, start):
    other = memest.max_batch(TINY, batch=start, **CARD, **SHORT)
    assert (other.largest, other.safe) == (answer.largest, answer.safe)


def test_the_curve_is_that_of_estimates(answer):
    curve = answer.answers[0].curve
    sizes = [point.size for point in curve]
    assert sizes == sorted(set(sizes))
    assert {answer.safe, answer.largest, answer.largest + 1} <= set(sizes)
    assert len(sizes) >= 5
    for point in (curve[0], curve[len(curve) // 2], curve[-1]):
        direct = memest.estimate(TINY, max_batch=False, batch=point.size, **CARD, **SHORT)
        assert (point.allocated_bytes, point.reserved_bytes, point.device_bytes) == (
            direct.peak.allocated_bytes, direct.peak.reserved_bytes, direct.peak.device_bytes
        )  # fmt: skip
        assert point.verdict is direct.verdict
        assert point.headroom_bytes == direct.gpu.headroom_bytes


def test_multiples(answer):
    (eight,) = answer.answers[0].multiples
    assert eight.of == 8
    assert eight.largest % 8 == eight.safe % 8 == 0
    assert answer.largest - 8 < eight.largest <= answer.largest
    assert eight.safe <= answer.safe


LONG = {"gpu": "t4", "gpu_memory": "545MiB", "batch": 32}


@pytest.fixture(scope="module")
def longest():
    return memest.max_batch(TINY, of="seq_len", **LONG)


class TestLengths:
    @pytest.mark.slow
    def test_the_longest_runs_and_the_next_does_not(self, longest):
        assert longest.of is SizeAxis.SEQ_LEN
        assert 1 < longest.safe <= longest.largest < 512
        assert longest.answers[0].end is CurveEnd.GPU
        assert runs(LONG, seq_len=longest.largest)
        assert not runs(LONG, seq_len=longest.largest + 1)
        assert fits(LONG, seq_len=longest.safe)
        assert not fits(LONG, seq_len=longest.safe + 1)

    @pytest.mark.slow
    def test_round_lengths(self, longest):
        for multiple in longest.answers[0].multiples:
            assert multiple.largest % multiple.of == 0
            assert longest.largest - multiple.of < multiple.largest <= longest.largest
            assert runs(LONG, seq_len=multiple.largest)

    def test_the_model_ends_the_search(self):
        found = memest.max_batch(TINY, gpu="t4", of="seq-len", batch=2)
        assert (found.largest, found.safe) == (512, 512)
        assert found.answers[0].end is CurveEnd.MODEL
        assert "is 512, the most the model takes, and it is safe." in str(found)

    def test_images_have_no_length(self):
        with pytest.raises(ConfigError, match="no such size"):
            memest.max_batch("google/vit-base-patch16-224", gpu="t4", of="seq-len")


@pytest.mark.slow
def test_image_sizes():
    found = memest.max_batch("microsoft/resnet-50", gpu="t4", gpu_memory="3GiB", of="image-size",
                             batch=4)  # fmt: skip
    assert found.largest % 32 == 0
    assert found.largest >= found.safe > 32

    def verdict(size):
        return memest.estimate(
            "microsoft/resnet-50", gpu="t4", gpu_memory="3GiB", batch=4, image_size=size,
            max_batch=False,
        ).verdict  # fmt: skip

    assert verdict(found.safe) is Verdict.FITS
    assert verdict(found.largest) is not Verdict.DOES_NOT_FIT
    assert verdict(found.safe + 32) is not Verdict.FITS


@pytest.mark.slow
def test_not_even_one():
    found = memest.max_batch(TINY, gpu="t4", gpu_memory="100MiB", **SHORT)
    one = found.answers[0]
    assert (one.largest, one.safe, one.multiples) == (0, 0, ())
    assert one.at(1).verdict is not Verdict.FITS
    assert str(found).startswith("Not even a batch of 1 of prajjwal1/bert-tiny runs on Tesla T4")


def test_the_search_ends():
    torch = pytest.importorskip("torch")
    found = memest.max_batch(
        torch.nn.Linear(8, 1), gpu_memory="9TiB", inputs={"input": torch.zeros(4, 8)},
        loss=lambda outputs, batch: outputs.mean(), loop="plain",
    )  # fmt: skip
    assert found.model == "Linear"
    assert found.largest == found.safe == MAX_BATCH
    assert found.answers[0].end is CurveEnd.SEARCH
    assert "is at least 1,048,576, where the search ends" in " ".join(str(found).split())


@pytest.mark.slow
def test_several_gpus_as_each_alone():
    names = ["t4", "v100", "rtx-3090"]
    several = memest.max_batch(TINY, gpu=names, seq_len=512)
    assert [one.gpu for one in several.answers] == [
        memest.max_batch(TINY, gpu=name, seq_len=512).answers[0].gpu for name in names
    ]
    alone = memest.max_batch(TINY, gpu="rtx-3090", seq_len=512)
    assert several.answers[2] == alone.answers[0]
    assert several.largest == several.answers[0].largest


class TestEffective:
    def check(self, way):
        direct = memest.estimate(
            TINY, batch=way.micro_batch, grad_accum=way.num_micro_steps, max_batch=False,
            **CARD, **SHORT,
        )  # fmt: skip
        assert way.device_bytes == direct.peak.device_bytes
        assert way.verdict is direct.verdict is Verdict.FITS

    def ask(self, samples):
        found = memest.max_batch(TINY, effective_batch=samples, **CARD, **SHORT)
        assert found.effective_batch == samples
        for way in found.answers[0].effective:
            self.check(way)
        return found.answers[0].effective

    def test_what_fits_at_once_is_not_parted(self, answer):
        (way,) = self.ask(answer.safe)
        assert (way.micro_batch, way.num_micro_steps) == (answer.safe, 1)

    @pytest.mark.slow
    def test_equal_micro_batches(self, answer):
        first, *rounded = self.ask(1024)
        assert first.samples == 1024
        assert first.num_micro_steps > 1
        for way in rounded:
            assert way.samples > 1024
            assert way.num_micro_steps < first.num_micro_steps

    @pytest.mark.slow
    def test_a_prime_is_rounded_up(self, answer):
        exact, rounded = self.ask(1009)
        assert (exact.micro_batch, exact.samples) == (1, 1009)
        assert 1009 < rounded.samples < 1009 + rounded.num_micro_steps

    def test_nothing_fits(self):
        found = memest.max_batch(TINY, gpu="t4", gpu_memory="180MiB", effective_batch=64, **SHORT)
        assert found.answers[0].effective == ()
        assert "64 samples a step: no micro-batch fits." in str(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a GPU"),
        ({"gpu": "t4", "of": "length"}, "Legal: batch, seq-len, image-size"),
        ({"gpu": "t4", "effective_batch": 0}, "--effective-batch 0 is out of range"),
        ({"gpu": "t4", "effective_batch": "x"}, "'x' is not a whole number"),
        ({"gpu": "t4", "effective_batch": 8, "of": "seq-len"}, "drop one of the two"),
        ({"gpu": "t4", "effective_batch": 8, "grad_accum": 2}, "drop one of the two"),
        ({"gpu": "t4", "setup": memest.Setup(), "batch": 4}, "either a Setup or options"),
        ({"gpu": "t4", "bach": 4}, "Did you mean batch"),
    ],
)
def test_wrong_questions(options, words):
    with pytest.raises(ConfigError, match=words):
        memest.max_batch(TINY, **options)


@pytest.mark.slow
def test_what_is_known_of_the_run_is_told():
    found = memest.max_batch(TINY, gpu=["t4", "a100"], gpu_memory="2GiB", zero=3, num_gpus=2)
    alone = memest.estimate(TINY, gpu="t4", max_batch=False, zero=3, num_gpus=2)
    (said,) = (note for note in alone.notes if "zero.Init makes float32" in note)
    assert found.notes.count(said) == 1
    paged = memest.max_batch(TINY, gpu="t4", gpu_memory="2GiB", optim="paged_adamw_8bit")
    assert any("pages move between host and GPU in every step" in note for note in paged.notes)


def test_a_live_module():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
    )
    answer = memest.max_batch(
        module,
        gpu="t4",
        gpu_memory="700MiB",
        inputs={"input": torch.zeros(4, 256)},
        loss=lambda outputs, batch: outputs.mean(),
        loop="plain",
    )
    assert answer.model == "Sequential"
    assert answer.largest > 4


def test_json(answer):
    document = json.loads(answer.to_json())
    assert document == answer.to_dict()
    assert set(document) == {
        "schema_version", "model", "of", "step", "setup", "effective_batch", "answers",
        "assumptions", "notes",
    }  # fmt: skip
    assert "batch" not in document["setup"]
    (one,) = document["answers"]
    assert set(one) == {
        "gpu", "largest", "safe", "ended_by", "multiples", "unsteady", "effective", "curve"
    }  # fmt: skip
    assert one["gpu"] == {"name": answer.answers[0].gpu, "usable_bytes": 1200 * MIB}
    assert all(
        set(point) == {
            "size", "allocated_bytes", "reserved_bytes", "device_bytes", "headroom_bytes", "verdict"
        }
        for point in one["curve"]
    )  # fmt: skip


@pytest.mark.slow
def test_a_curve_costs_no_traces_where_every_size_takes_one(tmp_path, monkeypatch):
    """TRL's loss works in more pieces with every batch, so nothing but a trace tells a size."""
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    said = []
    found = memest.max_batch(
        "meta-llama/Llama-3.2-1B?num_hidden_layers=1", gpu="t4", seq_len=512, dtype="bfloat16",
        fused_loss="trl-fused", progress=said.append,
    )  # fmt: skip
    answer = found.answers[0]
    assert "looking for the largest batch on Tesla T4" in said
    lines = [line for line in said if ": trace " in line]
    traced = {int(line.split("batch ")[1].split(",")[0]) for line in lines}

    assert {point.size for point in answer.curve} <= traced
    by_size = {point.size: point for point in answer.curve}
    assert by_size[answer.safe].verdict.value == "fits"
    assert by_size[answer.largest + 1].verdict.value != "fits"
    assert {answer.safe, answer.largest, answer.largest + 1} <= traced


@pytest.mark.slow
def test_an_effective_batch_is_of_all_gpus():
    options = {"gpu": "t4", "seq_len": 128, "fp16": True, "effective_batch": 4096}
    alone = memest.max_batch(TINY, **{**options, "effective_batch": 1024})
    shared = memest.max_batch(TINY, num_gpus=4, **options)

    (way, *_), (alone_way, *_) = shared.answers[0].effective, alone.answers[0].effective
    assert way.samples == shared.effective_batch == 4096
    assert way.num_gpus == 4
    assert way.micro_batch * way.num_micro_steps == alone_way.samples == 1024
    assert "on each of 4 GPUs" in str(shared)
    with pytest.raises(ConfigError, match=r"shared by 4 GPUs.*for example 4096 or 4100"):
        memest.max_batch(TINY, num_gpus=4, **{**options, "effective_batch": 4097})


def test_a_plan_is_of_all_gpus():
    advice = memest.advise(TINY, gpu="t4", seq_len=128, fp16=True, num_gpus=2, effective_batch=4096)
    assert advice.effective_batch == 4096
    for plan in advice.plans:
        assert plan.batch * plan.grad_accum * 2 == plan.effective_batch == 4096
    assert "2 GPUs" in str(advice)


def test_emulated_bf16_is_said():
    answer = memest.max_batch(TINY, gpu="t4", gpu_memory="1200MiB", seq_len=64, bf16=True)
    assert [note for note in answer.notes if note.startswith("bf16 is emulated on Tesla T4")]


@pytest.mark.slow
def test_completions_are_as_many_as_were_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    card = {"gpu_memory": "560MiB", "device_context": "300MiB"}
    options = {
        "method": "grpo", "engine": "server", "seq_len": 128, "effective_batch": 14,
        "num_generations": 2,
    }  # fmt: skip
    answer = memest.max_batch(str(tmp_path), **options, **card).answers[0]
    assert 2 <= answer.safe < 14
    assert [(way.micro_batch, way.num_micro_steps) for way in answer.effective] == [(2, 7)]


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 8),
        ({"num_generations": 6, "grad_accum": 4}, 3),
        ({"num_generations": 6, "steps_per_generation": 3, "num_gpus": 2}, 1),
        ({"method": "rloo"}, 2),
        ({"method": "online-dpo", "num_generations": None}, 1),
    ],
)
def test_batches_that_trl_takes_hold_whole_prompts(options, step):
    """``generation_batch_size % num_generations`` of ``GRPOConfig``."""
    setup = setup_from_options(**{"method": "grpo", **options})

    assert setup.batch_step == step
    for batch in range(1, 13):
        held = replace(setup, batch=batch).completions_at_once % setup.completions_of_a_prompt
        assert (held == 0) is (batch % step == 0)


def test_the_largest_batch_of_completions_holds_whole_prompts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = {
        "method": "grpo", "engine": "server", "seq_len": 64, "num_generations": 6,
        "gpu_memory": "550MiB", "device_context": "300MiB",
    }  # fmt: skip
    found = memest.max_batch(str(tmp_path), **options)
    answer = found.answers[0]

    assert found.step == 6
    assert 0 < answer.safe <= answer.largest
    assert {point.size % 6 for point in answer.curve} == {0}
    assert answer.at(answer.largest + 6).headroom_bytes < 0
    assert any("multiples of 6 were looked at: TRL stops" in note for note in found.notes)
    assert not any("no multiple" in note for note in found.notes)


@pytest.mark.parametrize("memory", ["340MiB", "700MiB"])
def test_a_batch_that_the_trainer_stops_at_is_not_looked_at(tmp_path, memory):
    """TRL's KTO compares an answer with another one of its batch."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = memest.max_batch(
        str(tmp_path), method="kto", seq_len=64, gpu_memory=memory, device_context="300MiB"
    )

    assert (found.smallest, found.answers[0].curve[0].size >= 2) == (2, True)
    assert ("Not even a batch of 2" in str(found)) is (memory == "340MiB")


QUESTIONS = {
    "profile": lambda model: memest.profile(model, method="kto", batch=1).spot(gpu="t4"),
    "compare": lambda model: memest.compare(model, ["batch=1"], method="kto", batch=2, seq_len=64),
    "stages": lambda model: memest.stages(model, method="kto", batch=1, num_gpus=2),
    "length": lambda model: memest.max_batch(model, of="seq-len", method="kto", batch=1, gpu="t4"),
    "advise": lambda model: memest.advise(model, effective_batch=1, method="kto", gpu="t4"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_whoever_asks_about_a_run_that_its_trainer_stops_is_told(tmp_path, question):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="TRL stops, because its divergence"):
        QUESTIONS[question](str(tmp_path))


def test_a_length_is_not_looked_for_among_those_of_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("10\n60\n")
    with pytest.raises(ConfigError, match="--of seq-len looks for one length"):
        memest.max_batch(TINY, of="seq-len", lengths=str(file), **CARD)
