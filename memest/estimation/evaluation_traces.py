"""Evaluations and generations of one model, traced once for all GPUs that run the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memest.config.setup import Setup
from memest.estimation.question import Question
from memest.estimation.tracer import Tracer
from memest.events import Trace
from memest.profiles.axes import gathering_ranks
from memest.profiles.cache import digest_of
from memest.profiles.known_profiles import KnownProfiles, StepProfile, asks_for_gpu
from memest.workspaces.attention_choice import choose_backend
from memest.workspaces.operator_call import GpuTraits

__all__ = ["EvaluationTraces"]

_MAX_TRACES = 16


class EvaluationTraces:
    """What follows the steps of one model.

    Args:
        tracer: of the model.
        known_profiles: where traces are kept.
    """

    def __init__(self, tracer: Tracer, known_profiles: KnownProfiles) -> None:
        self._tracer = tracer
        self._known_profiles = known_profiles
        self._traces: dict[tuple[str, str], Trace] = {}

    def of(self, question: Question, key_parts: Mapping[str, Any]) -> Trace:
        """An evaluation or generation, traced once for each batch and choice of kernels.

        Args:
            question: its setup is that of the evaluation.
            key_parts: what it depends on beside the model and the batch.
        """
        profile, gpu = question.profile, question.gpu
        asked: dict[str, Any] = {"sizes": question.sizes, **key_parts}
        generates = "generation" in key_parts
        ranks = gathering_ranks(question.setup.distributed)
        if ranks is not None and not generates:
            asked["ranks"] = ranks
        own = self._of_gpu(question.setup, gpu)
        same = digest_of([profile.setup.to_dict(), asked, own[0]])
        key = same, own[1]
        trace = self._traces.get(key)
        if trace is None:
            about = {**asked, "gpu": "; ".join(own)}
            trace = self._known(profile, about, same, gpu)
            if trace is None:
                trace = self._tracer.evaluation(question, generates=generates, ranks=ranks)
                self._known_profiles.keep_evaluation(profile, about, trace)
            while len(self._traces) >= _MAX_TRACES:
                self._traces.pop(next(iter(self._traces)))
            self._traces[key] = trace
        return trace

    def _of_gpu(self, setup: Setup, gpu: GpuTraits) -> tuple[str, str]:
        """What of a GPU decides about a trace: whatever its kernels are, and for the kernels.

        Code that is not known may ask for anything of it.
        """
        if asks_for_gpu(setup) or not self._tracer.is_reproducible:
            return repr(gpu), ""
        software = f"torch {gpu.torch[0]}.{gpu.torch[1]}, deterministic {gpu.deterministic}"
        return software, f"capability {gpu.capability[0]}.{gpu.capability[1]}"

    def _known(
        self, profile: StepProfile, about: dict[str, Any], same: str, gpu: GpuTraits
    ) -> Trace | None:
        """A trace with the kernels of a GPU: another GPU's, or one that is stored."""
        for (question, _), trace in self._traces.items():
            if question == same and _takes_kernels(trace, gpu, profile.setup):
                self._known_profiles.keep_evaluation(profile, about, trace)
                return trace
        return self._known_profiles.evaluation(profile, about)


def _takes_kernels(trace: Trace, gpu: GpuTraits, setup: Setup) -> bool:
    """Whether a GPU takes the attention kernels that a trace has."""
    return all(
        choose_backend(call, gpu, setup.sdpa_backend).value == backend
        for call, backend in trace.attention_choices
    )
