"""TRL's own Python without its Triton kernels: on meta tensors, and on real ones of the CPU."""

from memest.trace.cuda.no_triton import Library


def _library(device):
    """TRL, which takes a device for CUDA, allocates what it would there and launches nothing."""
    return Library(
        "trl", "trl.",
        (('device.type in ("cuda", "xpu")', f'device.type in ("cuda", "{device}")'),
         ("is_triton_available()", "True"),
         *_OTHERWISE[device]),
    )  # fmt: skip


_OTHERWISE = {
    # CUDA multiplies halves into float32 without copies
    "cpu": (("acc.addmm_(a.float(), b.float())", "pass"),),
    # meta tensors do not carry autocast's own key
    "meta": (
        ('acc.device.type == "cuda"', 'acc.device.type == "meta"'),
        ("torch.get_autocast_dtype(device.type)", 'torch.get_autocast_dtype("cuda")'),
        ("torch.is_autocast_enabled(device.type)", 'torch.is_autocast_enabled("cuda")'),
    ),
}
TRL = _library("meta")
TRL_ON_CPU = _library("cpu")
