"""What is fuzzed: every place where memest reads what somebody else wrote."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

__all__ = ["TARGETS", "Target"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """One reader.

    Attributes:
        name: of it.
        seeds: makes good inputs.
        check: reads one input in a folder of its own; raises only what memest raises on purpose.
        needs: modules that are loaded before inputs come, so that limits are those of reading.
        share: of the inputs of a campaign; slow targets take less.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    check: Callable[[bytes, Path], object]
    needs: tuple[str, ...] = ()
    share: int = 10


def _write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _dump(*documents: Any) -> list[bytes]:
    return [json.dumps(document).encode() for document in documents]


# -- case records and measurements ----------------------------------------------------------------


def _record_seeds() -> list[bytes]:
    lines = []
    for path in sorted((ROOT / "data" / "reference").glob("*.jsonl")):
        lines += path.read_bytes().splitlines()
    return [b"\n".join(lines[n : n + 3]) for n in range(0, len(lines), 7)]


def _records(content: bytes, folder: Path) -> object:
    from memest.calibration.validation.records import read_records

    return read_records([_write(folder, "records.jsonl", content)])


def _measurements(content: bytes, folder: Path) -> object:
    from memest.calibration.exchange import read_measurements

    return read_measurements(_write(folder, "records.jsonl", content))


def _measurement_seeds() -> list[bytes]:
    from memest.calibration.case import case_from_dict
    from memest.calibration.exchange import export_records
    from memest.calibration.measurement import Environment, Measurement, Status, StepReading

    gpu = Environment(
        gpu="NVIDIA Simulated", total_bytes=1 << 34, capability=(9, 0), sm_count=132,
        driver="580.1", cuda="13.0", torch="2.13.0", transformers="5.23.0", notes=("MIG",),
    )  # fmt: skip
    step = StepReading(
        seconds=0.1, requested_bytes=90, allocated_bytes=100, reserved_bytes=200,
        process_bytes=1000, reserved_now_bytes=200,
    )  # fmt: skip
    case = case_from_dict({"model": "gpt2", "setup": {"batch": 2, "seq_len": 64}})
    runs = [
        Measurement(
            run="0123456789abcdef", case=case, status=Status.OK, environment=gpu,
            started="2026-11-21T10:00:00+00:00", seconds=3.0, steps=(step, step),
        )
    ]  # fmt: skip
    return ["\n".join(export_records(runs)).encode()]


# -- profiles, the cache, histories ---------------------------------------------------------------


def _profile(content: bytes, folder: Path) -> object:
    from memest.estimation.calibration_files import read_calibration

    return read_calibration(_write(folder, "profile.json", content))


