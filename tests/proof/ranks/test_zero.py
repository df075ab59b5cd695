"""ZeRO: what DeepSpeed itself was measured to do, against predicted ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import memest
from memest.config.deepspeed import read_deepspeed, with_hidden_size
from memest.config.options import setup_from_options
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.events import Landmarks, Weight
from memest.sharding.zero3 import owned_by_module
from memest.sharding.zero_groups import groups_of
from support.ranks import predicted_rank
from support.recorded import check_recorded
from support.recorded_ranks import case_of, names_of, recorded_run

HOST = 6144
RNG = 5056
"""What a CPU keeps of its generator for each checkpoint; a GPU's is in host memory too."""
ANY_ORDER = (
    "zero_3_lora_read_checkpointing", "zero_3_dpo_lora_checkpointing", "zero_3_dpo_qlora",
    "zero_3_grpo_qlora", "zero_3_grpo_tied",
)  # fmt: skip
"""What a layer recomputed, or nobody waited for, is given back in the order of a Python set."""
BY_PHASE = ("zero_3_t5",)
"""Masked attention is put together otherwise on a CPU."""


@pytest.mark.slow(
    "zero_1_qlora", "zero_3_lora_read_checkpointing", "zero_3_dpo_half", "zero_3_dpo_qlora",
    "zero_3_dpo_lora_checkpointing", "zero_3_dpo_lora_half", "zero_3_dpo_offload",
    "zero_3_dpo_synced_offload",
    "zero_3_grpo_synced", "zero_3_kto", "zero_3_reward",
    "zero_3_grpo_half", "zero_3_grpo_lora", "zero_3_grpo_lora_written", "zero_3_grpo_offload",
    "zero_3_grpo_qlora", "zero_3_grpo_tied", "zero_3_rloo", "zero_3_rloo_alone",
)  # fmt: skip
@pytest.mark.parametrize("name", names_of("zero_*", "*_evaluated", "zero_3_qlora*"))
def test_a_rank_allocates_what_deepspeed_does(name):
    """Every phase; where nothing is offloaded, every allocation and free of the steps, in order."""
    case = case_of(name)
    if case["setup"].get("use_liger_kernel"):
        pytest.importorskip("liger_kernel.utils")
    host = HOST
    if case["setup"].get("checkpointing"):
        host += 3 * RNG
    if case["setup"].get("fused_loss") == "trl-chunked":
        host += 2 * RNG
    check_recorded(
        recorded_run(name), predicted_rank(case), host,
        any_order=name in ANY_ORDER, by_phase=name in BY_PHASE,
    )  # fmt: skip


