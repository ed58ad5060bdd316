"""A process that judges responses: `python -m rlcore_math.worker TIMEOUT_S MAX_MEMORY_MIB`.

One JSON object a line: {"reference", "response", "require_boxed"} in, {"verdict"} out, after {"ready"} or {"error"} at the
start. A request that takes longer ends the process: the alarm's default action needs no help from Python, whatever it does.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Serve until the input ends."""
    timeout_s, max_memory_bytes = float(arguments[0]), int(arguments[1]) * 2**20
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process when it is done
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        from rlcore_math.answers import judge

        judge("1", "\\boxed{1}", require_boxed=False)  # loads the grammar, which is no part of the first response's time
        with contextlib.suppress(ValueError, OSError):  # not every system can limit it
            resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        verdict = judge(request["reference"], request["response"], require_boxed=request["require_boxed"])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        print(json.dumps({"verdict": verdict}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
