"""What follows from the options of a training run, for its loop, its method and its sharding.

Options are declared in :mod:`memest.config.training_options`; here is what several of them, the
software and the libraries' own rules make of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memest.config.compilation import fused_loss_flag
from memest.config.installed import installed_version
from memest.config.kinds import Dtype, LogProbs, Loop, Method, Precision, Task
from memest.config.optimizers import facts_of
from memest.config.parallelism import Strategy
from memest.config.quantization import Format, prepares_base
from memest.config.release_defaults import PREPARED, release_default
from memest.config.rollouts import Engine
from memest.config.training_options import SHARDS_AT_LOAD, TrainingOptions

__all__ = ["TrainingRun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(TrainingOptions):
    """The options of a run, and what follows from them."""

    @property
    def has_reference(self) -> bool:
        """Whether the run asks a reference: another model, or this one with its adapters off."""
        if self.rollouts is not None and not self.method.has_reference:
            return bool(self.rollouts.kl_beta)
        return self.method.has_reference and not self.precompute_ref_log_probs

    @property
    def has_reference_model(self) -> bool:
        """Whether that is another model on the GPU, as large as the one that is trained.

        verl's has its weights on the host, by FSDP's own offloading (``forward_only``).
        """
        on_host = self.log_probs is LogProbs.VERL
        return self.has_reference and self.adapter is None and not on_host

    @property
    def values_tokens(self) -> bool:
        """Whether a reward model is a causal one with a value for each token, as LLaMA-Factory's.

        That of others is a classifier of sequences.
        """
        return self.method is Method.REWARD and self.log_probs is LogProbs.FLOAT32

    @property
    def is_critic(self) -> bool:
        """Whether it is verl's model of values that trains, a classifier of tokens of one label."""
        return self.log_probs is LogProbs.VERL and self.task is Task.TOKEN_CLASSIFICATION

    @property
    def task_of_method(self) -> Task:
        """The head that a method's trainer needs."""
        if self.is_critic and self.num_labels == 1:
            return self.task
        classifies = self.method is Method.REWARD and not self.values_tokens
        return Task.SEQUENCE_CLASSIFICATION if classifies else Task.CAUSAL_LM

    @property
    def optimizer(self) -> str:
        """The name of the optimizer, that of the release where none was named."""
        if self.optim != "auto":
            return self.optim
        name = release_default("optim", self.software).value
        # what transformers carried itself was the Trainer's choice alone
        return name if self.loop is Loop.TRAINER or name != "adamw_hf" else "adamw_torch"

    @property
    def loaded_dtype(self) -> Dtype:
        """The dtype that ``from_pretrained`` gives weights; AUTO for that of the config.

        What bitsandbytes and GPTQ leave as it is became float16 before transformers 5
        (``update_torch_dtype`` of their quantizers).
        """
        if self.dtype is not Dtype.AUTO:
            return self.dtype
        dtype = Dtype(release_default("dtype", self.software).value)
        return Dtype.FLOAT16 if dtype is not Dtype.AUTO and self.quantization else dtype

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps in backward, so that gradients never pile up."""
        return self.optim_in_backward or facts_of(self.optimizer).layerwise

    @property
    def effective_batch(self) -> int:
        """Samples of one optimizer step, on all GPUs that have batches of their own."""
        return self.batch * self.grad_accum * self.distributed.data_ranks

    @property
    def clip_norm(self) -> float:
        """The norm to which gradients are clipped, 0 for none.

        The Trainer clips at 1.0 unless told otherwise; scripts do not clip unless told to.
        """
        if self.optimizer == "none":
            return 0.0
        return self._usual_norm if self.max_grad_norm is None else self.max_grad_norm

    @property
    def named_clip_norm(self) -> float | None:
        """The norm, None where it is what the Trainer takes anyway: what tells updates apart."""
        is_usual = self.loop is Loop.TRAINER and self.max_grad_norm == self._usual_norm
        return None if is_usual else self.max_grad_norm

    @property
    def _usual_norm(self) -> float:
        return 1.0 if self.loop is Loop.TRAINER else 0.0

    @property
    def may_accumulate(self) -> bool:
        """Whether more than one micro-batch can make a step."""
        return not self.steps_in_backward or facts_of(self.optimizer).accumulates

    @property
    def adapts_by_trl(self) -> bool:
        """Whether TRL's own trainers put adapters beside the model (``DPOTrainer.__init__``).

        They prepare no quantised base and make what trains beside it bfloat16. Under ZeRO-3 they
        ask peft for adapters of the base's dtype where it is not quantised, and recompute
        reentrantly whatever they are told. LLaMA-Factory and axolotl, whose log-probabilities are
        others, have it otherwise.
        """
        fused = self.log_probs is LogProbs.FUSED
        return self.adapter is not None and self.method.is_in_trl_trainer and fused

    @property
    def must_reenter(self) -> bool:
        """Whether TRL has reentrant checkpoints, whatever was asked for."""
        return self.partitions_parameters and self.adapts_by_trl

    @property
    def recomputes_reentrantly(self) -> bool:
        """Whether layers are recomputed, and by reentrant checkpoints."""
        if self.checkpointing == "none":
            return False
        if self.must_reenter:
            return True
        if self.use_reentrant is not None:
            return self.use_reentrant
        among = self.who_recomputes
        return release_default("use_reentrant", self.software, among).value == "true"

    @property
    def who_recomputes(self) -> str:
        """Who switches checkpointing on, as the table of releases asks for it.

        A script that prepares its base leaves it to peft; the Trainer does it once more behind it.
        """
        return PREPARED if self.prepares_base and self.loop is not Loop.TRAINER else ""

    @property
    def prepares_base(self) -> bool:
        """Whether ``peft.prepare_model_for_kbit_training`` is called for a quantised base."""
        return prepares_base(self.quantization, adapts=self.adapts_otherwise)

    @property
    def adapts_otherwise(self) -> bool:
        """Whether adapters are put beside the model, and not by TRL's own trainers."""
        return self.adapter is not None and not self.adapts_by_trl

    @property
    def casts(self) -> tuple[str, ...]:
        """Weights that get another dtype after loading, as ``cast_weights`` names them.

        TRL's own trainers make adapters bfloat16 beside a base of bitsandbytes.
        """
        base = self.quantization
        if self.cast_weights or base is None or base.format.packed or not self.adapts_by_trl:
            return self.cast_weights
        return ("trainable=bfloat16",)

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether DDP looks for parameters that a forward did not use.

        Source: ``Trainer._build_accelerator_args`` of transformers 5.23: everywhere but with
        activation checkpointing; elsewhere, and around stages of a pipeline, which are a script's,
        DDP's own default, which is not to.
        """
        setting = self.distributed.ddp_find_unused_parameters
        if self.distributed.strategy is not Strategy.DDP or self.distributed.pp > 1:
            return False
        if setting is not None:
            return setting
        # the wrapper that has the values is no model of transformers' to the Trainer
        return self.loop is Loop.TRAINER and (self.checkpointing == "none" or self.values_tokens)

    @property
    def computes_in_half(self) -> bool:
        """Whether FSDP or DeepSpeed hold half-precision copies of parameters to compute with.

        In place of autocast: accelerate gives ``fully_shard`` a ``MixedPrecisionPolicy``, and
        DeepSpeed's engine converts the model. A script's own FSDP2, and transformers', have
        autocast unless they say so, and a pipeline is always a script's.
        """
        if self.precision is Precision.FP32:
            return False
        if self.distributed.strategy is Strategy.FSDP:
            own = self.loop is Loop.PLAIN or self.distributed.pp > 1 or self.is_sharded_at_load
            return self.distributed.fsdp_mixed_precision if own else True
        return self.distributed.strategy is Strategy.ZERO

    @property
    def trains_in_full(self) -> bool:
        """Whether what trains is float32 where it is stepped, whatever was loaded.

        Under mixed precision accelerate upcasts it before FSDP shards it (``fsdp2_prepare_model``;
        ``_flat_param`` of FSDP1 in ``Accelerator.prepare_model``, accelerate 1.15), but not beside
        4-bit weights under FSDP2; a policy that was asked for leaves it. DeepSpeed steps copies.
        """
        if not self.computes_in_half or self.distributed.fsdp_mixed_precision:
            return False
        if self.distributed.strategy is Strategy.ZERO or self.distributed.fsdp_version == 1:
            return True
        return self.quantization is None or self.quantization.format is not Format.BNB_4BIT

    @property
    def is_sharded_at_load(self) -> bool:
        """Whether ``from_pretrained`` shards the model, layers and the rest by FSDP2.

        ``DistributedConfig(tp_size=..., fsdp_size=...)``, which accelerate and the Trainer leave as
        it is: ``is_distributed_loading_by_transformers`` of transformers 5.23. Where an earlier
        release is declared, accelerate's own FSDP2 shards.
        """
        distributed = self.distributed
        if self.loop is Loop.PLAIN or distributed.tp == 1 or distributed.pp > 1:
            return False
        version = self.software.transformers or installed_version("transformers")
        return (
            distributed.strategy is Strategy.FSDP and (version or SHARDS_AT_LOAD) >= SHARDS_AT_LOAD
        )

    @property
    def scores_by_fused_head(self) -> bool:
        """Whether a method has log-probabilities tile by tile, without all logits at once."""
        if self.method.makes_all_logits:
            return False
        scores = self.method.has_reference or self.method.generates
        return scores and self.log_probs is LogProbs.FUSED

    @property
    def writes_completions(self) -> bool:
        """Whether the trained model itself writes the completions that it learns from."""
        rollouts = self.rollouts
        return self.method.generates and (rollouts is None or rollouts.engine is Engine.MODEL)

    @property
    def completions_at_once(self) -> int:
        """Completions that TRL has written at once, on all GPUs."""
        steps = (self.rollouts and self.rollouts.steps_per_generation) or self.grad_accum
        return self.batch * self.distributed.data_ranks * steps

    @property
    def completions_of_a_prompt(self) -> int:
        """How many GRPO and RLOO compare; TRL stops where they do not divide what is written."""
        if self.rollouts is None or self.method.writes_pairs or self.log_probs is LogProbs.VERL:
            return 1  # verl divides prompts, and counts no samples
        return self.rollouts.num_generations or (2 if self.method is Method.RLOO else 8)

    @property
    def batch_unit(self) -> int:
        """What micro-batches must be multiples of, however many of them make a step."""
        # of those of one step together it is the samples of the step, where no number is fixed
        return self.batch_step if self.rollouts and self.rollouts.steps_per_generation else 1

    @property
    def batch_step(self) -> int:
        """What micro-batches must be multiples of with the micro-steps that are asked for.

        ``generation_batch_size % num_generations`` of ``GRPOConfig`` and ``RLOOConfig``.
        """
        at_once, number = self.completions_at_once // self.batch, self.completions_of_a_prompt
        return number // math.gcd(number, at_once)

    @property
    def scores_own_completions(self) -> bool:
        """Whether the model is asked what it said when it wrote, before the step.

        RLOO always asks; GRPO where an engine wrote, to correct for it
        (``vllm_importance_sampling_correction``), or where a step learns from completions that were
        written before the last update.
        """
        return (
            self.method is Method.RLOO
            or self.log_probs is LogProbs.VERL
            or (self.method is Method.GRPO and not self.writes_completions)
        )

    @property
    def fused_loss_flag(self) -> str:
        """What asks for the fused loss, for sentences that refuse it."""
        return fused_loss_flag(self.fused_loss)

    @property
    def head_is_gathered_by_loss(self) -> bool:
        """Whether TRL's fused head gathers the weight that it reads (``full_tensor``).

        accelerate finds no final norm in a model with adapters and makes the head an FSDP2 unit of
        its own, which is gathered where it is called, and nobody calls it.
        """
        return (
            self.distributed.strategy is Strategy.FSDP
            and self.distributed.fsdp_version == 2
            and self.adapter is not None
            and self.loop is not Loop.PLAIN
            and (self.scores_by_fused_head or self.fused_loss == "trl-fused")
        )

    @property
    def autocasts_halves(self) -> bool:
        """Whether the model runs in autocast on half-precision copies of its parameters.

        ``Accelerator.prepare_model`` of accelerate 1.15 wraps the forward in autocast, and makes
        float32 of its outputs, before it makes FSDP1 of the model; FSDP2's preparation does not
        come there. verl's actor has autocast of its own around forward and loss.
        """
        return self.computes_in_half and (
            self.distributed.flattens or self.log_probs is LogProbs.VERL
        )

    @property
    def keeps_parameters(self) -> bool:
        """``use_orig_params`` of FSDP1: the Trainer says yes, accelerate and torch no."""
        setting = self.distributed.fsdp_use_orig_params
        return self.loop is Loop.TRAINER if setting is None else setting

    @property
    def partitions_parameters(self) -> bool:
        """Whether DeepSpeed partitions the parameters themselves (stage 3)."""
        return self.distributed.zero == 3

    @property
    def partitions_whole_model(self) -> bool:
        """Whether stage 3 gets a model that lies whole on every GPU, and partitions it there.

        ``from_pretrained`` leaves ``zero.Init`` out where it quantises (``get_init_context`` of
        transformers 5.23), so ``DeepSpeedZeRoOffload`` finds no parameter of its own.
        """
        return self.partitions_parameters and self.quantization is not None

    @property
    def is_built_in_parts(self) -> bool:
        """Whether stage 3 partitions each parameter as the model is built (``zero.Init``)."""
        return self.partitions_parameters and not self.partitions_whole_model

    @property
    def is_built_in_full(self) -> bool:
        """Whether ``zero.Init`` makes float32 weights, whatever dtype the checkpoint has.

        ``InsertPostInitMethodToModuleSubClasses._set_dtype`` of DeepSpeed 0.19.8 takes half
        precision where the configuration enables it, and constructors cast to what it took. (What
        is traced for a run in half precision has half weights and no precision.)
        """
        in_full = not self.computes_in_half and not self.dtype.is_half
        return self.is_built_in_parts and in_full

    @property
    def has_linear_of_stage_3(self) -> bool:
        """Whether ``zero.Init`` puts a function of its own in place of ``F.linear``."""
        setting = self.distributed.zero_setting("memory_efficient_linear", True)
        return self.partitions_parameters and bool(setting)

    @property
    def checkpoint_every(self) -> int:
        """Every how many layers a checkpoint is made; 0 = no checkpointing."""
        if self.checkpointing == "none":
            return 0
        return int(self.checkpointing.partition(":")[2] or 1)
