"""Any document, any command: an answer or memest's own error, nothing else, and always the same."""

import contextlib
import json
import string

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memest
from memest.errors import MemestError
from memest.readers.documents import plain_value
from memest.readers.formats import FORMATS
from memest.readers.mapping import DocumentKeys
from memest.readers.run_config import RunConfig, settle

_KEYS = sorted(
    {key for each in FORMATS for key in each.marks}
    | set(
        """bf16 fp16 deepspeed fsdp fsdp_config optim optimizer model training parallelism
        gradient_checkpointing gradient_accumulation_steps activation_checkpoint lora_r lora_rank
        load_in_4bit load_in_8bit batch_size dtype tokenizer dataset loss compile sequence_len
        eval_strategy val_set_size zero_optimization use_galore clip_grad_norm max_grad_norm
        weight_decay lora_target_modules gradient_checkpointing_kwargs deepspeed_config
        mixed_precision num_processes distributed_type seq_len bnb_config_kwargs rl""".split()
    )
)
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(allow_nan=True),
    st.sampled_from(
        ["", "auto", "true", "no", "bf16", "full", "lora", "qlora", "none", "NO", "FSDP", "cpu",
         "DEEPSPEED", "adamw_torch", "galore_adamw", "2", "-1", "full_shard auto_wrap", "steps",
         "selective", "torchtune.models.llama2.lora_llama2_7b", "all", "{", "[1]"]
    ),
    st.text(max_size=6),
)  # fmt: skip
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["stage", "enabled", "_component_", "zero_stage", "mode", "flavor", "seq_len",
                 "offload_optimizer", "device", "version", "reshard_after_forward", "name",
                 "use_reentrant", "data_parallel_shard_degree", "lora_rank", "max_seq_len"]
            ),
            inner, max_size=3,
        ),
    ),
    max_leaves=5,
)  # fmt: skip
_DOCUMENTS = st.dictionaries(
    st.one_of(st.sampled_from(_KEYS), st.text(string.ascii_lowercase, max_size=5)), _VALUES,
    max_size=8,
)  # fmt: skip
_QUICK = settings(
    max_examples=150, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.mark.slow
@_QUICK
@given(document=_DOCUMENTS, each=st.sampled_from(FORMATS))
def test_any_document_in_any_format(document, each):
    """A setup that holds, or an error that says so; what is said has an origin."""

    def read():
        keys = DocumentKeys(document, source="f.yaml", framework=each.title)
        each.read(keys)
        return settle([keys.reading()])

    try:
        run = read()
    except MemestError:
        return
    assert isinstance(run, RunConfig)
    assert all(said.origin for said in run.values)
    assert read().values == run.values or "nan" in repr(run.values)
    # what was settled can be typed again: nothing but what a setup with all its parts tells
    every = memest.Setup(unpriced=["x"], overpriced=["x"], method="grpo", life={"parts": ["save"]})
    assert every.to_dict().keys() >= run.setup.to_dict().keys()


@pytest.mark.slow
@_QUICK
@given(document=_DOCUMENTS, suffix=st.sampled_from([".json", ".yaml"]))
def test_any_file(document, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / f"run{suffix}"
    text = json.dumps(document) if suffix == ".json" else yaml.safe_dump(document)
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(MemestError):
        memest.read_config(path)


@_QUICK
@given(
    text=st.text(max_size=80), suffix=st.sampled_from([".json", ".yaml", ".toml", ".py", ".ipynb"])
)
def test_any_text(text, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / f"run{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(MemestError):
        memest.read_config(path)


_WORDS = st.one_of(
    st.sampled_from(
        """accelerate launch torchrun deepspeed python -m -u train.py trl sft dpo llamafactory-cli
        train axolotl tune run --config --config_file --num_processes 2 --bf16 True --deepspeed
        --model_name_or_path gpt2 A=1 CUDA_VISIBLE_DEVICES=0,1 --nproc_per_node gpu -- --fsdp
        --gradient_checkpointing batch_size=2 model.lora_rank=4 --no_bf16 run.sh NGPU=2
        --job.config_file --training.seq_len --include a:0,1 --use_peft --packing""".split()
    ),
    st.text(max_size=8),
)


@_QUICK
@given(words=st.lists(_WORDS, max_size=12))
def test_any_command(words):
    try:
        run = memest.read_command(words)
    except MemestError:
        return
    assert memest.read_command(words).values == run.values


@given(st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_and_switches_read_as_written(value):
    found = plain_value(str(value))
    assert found == value or len(str(value)) >= 40
