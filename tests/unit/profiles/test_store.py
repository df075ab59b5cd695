"""The cache on disk: shared, interrupted, damaged, forged, full, refused; answers stay the same."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memest.catalog.resolve import resolve_model
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.estimation.profiler import Profiler
from memest.profiles.axes import key_of, structure_of
from memest.profiles.cache import Store, digest_of
from memest.units import MIB
from support.asking import answers_apart

MODEL = "prajjwal1/bert-tiny"
OTHER = "EleutherAI/pythia-14m"


def environment(folder, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMEST_", "HF_"))}
    return {**env, "MEMEST_CACHE": str(folder), "HF_HUB_OFFLINE": "1", **more}


def words_of(question):
    return ["estimate", *question, "--json"]


def documents(folder):
    return sorted(folder.glob("*/*.json.gz"))


def readable(folder):
    """How many documents there are; every one of them can be read."""
    store = Store(folder)
    count = 0
    for place in folder.iterdir():
        names = {path.name.removesuffix(".json.gz") for path in documents(folder)
                 if path.parent == place}  # fmt: skip
        found = {document.name: document.content for document in store.read(place.name, "")}
        assert set(found) == names
        count += len(names)
    return count


QUESTIONS = [
    (MODEL, "--batch", "4", "--seq-len", "128"),
    (MODEL, "--batch", "8", "--seq-len", "128", "--gpu", "t4"),
    (MODEL, "--batch", "4", "--seq-len", "128", "--optim", "sgd"),
    (OTHER, "--batch", "4", "--seq-len", "128"),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The answers of a fresh process with an empty cache each; the first one's by its command."""
    asked = [(tmp_path_factory.mktemp("fresh") / "cache", words_of(q)) for q in QUESTIONS]
    (folder, words), *others = asked
    first = subprocess.run(
        [sys.executable, "-m", "memest", *words], env=environment(folder), capture_output=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert (first.returncode, first.stderr) == (0, b"")
    return dict(zip(QUESTIONS, [first.stdout, *answers_apart(others)], strict=True))


@pytest.fixture(scope="module")
def filled(tmp_path_factory, expected):
    """A folder that knows all questions."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    for question in QUESTIONS:
        assert in_process(folder, question) == json.loads(expected[question])
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory, expected):
    """A folder that knows the first one: a model, its steps, its updates, and their keys."""
    folder = tmp_path_factory.mktemp("small") / "cache"
    assert in_process(folder, QUESTIONS[0]) == json.loads(expected[QUESTIONS[0]])
    assert len(documents(folder)) == 5
    return folder


def copy_of(filled, place):
    for path in documents(filled):
        target = place / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return place


# -- many processes -------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_ask_at_once_agree(tmp_path, expected):
    folder = tmp_path / "cache"
    asked = QUESTIONS * 2

    answers = answers_apart([(folder, words_of(question)) for question in asked])

    assert answers == [expected[question] for question in asked]
    assert not [p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".json.gz")]
    assert readable(folder) >= 4
    for question in QUESTIONS:
        assert in_process(folder, question) == json.loads(expected[question])


WRITER = """
import sys
from pathlib import Path

from memest.profiles.cache import Store
store = Store(Path(sys.argv[1]))
content = [{"number": i, "text": str(i) * 20} for i in range(20000)]
print("ready", flush=True)
while True:
    store.write(sys.argv[2], "steps-one", content, {"model": "m"})
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_usable_folder(tmp_path):
    digest = digest_of("one")
    for wait in (0.0, 0.05, 0.1, 0.17, 0.3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), digest],
            env=environment(tmp_path), stdout=subprocess.PIPE,
        )  # fmt: skip
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        for document in Store(tmp_path).read(digest, ""):
            assert document.content
    store = Store(tmp_path)
    store.write(digest, "steps-two", [1])
    assert [document.content for document in store.read(digest, "steps-two")] == [[1]]
    assert {e.digest for e in store.entries()} == {digest}
    store.clear()
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_is_swept_up(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.write(digest_of("one"), "steps", [1])
    left = tmp_path / digest_of("one") / ".abc.part"
    fresh = tmp_path / digest_of("one") / ".def.part"
    for path in (left, fresh):
        path.write_bytes(b"x" * 4096)
    os.utime(left, (time.time() - 90_000,) * 2)
    monkeypatch.setenv("MEMEST_CACHE_LIMIT", "8KiB")

    store.write(digest_of("two"), "steps", [1])

    assert not left.exists()
    assert fresh.exists()


# -- damage ---------------------------------------------------------------------------------------


def flipped(raw):
    raw = bytearray(raw)
    raw[len(raw) // 2] ^= 0x10
    return bytes(raw)


def forged(raw):
    """Content that was changed, under the old head."""
    head, _, body = gzip.decompress(raw).partition(b"\n")
    return gzip.compress(head + b"\n" + body.replace(b"1", b"2"))


def of_another(path, others, *, same_key):
    """A whole document, in the place of another one."""
    return next(
        (raw for name, raw in others.items()
         if (name.parent == path.parent) is same_key and name != path), b"",
    )  # fmt: skip


DAMAGE = {
    "cut": lambda path, others: others[path][: len(others[path]) // 2],
    "flipped": lambda path, others: flipped(others[path]),
    "of_another_key": lambda path, others: of_another(path, others, same_key=False),
    "of_another_name": lambda path, others: of_another(path, others, same_key=True),
    "foreign": lambda *_: gzip.compress(json.dumps({"kind": "something else"}).encode()),
    "foreign_list": lambda *_: gzip.compress(b"[]\n[]"),
    "pickled": lambda *_: pickle.dumps({"axes": []}),
    "emptied": lambda *_: b"",
    "nested": lambda *_: gzip.compress(b"[" * 100_000),
    "forged": lambda path, others: forged(others[path]),
}


@pytest.mark.slow("cut", "flipped", "of_another_key")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_made_anew_and_never_believed(damage, tmp_path, small, expected):
    folder = copy_of(small, tmp_path / "cache")
    before = {path: path.read_bytes() for path in documents(folder)}
    for path in before:
        path.write_bytes(DAMAGE[damage](path, before))

    assert in_process(folder, QUESTIONS[0]) == json.loads(expected[QUESTIONS[0]])

    after = {path: path.read_bytes() for path in documents(folder)}
    # the key is for people; it goes when somebody looks at it
    kept = [path for path in before if path.name != "key.json.gz"]
    assert [after.get(path) == before[path] for path in kept] == [True] * len(kept)


def in_process(folder, question):
    from memest.config.options import setup_from_options
    from memest.estimation.estimate import answer as answered

    model, *rest = question
    options = {k.removeprefix("--").replace("-", "_"): v for k, v in
               zip(rest[::2], rest[1::2], strict=True)}  # fmt: skip
    gpu = options.pop("gpu", None)
    options = {k: int(v) if v.isdecimal() else v for k, v in options.items()}
    tracer = Profiler(source=resolve_model(model), stores=(Store(folder),))
    estimate = answered(tracer, setup_from_options(**options), gpu=gpu)
    return json.loads(json.dumps(estimate.to_dict()))


# -- folders that are none ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, small, expected):
    """What it knows, an optimizer that it does not know, and a model that it does not know."""
    folder = copy_of(small, tmp_path / "cache")
    before = {path: path.read_bytes() for path in documents(folder)}
    for place in (*folder.iterdir(), folder):
        place.chmod(0o555)
    try:
        for question in QUESTIONS:
            assert in_process(folder, question) == json.loads(expected[question])
    finally:
        for place in (folder, *folder.iterdir()):
            place.chmod(0o755)
    if os.geteuid() != 0:
        assert {path: path.read_bytes() for path in documents(folder)} == before


@pytest.mark.parametrize("what", ["file", "link", "below a file", "key is a file"])
def test_something_else_in_place_of_the_folder_stops_nothing(what, tmp_path, expected):
    place = tmp_path / "cache"
    if what == "file":
        place.write_text("not a folder")
    elif what == "link":
        place.symlink_to(tmp_path / "nowhere" / "at all")
    elif what == "below a file":
        place.write_text("not a folder")
        place = place / "cache"
    else:
        place.mkdir()
        digests = {digest_of(i) for i in range(3)}
        for digest in digests:
            (place / digest).write_text("")

    assert in_process(place, QUESTIONS[0]) == json.loads(expected[QUESTIONS[0]])


# -- size -----------------------------------------------------------------------------------------


def used_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_folder_stays_below_its_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE_LIMIT", "1MiB")
    store = Store(tmp_path)
    noise = os.urandom(100_000).hex()

    for number in range(30):
        store.write(digest_of(number), "steps", noise, {"number": number})
        os.utime(tmp_path / digest_of(number) / "steps.json.gz", (number, number))
        os.utime(tmp_path / digest_of(number) / "key.json.gz", (number, number))
        assert used_bytes(tmp_path) <= MIB

    kept = {entry.key["number"] for entry in store.entries()}
    assert kept == set(range(30 - len(kept), 30))
    assert len(kept) >= 5


def test_listing_what_there_is_is_no_use_of_it(tmp_path):
    store = Store(tmp_path)
    store.write(digest_of("one"), "steps", [1], {"model": "m"})
    for path in documents(tmp_path):
        os.utime(path, (1000, 1000))

    store.entries()

    assert [entry.used for entry in store.entries()] == [1000]
    assert list(store.read(digest_of("one"), "steps"))
    assert store.entries()[0].used > 1000


def test_one_key_that_is_larger_than_the_limit_does_not_stay_above_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE_LIMIT", "300KiB")
    store = Store(tmp_path)
    for number in range(9):
        store.write(digest_of("one"), f"steps-{number}", os.urandom(30_000).hex())
        assert used_bytes(tmp_path) <= 300 * 1024


@pytest.mark.slow
def test_a_small_limit_costs_no_answer(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE_LIMIT", "30KiB")
    folder = tmp_path / "cache"
    for question in (QUESTIONS[0], QUESTIONS[3]):
        assert in_process(folder, question) == json.loads(expected[question])
    assert used_bytes(folder) <= 30 * 1024


# -- warm -----------------------------------------------------------------------------------------

NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
sys.argv = ["memest", "estimate", *sys.argv[1:], "--json"]
from memest.cli.main import run
try:
    run()
finally:
    assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""


@pytest.mark.slow(
    "prajjwal1/bert-tiny --batch 4 --seq-len 128",
    "prajjwal1/bert-tiny --batch 8 --seq-len 128 --gpu t4",
)
@pytest.mark.parametrize("question", QUESTIONS, ids=" ".join)
def test_what_is_known_is_answered_without_torch_byte_for_byte(question, filled, expected):
    warm = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *question], env=environment(filled),
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip

    assert b"is imported" not in warm.stderr, warm.stderr.decode()
    assert warm.stdout == expected[question]


SPREADS = (
    {},
    {"num_gpus": 2},
    {"num_gpus": 2, "ddp_find_unused_parameters": True},
    {"num_gpus": 2, "fsdp": "full_shard"},
    {"num_gpus": 2, "fsdp": "full_shard", "fsdp_version": 1},
    {"num_gpus": 2, "zero": 2},
    {"num_gpus": 2, "zero": 3},
    {"num_gpus": 2, "zero": 3, "zero_settings": {"memory_efficient_linear": False}},
    {"num_gpus": 2, "tp": 2},
    {"num_gpus": 2, "cp": 2, "fsdp": "full_shard"},
    {"num_gpus": 2, "sp": 2, "zero": 2},
)


@pytest.mark.parametrize("loop", ["plain", "trainer"])
@pytest.mark.parametrize(
    "options", [{}, {"lora_r": 8, "dtype": "bfloat16"}, {"lora_r": 8, "fused_loss": "trl-fused"}]
)
def test_what_is_traced_otherwise_has_a_key_of_its_own(options, loop):
    structures, keys = set(), set()
    for spread in SPREADS:
        try:
            setup = setup_from_options(bf16=True, loop=loop, **spread, **options)
        except ConfigError:
            continue
        structure = structure_of(setup)
        structures.add(repr(structure))
        keys.add(repr(key_of(structure)))
    assert len(keys) == len(structures) > 4
