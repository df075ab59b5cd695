"""Losses that frameworks put in place of head and cross entropy, as values of ``--fused-loss``."""

from __future__ import annotations

import pytest

import memest
from memest.errors import ConfigError
from memest.readers import trl as reader

TRL = "model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 512\n"
TUNE = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}
optimizer: {_component_: torch.optim.AdamW}
batch_size: 2
"""


def _read(write, text, *more, options=None):
    write("run.yaml", text + "\n".join(more))
    return memest.read_config("run.yaml").with_options(**(options or {}))


@pytest.fixture
def trl_present(monkeypatch):
    """No release of TRL is installed: the present one is read."""
    monkeypatch.setattr(reader, "release", lambda _: None)


def _value(config, option="fused_loss"):
    return next((each for each in config.values if each.option == option), None)


@pytest.mark.parametrize(
    ("installed", "line", "loss"),
    [
        (None, "", "trl-fused"),
        (None, "loss_type: nll", "trl-fused"),
        (None, "loss_type: dft", "trl-fused"),
        ("1.16.0", "loss_type: chunked_nll", "trl-fused"),
        ("1.15.0", "", "trl-fused"),
        ("1.14.2", "", "trl-chunked"),
        ("1.14.2", "loss_type: nll", ""),
        ("1.14.2", "loss_type: dft", ""),
        ("1.6.0", "", "trl-chunked"),
        ("1.5.1", "", ""),
        ("1.5.1", "loss_type: chunked_nll", "trl-chunked"),
        ("2.0.0.dev0", "", "trl-fused"),
    ],
)
def test_what_trl_computes_depends_on_its_release(write, monkeypatch, installed, line, loss):
    monkeypatch.setattr(reader, "release", lambda _: installed)
    config = _read(write, TRL, line)

    assert config.setup.fused_loss == loss
    if loss and not line:
        assert "SFTTrainer of TRL" in _value(config).origin
    if "dft" in line:
        assert any("dft" in remark.why for remark in config.not_modelled)


def test_several_gpus_of_a_flag(write, trl_present, monkeypatch):
    """DDP acts on gradients alone; FSDP has gathered the head, but for one beside adapters.

    That one TRL gathers since its present loss; DeepSpeed gathers it when it is read.
    """
    config = _read(write, TRL, options={"num_gpus": 4})
    assert config.setup.fused_loss

    config = _read(write, TRL, "deepspeed: {zero_optimization: {stage: 3}}")
    assert config.setup.fused_loss
    assert config.setup.distributed.zero == 3

    config = _read(write, TRL, options={"num_gpus": 4, "fsdp": "full_shard"})
    assert config.setup.fused_loss

    adapted = {"num_gpus": 4, "fsdp": "full_shard", "lora_r": 8}
    assert _read(write, TRL, options=adapted).setup.fused_loss == "trl-fused"

    monkeypatch.setattr(reader, "release", lambda _: "1.14.2")
    config = _read(write, TRL, options=adapted)
    assert config.setup.fused_loss == ""
    assert any("several GPUs" in remark.why for remark in config.not_modelled)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"torch_compile": True}, "torch.compile"),
        ({"num_gpus": 2, "fsdp": "full_shard", "cp": 2}, "--cp"),
        ({"num_gpus": 2, "zero": 2, "sp": 2}, "--sp"),
        ({"num_gpus": 2, "tp": 2}, "--tp"),
        ({"num_gpus": 2, "pp": 2, "loop": "plain"}, "--pp"),
    ],
)
def test_models_that_are_spread_take_all_logits(write, trl_present, flags, reason):
    """Nobody wrote the loss, which is a default of TRL: it goes, and that is said."""
    config = _read(write, TRL, "bf16: false", options=flags)

    assert config.setup.fused_loss == ""
    assert any(reason in remark.why for remark in config.not_modelled)


def test_liger_in_its_place_and_a_flag_before_all(write, trl_present):
    config = _read(write, TRL, "use_liger_kernel: true", "loss_type: nll")
    assert (config.setup.use_liger_kernel, config.setup.fused_loss) == (True, "")
    assert any("fused head beside Liger" in remark.why for remark in config.not_modelled)
    assert _read(write, TRL, options={"fused_loss": "none"}).setup.fused_loss == ""


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}", "torchtune-linear"),
        (
            "{_component_: torchtune.modules.loss.LinearCrossEntropyLoss, num_output_chunks: 16}",
            "torchtune-linear:16",
        ),
        ("{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}", "torchtune-chunked"),
        ("{_component_: torch.nn.CrossEntropyLoss}", ""),
        ("{_component_: torchtune.modules.loss.ForwardKLWithChunkedOutputLoss}", ""),
    ],
)
def test_components_of_torchtune(write, loss, found):
    config = _read(write, TUNE, f"loss: {loss}")

    assert config.setup.fused_loss == found
    assert any("another loss" in why for why in config.setup.unpriced) == ("ForwardKL" in loss)


def test_a_number_of_pieces_that_cannot_be(write):
    with pytest.raises(ConfigError, match="from 1 to 4096"):
        _read(write, TUNE, "loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss, "
              "num_output_chunks: 0}")  # fmt: skip


PRECOMPUTED = "trl dpo --model_name_or_path gpt2 --precompute_ref_log_probs true --max_length 64"


def test_a_reference_that_is_let_go_of_is_priced_beside_the_training(write, trl_present):
    """Under FSDP TRL has one, whatever is precomputed; with adapters it stops."""
    policy = "fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    file = write("fsdp.yaml", f"distributed_type: FSDP\nfsdp_config: {{{policy}}}\n")
    launch = f"accelerate launch --num_processes 2 --config_file {file} -m {PRECOMPUTED}"
    run = memest.read_config(command=launch)
    adapted = memest.read_config(command=f"{launch} --use_peft true")
    alone = memest.read_config(command=PRECOMPUTED)

    assert run.setup.has_reference_model
    assert not run.setup.unpriced
    assert any("priced is the reference beside" in words for words in run.setup.overpriced)
    assert any("under FSDP, precomputed" in words for words in adapted.setup.unpriced)
    assert not alone.setup.has_reference_model
    assert not alone.setup.overpriced


@pytest.mark.parametrize(("loss", "saves"), [("kto", False), ("apo_zero_unpaired", True)])
def test_a_loss_of_kto_without_a_divergence_takes_less(loss, saves, trl_present):
    command = "trl kto --model_name_or_path gpt2 --max_length 64 --loss_type"
    setup = memest.read_config(command=f"{command} {loss}", num_gpus=1).setup

    assert setup.method == "kto"
    assert any("estimates no divergence" in words for words in setup.overpriced) is saves
    assert not setup.unpriced