class TestStage3:
    """What stage 3 adds: partitioned parameters, and what is gathered when."""

    def estimate(self, zero=(), **options):
        return tiny(zero_settings={"zero_optimization": {**SMALL_3, **dict(zero)}}, **options)

    def test_parameters_are_divided_too(self):
        two, eight = rows(self.estimate(num_gpus=2)), rows(self.estimate(num_gpus=8))
        for part in ("parameters", "optimizer states", "master weights"):
            assert two[part] == pytest.approx(4 * eight[part], rel=0.02), part

    def test_offloading_parameters_takes_them_to_the_host(self):
        on_gpu = self.estimate(num_gpus=2)
        away = self.estimate(num_gpus=2, offload_param=True, offload_optimizer=True)
        assert not {"parameters", "optimizer states", "master weights"} & set(rows(away))
        assert away.peak.allocated_bytes < on_gpu.peak.allocated_bytes

    def test_parameters_below_the_threshold_stay(self):
        def peak(threshold):
            zero = {"stage3_param_persistence_threshold": threshold, "stage3_max_reuse_distance": 0}
            return self.estimate(zero, num_gpus=64).peak.allocated_bytes

        # at the peak the embedding is gathered anyway: the rest of the 8.8 MB stays
        assert peak(10**9) - peak(0) > 750_000

    def test_auto_follows_the_hidden_size(self):
        keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold")  # fmt: skip
        found = self.estimate(dict.fromkeys(keys, "auto"), num_gpus=2)
        settings = dict(found.setup.distributed.zero_settings)
        assert [settings[key] for key in keys] == [128 * 128, int(0.9 * 128 * 128), 1280]

    def test_names_without_the_stage_mean_the_same(self):
        read = read_deepspeed({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}})
        assert read.settings == {"stage3_prefetch_bucket_size": 7}

    def test_a_shared_weight_belongs_to_every_module_that_has_it(self):
        weights = [make_weight((4, 4)), make_weight((4,))]
        names = ("emb.weight", "norm.weight")
        weights = [replace(w, name=n) for w, n in zip(weights, names, strict=True)]
        landmarks = Landmarks(shared_paths={"head.weight": "emb.weight"})
        found = owned_by_module(weights, ["", "emb", "norm", "head"], landmarks)
        assert found == {1: (0,), 2: (1,), 3: (0,)}

    def test_sub_groups_end_where_a_part_is_large_enough(self):
        weights = [make_weight((10,)) for _ in range(5)]
        setup = Setup(
            loop="plain", distributed=Distributed(num_gpus=4, zero=3, zero_settings={
                "sub_group_size": 6,
            }),
        )  # fmt: skip
        groups = groups_of(weights, setup)
        assert [group.weights for group in groups] == [(0, 1), (2, 3), (4,)]
        # each parameter is padded by itself: ceil(10 / 4)
        assert [group.partition_elements for group in groups] == [6, 6, 3]


def make_weight(shape, **options):
    given = {"trains": True, "decays": True, "has_grad": True, "dtype": "bfloat16", **options}
    return Weight("w", shape, (), **given)


def make_setup(ranks, **options):
    return Setup(distributed=Distributed(num_gpus=ranks, zero=2), **options)


def test_groups_are_padded_to_twice_the_ranks():
    weights = [make_weight((7, 3)), make_weight((5,), decays=False), make_weight((4,))]
    (group,) = groups_of(weights, make_setup(4, loop="plain"))
    assert group.partition_elements == 8
    assert group.slices(weights) == {0: {0: 8, 1: 8, 2: 5}, 1: {2: 3, 3: 2}, 2: {3: 4}}
    decay, rest = groups_of(weights, make_setup(4))
    assert decay.weights == (0, 2)
    assert rest.weights == (1,)
    assert rest.partition_elements == 2


def test_a_model_that_does_not_train_is_refused():
    with pytest.raises(ConfigError, match="Only stage 3 shards a model that does not train"):
        groups_of([make_weight((4,), trains=False)], make_setup(2))


TINY = {"batch": 2, "seq_len": 64, "gpu": "a100-80gb", "max_batch": False, "bf16": True}
SMALL_3 = {"stage": 3, "reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 10_000,
           "stage3_param_persistence_threshold": 100}  # fmt: skip
SMALL = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000}}


def tiny(**options):
    return memest.estimate("prajjwal1/bert-tiny", **{**TINY, **options})


def rows(estimate):
    return {row.category.value: row.bytes for row in estimate.breakdown}


def test_states_are_divided_and_parameters_are_not():
    two = rows(tiny(zero_settings=SMALL, num_gpus=2))
    eight = rows(tiny(zero_settings=SMALL, num_gpus=8))
    assert two["parameters"] == pytest.approx(eight["parameters"], rel=0.001)
    for part in ("optimizer states", "master weights"):
        assert two[part] == pytest.approx(4 * eight[part], rel=0.01)
    assert two["master weights"] * 2 == pytest.approx(2 * two["parameters"], rel=0.001)


def test_states_are_what_deepspeeds_own_estimator_counts_of_them():
    """``estimate_zero2_model_states_mem_needs``: 2 B a parameter, 18 B of a partition's states.

    Of the 18, 4 are gradients in float32 that live only in the update; buckets, activations,
    buffers and fragmentation are not in it.
    """
    answer = tiny(zero_settings=SMALL, num_gpus=4)
    parameters, parts = answer.model.parameters, rows(answer)
    states = sum(parts[part] for part in ("parameters", "master weights", "optimizer states"))
    # parameters 2, master weights 4 / n, Adam's moments 8 / n
    assert states == pytest.approx(2 * parameters + 12 * parameters / 4, rel=0.01)
    assert states < 2 * parameters + 18 * parameters / 4


