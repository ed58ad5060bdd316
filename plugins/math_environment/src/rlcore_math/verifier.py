"""Judges responses in worker processes, since some expressions take for ever."""

import signal
from typing import Any

from rlcore_workers.pool import WorkerPool
from rlcore_workers.process import Ended, Limits, Task

COSTLY_S = 0.25
MAX_RESPONSES = 1000
"""Responses that one process judges: libraries keep some of what they have parsed."""
VERDICTS = {-signal.SIGPROF: "too_slow", -signal.SIGKILL: "killed"}
"""Verdicts by the signal that ended a process; "killed" is one from outside, again and again."""


class Verifier:
    """`num_processes` workers, started when first needed."""

    def __init__(self, *, num_processes: int, timeout_s: float, max_memory_mib: int) -> None:
        limits = Limits(
            cpu_time_s=timeout_s, max_memory_bytes=max_memory_mib * 2**20, costly_s=COSTLY_S, max_requests=MAX_RESPONSES
        )
        task = Task(
            name=f"math-{timeout_s:g}s-{max_memory_mib}MiB",
            handle="rlcore_math.verifier:answer",
            prepare="rlcore_math.verifier:warm_up",
            limits=limits,
        )
        self._pool = WorkerPool(task, num_processes)

    async def judge(self, reference: str, response: str, *, require_boxed: bool) -> str:
        """A verdict of rlcore_math.answers, or "too_slow"; "failed" where the response ended the process that judged it, in
        another way than by its time; "killed" where that was done from outside, each time."""
        answer = await self._pool.call({"reference": reference, "response": response, "require_boxed": require_boxed})
        return VERDICTS.get(answer.exit_code, "failed") if isinstance(answer, Ended) else str(answer)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def warm_up() -> None:
    """Load what every response needs, before processes are forked."""
    from rlcore_math import answers

    answers.warm_up()


def answer(_: None, request: dict[str, Any]) -> str:
    """The verdict on one response, in a process of its own."""
    from rlcore_math.answers import judge  # which takes seconds to import

    return judge(**request)
