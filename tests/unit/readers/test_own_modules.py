"""A script's own module: what to type for it is said, and what was typed is settled."""

from __future__ import annotations

import pytest

import memest
from memest.cli.question import read_question
from memest.errors import ConfigError
from memest.readers.reading import names_config

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
    def forward(self, signal):
        return self.layer(signal)

def build():
    return Net()

def main(data):
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main([])
"""
WRAPPER = """
import torch
from torch import nn
from transformers import AutoModel
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = AutoModel.from_pretrained("bert-base-uncased")
    def forward(self, x):
        return self.body(x)[0]
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters())
model(None).backward()
"""
OWN = {"inputs": ("signal:float32[B,16]", "y:int64[B]"), "loss": "cross_entropy"}


@pytest.fixture
def net(write):
    write("mynet.py", SCRIPT)
    write("deep/inner.py", SCRIPT)
    return "mynet.py"


@pytest.mark.parametrize(
    ("file", "module"), [("mynet.py", "mynet"), ("deep/inner.py", "deep.inner")]
)
def test_what_is_to_be_typed_for_a_module_of_the_scripts_own(net, file, module):
    with pytest.raises(ConfigError) as caught:
        read_question([file], {})
    assert str(caught.value).endswith(
        "(Net, a module of the script's own): write it besides, with the extents of its tensors "
        "for the dots: memest estimate "
        f"{module}:Net --input 'signal:float32[B,...]' --config {file}"
    )


def test_what_the_user_named_is_settled(net):
    read = memest.read_config(net, model="mynet:Net", **OWN)
    assert not read.not_modelled
    assert not {"inputs", "loss"} & set(read.options)
    assert read.with_options(batch=4).not_modelled == ()
    later = memest.read_config(net, model="mynet:Net").with_model(None, OWN)
    assert not later.setup.unpriced


def test_on_the_command_line(net):
    question = read_question(["mynet:Net"], OWN, config=[net])
    assert "unpriced" not in question.options
    assert question.options["inputs"] == OWN["inputs"]
    assert question.options["batch"] == 32


@pytest.mark.parametrize(
    ("model", "named", "open_words"),
    [
        ("mynet:Net", ("inputs",), "loss of its own"),
        ("mynet:Net", ("loss",), "length of samples"),
        ("gpt2", ("inputs", "loss"), "a module of the script's own (Net); mynet:Net"),
    ],
)
def test_what_was_not_named_stays_open(net, model, named, open_words):
    read = memest.read_config(net, model=model, **{name: OWN[name] for name in named})
    assert open_words in " ".join(map(str, read.not_modelled))
    assert len(read.not_modelled) == 1


def test_a_module_around_a_model_that_is_loaded(write):
    file = write("around.py", WRAPPER)
    alone, named, as_factory = (
        memest.read_config(file, seq_len=8, batch=2, **model)
        for model in ({}, {"model": "bert-base-uncased"}, {"model": "around:Classifier"})
    )
    for read in (alone, named):
        assert "what it adds is not read" in " ".join(read.setup.unpriced)
    assert not as_factory.setup.unpriced


def test_a_class_of_a_file_is_a_factory_and_no_configuration(net):
    assert not names_config("mynet.py:Net")
    assert not names_config("mynet.py:build")
    assert names_config("mynet.py:nothing")
    with pytest.raises(ConfigError, match=r"mynet\.py:Net is a class, and no configuration"):
        memest.read_config("mynet.py:Net")


@pytest.mark.parametrize("ref", ["mynet.py:Net", "./deep/inner.py:Net", "deep/inner.py:build"])
def test_a_factory_named_by_its_file_is_built(net, ref):
    pytest.importorskip("torch")
    answer = memest.estimate(ref, batch=2, **OWN)
    assert answer.model.parameters == 16 * 4 + 4
    assert answer.model.id == ref.removeprefix("./").replace("/", ".").replace(".py:", ":")


UNET = """
from torch import nn
class UNet(nn.Module):
    def __init__(self, channels, classes=2, depth=4):
        super().__init__()
        self.out = nn.Conv2d(channels, classes, 1)
    def forward(self, image, time, mask=None):
        return self.out(image)
def build(channels, depth):
    return UNet(channels, depth=depth)
"""
TRAINS = """
import torch
{imported}
model = {made}
loader = torch.utils.data.DataLoader(rows, batch_size=2)
optimizer = torch.optim.AdamW(model.to("cuda").parameters())
for images in loader:
    model(images).mean().backward()
    optimizer.step()
"""
TENSORS = "--input 'image:float32[B,...]' --input 'time:float32[B,...]'"


@pytest.mark.parametrize(
    ("imported", "made", "typed"),
    [
        ("from nets.unet import UNet", "UNet(3, depth=5)",
         f"nets.unet:UNet {TENSORS} --model-arg channels=3 --model-arg depth=5"),
        ("from nets import UNet", "UNet(channels=args.c)",
         f"nets:UNet {TENSORS} --model-arg channels=..."),
        ("import nets.unet", "nets.unet.build(3, 4)",
         "nets.unet:build --model-arg channels=3 --model-arg depth=4"),
        ("from nets.unet import UNet", "torch.nn.parallel.DistributedDataParallel(UNet(3))",
         f"nets.unet:UNet {TENSORS} --model-arg channels=3"),
        ("from monai.networks.nets import UNet", "UNet(3)", "monai.networks.nets:UNet"),
        ("from nets import MODELS", "MODELS[args.name](3)", "package.module:name"),
    ],
)  # fmt: skip
def test_what_is_to_be_typed_for_an_imported_module(write, imported, made, typed):
    """Its name, the tensors that its forward must be given, and what it is made with."""
    write("nets/unet.py", UNET)
    write("nets/__init__.py", "from .unet import UNet\nMODELS = {'unet': UNet}\n")
    write("train.py", TRAINS.format(imported=imported, made=made))
    with pytest.raises(ConfigError) as caught:
        read_question(["train.py"], {})
    assert str(caught.value).endswith(f"memest estimate {typed} --config train.py")


def test_tensors_are_those_that_the_loop_gives_by_names_that_are_whole_numbers(write):
    """Tokens are rows of --seq-len, times and classes a number a sample."""
    text = UNET.replace("image, time, mask=None", "input_ids, image, t, y=None, mask=None")
    write("net.py", text)
    imported = TRAINS.format(imported="from net import UNet", made="UNet(3)")
    write("train.py", imported.replace("model(images)", "model(a, b, c, d)"))
    with pytest.raises(ConfigError) as caught:
        read_question(["train.py"], {})
    assert (
        "--input 'input_ids:int64[B,S]' --input 'image:float32[B,...]' --input 't:int64[B]' "
        "--input 'y:int64[B]' --model-arg channels=3 --config"
    ) in str(caught.value)


def test_a_loss_beside_a_module_is_asked_for(write):
    """And is settled by whoever names it."""
    write("mynet.py", SCRIPT)
    run = memest.read_config("mynet.py", model="mynet:Net", inputs=OWN["inputs"])
    assert any("--loss says it" in each for each in run.setup.unpriced)
    assert not memest.read_config("mynet.py", model="mynet:Net", **OWN).setup.unpriced