def test_offloading_takes_states_and_master_weights_to_the_host():
    away = tiny(zero_settings=SMALL, num_gpus=2, offload_optimizer=True)
    assert not {"optimizer states", "master weights"} & set(rows(away))
    assert any("host memory of each process" in note for note in away.notes)


def test_the_default_bucket_is_a_gigabyte_for_any_model():
    """``reduce_bucket_size`` 5e8 elements: more than a small model itself."""
    usual, small = tiny(zero=2, num_gpus=2), tiny(zero_settings=SMALL, num_gpus=2)
    assert usual.peak.reserved_bytes - small.peak.reserved_bytes > 900_000_000


def test_one_gpu_may_run_deepspeed_too():
    one = tiny(zero=2, offload_optimizer=True)
    assert "one GPU" in str(one)
    assert "ZeRO-2" in str(one)


def test_overlap_doubles_the_bucket():
    zero = {"stage": 2, "reduce_bucket_size": 50_000_000}
    one = tiny(zero_settings={"zero_optimization": zero}, num_gpus=2)
    two = tiny(zero_settings={"zero_optimization": {**zero, "overlap_comm": True}}, num_gpus=2)
    assert two.peak.reserved_bytes - one.peak.reserved_bytes >= 100_000_000


class TestFile:
    """``--deepspeed FILE``."""

    def write(self, tmp_path, document):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(document))
        return str(path)

    def test_values_of_the_run_are_taken(self, tmp_path):
        path = self.write(tmp_path, {
            "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5, "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        })  # fmt: skip
        setup = setup_from_options(deepspeed=path)
        assert (setup.batch, setup.grad_accum, setup.max_grad_norm) == (3, 4, 0.5)
        assert setup.precision.value == "bf16"
        assert setup.distributed.zero == 1
        assert setup.distributed.offload_optimizer

    def test_auto_says_nothing_of_the_run_and_follows_the_model(self, tmp_path):
        path = self.write(tmp_path, {
            "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        })  # fmt: skip
        setup = setup_from_options(deepspeed=path, batch=5)
        assert setup.batch == 5
        assert setup.distributed.zero_setting("reduce_bucket_size", 0) == "auto"
        for config in ({"hidden_size": 768}, {"n_embd": 768}, {"text_config": {"d_model": 768}},
                       {"hidden_sizes": [64, 768, 128]}):  # fmt: skip
            found = with_hidden_size(setup.distributed, config)
            assert found.zero_setting("reduce_bucket_size", 0) == 768 * 768
        with pytest.raises(ConfigError, match="write a number"):
            with_hidden_size(setup.distributed, {})
        estimate = tiny(deepspeed=path, num_gpus=2)
        assert dict(estimate.setup.distributed.zero_settings)["reduce_bucket_size"] == 128 * 128

    def test_a_contradiction_is_refused(self, tmp_path):
        path = self.write(
            tmp_path, {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
        )
        with pytest.raises(ConfigError, match="--grad-accum 2 and the DeepSpeed configuration's 4"):
            setup_from_options(deepspeed=path, grad_accum=2)

    @pytest.mark.parametrize(
        ("zero", "words"),
        [
            (
                {"stage": 3, "zero_hpz_partition_size": 8},
                r"hpz.* 8 is not modelled \(ZeRO\+\+ keeps",
            ),
            ({"stage": 3, "memory_efficient_linear": "no"}, "neither true nor false"),
            ({"stage": 3, "offload_param": {"device": "nvme"}}, "Ask for cpu"),
            ({"stage": 3, "stage3_max_live_parameters": "auto"}, "is not a whole number[.]"),
            ({"stage": 2, "offload_param": {"device": "cpu"}}, "no meaning without --zero 3"),
            ({"stage": 2, "overlap_com": True}, "Did you mean 'overlap_comm'"),
            ({"stage": 2, "contiguous_gradients": False}, "contiguous_gradients False"),
            ({"stage": 2, "reduce_bucket_size": 0}, "out of range"),
            ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, "Legal: none, cpu"),
            ({"stage": 2, "offload_optimizer": "cpu"}, "is no mapping"),
            ({"stage": 2, "overlap_comm": "auto"}, "neither true nor false"),
        ],
    )
    def test_what_is_not_modelled_is_refused(self, zero, words):
        with pytest.raises(ConfigError, match=words):
            setup_from_options(zero_settings={"zero_optimization": zero})

    @pytest.mark.parametrize(
        ("document", "words"),
        [
            (
                {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
                "bf16.bf16_master_weights_and_grads is not modelled",
            ),
            (
                {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
                "bf16.bf16_optimizer_states is not modelled",
            ),
            (
                {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
                "fp16.fp16_master_weights_and_grads is not modelled",
            ),
            ({"torch_autocast": {"enabled": True}}, "autocast inside the engine"),
        ],
    )
    def test_other_precisions_of_what_is_updated_are_refused(self, document, words):
        zero = {"zero_optimization": {"stage": 3}}
        with pytest.raises(ConfigError, match=words):
            setup_from_options(zero_settings={**document, **zero})
        for part in document.values():  # what is off is no matter
            part.update(dict.fromkeys(part, False))
        setup_from_options(zero_settings={**document, **zero})

    @pytest.mark.slow
    def test_linear_layers_that_zero_init_did_not_touch_keep_what_was_gathered(self):
        model = "meta-llama/Llama-3.2-1B?num_hidden_layers=4&vocab_size=1000&hidden_size=512"
        limits = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}

        def peak(linear, **more):
            zero = {"stage": 3, **limits, "memory_efficient_linear": linear}
            spread = {"num_gpus": 64, "bf16": True, "zero_settings": {"zero_optimization": zero}}
            return memest.estimate(model, **{**TINY, **spread, **more}).peak.allocated_bytes

        # of layers whose backward is to come: an MLP is 3 x 512 x 8192, in two bytes
        assert peak(linear=False) - peak(linear=True) > 2 * 3 * 512 * 8192 * 2

    def test_no_file(self, tmp_path):
        with pytest.raises(ConfigError, match="No such file"):
            setup_from_options(deepspeed=str(tmp_path / "none.json"))
        path = tmp_path / "ds.json"
        path.write_text("{")
        with pytest.raises(ConfigError, match="is no JSON"):
            setup_from_options(deepspeed=str(path))

    def test_whole_numbers_may_be_written_as_floats(self):
        found = read_deepspeed({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
        assert found.settings == {"reduce_bucket_size": 500_000_000}


@pytest.mark.slow("given0")
@pytest.mark.parametrize("given", [{}, {"dtype": "float32"}])
def test_zero_init_makes_float32_weights_where_nothing_computes_in_half(given):
    """``_set_dtype``: a checkpoint of bfloat16 trains in float32 then."""
    model = "meta-llama/Llama-3.2-1B?num_hidden_layers=1"  # its configuration says bfloat16
    options = {"num_gpus": 2, "zero": 3, "batch": 1, "seq_len": 64, "gpu": "h100-sxm"}
    found = memest.estimate(model, **options, **given)
    assert any("float32 weights" in line for line in found.assumptions)
    assert any("zero.Init makes float32 weights" in note for note in found.notes)
    assert found.peak == memest.estimate(model, **options, dtype="float32").peak


def test_half_weights_without_half_precision_are_refused_under_stage_3():
    options = {"num_gpus": 2, "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"without --bf16: zero\.Init makes float32"):
        setup_from_options(zero=3, **options)
    assert setup_from_options(zero=3, bf16=True, **options).dtype == "bfloat16"
    assert setup_from_options(zero=2, **options).dtype == "bfloat16"
