"""Opens a recipe's session, and serves it to clients of the tinker API."""

import fcntl
import queue
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlcore.files import storage_errors
from rlcore.schema.file_limits import expanded
from rlcore.secrets import keep_secret
from rlcore.spi import ConfigError, Problem, WorkerError
from rlcore_serve.sessions.server import listening, silent_logger
from rlcore_serve.training_server import TrainingServerContext
from rlcore_tinker.application import Served, application
from rlcore_tinker.checkpoints import Checkpoints
from rlcore_tinker.training_data import Limits
from rlcore_tinker.training_model import ServedModel
from rlcore_workers.http_server import ServerThread

KEY_PREFIX = "tml-"
"""The beginning of each key: the client refuses others."""
FOLDER = "tinker"
"""The folder of a run directory for the server's files."""
SCRATCH, CHECKPOINTS = "scratch-", "checkpoints"
"""Folders in it: the beginning of the name of those that end with the server, and the one that outlives it."""
LOOK_S = 0.5


def serve(context: TrainingServerContext) -> None:
    """Serve until the process is interrupted, or a worker of the session died: WorkerError."""
    import rlcore_session

    key = context.api_key or f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
    if not key.startswith(KEY_PREFIX):
        context.note(f"the tinker client refuses keys that do not begin with {KEY_PREFIX!r}: the key of this server does not")
    keep_secret(key)
    recipe = expanded(context.recipe)
    has_reference = _has_adapters(recipe, context.overrides)
    with ExitStack() as stack:
        session = stack.enter_context(rlcore_session.open_session(recipe, *context.overrides, reference=has_reference))
        lost: queue.Queue[WorkerError] = queue.Queue()
        directory = _directory(session)
        stack.enter_context(_alone_in(directory))
        for left in directory.glob(f"{SCRATCH}*"):  # by a server that was killed
            shutil.rmtree(left, ignore_errors=True)
        Checkpoints(directory / CHECKPOINTS).clean()
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory))
        served = Served(
            session=session,
            model=served_model(session, context.name),
            directory=directory / CHECKPOINTS,
            scratch=Path(scratch),
            has_reference=has_reference,
            many_adapters=session.has_adapters,
            key=key,
            on_error=lambda error: lost.put(error) if isinstance(error, WorkerError) else None,
        )
        thread, url = start(served, context.host, context.port)
        try:
            context.note(f"{served.model.name} trains on {url}; checkpoints are in {served.directory}; Ctrl-C ends it")
            context.tell(f"export TINKER_BASE_URL={url}")
            if context.api_key is None:
                context.tell(f"export TINKER_API_KEY={key}")
            while True:
                try:
                    raise lost.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
        finally:
            thread.close()


def start(served: Served, host: str, port: int) -> tuple[ServerThread, str]:
    """Start a server in a thread, and return it with its address. ConfigError where nothing can listen there."""
    listens = listening(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listens.getsockname()[1]}"
    made = application(served)
    thread = ServerThread(made, listens, name="rlcore-tinker", logger=silent_logger())
    thread.start()
    return thread, url


def served_model(session: Any, name: str | None) -> ServedModel:
    """Return the model of a session as clients see it."""
    recipe = session.plan.recipe
    path = recipe.model.path
    here = Path(path)
    limit = recipe.rollout.max_sequence_length
    return ServedModel(
        name=name or path,
        tokenizer_id=str(here.resolve()) if here.exists() else path,
        limits=Limits(max_sequence_length=limit, vocab_size=session.tokenizer.vocab_size),
        lora_rank=None if recipe.lora is None else recipe.lora.rank,
        least_rank=1 if recipe.lora is None or (session.has_adapters and recipe.lora.init_from is None) else recipe.lora.rank,
        seed=recipe.run.seed,
    )


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold the lock of a server's folder. ConfigError where another server has it."""
    with storage_errors("lock", directory):
        opened = (directory / "lock").open("ab")
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            found, expected = f"one whose folder {directory} another server uses", "a run of this server alone"
            problem = Problem(path="run.name", found=found, expected=expected, remedy="Name another run, or end that server.")
            raise ConfigError([problem]) from error
        except OSError:
            pass  # a file system without locks
        yield


def _has_adapters(recipe: Path, overrides: tuple[str, ...]) -> bool:
    """Return whether the recipe has a [lora], with which the base model costs no second copy."""
    from rlcore.config.load import read_raw

    return "lora" in read_raw(recipe, list(overrides)).values


def _directory(session: Any) -> Path:
    """Make the folder of the server's files, and return it. StorageError where that cannot be."""
    run = session.plan.recipe.run
    folder: Path = expanded(run.directory).resolve() / run.name / FOLDER
    with storage_errors("checkpoints", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
