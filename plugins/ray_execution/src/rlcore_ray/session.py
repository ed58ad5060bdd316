"""Ray itself: joined where it runs, else started on the loopback interface alone, and stopped at the end."""

import logging
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from rlcore.execution import sigterm_kept
from rlcore.files import private
from rlcore.schema.file_limits import expanded
from rlcore.spi import ConfigError, Problem, StorageError, WorkerError
from rlcore_ray.config import RayConfig
from rlcore_ray.raylet_watchdog import leave, raylet_watchdog

LEAST_FILE_BYTES = 2**26
"""Less than the smallest object store that Ray takes."""
REACH_S = 5.0
"""Most seconds for a head to take a connection."""
ANSWER_S = 20.0
"""Most seconds for it to answer as Ray does."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray use 127.0.0.1 alone, as it does by itself on those systems."""
_TOKEN = {"RAY_AUTH_MODE": "token"}


@contextmanager
def ray_session(cluster: RayConfig, device: Literal["cpu", "cuda"], log_directory: Path | None) -> Iterator[None]:
    """Ray, as long as it is needed. One that this process has joined or started already is used, and left as it is.

    ConfigError where the address leads to no Ray cluster; WorkerError where a local one does not start; StorageError where a
    limit on the size of files would end it. What Ray itself has to say goes to `log_directory`/ray.log.
    """
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    asks_for_token = "RAY_AUTH_MODE" in os.environ
    if cluster.address is not None and not _is_running():
        added |= _authentication(cluster.address)
    os.environ.update(added)
    import ray  # reads in its environment how to authenticate

    if cluster.address is None:
        # Only now: for this process the import would keep it, also when it joins another cluster later.
        added |= {name: value for name, value in _LOOPBACK.items() if name not in os.environ}
        os.environ.update(added)

    is_ours = not ray.is_initialized()
    try:
        with _ray_output_to(log_directory), _loopback_only(is_ours and cluster.address is None):
            if is_ours:
                with sigterm_kept():
                    _start(cluster, device) if cluster.address is None else _join(cluster.address)
            with raylet_watchdog():
                yield
    finally:
        if is_ours:
            leave()
        for name in added:
            os.environ.pop(name, None)
        if is_ours and not asks_for_token:
            _forget_token()


def _forget_token() -> None:
    """Leave the process as it was before Ray asked for a token, which it keeps for clusters that know none or another one."""
    os.environ.pop("RAY_AUTH_MODE", None)
    with suppress(ImportError):  # before 2.60
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")  # first: threads that still end would look for a token
        AuthenticationTokenLoader.instance().reset_cache()


def _start(cluster: RayConfig, device: Literal["cpu", "cuda"]) -> None:
    import ray

    _require_files()
    cores = os.cpu_count() or 1
    store = None if cluster.object_store_mib is None else cluster.object_store_mib * 2**20
    try:
        ray.init(
            address="local",
            # On CPU ranks are processes, of which there may be more than cores.
            num_cpus=max(cores, cluster.gpus_per_node),
            num_gpus=0 if device == "cpu" else None,
            object_store_memory=store,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises the bare class where a process of its own does not come up
        raise _no_start(error) from error


def _require_files() -> None:
    """StorageError where files may not grow: Ray's processes would inherit that, end by it, and take this one with them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILE_BYTES:
        raise StorageError(
            f"Ray is not started: files may have {limit:,} bytes; expected at least {LEAST_FILE_BYTES:,}, for its logs and its "
            "object store. Raise the limit on the size of files (`ulimit -f`). What was saved before is intact."
        )


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, f"joining it failed: {error}") from error


def _authentication(address: str) -> Mapping[str, str]:
    """Return the variables by which a cluster lets this process in; ConfigError where no Ray answers. `ray start` asks for a
    token as soon as its user has one, which a local start leaves in the user's home; who joins has to say that it has it."""
    if address != "auto":
        _reach(address)
    try:
        _probe(address, {})  # first: a head from before the token takes one too, and is then refused by this process
    except ConfigError as error:
        if "AuthenticationError" not in str(error) or "RAY_AUTH_MODE" in os.environ or not _has_token():
            raise
        _probe(address, _TOKEN)
        return _TOKEN
    return {}


def _is_running() -> bool:
    """Return whether Ray runs in this process; without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _has_token() -> bool:
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(given) or expanded("~/.ray/auth_token").is_file()


def _reach(address: str) -> None:
    """A connection to the head, since Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, f"it takes no connection: {error}") from error


def _probe(address: str, variables: Mapping[str, str]) -> None:
    """Ask the head for its status, from a process that can be given up."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    command += [] if address == "auto" else ["--address", address]
    environment = {**os.environ, **variables}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise _no_cluster(address, f"it does not answer as Ray within {ANSWER_S:g} s") from error
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        lines = [line for line in lines if "AuthenticationError" in line] or lines
        raise _no_cluster(address, lines[-1] if lines else f"`ray status` ended with exit code {result.returncode}")


def _no_start(error: Exception) -> WorkerError:
    return WorkerError(
        f"a local Ray cluster (cluster.address is not set) does not start: {type(error).__name__}: {error} Its logs are below "
        "/tmp/ray/session_latest/logs. Common causes are too little memory for cluster.object_store_mib, a full disk, and a "
        "machine too busy to answer in time: then try again."
    )


def _no_cluster(address: str, reason: str) -> ConfigError:
    problem = Problem(
        path="cluster.address",
        found=f'"{address}", where no Ray cluster can be joined: {reason}',
        expected='"auto" on a machine of a running cluster, or the "host:port" of its head',
        remedy="Start one with `ray start --head`, or leave the key out for a local one.",
    )
    return ConfigError([problem])


@contextmanager
def _loopback_only(wanted: bool) -> Iterator[None]:
    """Set in this process what _LOOPBACK sets in Ray's."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    if wanted:
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _ray_output_to(directory: Path | None) -> Iterator[None]:
    """Keep what Ray would print in the midst of the display."""
    from ray._private import worker

    lock = threading.Lock()

    def keep(data: Any, *_: Any, **__: Any) -> None:
        if directory is not None and data.get("lines"):
            with lock:
                directory.mkdir(parents=True, exist_ok=True)
                with open(directory / "ray.log", "a", opener=private) as file:
                    file.write("\n".join(map(str, data["lines"])) + "\n")

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = keep
    try:
        yield
    finally:
        worker.print_to_stdstream = printing
