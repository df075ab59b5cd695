"""A small language for allocator scenarios, and the conformance vectors written in it.

Steps are separated by semicolons:

    a1 30M@7      allocate 30 MiB on stream 7 as number 1 (K, M and B are units, + and - sums)
    oom a1 30M    the same must run out of memory
    f1            free number 1
    rec1 @5       record_stream: stream 5 uses number 1
    empty, reset  empty_cache, reset_peak_memory_stats
    expandable on / off
    pool g, endpool g, droppool g     private pool
    at 3 1        number 3 has the address that number 1 had
    name=value    a check: res, al, active, req, oversize, ... (see NAMES) or free=[18M,2M]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import pytest

from memest.replay import AllocatorConf, CachingAllocator, EventPolicy, OutOfMemory

MIB = 1 << 20
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": MIB}
NAMES = {
    "res": "reserved_bytes.all.current",
    "res_peak": "reserved_bytes.all.peak",
    "al": "allocated_bytes.all.current",
    "al_peak": "allocated_bytes.all.peak",
    "active": "active_bytes.all.current",
    "req": "requested_bytes.all.current",
    "segments": "segment.all.current",
    "small_segments": "segment.small_pool.current",
    "split": "inactive_split.all.current",
    "split_bytes": "inactive_split_bytes.all.current",
    "oversize": "oversize_allocations.current",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
    "driver_frees": "num_device_free",
}
E = {"expandable_segments": True}


@dataclass
class Vector:
    number: str
    steps: str
    conf: dict = field(default_factory=dict)
    limits: dict = field(default_factory=dict)
    events: EventPolicy = EventPolicy.NEXT_MALLOC


def size_of(text: str) -> int:
    total = 0
    for sign, digits, unit in re.findall(r"([+-]?)([\d.]+)([BKM]?)", text):
        total += (-1 if sign == "-" else 1) * int(float(digits) * UNITS[unit])
    return total


class Script:
    def __init__(self, vector: Vector) -> None:
        self.allocator = CachingAllocator(
            AllocatorConf(**vector.conf), **vector.limits, events=vector.events
        )
        self.blocks: dict[str, object] = {}
        self.addresses: dict[str, int] = {}

    def run(self, steps: str) -> None:
        for step in filter(None, (part.strip() for part in steps.split(";"))):
            self.step(step)

    def step(self, step: str) -> None:
        allocator = self.allocator
        word, *rest = step.split()
        if "=" in step:
            name, expected = step.split("=")
            self.check(step, name, expected)
        elif word == "oom":
            with pytest.raises(OutOfMemory):
                self.step(" ".join(rest))
        elif re.fullmatch(r"a\w+", word) and word != "at":
            size, _, stream = rest[0].partition("@")
            block = allocator.malloc(size_of(size), int(stream or 0))
            self.blocks[word[1:]] = block
            self.addresses[word[1:]] = block.address if block else 0
        elif re.fullmatch(r"f\w+", word):
            allocator.free(self.blocks.pop(word[1:]))
        elif word.startswith("rec"):
            allocator.record_stream(self.blocks[word[3:]], int(rest[0][1:]))
        elif word == "empty":
            allocator.empty_cache()
        elif word == "reset":
            allocator.stats.reset_peaks()
        elif word == "expandable":
            allocator.set_conf(replace(allocator.conf, expandable_segments=rest == ["on"]))
        elif word == "pool":
            allocator.begin_pool(rest[0])
        elif word == "endpool":
            allocator.end_pool(rest[0])
        elif word == "droppool":
            allocator.release_pool(rest[0])
        elif word == "at":
            assert self.addresses[rest[0]] == self.addresses[rest[1]], step
        else:
            raise AssertionError(f"no such step: {step}")

    def check(self, step: str, name: str, expected: str) -> None:
        if name == "free":
            found = sorted(b.size for b in self.allocator.blocks() if b.is_available)
            wanted = sorted(size_of(part) for part in expected.strip("[]").split(",") if part)
            assert found == wanted, step
        elif name == "null":
            assert self.blocks[expected] is None, step
        elif name == "layout":
            found = [
                f"{block.size}{'A' if block.allocated else 'F'}"
                for block in self.allocator.blocks()
            ]
            wanted = [f"{size_of(part[:-1])}{part[-1]}" for part in expected[1:-1].split(",")]
            assert found == wanted, step
        else:
            assert self.allocator.stats.as_dict()[NAMES[name]] == size_of(expected), step


def device(text: str) -> dict:
    return {"capacity_bytes": size_of(text)}


def limit(text: str) -> dict:
    return {"limit_bytes": size_of(text)}


SPLIT = {"max_split_size": 40 * MIB}
QUARTERS = {"roundup_power2_divisions": (4,) * 16}
LIST = {"roundup_power2_divisions": (1,) * 9 + (2, 4) + (8,) * 5}
AT_SYNC = EventPolicy.AT_SYNC

VECTORS = [
    Vector("1", "a1 1B; res=2M; al=512; req=1; split_bytes=2M-512; split=1"),
    Vector("2", "a1 512; a2 513; segments=1; layout=[512A,1024A,2M-1536F]"),
    Vector("3", "a1 0; null=1; res=0; al=0; segments=0"),
    Vector("4", "a1 1M; a2 1M; res=2M; al=2M; small_segments=1; segments=1; free=[]"),
    Vector("5", "a1 1M+1; res=20M; al=1M+512; free=[19M-512]"),
    Vector(
        "6",
        "".join(f"a{number} 1945K; " for number in range(10))
        + "res=20M; al=19450K; free=[1030K]; ax 1945K; res=40M",
    ),
    Vector("7", "a1 19M; res=20M; al=20M; req=19M"),
    Vector("8a", "a1 10M; res=10M; al=10M"),
    Vector("8b", "a1 10M-512; res=20M; al=10M-512"),
    Vector("8c", "a1 10M+1; res=12M; al=10M+512"),
    Vector("8d", "a1 11M; res=12M; al=12M"),
    Vector("9", "a1 11M-100; al=12M; active=12M; req=11M-100"),
    Vector("10", "a1 40M; a2 30M; a3 60M; f1; f2; f3; a4 29M; at 4 2; al=30M; res=130M"),
    Vector("11", "a1 40M; a2 40M; f2; f1; a3 40M; at 3 2"),  # the lowest, not the last freed
    Vector(
        "12", "a1 2M; a2 2M; a3 2M; f1; f3; split=2; free=[2M,16M]; f2; free=[20M]; split=0; al=0"
    ),
    Vector("13", "a1 20M; a2 20M; f1; f2; a3 40M; res=80M"),
    Vector("14", "a1 5M; f1; a2 512B; res=22M"),
    Vector("15", "a1 30M@0; f1; a2 30M@7; res=60M"),
    Vector("16", "a1 2M; a2 2M; a3 50M; f1; f3; empty; res=20M; f2; empty; res=0"),
    Vector(
        "17",
        "a1 100M; f1; a2 40M; al_peak=100M; res_peak=100M; al=40M; reset; al_peak=40M;"
        "res_peak=100M",
    ),
    Vector(
        "18",
        "a1 30M; a2 30M; f1; f2; a3 60M; res=60M; retries=1; driver_frees=2; ooms=0",
        limits=device("70M"),
    ),
    Vector("19", "a1 50M; oom a2 30M; retries=1; ooms=1", limits=device("70M")),
    Vector("20", "a1 2M; a2 18M; f2; oom a3 30M", limits=device("40M")),
    Vector("21a", "oom a1 512B; res=0", limits=limit("1.9M")),
    Vector("21b", "a1 512B; res=2M", limits=limit("2M")),
    Vector(
        "22a",
        "a1 30M@0; rec1 @5; f1; al=0; active=30M; a2 30M; res=60M; active=60M",
        events=AT_SYNC,
    ),
    Vector("22b", "a1 30M@0; rec1 @5; f1; al=0; active=30M; a2 30M; res=30M; at 2 1"),
    Vector("23", "a1 2M; a2 2M; rec1 @9; f1; f2; free=[18M]", events=AT_SYNC),
    *(
        Vector(f"24 {n}", f"a1 {n}; al={size}", conf=QUARTERS)
        for n, size in (
            ("1200M", "1280M"),
            ("84M", "96M"),
            ("64M", "64M"),
            ("1536", "1536"),
            ("2049", "2560"),
            ("3000", "3072"),
            ("1200", "1536"),
        )
    ),
    Vector("24 list", "a1 700M; al=768M", conf=LIST),
    Vector("25a", "a1 100M; f1; a2 10M; res=110M", conf=SPLIT),
    Vector("25b", "a1 100M; f1; a2 81M; res=100M; al=100M; oversize=1", conf=SPLIT),
    Vector("25c", "a1 100M; f1; a2 80M; res=180M", conf=SPLIT),
    Vector("25d", "a1 45M; res=46M; al=46M; oversize=1; f1; oversize=0", conf=SPLIT),
    Vector(
        "26",
        "a1 50M; a2 44M; a3 2M; f3; f1; f2; a4 60M; res=80M; retries=0",
        conf=SPLIT,
        limits=device("120M"),
    ),
    Vector(
        "27",
        "a1 40M; expandable on; a2 40M; f1; f2; a3 80M; ooms=0; driver_frees=1; res=80M",
        conf={"garbage_collection_threshold": 0.5},
        limits=limit("120M"),
    ),
    Vector(
        "28",
        "a1 40M; expandable on; a2 40M; expandable off; a3 40M; oom a4 40M; f1; f2; f3; a5 120M;"
        "res=120M",
        conf=SPLIT,
        limits=limit("120M"),
    ),
    Vector("30a", "a1 1B; res=2M; al=512; segments=0; split=0", conf=E),
    Vector("30b", "a1 1M; a2 1M; a3 1M; res=4M", conf=E),
    Vector("31a", "a1 1M+1; res=20M", conf=E),
    Vector("31b", "a1 30M; res=40M; a2 10M; res=40M; al=40M", conf=E),
    Vector("31c", "a1 133345280; res=146800640", conf=E),
    Vector("32", "a1 19M; res=20M; al=19M", conf=E),
    Vector("33", "a1 30M; a2 30M; res=60M; layout=[30MA,30MA]", conf=E),
    Vector("34", "a1 20M; a2 20M; f1; f2; a3 40M; res=40M", conf=E),
    Vector("35", "a1 40M; a2 20M; a3 20M; f1; f3; a4 20M; at 4 1", conf=E),
    Vector("36", "a1 30M; a2 50M; f1; empty; res=60M; free=[10M]; f2; empty; res=0", conf=E),
    Vector("37", "a1 40M; a2 40M; f1; empty; res=40M; a3 40M; res=80M; at 3 1", conf=E),
    Vector(
        "38",
        "a1 20M; a2 20M; f1; empty; res=20M; a3 40M; res=60M; layout=[20MA,40MA]",
        conf=E,
    ),
    Vector("39", "a1 10M@0; a2 10M@3; res=40M", conf=E),
    Vector(
        "40", "a1 20M; oom a2 60M; res=20M; ooms=1; a3 40M; res=60M", conf=E, limits=device("70M")
    ),
    Vector("41", "oom a1 2M", conf=E, limits=limit("19M")),
    Vector("42a", "a1 20M; f1; a2 22M; f2; a3 24M; f3; res_peak=66M"),
    Vector("42b", "a1 20M; f1; a2 22M; f2; a3 24M; f3; res_peak=40M", conf=E),
    Vector("43a", "a1 2M; res=32M", conf={"large_segment_size": 32 * MIB}),
    Vector("43b", "a1 50M; res=64M", conf={"large_segment_size": 32 * MIB, **E}),
    Vector(
        "44",
        "a1 30M; f1; pool g; a2 30M; endpool g; res=60M; f2; empty; res=30M; droppool g; empty;"
        "res=0",
    ),
]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.number)
def test_conformance_vector(vector):
    """The allocator does what was derived by hand from upstream's source."""
    Script(vector).run(vector.steps)


def test_every_vector_number_is_there():
    """Numbers 1 to 44 without 29, which was never given out: 43 vectors."""
    numbers = {int(re.match(r"\d+", vector.number).group()) for vector in VECTORS}
    assert numbers == set(range(1, 45)) - {29}
