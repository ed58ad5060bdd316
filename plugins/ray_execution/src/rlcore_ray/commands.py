"""Commands of the driver for a worker: its process, and the arguments to build its backends with."""

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from attrs import frozen

from rlcore import __version__
from rlcore.execution import GeneratorArguments, TrainerArguments
from rlcore.spi import DraftCounts, TrainerLayout
from rlcore_ray.failures import WorkerInfo


@frozen(kw_only=True)
class Software:
    """The versions that have to be the same on every node."""

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
class Arrival:
    """A rank's first answer."""

    worker: WorkerInfo
    software: Software
    clock: float
    """The time on its node, in seconds since 1970."""


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
    """The ranks that share its cores, of whatever pool."""
    directory: Path
    """The driver's, from which relative paths start where the node has it."""
    num_threads: str | None
    """The driver's OMP_NUM_THREADS; None where each rank takes its share of the cores."""


TrainedModel: TypeAlias = Literal["policy", "critic"]
"""The one of a rank's trainers that a call is for."""


@frozen(kw_only=True, eq=False)
class BuildCommand:
    """The arguments of a rank's trainers: the policy's, and the critic's where there is one."""

    trainer: TrainerArguments
    critic: TrainerArguments | None
    """None where there is no critic."""


@frozen(kw_only=True, eq=False)
class GeneratorCommand:
    """The arguments of a rank's generator."""

    arguments: GeneratorArguments
    decoder: bytes
    """Pickled: a `TextDecoder`, for the text of its samples. Pickled apart, so that what fails in reading it fails in
    `build_generator`."""


@frozen(kw_only=True)
class RefittedRank:
    """A rank's answer to a refit."""

    digests: Mapping[str, int]
    """`tensor_digest` of what it has exported, by Hugging Face name."""
    shards_sent: int | None = None
    """The digest of what it has sent, where the export was sharded."""
    sent_bytes: int | None = None
    """Bytes that it has sent, where they are counted."""
    is_starting: bool = False
    """True where its generator did not take part, since an engine is being started."""
    shards_taken: int = 0
    """The digest of what its generator has taken of a sharded export; 0 where it has none."""
    drafts: DraftCounts | None
    """Its generator's guesses since the refit before; None where it has none, or one that guesses no tokens."""


@frozen(kw_only=True)
class Built:
    """A rank's answer to a build."""

    layout: TrainerLayout
