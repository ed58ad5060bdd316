"""Environments that are each wrong in one known way, made from the fake; each names the check of the kit that has to fail."""

import asyncio
import itertools
import random
from types import MappingProxyType

from attrs import evolve
from mutants import killed_by

from rlcore.spi import EpisodeFailure, Observation, ResetResult, capabilities
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig

TWO_TURNS = FakeEnvironmentConfig(num_turns=2)
EPISODES = "test_an_episode_depends_on_row_and_seed"
ANSWERED = "test_whatever_is_said_is_answered"


class ChangedStep(FakeEnvironment):
    async def step(self, state, turn):
        return self.changed(await super().step(state, turn), turn)


class Fields(ChangedStep):
    """Fields of every answer are others."""

    def changed(self, result, turn):
        return evolve(result, **self.fields)


@killed_by("test_splits_share_no_row")
class RowsTrainedOnAndHeldOut(FakeEnvironment):
    def rows(self, split):
        return super().rows("train")


@killed_by("test_splits_share_no_row")
class OneRowInBothSplits(FakeEnvironment):
    def rows(self, split):
        return [*super().rows(split), super().rows("train")[0]]


@killed_by("test_splits_share_no_row")
class NothingHeldOut(FakeEnvironment):
    def rows(self, split):
        return super().rows(split) if split == "train" else []


@killed_by("test_rows_follow_the_seed")
class RowsDrawnAnew(FakeEnvironment):
    def rows(self, split):
        return random.SystemRandom().sample(super().rows(split), 16)


@killed_by("test_rows_follow_the_seed")
class RowsCounted(FakeEnvironment):
    """Over all environments of the process."""

    numbers = itertools.count()

    def __init__(self, context, config):
        super().__init__(context, config)
        self.number = next(self.numbers)

    def rows(self, split):
        return [{**row, "environment": self.number} for row in super().rows(split)]


@killed_by("test_rows_follow_the_seed")
class RowsTakenOnce(FakeEnvironment):
    def rows(self, split):
        rows, self._rows = super().rows(split), self._rows[1:]
        return rows


@killed_by(EPISODES)
class RewardsDrawnAtRandom(ChangedStep):
    def changed(self, result, turn):
        return evolve(result, reward=result.reward + random.random())


@killed_by(EPISODES)
class RewardsFall(ChangedStep):
    """The more answers it has seen."""

    seen = 0

    def changed(self, result, turn):
        self.seen += 1
        return evolve(result, reward=result.reward / self.seen + 1.0 / self.seen)


@killed_by(EPISODES)
class PromptsDrawnAtRandom(FakeEnvironment):
    async def reset(self, row, seed):
        return evolve(await super().reset(row, seed), observation=Observation(text=str(random.random())))


@killed_by(EPISODES)
class RepeatedAnswersEarnNothing(ChangedStep):
    """Those of any episode."""

    def __init__(self, context, config):
        super().__init__(context, config)
        self.known = set()

    def changed(self, result, turn):
        is_new = turn.text not in self.known
        self.known.add(turn.text)
        return evolve(result, reward=float(is_new))


@killed_by(ANSWERED)
class EmptyAnswersBreakIt(ChangedStep):
    def changed(self, result, turn):
        return evolve(result, reward=1.0 / len(turn.text))


@killed_by(ANSWERED)
class OnlyAsciiIsRead(ChangedStep):
    def changed(self, result, turn):
        turn.text.encode("ascii")
        return result


@killed_by(ANSWERED)
class NumbersAreExpected(ChangedStep):
    def changed(self, result, turn):
        return evolve(result, reward=float(int(turn.text) == 42))


@killed_by(ANSWERED)
class RewardsThatAreNone(Fields):
    fields = MappingProxyType({"reward": None})


@killed_by(ANSWERED)
class RewardsAsText(Fields):
    fields = MappingProxyType({"reward": "1.0"})


@killed_by(ANSWERED)
class RewardsThatAreNoNumber(Fields):
    fields = MappingProxyType({"reward": float("nan")})


