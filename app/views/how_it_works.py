"""How it works: one real step walked through, phase by phase and category by category."""

from __future__ import annotations

from functools import partial

import streamlit as st

from memest.app import answers, waiting
from memest.app.charts import breakdown_chart, breakdown_rows, timeline_chart
from memest.app.link import linked
from memest.app.question import ExplorerQuestion
from memest.app.words import plain
from memest.events import Category, Phase
from memest.report.layers import PhaseRow, phase_rows
from memest.report.result import Estimate
from memest.report.words import moment_text
from memest.units import format_delta, format_size

__all__ = ["show"]

_PHASES = {
    Phase.LOAD: "The model is moved to the GPU: its weights and buffers stay for the whole run.",
    Phase.BATCH: "The next batch is copied to the GPU: token ids, masks, labels. Small, except for "
    "images and sound.",
    Phase.SCORING: "The model is asked for the log-probabilities of completions, without "
    "gradients: all logits of what is scored at once are there.",
    Phase.FORWARD: "Layer after layer computes its result, and autograd keeps what the backward "
    "pass will need: the activations grow with every layer, with the batch and with the length.",
    Phase.BACKWARD: "From the last layer to the first, activations are used up and freed while "
    "gradients are made. In the first step the gradients are new; the peak is often at its "
    "beginning, when all activations are still there.",
    Phase.CLIP: "The norm of all gradients is taken, and they are scaled.",
    Phase.OPTIMIZER: "Weights are updated. In the first step the optimizer makes its states (two "
    "moments for each weight with Adam), which stay from then on: so the second step needs more "
    "than the first.",
    Phase.ZERO_GRAD: "Gradients are dropped, or set to zero and kept.",
    Phase.EVALUATION: "Batches without gradients: nothing is kept for a backward pass, but "
    "predictions may pile up until they are moved to the host.",
    Phase.GENERATION: "Token after token is generated without gradients: the cache of keys and "
    "values grows with every step, and old and new cache are both there while it grows.",
    Phase.SAVE: "A checkpoint is written: what is sharded may be gathered, tensor by tensor.",
    Phase.RESUME: "A checkpoint is read: copies of what it holds may stand beside what they fill.",
}
_CATEGORIES = {
    Category.PARAMETERS: "Weights, trainable or frozen; tied weights count once.",
    Category.MASTER_WEIGHTS: "fp32 copies of half-precision weights that the optimizer updates.",
    Category.BUFFERS: "Registered buffers of the modules, such as position ids.",
    Category.GRADIENTS: "What .grad holds or will hold. At the peak of a backward pass most of "
    "them may not be made yet.",
    Category.OPTIMIZER_STATES: "Moments and other tensors of the optimizer; from its first step.",
    Category.ACTIVATIONS: "Results of the forward pass that backward needs. Checkpointing keeps "
    "only some of them and computes the others again.",
    Category.AUTOCAST_COPIES: "Half-precision copies of fp32 weights that autocast keeps.",
    Category.TEMPORARIES: "What lives shorter: within forward, backward or the optimizer step.",
    Category.WORKSPACES: "Memory that kernels take behind the operators: cuBLAS, reductions, "
    "attention. PyTorch's own counters see it, a look at the model's code does not.",
    Category.INPUTS: "The batches on the GPU.",
    Category.COMMUNICATION: "Of several GPUs: buckets of gradients, gathered parameters, what "
    "goes into and comes out of reductions.",
    Category.ROUNDING: "What the allocator hands out beyond the request: every block is a "
    "multiple of 512 bytes, and small rests are not split off.",
    Category.REFERENCE: "Weights of a second model that scores answers for DPO, IPO and KTO, "
    "and does not train.",
    Category.RESTING: "Weights and optimizer states of the other of two models that train in turn, "
    "such as actor and critic: they stay while this one trains.",
}
_METHOD = """
1. The model is built from its configuration on PyTorch's **meta device**: modules and shapes, no
   weights, no GPU.
2. Its steps **run for real**: forward, loss, backward, clipping, optimizer, zero_grad. Any number
   of micro-steps and steps is put together from them; three steps are looked at.
3. Every storage's **birth and death** is written down, with its category, module, phase and
   operator. Where CUDA takes another path than meta, PyTorch's dispatcher is told to take CUDA's.
4. Rules, each with its source, add what **kernels allocate behind the operators**.
5. The stream is **replayed through the caching allocator**: blocks, segments, splitting,
   fragmentation.
6. CUDA **context and loaded kernels** are added, with their uncertainty.
"""


