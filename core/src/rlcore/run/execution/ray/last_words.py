"""What Ray leaves unsaid: where its process on this machine dies, Ray's core ends the driver at once, without a word."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CLOSE_S = 5.0
"""Most seconds for the process that waits to end."""
MESSAGE = (
    "error: this run's process has ended without a word of its own: it was killed, or Ray's core ended it, as it does where "
    "Ray's own process on the machine (the raylet) dies. Ray's logs are in {logs}. What was saved before is intact: start the "
    "run again, with --resume to go on from there."
)
_FAREWELL = b"."
_WAIT = f"""
import signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.stdin.buffer.read() != {_FAREWELL!r}:
    with socket.socket(socket.AF_UNIX) as raylet:
        try:
            raylet.connect(sys.argv[1])
        except OSError:
            sys.exit(sys.argv[2])
"""
"""It reads until its parent says farewell, or has ended. A raylet that lives then was not the cause; one that is gone may have
died of its driver's death, as one that this started does."""


@contextmanager
def said_for_ray() -> Iterator[None]:
    """While this process uses Ray, another one is there to say on stderr what ended this one, where Ray's core does."""
    from ray._private import worker

    node = worker._global_node
    if node is None:  # a client of a distant cluster has no raylet here
        yield
        return
    message = MESSAGE.format(logs=Path(node.get_logs_dir_path()))
    command = [sys.executable, "-I", "-S", "-c", _WAIT, node.raylet_socket_name, message]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waiting:
        try:
            yield
        finally:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                waiting.communicate(_FAREWELL, CLOSE_S)
            waiting.kill()
