"""FSDP and DeepSpeed as scripts write them, their own and by Lightning's strategies. Tier: fast."""

from __future__ import annotations

import json

import pytest

import memest

HEAD = """
import functools, torch, deepspeed
import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, DeepSpeedStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel as FSDP,
    MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
"""
OWN = (
    HEAD
    + """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
model.train()
{}
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2, shuffle=True):
    {}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
PLAIN = "loss = model(**batch).loss"
AUTOCAST = "with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(**batch).loss"
LIGHTNING = (
    HEAD
    + """
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        self.model.train()

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


L.Trainer(devices=4, {}).fit(Net(), DataLoader(rows, batch_size=2))
"""
)
FLAT = {"fsdp": "full_shard", "fsdp_version": 1, "fsdp_wrap": ["Qwen3DecoderLayer"]}
MP = "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"


@pytest.fixture
def read(write):
    def ask(text, **options):
        return memest.read_config(write("train.py", text), seq_len=8, num_gpus=4, **options)

    return ask


@pytest.mark.parametrize(
    ("sharding", "step", "options"),
    [
        (
            (
                f"for layer in model.model.layers:\n    fully_shard(layer, {MP})\n"
                f"fully_shard(model, {MP})"
            ),
            PLAIN,
            {"fsdp": "full_shard", "precision": "bf16", "fsdp_mixed_precision": True},
        ),
        (
            (
                "for m in model.modules():\n    if isinstance(m, Qwen3DecoderLayer):\n"
                "        fully_shard(m, reshard_after_forward=False,\n"
                "                    offload_policy=CPUOffloadPolicy())"
                "\nfully_shard(model, reshard_after_forward=False)"
            ),
            AUTOCAST,
            {
                "fsdp": "shard_grad_op",
                "fsdp_offload": True,
                "fsdp_wrap": ["Qwen3DecoderLayer"],
                "precision": "bf16",
            },
        ),
        (
            (
                "wrap = functools.partial(transformer_auto_wrap_policy,\n"
                "                         transformer_layer_cls={Qwen3DecoderLayer})\n"
                "model = FSDP(model, auto_wrap_policy=wrap, use_orig_params=True,\n"
                "             mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16))"
            ),
            AUTOCAST,
            {**FLAT, "fsdp_mixed_precision": True, "fsdp_use_orig_params": True},
        ),
        (
            (
                "model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Qwen3DecoderLayer}),\n"
                "             sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,\n"
                "             backward_prefetch=BackwardPrefetch.BACKWARD_POST,\n"
                "             cpu_offload=CPUOffload(offload_params=True))"
            ),
            PLAIN,
            {
                **FLAT,
                "fsdp": "shard_grad_op",
                "fsdp_offload": True,
                "fsdp_backward_prefetch": "backward_post",
            },
        ),
    ],
    ids=["fsdp2", "fsdp2-classes", "fsdp1-half", "fsdp1"],
)
def test_fsdp_of_a_scripts_own_is_read(read, sharding, step, options):
    run = read(OWN.format(sharding, step))
    assert options == {key: run.options.get(key) for key in options}
    assert not run.setup.unpriced
    assert run.setup.loop == "plain"


@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        ("fully_shard(model)", "the whole model is one"),
        ("model = FSDP(model)", "the whole model is one"),
        ("for x in parts(model):\n    fully_shard(x)\nfully_shard(model)", "--fsdp-wrap says it"),
        ("for x in model.model.layers:\n    fully_shard(x)", "the model itself is no unit"),
        (
            (
                "mesh = init_device_mesh('cuda', (2, 2))\nfor x in model.model.layers:\n"
                "    fully_shard(x, mesh=mesh)\nfully_shard(model, mesh=mesh)"
            ),
            "--fsdp-shard-size",
        ),
        (
            (
                "for x in model.model.layers:\n    fully_shard(x)\n"
                "fully_shard(model.lm_head)\nfully_shard(model)"
            ),
            "--fsdp-wrap-ends says it",
        ),
        (
            (
                "model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Qwen3DecoderLayer}),\n"
                "             mixed_precision=MixedPrecision(torch.bfloat16))"
            ),
            "without autocast",
        ),
        ("model = FSDP(model, auto_wrap_policy=choose())", "--fsdp-wrap says it"),
        ("model = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)", "hybrid"),
    ],
)
def test_what_cannot_be_told_of_fsdp_leaves_the_verdict_open(read, sharding, said):
    run = read(OWN.format(sharding, PLAIN))
    assert any(said in each for each in run.setup.unpriced), run.setup.unpriced


DEEPSPEED = (
    HEAD
    + """
import argparse
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
model.train()
optimizer = torch.optim.AdamW(model.parameters())
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={})
for batch in DataLoader(rows, batch_size=2, shuffle=True):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
"""
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize("where", ["call", "file"])
def test_a_configuration_that_deepspeed_is_given_is_read(read, write, where):
    write("ds.json", json.dumps(CONFIG))
    given = repr(CONFIG) if where == "call" else '"ds.json"'
    run = read(DEEPSPEED.format(given))
    options = {"zero": 3, "precision": "bf16", "grad_accum": 4, "offload_optimizer": True}
    assert options == {key: run.options.get(key) for key in options}
    assert not run.setup.unpriced


def test_a_configuration_that_cannot_be_told_is_named(read):
    run = read(DEEPSPEED.format("make()"))
    assert any("DeepSpeed" in each for each in run.setup.unpriced)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (
            (
                'precision="bf16-mixed", strategy=FSDPStrategy('
                "auto_wrap_policy={Qwen3DecoderLayer}, "
                "activation_checkpointing_policy={Qwen3DecoderLayer})"
            ),
            {**FLAT, "fsdp_mixed_precision": True, "checkpointing": "full"},
        ),
        (
            'precision="bf16-true", strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True)',
            {"zero": 3, "precision": "bf16", "dtype": "bfloat16", "offload_optimizer": True},
        ),
        (f"strategy=DeepSpeedStrategy(config={CONFIG})", {"zero": 3, "precision": "bf16"}),
    ],
    ids=["fsdp", "deepspeed", "config"],
)
def test_strategies_of_lightning_are_read(read, words, options):
    run = read(LIGHTNING.format(words))
    assert options == {key: run.options.get(key) for key in options}
    assert not run.setup.unpriced


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("gradient_clip_val=1.0", "clips no norm"),
        ("accumulate_grad_batches=4", "gradients whole"),
    ],
)
def test_what_lightning_does_otherwise_under_fsdp_is_named(read, more, said):
    words = f"{more}, strategy=FSDPStrategy(auto_wrap_policy={{Qwen3DecoderLayer}})"
    assert any(said in each for each in read(LIGHTNING.format(words)).setup.unpriced)


def test_ddp_has_the_buckets_that_a_script_gives_it(read):
    ddp = "torch.nn.parallel.DistributedDataParallel"
    run = read(OWN.format(f"model = {ddp}(model, gradient_as_bucket_view=True)", PLAIN))
    assert run.setup.distributed.ddp_gradient_as_bucket_view
    assert not run.setup.unpriced


ACCELERATE = (
    HEAD
    + """
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
accelerator = Accelerator(mixed_precision="bf16", {})
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(rows, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
)


