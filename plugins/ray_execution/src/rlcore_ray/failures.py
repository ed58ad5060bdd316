"""Errors on their way from a worker to the driver: the worker's own exception, with its rank, node and last lines of output."""

import contextlib
import pickle
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

from rlcore.execution import described, message_of
from rlcore.secrets import masked, masked_traceback
from rlcore.spi import RlcoreError
from rlcore_workers.logged_process import last_lines

PoolName: TypeAlias = Literal["trainer", "reference", "engine"]
"""The content of a pool's ranks: the trainer, maybe with a critic and generators, the reference alone, or a generator alone."""


@frozen(kw_only=True)
class RemoteError:
    """An exception in a form that travels: classes whose constructors take other arguments than `args` do not pickle."""

    pickled_classes: tuple[bytes, ...]
    """The error's class and the bases of that, of which some may not be found by their names elsewhere."""
    pickled_state: bytes
    """`args` and attributes; what does not pickle is left out."""
    text: str
    traceback: str
    is_ours: bool
    """True where it is an RlcoreError, whose message says everything."""
    last_lines: str
    """The worker's last lines of output before the error."""

    @classmethod
    def of(cls, error: BaseException, log_file: Path) -> "RemoteError":
        """Take an exception apart, in the worker."""
        attributes = {name: value for name, value in vars(error).items() if _pickled(value) is not None}
        args = error.args if _pickled(error.args) is not None else (message_of(error),)
        classes = [base for base in type(error).__mro__ if issubclass(base, BaseException)]
        return cls(
            pickled_classes=tuple(filter(None, map(_pickled, classes))),
            pickled_state=pickle.dumps((args, attributes)),
            text=masked(described(error)),
            traceback=masked_traceback(error),
            is_ours=isinstance(error, RlcoreError),
            last_lines=last_lines(log_file),
        )

    def restore(self) -> BaseException:
        """Return the exception again, in the driver, with its attributes and notes; no constructor is called. A class that the
        driver lacks becomes its nearest base."""
        for pickled in self.pickled_classes:
            with contextlib.suppress(Exception):
                cls: type[BaseException] = pickle.loads(pickled)
                args, attributes = pickle.loads(self.pickled_state)
                error = cls.__new__(cls, *args)
                error.args = args  # which MemoryError takes in its constructor
                vars(error).update(attributes)
                return error
        return RlcoreError(self.text)


@frozen(kw_only=True)
class Reply:
    """A worker's answer to a call."""

    value: Any = None
    error: RemoteError | None = None
    is_usable: bool = True
    """True where trainer and generator of the rank are in a known state."""


@frozen(kw_only=True)
class WorkerInfo:
    """The place of a rank, and its name in messages."""

    rank: int
    pool: PoolName = "trainer"
    node: str = "?"
    """The address of the worker's machine."""
    node_id: str = ""
    pid: int = 0
    log_file: Path
    gpu_ids: tuple[str, ...] = field(default=(), eq=False)
    """The GPUs that Ray assigned to it, by numbers of the machine."""

    def __str__(self) -> str:
        names = {"trainer": f"rank {self.rank}", "engine": f"engine {self.rank}"}
        name = names.get(self.pool, f"{self.pool} rank {self.rank}")
        return f"{name} (node {self.node}, process {self.pid})"


def with_origin(error: BaseException, worker: WorkerInfo, remote: RemoteError) -> BaseException:
    """The error itself, with notes on where it comes from."""
    error.add_note(f"raised on {worker}. {remote.last_lines}")
    if not remote.is_ours:
        error.add_note(f"The worker's own traceback:\n{remote.traceback}")
    return error


def cause_of_death(error: Exception, worker: WorkerInfo) -> str:
    """Name the cause of a rank's death, as far as Ray can tell."""
    import ray

    with contextlib.suppress(Exception):
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        if worker.node_id and worker.node_id not in alive:
            return "is gone: its node has left the cluster"
    text = str(error)
    if "OOM" in text and "memory monitor" in text.lower():
        return "was ended by Ray, since its node ran out of memory"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        said = " ".join(text.split()).rpartition("unavailable: ")[2].partition(". The task may")[0]
        return f"cannot be reached any more: its process is stopped, or its node has left the cluster. Ray says: {said}"
    return "died: it was killed (by a signal, or for lack of memory) or ended by itself"


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None
