"""Episodes each for itself: none waits for another one's tool, an error ends all of them, and a stuck event loop costs one."""

import asyncio
import contextlib
import gc
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.spi import (
    ContractError,
    DataError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Observation,
    ResetResult,
    RewardError,
    SamplingParams,
    StepResult,
    Turn,
    WorkerError,
)
from rlcore.spi.execution import ResponseFeed, Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout import environment_calls, request_queue
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode import Episode
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.episode_run import EpisodeRun
from rlcore_rollout.group_collector import GroupCollector
from rlcore_rollout.prompt_groups import GroupOptions, PromptGroups
from rlcore_rollout.schedule import Position, Schedule, SchedulePolicy
from rlcore_rollout.serialization import dumps
from rlcore_rollout.step_plans import PromptLimit, StepPlan, StepPlans
from rlcore_rollout.turns import TurnOptions, Turns
from rlcore_text.chats.conversations import Conversations

NUM_EPISODES, NUM_TURNS = 4, 3
TOKENIZER = FakeTokenizer()
Step = Callable[[Any, Turn], Any]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "GRACE_S", 0.3)


class OneToken:
    """Generates one token a sample: the seed. `before` is called with the seeds of each request, before they are answered."""

    def __init__(self, before: Callable[[list[int]], None] = lambda seeds: None) -> None:
        self.before = before
        self.seeds: list[int] = []

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        first = 0
        while (taken := feed.take(wait=True)) is not None:
            for request in taken:
                self.before(request.seeds.tolist())
                self.seeds += request.seeds.tolist()
                feed.deliver(first + np.arange(len(request.seeds)), answer(request))
                first += len(request.seeds)


def answer(request: GenerateRequest) -> Responses:
    number = len(request.seeds)
    result = GenerateResult(
        tokens=(request.seeds % 26 + 1).astype(np.int32),
        offsets=np.arange(number + 1),
        logprobs=np.zeros(number, np.float32),
        weight_versions=np.full(number, request.weight_version, np.int32),
        finish_reasons=np.full(number, FinishReason.STOP, np.uint8),
    )
    return Responses.of(result, TOKENIZER)


def going_on(number: int, turn: Turn) -> StepResult:
    return StepResult(reward=1.0, done=False, observation=Observation(text="?"), state=number)


