"""Pages on how models, cards and sizes are named."""

from __future__ import annotations

from memest.cli.topic import Topic

__all__ = ["TOPICS_OF_NAMES"]

TOPICS_OF_NAMES: dict[str, Topic] = {
    "naming-models": Topic(
        "how a model is named",
        """
bert-large-uncased | a name of the catalogue (memest models)
meta-llama/Llama-3.1-8B | an id of the Hugging Face hub
./my-model, ./config.json | a folder, or the configuration itself
timm/resnet50, torchvision/vit_b_16 | a model of that library, built by its own function
package.module:factory | anything that returns a torch.nn.Module (memest help diffusers)
'gpt2?n_layer=4&n_embd=256' | any of them with values of its configuration changed

A configuration of a run that names its model may stand in its place: memest estimate run.yaml,
memest estimate train.py, or behind -- a launch command: memest fits --gpu t4 -- torchrun
--nproc-per-node 2 train.py.
""",
    ),
    "naming-gpus": Topic(
        "how a card is named",
        """
rtx-4090, a100-80gb, 'NVIDIA L4' | a name of the list (memest gpus), or what the driver prints
8xh100 | eight of them
24GB | any card with so much memory
colab, colab l4, kaggle 2xT4 | a card of that service; colab alone is the T4 that is free
local, local:1 | a card of this machine
't4 l4 a100' | three cards, as three times --gpu

A card that is not in the list: --gpu-memory 24GiB, what PyTorch can have of it.
""",
        "gpu card cards colab kaggle",
    ),
    "sizes": Topic(
        "how sizes of memory are written",
        """
22GiB, 1343MiB, 512KiB | binary units, as torch and nvidia-smi count
24GB | decimal, as on the box of a GPU
1048576 | bytes
""",
        "units gib gb",
    ),
}
"""By name."""
