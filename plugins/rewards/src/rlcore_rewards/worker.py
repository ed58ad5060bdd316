"""Reward functions in a worker process, where one that hangs, crashes or takes all memory costs its sample alone."""

import signal
import sys
from collections.abc import Sequence
from functools import lru_cache

from attrs import frozen

from rlcore.spi import ConfigError, RewardError, RlcoreError, fails_as
from rlcore_rewards.call_forms import Sample
from rlcore_rewards.reward_function import RewardFunction, load_all
from rlcore_rewards.score import RewardOutput
from rlcore_workers.pool import WorkerPool
from rlcore_workers.process import Ended, Task, ending

_functions = lru_cache(maxsize=1)(load_all)


@frozen(kw_only=True)
class Functions:
    """The functions of a pool, and where the run finds modules."""

    paths: tuple[str, ...]
    sys_path: tuple[str, ...]


def pool_of(paths: Sequence[str], num_processes: int, pass_environment: tuple[str, ...] = ()) -> WorkerPool:
    """Start worker processes for these functions, with the environment variables that are named."""
    argument = Functions(paths=tuple(paths), sys_path=tuple(sys.path))
    task = Task(
        name="rewards",
        handle="rlcore_rewards.worker:answer",
        argument=argument,
        pass_environment=pass_environment,
        shows_output=True,
    )
    return WorkerPool(task, num_processes)


async def say_all(pool: WorkerPool, functions: Sequence[RewardFunction], sample: Sample) -> list[RewardOutput]:
    """Call the functions of a pool on a sample. RewardError where one fails or ends its process."""
    answer = await pool.call(sample)
    if isinstance(answer, Ended):
        names = ", ".join(repr(function.name) for function in functions)
        with fails_as("infrastructure" if answer.exit_code == -signal.SIGKILL else "grader"):
            raise RewardError(f"the process of the reward function {names} ended with {ending(answer.exit_code)}")
    if isinstance(answer, RlcoreError):
        raise answer
    said: list[RewardOutput] = answer
    return said


def answer(functions: Functions, sample: Sample) -> list[RewardOutput] | RlcoreError:
    """Their outputs for one sample, or the reason of no reward. The modules are loaded by the first sample of each process."""
    for folder in functions.sys_path:
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        return [function.say(sample) for function in _functions(functions.paths)]
    except ConfigError as error:  # a problem of the process: the same function has loaded in the run
        found = "; ".join(problem.found for problem in error.problems)
        return RewardError(f"a worker process found {found}")
    except RlcoreError as error:
        return error
