"""Applying a profile: exact sums, honest ranges, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memest.errors import ConfigError
from memest.estimation.calibration import (
    Band,
    Calibration,
    CrossValidation,
    MeasuredOn,
    ProcessPart,
    Provenance,
)
from memest.estimation.calibration_files import (
    calibrations_for,
    read_calibration,
    write_calibration,
)
from memest.estimation.correction import UncorrectedEstimate, correct
from memest.units import GIB, MIB

GPU = "NVIDIA Simulated 1"
PARTS = {"parameters": 2 * GIB, "activations": 3 * GIB, "rounding": 12_345}
NAMES = ("parameters", "gradients", "activations", "temporaries", "workspaces", "rounding")


def part(gpu=GPU, **changes):
    values = {
        "gpu": gpu, "constant_bytes": 500 * MIB, "low_bytes": -20 * MIB, "high_bytes": 30 * MIB,
        "cases": 60, "capability": (8, 0), "sm_count": 100, "total_bytes": 24 * GIB,
    }  # fmt: skip
    return ProcessPart(**{**values, **changes})


def profile(**changes):
    values = {
        "tensors": "identity",
        "factors": {},
        "process_model": "constant",
        "process": (part(),),
        "band": Band(
            metric="device", scale="constant", low=-50.0 * MIB, high=80.0 * MIB, level=0.9, cases=60
        ),
        "measured": MeasuredOn(
            allocated_bytes=10 * GIB,
            kernels=80,
            seen={
                "precision": ("bf16", "fp32"), "dtype": ("float32",), "attention": ("sdpa",),
                "optimizer": ("adamw_torch_fused",), "loop": ("trainer",),
                "checkpointing": ("none",), "family": ("bert", "gpt2"),
            },
            torch=((2, 13),),
            cuda=((12, 8),),
        ),
        "validation": CrossValidation(cases=60, models=12, folds=10, coverage=0.91, above=0.05),
        "provenance": Provenance(gpus=(GPU,), first="2026-11-20", last="2026-11-21"),
    }  # fmt: skip
    return Calibration(**{**values, **changes})


def question(parts=PARTS, **changes):
    allocated = sum(parts.values())
    values = {
        "parts": parts, "allocated_bytes": allocated, "reserved_bytes": allocated + 100 * MIB,
        "kernels": 50, "gpu": GPU, "sm_count": 100, "capability": (8, 0), "total_bytes": 24 * GIB,
        "torch": (2, 13), "cuda": (12, 8), "context_low_bytes": 300 * MIB,
        "context_expected_bytes": 575 * MIB, "context_high_bytes": 800 * MIB,
        "precision": "bf16", "dtype": "float32", "attention": "sdpa",
        "optimizer": "adamw_torch_fused", "loop": "trainer", "checkpointing": "none",
        "family": "bert",
    }  # fmt: skip
    return UncorrectedEstimate(**{**values, **changes})


# -- figures --------------------------------------------------------------------------------------


def test_each_part_is_scaled_and_the_rest_follows():
    fitted = profile(
        tensors="every part", factors={"activations": 1.1}, gap_bytes=7 * MIB,
        per_kernel_bytes=2.0 * MIB, precision_bytes={"bf16": 40 * MIB, "fp32": 0},
    )  # fmt: skip

    found = correct(fitted, question())

    assert found.parts["activations"] == round(3 * GIB * 1.1)
    assert found.parts["parameters"] == 2 * GIB
    grown = found.allocated_bytes - found.before.allocated_bytes
    assert grown == found.parts["activations"] - 3 * GIB
    assert found.reserved_bytes == found.before.reserved_bytes + grown + 7 * MIB
    assert found.process_expected_bytes == (500 + 100 + 40) * MIB
    assert found.device_bytes == found.reserved_bytes + 640 * MIB
    assert (found.low_bytes, found.high_bytes) == (
        found.device_bytes - 50 * MIB,
        found.device_bytes + 80 * MIB,
    )
    assert (found.process_low_bytes, found.process_high_bytes) == (620 * MIB, 670 * MIB)
    assert found.level == 0.9
    assert found.notes == ()
    assert found.basis == (
        "calibrated on 60 runs of 12 models on NVIDIA Simulated 1 (2026-11-20 to 2026-11-21): 90% "
        "of runs are expected in the range and 95% below its upper end, from how far models lay "
        "off that were left out of the fit (91% lay inside)"
    )


def test_raw_figures_stay_beside_the_corrected_ones():
    found = correct(profile(factors={"activations": 0.5}), question(slack_bytes=MIB))

    assert found.before.parts == PARTS
    assert found.before.reserved_bytes == sum(PARTS.values()) + 100 * MIB
    assert found.before.device_bytes == found.before.reserved_bytes + 575 * MIB
    assert found.before.low_bytes == found.before.reserved_bytes + 300 * MIB
    assert found.before.high_bytes == found.before.reserved_bytes + 801 * MIB
    assert found.validation.cases == 60


def test_identity_changes_no_byte():
    found = correct(profile(), question())

    assert found.parts == PARTS
    assert found.reserved_bytes == found.before.reserved_bytes


sizes = st.integers(0, 1 << 45)


@given(
    st.dictionaries(st.sampled_from(NAMES), sizes, min_size=1),
    st.dictionaries(st.sampled_from(NAMES), st.floats(0, 100)),
    st.floats(0, 100),
    st.integers(-(1 << 40), 1 << 40),
)
def test_parts_sum_exactly_and_nothing_is_negative(parts, factors, other, gap):
    fitted = profile(factors=factors, other_factor=other, gap_bytes=gap)

    found = correct(fitted, question(parts))

    assert sum(found.parts.values()) == found.allocated_bytes
    assert all(isinstance(size, int) and size >= 0 for size in found.parts.values())
    assert found.reserved_bytes >= found.allocated_bytes
    assert 0 <= found.low_bytes <= found.device_bytes <= found.high_bytes
    for name, size in parts.items():
        assert abs(found.parts[name] - size * factors.get(name, other)) <= 1


def test_parts_that_do_not_sum_are_refused():
    with pytest.raises(ValueError, match="the parts sum to"):
        question(allocated_bytes=1)


# -- ranges ---------------------------------------------------------------------------------------


def test_a_proportional_band_grows_with_the_peak():
    band = Band(metric="device", scale="proportional", low=-0.01, high=0.02, level=0.9, cases=60)

    found = correct(profile(band=band), question())

    assert found.high_bytes == pytest.approx(found.device_bytes * 1.02, abs=2)
    assert found.low_bytes == pytest.approx(found.device_bytes * 0.99, abs=2)


def test_few_cases_claim_what_they_can_and_join_the_uncalibrated_range():
    band = Band(metric="device", scale="constant", low=-MIB, high=MIB, level=0.75, cases=9, draws=7)

    found = correct(profile(band=band), question())

    assert found.level == 0.75
    assert found.low_bytes == found.before.low_bytes
    assert found.high_bytes == found.before.high_bytes
    assert "9 runs, which count as 7 independent ones, are too few for 90%" in found.basis
    assert "the range joins their whole spread" in found.basis
    assert "75% of runs" in found.basis


def test_a_workspace_range_larger_than_any_measured_raises_the_upper_end():
    inside = correct(profile(), question())
    found = correct(profile(), question(slack_bytes=64 * MIB))

    assert found.high_bytes == inside.high_bytes + 64 * MIB
    assert found.low_bytes == inside.low_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "t5"}, "family t5 is in none of the runs measured on"),
        ({"precision": "fp16"}, "precision fp16"),
        ({"attention": "eager"}, "attention eager"),
        ({"optimizer": "sgd"}, "optimizer sgd"),
        ({"loop": "plain"}, "loop plain"),
        ({"checkpointing": "full"}, "checkpointing full"),
        ({"dtype": "bfloat16"}, "dtype bfloat16"),
        ({"torch": (2, 11)}, "torch 2.11 is in none of the runs measured on"),
        ({"cuda": (13, 0)}, "CUDA 13 is in none of"),
        ({"kernels": 200}, "number of operators (200) is beyond the largest of the runs"),
        ({"parts": {"activations": 40 * GIB}}, "allocated memory (40.00 GiB) is beyond"),
    ],
)
def test_beyond_what_was_measured_it_says_so_and_widens(changes, said):
    found = correct(profile(), question(**changes))

    assert found.level is None
    assert found.distance > 0
    assert any(
        said in note and note.startswith("The range is wider because") for note in found.notes
    )
    assert "beyond what was measured" in found.basis
    assert found.low_bytes <= found.before.low_bytes
    assert found.high_bytes >= found.before.high_bytes
    assert found.low_bytes < found.device_bytes - 50 * MIB
    assert found.high_bytes > found.device_bytes + 80 * MIB


def test_a_little_beyond_is_not_beyond():
    found = correct(profile(), question({"activations": int(10.5 * GIB)}, kernels=85))

    assert (found.distance, found.level) == (0, 0.9)


@given(st.floats(1, 60), st.floats(1, 60))
def test_widening_grows_with_the_size(one, other):
    widths = []
    for times in sorted((one, other)):
        found = correct(profile(), question({"activations": int(times * GIB)}))
        above = (found.high_bytes - found.device_bytes) / found.device_bytes
        widths.append((found.distance, found.high_bytes - found.device_bytes))
        assert above > 0

    assert widths[0][0] <= widths[1][0]
    assert widths[0][1] <= widths[1][1] + 2


def test_widening_grows_with_each_unseen_fact():
    # a table that leaves nothing open, so that the calibration's own range shows
    changes = {"context_low_bytes": 575 * MIB, "context_high_bytes": 575 * MIB}
    widths = []
    for name, value in (("loop", "plain"), ("family", "t5"), ("torch", (2, 11)), ("cuda", (13, 0))):
        changes[name] = value
        found = correct(profile(), question(**changes))
        widths.append(found.high_bytes - found.low_bytes)

    assert widths == sorted(widths)
    assert len(set(widths)) == len(widths)


def test_a_far_release_is_wider_than_a_near_one():
    near, far = (correct(profile(), question(torch=(2, minor))) for minor in (12, 6))

    assert near.high_bytes < far.high_bytes
    assert near.low_bytes > far.low_bytes


# -- other GPUs, CPUs -----------------------------------------------------------------------------


def test_another_gpu_borrows_from_the_nearest_and_says_so():
    lenders = (
        part("NVIDIA Far", capability=(9, 0), sm_count=110, constant_bytes=900 * MIB),
        part("NVIDIA Near", capability=(8, 6), sm_count=80, constant_bytes=450 * MIB),
        part("NVIDIA Same size", capability=(8, 6), sm_count=30, constant_bytes=400 * MIB),
    )
    asked = question(gpu="NVIDIA Other", capability=(8, 6), sm_count=84)

    found = correct(profile(process=lenders), asked)

    assert found.process_gpu == "NVIDIA Near"
    assert found.process_expected_bytes == 450 * MIB
    assert found.process_low_bytes == 300 * MIB
    assert found.process_high_bytes == 800 * MIB
    assert found.level is None
    assert found.high_bytes > found.before.high_bytes
    assert found.low_bytes < found.before.low_bytes
    assert "No run was measured on NVIDIA Other" in found.notes[0]
    assert "borrowed from NVIDIA Near, of the same compute capability" in found.notes[0]


def test_a_gpu_of_another_capability_is_wider_still():
    alike = correct(profile(), question(gpu="NVIDIA Other"))
    other = correct(profile(), question(gpu="NVIDIA Other", capability=(9, 0)))

    assert alike.distance < other.distance
    assert other.high_bytes > alike.high_bytes
    assert "the nearest that was measured" in other.notes[0]


def test_one_of_several_gpus_with_hardly_a_run_claims_nothing():
    parts = (part(), part("NVIDIA New", cases=1, constant_bytes=450 * MIB))

    found = correct(profile(process=parts), question(gpu="NVIDIA New"))

    assert found.process_expected_bytes == 450 * MIB
    assert (found.process_low_bytes, found.process_high_bytes) == (300 * MIB, 800 * MIB)
    assert found.level is None
    assert "Only 1 run of the calibration had device memory of NVIDIA New read" in found.notes[0]
    assert correct(profile(process=parts), question()).level == 0.9
    assert correct(profile(process=(part(cases=2),)), question()).level == 0.9


def test_without_a_capability_the_number_of_sms_decides_then_memory():
    lenders = (part("NVIDIA A", sm_count=20), part("NVIDIA B", sm_count=90))
    asked = question(gpu="NVIDIA Other", capability=None, sm_count=100)

    assert correct(profile(process=lenders), asked).process_gpu == "NVIDIA B"

    lenders = (part("NVIDIA A", total_bytes=80 * GIB), part("NVIDIA B", total_bytes=16 * GIB))
    asked = question(gpu="NVIDIA Other", total_bytes=24 * GIB)

    assert correct(profile(process=lenders), asked).process_gpu == "NVIDIA B"


def test_the_maker_in_a_name_does_not_matter():
    assert correct(profile(), question(gpu="simulated  1")).level == 0.9


def test_a_profile_of_a_cpu_corrects_tensors_only():
    fitted = profile(
        process=(), process_model="", factors={"activations": 1.1}, gap_bytes=0,
        band=Band(
            metric="allocated", scale="proportional", low=-0.01, high=0.01, level=0.9, cases=60
        ),
        provenance=Provenance(gpus=("cpu",)),
    )  # fmt: skip

    found = correct(fitted, question(slack_bytes=MIB))

    assert found.parts["activations"] == round(3 * GIB * 1.1)
    assert found.process_expected_bytes == 575 * MIB
    assert found.level is None
    assert found.low_bytes <= found.reserved_bytes + 300 * MIB
    assert found.high_bytes >= found.reserved_bytes + 801 * MIB + found.allocated_bytes // 101
    (note,) = found.notes
    assert note == (
        "The profile was measured on a CPU: it corrects tensors only; context and kernels, and "
        "their range, are as the table has them."
    )
    assert "on a CPU" in found.basis


# -- files ----------------------------------------------------------------------------------------


def test_a_profile_reads_back_as_written(tmp_path):
    fitted = profile(
        factors={"activations": 1.0625}, precision_bytes={"bf16": 5}, per_kernel_bytes=0.5
    )
    path = tmp_path / "made" / "profile.json"

    write_calibration(fitted, path)

    assert read_calibration(path) == fitted
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]
    first = path.read_bytes()
    write_calibration(read_calibration(path), path)
    assert path.read_bytes() == first


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        write_calibration(profile(), tmp_path / "file" / "profile.json")


def document():
    return profile(factors={"activations": 1.0}).to_dict()


def changed(path, value):
    out = json.loads(json.dumps(document()))
    at = out
    *way, last = path.split(".")
    for name in way:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[last] = value
    return json.dumps(out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[1, 2]", "must be an object"),
        ("{}", "kind is missing"),
        ("null", "must be an object"),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deep"),
        ("9" * 5000, "a number that is none"),
        (" " * (2 << 20), "larger than"),
        (changed("kind", "recipe"), "kind is 'recipe'"),
        (changed("schema_version", 2), "schema_version is 2, and must be 1"),
        (changed("schema_version", True), "schema_version is True"),
        (changed("factors.activations", -0.1), "factors.activations is -0.1, and must be a finite"),
        (changed("factors.activations", float("nan")), "NaN, and every number must be finite"),
        (changed("factors.activations", float("inf")), "Infinity"),
        (changed("factors.activations", "1"), "factors.activations is '1'"),
        (changed("factors.activations", None), "factors.activations is None"),
        (changed("factors.activations", 10**400), "number of 1329 bits"),
        (changed("factors", {str(i): 1.0 for i in range(5000)}), "at most 1000 members"),
        (changed("factors", {"\x1b[2J": 1.0}), "printable text"),
        (changed("gap_bytes", 1.5), "gap_bytes is 1.5, and must be a whole number"),
        (changed("process.0.constant_bytes", -5), "process[0].constant_bytes is -5"),
        (changed("process.0.gpu", ""), "text that is not empty"),
        (changed("process.0.gpu", "\ud800"), "printable text"),
        (changed("process.0.capability", [8]), "a pair of whole numbers"),
        (changed("process.0.high_bytes", -1), "process[0].high_bytes"),
        (changed("band.level", 0.99), "band.level is 0.99"),
        (changed("band.low", 1e300), "band.low"),
        (changed("band.low", 90.0 * MIB), "band.low is"),
        (changed("band.scale", ["constant"]), "one of constant, proportional"),
        (changed("band.metric", "power"), "one of device, reserved, allocated"),
        (changed("measured.torch", [[2]]), "measured.torch[0]"),
        (changed("validation.coverage", 2), "validation.coverage is 2"),
        (changed("provenance.statuses", {"ok": -1}), "provenance.statuses.ok"),
        (changed("provenance.notes", "all well"), "a list of at most"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_told_in_a_sentence(tmp_path, text, said):
    path = tmp_path / "profile.json"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_calibration(path)

    message = str(caught.value)
    assert said in message
    assert "memest calibrate" in message
    assert len(message) < 600
    assert message.isprintable()


def test_binary_missing_and_folders_are_told_too(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.json")

    for name, said in (
        ("binary.json", "not UTF-8"),
        ("pipe.json", "is not a file"),
        ("missing.json", "cannot be read"),
        ("", "is not a file"),
        ("nul\0byte", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_calibration(os.path.join(tmp_path, name))  # noqa: PTH118


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def places(value, way=()):
    yield way
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        if isinstance(inner, (dict, list)):
            yield from places(inner, (*way, name))
        else:
            yield (*way, name)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_change_of_a_profile_makes_a_traceback(tmp_path, data):
    changed = json.loads(json.dumps(document()))
    way = data.draw(st.sampled_from([w for w in places(changed) if w]))
    at = changed
    for name in way[:-1]:
        at = at[name]
    if data.draw(st.booleans()):
        at[way[-1]] = data.draw(json_values)
    else:
        del at[way[-1]]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(changed))

    try:
        found = correct(read_calibration(path), question())
    except ConfigError:
        return
    assert sum(found.parts.values()) == found.allocated_bytes
    assert 0 <= found.low_bytes <= found.device_bytes <= found.high_bytes


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_bytes_make_a_traceback(tmp_path, raw):
    path = tmp_path / "profile.json"
    path.write_bytes(raw)

    with pytest.raises(ConfigError):
        read_calibration(path)


# -- which one ------------------------------------------------------------------------------------


def test_the_profile_with_most_runs_on_a_gpu_is_taken_then_the_newest(tmp_path):
    few, many, newer = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    origin = Provenance(gpus=(GPU,), last="2026-11-20")
    write_calibration(profile(process=(part(cases=9),)), few)
    write_calibration(profile(process=(part(cases=50),), provenance=origin), many)
    newest = replace(origin, last="2026-12-01")
    write_calibration(profile(process=(part(cases=50),), provenance=newest), newer)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.txt").write_text("{")

    found = calibrations_for("simulated 1", [tmp_path / "nothing", tmp_path])

    assert found is not None
    assert found.path == newer
    assert len(found.notes) == 1
    assert "broken.json" in found.notes[0]
    assert calibrations_for("NVIDIA H100", [tmp_path]) is None


def test_applying_a_profile_loads_nothing_heavy(tmp_path):
    write_calibration(profile(), tmp_path / "profile.json")
    code = (
        "import sys; import memest.estimation.correction; "
        "from memest.estimation.calibration_files import read_calibration, calibrations_for; "
        "p = read_calibration(sys.argv[1]); "
        "heavy = {'torch', 'sklearn', 'numpy', 'pandas', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "profile.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