def show(question: ExplorerQuestion) -> None:
    """The page."""
    st.markdown("#### From a model's name to a number")
    st.markdown(_METHOD)
    answer = waiting.attempt(partial(answers.estimate, question), f"Working out {question.model}")
    if answer is None:
        return
    rows = phase_rows(answer.timeline, answer.peak_at)
    if answer.calibration is not None:
        st.caption(
            "Phases are shown as replayed; the peaks further down are corrected by a calibration "
            "profile."
        )
    _walk(answer, rows)
    _categories(answer)
    _beyond(answer)


def _walk(answer: Estimate, rows: list[PhaseRow]) -> None:
    st.markdown(f"#### The run of {plain(answer.model.id)}, phase by phase")
    names = [row.label for row in rows]
    label = st.select_slider("Phase", names, **linked("phase", names[0], names))
    place = names.index(label) if label in names else 0
    row, before = rows[place], rows[place - 1] if place else None
    st.markdown(_PHASES[row.phase])
    left, right = st.columns(2)
    for column, name in ((left, "allocated"), (right, "reserved")):
        size = getattr(row, f"{name}_bytes")
        size_before = None if before is None else getattr(before, f"{name}_bytes")
        column.metric(
            f"{name.capitalize()}, highest in this phase",
            format_size(size),
            delta=None
            if size_before is None
            else f"{format_delta(size - size_before)} than in the phase before",
            delta_color="off",
            border=True,
        )
    if row.is_peak:
        st.markdown(f"**The allocated peak is here**: {plain(moment_text(answer))}.")
    _live_categories(row, before)
    chart = timeline_chart(rows, moment_text(answer))
    st.vega_lite_chart(spec=chart.spec, alt=chart.words, key="walk_chart")


def _live_categories(row: PhaseRow, before: PhaseRow | None) -> None:
    """What is alive in a phase, and what changed since the phase before."""
    sizes = {part.category: part.bytes for part in row.breakdown}
    sizes_before = {part.category: part.bytes for part in before.breakdown} if before else {}
    kinds = [kind for kind in Category if sizes.get(kind) or sizes_before.get(kind)]
    st.dataframe(
        [
            {
                "category": kind.value,
                "alive": format_size(sizes.get(kind, 0)),
                "change": ""
                if before is None
                else format_delta(sizes.get(kind, 0) - sizes_before.get(kind, 0)),
            }
            for kind in kinds
        ],
        hide_index=True,
        height="content",
        alt=f"Alive in {row.label}: "
        + ", ".join(f"{kind.value} {format_size(sizes.get(kind, 0))}" for kind in kinds),
    )


def _categories(answer: Estimate) -> None:
    st.markdown("#### What is alive at the peak, category by category")
    chart = breakdown_chart([("this run", answer)])
    st.vega_lite_chart(spec=chart.spec, alt=chart.words, key="categories_chart")
    total = answer.peak.allocated_bytes
    for row in answer.breakdown:
        st.markdown(
            f"- **{row.category.value.capitalize()}: {format_size(row.bytes)}** "
            f"({row.bytes / total:.1%}). {_CATEGORIES[row.category]}"
        )
    st.markdown(
        f"Together **{format_size(total)}** ({total:,} bytes): the allocated peak, exactly"
        + ("." if answer.calibration is None else ", as the calibration corrects it.")
    )


def _beyond(answer: Estimate) -> None:
    st.markdown("#### From allocated to what nvidia-smi shows")
    peak = answer.peak
    cache, context = breakdown_rows(answer)[-2:]
    st.markdown(
        f"- **Allocated: {format_size(peak.allocated_bytes)}**, tensors in blocks.\n"
        f"- **Reserved: {format_size(peak.reserved_bytes)}**, the segments these blocks lie in: "
        f"{cache['size']} are cached or fragmented.\n"
        f"- **Device: {format_size(peak.device_bytes)}**, with {context['size']} of CUDA context "
        f"and kernels. The range: {answer.interval.basis}."
    )
