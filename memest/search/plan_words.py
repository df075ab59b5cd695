"""Why each decision of a plan is as it is, and how a plan is written as options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memest.config.kinds import Dtype, Loop, Method
from memest.config.optimizers import TRAINER_NAMES
from memest.config.rollouts import Engine, Rollouts
from memest.config.setup import Attention, Precision
from memest.config.spelling import command_words
from memest.errors import MissingDependencyError
from memest.events import Category
from memest.report.findings import PlanStep
from memest.report.result import Verdict
from memest.search.combos import (
    BY_SFT_TRAINER,
    LOSSES,
    SAME_TRAINING,
    Candidate,
    Finder,
    Freedom,
)
from memest.units import format_size

__all__ = ["arguments_of", "changed_training", "own_arguments_of", "steps_of", "trainer_of"]


def changed_training(candidate: Candidate, finder: Finder, freedom: Freedom) -> tuple[str, ...]:
    """What makes the training another one than asked for: precision, optimizer."""
    request = finder.probe.profile.setup
    combo = candidate.combo
    changes = []
    if combo.precision is not request.precision and freedom is Freedom.KEPT:
        changes.append(f"{combo.precision.value} in place of {request.precision.value}")
    if combo.optim not in (request.optimizer, SAME_TRAINING.get(request.optimizer)):
        changes.append(f"{combo.optim} in place of {request.optimizer}")
    return tuple(changes)


_CONFIGS = {
    Method.IPO: "DPOConfig",
    Method.SIMPO: "CPOConfig",
    Method.REWARD: "RewardConfig",
    Method.ONLINE_DPO: "OnlineDPOConfig",
}
"""TRL's classes that are not called what the method is."""


def trainer_of(candidate: Candidate) -> str:
    """Whose settings a plan is written in; ``memest`` where the loop has none."""
    setup = candidate.estimate.setup
    method = setup.method
    if setup.loop is not Loop.TRAINER:
        return "memest"
    if candidate.combo.loss == BY_SFT_TRAINER or setup.fused_loss.startswith("trl-"):
        return "SFTConfig"
    if method.is_supervised:
        return "TrainingArguments"
    return _CONFIGS.get(method, f"{method.upper()}Config")


def own_arguments_of(candidate: Candidate) -> tuple[str, ...]:
    """What memest is told of a plan and its trainer's configuration is not."""
    combo = candidate.combo
    words = []
    if trainer_of(candidate) != "memest":
        if combo.optim not in TRAINER_NAMES:
            words.append(f"--optim={combo.optim}")
        if combo.checkpointing == "selective":
            words.append("--checkpointing=selective")
    if combo.attention is not Attention.AUTO:
        words.append(f"--attn_implementation={combo.attention.value}")
    if combo.loss == BY_SFT_TRAINER:
        words += command_words("advise", "MODEL", LOSSES[combo.loss])[3:]
        words += [f"--dtype={dtype}"] if (dtype := _weights_named(candidate)) else []
    return tuple(words)


def _weights_named(candidate: Candidate) -> str:
    """The dtype that SFTTrainer has to be told, for it loads a model by name in float32.

    Empty where that is what the plan is priced with, and where a quantised base is the user's own.
    """
    setup = candidate.estimate.setup
    if setup.loaded_dtype is Dtype.FLOAT32 or setup.quantization is not None:
        return ""
    return setup.loaded_dtype.value


def arguments_of(candidate: Candidate) -> tuple[str, ...]:
    """The plan as options that the trainer's configuration and memest both take."""
    combo = candidate.combo
    trainer = trainer_of(candidate)
    is_trl = trainer.endswith("Config")  # has both on unless it is told
    words = [f"--per_device_train_batch_size={candidate.batch}"]
    if candidate.grad_accum > 1:
        words.append(f"--gradient_accumulation_steps={candidate.grad_accum}")
    if combo.checkpointing == "full":
        words.append("--gradient_checkpointing")
    elif combo.checkpointing == "selective":
        words += ["--checkpointing=selective"] * (trainer == "memest")
    elif combo.checkpointing == "none":
        words += ["--gradient_checkpointing=false"] * is_trl
    else:
        interval = combo.checkpointing.partition(":")[2]
        words.append("--gradient_checkpointing")
        words.append(f'--gradient_checkpointing_kwargs={{"every_n_layers": {interval}}}')
    if combo.precision is not Precision.FP32:
        words.append(f"--{combo.precision.value}")
    elif is_trl:
        words.append("--bf16=false")
    if trainer == "memest" or combo.optim in TRAINER_NAMES:
        words.append(f"--optim={combo.optim}")
    rollouts = candidate.estimate.setup.rollouts
    if rollouts is not None and rollouts.engine is Engine.VLLM:
        words.append(f"--vllm_gpu_memory_utilization={rollouts.engine_share:g}")
        if rollouts.engine_sleeps:
            words.append("--vllm_enable_sleep_mode")
        if rollouts.engine_gpus > 1:
            words.append(f"--vllm_tensor_parallel_size={rollouts.engine_gpus}")
    if combo.fsdp:
        words.append(f"--fsdp={combo.fsdp}")
    if combo.loss and combo.loss != BY_SFT_TRAINER:
        words += (f"--{name}" for name in LOSSES[combo.loss])
    return tuple(words)


