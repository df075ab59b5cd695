"""Lightning's modules: a model and nothing besides is priced, everything else is named."""

import re

import pytest

import memest
from memest.errors import ConfigError

SCRIPT = """
import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification


class Net(L.LightningModule):
    def __init__(self, lr=2e-5):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
        self.model.train()

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, index):
        outputs = self.model(**batch)
        self.log("loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch, index):
        self.log("val_loss", self(**batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]


net = Net()
trainer = L.Trainer(max_epochs=3, precision="bf16-mixed", callbacks=[L.pytorch.callbacks.EarlyStopping("val_loss")])
trainer.fit(net, DataLoader(rows, batch_size=16, shuffle=True), DataLoader(rows, batch_size=16))
"""  # noqa: E501


@pytest.fixture
def read(write):
    """The script with something in it replaced."""

    def reading(*changes):
        text = SCRIPT
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        return memest.read_config(write("train.py", text), seq_len=128)

    return reading


def missed(run):
    return [str(remark) for remark in run.not_modelled]


def test_a_module_that_is_a_model_has_nothing_open(read):
    run = read()
    assert run.model == "bert-base-uncased"
    assert not run.setup.unpriced, missed(run)
    expected = {"loop": "lightning", "precision": "bf16", "batch": 16, "optim": "adamw_torch"}
    assert expected.items() <= run.options.items()


@pytest.mark.parametrize(
    "step",
    [
        "return self(**batch).loss",
        "return self.model(**batch)[0]",
        "loss = self.model(**batch)['loss']\n        return {'loss': loss}",
        (
            "out = self(**batch)\n        loss = out.loss\n        self.log('x', loss)\n"
            "        return loss"
        ),
        "return self.model(batch['input_ids'], labels=batch['labels']).loss",
    ],
)
def test_a_step_may_be_written_in_many_ways(read, step):
    body = re.search(r"outputs = .*?return outputs.loss", SCRIPT, re.DOTALL).group()
    run = read((body, step))
    assert not run.setup.unpriced, missed(run)


IMAGES = """
import lightning as L
import torch
import torchmetrics
import torchvision
from torch import nn
from torch.nn import functional as F


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)
        self.loss = nn.CrossEntropyLoss()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        STEP

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


rows = torchvision.datasets.CIFAR10("data")
trainer = L.Trainer(max_epochs=3)
trainer.fit(Net(), torch.utils.data.DataLoader(rows, batch_size=16))
"""


COUNTED = """images, labels = batch[0], batch[1]
        out = self(images)
        loss = self.loss(out, labels)
        preds = torch.argmax(out, dim=1)
        hits = (preds == labels).float().mean()
        self.log("acc", hits)
        self.log("metric", self.accuracy(preds, labels))
        return loss"""


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("x, y = batch; loss = self.loss(self.net(x), y); self.log('loss', loss); return loss", ""),
        ("x, y = batch; return F.cross_entropy(self(x), y)", ""),
        ("out = self(batch['image']); loss = self.loss(out, batch['label']); return loss", ""),
        (COUNTED, ""),
        ("x, y = batch; return self.loss(self.net(x), y) * 2", "return self.loss"),
        ("x, y = batch; return F.mse_loss(self.net(x), y)", "return F.mse_loss"),
        ("x, y = batch; x = mixup(x); return self.loss(self.net(x), y)", "x = mixup(x)"),
        ("x, y = batch; z = self.net(x); return self.loss(self.net(x), y)", "2 forwards"),
        ("x, y = batch; out = self(x); p = out.float().mean(); return self.loss(out, y)", "p = "),
        ("x, y = batch; return self.loss(self.net(x), self.net(x))", "return self.loss"),
    ],
)
def test_images_have_the_cross_entropy_of_the_script(write, step, said):
    text = IMAGES.replace("STEP", step.replace("; ", "\n        "))
    run = memest.read_config(write("train.py", text), image_size=32)
    assert run.model == "torchvision/resnet18"
    assert not said if not missed(run) else any(said and said in each for each in missed(run))