class StepEnvironment:
    """Begins with two tokens; answers a turn with what a function of the episode's number and the turn returns. Before the
    reset with the number `late` it waits for `may_begin`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.num_resets, self.late = 0, -1
        self.may_begin = threading.Event()

    async def reset(self, row: Any, seed: int) -> ResetResult:
        self.num_resets += 1
        if self.num_resets == self.late:
            while not self.may_begin.is_set():
                await asyncio.sleep(0.001)
        return ResetResult(observation=Observation(tokens=np.array([1, 2], np.int32)), state=row["number"])

    async def step(self, state: Any, turn: Turn) -> StepResult:
        result = self._step(state, turn)
        return await result if asyncio.iscoroutine(result) else result


class Site:
    """Episodes of NUM_TURNS turns, and what became of them. The seed of turn t of episode n is 100 t + n."""

    def __init__(
        self,
        step: Step,
        on_error: Any = "error",
        timeout_s: float = 60.0,
        num_episodes: int = NUM_EPISODES,
        episode_timeout_s: float | None = None,
        position: Position | None = None,
        overlaps: bool = False,
        **policy: Any,
    ) -> None:
        self.environment = StepEnvironment(step)
        self.runner = EpisodeRunner(self.environment, timeout_s, on_error)  # type: ignore[arg-type]
        self.counts: list[tuple[int, int]] = []
        self.failures = MaskedFailures(num_samples=num_episodes, of="the step", max_fraction=0.5)
        draws: Any = SimpleNamespace(reset_seeds=[0] * num_episodes, seed=lambda turn, place, _: 100 * turn + place)
        plan = StepPlan(rows=[{"number": number} for number in range(num_episodes)], draws=draws)
        plans = StepPlans(lambda _: plan, num_episodes, 1)
        self.episode_turns = Turns(
            options=TurnOptions(sampling=SamplingParams(), max_turns=NUM_TURNS, timeout_s=episode_timeout_s),
            runner=self.runner,
            tokenizer=TOKENIZER,
            failures=self.failures,
            seed_of=plans.seed,
            num_samples=num_episodes,
            on_sampled=lambda *counts: self.counts.append(counts),
        )
        options = GroupOptions(
            group_size=1,
            prompt_limit=PromptLimit(max_tokens=2, drops=False, key="data.train"),
            max_response_tokens=100,
            max_turn_tokens=None,
            placeholder=0,
        )
        schedule = Schedule(SchedulePolicy(**{"groups_per_step": num_episodes, "num_steps": 1, **policy}), position)
        self.collector = GroupCollector(
            work=PromptGroups(options=options, plans=plans, runner=self.runner, turns=self.episode_turns, tokenizer=TOKENIZER),
            runner=self.runner,
            pack=lambda groups: pytest.fail("no test packs groups"),
            capacity=schedule.policy.capacity,
            starts_together=schedule.policy.starts_together,
            overlaps=overlaps,
        )
        self.made = EpisodeRun(
            schedule=schedule,
            plans=plans,
            failures=self.failures,
            collectors=self.collector,
            limit=options.prompt_limit,
            group_size=1,
        )
        self.episodes: list[Episode] = []

    def run(self, generator: Any) -> None:
        try:
            self.made.collect(generator, 7)
        finally:
            groups = self.made.between(lambda: dict(self.collector.groups))
            self.episodes = [episode for number in sorted(groups) for episode in groups[number].episodes]

    @property
    def valid(self) -> list[bool]:
        return [episode.valid for episode in self.episodes]

    @property
    def turns(self) -> list[int]:
        """Tokens that each episode has said."""
        return [episode.num_generated for episode in self.episodes]


@pytest.fixture
def make() -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make_site(step: Step, **options: Any) -> Site:
        made.append(Site(step, **options))
        return made[-1]

    yield make_site
    for site in made:
        site.runner.close()


def test_episodes_read_and_say_to_their_last_turn(make: Callable[..., Site]) -> None:
    site, generator = make(going_on), OneToken()
    site.run(generator)
    assert sorted(generator.seeds) == [100 * turn + number for turn in range(NUM_TURNS) for number in range(NUM_EPISODES)]
    question = TOKENIZER.encode("?")
    for number, episode in enumerate(site.episodes):
        said = [(100 * turn + number) % 26 + 1 for turn in range(NUM_TURNS)]
        assert episode.context().tolist() == [1, 2, said[0], *question, said[1], *question, said[2]]
        assert (episode.ended, episode.valid, sum(episode.rewards), episode.turn) == (True, True, 3.0, NUM_TURNS - 1)
        assert set(np.concatenate(episode.versions).tolist()) == {-1, 7}
    assert site.counts[-1] == (NUM_EPISODES * NUM_TURNS, NUM_EPISODES * NUM_TURNS)
    assert all(NUM_EPISODES <= num_asked >= num_sampled for num_sampled, num_asked in site.counts)


def hold_time(site: Site, left: set[int]) -> None:
    """No episode's time passes while some of these are left, as none does while their generator is stopped."""
    stopped_s = [0.0]

    def stopped() -> float:
        stopped_s[0] += 0.01 if left else 0.0
        return stopped_s[0]

    site.episode_turns.count.stopped_s = stopped  # type: ignore[method-assign]


def is_last(number: int, turn: Turn) -> bool:
    """Whether it is an episode's last turn."""
    return bool(turn.tokens[-1] == (100 * (NUM_TURNS - 1) + number) % 26 + 1)