def steps_of(
    candidate: Candidate, finder: Finder, candidates: Sequence[Candidate], freedom: Freedom
) -> tuple[PlanStep, ...]:
    """The decisions of a plan in the order in which they are taken, each with its reason."""
    steps = [_micro_batch(candidate, finder), _accumulation(candidate, finder)]
    steps.append(_checkpointing(candidate, finder, candidates))
    precision = _open_precision if freedom is Freedom.OPEN else _precision
    steps.append(precision(candidate, finder, candidates))
    request = finder.probe.profile.setup
    if candidate.combo.optim != request.optimizer:
        steps.append(_optimizer(candidate, finder))
    if candidate.combo.attention is not request.attn_implementation:
        steps.append(_attention(candidate, finder))
    if candidate.combo.fsdp:
        steps.append(_sharding(candidate, finder))
    if candidate.combo.loss:
        steps.append(_loss(candidate, finder))
    if request.rollouts is not None and request.rollouts.engine is Engine.VLLM:
        steps.append(_engine(candidate, request.rollouts, finder))
    return tuple(steps)


def _need(candidate: Candidate) -> str:
    """What a candidate needs of the GPU, in words."""
    fit = candidate.estimate.gpu
    assert fit is not None
    need, have = format_size(fit.device_bytes), format_size(fit.usable_bytes)
    if candidate.verdict is Verdict.FITS:
        return f"needs {need} of {have}"
    if candidate.verdict is Verdict.RELEASES_CACHE:
        return f"needs {need} of {have} and runs by releasing cache"
    if candidate.verdict is Verdict.CANNOT_SAY:
        return f"needs {need} of {have}, or more: {fit.reason}"
    if fit.headroom_bytes < 0:
        return f"needs {need}, {format_size(-fit.headroom_bytes)} more than there is"
    if candidate.verdict is Verdict.TIGHT:
        high = format_size(candidate.estimate.interval.high_bytes)
        return f"needs {need} of {have}, but may take up to {high}"
    return f"needs {need} of {have} and runs out of memory"


def _micro_batch(candidate: Candidate, finder: Finder) -> PlanStep:
    batch, steps = candidate.batch, candidate.grad_accum
    value = str(batch)
    if candidate.verdict is Verdict.DOES_NOT_FIT:
        why = f"even {batch} {_need(candidate)}"
        if steps == 1 and batch > 1:
            why = f"all {batch} at once, with no gradients kept between parts, {_need(candidate)}"
        return PlanStep(option="micro-batch", value=value, why=why)
    if steps == 1:
        reason = f"the whole effective batch at once {_need(candidate)}"
        return PlanStep(option="micro-batch", value=value, why=reason)
    larger = finder.larger(candidate)
    if batch * steps == finder.samples and larger.verdict is Verdict.FITS:
        reason = (
            f"the largest that fits and divides {finder.samples} exactly; it {_need(candidate)}"
        )
    else:
        less = "one accumulation step less means"
        if larger.grad_accum < steps - 1:
            less = f"the next that divides {finder.samples} is"
        reason = (
            f"fills the card: it {_need(candidate)}; {less} {larger.batch}, which {_need(larger)}"
        )
    return PlanStep(option="micro-batch", value=value, why=reason)


def _accumulation(candidate: Candidate, finder: Finder) -> PlanStep:
    steps, samples = candidate.grad_accum, finder.samples
    if steps == 1:
        return PlanStep(option="accumulation", value="1", why="not needed")
    product, ranks = candidate.batch * steps, candidate.estimate.setup.distributed.data_ranks
    text = f"{steps} x {candidate.batch} = {product} samples"
    text += f" on each of {ranks} GPUs" if ranks > 1 else ""
    if product != samples:
        text += f", {product - samples} above the {samples} asked for"
    work = finder.probe.work(**candidate.changes()).total
    single_step = finder.probe.work(**{**candidate.changes(), "grad_accum": 1}).total
    launches = work.launches / max(single_step.launches, 1)
    reason = f"{text}; {launches:.1f} times the launches of a step with one"
    gradient_bytes = _gradients(candidate)
    if gradient_bytes:
        reason += f", {format_size(gradient_bytes)} of gradients alive at the peak"
    return PlanStep(option="accumulation", value=str(steps), why=reason)