@pytest.mark.parametrize(
    ("old", "new", "options"),
    [
        ('precision="bf16-mixed"', 'precision="16-mixed"', {"precision": "fp16"}),
        ('precision="bf16-mixed"', "precision=16", {"precision": "fp16"}),
        ('precision="bf16-mixed"', 'precision="bf16-true"', {"dtype": "bfloat16"}),
        ("max_epochs=3", "accumulate_grad_batches=4", {"grad_accum": 4}),
        ("max_epochs=3", "gradient_clip_val=0.5", {"max_grad_norm": 0.5}),
        ("max_epochs=3", 'devices=4, num_nodes=2, strategy="ddp"', {"num_gpus": 8}),
        ("max_epochs=3", "devices=[0, 1]", {"num_gpus": 2}),
        ("max_epochs=3", 'devices=2, strategy="ddp_find_unused_parameters_true"', {"num_gpus": 2}),
        (
            "max_epochs=3",
            "devices=2, strategy=L.pytorch.strategies.DDPStrategy(gradient_as_bucket_view=True)",
            {"ddp_gradient_as_bucket_view": True},
        ),
        (
            "max_epochs=3",
            'devices=2, strategy="deepspeed_stage_2"',
            {"loop": "plain", "zero": 2, "precision": "bf16"},
        ),
        (
            "max_epochs=3",
            'devices=2, strategy="deepspeed_stage_3_offload"',
            {"zero": 3, "offload_optimizer": True, "offload_param": True},
        ),
        ("max_epochs=3", 'devices="2"', {"num_gpus": 2}),
        ("max_epochs=3", 'devices="0,1,2"', {"num_gpus": 3}),
        ("import lightning as L", "import pytorch_lightning as L", {"loop": "lightning"}),
        ("import lightning as L", "import lightning.pytorch as L", {"loop": "lightning"}),
    ],
)
def test_what_the_trainer_is_told_is_read(read, old, new, options):
    run = read((old, new))
    assert options.items() <= run.options.items()
    assert not run.setup.unpriced, missed(run)


def test_values_that_are_clipped_one_by_one_have_no_norm(read):
    run = read(("max_epochs=3", 'gradient_clip_val=0.5, gradient_clip_algorithm="value"'))
    assert "max_grad_norm" not in run.options


