"""Trials in processes of their own, which a limit of time ends."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

_CLOSING_S = 10.0
"""Seconds for a child to end once it has answered."""


class ChildError(Exception):
    """A child that ended without an answer, or took too long."""


def in_child(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    time_limit: float,
    *,
    preloaded: Sequence[str] = (),
    start: Literal["forkserver", "spawn"] = "forkserver",
) -> Any:
    """Call a function in a new process without output and with one thread of torch, and return its result. ChildError where the
    process ends without one, or is not done after `time_limit` seconds.

    `preloaded`: modules that children of a fork server begin with; what cannot be imported is left out. They must not make CUDA
    contexts.
    """
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(list(preloaded))
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, tuple(arguments), sender))
    child.start()
    sender.close()
    answer: Any = None
    failure = f"over {time_limit:.0f} s"
    try:
        if receiver.poll(time_limit):
            answer, failure = receiver.recv(), ""
    except EOFError:
        child.join()
        failure = f"its process ended with {child.exitcode}"
    child.join(0.0 if failure else _CLOSING_S)
    child.kill()
    child.join()
    if failure:
        raise ChildError(failure)
    return answer


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], sender: Connection) -> None:
    """Send what the function returns; what models' classes print is nobody's."""
    import torch

    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sender.send(function(*arguments))
