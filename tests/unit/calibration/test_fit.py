"""Fits to simulated measurements: what was planted is found, what was not is left alone."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("sklearn")

from memest.calibration.fitting import fit as fitting
from memest.calibration.fitting import robust
from memest.calibration.fitting.conformal import band_of, bounds, covers, effective_count
from memest.calibration.fitting.fit import dataset_digest, evaluate, fit_calibration
from memest.calibration.fitting.residuals import residuals, uncorrected_of
from memest.calibration.measurement import CPU
from memest.errors import ConfigError, MissingDependencyError
from memest.estimation.calibration_files import read_calibration, write_calibration
from memest.estimation.correction import correct
from memest.units import MIB
from support.simulated_runs import MOVING, PARTS, ended_run, simulate

ONE, TWO = "NVIDIA Simulated 1", "NVIDIA Simulated 2"
SPARSE = {"models": 9, "each": 4}
ACTIVATIONS = {name: 1.08 if name in MOVING else 1.0 for name in PARTS}


# -- what is planted is found ---------------------------------------------------------------------


@pytest.mark.slow
def test_exact_predictions_stay_as_they_are():
    found = fit_calibration(simulate(**SPARSE))

    assert (found.tensors, found.factors, found.other_factor) == ("identity", {}, 1.0)
    assert found.gap_bytes == 0
    assert found.process_model == "constant"
    assert found.part_of(ONE).constant_bytes == pytest.approx(500 * MIB, abs=MIB)
    assert found.validation.error < 1e-4
    assert found.validation.raw_error > 0.002


@pytest.mark.slow
def test_identity_is_chosen_where_nothing_is_planted():
    others = 0
    for seed in range(20):
        rows = residuals(simulate(models=8, each=3, noise=0.01, seed=seed)).rows
        others += fitting.fit_tensors(rows).name != "identity"

    assert others <= 2


@pytest.mark.slow
def test_one_factor():
    found = fit_calibration(simulate(**SPARSE, factor=1.05, noise=0.002, process_noise=5 * MIB))

    assert found.tensors == "one factor"
    assert set(found.factors.values()) == {found.other_factor}
    assert found.other_factor == pytest.approx(1.05, abs=0.002)
    assert found.validation.allocated_raw_error == pytest.approx(0.05 / 1.05, abs=0.002)
    assert found.validation.allocated_error < 0.003


@pytest.mark.slow
def test_a_factor_of_activations():
    found = fit_calibration(simulate(**SPARSE, factors=ACTIVATIONS, noise=0.002))

    assert found.tensors == "activations and the rest"
    assert found.factors["activations"] == pytest.approx(1.08, abs=0.006)
    assert found.factors["parameters"] == pytest.approx(1.0, abs=0.006)


@pytest.mark.slow
def test_every_part_has_a_factor_where_that_pays():
    planted = {"activations": 1.1, "temporaries": 1.5, "gradients": 0.8}

    found = fit_calibration(simulate(models=12, each=5, factors=planted, noise=0.001))

    assert found.tensors == "every part"
    assert found.factors["activations"] == pytest.approx(1.1, abs=0.01)
    assert found.factors["temporaries"] > 1.2
    assert found.validation.allocated_error < found.validation.allocated_raw_error / 4


@pytest.mark.slow
def test_outliers_do_not_move_the_fit():
    planted = {"factors": ACTIVATIONS, "gap": 60 * MIB, "noise": 0.002, "process_noise": 4 * MIB}
    clean = fit_calibration(simulate(**SPARSE, **planted))

    found = fit_calibration(simulate(**SPARSE, **planted, outliers=9))

    assert found.tensors == clean.tensors == "activations and the rest"
    assert found.factors["activations"] == pytest.approx(clean.factors["activations"], abs=0.004)
    assert found.gap_bytes == pytest.approx(60 * MIB, abs=2 * MIB)
    assert found.part_of(ONE).constant_bytes == pytest.approx(500 * MIB, abs=8 * MIB)


def test_factors_and_constants_are_never_negative():
    planted = dict.fromkeys(PARTS, 1.0) | {"temporaries": -3.0, "rounding": -50.0}
    rows = residuals(simulate(**SPARSE, factors=planted, constant=2 * MIB)).rows

    for name in ("one factor", "activations and the rest", "every part"):
        assert min(fitting_parts().tensors_of(name, rows).factors.values()) >= 0
    for name in fitting_parts().PROCESS:
        found = fitting_parts().process_of(name, rows)
        assert min([found.per_kernel, *found.constants.values(), *found.precision.values()]) >= 0


def fitting_parts():
    from memest.calibration.fitting import parts

    return parts


@pytest.mark.slow
def test_a_gap():
    found = fit_calibration(simulate(**SPARSE, gap=-40 * MIB, noise=0.001))

    assert found.gap_bytes == pytest.approx(-40 * MIB, abs=MIB)


@pytest.mark.slow
def test_kernels_and_precision_of_the_process_part():
    planted = {"per_kernel": 3 * MIB, "process_noise": 3 * MIB}

    slope = fit_calibration(simulate(**SPARSE, **planted))
    both = fit_calibration(simulate(**SPARSE, **planted, precision={"bf16": 60 * MIB}))

    assert slope.process_model == "constant and operators"
    assert slope.per_kernel_bytes == pytest.approx(3 * MIB, rel=0.1)
    assert both.process_model == "constant, operators and precision"
    apart = both.precision_bytes["bf16"] - both.precision_bytes["fp32"]
    assert apart == pytest.approx(60 * MIB, rel=0.1)


@pytest.mark.slow
def test_each_gpu_has_its_constant():
    planted = {ONE: 400 * MIB, TWO: 600 * MIB}

    found = fit_calibration(
        simulate(**SPARSE, gpus=(ONE, TWO), constant=planted, process_noise=3 * MIB)
    )

    assert [p.gpu for p in found.process] == [ONE, TWO]
    for part in found.process:
        assert part.constant_bytes == pytest.approx(planted[part.gpu], abs=4 * MIB)
        assert part.low_bytes <= 0 <= part.high_bytes < 20 * MIB
        assert part.cases == 18


# -- ranges ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fresh_runs_lie_in_the_range_as_often_as_it_says():
    planted = {"factor": 1.03, "noise": 0.01, "process_noise": 10 * MIB, "gap": 30 * MIB}
    found = fit_calibration(simulate(models=20, each=3, seed=1, **planted))
    fresh = residuals(simulate(models=60, each=4, seed=2, first_model=100, **planted)).rows

    inside = below_upper = claimed = 0
    for row in fresh:
        corrected = correct(found, uncorrected_of(row))
        inside += corrected.low_bytes <= row.device <= corrected.high_bytes
        below_upper += row.device <= corrected.high_bytes
        claimed += corrected.level is not None

    assert found.band.level == 0.9
    assert claimed > 0.9 * len(fresh)
    assert inside / len(fresh) >= 0.9 - 0.07
    assert below_upper / len(fresh) >= 0.95 - 0.05
    assert found.validation.coverage >= 0.8


@pytest.mark.parametrize("cases", [1, 2, 7, 18, 19, 40, 199])
def test_quantiles_hold_for_new_draws(cases):
    rng = random.Random(cases)
    inside = above = 0
    rounds = 4000
    for _ in range(rounds):
        low, high, level = bounds([rng.gauss(0, 1) for _ in range(cases)])
        new = rng.gauss(0, 1)
        inside += low <= new <= high
        above += new > high

    assert level == (0.9 if cases >= 19 else (cases - 1) / (cases + 1))
    assert inside / rounds >= level - 0.02
    assert above / rounds <= (1 - level) / 2 + 0.015


def test_the_scale_that_makes_narrower_ranges_is_taken():
    peaks = [1e9, 2e9, 4e9, 8e9] * 10
    signs = [1, -1] * 20

    constant = band_of("device", [5e6 * s for s in signs], peaks)
    growing = band_of("device", [0.01 * p * s for p, s in zip(peaks, signs, strict=True)], peaks)

    assert (constant.scale, constant.high) == ("constant", 5e6)
    assert (growing.scale, growing.high) == ("proportional", 0.01)
    assert [covers(growing, r, 1e9) for r in (-2e7, 0, 9e6, 2e7)] == [-1, 0, 0, 1]


def test_few_runs_claim_less_and_say_so():
    pairs = simulate(models=8, each=1, process_noise=5 * MIB)
    found = fit_calibration(pairs)
    (row, *_) = residuals(pairs).rows

    corrected = correct(found, uncorrected_of(row))

    assert (found.band.cases, found.band.draws) == (8, 8)
    assert found.band.level == corrected.level == pytest.approx(7 / 9, abs=1e-6)
    assert corrected.low_bytes == corrected.before.low_bytes
    assert "8 runs, which count as 8 independent ones, are too few for 90%" in corrected.basis
    assert any("a 90% range needs 19" in note for note in found.provenance.notes)


def test_runs_of_one_model_count_as_far_as_they_differ():
    rng = random.Random(5)
    groups = [f"model {i}" for i in range(8) for _ in range(10)]
    noise = [rng.gauss(0, 1) for _ in groups]
    own = {group: rng.gauss(0, 10) for group in groups}

    alike = effective_count([own[g] + x for g, x in zip(groups, noise, strict=True)], groups)
    different = effective_count(noise, groups)

    assert 8 <= alike < 10
    assert different > 30
    assert effective_count([0.0] * 80, groups) == 80
    assert effective_count(noise[:8], [str(i) for i in range(8)]) == 8


@pytest.mark.slow
def test_models_that_are_off_by_their_own_do_not_fool_the_level():
    """Each model has its own error, common to its runs: more runs of it say nothing of others."""
    inside = total = 0
    for seed in range(6):
        pairs = own_errors(simulate(models=6, each=8, seed=seed, noise=0.002), seed)
        band = fit_calibration(pairs).band
        assert band.level < 0.85
        assert band.draws < 12
        profile = fit_calibration(pairs)
        new = simulate(models=40, each=1, seed=seed + 50, noise=0.002, first_model=100)
        for row in residuals(own_errors(new, seed + 50)).rows:
            corrected = correct(profile, uncorrected_of(row))
            total += corrected.level is not None
            inside += corrected.level is not None and (
                corrected.low_bytes <= row.device <= corrected.high_bytes
            )

    assert inside / total >= 0.7


def own_errors(pairs, seed, deviation=0.01):
    rng, errors, out = random.Random(seed), {}, []
    for pair in pairs:
        times = errors.setdefault(pair.measurement.case.model, 1 + rng.gauss(0, deviation))
        (step,) = pair.measurement.steps
        reserved = round(step.reserved_bytes * times)
        step = replace(
            step, allocated_bytes=round(step.allocated_bytes * times), reserved_bytes=reserved,
            reserved_now_bytes=reserved,
            process_bytes=reserved + step.process_bytes - step.reserved_bytes,
        )  # fmt: skip
        out.append(replace(pair, measurement=replace(pair.measurement, steps=(step,))))
    return out


def test_one_model_promises_nothing_of_others():
    found = fit_calibration(simulate(models=1, each=25, factor=1.1, process_noise=5 * MIB))

    assert found.tensors == "identity"
    assert found.band.level is None
    assert found.validation.coverage is None
    assert any("Runs of 1 model only" in note for note in found.provenance.notes)


def test_a_single_run_gives_a_constant_and_no_claim():
    pairs = simulate(models=1, each=1)
    found = fit_calibration(pairs)

    corrected = correct(found, uncorrected_of(residuals(pairs).rows[0]))

    assert found.part_of(ONE).constant_bytes == 500 * MIB
    assert corrected.level is None
    assert corrected.low_bytes <= corrected.before.low_bytes


@pytest.mark.slow
def test_every_run_is_judged_by_a_fit_without_its_model():
    pairs = simulate(**SPARSE, factor=1.05, noise=0.002, process_noise=5 * MIB)

    judged = evaluate(pairs)

    assert len(judged) == 36
    shares = [e.side == 0 for e in judged]
    assert sum(shares) / len(shares) == pytest.approx(
        fit_calibration(pairs).validation.coverage, 1e-4
    )
    # the odd one out cannot pull its own correction
    odd = [
        replace(p, measurement=replace(p.measurement, steps=tuple(
            replace(s, allocated_bytes=2 * s.allocated_bytes) for s in p.measurement.steps
        ))) if p.measurement.case.model == "simulated-003" else p
        for p in pairs
    ]  # fmt: skip
    (first, *_) = [e for e in evaluate(odd) if e.row.model == "simulated-003"]
    (same, *_) = [e for e in judged if e.row.model == "simulated-003"]
    assert first.correction.allocated_bytes == same.correction.allocated_bytes


# -- CPUs, missing readings -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_cpu_gives_tensors_and_no_process_part():
    found = fit_calibration(simulate(**SPARSE, gpus=(CPU,), factor=1.02, noise=0.001))

    assert found.on_cpu
    assert found.tensors == "one factor"
    assert (found.process, found.gap_bytes, found.band.metric) == ((), 0, "allocated")


def test_runs_on_a_cpu_are_left_out_beside_those_on_gpus():
    pairs = simulate(models=4, each=2)
    cpus = simulate(models=4, each=2, gpus=(CPU,), factor=2.0)

    found = fit_calibration(pairs + cpus)

    assert found.provenance.gpus == (ONE,)
    assert found.validation.cases == 8
    assert "8 runs on a CPU are left out" in found.provenance.notes[0]


def test_without_device_readings_there_is_no_process_part():
    found = fit_calibration(simulate(**SPARSE, measured=False, noise=0.002))

    assert (found.process, found.band.metric) == ((), "reserved")
    row = residuals(simulate(**SPARSE)).rows[0]
    corrected = correct(found, uncorrected_of(row))
    assert corrected.level is None
    assert corrected.process_expected_bytes == 575 * MIB
    assert "without a reading of device memory" in corrected.notes[0]


def test_shared_runs_are_left_out_of_the_process_part():
    found = fit_calibration(simulate(**SPARSE, shared=5))

    assert found.part_of(ONE).cases == 31
    assert any("5 of 36 runs shared their GPU" in note for note in found.provenance.notes)


def test_nothing_to_fit_is_said():
    with pytest.raises(ConfigError, match=r"nothing to fit: of the measured runs \(none\)"):
        fit_calibration([])
    with pytest.raises(ConfigError, match=r"\(1 oom\)"):
        fit_calibration([ended_run()])
    pairs = [replace(p, prediction=None, failure="no such model") for p in simulate(models=1)]
    with pytest.raises(ConfigError, match="The first: no such model"):
        fit_calibration(pairs)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fit_is_the_same_whatever_the_order_and_reads_back(tmp_path):
    pairs = [*simulate(**SPARSE, factor=1.04, noise=0.01, process_noise=MIB), ended_run()]
    shuffled = list(pairs)
    random.Random(7).shuffle(shuffled)

    found = fit_calibration(pairs)
    write_calibration(found, tmp_path / "profile.json")

    assert fit_calibration(shuffled) == found
    assert read_calibration(tmp_path / "profile.json") == found
    assert found.provenance.statuses == {"ok": 36, "oom": 1}
    assert found.provenance.dataset_sha256 == dataset_digest(p.measurement for p in shuffled)
    assert found.provenance.versions["torch"] == "2.13.0+cu128"
    assert "scikit-learn" in found.provenance.versions


def test_hostile_names_make_a_profile_that_reads_back(tmp_path):
    name = "NVIDIA \x1b[31m" + "x" * 900
    pairs = simulate(models=3, each=1, gpus=(name,))

    write_calibration(fit_calibration(pairs), tmp_path / "profile.json")

    assert read_calibration(tmp_path / "profile.json").process[0].gpu.isprintable()


def test_without_scikit_learn_the_extra_is_named():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from memest.calibration.fitting.fit import fit_calibration\n"
        "try:\n    fit_calibration([])\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.startswith(MissingDependencyError.__name__)
    assert "pip install 'memest-gpu[calibration]'" in done.stdout


# -- the choice -----------------------------------------------------------------------------------


def test_the_simplest_candidate_that_is_not_clearly_worse_is_chosen():
    folds = [([0], [i]) for i in range(6)]
    noisy = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3]

    def loss(better):
        def of(name, fit, out):
            return noisy[out[0]] - (better[out[0]] if name == "rich" else 0.0)

        return of

    always, at_times = [0.05] * 6, [0.3, -0.2, 0.25, -0.2, 0.2, -0.1]

    # what makes a fold hard for both cancels
    assert robust.choose(["plain", "rich"], folds, loss(always), tolerance=0) == "rich"
    assert robust.choose(["plain", "rich"], folds, loss(at_times), tolerance=0) == "plain"
    assert robust.choose(["plain", "rich"], folds, loss(always), tolerance=0.1) == "plain"