TRAPS = [
    ("self.save_hyperparameters()", "self.head = torch.nn.Linear(768, 5)", "self.head"),
    ("self.save_hyperparameters()", "self.automatic_optimization = False", "= False"),
    ("return outputs.loss", "return outputs.loss + self.penalty()", "self.penalty()"),
    ("return outputs.loss", "return outputs.logits.sum()", "outputs.logits"),
    ("self.log(", "self.kept.append(outputs)\n        self.log(", "self.kept.append"),
    ("prog_bar=True", "prog_bar=outputs.logits.float().argmax()", "what it takes is not read"),
    ("def validation_step", "def on_after_backward(self):\n        pass\n\n    def validation_step",
     "Net.on_after_backward"),
    ("def validation_step", "def configure_model(self):\n        pass\n\n    def validation_step",
     "Net.configure_model"),
    (("return self.model(**inputs)\n\n    def training_step(self, batch, index):\n"
     "        outputs = self.model(**batch)"),
     ("return self.model(**inputs) * 2\n\n    def training_step(self, batch, index):\n"
     "        outputs = self(**batch)"), "outputs = self(**batch)"),
    ("max_epochs=3", 'strategy="deepspeed_stage_3_offload_nvme"', "Lightning's deepspeed_stage_3"),
    ("max_epochs=3", "strategy=L.pytorch.strategies.ModelParallelStrategy()",
     "Lightning's ModelParallelStrategy"),
    ("max_epochs=3", 'devices=2, strategy="fsdp"', "the whole model is one"),
    ("max_epochs=3", "plugins=[MyPlugin()]", "plugins"),
    ("L.pytorch.callbacks.EarlyStopping(", "L.pytorch.callbacks.StochasticWeightAveraging(",
     "StochasticWeightAveraging"),
    ("L.pytorch.callbacks.EarlyStopping(", "EMACallback(", "EMACallback"),
    ("return outputs.loss", "return outputs", "return outputs"),
    ("return outputs.loss", "return {**outputs, 'loss': outputs.loss}", "return {**outputs"),
    ("return outputs.loss", "return {'loss': outputs.loss, 'kept': outputs}", "'kept'"),
    ("outputs = self.model(**batch)", ("other = self.model(**batch)\n        outputs = "
     "self.model(**batch)"), "2 forwards"),
    ("self.model(**batch)", "self.model(**batch, output_attentions=True)", "output_attentions"),
    ("def training_step", "def other_step", "Net.other_step"),
    ("    def training_step", "    training_step = fast_step\n\n    def other_step", "fast_step"),
    ("    def training_step", "    @torch.no_grad()\n    def training_step", "no_grad"),
    ("class Net(L.LightningModule)", "from my import Base\n\n\nclass Net(Base)", "script's own"),
    ("class Net(L.LightningModule):", ("class Base(L.LightningModule):\n    def __init__(self):\n"
     "        self.extra = torch.nn.Linear(9, 9)\n\n\nclass Net(Base):"),
     "script's own"),
    ("self.save_hyperparameters()", "self.head = make_head()", "make_head"),
    ("self.save_hyperparameters()", "head = self.add_module('head', torch.nn.Linear(9, 9))",
     "add_module"),

    ("import lightning as L", "import deepspeed\nimport lightning as L\ndeepspeed.initialize()",
     "DeepSpeed's loop"),
    ("self.save_hyperparameters()", "setattr(self, 'head', torch.nn.Linear(9, 9))", "setattr"),
    ("self.save_hyperparameters()", "self.fid = torchmetrics.image.fid.FrechetInceptionDistance()",
     "self.fid"),
    ("self.save_hyperparameters()", "if lr:\n            self.head = torch.nn.Linear(9, 9)",
     "if lr"),
    ("    def __init__", "    automatic_optimization = False\n\n    def __init__",
     "automatic_optimization = False"),
    ("    def validation_step", ("    def on_train_epoch_start(self):\n        unfreeze(self)\n\n"
     "    def validation_step"), "on_train_epoch_start"),
    ("max_epochs=3", "strategy=choose()", "strategy"),
    ("max_epochs=3", 'accelerator="cpu"', "accelerator"),
    ("max_epochs=3", "devices=-1", "num_gpus"),
    ("max_epochs=3", "accumulate_grad_batches={0: 4}", "grad_accum"),
    ('precision="bf16-mixed"', 'precision="64-true"', "precision"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), TRAPS, ids=[said for *_, said in TRAPS])
def test_what_is_not_a_model_alone_is_named(read, old, new, said):
    run = read((old, new))
    assert any(said in remark for remark in missed(run)), missed(run)
    assert run.setup.unpriced or run.setup.overpriced


def test_a_module_that_is_cast_whole_is_not_priced_in_the_dtype_of_its_load(read):
    run = read(
        ('"bert-base-uncased")', '"bert-base-uncased", dtype=torch.float32)'),
        ('precision="bf16-mixed"', 'precision="bf16-true"'),
    )
    assert any("all of the module becomes bfloat16" in remark for remark in missed(run))
    assert run.setup.unpriced


def test_a_model_that_stays_in_eval_mode_recomputes_nothing(read):
    """Lightning 2.2 and later train a module in the mode that it is in."""
    train = "self.model.train()"
    run = read((train, "pass"))
    assert not run.setup.unpriced
    assert any("eval mode" in words for words in run.setup.overpriced)
    run = read((train, "self.model.gradient_checkpointing_enable()"))
    assert any("nothing is recomputed" in words for words in run.setup.unpriced)
    prepared = (
        "from peft import prepare_model_for_kbit_training\n"
        "        self.model = prepare_model_for_kbit_training(self.model)"
    )
    four_bits = ('"bert-base-uncased")', '"bert-base-uncased", load_in_4bit=True)')
    run = read((train, prepared), four_bits)
    assert run.options["checkpointing"] == "full"
    assert any("nothing is recomputed" in words for words in run.setup.unpriced)
    run = read((train, f"{train}\n        self.model.eval()"))
    assert any("eval mode" in words for words in run.setup.overpriced)
    run = read(("max_epochs=3", "max_steps=9"), ("net = Net()\n", "net = Net()\nother.train()\n"),
               (train, "pass"))  # fmt: skip
    assert any("eval mode" in words for words in run.setup.overpriced)
    run = read((train, f"{train}\n        self.model.gradient_checkpointing_enable()"))
    assert run.options["checkpointing"] == "full"
    assert not run.setup.unpriced


