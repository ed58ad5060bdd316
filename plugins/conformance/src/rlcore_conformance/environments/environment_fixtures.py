"""How the kit builds an environment and plays episodes of it."""

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, get_args

import numpy as np
import pytest
from attrs import frozen

from rlcore.registry.binding import build_environment
from rlcore.schema.printable import lone_surrogate
from rlcore.spi import (
    EnvironmentContext,
    EpisodeFailure,
    FailureKind,
    FinishReason,
    Observation,
    Provider,
    ResetResult,
    Row,
    StepResult,
    Turn,
    capabilities,
)
from rlcore_conformance.environments.tool_turns import check_tools
from rlcore_conformance.references.fixtures import ProviderFixtures, entry_of
from rlcore_text.chats.images import content_fault

ANSWERS = (
    "",
    "42",
    "a b c\n\n",
    "<answer>7</answer> \\boxed{3}",
    "ünïcødé 🙂 \x00\x7f",
    "the " * 400,
    '{"name": "x", "arguments": {',
)
"""Turns that a model may well generate: right, wrong, cut off and senseless ones."""
MAX_ROWS = 64
MAX_TURNS = 3
SEED = 12345
KINDS = get_args(FailureKind)
LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32 in the end."""

Result = TypeVar("Result")
OpenEnvironment: TypeAlias = Callable[[], Any]


@frozen(kw_only=True, eq=False)
class EnvironmentUnderTest:
    """An environment, with the calls that the checks repeat; each has its time."""

    provider: Provider
    backend: Any
    timeout_s: float
    most_at_once: int | None = None
    """Episodes that may call at the same time, by the provider's word; None where there is no bound."""

    def rows(self, split: str) -> list[Row]:
        """At most MAX_ROWS records; skips the test where the environment brings none."""
        rows = self.backend.rows(split)
        if rows is None:
            others = [other for other in ("train", "evaluation") if self.backend.rows(other) is not None]
            assert not others, f"there are rows to {others}, but none for {split}; expected both or neither"
            pytest.skip(f"{self.provider.name} brings no rows: override the fixture `row` with one of its data")
        return list(itertools.islice(rows, MAX_ROWS))

    async def within_time(self, call: Awaitable[Result], name: str) -> Result:
        """Await a call, which has to end within its time."""
        try:
            return await asyncio.wait_for(call, self.timeout_s)
        except TimeoutError:
            pytest.fail(f"{name} took more than {self.timeout_s:g} s", pytrace=False)

    async def reset(self, row: Row, seed: int = SEED) -> ResetResult:
        """Begin an episode, and check how."""
        result = await self.within_time(self.backend.reset(row, seed), "reset")
        assert isinstance(result, ResetResult), f"reset returned {type(result).__name__}; expected a ResetResult"
        check_observation(result.observation)
        check_tools(result.observation)
        return result

    async def step(self, state: Any, answer: str | Turn) -> StepResult:
        """One turn, and a check of the answer to it."""
        turn = make_turn(answer) if isinstance(answer, str) else answer
        result = await self.within_time(self.backend.step(state, turn), "step")
        assert isinstance(result, StepResult), f"step returned {type(result).__name__}; expected a StepResult"
        check_step(result)
        return result

    async def call(self, state: Any, what: str, turn: Turn) -> StepResult:
        """One turn of calls of tools; fails where the environment does."""
        try:
            return await self.step(state, turn)
        except Exception as error:
            said = f"{what}, {turn.text!r}, raised {type(error).__name__}: {error}"
            raise AssertionError(f"{said}; expected an answer, since policies call tools like this") from error

    async def play(self, row: Row, answers: Sequence[str], seed: int = SEED) -> list[Any]:
        """Play an episode; return its prompt, and for each turn reward, success and observation."""
        begun = await self.reset(row, seed)
        state, seen = begun.state, [shown(begun.observation)]
        for answer in answers:
            result = await self.step(state, answer)
            seen.append(told(result))
            if result.done:
                break
            state = result.state
        return seen


