"""A run that names a DeepSpeed configuration that is not here: what stands for it, or a refusal."""

import pytest

import memest
from memest.errors import ConfigError

FACTORY = """
model_name_or_path: gpt2
stage: sft
finetuning_type: full
template: default
cutoff_len: 64
bf16: true
deepspeed: {}
"""
AXOLOTL = """
base_model: gpt2
micro_batch_size: 1
gradient_accumulation_steps: 1
sequence_len: 8
datasets: []
deepspeed: {}
"""
SHIPPED = "examples/deepspeed/ds_z3_offload_config.json"


def test_one_that_comes_with_the_tool_is_assumed_and_said(write):
    """By its name alone, which is worth a word and no more."""
    run = memest.read_config(write("run.yaml", FACTORY.format(SHIPPED)), num_gpus=2)
    distributed = run.setup.distributed
    assert (distributed.zero, distributed.offload_param) == (3, True)
    said = " ".join(map(str, run.not_modelled))
    assert "assumed is the one that comes with LLaMA-Factory" in said
    assert not run.setup.unpriced


@pytest.mark.parametrize("name", [SHIPPED, "my_z3.json"])
def test_what_is_given_besides_counts(write, name):
    """A file, or a stage by name."""
    file = write("run.yaml", FACTORY.format(name))
    own = write("own.json", '{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
    ways = ((file, own), {}), ((file,), {"zero": 2})
    for files, options in ways:
        run = memest.read_config(*files, num_gpus=2, **options)
        distributed = run.setup.distributed
        assert (distributed.zero, distributed.offload_param) == (2, False)
        assert "is not here" not in " ".join(map(str, run.not_modelled))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (FACTORY, "my_z3.json"),
        # another tool's file of that name is nobody's
        (AXOLOTL, "deepspeed_configs/ds_z3_config.json"),
    ],
)  # fmt: skip
def test_another_is_asked_for(write, text, name):
    with pytest.raises(ConfigError, match=r"not there.*--config FILE, or name the stage: --zero"):
        memest.read_config(write("run.yaml", text.format(name)))
