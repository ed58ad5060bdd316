"""Commands of the driver for a worker: the plugins to load, and the arguments to build them with."""

import os
import pickle
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import frozen

from rlcore import __version__
from rlcore.registry.discovery import DISABLE_VARIABLE
from rlcore.registry.selection import ChosenPlugin
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import DraftCounts, GeneratorContext, SetResidencyRequest, TrainerContext, TrainerLayout


@frozen(kw_only=True)
class Software:
    """What has to be the same on every node."""

    versions: tuple[tuple[str, str], ...]

    @classmethod
    def here(cls) -> "Software":
        """Return the versions of this process."""
        found = [("python", ".".join(map(str, sys.version_info[:2]))), ("rlcore", __version__), ("numpy", np.__version__)]
        for name in ("torch", "transformers"):
            try:
                found.append((name, metadata.version(name)))
            except metadata.PackageNotFoundError:
                continue
        return cls(versions=tuple(found))


@frozen(kw_only=True)
class Plugins:
    """What a worker loads, as the driver chose it."""

    trainer: ChosenPlugin
    generator: ChosenPlugin | None
    disabled: tuple[str, ...]
    """Observers, among others, to leave out."""
    observers: tuple[str, ...]
    """The observers that the recipe names."""
    observer_options: Mapping[str, bytes]
    """The recipe's section, by name, of each observer in use that takes options. Pickled one by one, so that a node reads those
    of the observers that it has."""

    @classmethod
    def of(cls, prepared: RunPlan) -> "Plugins":
        """Return the plugins that a plan has chosen."""
        generator = prepared.chosen.get("generator")
        elsewhere = os.environ.get(DISABLE_VARIABLE, "").split(",")
        return cls(
            trainer=ChosenPlugin.of(prepared.chosen["trainer"]),
            generator=None if generator is None else ChosenPlugin.of(generator),
            disabled=(*prepared.recipe.plugins.disable, *filter(None, map(str.strip, elsewhere))),
            observers=prepared.recipe.observers.names,
            observer_options={name: pickle.dumps(options) for name, options in prepared.observer_options.items()},
        )


@frozen(kw_only=True)
class WorkerEnv:
    """The process around the backends."""

    pool: str
    """A name that no other pool has: what the process starts is known by it."""
    gpu_ids: tuple[str, ...]
    """The GPUs of the node that all its ranks see, in the order of their local ranks."""
    rank_gpu_ids: tuple[str, ...]
    """The GPUs that are this rank's."""
    ranks_on_node: int
    """All that share its cores, of whatever pool."""
    directory: Path
    """The driver's, from which relative paths start where the node has it."""
    run_directory: Path | None
    """None where there is no run."""
    num_threads: str | None
    """The driver's OMP_NUM_THREADS; None where each rank takes its share of the cores."""


TrainedModel: TypeAlias = Literal["policy", "critic"]
"""Which of a rank's trainers a call is for."""


@frozen(kw_only=True, eq=False)
class BuildCommand:
    """What to build the trainers of a rank with: the policy's, and the critic's where there is one."""

    trainer: TrainerContext
    trainer_config: Any
    room_for_generator: SetResidencyRequest | None
    """Where the trainer's memory is while generators start."""
    critic: TrainerContext | None
    """What to build the critic with, by the same plugin and options; None where there is none."""
    room_beside_critic: SetResidencyRequest | None
    """Where the critic's memory is while generators start."""


@frozen(kw_only=True, eq=False)
class GeneratorCommand:
    """What to build the generator of a rank with."""

    context: GeneratorContext
    config: Any
    tokenizer: bytes
    """Pickled: a `Tokenizer`, for the text of its samples. Pickled apart, so that what fails in reading it fails in
    `build_generator`."""


@frozen(kw_only=True)
class RefittedRank:
    """What a rank answers to a refit."""

    digests: Mapping[str, int]
    """`tensor_digest` of what it has exported, by Hugging Face name."""
    shards_sent: int | None = None
    """The digest of what it has sent, where the export was sharded."""
    sent_bytes: int | None = None
    """What it has sent, where that is counted."""
    is_starting: bool = False
    """Whether its generator did not take part, since an engine is being started."""
    shards_taken: int = 0
    """The digest of what its generator has taken of a sharded export; 0 where it has none."""
    drafts: DraftCounts | None
    """What its generator has guessed since the refit before; None where it has none, or one that guesses no tokens."""


@frozen(kw_only=True)
class Built:
    """What a rank says of what it has built."""

    layout: TrainerLayout
