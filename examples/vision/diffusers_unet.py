"""A UNet of diffusers on latents, with the step of DDPM.

memest fits examples.vision.diffusers_unet:build --step examples.vision.diffusers_unet:denoise \
    --dim H=64 --batch 8 --fp16 --loop plain --gpu t4
"""

import torch

try:
    from diffusers import UNet2DModel
except ImportError as error:
    raise ImportError("this example needs diffusers: pip install diffusers") from error


def build(channels=4):
    """The module, and a batch (B is --batch, H is --dim): latents, noise and times."""
    unet = UNet2DModel(
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(128, 256, 256, 512),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )
    latents = f"[B,{channels},H,H]"
    return unet, (f"x:float32{latents}", f"noise:float32{latents}", "t:int64[B]")


def denoise(model, batch):
    """Noise is added, and predicted."""
    predicted = model(batch["x"] + batch["noise"], batch["t"]).sample
    return torch.nn.functional.mse_loss(predicted, batch["noise"])
