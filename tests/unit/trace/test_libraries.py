"""``timm/NAME`` and ``torchvision/NAME``; a small library stands in for timm."""

from __future__ import annotations

import sys
import textwrap

import pytest

import memest
from memest.catalog.resolve import resolve_model
from memest.errors import (
    ConfigError,
    MissingDependencyError,
    ModelLoadError,
    UnknownModelError,
)

TIMM = """
    from types import SimpleNamespace
    import torch
    from timm.layers import config

    MODELS = {"small_net": (3, 32, 32), "grey_net": (1, 16, 16), "wide_net": (3, 32, 64)}

    class Net(torch.nn.Module):
        def __init__(self, channels, num_classes=1000, width=8, deep=False, read=False):
            super().__init__()
            width = int((torch.arange(2) * width)[1].item()) if read else width
            self.fused = config._USE_FUSED_ATTN
            self.conv = torch.nn.Conv2d(channels, width, 3)
            self.more = torch.nn.Conv2d(width, width, 3) if deep else torch.nn.Identity()
            self.head = torch.nn.Linear(width, num_classes)

        def forward(self, images):
            return self.head(self.more(self.conv(images)).mean((2, 3)))

    def is_model(name):
        return name in MODELS

    def list_models():
        return list(MODELS)

    def get_pretrained_cfg(name, allow_unregistered=True):
        return SimpleNamespace(input_size=MODELS[name]) if name in MODELS else None

    def create_model(name, pretrained=False, **arguments):
        return Net(MODELS[name.partition(".")[0]][0], **arguments)
"""
OPTIONS = {"loop": "plain", "gpu": "rtx-3090", "batch": 4}


def row(answer, category):
    return next((row.bytes for row in answer.breakdown if row.category == category), 0)


def inputs(answer):
    return row(answer, "inputs")


@pytest.fixture
def timm(tmp_path, monkeypatch):
    """A library of three models, called timm."""
    layers = tmp_path / "timm" / "layers"
    layers.mkdir(parents=True)
    (tmp_path / "timm" / "__init__.py").write_text(textwrap.dedent(TIMM))
    (layers / "__init__.py").write_text("")
    (layers / "config.py").write_text("_USE_FUSED_ATTN = 1\n")
    for name in [each for each in sys.modules if each.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "timm"]:
        del sys.modules[name]


def test_a_name_is_resolved_without_the_library():
    source = resolve_model("timm/resnet50?num_classes=10")

    assert source.library == ("timm", "resnet50")
    assert source.arguments == (("num_classes", 10),)
    assert source.id == "timm/resnet50?num_classes=10"


@pytest.mark.usefixtures("timm")
class TestBatch:
    def test_the_library_says_what_it_is_fed(self):
        answer = memest.estimate("timm/small_net", **OPTIONS)

        assert answer.model.parameters == 8 * 3 * 9 + 8 + 1000 * 8 + 1000
        assert answer.setup.image_size == 32
        assert answer.setup.task == "image-classification"
        assert inputs(answer) >= 4 * (3 * 32 * 32 * 4 + 8)

    def test_images_of_another_size_and_of_other_channels(self):
        grey = memest.estimate("timm/grey_net", image_size=48, **OPTIONS)

        assert grey.setup.image_size == 48
        assert inputs(grey) == 4 * (48 * 48 * 4 + 8)

    def test_images_come_in_the_weights_half_precision_where_nothing_casts(self):
        """A convolution refuses float32 images beside bfloat16 weights; autocast casts them."""
        pure = memest.estimate("timm/small_net", dtype="bfloat16", **OPTIONS)
        mixed = memest.estimate("timm/small_net", bf16=True, **OPTIONS)

        images = 4 * 3 * 32 * 32
        assert inputs(mixed) - inputs(pure) == images * (4 - 2)

    @pytest.mark.parametrize(("letter", "size"), [("H", 48), ("W", 32)])
    def test_a_letter_is_refused_where_the_library_says_the_batch(self, letter, size):
        with pytest.raises(ConfigError, match=rf"--dim {letter}=48: .* --image-size {size} "):
            memest.estimate("timm/small_net", dims={letter: 48}, **OPTIONS)

    def test_classes_by_argument_and_by_option(self):
        by_argument = memest.estimate("timm/small_net?num_classes=10", **OPTIONS)
        by_option = memest.estimate("timm/small_net", num_labels=10, **OPTIONS)

        assert by_argument.peak == by_option.peak
        assert by_argument.model.parameters == 8 * 3 * 9 + 8 + 10 * 8 + 10

    def test_two_models_do_not_share_what_is_kept(self):
        small = memest.estimate("timm/small_net", **OPTIONS)
        wide = memest.estimate("timm/small_net?width=16", **OPTIONS)

        assert wide.model.parameters > small.model.parameters
        assert wide.peak.allocated_bytes > small.peak.allocated_bytes

    def test_a_constructor_may_read_a_row_of_numbers(self):
        assert memest.estimate("timm/small_net?read=true", **OPTIONS).model.parameters > 0

    def test_a_tag_names_the_same_network(self):
        assert memest.estimate("timm/small_net.in1k", **OPTIONS).model.parameters > 0

    def test_attention_is_not_fused_where_torch_had_none(self):
        from memest.config.setup import Setup
        from memest.config.software import Software
        from memest.trace.model.libraries import build_library_model

        source = resolve_model("timm/small_net")
        for release, fused in (((1, 12), 0), ((2, 1), 1), (None, 1)):
            model = build_library_model(source, Setup(software=Software(torch=release)), {})
            assert model.built.model.fused == fused


