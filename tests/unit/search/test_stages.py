"""``memest.stages``: one run under every way to share it, and DeepSpeed's own figures beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memest
from memest.config import packages
from memest.errors import ConfigError, MissingDependencyError
from memest.sharding.deepspeed_estimator import zero2_model_states, zero3_model_states
from memest.units import format_size

RECORDED = Path(__file__).parent / "deepspeed_estimator.json"
"""What DeepSpeed 0.19.8 returned: arguments, then (host, GPU)."""
TINY = "prajjwal1/bert-tiny"
RUN = {"batch": 2, "seq_len": 64, "bf16": True, "num_gpus": 8}


@pytest.fixture(scope="module")
def table():
    return memest.stages(TINY, gpu="t4", gpus_per_node=4, fsdp_wrap=["BertLayer"], **RUN)


def test_deepspeed_returned_the_same():
    document = json.loads(RECORDED.read_text())
    assert len(document["zero2"]) > 20
    for (parameters, gpus, nodes, away), (host, gpu) in document["zero2"]:
        found = zero2_model_states(
            parameters, gpus_per_node=gpus, nodes=nodes, offloads_optimizer=away
        )
        assert (found.host_bytes, found.gpu_bytes) == (host, gpu)
    assert len(document["zero3"]) > 100
    for (parameters, layer, gpus, nodes, away, params, init), (host, gpu) in document["zero3"]:
        found = zero3_model_states(
            parameters, layer, gpus_per_node=gpus, nodes=nodes, offloads_optimizer=away,
            offloads_params=params, zero_init=init,
        )  # fmt: skip
        assert (found.host_bytes, found.gpu_bytes) == (host, gpu)


@pytest.mark.slow
def test_every_row_adds_up_to_its_device_peak(table):
    assert [row.name for row in table.rows][:4] == ["one GPU", "DDP", "ZeRO-1", "ZeRO-2"]
    for row in table.rows:
        assert row.estimate is not None, row.refused
        assert sum(row.columns.values()) == row.estimate.peak.device_bytes
        assert row.estimate.gpu.name


@pytest.mark.slow
def test_a_row_is_the_estimate_of_its_options(table):
    row = next(row for row in table.rows if row.name == "ZeRO-3, optim. off")
    alone = memest.estimate(TINY, gpu="t4", max_batch=False, **RUN, **dict(row.options))
    assert alone.peak == row.estimate.peak
    hybrid = next(row for row in table.rows if row.name == "FSDP2 hybrid")
    assert hybrid.estimate.setup.distributed.fsdp_shard_size == 4


@pytest.mark.slow
def test_a_note_says_which_rows_it_is_about(table):
    by_name = {row.name: row.estimate.notes for row in table.rows}
    (overlap,) = (note for note in by_name["ZeRO-3"] if "overlap_comm" in note)
    three = [name for name in by_name if name.startswith("ZeRO-3")]
    assert f"{'; '.join(three)}: {overlap}" in table.notes
    assert f"all but one GPU: {by_name['DDP'][-1]}" in table.notes
    assert f"one GPU: {by_name['one GPU'][-1]}" in table.notes
    assert json.loads(table.to_json())["notes"] == list(table.notes)
    assert "all but one GPU: not modelled" in str(table)


def test_offloading_is_paid_in_host_memory(table):
    host = {row.name: training(row).process_bytes for row in table.rows}
    waiting = host["DDP"]  # batches, of everybody
    assert host["ZeRO-2"] == host["ZeRO-3"] == waiting < 64 << 10
    # stage 3 offloads its share alone, parameters on top of it
    assert (
        waiting < host["ZeRO-3, optim. off"] < host["ZeRO-3, all off"] < host["ZeRO-2, optim. off"]
    )


def training(row):
    return next(phase for phase in row.host.phases if phase.phase == "training")


@pytest.mark.slow
def test_host_memory_is_that_of_the_estimate_of_the_row(table):
    row = next(row for row in table.rows if row.name == "FSDP2 full, off")
    alone = memest.estimate(
        TINY, gpu="t4", max_batch=False, host_memory="64GiB", processes_per_node=4, **RUN,
        **dict(row.options),
    )  # fmt: skip
    assert row.host.phases == alone.life.phases
    assert row.host_bytes == max(phase.process_bytes for phase in row.host.phases)
    assert row.host.node_bytes == alone.life.node_bytes
    # states are in the note as they are in the phases
    offloaded = training(row).parts[0]
    (note,) = (n for n in row.estimate.notes if n.startswith("host memory of each process"))
    assert format_size(offloaded.bytes) in note
    assert note.endswith("and Adam's states.")


def test_the_table_says_whether_the_host_of_a_node_suffices():
    table = memest.stages(
        "Qwen/Qwen2.5-0.5B", num_gpus=4, bf16=True, checkpointing="full", seq_len=512,
        host_memory="9GiB",
    )  # fmt: skip
    by_verdict = str(table).partition("does not fit on the host of 9.00 GiB: ")[2]
    assert "ZeRO-2, optim. off" in " ".join(by_verdict.split())


def test_deepspeeds_figures_stand_beside_their_rows(table):
    by_name = {row.name: row for row in table.official}
    assert set(by_name) == {row.name for row in table.rows if "zero" in dict(row.options)
                            and dict(row.options)["zero"] > 1}  # fmt: skip
    two = by_name["ZeRO-2"].states
    assert two.gpu_bytes == 2 * table.parameters + int(18 * table.parameters / 8)
    assert "not in its table" in by_name["ZeRO-2"].difference


def test_text_and_json_say_the_same(table):
    text = str(table)
    assert all(len(line) <= 120 for line in text.splitlines())
    document = json.loads(table.to_json())
    assert len(document["stages"]) == len(table.rows)
    for row in document["stages"]:
        assert row["name"] in text
        assert row["host"]["phases"][0]["phase"] == "loading"
        assert sum(row["bytes"].values()) == row["peak"]["device_bytes"]
        assert row["verdict"] == "fits"


@pytest.mark.slow
def test_what_cannot_be_is_said_and_the_rest_is_answered():
    """Input embeddings inside another unit: accelerate refuses, so do the rows of FSDP2."""
    table = memest.stages(TINY, **RUN)
    refused = [row for row in table.rows if row.estimate is None]
    assert {row.name for row in refused} == {"FSDP2 grad_op", "FSDP2 full", "FSDP2 full, off"}
    assert str(table).count("--fsdp-wrap BertLayer") == 1
    assert "refused" in json.loads(table.to_json())["stages"][-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 1}, "add --num-gpus 8"),
        ({"zero": 2}, "--zero is one of the things"),
        ({"zero_settings": {"zero_optimization": {"stage": 2}}}, "things that memest stages"),
        ({"gpus_per_node": 3}, "does not divide the 8 GPUs"),
        ({"gpus_per_node": 9}, "must be 1 to 8"),
        ({"sp": 2}, "--over zero=1,2,3"),
    ],
)
def test_questions_that_make_no_sense(options, words):
    with pytest.raises(ConfigError, match=words):
        memest.stages(TINY, **{**RUN, **options})


def test_gpus_that_share_layers_alone_are_called_so():
    model = "meta-llama/Llama-3.2-1B?num_hidden_layers=1"
    table = memest.stages(model, num_gpus=2, tp=2, batch=1, seq_len=32, gpu="t4", loop="plain")
    assert next(row.name for row in table.rows if row.estimate is not None) == "TP 2"


@pytest.fixture
def without_torch(monkeypatch, tmp_path):
    """What comes with the package, and nothing that traces."""
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    monkeypatch.setattr(packages, "is_there", lambda module: False)


@pytest.mark.usefixtures("without_torch")
def test_rows_that_need_torch_are_refused_and_the_others_shown():
    table = memest.stages(
        "Qwen/Qwen2.5-0.5B", num_gpus=2, bf16=True, checkpointing="full", seq_len=512
    )
    answered = {row.name for row in table.rows if row.estimate is not None}
    assert {"DDP", "ZeRO-2", "ZeRO-3", "FSDP2 full"} <= answered
    (refused,) = {row.refused for row in table.rows if row.estimate is None}
    assert "pip install 'memest-gpu[torch]'" in refused
    # what is loaded in half precision is trained in float32 by some of them alone
    assert table.notes[0].startswith("one GPU; DDP: weights and optimizer states stay in half")
    full = memest.stages(
        "Qwen/Qwen2.5-0.5B", num_gpus=2, bf16=True, checkpointing="full", seq_len=512,
        dtype="float32",
    )  # fmt: skip
    assert not any("half precision, as" in note for note in full.notes)


@pytest.mark.usefixtures("without_torch")
def test_plans_that_need_torch_are_left_out_and_the_others_told():
    asked = {"qlora": True, "bf16": True, "gpu": "rtx-4090", "seq_len": 1024}
    advice = memest.advise("Qwen/Qwen2.5-7B", effective_batch=8, **asked)
    assert {plan.estimate.setup.checkpointing for plan in advice.plans} == {"full"}
    left_out = [note for note in advice.notes if note.startswith("left out ")]
    assert any("left out checkpointing none" in note for note in left_out)
    reasons = [note.partition(": ")[2] for note in left_out]
    assert (
        len(reasons) == len(set(reasons)) < sum(note.count("checkpointing ") for note in left_out)
    )
    with pytest.raises(MissingDependencyError, match=r"is answered without --attn-impl"):
        memest.advise("gpt2", effective_batch=8, gpu="t4", attn_implementation="eager")


def test_dtypes_that_adapters_are_cast_to_are_of_those_who_do_not_shard() -> None:
    """As a configuration of LLaMA-Factory names them: who shards settles them, and that is said."""
    options = {**RUN, "peft": "lora", "dtype": "bfloat16"}
    table = memest.stages(TINY, cast_weights=["trainable=float32"], **options)
    rows = {row.name: row for row in table.rows}
    assert not any("cast" in row.refused.split(":")[0] for row in table.rows)
    assert any("--cast-weights trainable=float32 is of one GPU and DDP" in n for n in table.notes)
    sharded = memest.estimate(TINY, **options, zero=2, max_batch=False)
    assert rows["ZeRO-2"].estimate.peak.device_bytes == sharded.peak.device_bytes
    cast = memest.estimate(TINY, **options, cast_weights=["trainable=float32"], max_batch=False)
    assert rows["DDP"].estimate.peak.device_bytes == cast.peak.device_bytes