def test_an_episode_over_its_time_is_masked_and_changes_no_other(make: Callable[..., Site]) -> None:
    """Whatever the recipe does with failures; the group keeps its size, and what was said until then stays in it."""
    left = set(range(NUM_EPISODES))

    async def step(number: int, turn: Turn) -> StepResult:
        if number == 0 and turn.tokens[-1] == 100 % 26 + 1:  # the second turn
            left.discard(number)
            await asyncio.Event().wait()
        if is_last(number, turn):
            left.discard(number)
        return going_on(number, turn)

    site, generator = make(step, episode_timeout_s=0.5), OneToken()
    hold_time(site, left)
    site.run(generator)
    assert site.valid == [False] + [True] * (NUM_EPISODES - 1)
    assert [episode.timed_out for episode in site.episodes] == [True] + [False] * (NUM_EPISODES - 1)
    assert site.turns == [2] + [NUM_TURNS] * (NUM_EPISODES - 1)
    assert site.failures.reasons == {0: "took longer than 0.5 s (rollout.episode_timeout_s)"}


def test_time_that_waits_for_a_sample_counts(make: Callable[..., Site]) -> None:
    class ForgetsTheFirst(OneToken):
        """Answers the first episode once the stream ends."""

        def stream(self, feed: ResponseFeed, weight_version: int) -> None:
            first, kept = 0, []
            while (taken := feed.take(wait=True)) is not None:
                for request in taken:
                    samples, result = first + np.arange(len(request.seeds)), answer(request)
                    first += len(samples)
                    for row, seed in enumerate(request.seeds.tolist()):
                        if seed == 0:
                            kept.append((samples[row : row + 1], one_of(result, row)))
                        else:
                            feed.deliver(samples[row : row + 1], one_of(result, row))
            for late in kept:
                feed.deliver(*late)

    left = set(range(1, NUM_EPISODES))

    def step(number: int, turn: Turn) -> StepResult:
        if is_last(number, turn):
            left.discard(number)
        return going_on(number, turn)

    site = make(step, episode_timeout_s=0.5)
    hold_time(site, left)
    site.run(ForgetsTheFirst())
    assert site.valid == [False] + [True] * (NUM_EPISODES - 1)
    assert site.turns == [0] + [NUM_TURNS] * (NUM_EPISODES - 1)


def test_a_slow_tool_holds_nobody_else(make: Callable[..., Site]) -> None:
    """The first episode's first answer comes after all turns of all others."""
    left = set(range(1, NUM_EPISODES))
    others_are_done = asyncio.Event()

    async def step(number: int, turn: Turn) -> StepResult:
        if number == 0:
            await others_are_done.wait()
        elif is_last(number, turn):
            left.discard(number)
            if not left:
                others_are_done.set()
        return going_on(number, turn)

    site, generator = make(step), OneToken()
    site.run(generator)
    assert site.turns == [NUM_TURNS] * NUM_EPISODES
    assert [seed for seed in generator.seeds if seed % 100 == 0][1:] == generator.seeds[-(NUM_TURNS - 1) :]


def test_a_slow_sample_holds_nobody_else(make: Callable[..., Site]) -> None:
    class KeepsTheFirst(OneToken):
        """Answers the first episode's first request once all others have ended."""

        def stream(self, feed: ResponseFeed, weight_version: int) -> None:
            first, kept = 0, -1
            while (taken := feed.take(wait=True)) is not None:
                for request in taken:
                    samples = first + np.arange(len(request.seeds))
                    first += len(samples)
                    result = answer(request)
                    for row, seed in enumerate(request.seeds.tolist()):
                        if seed == 0:
                            kept, late = samples[row], result
                        else:
                            feed.deliver(samples[row : row + 1], one_of(result, row))
                        self.seeds.append(seed)
                    if kept >= 0 and len(self.seeds) == NUM_TURNS * (NUM_EPISODES - 1) + 1:
                        feed.deliver(np.array([kept]), one_of(late, 0))
                        kept = -1

    site = make(going_on)
    site.run(KeepsTheFirst())
    assert site.turns == [NUM_TURNS] * NUM_EPISODES


