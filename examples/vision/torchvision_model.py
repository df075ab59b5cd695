"""A classifier of torchvision, without its weights.

memest fits examples.vision.torchvision_model:build --dim H=224 --batch 64 --fp16 --loop plain \
    --gpu t4
"""

try:
    from torchvision.models import get_model
except ImportError as error:
    raise ImportError("this example needs torchvision: pip install torchvision") from error


def build(name="resnet50", classes=1000):
    """The module, a batch (B is --batch, H is --dim), and the loss."""
    model = get_model(name, weights=None, num_classes=classes)
    return model, ("x:float32[B,3,H,H]", "y:int64[B]"), "cross_entropy"
