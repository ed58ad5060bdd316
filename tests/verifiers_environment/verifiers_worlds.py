"""Small environments for the real package, as an environment's own module would have them."""

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset
from datasets.table import InMemoryTable

TASKS = [
    {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{number}+1"}],
        "answer": str(number + 1),
        "example_id": number,
    }
    for number in range(6)
]


def tasks(first: int, end: int) -> Dataset:
    """With a fingerprint: one that `datasets` computes fails beside some releases of pyarrow."""
    return Dataset(InMemoryTable.from_pylist(TASKS[first:end]), fingerprint=f"{first}-{end}")


def right(completion: Any, answer: str) -> float:
    """Whether the last message has the answer in it."""
    return float(answer in str(completion[-1].content))


def length(completion: Any) -> float:
    return float(len(completion))


def rubric() -> vf.Rubric:
    rubric = vf.Rubric(funcs=[right], weights=[2.0])
    rubric.add_metric(length)
    return rubric


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Twice(vf.MultiTurnEnv):
    """Asks once more."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "sure?"}]


class Broken(Twice):
    """Loses what it runs on between the turns."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise vf.InfraError("the sandbox is gone")


class FirstFails(Twice):
    """Its first episode meets a fault between the turns; the reward is the length of what was said last."""

    def __init__(self, fault: Any, **options: Any) -> None:
        super().__init__(**options)
        self._fault, self._number = fault, 0

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        self._number += 1
        if self._number == 1:
            await self._fault()
        return await super().env_response(messages, state, **kwargs)


async def loses_the_sandbox() -> None:
    raise vf.SandboxError("the sandbox is gone")


async def loses_the_tool() -> None:
    raise vf.ToolCallError("no search")


async def waits() -> None:
    await asyncio.sleep(600)


FAULTS = {"sandbox": loses_the_sandbox, "tool": loses_the_tool, "late": waits}


def letters(completion: Any) -> float:
    return float(len(str(completion[-1].content)))


def group(completions: list[Any]) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind: str = "single", evaluation: bool = True, training: bool = True) -> vf.Environment:
    """Any of them, with four tasks to train on and two for evaluation."""
    data = {"dataset": tasks(0, 4) if training else None, "eval_dataset": tasks(4, 6) if evaluation else None}
    options: dict[str, Any] = data
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=3, rubric=rubric(), **options)
    if kind == "group":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[group]), **options)
    if kind in FAULTS:
        limit_s = 3.0 if kind == "late" else None
        lengths = vf.Rubric(funcs=[letters])
        return FirstFails(FAULTS[kind], max_turns=2, rubric=lengths, timeout_seconds=limit_s, **options)
    if kind in ("twice", "broken"):
        return (Twice if kind == "twice" else Broken)(max_turns=2, rubric=rubric(), **options)
    return vf.SingleTurnEnv(rubric=rubric(), **options)