class EnvironmentFixtures(ProviderFixtures):
    """The fixtures of an environment's checks; each can be overridden."""

    @pytest.fixture
    def answers(self) -> Sequence[str]:
        """The answers of the policy."""
        return ANSWERS

    @pytest.fixture
    def timeout_s(self) -> float:
        """Most seconds of one call."""
        return 30.0

    @pytest.fixture
    def open_environment(self, provider: Provider, config: Any) -> Iterator[OpenEnvironment]:
        """Builds a fresh environment; all are closed in the end."""
        opened: list[Any] = []

        def build() -> Any:
            entry = entry_of("environment", provider, "cpu")
            opened.append(build_environment(entry, EnvironmentContext(seed=0), config))
            return opened[-1]

        yield build
        for backend in opened:
            if hasattr(backend, "close"):
                backend.close()

    @pytest.fixture
    def environment(
        self, provider: Provider, config: Any, open_environment: OpenEnvironment, timeout_s: float
    ) -> EnvironmentUnderTest:
        """A fresh environment."""
        most = provider.max_concurrent(config)
        return EnvironmentUnderTest(provider=provider, backend=open_environment(), timeout_s=timeout_s, most_at_once=most)

    @pytest.fixture
    def row(self, environment: EnvironmentUnderTest) -> Row:
        """A record to begin episodes on: the first that the environment brings."""
        if capabilities.AGENT in environment.provider.capabilities:
            pytest.skip(f"{environment.provider.name} runs by itself (capability 'agent')")
        return environment.rows("train")[0]


def make_turn(text: str) -> Turn:
    """A turn of the policy; a long one was cut off."""
    tokens = np.frombuffer(text.encode() or b" ", np.uint8).astype(np.int32)
    reason = FinishReason.LENGTH if len(tokens) > 1000 else FinishReason.STOP
    return Turn(text=text, tokens=tokens, finish_reason=reason, content=text)


def told(result: StepResult) -> Any:
    """The comparable parts of an answer to a turn."""
    others = sorted(result.reward_components.items()), sorted(result.metrics.items())
    return result.reward, result.done, result.success, *others, shown(result.observation)


def shown(observation: Observation | None) -> Any:
    """The comparable parts of an observation."""
    if observation is None:
        return None
    tokens = None if observation.tokens is None else observation.tokens.tolist()
    return pickle.dumps((list(observation.messages or ()), observation.text, tokens, list(observation.tools)))


def check_observation(observation: object) -> None:
    """Fail where the policy could not read it."""
    assert isinstance(observation, Observation), f"found a {type(observation).__name__}; expected an Observation"
    kinds = [name for name in ("messages", "text", "tokens") if getattr(observation, name) is not None]
    assert len(kinds) == 1, f"an observation has {kinds or 'nothing'}; expected one of messages, text and tokens"
    if observation.text is not None:
        assert isinstance(observation.text, str), f"the text is of type {type(observation.text).__name__}; expected str"
        assert observation.text, "an observation has an empty text; expected one that can be read"
        assert not (half := lone_surrogate(observation.text)), f"the text has {half}; expected Unicode text"
    for message in observation.messages or ():
        assert isinstance(message, Mapping), f"a message is a {type(message).__name__}; expected a mapping"
        assert {"role", "content"} <= set(message), f"a message has the keys {sorted(message)}; expected role and content"
        assert not (fault := content_fault(message["content"])), f"a message's content is {fault}"
    if observation.tokens is not None:
        assert observation.tokens.dtype == np.int32, f"tokens are {observation.tokens.dtype}; expected int32"
        assert len(observation.tokens), "an observation has no tokens; expected one at least"
        assert observation.tokens.min() >= 0, f"an observation has the token {observation.tokens.min()}; expected none below 0"


def check_step(result: StepResult) -> None:
    """Fail where the loop would refuse it."""
    figures = {"reward": result.reward, **result.reward_components, **result.metrics}
    for name, value in figures.items():
        assert isinstance(name, str), f"a figure is called {name!r}; expected a string"
        assert not (half := lone_surrogate(name)), f"the name {name!r} has {half}; expected Unicode text"
        assert isinstance(value, int | float | np.number), f"{name} is of type {type(value).__name__}; expected a float"
        assert abs(value) <= LARGEST, f"{name} is {value}; expected a finite number, as float32"
    taken = result.metrics.keys() & {"failed", "timed_out"}
    assert not taken, f"metrics are called {sorted(taken)}, which the core writes itself; expected other names"
    for name in ("done", "success"):
        value = getattr(result, name)
        assert type(value) is bool, f"{name} is of type {type(value).__name__}; expected bool"
    ending = result.failure
    assert ending is None or isinstance(ending, EpisodeFailure), f"the failure is {ending!r}; expected EpisodeFailure or None"
    assert ending is None or (ending.kind in KINDS and result.done), f"found {ending} and done={result.done}; expected {KINDS}"
    assert result.done == (result.observation is None), "step shows an observation exactly where the episode is not done"
    if result.observation is not None:
        check_observation(result.observation)
        assert not result.observation.tools, "step brings tools; expected them at reset"
