"""The example for Lightning, with the real Trainer where lightning is installed."""

from __future__ import annotations

import importlib.util

import pytest

from support.paths import ROOT

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")

import memest
from memest.errors import DoesNotFitError

EXAMPLE = ROOT / "examples/lightning_callback.py"


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch, index):
        x, y = batch["x"], batch["y"]
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Kept(lightning.pytorch.loggers.logger.Logger):
    name, version = "kept", "0"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("lightning_callback", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fit(tmp_path, callback):
    kept = Kept()
    rows = [{"x": torch.randn(32), "y": torch.randn(1)} for _ in range(32)]
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=kept, callbacks=[callback],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(rows, batch_size=8))
    return net, kept, trainer


INPUTS = ("x:float32[B,32]", "y:float32[B,1]")


def test_the_prediction_is_logged_before_the_first_step(tmp_path, example):
    callback = example.MemoryForecast(inputs=INPUTS, batch=8, gpu="t4", store=False)
    net, kept, trainer = fit(tmp_path, callback)
    own = memest.estimate(
        Net().net, inputs={"input": torch.empty(8, 32), "y": torch.empty(8, 1)}, batch=8,
        loss="mse", optim="adamw_torch", weight_decay=0.01, loop="plain", gpu="t4",
        max_batch=False,
    )  # fmt: skip

    step, first = kept.rows[0]
    assert callback.run.problem == ""
    assert step == 0
    assert first["memest/predicted_reserved_bytes"] == own.peak.reserved_bytes
    assert callback.run.num_steps == trainer.global_step == 4
    assert "loss" in trainer.callback_metrics
    assert "log" not in vars(net)


def test_strict_stops_it(tmp_path, example):
    callback = example.MemoryForecast(
        inputs=INPUTS, batch=8, gpu="t4", gpu_memory="8MiB", strict=True, store=False
    )
    with pytest.raises(DoesNotFitError):
        fit(tmp_path, callback)