def _gradients(candidate: Candidate) -> int:
    rows = candidate.estimate.breakdown
    return sum(row.bytes for row in rows if row.category is Category.GRADIENTS)


def _checkpointing(
    candidate: Candidate, finder: Finder, candidates: Sequence[Candidate]
) -> PlanStep:
    combo = candidate.combo
    changes = candidate.changes()
    if combo.checkpointing == "none":
        reason = "recomputing would only cost time"
        if candidate.grad_accum == 1 and candidate.verdict is Verdict.FITS:
            reason = "not needed"
        return PlanStep(option="checkpointing", value="none", why=reason)
    flops = finder.probe.work(**changes).total.flops
    try:
        plain_flops = finder.probe.work(**{**changes, "checkpointing": "none"}).total.flops
    except MissingDependencyError:
        reason = "recomputes layers; without it nothing is known while torch is not installed"
        return PlanStep(option="checkpointing", value=combo.checkpointing, why=reason)
    reason = f"recomputes layers, {flops / max(plain_flops, 1):.2f} times the operations"
    without = replace(combo, checkpointing="none")
    rivals = [c for c in candidates if c.combo == without and c.verdict is candidate.verdict]
    if rivals and candidate.verdict is not Verdict.DOES_NOT_FIT:
        best_batch = max(c.batch for c in rivals)
        reason += f"; without it the largest micro-batch is {best_batch}"
    else:
        counterpart = finder.at(without, candidate.batch, candidate.grad_accum)
        reason += f"; without it {_need(counterpart)}"
    return PlanStep(option="checkpointing", value=combo.checkpointing, why=reason)


def _precision(candidate: Candidate, finder: Finder, candidates: Sequence[Candidate]) -> PlanStep:
    precision = finder.probe.profile.setup.precision
    combo = candidate.combo
    if combo.precision is precision:
        return PlanStep(option="precision", value=precision.value, why="as the run has it")
    requested_combo = replace(combo, precision=precision)
    rivals = [c for c in candidates if c.combo == requested_combo and c.verdict is Verdict.FITS]
    if rivals:
        best_batch = max(c.batch for c in rivals)
        reason = (
            f"any precision was allowed; with {precision.value} the largest micro-batch is "
            f"{best_batch}"
        )
    else:
        reason = (
            f"changes the training; with {precision.value} even 1 "
            f"{_need(finder.at(requested_combo, 1))}"
        )
    return PlanStep(option="precision", value=combo.precision.value, why=reason)


_COSTS = {
    Precision.BF16: "products are rounded to 8 bits, with float32's range",
    Precision.FP16: (
        "products are rounded to 11 bits, and its smaller range is watched by a gradient scaler, "
        "which leaves out steps that overflow"
    ),
}
"""What an autocast costs; weights and optimizer stay in float32."""


def _open_precision(
    candidate: Candidate, finder: Finder, candidates: Sequence[Candidate]
) -> PlanStep:
    """The step where nobody named a precision: what it gains and costs against the other one."""
    chosen, probe = candidate.combo.precision, finder.probe
    others = [
        c
        for c in candidates
        if c.combo.precision is not chosen and c.combo.optim == candidate.combo.optim
    ]
    if not others:
        what = "this GPU has none that is faster"
        if probe.spec.has_fast_fp16:
            what = "autocast has no use for these weights"
        return PlanStep(option="precision", value=chosen.value, why=f"not named, and {what}")
    fitting = [c for c in others if c.verdict is Verdict.FITS]
    if fitting:
        seconds = {id(c): probe.seconds_per_sample(**c.changes()) for c in (candidate, *fitting)}
        best = min(fitting, key=lambda c: seconds[id(c)])
        ratio = seconds[id(candidate)] / seconds[id(best)]
        recomputing = "" if best.combo.checkpointing == "none" else ", recomputing,"
        time = "training, without the writing," if probe.untimed() else "time"
        reason = (
            f"not named: {ratio:.2f} times the {time} of the fastest that fits in "
            f"{best.combo.precision.value}, whose micro-batch{recomputing} is {best.batch}"
        )
    else:
        closest = max(others, key=lambda c: c.headroom_bytes)
        reason = f"not named: in {closest.combo.precision.value} {closest.batch} {_need(closest)}"
    if chosen in _COSTS:
        reason += f"; {_COSTS[chosen]} (--precision fp32 keeps float32)"
    return PlanStep(option="precision", value=chosen.value, why=reason)


