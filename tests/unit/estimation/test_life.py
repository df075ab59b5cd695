"""An estimate that is asked about saving, resuming and host memory: figures, verdict, peaks."""

import json

import pytest

import memest
from memest.config.life import Life, LifePart
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.estimation.life import config_dtype
from memest.events import CATEGORY_ORDER, Category, Phase
from memest.profiles.transient import with_transient
from memest.report.life_result import HostVerdict
from memest.units import GIB, MIB
from support.made_up_stream import made_up_stream

SMALL = "gpt2?n_layer=2&n_embd=64&n_head=4&vocab_size=1000"
SIZES = {"batch": 1, "seq_len": 32}


def asked(model=SMALL, **options):
    return memest.estimate(model, **SIZES, alternatives=False, **options)


@pytest.fixture(scope="module")
def one_gpu():
    return asked(with_="save,resume", host_memory="64GiB")


def phase(estimate, name):
    return next(each for each in estimate.life.phases if each.phase == name)


# -- options -----------------------------------------------------------------------------------


def test_phases_are_named_in_one_text_or_a_list_each_once():
    expected = (LifePart.SAVE, LifePart.RESUME)

    for value in ("save,resume", ["resume", "save", "save"], " RESUME , save "):
        assert setup_from_options(with_=value).life.parts == expected


def test_eval_is_an_evaluation_of_the_trainers_default_unless_one_is_there():
    assert setup_from_options(with_="eval").eval_batch == 8
    assert setup_from_options(with_="eval", eval_batch=2).eval_batch == 2
    base = setup_from_options(eval_batch=3)
    assert setup_from_options(base, with_="eval").eval_batch == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"with_": "sav"}, "--with 'sav' is not known. Did you mean 'save'?"),
        ({"with_": "foo"}, "Legal: save, resume, eval"),
        ({"with_": ""}, "--with names nothing"),
        ({"host_memory": 0}, "--host-memory 0 leaves no memory: write for example"),
        ({"host_memory": "64"}, "--host-memory 64 is 64 B"),
        ({"host_memory": "much"}, "--host-memory: 'much' is not a size"),
        ({"processes_per_node": 0}, "--processes-per-node 0 is out of range"),
        ({"fsdp_state_dict_type": "sharded"}, "Did you mean 'sharded_state_dict'?"),
        ({"with_": "eval", "eval_strategy": "no"}, "contradict each other"),
        ({"with_": "eval", "loop": "plain"}, "--loop plain evaluates as its script does"),
        (
            {
                "qlora": True,
                "fsdp": "full_shard",
                "num_gpus": 2,
                "bf16": True,
                "bnb_4bit_quant_storage": "bfloat16",
                "fsdp_cpu_ram_efficient_loading": True,
            },
            "exclude each other under FSDP2",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_with_what_can(options, words):
    with pytest.raises(ConfigError, match="--") as caught:
        setup_from_options(**options)

    assert words in str(caught.value)


def test_a_setup_says_nothing_of_it_unless_it_is_asked():
    assert "life" not in setup_from_options().to_dict()
    assert "life" not in setup_from_options(processes_per_node=4).to_dict()
    life = setup_from_options(with_="save", host_memory="1GiB").to_dict()["life"]
    assert (life["with"], life["host_memory"]) == (["save"], GIB)


def test_processes_of_a_node_are_eight_at_most_unless_told():
    assert [Life().node_processes(count) for count in (1, 4, 16)] == [1, 4, 8]
    assert Life(processes_per_node=4).node_processes(16) == 4


# -- figures -----------------------------------------------------------------------------------


def test_predictions_that_end_on_the_host_leave_its_verdict_open():
    result = asked(eval_batch=1, eval_samples=4, host_memory="64GiB")

    assert result.life.verdict is HostVerdict.CANNOT_SAY
    assert "4 samples" in phase(result, "evaluating").not_priced


def test_phases_of_one_gpu_are_made_of_weights_and_states(one_gpu):
    weights = one_gpu.model.parameter_bytes

    assert [each.phase for each in one_gpu.life.phases] == [
        "loading", "training", "saving", "resuming",
    ]  # fmt: skip
    assert phase(one_gpu, "loading").process_bytes == 0
    assert phase(one_gpu, "loading").mapped_bytes == weights
    waiting = phase(one_gpu, "training").process_bytes
    assert phase(one_gpu, "saving").process_bytes == weights + waiting
    # the states, and a number of steps for each weight
    states = phase(one_gpu, "resuming").process_bytes
    assert 2 * weights <= states <= 2 * weights + 4 * 100
    assert one_gpu.life.verdict is HostVerdict.FITS


def test_the_answer_is_the_same_without_but_for_what_was_asked(one_gpu):
    usual = asked()
    more = one_gpu.to_dict()
    less = usual.to_dict()

    assert usual.life is None
    assert "life" not in less
    assert "Host memory" not in str(usual)
    del more["life"], more["setup"]["life"]
    assert more == less


def test_the_report_has_a_section_and_the_verdict_beside_the_gpus(one_gpu):
    text = str(one_gpu)

    assert "Host memory\n" in text
    assert one_gpu.life.sentence in text.partition("\n\n")[0].splitlines()
    assert "below the peak of the steps" in " ".join(text.split())
    assert "not counted: Python" in text
    document = json.loads(one_gpu.to_json())["life"]
    assert document["sentence"] == one_gpu.life.sentence
    assert document["phases"][0]["source"] == "transformers: _load_pretrained_model"


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [(MIB, HostVerdict.DOES_NOT_FIT), (GIB, HostVerdict.TIGHT), (64 * GIB, HostVerdict.FITS)],
)
def test_a_node_has_to_hold_the_fullest_phase_with_room_for_the_rest(memory, verdict):
    assert asked(with_="resume", host_memory=memory).life.verdict is verdict


