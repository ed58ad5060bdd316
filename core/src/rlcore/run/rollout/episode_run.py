"""Runs groups of episodes, as many as a schedule lets begin, until the next step's batch is there."""

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np

from rlcore.chat.tool_calls import FORMS
from rlcore.run.data.prompts import encode_prompts
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.protocols import GeneratorGroup
from rlcore.run.rollout.background_stream import BackgroundStream
from rlcore.run.rollout.environment_calls import POLL_S, EnvironmentCalls
from rlcore.run.rollout.environment_runner import Driven, EpisodeRunner
from rlcore.run.rollout.episode import Episode, EpisodeGroup
from rlcore.run.rollout.episode_failure import Failure
from rlcore.run.rollout.episode_starts import Cohort, PromptLimit, StepPlans
from rlcore.run.rollout.schedule import Schedule
from rlcore.run.rollout.turns import Turns
from rlcore.spi import ConfigError, ContractError, Problem, ResetResult, Row, WorkerError

T = TypeVar("T")


class EpisodeRun:
    """Groups under way.

    The generator streams in the thread that calls `collect`; the environment answers on an event loop of its own. All that is
    known of groups and episodes is looked at and changed on that event loop alone, where there is one at work.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        plans: StepPlans,
        runner: EpisodeRunner,
        turns: Turns,
        tokenizer: Tokenizer,
        prompt_limit: PromptLimit,
        samples_per_prompt: int,
        max_response_tokens: int,
        max_turn_tokens: int | None,
        placeholder: int,
        overlaps: bool = False,
    ) -> None:
        """`placeholder` is the token that stands for the prompt of an episode whose environment failed to begin: a batch has no
        empty sequence. With `overlaps` the generator goes on in a thread of its own when a batch is there, until `pause`."""
        self.schedule = schedule
        self.turns = turns
        self.plans = plans
        self._runner = runner
        self._tokenizer = tokenizer
        self._prompt_limit = prompt_limit
        self._group_size = samples_per_prompt
        self._budget = max_response_tokens
        self._max_turn_tokens = max_turn_tokens
        self._placeholder = placeholder
        self._groups: dict[int, EpisodeGroup] = {}
        """All that are open."""
        self._cohorts: dict[int, Cohort] = {}
        """The groups that began together with each whose prompt is not known."""
        self._driven: Driven | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, while it works on groups or is about to."""
        self._is_driven = False
        """Whether it is, or is about to be, at work on all groups that run."""
        self._is_at_work = False
        """Whether it has begun with that, so that others can join."""
        self._calls: EnvironmentCalls
        self._resets: list[tuple[EpisodeGroup, Row, ResetResult]] = []
        """Groups whose prompts are to be encoded, with their rows."""
        self._news = threading.Event()
        """Set where a batch may be there, or the stream in the background has ended."""
        self._failure: BaseException | None = None
        """What ended the work, or the stream, between two batches: the next `collect` raises it."""
        self._background = BackgroundStream(turns.feed, self._news.set) if overlaps else None

    # In the thread that generates.

    def collect(
        self, generator: GeneratorGroup, weight_version: int, may_go_on: Callable[[], bool] = lambda: True
    ) -> list[EpisodeGroup]:
        """Generate until the next step's batch is there, and return its groups; none where `may_go_on` turned False before.

        Raises what ends the run, also where that came since the last batch: what follows a batch fails by itself alone. After a
        WorkerError it can be called again: what was lost is generated once more."""
        self.turns.count.begin()
        try:
            self._raise_failure()
            self._on_loop(self._admit)
            if self._background is not None:
                self._wait(self._background, generator, weight_version, may_go_on)
            elif not self._on_loop(self.schedule.can_take):
                self._stream(generator, weight_version, may_go_on)
            groups = self._between(self._take)
            if not groups:
                self._raise_failure()  # else the batch that is there is trained on first
            return groups
        except WorkerError:
            raise
        except BaseException:
            self.close()
            raise

    def train(self) -> None:
        """The last batch was trained on: it is forgotten, and what is too old for the next one."""
        self._between(self._forget_trained)
        if self._background is not None and self._background.has_begun:
            self._between(self._admit)

    @property
    def has_failed(self) -> bool:
        """Whether something has that the next `collect` raises."""
        return self._failure is not None

    def pause(self) -> None:
        """End the stream in the background, if there is one: what has not ended goes on in the next. Raises what it raised
        where the generator cannot be used any more."""
        if self._background is None:
            return
        try:
            with self._stopped_behind():
                self._background.end()
        except Exception as error:
            if not self._background.is_usable:
                raise
            self._keep(error)
        self._keep(self.turns.feed.failure())

    def restart(self) -> None:
        """Begin all episodes once more that have not ended."""
        self._between(self._restart)

    def snapshot(self, make: Callable[[Sequence[EpisodeGroup]], T]) -> T:
        """What `make` returns of all open groups, none of which changes meanwhile."""
        return self._between(lambda: make([self._groups[number] for number in sorted(self._groups)]))

    def taken(self, make: Callable[[Sequence[EpisodeGroup]], T]) -> T:
        """What `make` returns of the groups of the batch that was taken, while nothing changes."""
        return self._between(lambda: make([self._groups[number] for number in sorted(self.schedule.training)]))

    def new_group(self, number: int) -> EpisodeGroup:
        """A group before its beginning."""
        return EpisodeGroup(number=number)

    def restore(self, groups: Iterable[EpisodeGroup]) -> None:
        """Go on with the groups of a snapshot; the schedule is where it was then."""
        self._groups |= {group.number: group for group in groups}

    @contextmanager
    def still(self) -> Iterator[None]:
        """No call of the environment begins within the block, and those that were under way have ended: it may be called
        otherwise, as many times at once as it can work on."""
        lanes = self.turns.lanes
        self._between(lanes.hold)
        try:
            while self._between(lambda: lanes.is_at_work):
                self._poll(POLL_S)
            yield
        finally:
            self._between(lanes.release)

    def can_go_on(self, group: EpisodeGroup) -> bool:
        """Whether a group that another run has begun is what it would be here: of as many samples and, unless it has ended,
        within the same limits."""
        if not group.has_begun or group.is_left_out:
            return True
        budget, num_read = self._budget, len(group.prompt)
        return len(group.episodes) == self._group_size and all(
            episode.ended
            or (
                num_read <= self._prompt_limit.max_tokens
                and episode.budget + episode.length - num_read == budget
                and episode.max_turn_tokens == self._max_turn_tokens
                and self.turns.can_read(episode)
            )
            for episode in group.episodes
        )

    def close(self) -> None:
        """End all work, where it is: what is known of groups changes no more when this returns."""
        try:
            if self._background is not None:
                with suppress(Exception):  # what ends the run is known by now, or there is nothing left to generate
                    self._background.end()
        finally:
            if self._driven is not None:
                self.turns.end()
                self._driven.cancel()
                self._driven = self._loop = None
                self._is_driven = self._is_at_work = False

    def _stream(self, generator: GeneratorGroup, weight_version: int, may_go_on: Callable[[], bool]) -> None:
        """Generate in this thread until the batch is there."""
        self._begin_stream(weight_version, may_go_on)
        with self._stopped_behind():
            generator.stream(self.turns.feed, weight_version)
        self._keep(self.turns.feed.failure())
        self._raise_failure()

    @contextmanager
    def _stopped_behind(self) -> Iterator[None]:
        """The stream has ended behind the block. What a worker that died had taken is asked for again."""
        try:
            yield
        except WorkerError:
            self.turns.feed.requeue()
            raise
        finally:
            self.turns.count.generating(False)

    def _wait(
        self,
        background: BackgroundStream,
        generator: GeneratorGroup,
        weight_version: int,
        may_go_on: Callable[[], bool],
    ) -> None:
        """Generate in the background; wait until the batch is there."""
        if not background.has_begun:
            self._begin_stream(weight_version, lambda: True)
            background.begin(generator, weight_version)
        self._drive()
        while may_go_on() and not self._on_loop(self.schedule.can_take):
            if background.has_failed or self.turns.feed.has_ended:
                self.pause()
                self._raise_failure()
                return
            self._news.wait(POLL_S)
            self._news.clear()

    def _begin_stream(self, weight_version: int, may_go_on: Callable[[], bool]) -> None:
        self._drive()
        assert self._driven is not None
        self.turns.feed.begin_polling(self._driven, weight_version, may_go_on)
        self.turns.count.generating(True)
        self._on_loop(self._look)  # the batch may have come before the feed's stream began

    def _drive(self) -> None:
        """Have the event loop work on the groups that run."""
        if self._driven is None or (not self._is_driven and self.schedule.running):
            self._await_end()  # the work before has ended, but for its last lines
            self._raise_failure()
            self._is_driven = True
            self._loop = self._runner.thread().loop  # before there is anything on it that sets it to None at its end
            self._driven = self._runner.start(self._begin)
            self.turns.feed.driven = self._driven
        self._driven.num_stuck = 0

    def _on_loop(self, function: Callable[[], T]) -> T:
        """As `_between`. Raises what ends the work."""
        result = self._between(function)
        self._raise_failure()
        return result

    def _between(self, function: Callable[[], T]) -> T:
        """What a function returns on the event loop, or in this thread where none is at work. What ends the work is kept."""
        while self._driven is not None and (loop := self._loop) is not None:
            future: Future[T] = Future()
            with suppress(RuntimeError):  # other work got stuck there, and it was closed: the next poll begins on another
                loop.call_soon_threadsafe(_run_into, future, function)
            while not wait([future], POLL_S).done:
                self._poll(0.0)
                if self._loop is not loop and future.cancel():
                    break  # that event loop was given up, or has no work left: the function has not run
            else:
                return future.result()
        self._await_end()
        return function()

    def _await_end(self) -> None:
        """Wait for the end of work that has none left, or has failed."""
        while not self._poll(POLL_S):
            pass

    def _poll(self, timeout_s: float) -> bool:
        """Whether there is no work, or it has ended; what ended it is kept."""
        try:
            return self._driven is None or self._driven.poll(timeout_s)
        except BaseException as error:  # an environment's KeyboardInterrupt too
            self._keep(error)
            self.close()
            return True

    def _keep(self, error: BaseException | None) -> None:
        """Let the next `collect` raise an error, if there is one; first of all one that ends the run."""
        if error is not None and (self._failure is None or isinstance(self._failure, WorkerError)):
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # On the event loop.

    async def _begin(self, calls: EnvironmentCalls) -> None:
        """Go on with every group that has not ended, from where it is; ends once none runs."""
        self._calls, self._resets = calls, []
        self.turns.begin(calls, self._on_ended)
        self._loop, self._is_driven, self._is_at_work = asyncio.get_running_loop(), True, True
        try:
            self._start([self._groups[number] for number in sorted(self.schedule.running)])
            self.turns.look()
            self._rest()  # all may have ended before, and more may begin before this work ends
            await self.turns.lanes.run(
                calls, min(self._runner.max_concurrent, self.schedule.policy.capacity * self._group_size)
            )
        finally:
            if self._loop is asyncio.get_running_loop():  # else it was given up, and the groups go on on another
                self._loop, self._is_driven, self._is_at_work = None, False, False

    def _admit(self) -> None:
        """Begin the groups that may."""
        begun = [self.new_group(number) for number in self.schedule.admit()]
        self._groups |= {group.number: group for group in begun}
        if self._is_at_work:
            self._start(begun)

    def _start(self, groups: Sequence[EpisodeGroup]) -> None:
        """Go on with groups; those of one step that begin now are a cohort."""
        steps: dict[int, list[int]] = {}
        for group in groups:
            if not group.has_begun:
                steps.setdefault(self.plans.step_of(group.number), []).append(group.number)
        for step, numbers in steps.items():
            # A sample's log-probabilities are those of its prompt, seed and weights, but for rounding, which may depend on what
            # runs beside it: where a step waits for all, the order in which environments begin is to change nothing at all.
            policy = self.schedule.policy
            together = () if policy.max_staleness or policy.num_extra else [self._groups[number] for number in numbers]
            cohort = Cohort(plan=self.plans.of_step(step), limit=self._prompt_limit, num_unknown=len(numbers), groups=together)
            self._cohorts |= dict.fromkeys(numbers, cohort)
        for group in groups:
            if not group.has_begun:
                self.turns.lanes.add(self._reset, group, group.number)
            elif running := [episode for episode in group.episodes if not episode.ended]:
                self.turns.go_on(running)
            else:
                self._end_group(group)

    def _on_ended(self, episode: Episode) -> None:
        group = self._groups[episode.number // self._group_size]
        if group.all_ended():
            self._end_group(group)

    def _end_group(self, group: EpisodeGroup) -> None:
        group.settle()
        rewards = {episode.reward for episode in group.episodes if episode.valid}
        if not self.schedule.end(group.number, has_signal=group.is_left_out or len(rewards) > 1):
            self._forget([group.number])
        self._admit()
        self._look()

    def _look(self) -> None:
        """End the stream where the batch is there. ContractError where none can come: no run may wait for that."""
        self._rest()
        if self.schedule.can_take():
            self._news.set()
            if self._background is None:
                self.turns.feed.end()
        elif self.schedule.is_stuck:
            raise ContractError(
                f"no group runs, and {self.schedule.num_complete} complete ones make no batch; this is a defect of rlcore"
            )

    def _rest(self) -> None:
        """End the work where nothing runs; what begins from now on is for the next."""
        if not self.schedule.running:
            self._is_driven = self._is_at_work = False
            self.turns.lanes.close()

    def _take(self) -> list[EpisodeGroup]:
        self.turns.failures.check()
        return [self._groups[number] for number in self.schedule.take()]

    def _forget_trained(self) -> None:
        replaced = self.schedule.refilled
        closed = self.schedule.train()
        self._forget(closed)
        self.turns.failures.forget(self._group_size, [*closed, *replaced])
        self.plans.keep([*self._groups, self.schedule.next_number])

    def _forget(self, numbers: Collection[int]) -> None:
        groups = [self._groups.pop(number) for number in numbers]
        self.turns.forget(episode for group in groups for episode in group.episodes)
        left = {number: self._cohorts.pop(number) for number in numbers if number in self._cohorts}
        for number, cohort in left.items():
            cohort.give_up(self.plans.place_of(number))
        for number, cohort in left.items():
            self._give_places(number, cohort.resolve())

    def _restart(self) -> None:
        for number in list(self.schedule.running):
            group = self._groups[number]
            before, restarted = list(group.episodes), group.restart(self._budget)
            self.turns.forget(set(before) - set(group.episodes))
            if group.reset is not None and self.turns.conversations is not None:
                self.turns.conversations.begin([episode.number for episode in restarted], group.reset.observation)
            if restarted and self._is_at_work:
                self.turns.go_on(restarted)
            if len(restarted) == self._group_size:
                self.schedule.restart(number)

    # The beginning of a group.

    async def _reset(self, group: EpisodeGroup) -> None:
        """Let the environment begin. Prompts are encoded with all that come at the same moment."""
        if self._groups.get(group.number) is not group:
            return
        plan, place = self.plans.of_step(self.plans.step_of(group.number)), self.plans.place_of(group.number)
        row = plan.rows[place] if group.instead is None else group.instead
        key = (group.number, group.num_long)
        call = self._runner.reset(row, plan.draws.reset_seeds[place], (place, len(plan.rows)), key)
        reset = await self._calls.make(call)
        if self._groups.get(group.number) is not group:
            return  # given up meanwhile
        if isinstance(reset, Failure):
            self._runner.require(call, reset)
            self._fail_group(group, reset)
            return
        self._resets.append((group, row, reset))
        if len(self._resets) == 1:
            self.turns.lanes.add(self._show_prompts)

    async def _show_prompts(self, _: None) -> None:
        """Encode prompts, and ask for the first turn of those within the limit."""
        await self._calls.others()
        resets, self._resets = [one for one in self._resets if self._groups.get(one[0].number) is one[0]], []
        encoded = encode_prompts([reset.observation for _, _, reset in resets], self._tokenizer)
        for (group, row, reset), tokens in zip(resets, encoded, strict=True):
            if len(tokens) > self._prompt_limit.max_tokens:
                group.num_long += 1
                cohort = self._cohorts[group.number]
                self._give_places(group.number, cohort.too_long(self.plans.place_of(group.number), row, len(tokens)))
                continue
            if reset.observation.tools and not self.turns.reads_calls:
                raise _no_parser()
            group.begin(np.asarray(tokens, np.int32), reset, self._group_size, self._budget, self._max_turn_tokens)
            if self.turns.conversations is not None:
                self.turns.conversations.begin([episode.number for episode in group.episodes], reset.observation)
            cohort = self._cohorts.pop(group.number)
            if not cohort.groups:
                self.turns.go_on(group.episodes)
            self._give_places(group.number, cohort.begun())
            self._go_on_together(cohort)

    def _fail_group(self, group: EpisodeGroup, failure: Failure) -> None:
        """All samples of a group whose environment failed to begin have failed."""
        group.begin(np.array([self._placeholder], np.int32), None, self._group_size, self._budget)
        for episode in group.episodes:
            self.turns.fail(episode.number, failure.reason)
        cohort = self._cohorts.pop(group.number)
        self._give_places(group.number, cohort.begun())
        self._end_group(group)
        self._go_on_together(cohort)

    def _go_on_together(self, cohort: Cohort) -> None:
        """Ask for the first turns of groups, once all of them have begun."""
        if cohort.all_begun():
            self.turns.go_on([episode for group in cohort.groups for episode in group.episodes if not episode.ended])

    def _give_places(self, number: int, rows: Mapping[int, Row | None]) -> None:
        """Begin the groups at some places of a group's step with other rows, or leave them out."""
        first = number - self.plans.place_of(number)
        num_spared = self.plans.of_step(self.plans.step_of(number)).num_spared - sum(row is not None for row in rows.values())
        for place, row in rows.items():
            group = self._groups[first + place]
            group.instead = row
            if row is not None:
                group.spare, num_spared = num_spared, num_spared + 1
                self.turns.lanes.add(self._reset, group, group.number)
            else:
                group.is_left_out = True
                cohort = self._cohorts.pop(group.number)
                self._end_group(group)
                self._go_on_together(cohort)


def _run_into(future: "Future[T]", function: Callable[[], T]) -> None:
    """Run a function, unless no one waits for it any longer."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _no_parser() -> ConfigError:
    return ConfigError(
        [
            Problem(
                path="rollout.tool_parser",
                found='"auto", an environment with tools, and a chat template that shows no form of calls that the core reads',
                expected=f"one of {', '.join(FORMS)}, or the name of a parser that the generator brings",
            )
        ]
    )
