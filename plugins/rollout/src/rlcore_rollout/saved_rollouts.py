"""Open groups in a checkpoint: unfinished episodes, finished ones that no step has trained on, and the position in the data.

`rlcore_rollout.serialization` says what an environment's state may consist of.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from attrs import evolve, field, frozen

from rlcore.spi import CheckpointError
from rlcore_rollout.curriculum import CurriculumState
from rlcore_rollout.episode_run import EpisodeRun
from rlcore_rollout.group_work import GroupRewards
from rlcore_rollout.sampler import Distribution
from rlcore_rollout.schedule import Position
from rlcore_rollout.serialization import dumps as dump_object
from rlcore_rollout.serialization import load_saved


@frozen(kw_only=True)
class SavedRollouts:
    """State of a run's episodes in a checkpoint."""

    position: Position
    groups: Mapping[int, bytes] = field(factory=dict)
    """Serialized state of each open group, by its number. A resumed run starts a group without one again."""
    spared: Mapping[int, int] = field(factory=dict)
    """Number of rows that replaced others, by step."""
    version_of_step: Mapping[int, int] = field(factory=dict)
    """Version of the weights that each of the last steps began with."""
    distribution: Distribution | None = None
    """The distribution that the groups' tokens were sampled from; None where there are no groups."""
    replaced: Mapping[int, GroupRewards] = field(factory=dict)
    """The rewards of replaced groups of which nothing is learned yet."""
    curriculum: CurriculumState | None = None
    """None where every prompt comes as often."""


def save_rollouts(run: EpisodeRun, version_of_step: Mapping[int, int], note: Callable[[str], None]) -> SavedRollouts:
    """Take a snapshot of the open groups. `note` reports groups that cannot be serialized: a resumed run starts them again."""

    def make() -> tuple[SavedRollouts, list[str]]:
        groups, errors = run.collectors.saved(sorted(run.schedule.open_groups))
        saved = SavedRollouts(
            position=run.schedule.position(),
            groups=groups,
            spared=run.plans.spared(),
            version_of_step=dict(version_of_step),
            replaced=dict(run.replaced),
        )
        return saved, errors

    saved, errors = run.between(make)
    if errors:
        note(
            f"the states of {len(errors)} unfinished groups cannot be saved ({errors[0]}): a run that is resumed from this "
            "checkpoint begins them again. Let the environment's `reset` and `step` return states that can"
        )
    return saved


def restore_rollouts(run: EpisodeRun, saved: SavedRollouts, distribution: Distribution, note: Callable[[str], None]) -> None:
    """Go on with the groups of a checkpoint, in a run that samples from `distribution` and whose schedule is at its position.
    Those that this run would have begun otherwise are noted, and begin again."""
    run.replaced |= saved.replaced
    if saved.groups and saved.distribution != distribution:
        note(
            f"{len(saved.groups)} open groups of the checkpoint begin again: the trainer could not tell that they were sampled "
            "with another temperature, top_k, top_p or accept_truncation_bias than the recipe's [rollout] has now"
        )
        saved = evolve(saved, groups={})
    for step, num_spared in saved.spared.items():
        run.plans.of_step(step).skip_spares(num_spared)
    if num_other := run.restore(saved.groups):
        note(
            f"{num_other} open groups of the checkpoint begin again: they are of another number of samples, or of other limits "
            "of tokens or turns, than the recipe's [rollout] has now"
        )


def dumps(saved: SavedRollouts) -> bytes:
    """Serialize for a checkpoint."""
    return dump_object(saved)


def loads(data: bytes) -> SavedRollouts:
    """Read the bytes that `dumps` made; CheckpointError where it cannot be read."""
    saved = load_saved(data)
    if not isinstance(saved, SavedRollouts):
        raise CheckpointError(f"the checkpoint's rollouts are a {type(saved).__name__}; expected those of this version")
    return saved


@contextmanager
def damage_told() -> Iterator[None]:
    """Raise a CheckpointError for any error that wrong values in a checkpoint's rollouts lead to."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's rollouts are damaged: {type(error).__name__}: {error}. Resume from another checkpoint"
        ) from error