def _optimizer(candidate: Candidate, finder: Finder) -> PlanStep:
    optim = finder.probe.profile.setup.optimizer
    combo = candidate.combo
    counterpart = finder.at(replace(combo, optim=optim), candidate.batch, candidate.grad_accum)
    states = {
        name: c.estimate.bytes_of(Category.OPTIMIZER_STATES)
        for name, c in ((combo.optim, candidate), (optim, counterpart))
    }
    same = SAME_TRAINING.get(optim) == combo.optim
    reason = "computes the same" if same else "changes the training"
    own_size, other_size = format_size(states[combo.optim]), format_size(states[optim])
    if own_size != other_size:
        reason += f"; {own_size} of states in place of {other_size}"
    reason += f"; with {optim} this plan {_need(counterpart)}"
    return PlanStep(option="optimizer", value=combo.optim, why=reason)


def _attention(candidate: Candidate, finder: Finder) -> PlanStep:
    attention = finder.probe.profile.setup.attn_implementation
    combo = candidate.combo
    counterpart = finder.at(
        replace(combo, attention=attention), candidate.batch, candidate.grad_accum
    )
    reason = f"computes the same without keeping the scores; with {attention.value} this plan "
    reason += _need(counterpart)
    return PlanStep(option="attention", value=combo.attention.value, why=reason)


def _sharding(candidate: Candidate, finder: Finder) -> PlanStep:
    counterpart = finder.at(
        replace(candidate.combo, fsdp=""), candidate.batch, candidate.grad_accum
    )
    ranks = candidate.estimate.setup.distributed.data_ranks
    reason = (
        f"weights, gradients and states are cut among the {ranks} GPUs, in place of whole on each, "
        f"with which this plan {_need(counterpart)}"
    )
    return PlanStep(option="sharding", value=f"FSDP2 {candidate.combo.fsdp}", why=reason)


def _loss(candidate: Candidate, finder: Finder) -> PlanStep:
    counterpart = finder.at(
        replace(candidate.combo, loss=""), candidate.batch, candidate.grad_accum
    )
    reason = f"computes the same without all logits; with them this plan {_need(counterpart)}"
    if candidate.combo.loss == BY_SFT_TRAINER:
        reason += (
            ". SFTTrainer of TRL 1.15 and later does so unasked, and the Trainer has no setting "
            "for it: its use_liger_kernel does the like, and could not be priced here"
        )
        if dtype := _weights_named(candidate):
            reason += (
                f'. Priced are weights as model_init_kwargs={{"dtype": "{dtype}"}} loads them: '
                "unasked it loads a model by name in float32"
            )
    return PlanStep(option="loss", value=candidate.combo.loss, why=reason)


def _engine(candidate: Candidate, asked: Rollouts, finder: Finder) -> PlanStep:
    """The step of an engine on the GPU: what it takes, and how much it could take."""
    share, most = asked.engine_share, candidate.largest_engine_share
    why = "TRL's default" if _is_default(asked) else "as asked for"
    if candidate.combo.engine_sleeps:
        awake = replace(candidate.combo, engine_sleeps=False)
        before = finder.at(awake, candidate.batch, candidate.grad_accum)
        reason = (
            f"its {share:g} is given back while the model trains; awake this plan {_need(before)}. "
            "vLLM is woken for every generation, which takes time"
        )
        return PlanStep(option="engine", value="asleep", why=reason)
    if candidate.engine_share is not None:
        before = finder.with_share(candidate, share)
        whose = "of TRL's default" if _is_default(asked) else "asked for"
        reason = (
            f"less than the {share:g} {whose}, with which this plan {_need(before)}; the most "
            "with which it surely fits. vLLM has less cache, and may write slower"
        )
        return PlanStep(option="engine share", value=f"{candidate.engine_share:g}", why=reason)
    if most is None:
        reason = f"{why}; no share that holds vLLM's weights and a cache surely fits"
        if not asked.engine_sleeps:
            reason += "; --engine-sleeps gives it back while the model trains"
    elif most >= share:
        reason = f"{why}; the plan surely fits with up to {most:.2f}: more cache for vLLM"
    else:
        reason = f"{why}; the plan surely fits with {most:.2f} or less"
    return PlanStep(option="engine share", value=f"{share:g}", why=reason)


def _is_default(asked: Rollouts) -> bool:
    """Whether the engine's share is TRL's own, which nobody need have asked for."""
    return asked.engine_share == Rollouts().engine_share