def one_of(responses: Responses, row: int) -> Responses:
    result = responses.result
    part = slice(row, row + 1)
    return Responses.of(
        GenerateResult(
            tokens=result.tokens[part],
            offsets=np.array([0, 1]),
            logprobs=result.logprobs[part],
            weight_versions=result.weight_versions[part],
            finish_reasons=result.finish_reasons[part],
        ),
        TOKENIZER,
    )


@pytest.mark.parametrize("error", [LookupError("no tool"), WorkerError("the judge died")])
def test_an_error_ends_the_run(make: Callable[..., Site], error: Exception) -> None:
    """While others still wait for their tools."""

    async def step(number: int, turn: Turn) -> StepResult:
        if number == 2:
            raise error
        await asyncio.sleep(3600)
        return going_on(number, turn)

    site = make(step)
    with pytest.raises((RewardError, WorkerError), match="environment.step, episode 2 of 4") as raised:
        site.run(OneToken())
    assert raised.value.__cause__ is error
    assert isinstance(raised.value, WorkerError) == isinstance(error, WorkerError)


def test_a_masked_failure_ends_one_episode(make: Callable[..., Site]) -> None:
    def step(number: int, turn: Turn) -> StepResult:
        if number == 2:
            raise LookupError("no tool")
        return going_on(number, turn)

    site = make(step, on_error="mask")
    site.run(OneToken())
    assert site.valid == [True, True, False, True]
    assert site.turns == [NUM_TURNS, NUM_TURNS, 1, NUM_TURNS]
    assert list(site.failures.reasons) == [2]


def test_a_tool_over_its_time_fails_its_episode_and_holds_nobody(make: Callable[..., Site]) -> None:
    async def step(number: int, turn: Turn) -> StepResult:
        if number == 2:
            await asyncio.sleep(3600)
        return going_on(number, turn)

    site = make(step, on_error="mask", timeout_s=0.2)
    site.run(OneToken())
    assert site.turns == [NUM_TURNS, NUM_TURNS, 1, NUM_TURNS]
    assert list(site.failures.reasons) == [2]
    assert "0.2 s (rollout.environment_timeout_s)" in site.failures.reasons[2]


def test_too_many_failures_end_the_run(make: Callable[..., Site]) -> None:
    def step(number: int, turn: Turn) -> StepResult:
        raise LookupError("no tool")

    with pytest.raises(RewardError, match=r"4 of 4 samples of the step.*max_failed_fraction = 0\.5"):
        make(step, on_error="mask").run(OneToken())


@pytest.mark.parametrize("in_system_call", [False, True])
def test_a_stuck_event_loop_is_given_up_and_the_rest_goes_on_from_data(make: Callable[..., Site], in_system_call: bool) -> None:
    """Nothing is generated twice, and of what was answered nothing is asked again."""
    released = threading.Event()
    asked: Counter[int] = Counter()

    def step(number: int, turn: Turn) -> StepResult:
        asked[number] += 1
        if number == 1 and asked[1] == 2:
            if in_system_call:
                released.wait()
            else:
                while True:
                    pass
        return going_on(number, turn)

    site, generator = make(step, on_error="mask", timeout_s=0.2), OneToken()
    site.run(generator)
    released.set()
    assert site.valid == [True, False, True, True]
    assert site.turns == [NUM_TURNS, 2, NUM_TURNS, NUM_TURNS]
    assert sum(site.episodes[1].rewards) == 1.0
    assert "neither returned nor let itself be cancelled" in site.failures.reasons[1]
    assert len(generator.seeds) == len(set(generator.seeds)) == NUM_EPISODES * NUM_TURNS - 1
    assert asked == {0: NUM_TURNS, 1: 2, 2: NUM_TURNS, 3: NUM_TURNS}