def _profile_seeds() -> list[bytes]:
    from memest.estimation.calibration import (
        Band,
        Calibration,
        CrossValidation,
        MeasuredOn,
        ProcessPart,
        Provenance,
    )  # fmt: skip
    from memest.estimation.calibration_files import write_calibration

    calibration = Calibration(
        tensors="identity", factors={"activations": 1.02}, process_model="constant",
        process=(ProcessPart(gpu="NVIDIA H100", constant_bytes=5 << 28, low_bytes=-(1 << 24),
                             high_bytes=1 << 25, cases=60, capability=(9, 0), sm_count=132,
                             total_bytes=80 << 30),),
        band=Band(metric="device", scale="constant", low=-5e7, high=8e7, level=0.9, cases=60),
        measured=MeasuredOn(allocated_bytes=10 << 30, kernels=80, seen={"precision": ("bf16",)},
                          torch=((2, 13),), cuda=((12, 8),)),
        validation=CrossValidation(cases=60, models=12, folds=10, coverage=0.91, above=0.05),
        provenance=Provenance(gpus=("NVIDIA H100",), first="2026-11-20", last="2026-11-21"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_calibration(calibration, path)
        return [path.read_bytes()]


def _cache_seeds() -> list[bytes]:
    """The bodies of step profiles, as they lie under their heads."""
    from memest.profiles.known_profiles import shipped_folder
    from memest.profiles.packs import Packs

    packs = Packs(shipped_folder())
    small = [entry.digest for entry in packs.entries() if entry.bytes < 400_000]
    documents = (document for digest in small for document in packs.read(digest, "steps"))
    return [json.dumps(document.content).encode() for document in islice(documents, 10)]


def _cache(content: bytes, folder: Path) -> object:
    """A document of the cache whose head vouches for whatever stands in it."""
    from memest.profiles.cache import KIND, Store, head_of
    from memest.profiles.document import BadDocumentError, family_from_json

    place = folder / "cache" / ("0" * 32)
    place.mkdir(parents=True)
    path = place / "steps-batch.json.gz"
    head = json.dumps(head_of(path, content, None)).encode()
    gzip_bytes = gzip.compress(head + b"\n" + content, 1)
    path.write_bytes(gzip_bytes if len(content) % 4 else content)
    store = Store(folder / "cache", writable=False)
    store.entries()
    for document in store.read("0" * 32, "steps"):
        with contextlib.suppress(BadDocumentError):
            return family_from_json(document.content)
    return KIND


def _snapshot_seeds() -> list[bytes]:
    block = {"address": 512, "size": 2097152, "requested_size": 0, "state": "inactive",
             "frames": []}  # fmt: skip
    segment = {"address": 512, "total_size": 2097152, "allocated_size": 0, "active_size": 0,
               "device": 0, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
               "blocks": [block], "is_expandable": False, "frames": []}  # fmt: skip
    events = [
        {"action": "segment_alloc", "addr": 512, "size": 2097152, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 512, "size": 300, "stream": 0, "frames": []},
        {"action": "free_requested", "addr": 512, "size": 300, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 512, "size": 300, "stream": 0, "frames": []},
    ]
    whole = {"segments": [segment], "device_traces": [events],
             "allocator_settings": {"expandable_segments": False}}  # fmt: skip

    class Evil:
        def __reduce__(self):
            import os

            return os.system, ("touch PWNED",)

    return [
        pickle.dumps(whole), pickle.dumps(whole, 2), pickle.dumps({**whole, "segments": Evil()}),
        json.dumps(whole).encode(),
    ]  # fmt: skip


def _snapshot(content: bytes, folder: Path) -> object:
    from memest.replay import replay_snapshot

    name = "snapshot.json" if content[:1] in (b"{", b"[") else "snapshot.pickle"
    return replay_snapshot(_write(folder, name, content))


def _history_seeds() -> list[bytes]:
    from memest.calibration.recording.history_file import write_history
    from memest.calibration.recording.recorded import History
    from memest.replay.snapshot import TraceEvent

    events = (
        TraceEvent("alloc", 1 << 40, 700, 99), TraceEvent("free_requested", 1 << 40, 700, 99),
        TraceEvent("alloc", 1 << 41, 700, 0), TraceEvent("free_completed", 1 << 40, 700, 99),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history"
        write_history(path, History(events=events, sites=[-1] * len(events)))
        return [gzip.decompress(path.read_bytes())]


def _history(content: bytes, folder: Path) -> object:
    from memest.calibration.recording.history_file import read_history

    gzip_bytes = gzip.compress(content, 1) if len(content) % 8 else content
    return read_history(_write(folder, "history.jsonl.gz", gzip_bytes))


# -- configurations -------------------------------------------------------------------------------


def _model_seeds() -> list[bytes]:
    paths = sorted((ROOT / "data" / "models" / "configs").rglob("*.json"))[::20]
    return [path.read_bytes() for path in paths if path.stat().st_size < 20_000]


def _model(content: bytes, folder: Path) -> object:
    from memest.catalog.config_file import check_config, read_config

    path = _write(folder, "config.json", content)
    config = read_config(path, label="config.json")
    return check_config(config, label="config.json", trust_remote_code=False)


def _deepspeed(content: bytes, folder: Path) -> object:
    from memest.config.options import setup_from_options

    path = _write(folder, "ds.json", content)
    return setup_from_options(num_gpus=4, batch=2, deepspeed=str(path))


def _peft(content: bytes, folder: Path) -> object:
    from memest.config.options import setup_from_options

    path = _write(folder, "adapter_config.json", content)
    return setup_from_options(batch=2, peft_config=str(path))


def _alloc_conf(content: bytes, folder: Path) -> object:  # noqa: ARG001 - the same for all
    from memest.replay.conf import parse_alloc_conf

    return parse_alloc_conf(content.decode("utf-8", "replace"))


# -- configurations of other tools, launch commands, logs -----------------------------------------


def _reader_seeds() -> list[bytes]:
    """Examples of every format, each with its suffix in front."""
    folder = ROOT / "tests" / "unit" / "readers" / "examples"
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.name.encode() + b"\0" + path.read_bytes() for path in paths]


def _reader(content: bytes, folder: Path) -> object:
    import memest

    name, _, body = content.partition(b"\0")
    suffix = name.decode("latin-1").rpartition(".")[2]
    suffix = suffix if suffix in ("yaml", "json", "toml", "py", "ipynb", "sh") else "yaml"
    path = _write(folder, f"run.{suffix}", body)
    # a function of torchtitan's, else a script
    reference = f"{path}:llama3_8b" if b"llama3_8b" in body else str(path)
    with contextlib.chdir(folder):
        return memest.read_config(reference, model="gpt2")


def _launch_seeds() -> list[bytes]:
    return [
        b"accelerate launch --num_processes 4 --mixed_precision bf16 train.py --bf16 True",
        b"torchrun --nproc_per_node=8 train.py --model_name_or_path gpt2 --deepspeed ds.json",
        b"CUDA_VISIBLE_DEVICES=0,1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m x.y",
        b"deepspeed --num_gpus 2 run_clm.py --deepspeed ds.json --per_device_train_batch_size 8",
        b"tune run lora_finetune_single_device --config x batch_size=2 model._component_=a.b.c",
        b"trl sft --model_name_or_path gpt2 --gradient_checkpointing --no_remove_unused_columns",
        b"llamafactory-cli train x.yaml", b"axolotl train x.yaml", b"accelerate launch 'unfinished",
        b"NGPU=4 CONFIG_FILE=x.toml ./run_train.sh --training.no-enable-cpu-offload",
        b"swift sft --model gpt2 --train_type lora --torch_dtype float16 --max_length 512",
        b"python qlora.py --model_name_or_path gpt2 --bits 4 --source_max_len 16 --lora_modules q",
    ]  # fmt: skip


def _launch(content: bytes, folder: Path) -> object:
    import memest

    with contextlib.chdir(folder):
        return memest.read_command(content.decode("utf-8", "replace"), model="gpt2")


def _oom_seeds() -> list[bytes]:
    old = (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; "
        "15.78 GiB total capacity; 14.20 GiB already allocated; 3.44 MiB free; 14.56 GiB reserved "
        "in total by PyTorch)"
    )
    new = (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 "
        "has a total capacity of 79.15 GiB of which 1.20 GiB is free. Process 123 has 77.94 GiB "
        "memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 6.00 GiB "
        "is reserved by PyTorch but unallocated."
    )
    return [old.encode(), new.encode()]


def _oom(content: bytes, folder: Path) -> object:  # noqa: ARG001 - the same for all
    from memest.report.oom_message import read_oom_messages

    return read_oom_messages(content.decode("utf-8", "replace"))


def _length_seeds() -> list[bytes]:
    return [b"length,count\n128,40\n512,3\n", b"12\n700\n33\n", b'{"128": 40, "512": 3}',
            b"[12, 700, 33]"]  # fmt: skip


def _lengths(content: bytes, folder: Path) -> object:
    from memest.config.length_files import read_lengths

    suffix = "json" if content[:1] in (b"{", b"[") else "csv"
    return read_lengths(_write(folder, f"lengths.{suffix}", content))


# -- the command line and the app's uploads -------------------------------------------------------


def _words() -> list[bytes]:
    lines = [
        "estimate no/such-model --batch 8 --fp16 --gpu rtx-3090", "gpus a100 --json",
        "models bert --json", "estimate --batch 8", "fits x --fail-over 22GiB --gpu t4",
        "sweep no/such --over batch=1,2,4 --over fp16=true,false --json",
        "max-batch no/such --gpu v100 --of seq-len", "replay nothing.pickle --json",
        "validate nothing.jsonl --assume software.torch=2.1", "cache list", "env --json",
        "estimate no/such --lora-r 16 --load-in-4bit --optim paged_adamw_8bit --zero 2",
        "compare no/such --gpu a,b --with batch=4", "calibrate show --store none.db",
        "advise no/such --gpu t4 -n 64", "estimate no/such --software torch=1.10 --seq_len=512",
    ]  # fmt: skip
    return [line.replace(" ", "\0").encode() for line in lines]


def _command(content: bytes, folder: Path) -> object:
    """One command line in an empty folder; only exit codes of the contract may come back."""
    from memest.cli.main import run

    words = [word for word in content.decode("utf-8", "replace").split("\0") if word][:30]
    if words[:1] in (["app"], ["calibrate"]) and words[1:2] != ["show"]:
        return None  # a server, or a campaign: both begin processes on purpose
    if "--check" in words:
        return None
    if "--store" in words or "--out" in words or "-o" in words:
        words = [word.replace("/", "_") for word in words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    if "Traceback" in err.getvalue():
        raise AssertionError(err.getvalue()[-500:])
    if code not in range(7):
        raise AssertionError(f"exit code {code}")
    return code


def _upload(content: bytes, folder: Path) -> object:  # noqa: ARG001 - the user's folder is set
    from memest.app.uploads import keep_config

    return keep_config("config.json", content)


def _link_seeds() -> list[bytes]:
    return [
        b"bert-large-uncased batch=8 fp16=true gpu=rtx-3090", b"gpt2 batch=4 pin=a",
        b"/etc/passwd trust_remote_code=true", b"pkg.mod:factory deepspeed=/etc/passwd",
        b"gpt2 profile=/etc/passwd", b"gpt2?n_layer=2 lora_r=8 load_in_4bit=true",
    ]  # fmt: skip


def _link(content: bytes, folder: Path) -> object:  # noqa: ARG001
    from memest.app.question import ExplorerQuestion
    from memest.app.uploads import check_question

    question = ExplorerQuestion.from_short(content.decode("utf-8", "replace"))
    check_question(question)
    return question.setup, question.command_line(), question.snippet()


TARGETS = (
    Target("case records", _record_seeds, _records, ("memest.calibration.validation.records",)),
    Target("measurements", _measurement_seeds, _measurements, ("memest.calibration.exchange",)),
    Target(
        "calibration profiles", _profile_seeds, _profile,
        ("memest.estimation.calibration_files",),
    ),
    Target(
        "cache", _cache_seeds, _cache,
        ("memest.profiles.cache", "memest.profiles.document"), share=2,
    ),
    Target("memory snapshots", _snapshot_seeds, _snapshot, ("memest.replay",)),
    Target(
        "allocation histories", _history_seeds, _history,
        ("memest.calibration.recording.history_file",),
    ),
    Target("model configurations", _model_seeds, _model, ("memest.catalog.config_file",)),
    Target(
        "DeepSpeed files",
        lambda: _dump(
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                                   "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"},
             "train_micro_batch_size_per_gpu": "auto"},
        ),
        _deepspeed, ("memest.config.options", "memest.config.deepspeed"),
    ),
    Target(
        "peft files",
        lambda: _dump(
            {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
             "lora_dropout": 0.05, "modules_to_save": None, "bias": "none"},
        ),
        _peft, ("memest.config.options", "memest.config.merging"),
    ),
    Target(
        "configurations of other tools", _reader_seeds, _reader, ("memest.readers.reading", "yaml"),
    ),
    Target("launch commands", _launch_seeds, _launch, ("memest.readers.reading",)),
    Target("out-of-memory messages", _oom_seeds, _oom, ("memest.report.oom_message",)),
    Target("lengths", _length_seeds, _lengths, ("memest.config.length_files",)),
    Target(
        "allocator settings",
        lambda: [b"expandable_segments:True", b"max_split_size_mb:128",
                 b"garbage_collection_threshold:0.8,max_split_size_mb:64",
                 b"roundup_power2_divisions:[256:1,512:2,>:8]", b"backend:cudaMallocAsync"],
        _alloc_conf, ("memest.replay.conf",),
    ),
    Target(
        "command lines", _words, _command, ("memest.cli.main", "memest.cli.commands"), share=2
    ),
    Target("explorer uploads", _model_seeds, _upload, ("memest.app.uploads",)),
    Target("explorer links", _link_seeds, _link, ("memest.app.question", "memest.app.uploads")),
)  # fmt: skip


def load(target: Target, chance: random.Random) -> list[bytes]:
    """The seeds of a target, with its modules loaded."""
    for name in target.needs:
        importlib.import_module(name)
    seeds = target.seeds()
    chance.shuffle(seeds)
    return seeds
