"""PPO by verl: actor and critic train in turn, in one process, each beside what the other keeps.

A GPU has shards of both models and of the states of their optimizers all the time, unless an
offload has them on the host between turns. The critic trains first in a step: what scoring by the
actor left gathered lies beside it. The caching allocator is one, and its cache serves both; what
fragments between turns is not counted.

Source: verl 0.9.1 ``trainer/ppo/v1/trainer_base.py`` (``create_colocated_worker_cls``,
``_step_once``), ``workers/engine/base.py`` (``BaseEngineCtx``), ``workers/engine/fsdp`` (gradients
are dropped behind a turn; the root is gathered behind an evaluation), ``utils/model.py``
(``load_valuehead_model``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from memest.config.kinds import Attention, Task
from memest.config.rollouts import ACTOR, Engine, Moved, Rollouts
from memest.config.setup import Setup
from memest.estimation.breakdown import alive_at_end
from memest.estimation.engine import MOVED
from memest.estimation.profiler import Profiler
from memest.estimation.run import Run
from memest.events import CATEGORY_ORDER, Category, Phase
from memest.profiles.stream import Stream
from memest.profiles.transient import with_resident
from memest.replay.conf import parse_alloc_conf
from memest.units import format_size

__all__ = ["TurnsRun", "critic_setup", "with_critic"]

_KEPT = (
    Category.PARAMETERS,
    Category.MASTER_WEIGHTS,
    Category.BUFFERS,
    Category.OPTIMIZER_STATES,
)
"""What a model keeps between its turns; workspaces of the process serve both."""
_GATHERED = CATEGORY_ORDER.index(Category.COMMUNICATION)


@dataclass(frozen=True, kw_only=True)
class TurnsRun(Run):
    """As its base, of an actor with a critic; the streams are those of the fuller turn.

    Attributes:
        critic: its run.
        beside_actor: sizes of what the critic keeps in the actor's turn.
        beside_critic: sizes of what the actor keeps in the critic's.
        is_critics: the critic's turn is the fuller one.
        turn_notes: what there is to say of them.
    """

    critic: Run
    beside_actor: tuple[int, ...] = ()
    beside_critic: tuple[int, ...] = ()
    is_critics: bool = False
    turn_notes: tuple[str, ...] = ()

    @property
    def stream(self) -> Stream:
        """The stream of the fuller turn."""
        return self.turn_of_critic(self.critic.stream) if self.is_critics else self._actors_turn

    @property
    def short_stream(self) -> Stream:
        """The same, no longer than it must be."""
        if self.is_critics:
            return self.turn_of_critic(self.critic.short_stream)
        return self.turn_of_actor(super().short_stream)

    @property
    def _actors_turn(self) -> Stream:
        return self.turn_of_actor(super().stream)

    def before_writing(self, stream: Stream) -> Stream:
        """The actor's turn, behind which an engine writes."""
        return self.turn_of_actor(super().short_stream) if self.is_critics else stream

    def turn_of_actor(self, stream: Stream) -> Stream:
        """A stream of the actor beside what the critic keeps."""
        return with_resident(stream, self.beside_actor, "critic at rest", Category.RESTING)

    def turn_of_critic(self, stream: Stream) -> Stream:
        """A stream of the critic beside what the actor keeps; modules say whose they are."""
        out = with_resident(stream, self.beside_critic, "actor at rest", Category.RESTING)
        out.module_names = [name and f"critic.{name}" for name in out.module_names]
        return out

    @property
    def notes(self) -> list[str]:
        """What both traces have to say."""
        return list(dict.fromkeys((*super().notes, *self.critic.notes)))

    @property
    def spread_notes(self) -> list[str]:
        """What there is to say of several GPUs, and of the turns."""
        own = super().spread_notes
        critics = [f"critic: {note}" for note in self.critic.spread_notes if note not in own]
        return [*own, *critics, *self.turn_notes]


