"""A process that judges responses: `python -m rlcore_math.worker TIMEOUT_S MAX_MEMORY_MIB`.

One JSON object a line: {"reference", "response", "require_boxed"} in, {"verdict"} out, after {"ready"} or {"error"} at the
start. The process itself never judges: a child that it forks does, with all libraries imported already. A response that takes
too long ends the child by the alarm's default action, which needs no help from Python, and costs a fork.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TextIO

from attrs import frozen

MAX_KILLS = 3
"""How often a response is judged anew after the child was killed from outside, which says nothing about the response."""
COSTLY_S = 0.25
"""A child that has used so much time on one response ends with it: what that left in its memory is no burden to the next."""
MAX_RESPONSES = 1000
"""Responses that one child judges: libraries keep some of what they have parsed."""


@frozen(kw_only=True)
class Limits:
    """What a child may use."""

    timeout_s: float
    """Seconds of processor time for one response, so that the verdict does not depend on what else runs on the machine."""
    max_memory_bytes: int


class Child:
    """A process that judges one response after another, until it ends over one."""

    def __init__(self, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                stream = theirs.makefile("rw")
                _close_others(theirs.fileno())
                _serve(stream, limits)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self._socket, self._stream = ours, ours.makefile("rw")

    def ask(self, request: str) -> str | None:
        """The line of the answer; None where the child has ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._stream.write(request)
            self._stream.flush()
            answer = self._stream.readline()
            if answer.endswith("\n"):
                return answer
        return None

    def ended_by(self) -> int:
        """Wait for its end: the signal's number, negative, or the exit code."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


def main(arguments: Sequence[str]) -> None:
    """Serve until the input ends."""
    limits = Limits(timeout_s=float(arguments[0]), max_memory_bytes=int(arguments[1]) * 2**20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process when it is done
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        from rlcore_math.answers import warm_up

        warm_up()
        gc.collect()
        gc.freeze()  # the children share what is never looked at again
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    child = None
    for request in sys.stdin:
        answer, child = ask_child(request, child, limits)
        print(answer, file=answers, flush=True, end="")


def ask_child(request: str, child: Child | None, limits: Limits) -> tuple[str, Child | None]:
    """The answer, and the child where it can go on."""
    ended = 0
    for _ in range(MAX_KILLS + 1):
        child = child or Child(limits)
        if answer := child.ask(request):
            return answer, child
        ended, child = child.ended_by(), None
        if ended not in (0, -signal.SIGKILL):  # 0: it had ended by itself after the response before
            break
    verdict = {-signal.SIGPROF: "too_slow", -signal.SIGKILL: "killed"}.get(ended, "failed")
    return json.dumps({"verdict": verdict}) + "\n", None


def _close_others(kept: int) -> None:
    """Close the parent's descriptors, so that this child and the run see EOF when the parent exits."""
    os.dup2(1, 0)
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _serve(stream: TextIO, limits: Limits) -> None:
    from rlcore_math.answers import judge

    with contextlib.suppress(ValueError, OSError):  # not every system can limit it
        resource.setrlimit(resource.RLIMIT_DATA, (limits.max_memory_bytes, limits.max_memory_bytes))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the response caused the crash: write no core dump
    for _ in range(MAX_RESPONSES):
        line = stream.readline()
        if not line:
            return
        request = json.loads(line)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, limits.timeout_s)
        verdict = judge(request["reference"], request["response"], require_boxed=request["require_boxed"])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        stream.write(json.dumps({"verdict": verdict}) + "\n")
        stream.flush()
        if time.process_time() - start > COSTLY_S:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
