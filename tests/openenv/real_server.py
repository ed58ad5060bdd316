"""The game on OpenEnv's own server; a program for an interpreter that has openenv-core. Prints its address."""

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment

sys.path.insert(0, str(Path(__file__).parent))
from game import Game  # type: ignore[import-not-found]


class Guess(Action):
    message: str


class Seen(Observation):
    text: str
    left: int


class GameEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.game = Game()

    def reset(self, seed: int | None = None, hint: str = "", **others: Any) -> Seen:
        return Seen(**self.game.reset(seed or 0, hint))

    def step(self, action: Guess, **others: Any) -> Seen:
        seen, reward, done = self.game.step(action.message)
        return Seen(**seen, reward=reward, done=done)

    @property
    def state(self) -> State:
        return State()


class ToolEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server, self.game, self.last = FastMCP("game"), Game(), (None, False)

        @server.tool
        def guess(letter: str) -> str:
            """Guesses."""
            seen, *self.last = self.game.step(letter)
            return seen["text"]

        super().__init__(server)

    def reset(self, seed: int | None = None, **others: Any) -> Observation:
        self.game.reset(seed or 0)
        return Observation()

    async def step_async(self, action: Action, **others: Any) -> Observation:
        self.last = (None, False)
        seen = await super().step_async(action, **others)
        seen.reward, seen.done = self.last
        return seen

    def _step_impl(self, action: Action, **others: Any) -> Observation:
        raise ValueError("expected a call of a tool")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kind, max_concurrent = sys.argv[1:]
    parts = (ToolEnvironment, Action, Observation) if kind == "tools" else (GameEnvironment, Guess, Seen)
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = create_fastapi_app(*parts, max_concurrent_envs=int(max_concurrent))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