@pytest.mark.usefixtures("timm")
def test_channels_last_spare_a_convolution_the_copies():
    options = OPTIONS | {"batch": 64, "precision": "fp16"}
    first = memest.estimate("timm/small_net?width=64&deep=true", **options)
    last = memest.estimate("timm/small_net?width=64&deep=true", channels_last=True, **options)

    assert last.peak.reserved_bytes < first.peak.reserved_bytes
    assert inputs(last) == inputs(first)
    assert last.to_dict()["setup"]["channels_last"]


@pytest.mark.usefixtures("timm")
class TestRefusals:
    def test_an_unknown_name_has_its_nearest(self):
        with pytest.raises(UnknownModelError, match="timm/small_net"):
            memest.estimate("timm/smal_net", **OPTIONS)

    def test_an_argument_that_it_does_not_take(self):
        with pytest.raises(ConfigError, match="depht"):
            memest.estimate("timm/small_net?depht=3", **OPTIONS)

    def test_classes_that_contradict_each_other(self):
        with pytest.raises(ConfigError, match="num_classes=5 and --num-labels 10"):
            memest.estimate("timm/small_net?num_classes=5", num_labels=10, **OPTIONS)

    def test_another_task(self):
        with pytest.raises(ConfigError, match="image-classification"):
            memest.estimate("timm/small_net", task="image-segmentation", **OPTIONS)

    def test_images_that_are_not_square(self):
        with pytest.raises(ModelLoadError, match="32 x 64"):
            memest.estimate("timm/wide_net", **OPTIONS)


def test_a_library_that_is_missing_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr("memest.config.packages.is_there", lambda name: name != "torchvision")

    with pytest.raises(MissingDependencyError, match=r"memest-gpu\[vision\]"):
        memest.estimate("torchvision/resnet50", **OPTIONS)


class TestTorchvision:
    @pytest.fixture(autouse=True)
    def models(self):
        pytest.importorskip("torchvision.models", exc_type=Exception)

    def test_a_classifier(self):
        answer = memest.estimate("torchvision/resnet18", **OPTIONS)

        assert answer.model.parameters == 11_689_512
        assert answer.setup.image_size == 224

    def test_a_network_that_segments_has_a_class_for_each_pixel(self):
        answer = memest.estimate("torchvision/lraspp_mobilenet_v3_large", image_size=64, **OPTIONS)

        assert answer.setup.task == "image-segmentation"
        assert inputs(answer) == 4 * 64 * 64 * (3 * 4 + 8)

    def test_a_detector_is_refused(self):
        with pytest.raises(ModelLoadError, match="boxes"):
            memest.estimate("torchvision/maskrcnn_resnet50_fpn", **OPTIONS)