def test_the_batch_is_that_of_the_loader_that_trains(read):
    fit = "trainer.fit(net, DataLoader(rows, batch_size=16, shuffle=True), "
    val = "val = DataLoader(rows, batch_size=24, shuffle=True)\n"
    run = read((fit, f"{val}trainer.fit(net, DataLoader(rows, batch_size=16), "))
    assert run.options["batch"] == 16
    loaders = (
        "    def val_dataloader(self):\n        return DataLoader(rows, batch_size=24)\n\n"
        "    def train_dataloader(self):\n        return DataLoader(rows, batch_size=16)\n\n"
        "    def validation_step"
    )
    run = read(
        ("    def validation_step", loaders), (SCRIPT[SCRIPT.index(fit) :], "trainer.fit(net)")
    )
    assert run.options["batch"] == 16
    assert not run.setup.unpriced, missed(run)


@pytest.mark.parametrize(
    "given",
    ["make_loader()", "datamodule=Data()", "[DataLoader(rows, batch_size=4)]"],
)
def test_a_loader_that_cannot_be_told_is_not_guessed(read, given):
    fit = "trainer.fit(net, DataLoader(rows, batch_size=16, shuffle=True), "
    run = read((fit, f"trainer.fit(net, {given}, val_dataloaders="))
    assert any("--batch says it" in remark for remark in missed(run))
    assert run.setup.unpriced


def test_what_is_behind_the_training_is_no_part_of_it(read):
    run = read(
        ("net = Net()", "net = Net()\nrows = []"),
        ("batch_size=16))\n", "batch_size=16))\ntrainer.validate(net)\n"),
    )
    assert not run.setup.unpriced, missed(run)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fsdp": "full_shard", "num_gpus": 2}, "other than by DDP"),
        ({"zero_grad_at": "before-forward"}, "Drop --zero-grad-at"),
        ({"del_outputs": True}, "Drop --del-outputs"),
        ({"fp16": True, "max_grad_norm": 1.0, "optim": "adamw_torch_fused"}, "refuses to clip"),
        ({"torch_compile": True}, "--torch-compile is not priced"),
        ({"pp": 2, "num_gpus": 2}, "other than by DDP"),
        ({"optim": "lomo"}, "steps in backward"),
    ],
    ids=str,
)
def test_what_its_loop_does_not_do_is_refused(more, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        memest.estimate("Qwen/Qwen3-0.6B", batch=1, loop="lightning", **more)


FABRIC = """
import torch
from lightning.fabric import Fabric
from transformers import AutoModelForCausalLM
fabric = Fabric(accelerator="cuda", devices=2, precision="bf16-mixed", strategy="ddp")
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4))
for batch in loader:
    loss = model(**batch).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_fabric_says_what_a_trainer_would(write):
    """Its precision, GPUs and clipping; that its loop is no plain one is named."""
    run = memest.read_config(write("train.py", FABRIC), seq_len=128)

    named = {"precision": "bf16", "num_gpus": 2, "max_grad_norm": 0.5, "batch": 4}
    assert named == {key: run.options[key] for key in named}
    assert any("Lightning's loop" in each for each in run.setup.unpriced)


def test_a_configuration_of_lightnings_command_line_is_refused_by_its_name(write):
    file = write("config.yaml", "trainer: {devices: 2}\nmodel: {class_path: a.B}\n")

    with pytest.raises(ConfigError, match=r"of Lightning's command line.*--loop lightning"):
        memest.read_config(file)
