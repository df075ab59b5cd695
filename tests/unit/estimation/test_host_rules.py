"""The arithmetic of host memory: what each phase has at once, and on which processes of a node."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.config.options import setup_from_options
from memest.estimation.checkpoint_rules import largest_file, resuming, saving
from memest.estimation.host_facts import HostFacts, HostPart, HostRule, Unpriced, WeightFacts
from memest.estimation.host_rules import loading, training

SHARDED = {"fsdp": "full_shard", "num_gpus": 4, "bf16": True}


def weight(name, kept, *, loaded=None, in_file=None, trains=True, merged=False):
    loaded = kept if loaded is None else loaded
    return WeightFacts(
        name=name,
        elements=kept // 4,
        file_bytes=loaded if in_file is None else in_file,
        loaded_bytes=loaded,
        kept_bytes=kept,
        trains=trains,
        is_merged=merged,
    )


FACTS = HostFacts(
    weights=(weight("head.weight", 400), weight("body.weight", 100), weight("body.bias", 20)),
    weight_bytes=520,
    state_bytes=1040,
    largest_state=400,
    whole_states=1040,
    gradient_bytes=520,
)
ONE_OF_FOUR = replace(
    FACTS, weight_bytes=130, state_bytes=260, largest_state=100, gradient_bytes=130, shards=4
)


def moments(rule):
    assert isinstance(rule, HostRule)
    return [
        [(part.nbytes, part.every) for part in moment if part.nbytes] for moment in rule.moments
    ]


# -- loading -----------------------------------------------------------------------------------


def test_what_keeps_its_dtype_is_a_view_of_the_file():
    rule = loading(setup_from_options(), FACTS)

    assert moments(rule) == [[]]
    assert rule.mapped == 520


def test_what_gets_another_dtype_is_copied_by_every_process():
    facts = replace(FACTS, weights=(weight("a", 400, in_file=200), weight("b", 100)))

    assert moments(loading(setup_from_options(dtype="float32"), facts)) == [[(400, True)]]


def test_experts_that_the_loader_joins_are_copies():
    facts = replace(FACTS, weights=(weight("mlp.experts.down_proj", 300, merged=True),))

    assert moments(loading(setup_from_options(), facts)) == [[(300, True)]]


def test_under_stage_3_the_first_process_joins_experts_one_at_a_time():
    facts = replace(FACTS, weights=tuple(weight(f"{n}", n, merged=True) for n in (300, 200)))
    setup = setup_from_options(zero=3, num_gpus=4, bf16=True)

    assert moments(loading(setup, facts)) == [[(300, False)]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SHARDED, [[(400, True)]]),
        ({**SHARDED, "fsdp_cpu_ram_efficient_loading": True}, [[(400, False)]]),
        ({**SHARDED, "loop": "plain"}, [[]]),
        ({**SHARDED, "fsdp_version": 1}, [[]]),
        ({"zero": 2, "num_gpus": 4, "bf16": True}, [[(400, True)]]),
        ({"zero": 3, "num_gpus": 4, "bf16": True}, [[]]),
        ({"num_gpus": 4, "bf16": True}, [[]]),
    ],
    ids=str,
)
def test_what_is_cast_before_it_is_cut_is_cast_on_the_cpu(options, expected):
    facts = replace(ONE_OF_FOUR, weights=(weight("a", 400, loaded=200),))

    assert moments(loading(setup_from_options(**options), facts)) == expected


def test_adapters_are_made_beside_the_file_and_shards_stay_where_they_are_offloaded():
    facts = replace(ONE_OF_FOUR, weights=(weight("lora_A.weight", 40, in_file=0),))
    rule = loading(setup_from_options(**SHARDED, fsdp_offload=True), facts)

    assert moments(rule) == [[(40, True), (10, True)]]


def test_a_quantised_base_passes_the_host_a_tensor_at_a_time():
    assert moments(loading(setup_from_options(qlora=True), FACTS)) == [[]]


# -- training ----------------------------------------------------------------------------------


def test_training_keeps_what_is_offloaded_what_waits_and_what_may_be_paged():
    facts = replace(FACTS, offloaded=1000, batches=30, managed=7)

    assert moments(training(facts)) == [[(1000, True), (30, True), (7, True)]]
    assert moments(training(replace(FACTS, batches=None))) == [[]]


# -- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[(520, False)], [(400, False)]]),
        ({"num_gpus": 4}, [[(520, False)], [(400, False)]]),
        ({"loop": "plain"}, [[(520, False)], [(400, False)]]),
        ({"loop": "accelerate"}, [[(520, False)], [(400, False)]]),
    ],
    ids=str,
)
def test_the_first_process_writes_whole_weights_and_then_states(options, expected):
    assert moments(saving(setup_from_options(**options), FACTS)) == expected


def test_adapters_are_saved_alone_but_by_accelerate():
    frozen = weight("base.weight", 400, trains=False)
    facts = replace(FACTS, weights=(frozen, weight("lora_A.weight", 40)), weight_bytes=440)

    assert moments(saving(setup_from_options(lora_r=8), facts))[0] == [(40, False)]
    whole = saving(setup_from_options(lora_r=8, loop="accelerate"), facts)
    assert moments(whole)[0] == [(440, False)]


def test_what_training_keeps_stays_while_a_checkpoint_is_written():
    facts = replace(FACTS, batches=30)

    assert moments(saving(setup_from_options(), facts))[0] == [(30, True), (520, False)]


def test_a_full_checkpoint_of_fsdp_is_whole_on_the_first_process():
    rule = saving(setup_from_options(**SHARDED), ONE_OF_FOUR)

    assert moments(rule) == [[(520, False)], [(1040, False)]]
    assert rule.on_gpu == 400  # the largest tensor, whole


def test_of_a_sharded_checkpoint_every_process_has_its_shards():
    expected = [[(130, True)], [(260, True)]]
    rule = saving(setup_from_options(**SHARDED, loop="accelerate"), ONE_OF_FOUR)
    named = {**SHARDED, "fsdp_state_dict_type": "sharded_state_dict"}

    assert moments(rule) == expected
    assert rule.on_gpu == 0
    assert moments(saving(setup_from_options(**named), ONE_OF_FOUR)) == expected
    assert moments(saving(setup_from_options(**named, loop="plain"), ONE_OF_FOUR)) == expected


@pytest.mark.parametrize(
    ("options", "expected", "on_gpu"),
    [
        ({"zero": 2}, [[(520, True)], [(520, False)], [(100, True)]], 0),
        ({"zero": 2, "loop": "plain"}, [[(520, False)], [(100, True)]], 0),
        ({"zero": 3}, [[(100, True)]], 0),
        (
            {
                "with_": "save",
                "deepspeed": {
                    "zero_optimization": {
                        "stage": 3,
                        "stage3_gather_16bit_weights_on_model_save": True,
                    }
                },
            },
            [[(520, False)], [(100, True)]],
            800,
        ),
    ],
    ids=str,
)
def test_deepspeed_clones_gathers_or_writes_parts(options, expected, on_gpu):
    rule = saving(setup_from_options(num_gpus=4, bf16=True, **options), ONE_OF_FOUR)

    assert moments(rule) == expected
    assert rule.on_gpu == on_gpu


def test_frozen_weights_are_copied_by_every_process_of_deepspeed():
    facts = replace(
        ONE_OF_FOUR, weights=(weight("a", 400, trains=False), weight("b", 40)), largest_state=20
    )
    options = {"num_gpus": 4, "bf16": True, "loop": "accelerate"}

    assert moments(saving(setup_from_options(zero=2, **options), facts))[-1] == [(400, True)]
    assert moments(saving(setup_from_options(zero=3, **options), facts))[-1] == [(100, True)]
    assert moments(saving(setup_from_options(zero=1, **options), facts))[-1] == [(20, True)]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_files_are_filled_in_order_up_to_their_limit(sizes, limit):
    largest = largest_file(sizes, limit)

    assert max(sizes, default=0) <= largest <= max(limit, *sizes, 0)


def test_files_are_those_of_the_library():
    hub = pytest.importorskip("huggingface_hub")
    torch = pytest.importorskip("torch")
    sizes = [30, 40, 20, 90, 10, 60, 50]
    tensors = {f"{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    split = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=80)
    files = split.filename_to_tensors.values()

    assert largest_file(sizes, 80) == max(sum(tensors[n].nbytes for n in file) for file in files)


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected", "on_gpu"),
    [
        ({}, [[(1040, True)]], 0),
        ({"optim": "adamw_8bit"}, [[(2080, True)]], 0),
        ({"num_gpus": 4}, [[(400, True)]], 0),
        ({"num_gpus": 4, "optim": "adamw_8bit"}, [[(400, True)]], 1040),
        ({"num_gpus": 4, "loop": "plain"}, [[(1040, True)]], 0),
        ({"num_gpus": 4, "loop": "accelerate"}, [[(400, True)]], 0),
    ],
    ids=str,
)
def test_states_are_read_to_the_host_by_one_process_and_to_the_gpu_by_several(
    options, expected, on_gpu
):
    rule = resuming(setup_from_options(**options), FACTS)

    assert moments(rule) == expected
    assert rule.on_gpu == on_gpu
    assert rule.mapped == 520


def test_accelerate_has_the_weights_of_the_file_on_the_gpu_before_there_are_states():
    facts = replace(FACTS, state_bytes=20)
    setup = setup_from_options(num_gpus=4, loop="accelerate")

    assert resuming(setup, facts).on_gpu == 500


def test_of_a_full_checkpoint_of_fsdp_the_first_process_reads_everything():
    rule = resuming(setup_from_options(**SHARDED), ONE_OF_FOUR)

    assert moments(rule) == [[(520, False)], [(1040, False)]]
    assert rule.on_gpu == 400
    sharded = resuming(setup_from_options(**SHARDED, loop="accelerate"), ONE_OF_FOUR)
    assert moments(sharded) == [[(130, True)], [(260, True)]]
    assert sharded.on_gpu == 130  # gradients of zero, for the states to be made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"zero": 2}, [[(520, True)], [(260, True)]]),
        ({"zero": 3}, [[(260, True)]]),
    ],
    ids=str,
)
def test_every_process_of_deepspeed_reads_its_files(options, expected):
    setup = setup_from_options(num_gpus=4, bf16=True, **options)

    assert moments(resuming(setup, ONE_OF_FOUR)) == expected


def test_states_that_are_offloaded_are_there_twice_while_they_are_read():
    facts = replace(ONE_OF_FOUR, state_bytes=0, offloaded=900, host_states=780)
    setup = setup_from_options(num_gpus=4, bf16=True, zero=3, offload_optimizer=True)

    assert moments(resuming(setup, facts)) == [[(900, True), (780, True)]]


# -- what is not priced ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 2, "num_gpus": 2}, "shared by --tp"),
        ({**SHARDED, "fsdp_version": 1}, "FSDP1"),
        ({**SHARDED, "loop": "plain"}, "--fsdp-state-dict-type"),
        ({**SHARDED, "qlora": True, "bnb_4bit_quant_storage": "bfloat16"}, "quantised base"),
        ({"zero": 3, "num_gpus": 2, "bf16": True, "qlora": True}, "quantised base"),
    ],
    ids=str,
)
def test_what_no_source_tells_is_not_priced(options, words):
    setup = setup_from_options(**options)

    for rule in (saving(setup, FACTS), resuming(setup, FACTS)):
        assert isinstance(rule, Unpriced)
        assert words in rule.why


def test_earlier_releases_load_in_other_ways():
    setup = setup_from_options(software="transformers=4.40")

    assert isinstance(loading(setup, FACTS), Unpriced)


def test_a_part_is_of_every_process_unless_it_says_otherwise():
    assert HostPart("weights", 1).every
