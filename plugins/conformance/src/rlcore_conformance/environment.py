"""The environment's part of the conformance kit."""

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, ParamSpec

import pytest

from rlcore import serialization
from rlcore.spi import ResetResult, Row, StepResult, Tool, capabilities
from rlcore_conformance.environments.environment_fixtures import (
    MAX_TURNS,
    SEED,
    EnvironmentFixtures,
    EnvironmentUnderTest,
    OpenEnvironment,
    shown,
    told,
)
from rlcore_conformance.environments.tool_turns import tool_turns
from rlcore_conformance.references.fixtures import require

NUM_AT_ONCE = 24
_Fixtures = ParamSpec("_Fixtures")


def on_a_loop(check: Callable[_Fixtures, Coroutine[Any, Any, None]]) -> Callable[_Fixtures, None]:
    """Make an asynchronous check one that pytest calls: it runs on an event loop of its own."""

    @wraps(check)
    def run(*fixtures: _Fixtures.args, **named: _Fixtures.kwargs) -> None:
        asyncio.run(check(*fixtures, **named))

    return run


class EnvironmentConformance(EnvironmentFixtures):
    """The checks that every environment has to pass::

        class TestMine(EnvironmentConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    Fixtures to override where the default does not fit: `config` (the provider's defaults), `row` (the first that the
    environment brings; one that brings none has to be given one), `answers` (what the policy says) and `timeout_s` (30 for each
    call). Of an environment that runs by itself (capability `agent`) the rows alone are checked.
    """

    def test_splits_share_no_row(self, environment: EnvironmentUnderTest) -> None:
        """No row is both held out and trained on."""
        train, held_out = ({pickle.dumps(dict(row)) for row in environment.rows(split)} for split in ("train", "evaluation"))
        assert train, "there are no rows to train on"
        assert held_out, "there are no rows to evaluate on"
        assert not train & held_out, f"{len(train & held_out)} rows are both trained on and held out"

    def test_rows_follow_the_seed(self, environment: EnvironmentUnderTest, open_environment: OpenEnvironment) -> None:
        """A resumed run finds the rows that it had, in their order."""
        for split in ("train", "evaluation"):
            rows = environment.rows(split)
            again = [list(source.rows(split))[: len(rows)] for source in (environment.backend, open_environment())]
            expected = [pickle.dumps(dict(row)) for row in rows]
            assert all([pickle.dumps(dict(row)) for row in other] == expected for other in again), f"{split}: rows change"

    @on_a_loop
    async def test_an_episode_depends_on_row_and_seed(
        self, environment: EnvironmentUnderTest, open_environment: OpenEnvironment, row: Row, answers: Sequence[str]
    ) -> None:
        """Equal turns are answered alike, by this environment and by another that was built with the same options."""
        other = EnvironmentUnderTest(provider=environment.provider, backend=open_environment(), timeout_s=environment.timeout_s)
        for answer in answers:
            turns = [answer] * MAX_TURNS
            expected = await environment.play(row, turns)
            for source in (environment, other):
                assert await source.play(row, turns) == expected, f"the answer {answer[:20]!r} is judged in two ways"

    @on_a_loop
    async def test_whatever_is_said_is_answered(
        self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]
    ) -> None:
        """With finite rewards and one observation, until the episode is done."""
        for first in answers:
            for second in answers:
                await environment.play(row, [first, second])

    @on_a_loop
    async def test_calls_of_tools_are_answered(
        self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]
    ) -> None:
        """Right calls and wrong ones, twice alike and by a saved state too."""
        begun = await environment.reset(row)
        for what, turn in tool_turns(require_tools(environment, begun)).items():
            here = await environment.call(sent(begun.state), what, turn)
            there = await environment.call(sent(begun.state), what, turn)
            assert told(here) == told(there), f"{what} is answered in two ways"
            if not here.done:
                await environment.call(sent(here.state), f"{what} once more", turn)
                await environment.step(sent(here.state), answers[-1])

    @on_a_loop
    async def test_calls_of_tools_leave_the_state(self, environment: EnvironmentUnderTest, row: Row) -> None:
        """They bring a new one, since the samples of a group start from one reset."""
        begun = await environment.reset(row)
        kept, before = pickle.dumps(dict(row)), saved(begun.state)
        for what, turn in tool_turns(require_tools(environment, begun)).items():
            await environment.call(begun.state, what, turn)
            assert saved(begun.state) == before, f"{what} changed the state in place"
        assert pickle.dumps(dict(row)) == kept, "the row has changed"

    @on_a_loop
    async def test_episodes_do_not_disturb_each_other(
        self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]
    ) -> None:
        """Many at once come to what each comes to alone."""
        turns = [[answers[(index + k) % len(answers)] for k in range(MAX_TURNS)] for index in range(NUM_AT_ONCE)]
        alone = [await environment.play(row, each) for each in turns]
        begun = [await environment.reset(row) for _ in turns]
        states, beside = [result.state for result in begun], [[shown(result.observation)] for result in begun]
        going = list(range(NUM_AT_ONCE))
        for k in range(MAX_TURNS):
            results: list[StepResult] = []
            for some in batched(going, environment.most_at_once or NUM_AT_ONCE):
                results += await asyncio.gather(*(environment.step(states[index], turns[index][k]) for index in some))
            for index, result in zip(going, results, strict=True):
                beside[index].append(told(result))
                states[index] = result.state
            going = [index for index, result in zip(going, results, strict=True) if not result.done]
        assert beside == alone, "episodes come to something else beside others"

    @on_a_loop
    async def test_states_stay_as_they_are(self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]) -> None:
        """The samples of a group start from one reset, so that `step` changes neither its state nor the row."""
        kept = pickle.dumps(dict(row))
        begun = await environment.reset(row)
        before = saved(begun.state)
        for answer in answers:
            await environment.step(begun.state, answer)
            assert saved(begun.state) == before, f"the answer {answer[:20]!r} changed the state in place"
        assert pickle.dumps(dict(row)) == kept, "the row has changed"

    @on_a_loop
    async def test_states_can_be_saved(self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]) -> None:
        """An episode goes on from the state that a checkpoint keeps."""
        state = (await environment.reset(row)).state
        for answer in answers:
            here, there = await environment.step(state, answer), await environment.step(sent(state), answer)
            assert told(here) == told(there), "a saved state leads elsewhere"

    @on_a_loop
    async def test_cheap_resets_depend_on_the_row_alone(self, environment: EnvironmentUnderTest, row: Row) -> None:
        """Prompts are counted before the run, with another seed than they are shown with."""
        require(environment.provider, capabilities.CHEAP_RESET)
        first, second = await environment.reset(row, SEED), await environment.reset(row, SEED + 1)
        assert shown(first.observation) == shown(second.observation), "the prompt depends on the seed"

    @on_a_loop
    async def test_no_rewards_are_given_where_none_are_promised(
        self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]
    ) -> None:
        """Groups are not told apart by them."""
        require(environment.provider, capabilities.NO_REWARDS)
        for answer in answers:
            result = await environment.step((await environment.reset(row)).state, answer)
            assert result.reward == 0, f"the answer {answer[:20]!r} is rewarded by {result.reward}"

    @on_a_loop
    async def test_a_call_can_be_cancelled(self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]) -> None:
        """It ends soon, and the environment goes on."""
        expected = await environment.play(row, answers[:1])
        state = (await environment.reset(row)).state
        for answer in answers:
            task = asyncio.ensure_future(environment.step(state, answer))
            await asyncio.sleep(0)
            task.cancel()
            _, pending = await asyncio.wait([task], timeout=environment.timeout_s)
            assert not pending, "a cancelled step goes on"
        assert await environment.play(row, answers[:1]) == expected, "it answers otherwise after a call was cancelled"

    def test_it_goes_on_after_close(self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]) -> None:
        """`close` may come twice, and a later call starts the environment again."""
        if not hasattr(environment.backend, "close"):
            pytest.skip(f"{environment.provider.name} has no method close")
        expected = asyncio.run(environment.play(row, answers[:1]))
        for _ in range(2):
            environment.backend.close()
        assert asyncio.run(environment.play(row, answers[:1])) == expected, "it answers otherwise after close"

    def test_it_works_on_any_event_loop(self, environment: EnvironmentUnderTest, row: Row, answers: Sequence[str]) -> None:
        """The loop starts a new one where a call got stuck."""
        found = [asyncio.run(environment.play(row, answers[:2])) for _ in range(2)]
        assert found[0] == found[1], "it answers otherwise on another event loop"


def require_tools(environment: EnvironmentUnderTest, begun: ResetResult) -> Sequence[Tool]:
    """The tools of an episode; skips the test where there are none."""
    if not begun.observation.tools:
        pytest.skip(f"{environment.provider.name} brings no tools")
    return begun.observation.tools


def batched(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """One part after the other, each of at most `size`."""
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


def sent(state: object) -> object:
    """Return the state as a resumed run gets it."""
    copy: object = serialization.loads(saved(state))
    return copy


def saved(state: object) -> bytes:
    """Return the state's bytes in a checkpoint. The test fails where the state cannot be saved."""
    try:
        return serialization.dumps(state)
    except Exception as error:
        pytest.fail(f"the state cannot be saved in a checkpoint: {error}", pytrace=False)