@pytest.mark.parametrize(
    ("plugin", "options", "said"),
    [
        (
            (
                "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, "
                "auto_wrap_policy='transformer_based_wrap', reshard_after_forward=False)"
            ),
            {"fsdp": "shard_grad_op", "loop": "accelerate"},
            None,
        ),
        (
            "fsdp_plugin=FullyShardedDataParallelPlugin()",
            {"fsdp": "full_shard", "fsdp_version": 1},
            "NO_WRAP",
        ),
        ("fsdp_plugin=make()", {}, "FSDP of the script is not read"),
        (
            (
                "deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, offload_param_device='cpu', "
                "gradient_accumulation_steps=4)"
            ),
            {"zero": 3, "offload_param": True, "grad_accum": 4},
            None,
        ),
        (f"deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={CONFIG})", {"zero": 3}, None),
        ("deepspeed_plugin=DeepSpeedPlugin(zero_stage=STAGE())", {}, "DeepSpeed of the script"),
    ],
)
def test_plugins_of_accelerate_are_read(read, plugin, options, said):
    run = read(ACCELERATE.format(plugin))
    assert options == {key: run.options.get(key) for key in options}
    told = [*run.setup.unpriced, *run.setup.overpriced]
    assert [said in each for each in told] == ([True] if said else [])


def test_deepspeeds_launcher_needs_no_file_where_the_script_has_the_configuration(write, tmp_path):
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    text = DEEPSPEED.replace("optimizer = torch.optim.AdamW(model.parameters())\n", "")
    path = write("train.py", text.replace("optimizer=optimizer, ", "").format(config))
    run = memest.read_command(f"deepspeed --num_gpus 4 {path}", seq_len=8)
    assert (run.options["zero"], run.options["num_gpus"]) == (3, 4)
    assert not run.setup.unpriced
    assert not run.setup.overpriced


def test_as_many_gpus_as_there_are_is_said_of_a_script_that_python_starts(write):
    text = LIGHTNING.replace("devices=4", 'devices="auto"').format('strategy="ddp"')
    run = memest.read_command(f"python {write('train.py', text)}", seq_len=8)
    assert any("as many GPUs as there are" in each for each in run.setup.unpriced)


def test_hydra_makes_the_model_that_a_setting_names(write):
    write(
        "conf/config.yaml",
        "model:\n  _target_: transformers.AutoModelForCausalLM.from_pretrained\n"
        "  pretrained_model_name_or_path: gpt2\n",
    )
    text = OWN.format("", PLAIN).replace(
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")',
        "import hydra, omegaconf\n"
        'model = hydra.utils.instantiate(omegaconf.OmegaConf.load("conf/config.yaml").model)',
    )
    run = memest.read_config(write("train.py", text), seq_len=8)
    assert run.model == "gpt2"
