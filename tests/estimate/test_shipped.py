"""The profiles that come with the package: readable, small, and what a trace would say today."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memest.hardware.catalogue import find_gpu, traits
from memest.installed import release
from memest.models.resolve import resolve_model
from memest.options import setup_from_options
from memest.shelf import shipped_folder
from memest.steps.document import family_from_json, reach_from_json
from memest.store import Store
from memest.tracing import Tracer

SOFTWARE = json.loads((shipped_folder() / "software.json").read_text())
same_software = pytest.mark.skipif(
    any(release(name) != wanted for name, wanted in SOFTWARE.items()),
    reason="the profiles were traced with other releases",
)
MODELS = (
    "bert-base-uncased", "bert-large-uncased", "roberta-base", "gpt2", "t5-base",
    "google/vit-base-patch16-224", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen2.5-7B",
    "mistralai/Mistral-7B-v0.1",
)  # fmt: skip


def shipped():
    return Store(shipped_folder(), shipped=True)


def test_they_are_small_and_whole():
    files = [file for file in shipped_folder().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 3_000_000

    names = 0
    for entry in shipped().entries():
        for document in shipped().read(entry.digest, "steps"):
            family = family_from_json(document.content)
            assert family.reach == reach_from_json(document.about)
            names += 1
        for document in shipped().read(entry.digest, "updates"):
            family_from_json(document.content)
            names += 1
        assert entry.key["torch"] == SOFTWARE["torch"]
    assert names > 100
    assert not [file for file in files if file.name.endswith(".part")]


@same_software
@pytest.mark.parametrize("model", MODELS)
def test_a_first_question_is_answered_without_a_trace(model):
    tracer = Tracer(source=resolve_model(model), stores=(Store(None), shipped()))
    precisions = ("fp32", "bf16") if "/" in model and "vit" not in model else ("fp32", "fp16")
    for precision in precisions:
        for gpu in ("a100", "t4", "h100"):
            for batch in (1, 2, 7):
                found = tracer.find(
                    setup_from_options(batch=batch, precision=precision), traits(find_gpu(gpu))
                )
                assert found.stream.sizes
    assert tracer.traces_made == 0


@same_software
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bert-base-uncased", {"batch": 5, "seq_len": 256, "fp16": True}),
        ("gpt2", {"batch": 3, "seq_len": 384, "checkpointing": "full"}),
        ("t5-base", {"batch": 1, "seq_len": 128, "bf16": True}),
        ("google/vit-base-patch16-224", {"batch": 19}),
        ("mistralai/Mistral-7B-v0.1", {"batch": 2, "seq_len": 640, "checkpointing": "full"}),
    ],
    ids=str,
)
def test_they_say_what_a_trace_says(model, options):
    setup, gpu = setup_from_options(**options), traits(find_gpu("a100"))
    kept = Tracer(source=resolve_model(model), stores=(Store(None), shipped()))
    fresh = Tracer(source=resolve_model(model), stores=())

    found, traced = kept.find(setup, gpu), fresh.trace(setup, gpu)

    assert kept.traces_made == 0
    assert found.setup == traced.setup
    assert found.counts == traced.counts
    one, other = found.stream, traced.stream
    assert list(one.events) == list(other.events)
    assert one.sizes == other.sizes
    assert one.categories == other.categories
    assert [one.label_names[i] for i in one.labels] == [other.label_names[i] for i in other.labels]
    assert kept.assumptions(setup) == fresh.assumptions(setup)


def test_they_answer_where_no_torch_is(tmp_path):
    for package in ("torch", "transformers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ImportError('no {package}')")
    code = (
        "import sys; from memest.cli.main import run;"
        "sys.exit(run(['estimate', 'bert-large-uncased', '--batch', '8', '--fp16', '--json']))"
    )
    import os

    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MEMEST_CACHE": str(tmp_path / "c")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    if any(release(name) != wanted for name, wanted in SOFTWARE.items()):
        pytest.skip("the profiles were traced with other releases")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak"]["allocated_bytes"] > 1 << 33
