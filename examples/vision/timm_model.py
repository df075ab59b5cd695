"""A classifier of timm, without its weights.

memest fits examples.vision.timm_model:build --dim H=224 --batch 64 --fp16 --loop plain --gpu t4
"""

try:
    import timm
except ImportError as error:
    raise ImportError("this example needs timm: pip install timm") from error


def build(name="vit_base_patch16_224", classes=1000):
    """The module, a batch (B is --batch, H is --dim), and the loss."""
    model = timm.create_model(name, pretrained=False, num_classes=classes)
    return model, ("x:float32[B,3,H,H]", "y:int64[B]"), "cross_entropy"
