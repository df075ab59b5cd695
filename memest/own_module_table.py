"""Options for modules of one's own: what they are fed, and what they are trained on."""

from __future__ import annotations

from memest.option import Kind, Option, Panel

__all__ = ["OWN_MODULE", "OWN_MODULE_NAMES"]

OWN_MODULE: tuple[Option, ...] = (
    Option(
        name="inputs",
        flags=("--input",),
        help="A tensor of the batch of your own module: x:float32[B,3,224,224]. B is --batch, S is "
        "--seq-len, other names are bound by --dim. Repeatable.",
        panel=Panel.OWN_MODULE,
        kind=Kind.LIST,
        metavar="SPEC",
    ),
    Option(
        name="dims",
        flags=("--dim",),
        help="What a letter of --input is: H=224. Repeatable.",
        panel=Panel.OWN_MODULE,
        kind=Kind.LIST,
        metavar="NAME=N",
    ),
    Option(
        name="loss",
        flags=("--loss",),
        help="The loss where your module returns none: cross_entropy, mse, ... or "
        "package.module:function, called with (outputs, batch).",
        panel=Panel.OWN_MODULE,
        metavar="LOSS",
    ),
    Option(
        name="step_fn",
        flags=("--step",),
        help="package.module:function, called as step(model, batch), which returns the loss: in "
        "place of forward and loss.",
        panel=Panel.OWN_MODULE,
        metavar="STEP",
    ),
    Option(
        name="model_args",
        flags=("--model-arg",),
        help="An argument of your factory or class: depth=12. Repeatable.",
        panel=Panel.OWN_MODULE,
        kind=Kind.LIST,
        metavar="NAME=VALUE",
    ),
)
"""Arguments of an estimate, and no part of the training setup."""

OWN_MODULE_NAMES = frozenset(option.name for option in OWN_MODULE)
