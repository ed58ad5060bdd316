"""Every error that rlcore raises on purpose, each with the exit code that the command line ends with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

from rlcore.schema.problem import Note as Note
from rlcore.schema.problem import Problem as Problem
from rlcore.schema.problem import ProblemsError as ProblemsError
from rlcore.schema.problem import RlcoreError as RlcoreError

FailureKind: TypeAlias = Literal["policy", "environment", "grader", "tool", "infrastructure", "limit"]
"""How an episode ended: by the policy, right or wrong; by a defect of the environment, of its grader or of a tool; by a defect
of what they run on, such as a network or a sandbox; or at a limit of tokens, turns or time."""
_LOST = {"ConnectionError", "TimeoutError", "MemoryError", "APIConnectionError", "TransportError", "ClientConnectionError"}
"""Names of errors of Python, requests, openai, httpx and aiohttp: none of these packages is imported for it."""


class ConfigError(ProblemsError):
    """The recipe is wrong: unknown keys, wrong types, impossible combinations."""

    exit_code = 2
    summary = "problem(s) in the recipe"


class PluginError(RlcoreError):
    """No usable plugin, a tie, a duplicate name, or one that breaks its contract at import or binding."""

    exit_code = 3


class DataError(RlcoreError):
    """A data set is missing, empty, lacks a field, or holds prompts over the limit."""

    exit_code = 4


class ModelError(ProblemsError):
    """A model directory lacks weights or a tokenizer, or its architecture is not supported."""

    exit_code = 5
    summary = "problem(s) with the model"


class CheckpointError(RlcoreError):
    """A checkpoint is incomplete, damaged, or belongs to another model or recipe."""

    exit_code = 6


class NonFiniteError(RlcoreError):
    """A loss, gradient or log-probability is NaN or infinite. The state before the step is kept."""

    exit_code = 7


class RewardError(RlcoreError):
    """An environment raised, hung past its time limit, or returned a reward that is not finite."""

    exit_code = 8


class ContractError(RlcoreError, ValueError):
    """A record or a backend's result breaks the interface: wrong shape, dtype, version, or call in a wrong state."""

    exit_code = 9


class RefitError(RlcoreError):
    """The generator does not hold the weights that the trainer exported."""

    exit_code = 10


class BoundError(RlcoreError):
    """A metric of a step exceeds its bound; the step is refused and the state before it kept."""

    exit_code = 13

    def __init__(self, message: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.metrics = dict(metrics or {})
        """The metrics that exceed their bounds."""


class WorkerError(RlcoreError):
    """A process that a backend had started died, hung, or did not start; the message ends with its last lines."""

    exit_code = 12


class StorageError(RlcoreError):
    """Writing to the run directory failed: no space, no permission. What was saved before is intact."""

    exit_code = 11


class InterruptedRun(RlcoreError):
    """The user stopped the run; a checkpoint was saved and the message says how to resume."""

    exit_code = 130


@contextmanager
def fails_as(kind: FailureKind) -> Iterator[None]:
    """Errors that leave the block, also by the end of a time limit, fail the episode as `kind`, unless a block within names
    another. ContractError for an unknown kind."""
    if kind not in get_args(FailureKind):
        raise ContractError(f"found the kind of failure {kind!r}; expected one of {', '.join(get_args(FailureKind))}")
    try:
        yield
    except BaseException as error:
        vars(error).setdefault("failure", kind)
        raise


def failure_kind(error: BaseException) -> FailureKind:
    """Return how an error fails its episode: as its block of `fails_as` or that of its cause says, and as "infrastructure" by a
    lost connection, an expired time limit or exhausted memory. Any other error is the environment's."""
    found: BaseException | None = error
    while found is not None:
        if "failure" in vars(found) or _LOST & {one.__name__ for one in type(found).__mro__}:
            kind: FailureKind = vars(found).get("failure", "infrastructure")
            return kind
        found = found.__cause__
    return "environment"