def critic_setup(setup: Setup) -> Setup:
    """The critic's run: a classifier of tokens of one label, trained as the actor is.

    The answers of an optimizer step are the same, in micro-batches of its own; all weights train,
    and attention is always flash-attn's, as verl loads it.

    Args:
        setup: of the actor.
    """
    rollouts = setup.rollouts
    assert rollouts is not None
    batch = rollouts.critic_batch or setup.batch
    return replace(
        setup,
        task=Task.TOKEN_CLASSIFICATION,
        num_labels=1,
        adapter=None,
        attn_implementation=Attention.FLASH_ATTENTION_2,
        batch=batch,
        grad_accum=-(-setup.batch * setup.grad_accum // batch),
        rollouts=Rollouts(
            completion_len=rollouts.completion_len, kl_beta=0.0, engine=Engine.SERVER
        ),
    )


def with_critic(
    profiler: Profiler, request: Setup, run: Run, vary: Sequence[str] | None = ()
) -> Run:
    """The run with the critic that trains in turn with its model; itself where there is none.

    Args:
        profiler: of the actor.
        request: the setup as it was asked for.
        run: of the actor.
        vary: sizes that further questions will change; None where none will have these sizes.

    Raises:
        MemestError: the critic's model cannot be built as one of values, or not be traced.
    """
    rollouts = run.setup.rollouts
    if rollouts is None or not rollouts.critic:
        return run
    other = profiler.of_critic(rollouts.critic)
    critic = other.run(other.question(critic_setup(request), run.gpu, vary))
    unpriced = tuple(dict.fromkeys((*run.setup.unpriced, *critic.setup.unpriced)))
    values = {field.name: getattr(run, field.name) for field in fields(Run)}
    values["setup"] = replace(run.setup, unpriced=unpriced)
    actors, critics = run.short_stream, critic.short_stream
    both = TurnsRun(
        **values,
        critic=critic,
        beside_actor=_kept(critics, rollouts.critic_moves),
        beside_critic=(*_kept(actors, rollouts.engine_moves), *_left_gathered(actors)),
    )
    replays = profiler.replays(parse_alloc_conf(run.setup.alloc_conf))
    peaks = [
        (result.peak_reserved_bytes, result.peak_allocated_bytes)
        for result in map(replays.of, (both.turn_of_actor(actors), both.turn_of_critic(critics)))
    ]
    is_critics = peaks[1] > peaks[0]
    name = "a model like the actor" if rollouts.critic == ACTOR else rollouts.critic
    sizes = [format_size(reserved) for reserved, _ in peaks]
    note = (
        f"critic: {name} with a value of each token ({critic.card.class_name}, "
        f"{critic.counts[0]:,} parameters) trains in turn with the actor, "
        f"{critic.setup.batch} completions at once. The fuller turn is the "
        f"{'critic' if is_critics else 'actor'}'s: reserved are {sizes[1]} in the critic's, beside "
        f"{format_size(sum(both.beside_critic))} that the actor keeps, and {sizes[0]} in the "
        f"actor's, beside {format_size(sum(both.beside_actor))} that the critic keeps; what "
        "fragments between them is not counted."
    )
    return replace(both, is_critics=is_critics, turn_notes=(note,))


def _kept(stream: Stream, moves: Moved) -> tuple[int, ...]:
    """Sizes of what a model has on the GPU behind its turn."""
    return tuple(
        size
        for category, sizes in alive_at_end(stream).items()
        if category in _KEPT and category not in MOVED[moves]
        for size in sizes
    )


def _left_gathered(stream: Stream) -> tuple[int, ...]:
    """Sizes of what scoring leaves gathered, until the model's next step."""
    scored = [n for n, mark in enumerate(stream.marks) if mark.phase is Phase.SCORING]
    if not scored:
        return ()
    places = stream.mark_positions
    end = places[scored[-1] + 1] if scored[-1] + 1 < len(places) else len(stream.events)
    alive: set[int] = set()
    for event in stream.events[:end]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return tuple(stream.sizes[n] for n in sorted(alive) if stream.categories[n] == _GATHERED)