@killed_by(ANSWERED)
class RewardsBeyondFloat32(Fields):
    fields = MappingProxyType({"reward": 1e39})


@killed_by(ANSWERED)
class ComponentsThatAreInfinite(Fields):
    fields = MappingProxyType({"reward_components": {"form": float("-inf")}})


@killed_by(ANSWERED)
class MetricsThatAreNoNumber(Fields):
    fields = MappingProxyType({"metrics": {"share": float("nan")}})


@killed_by(ANSWERED)
class DoneAsANumber(Fields):
    fields = MappingProxyType({"done": 1})


@killed_by(ANSWERED)
class SuccessAsANumber(Fields):
    fields = MappingProxyType({"success": 0.5})


@killed_by(ANSWERED)
class FailuresAsText(Fields):
    fields = MappingProxyType({"failure": "tool"})


@killed_by(ANSWERED)
class FailuresOfAnUnknownKind(Fields):
    fields = MappingProxyType({"failure": EpisodeFailure(kind="weather")})


@killed_by(ANSWERED)
class ShowsSomethingAtTheEnd(Fields):
    fields = MappingProxyType({"observation": Observation(text="bye")})


@killed_by(ANSWERED)
class ShowsNothingOnTheWay(Fields):
    options = TWO_TURNS
    fields = MappingProxyType({"observation": None})


@killed_by(ANSWERED)
class ShowsTwoThings(Fields):
    options = TWO_TURNS
    fields = MappingProxyType({"observation": Observation(text="a", messages=[{"role": "user", "content": "a"}])})


@killed_by(ANSWERED)
class MessagesWithoutARole(FakeEnvironment):
    async def reset(self, row, seed):
        return ResetResult(observation=Observation(messages=[{"content": row["prompt"]}]), state=0)


@killed_by(ANSWERED)
class StepReturnsTheReward(ChangedStep):
    def changed(self, result, turn):
        return result.reward


@killed_by(ANSWERED)
class NeverAnswersLongTurns(FakeEnvironment):
    timeout_s = 0.1

    async def step(self, state, turn):
        if len(turn.text) > 1000:
            await asyncio.sleep(3600)
        return await super().step(state, turn)


class KeptOnTheObject(FakeEnvironment):
    options = TWO_TURNS
    turn = 0

    async def reset(self, row, seed):
        self.turn = 0
        return await super().reset(row, seed)


@killed_by("test_episodes_do_not_disturb_each_other")
class TurnsCountedOnTheObject(KeptOnTheObject):
    async def step(self, state, turn):
        self.turn += 1
        return await super().step(self.turn - 1, turn)


@killed_by("test_episodes_do_not_disturb_each_other")
class AnswerKeptOnTheObject(FakeEnvironment):
    async def step(self, state, turn):
        self.answer = turn
        await asyncio.sleep(0)
        return evolve(await super().step(state, self.answer), reward=float(len(self.answer.text)))


@killed_by("test_states_stay_as_they_are")
class StateChangedInPlace(FakeEnvironment):
    async def reset(self, row, seed):
        return evolve(await super().reset(row, seed), state=[])

    async def step(self, state, turn):
        state.append(turn.text)
        return await super().step(0, turn)


@killed_by("test_states_stay_as_they_are")
class RowChangedInPlace(FakeEnvironment):
    async def reset(self, row, seed):
        row["visits"] = row.get("visits", 0) + 1
        return await super().reset(row, seed)


@killed_by("test_states_can_be_saved")
class StateThatCannotBeSaved(FakeEnvironment):
    async def reset(self, row, seed):
        return evolve(await super().reset(row, seed), state=lambda: 0)

    async def step(self, state, turn):
        return await super().step(state(), turn)


@killed_by("test_states_can_be_saved")
class StateKnownByIdentity(FakeEnvironment):
    options = TWO_TURNS

    async def reset(self, row, seed):
        self.first = ["first"]
        return evolve(await super().reset(row, seed), state=self.first)

    async def step(self, state, turn):
        return await super().step(0 if state is self.first else 1, turn)


