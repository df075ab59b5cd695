"""What is asked of one model: a run, the GPU whose kernels it takes, what will be asked next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memest.config.setup import Setup
from memest.profiles.axes import Sizes, resized, sizes_of
from memest.profiles.known_profiles import StepProfile
from memest.workspaces.operator_call import GpuTraits

__all__ = ["Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question of which the model's side is known: sizes, task, attention.

    Attributes:
        request: the setup as the user gave it.
        setup: with what the model decides filled in.
        gpu: whose kernels run.
        profile: what is known of the model's steps under the part of the setup that changes them.
        vary: sizes (``batch``, ``seq_len``, ...) that further questions will change, worth a few
            more traces now; None where nobody will ask again near these sizes.
    """

    request: Setup
    setup: Setup
    gpu: GpuTraits
    profile: StepProfile
    vary: tuple[str, ...] | None = ()

    @property
    def sizes(self) -> Sizes:
        """Of the batch."""
        return sizes_of(self.setup)

    def at_sizes(self, sizes: Sizes) -> Question:
        """The same question at other sizes, for which the model may be built otherwise."""
        setup = resized(self.setup, sizes)
        request = replace(self.request, adapter=setup.adapter)
        if sizes.get("image_size") != self.sizes.get("image_size"):
            request = replace(request, image_size=setup.image_size)
        return replace(self, request=request, setup=setup)
