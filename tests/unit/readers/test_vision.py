"""Scripts that make models of timm and torchvision."""

from __future__ import annotations

import pytest

import memest

SCRIPT = """
import timm, torch, torchvision
from timm import create_model
from torch.utils.data import DataLoader
from torchvision import models
from torchvision import transforms
loader = DataLoader([], batch_size=64, shuffle=True)
prepare = {transform}
model = {model}
{between}
model = model.cuda()
criterion = {loss}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(9):
    model.train()
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ENTROPY = "torch.nn.CrossEntropyLoss(label_smoothing=0.1)"


@pytest.fixture
def read(write):
    def made(model, between="", loss=ENTROPY, transform="transforms.RandomResizedCrop(224)"):
        text = SCRIPT.format(model=model, between=between, loss=loss, transform=transform)
        return memest.read_config(write("train.py", text))

    return made


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("timm.create_model('resnet50d', pretrained=True)", "timm/resnet50d"),
        ("create_model('timm/vit_base_patch16_224', drop_path_rate=0.1)",
         "timm/vit_base_patch16_224"),
        ("create_model('resnet18', in_chans=1)", "timm/resnet18?in_chans=1"),
        ("models.resnet50(weights='IMAGENET1K_V2')", "torchvision/resnet50"),
        ("torchvision.models.get_model('vit_b_16')", "torchvision/vit_b_16"),
        ("models.__dict__['resnet18'](pretrained=True)", "torchvision/resnet18"),
        ("models.segmentation.fcn_resnet50(num_classes=21)", "torchvision/fcn_resnet50"),
    ],
)  # fmt: skip
def test_the_model_is_the_librarys_own(read, model, name):
    run = read(model)

    assert run.model == name
    assert (run.options["batch"], run.options["optim"]) == (64, "sgd_momentum")
    assert not run.not_modelled
    assert run.options.get("num_labels") == (21 if "21" in model else None)


def test_a_head_of_the_scripts_own_has_its_classes(read):
    head = "model.fc = torch.nn.Linear(model.fc.in_features, 10)"
    run = read("models.resnet50()", head)
    assert run.options["num_labels"] == 10
    assert not run.not_modelled

    run = read("models.resnet50()", head.replace("10)", "len(names))"))
    assert "number of classes" in " ".join(map(str, run.not_modelled))
    assert not run.setup.unpriced

    run = read("models.resnet50()", head.replace("fc =", "layer4 ="))
    assert run.setup.unpriced


def test_what_cannot_be_told_is_named(read):
    assert "MODEL says it" in " ".join(map(str, read("create_model(name)").not_modelled))
    assert read("create_model('resnet50', **more)").setup.unpriced
    weights = "models.ResNet50_Weights.DEFAULT.transforms()"
    assert read("models.resnet50()", f"prepare = {weights}").model == "torchvision/resnet50"


def test_another_loss_of_few_numbers_leaves_the_verdict(read):
    run = read("models.resnet50()", loss="torch.nn.BCEWithLogitsLoss()")
    assert "loss of its own" in " ".join(map(str, run.not_modelled))
    assert not run.setup.unpriced
    run = read("models.segmentation.fcn_resnet50()", loss="torch.nn.BCEWithLogitsLoss()")
    assert run.setup.unpriced


TWO_PIPELINES = """transforms.Compose([transforms.RandomResizedCrop(176)])
check = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])"""


@pytest.mark.parametrize(
    ("transform", "size"),
    [
        ("transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])", 224),
        ("transforms.Compose([transforms.RandomCrop(32), transforms.Resize(224)])", 224),
        (TWO_PIPELINES, 176),
        ("transforms.Resize((448, 448))", 448),
        ("transforms.RandomCrop(32, padding=4)", 32),
        ("timm.data.create_transform()", None),
    ],
)
def test_images_are_as_large_as_the_transforms_make_them(read, transform, size):
    run = read("models.resnet50()", transform=transform)
    assert run.options.get("image_size") == size
    assert not run.setup.unpriced


@pytest.mark.parametrize("transform", [
    "None", "transforms.Resize(size)", "[transforms.Resize(256), transforms.CenterCrop(224)]",
])  # fmt: skip
def test_a_size_that_cannot_be_told_is_named(read, transform):
    unpriced = read("models.resnet50()", transform=transform).setup.unpriced
    assert "size of images" in " ".join(unpriced)


def test_timms_own_loader_and_optimizer_are_read(write):
    text = """
import timm, torch
from timm.data import create_loader
from timm.optim import create_optimizer_v2
model = timm.create_model("resnet50", num_classes=10).cuda()
optimizer = create_optimizer_v2(model, opt="momentum", lr=0.1)
check = create_loader(other, 224, 512, use_prefetcher=False)
loader = create_loader(rows, input_size=(3, 160, 160), batch_size=32, is_training=True{})
model.train()
for images, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    run = memest.read_config(write("train.py", text.format(", use_prefetcher=False")))
    options = {"batch": 32, "optim": "sgd_momentum", "num_labels": 10}
    assert options == {key: run.options.get(key) for key in options}
    run = memest.read_config(write("train.py", text.format("")))
    assert any("the next batch" in each for each in run.setup.unpriced)