def test_a_stuck_event_loop_that_goes_on_later_changes_nothing(make: Callable[..., Site]) -> None:
    """The call that was given up returns after all, while the other event loop works on the rest."""
    released = threading.Event()

    async def step(number: int, turn: Turn) -> StepResult:
        if number == 1:
            with contextlib.suppress(BaseException):  # what ends the thread
                released.wait()
        elif number == 3:
            await asyncio.sleep(0.05)
            if is_last(number, turn):
                released.set()
                await asyncio.sleep(0.3)
        return going_on(number, turn)

    site, generator = make(step, on_error="mask", timeout_s=2.0), OneToken()
    site.run(generator)
    assert site.valid == [True, False, True, True]
    assert site.turns == [NUM_TURNS, 1, NUM_TURNS, NUM_TURNS]
    assert [sum(episode.rewards) for episode in site.episodes] == [3.0, 0.0, 3.0, 3.0]
    assert len(generator.seeds) == len(set(generator.seeds))


def test_an_error_of_the_generator_ends_the_run_and_cancels_the_calls_under_way(make: Callable[..., Site]) -> None:
    cancelled = threading.Event()

    async def step(number: int, turn: Turn) -> StepResult:
        if number == 0:
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()
        return going_on(number, turn)

    def fails(seeds: list[int]) -> None:
        if max(seeds) >= 100:
            raise ContractError("engine 0 is wrong")

    with pytest.raises(ContractError, match="engine 0 is wrong"):
        make(step).run(OneToken(fails))
    assert cancelled.wait(300)


def test_what_a_worker_that_died_owes_is_generated_once_more(make: Callable[..., Site]) -> None:
    """Its environments' answers are not asked for again."""
    answered: Counter[tuple[int, str]] = Counter()

    def step(number: int, turn: Turn) -> StepResult:
        answered[number, turn.text] += 1
        return going_on(number, turn)

    def dies(seeds: list[int]) -> None:
        if max(seeds) >= 100:
            raise WorkerError("engine 0 died")

    site, alone = make(step), make(going_on)
    with pytest.raises(WorkerError, match="engine 0 died"):
        site.run(OneToken(dies))
    site.run(OneToken())
    alone.run(OneToken())
    assert site.turns == [NUM_TURNS] * NUM_EPISODES
    assert [one.text for one in site.episodes] == [one.text for one in alone.episodes]
    assert set(answered.values()) == {1}


def test_ctrl_c_ends_a_stream_that_waits_for_a_tool(make: Callable[..., Site]) -> None:
    cancelled = threading.Event()

    async def step(number: int, turn: Turn) -> StepResult:
        if number == 0:
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return going_on(number, turn)

    with pytest.raises(KeyboardInterrupt):
        make(step).run(OneToken())
    assert cancelled.wait(300)