def test_a_phase_that_is_not_priced_leaves_the_verdict_open():
    options = {"fsdp": "full_shard", "fsdp_version": 1, "num_gpus": 2, "bf16": True}
    life = asked(with_="save", host_memory="64GiB", **options).life

    assert life.verdict is HostVerdict.CANNOT_SAY
    assert life.reason == "not priced: saving"
    unnamed = asked(with_="save", **options)
    assert phase(unnamed, "saving").not_priced == "checkpoints of FSDP1"
    assert unnamed.life.sentence.endswith("while training, and more while saving.")


def test_all_processes_of_a_node_are_counted():
    options = {"fsdp": "full_shard", "num_gpus": 4, "bf16": True, "dtype": "bfloat16"}
    life = asked(with_="save", **options).life
    loading = life.phases[0]
    alone = asked(with_="save", fsdp_cpu_ram_efficient_loading=True, **options).life.phases[0]

    assert life.processes == 4
    assert loading.node_bytes == 4 * loading.process_bytes > 0
    assert alone.node_bytes == alone.process_bytes == loading.process_bytes


def test_zero_clones_weights_in_the_dtype_of_its_engine():
    options = {"zero": 2, "num_gpus": 2, "bf16": True, "qlora": True, "with_": "save"}
    prepared = phase(asked(**options), "saving")
    plain = phase(asked(prepare_kbit=False, **options), "saving")

    # prepare_model_for_kbit_training makes float32 of what the engine casts all the same
    assert prepared.process_bytes == plain.process_bytes > 0


def test_a_module_of_ones_own_is_loaded_as_its_script_does():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(8, 8)
    life = memest.estimate(
        module, inputs=["x:float32[B,8]", "y:float32[B,8]"], loss="mse", with_="save", batch=2
    ).life

    assert "no model of transformers" in life.phases[0].not_priced


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (None, None),
        ({"hidden_size": 8}, None),
        ({"model_type": "gpt2"}, "float32"),
        ({"model_type": "llama", "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"model_type": "gemma3", "text_config": {"dtype": "float16"}}, "float16"),
    ],
)
def test_the_dtype_of_a_checkpoint_is_what_its_configuration_names(config, dtype):
    assert config_dtype(config) == dtype


# -- peaks of the GPU --------------------------------------------------------------------------


def test_what_is_gathered_for_a_moment_lies_behind_the_last_step():
    stream = made_up_stream()
    longer = with_transient(stream, Phase.SAVE, 3 * GIB, "gathered", Category.TEMPORARIES)
    number = len(stream.sizes)

    assert list(longer.events[-2:]) == [number, ~number]
    assert longer.sizes[-1] == 3 * GIB
    assert CATEGORY_ORDER[longer.categories[-1]] is Category.TEMPORARIES
    assert longer.marks[-1].phase is Phase.SAVE
    assert longer.mark_positions[-1] == len(stream.events)
    assert len(stream.sizes) == number  # what it was made of stays as it is


def test_a_peak_while_saving_is_the_peak_and_is_said(monkeypatch):
    from memest.estimation import life as module
    from memest.estimation.host_facts import HostRule

    rule = HostRule(moments=((),), source="a test", on_gpu=5 * GIB)
    monkeypatch.setattr(module, "saving", lambda setup, facts: rule)
    estimate = asked(with_="save", gpu="t4")
    usual = asked(gpu="t4")

    assert estimate.peak.allocated_bytes > 5 * GIB > usual.peak.allocated_bytes
    assert estimate.peak_at.phase is Phase.SAVE
    assert estimate.gpu.device_bytes > usual.gpu.device_bytes + 4 * GIB
    assert "more than the steps" in estimate.life.gpu[0]
    assert "while a checkpoint is saved" in str(estimate)