@killed_by("test_cheap_resets_depend_on_the_row_alone")
class PromptsBySeed(FakeEnvironment):
    async def reset(self, row, seed):
        return evolve(await super().reset(row, seed), observation=Observation(text=f"{row['prompt']}{seed}"))


@killed_by("test_no_rewards_are_given_where_none_are_promised")
class RewardsDenied(FakeEnvironment):
    declares = frozenset({capabilities.NO_REWARDS})


@killed_by("test_a_call_can_be_cancelled")
class CancellationIgnored(FakeEnvironment):
    timeout_s = 0.1
    calls = 0

    async def step(self, state, turn):
        self.calls += 1
        if self.calls > 1:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(3600)
        return await super().step(state, turn)


@killed_by("test_a_call_can_be_cancelled")
class SlotLostByACancelledCall(FakeEnvironment):
    timeout_s = 0.1
    free = 3

    async def step(self, state, turn):
        while not self.free:
            await asyncio.sleep(0.01)
        self.free -= 1
        await asyncio.sleep(0)
        self.free += 1
        return await super().step(state, turn)


class Closing(FakeEnvironment):
    closed = 0

    def close(self):
        self.closed += 1


@killed_by("test_it_goes_on_after_close")
class ClosedForGood(Closing):
    async def step(self, state, turn):
        if self.closed:
            raise RuntimeError("it is closed")
        return await super().step(state, turn)


@killed_by("test_it_goes_on_after_close")
class ClosedOnlyOnce(Closing):
    def close(self):
        super().close()
        if self.closed == 2:
            raise RuntimeError("it is closed already")


@killed_by("test_it_goes_on_after_close")
class RewardsNothingOnceClosed(Closing):
    async def step(self, state, turn):
        return evolve(await super().step(state, turn), reward=-1.0 if self.closed else 1.0)


@killed_by("test_it_works_on_any_event_loop")
class KeepsItsEventLoop(FakeEnvironment):
    loop = None

    async def step(self, state, turn):
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("it is bound to another event loop")
        return await super().step(state, turn)


@killed_by(ANSWERED)
class HalfACharacter(FakeEnvironment):
    """A prompt that no tokenizer takes."""

    async def reset(self, row, seed):
        return evolve(await super().reset(row, seed), observation=Observation(text="a\ud800"))


@killed_by(ANSWERED)
class MetricOfTheCore(Fields):
    """A name that the core writes itself."""

    fields = MappingProxyType({"metrics": {"failed": 1.0}})


LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"box": {"type": "integer"}}}},
}


class WithTools(FakeEnvironment):
    """Looks are counted in the state, a dict, and not rewarded."""

    options = TWO_TURNS
    tools = (LOOK,)

    async def reset(self, row, seed):
        messages = [{"role": "user", "content": row["prompt"]}]
        return ResetResult(observation=Observation(messages=messages, tools=self.tools), state={"turns": 0, "looks": 0})

    async def step(self, state, turn):
        looks = state["looks"] + sum(self.found(call) for call in turn.tool_calls)
        result = await super().step(state["turns"], turn)
        if result.done:
            return result
        return evolve(result, state={"turns": result.state, "looks": looks}, metrics={"looks": float(looks)})

    def found(self, call):
        return call.arguments.get("box") == 1


@killed_by("test_calls_of_tools_are_answered")
class ArgumentsTakenForThere(WithTools):
    def found(self, call):
        return isinstance(call.arguments["box"], int) if call.name == "look" else False


@killed_by("test_calls_of_tools_are_answered")
class ToolsDrawnAtRandom(WithTools):
    def found(self, call):
        return random.random()


@killed_by("test_calls_of_tools_leave_the_state")
class LooksCountedInPlace(WithTools):
    async def step(self, state, turn):
        state["looks"] += len(turn.tool_calls)
        return await super().step(state, turn)


@killed_by(ANSWERED)
class ToolWithoutAFunction(WithTools):
    tools = ({"name": "look"},)


@killed_by(ANSWERED)
class ToolsBesideText(WithTools):
    async def reset(self, row, seed):
        begun = await super().reset(row, seed)
        return evolve(begun, observation=Observation(text=row["prompt"], tools=self.tools))