def test_seconds_are_idle_where_no_sample_was_asked_for(make: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that only the tools move: the last tool of each turn is waited for by nothing but itself."""
    now = [100.0]
    monkeypatch.setattr(request_queue, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic))

    def step(number: int, turn: Turn) -> StepResult:
        now[0] += 5.0
        return going_on(number, turn)

    alone = make(step, num_episodes=1)
    alone.run(OneToken())
    assert alone.episode_turns.count.idle_s() == 5.0 * NUM_TURNS

    def work(seeds: list[int]) -> None:
        now[0] += 1000.0

    generating = make(going_on)
    generating.run(OneToken(work))
    assert generating.episode_turns.count.idle_s() == 0.0


def test_a_generator_is_stopped_from_the_first_time_that_it_is_told_so(
    make: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refit, an evaluation and a checkpoint may each stop it: none of their seconds count against an episode's."""
    now = [100.0]
    monkeypatch.setattr(request_queue, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    stopped = make(going_on).episode_turns.count
    for is_generating in (True, False, False, True, True, False):
        stopped.generating(is_generating)
        now[0] += 5.0
    assert stopped.stopped_s() == 15.0


def test_a_group_may_be_dropped_while_it_begins(make: Callable[..., Site]) -> None:
    """Its environment has answered, and its prompt is not encoded yet."""
    site = make(going_on, num_episodes=1, num_steps=2, num_extra=1, on_stale="drop")
    site.environment.late = 2
    assert site.made.collect(OneToken(), 7) == [0]
    site.environment.may_begin.set()
    with site.made.still():
        site.made.train()
    assert site.made.collect(OneToken(), 8) == [2]
    site.made.close()


def test_work_that_finds_nothing_to_do_ends(make: Callable[..., Site]) -> None:
    """In a resumed run all may be complete. The event loop is busy, so that the batch is looked for before its work begins."""
    position = Position(next_number=2, complete={0: 0, 1: 0})
    site = make(going_on, num_episodes=1, num_steps=3, max_staleness=1, overlaps=True, position=position)
    complete = [EpisodeGroup(number=number) for number in range(2)]
    for group in complete:
        group.begin(np.zeros(1, np.int32), None, 1, 100)
    site.made.restore({group.number: dumps(site.collector.work.saved(group)) for group in complete})
    site.runner.thread().loop.call_soon_threadsafe(time.sleep, 0.1)
    taken = []
    for step in range(3):
        taken += site.made.collect(OneToken(), step)
        site.made.train()
        site.made.pause()
    assert taken == [0, 1, 2]
    site.made.close()


def test_an_error_where_time_is_over_ends_the_run(make: Callable[..., Site]) -> None:
    """Though no event loop tells what its timers raise, and all environments hang."""

    async def step(number: int, turn: Turn) -> StepResult:
        await asyncio.Event().wait()
        return going_on(number, turn)

    site = make(step, episode_timeout_s=0.2, max_refills=0)
    with pytest.raises(RewardError, match="rollout.max_refill_ratio"):
        site.run(OneToken())


def test_failures_of_replaced_groups_count(make: Callable[..., Site]) -> None:
    """What ends the run is that the environment fails, not that its rewards are equal."""

    def step(number: int, turn: Turn) -> StepResult:
        raise LookupError("no tool")

    site = make(step, on_error="mask", max_refills=100)
    with pytest.raises(RewardError, match="raised LookupError: no tool.*rollout.max_failed_fraction"):
        site.run(OneToken())


def test_so_do_their_other_samples(make: Callable[..., Site]) -> None:
    """One in four fails. Of groups of one sample all are replaced: what ends the run is that nothing can be learned."""

    def step(number: int, turn: Turn) -> StepResult:
        if number % NUM_EPISODES == 1:
            raise LookupError("no tool")
        return StepResult(reward=1.0, done=True)

    site = make(step, on_error="mask", max_refills=40)
    with pytest.raises(RewardError, match="rollout.max_refill_ratio"):
        site.run(OneToken())
    assert 2 < len(site.failures.reasons) < NUM_EPISODES * 40 // 2


def test_no_timer_keeps_what_an_episode_has_said(make: Callable[..., Site]) -> None:
    """Steps take seconds, and the time of an episode may be hours."""
    site = make(going_on, episode_timeout_s=3600.0)
    site.run(OneToken())
    episodes = [weakref.ref(episode) for episode in site.episodes]
    site.episodes.clear()
    site.made.train()
    gc.collect()
    assert [episode() for episode in episodes] == [None] * NUM_EPISODES


def test_what_a_chat_template_cannot_tell_fails_its_episode(make: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Conversations, episodes: list[int], shown: list[Observation], budgets: Any = None) -> list[Any]:
        return [DataError("rewritten") if number == 1 else (np.array([9], np.int32), False) for number in episodes]

    monkeypatch.setattr(Conversations, "read", read)
    masking = make(going_on, on_error="mask")
    masking.run(OneToken())
    assert masking.valid == [True, False, True, True]
    with pytest.raises(DataError, match="rewritten"):
        make(going_on).run(OneToken())
