"""Tasks for tests, the interpreter with Harbor, and episodes whose policy says what a test has written."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import EnvironmentContext, EpisodeResult, SessionEndpoint, capabilities
from rlcore_harbor.config import HarborConfig
from rlcore_harbor.environment import HarborBackend
from rlcore_serve.sessions.interface import Segment
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Sessions

from ..serving.sessions.chat_model import Script, served  # type: ignore[import-not-found]

PYTHON = os.environ.get("RLCORE_HARBOR_PYTHON")
REAL = pytest.mark.skipif(PYTHON is None, reason="RLCORE_HARBOR_PYTHON names no Python with harbor 0.26")
RECIPE = Path(__file__).parents[2] / "recipes" / "harbor"
LOCAL, ONE_ANSWER = f"{RECIPE}/local_environment.py:LocalEnvironment", f"{RECIPE}/agent.py:OneAnswer"
ABLE = frozenset({capabilities.STOP_STRINGS, capabilities.TOP_P, capabilities.TOP_K})
RIGHT = """answer=$(cat "$ROOT/app/answer.txt")
[ "$answer" = yes ] && reward=1 || reward=0
echo $reward > "$ROOT/logs/verifier/reward.txt"
"""
"""A verifier that rewards the answer "yes"."""


def write_task(
    folder: Path, *, instruction: str = "Say yes.\n", test: str = RIGHT, setup: str | None = None, toml: str = ""
) -> Path:
    """Write a task; `setup` is a script of its environment."""
    for name in ("tests", "environment"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(f"[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n{toml}")
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests" / "test.sh").write_text(test)
    if setup is not None:
        (folder / "environment" / "setup.sh").write_text(setup)
    return folder


def config_of(folder: Path, **options: Any) -> HarborConfig:
    """Options of the recipe's agent and local environment, for the tasks in a folder."""
    defaults: dict[str, Any] = {"tasks": str(folder), "python": PYTHON, "agent": ONE_ANSWER, "environment": LOCAL}
    return HarborConfig(**{**defaults, **options})


class Played:
    """An episode of the first task, with its result and segments."""

    def __init__(self, config: HarborConfig, script: Script, run: Callable[..., Any] | None = None) -> None:
        """`run` is called in place of the backend's own, with the backend, the row and the session."""
        backend, sessions = HarborBackend(EnvironmentContext(seed=0), config), Sessions()
        rows = backend.rows("train")
        assert rows is not None
        model: Any = served(script, capabilities=ABLE, max_sequence_length=100_000)
        with serving(model, sessions) as address:
            session = sessions.open()
            url = f"{address}/{session.token}/v1"
            endpoint = SessionEndpoint(base_url=url, api_key=session.token, model="policy")
            try:
                call = backend.run(rows[0], 7, endpoint) if run is None else run(backend, rows[0], endpoint)
                self.result: EpisodeResult = asyncio.run(asyncio.wait_for(call, 300))
            finally:
                script.waits = False
                backend.close()
                self.segments: list[Segment] = list(sessions.finish(session))
