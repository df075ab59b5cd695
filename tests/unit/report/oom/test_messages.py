"""Messages of every generation of torch, read from raw logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.report.oom_account import account_of, cards_of_size
from memest.report.oom_elsewhere import no_message
from memest.report.oom_message import MessageSize, read_oom_messages
from memest.units import GIB, KIB, MIB

TORCH_1_3 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.19 GiB (GPU 0; 10.76 GiB total "
    "capacity; 7.49 GiB already allocated; 1.14 GiB free; 779.64 MiB cached)"
)
TORCH_1_12 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 15.78 GiB total "
    "capacity; 14.20 GiB already allocated; 13.75 MiB free; 14.56 GiB reserved in total by "
    "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a "
    "total capacty of 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in "
    "use. Of the allocated memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting"
)
TORCH_2_6 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.22 GiB. GPU 0 has a total "
    "capacity of 15.69 GiB of which 3.71 GiB is free. Including non-PyTorch memory, this process "
    "has 11.14 GiB memory in use. Of the allocated memory 10.14 GiB is allocated by PyTorch, and "
    "771.43 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large"
)
POOLS = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 3 has a total "
    "capacity of 255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory "
    "1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP "
    "Graphs), and 54.99 MiB is reserved by PyTorch but unallocated."
)
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total "
    "capacity of 11.59 GiB of which 9.01 GiB is free. Of the allocated memory 0 bytes is allocated "
    "by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. Please use empty_cache"
)


def holds(figure, value):
    return figure is not None and figure.low_bytes <= value <= figure.high_bytes


@pytest.mark.parametrize(
    ("text", "tried", "total", "free", "allocated", "reserved"),
    [
        (TORCH_1_3, 1.19 * GIB, 10.76 * GIB, 1.14 * GIB, 7.49 * GIB, 7.49 * GIB + 779.64 * MIB),
        (TORCH_1_12, 20 * MIB, 15.78 * GIB, 13.75 * MIB, 14.20 * GIB, 14.56 * GIB),
        (TORCH_2_1, 496 * MIB, 14.75 * GIB, 235.06 * MIB, 14.06 * GIB, 14.06 * GIB + 330.42 * MIB),
        (TORCH_2_6, 4.22 * GIB, 15.69 * GIB, 3.71 * GIB, 10.14 * GIB, 10.14 * GIB + 771.43 * MIB),
        (POOLS, 2 * MIB, 255.98 * GIB, 244.65 * GIB, 1017.01 * MIB, 1072 * MIB),
        (XPU, 32 * GIB, 11.59 * GIB, 9.01 * GIB, 0, 0),
    ],
)
def test_every_generation_is_read(text, tried, total, free, allocated, reserved):
    (message,) = read_oom_messages(f"Traceback (most recent call last):\n  File ...\n{text}\n")

    assert holds(message.tried, tried)
    assert holds(message.total, total)
    assert holds(message.free, free)
    assert holds(message.allocated, allocated)
    assert holds(message.reserved, reserved)


def test_what_only_some_say():
    (limited,) = read_oom_messages(POOLS)
    assert (limited.backend, limited.device) == ("HIP", 3)
    assert holds(limited.allowed, 1.05 * GIB)
    assert holds(limited.private_pools, 17 * MIB)
    (listed,) = read_oom_messages(TORCH_2_1)
    ((pid, size),) = listed.processes
    assert pid == 20398
    assert holds(size, 14.52 * GIB)
    (own,) = read_oom_messages(TORCH_2_6)
    assert holds(own.this_process, 11.14 * GIB)
    assert own.allowed is None


def test_ranks_of_one_log_are_told_apart_and_repetitions_counted():
    lines = [f"[rank{rank}]: {TORCH_2_6}" for rank in (3, 2, 3)]
    other = TORCH_2_6.replace("4.22 GiB", "2.00 MiB")
    messages = read_oom_messages("\n".join([*lines, f"[rank2]:   warning\n[rank2]: {other}"]))

    assert [(m.rank, m.times) for m in messages] == [(3, 2), (2, 1), (2, 1)]
    assert holds(messages[2].tried, 2 * MIB)


@pytest.mark.parametrize(
    ("before", "rank"),
    [
        ("[rank3]: ", 3), ("[default0]:[rank8]: ", 8), ("[default2]:", 2), ("[rank: 1] ", 1),
        ("(VllmWorker rank=1 pid=2445156) ERROR 05-10 16:00:15 [executor.py:470] ", 1),
        ("[1,5]<stderr>:", 5), ("[rank0]: step 3 [rank1]: ", 1), ("local_rank=3 ", None),
        ("[rank0]: Traceback\n", None),
    ],
)  # fmt: skip
def test_the_rank_is_the_one_named_right_before(before, rank):
    assert read_oom_messages(before + TORCH_2_6)[0].rank == rank


def test_a_message_wrapped_over_lines_is_read():
    wrapped = TORCH_2_6.replace(". ", ".\n[rank0]: ")
    (message,) = read_oom_messages(f"[rank0]: {wrapped}")

    assert holds(message.this_process, 11.14 * GIB)
    assert holds(message.unallocated, 771.43 * MIB)


@pytest.mark.parametrize("text", ["", "CUDA error: device-side assert", "out of memory", "Killed"])
def test_other_texts_hold_none(text):
    assert read_oom_messages(text) == ()


@given(st.integers(1, 200 * GIB))
def test_a_figure_holds_the_number_that_was_rounded(size):
    unit, factor = next(
        (u, f) for u, f in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("bytes", 1)) if size >= f
    )
    text = f"{size} bytes" if factor == 1 else f"{size / factor:.2f} {unit}"
    (message,) = read_oom_messages(f"CUDA out of memory. Tried to allocate {text}. GPU 0 has")

    assert holds(message.tried, size)


def test_fragmentation_is_blamed_only_where_it_can_be():
    enough = TORCH_2_6.replace("4.22 GiB", "500.00 MiB").replace("3.71 GiB", "371.00 MiB")
    both = TORCH_2_6.replace("4.22 GiB", "4.40 GiB")
    neither = TORCH_2_6.replace("4.22 GiB", "8.00 GiB")
    accounts = [account_of(read_oom_messages(text)[0]) for text in (enough, both, neither)]

    assert [account.fragmented for account in accounts] == [True, False, False]
    assert "expandable_segments:True is the first thing" in " ".join(accounts[0].sentences)
    assert "worth a try" in " ".join(accounts[1].sentences)
    assert "fragmentation is not to blame" in " ".join(accounts[2].sentences)


def test_other_processes_are_what_is_neither_free_nor_of_this_one():
    account = account_of(read_oom_messages(TORCH_2_6)[0])
    assert holds(account.others, (15.69 - 3.71 - 11.14) * GIB)
    assert "held by others" in " ".join(account.sentences)
    # without a figure for the process: only what is beyond any context
    crowded = TORCH_1_12.replace("14.20 GiB", "649.97 MiB").replace("14.56 GiB", "1.01 GiB")
    account = account_of(read_oom_messages(crowded)[0])
    assert account.others is not None
    assert 11 * GIB < account.others.low_bytes < 15 * GIB
    assert account_of(read_oom_messages(TORCH_1_12)[0]).others is None


@pytest.mark.parametrize(
    ("gib", "backend", "slug"), [(14.56, "CUDA", "t4"), (79.1, "CUDA", "h100"), (3.3, "CUDA", None)]
)
def test_the_card_is_known_by_its_size(gib, backend, slug):
    size = int(gib * GIB)
    specs = cards_of_size(MessageSize(low_bytes=size - 5 * MIB, high_bytes=size + 5 * MIB), backend)
    names = [alias for spec in specs for alias in spec.aliases]

    assert any(name.startswith(slug) for name in names) if slug else not names


@pytest.mark.parametrize(("gib", "board"), [("8.00", 8), ("23.99", 24), ("7.93", None)])
def test_a_whole_board_is_what_windows_counts(gib, board):
    account = account_of(read_oom_messages(TORCH_1_12.replace("15.78 GiB", f"{gib} GiB"))[0])

    assert any("which Windows counts" in words for words in account.sentences) is bool(board)
    assert account.cards
    if board:
        assert {spec.memory_marketing_gb for spec in account.cards} == {board}
        assert account.cards[0].has_bf16


@pytest.mark.parametrize(
    "figure", ["15.78.00 GiB", ".. GiB", "9" * 400 + " GiB", ". MiB", "1.2.3.4 GiB", "GiB"]
)
def test_a_garbled_figure_is_no_figure(figure):
    text = (
        f"CUDA out of memory. Tried to allocate {figure} (GPU 0; {figure} total capacity; "
        f"14.20 GiB already allocated; {figure} free; 14.56 GiB reserved in total by PyTorch)"
    )
    for message in read_oom_messages(text):
        assert message.total is None
        assert message.free is None


def sentences_of(text, **known):
    return " ".join(account_of(read_oom_messages(text)[0], **known).sentences)


def test_a_message_that_was_cut_off_asks_for_the_rest():
    assert "goes on in the log" in sentences_of("CUDA out of memory. Tried to allocate 20.00 MiB")
    assert "goes on in the log" not in sentences_of(TORCH_2_6)


def test_a_driver_that_had_enough_is_not_explained_by_fragmentation():
    text = sentences_of(TORCH_2_6.replace("4.22 GiB", "500.00 MiB"))
    assert "it was the driver that refused" in text
    assert "expandable_segments" not in text
    # the last pages of a full card are no such case
    last = TORCH_1_3.replace("1.19 GiB", "1.12 MiB").replace("1.14 GiB", "3.56 MiB")
    assert "fragmentation" in sentences_of(last)


def test_expandable_segments_are_advised_where_torch_and_the_run_can_take_them():
    holes = TORCH_1_12.replace("14.20 GiB", "10.20 GiB")
    assert "Torch 2.1 or newer, with PYTORCH_CUDA_ALLOC_CONF" in sentences_of(holes)
    full = TORCH_2_6.replace("3.71 GiB", "71.00 MiB").replace("4.22 GiB", "500.00 MiB")
    assert "Torch 2.1" not in sentences_of(full)
    assert "look whether the run had them" in sentences_of(full, expandable=True)
    assert "PYTORCH" not in sentences_of(full.replace("CUDA out", "XPU out"))
    for elsewhere in (full.replace("CUDA out", "HIP out"), full.replace("15.69 GiB", "15.99 GiB")):
        assert "where torch has it" in sentences_of(elsewhere)


@pytest.mark.parametrize("said", ["0 bytes", "17179869184.00 GiB"])
@pytest.mark.parametrize("whose", ["Including non-PyTorch memory, this process", "Process 7"])
def test_a_figure_that_the_driver_has_not_is_none(said, whose):
    unknown = TORCH_2_6.replace("11.14 GiB", said)
    account = account_of(
        read_oom_messages(unknown.replace("Including non-PyTorch memory, this process", whose))[0]
    )
    assert account.message.this_process is None
    assert [share.name for share in account.shares][2] == "context, kernels, other processes"
    assert account.others is None


def test_more_than_a_context_outside_the_allocator_is_told():
    engine = TORCH_2_1.replace("14.06 GiB", "4.06 GiB")
    assert "lay outside PyTorch's allocator" in sentences_of(engine)
    assert "lay outside" not in sentences_of(TORCH_2_1)


def test_more_than_the_card_has_is_of_the_host():
    lent = TORCH_1_12.replace("14.56 GiB", "19.15 GiB")
    assert "lent it memory of the host" in sentences_of(lent)


@pytest.mark.parametrize("width", range(60, 100))
def test_a_message_that_a_terminal_broke_anywhere_is_read_whole(width):
    broken = "\n".join(
        TORCH_2_1[at : at + width]
        for at in range(TORCH_2_1.index("CUDA out"), len(TORCH_2_1), width)
    )
    (message,) = read_oom_messages(broken)

    assert message == read_oom_messages(TORCH_2_1)[0]


@pytest.mark.parametrize("escape", ["\x1b", r"\u001b"])
def test_colours_are_no_part_of_a_message(escape):
    red, plain = f"{escape}[1;36m", f"{escape}[0m"
    coloured = TORCH_1_12.replace("20.00", f"{red}20.00{plain}").replace("(GPU 1", f"({red}GPU 1")

    assert read_oom_messages(coloured) == read_oom_messages(TORCH_1_12)


def test_what_a_log_goes_on_with_is_no_figure_of_the_message():
    # torch 2.2 to 2.4 wrote the index as a character
    unnumbered = TORCH_2_6.replace("GPU 0 has", "GPU \0 has").partition("Of the allocated")[0]
    (message,) = read_oom_messages(f"{unnumbered}\nGPU 7 has 3.00 GiB allowed, 2.00 GiB cached")

    assert message.device is None
    assert message.allowed is None
    assert message.unallocated is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RuntimeError: CUDA error: out of memory", "the card was full"),
        ("NCCL WARN Cuda failure 'out of memory'", "the card was full"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "was full"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "the card was full"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch", "--host-memory"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "it was the"),
        ("DataLoader worker (pid 12847) is killed by signal: Killed.", "most often"),
        ("MPS backend out of memory (MPS allocated: 7.23 GB, max allowed: 9.07 GB)", "Apple"),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "a size that cannot be"),
        ("OutOfMemoryError: Allocation on device 0 would exceed allowed memory.", "MallocAsync"),
    ],
)
def test_memory_that_ran_out_elsewhere_is_told_apart(line, words):
    assert read_oom_messages(line) == ()
    sentence = no_message(f"epoch 3\n{line}\nand more")
    assert line[:20] in sentence
    assert words in sentence


def test_a_text_of_something_else_is_told_what_is_looked_for():
    assert "there is no out-of-memory message of PyTorch" in no_message("epoch 3, loss 1.2")


def test_a_difference_that_may_be_nothing_is_told_as_a_bound():
    # 23.54 and 23.53 GiB are each right to a hundredth: the difference is 0 to 20 MiB
    (message,) = read_oom_messages(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
        "of which 0.10 GiB is free. Including non-PyTorch memory, this process has 23.54 GiB "
        "memory in use. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 1.00 GiB is "
        "reserved by PyTorch but unallocated."
    )
    (others,) = [s.size for s in account_of(message).shares if s.name == "other processes"]
    assert others.low_bytes == 0
    assert others.text.startswith("at most ")
