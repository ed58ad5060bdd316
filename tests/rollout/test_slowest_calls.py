"""The slowest calls of the environment in a step."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlcore.spi import Observation, ResetResult
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.slowest_calls import FILE, LEAST_S, MAX_CALLS, SlowestCalls


def read(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / FILE).read_text())
    return found


def test_the_slowest_stay_and_each_step_begins_anew(tmp_path: Path) -> None:
    slowest = SlowestCalls()
    for number in (3, 1, 9, 4, 7, 2, 8, 6):
        if number > slowest.least_s:
            slowest.add(float(number), "step", lambda number=number: f"episode {number}")
    slowest.write(tmp_path, 5)
    found = read(tmp_path)
    assert found["step"] == 5
    assert [call["seconds"] for call in found["calls"]] == [9.0, 8.0, 7.0, 6.0, 4.0][:MAX_CALLS]
    assert found["calls"][0] == {"seconds": 9.0, "function": "step", "episode": "episode 9"}
    slowest.write(tmp_path, 6)
    assert read(tmp_path) == found, "a step without slow calls leaves the file"
    slowest.add(1.0, "reset", lambda: "again")
    slowest.write(tmp_path, 7)
    assert [call["episode"] for call in read(tmp_path)["calls"]] == ["again"]


def test_a_slow_call_is_named_by_its_row_and_a_quick_one_is_not(tmp_path: Path) -> None:
    async def reset(row: dict[str, Any], seed: int) -> ResetResult:
        await asyncio.sleep(3 * LEAST_S if row["prompt"] == "slow" else 0)
        return ResetResult(observation=Observation(text="x"), state=row)

    runner = EpisodeRunner(SimpleNamespace(reset=reset), 60.0)  # type: ignore[arg-type]
    try:
        runner.reset_all([{"prompt": "quick"}, {"prompt": "slow"}], [0, 0])
    finally:
        runner.close()
    runner.slowest.write(tmp_path, 1)
    calls = read(tmp_path)["calls"]
    assert any(call["function"] == "reset" and "slow" in call["episode"] for call in calls)
    assert all(call["seconds"] > LEAST_S for call in calls)
