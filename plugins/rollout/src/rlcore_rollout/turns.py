"""Episodes turn after turn, on the environment's event loop: each turn is asked for as soon as it is ready.

An episode is changed between two waits, never across one: where the event loop is given up in a wait, or a checkpoint is
written, all that is known of it is in its data.
"""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import frozen

from rlcore.run.data.text import History, renderer
from rlcore.run.train_step.scorers import OnTokens
from rlcore.spi import DataError, FinishReason, SamplingParams, Tokenizer, Tool, ToolCall, ToolParser
from rlcore.thoughts import opened_thought
from rlcore_rollout.environment_calls import EnvironmentCalls, TaskPool
from rlcore_rollout.environment_results import Failure, MaskedFailures
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode import Completion, CompletionRequest, Episode, until_stop
from rlcore_rollout.request_queue import RequestQueue, SampleCount
from rlcore_rollout.step_plans import seed_after


@frozen(kw_only=True, eq=False)
class TurnOptions:
    """The options that all turns of a run share."""

    sampling: SamplingParams
    max_turns: int
    history: History = "segment"
    """Handling of chat templates that would rewrite earlier messages."""
    tool_parser: ToolParser | None = None
    """The parser of tool calls; None where nothing says how the model writes them."""
    timeout_s: float | None = None
    """How long an episode may take, less the seconds in which its generator was stopped."""
    routed_experts: bool = False
    """True where the generator is to say which experts it sent each token to."""
    sampling_mask: bool = False
    """True where it is to say what each token was chosen among."""
    on_tokens: OnTokens | None = None
    """Called on the event loop with each episode, as soon as no tokens can follow: of a single turn before its environment has
    answered."""


class Turns:
    """Takes open episodes through their turns: samples of the policy, answers of the environment, tokens of what it shows."""

    def __init__(
        self,
        *,
        options: TurnOptions,
        runner: EpisodeRunner,
        tokenizer: Tokenizer,
        failures: MaskedFailures,
        seed_of: Callable[[int, int], int],
        num_samples: int,
        on_sampled: Callable[[int, int], None],
    ) -> None:
        """`seed_of` returns the seed of an episode's turn, by the numbers of both; `num_samples` are those of a step;
        `on_sampled` gets the numbers of samples that ended since `count` began and that were asked for, from any thread."""
        self._options = options
        self._runner = runner
        self._tokenizer = tokenizer
        self.failures = failures
        self._seed_of = seed_of
        self._num_samples = num_samples
        self._on_sampled = on_sampled
        self.requests = RequestQueue(self._on_completions)
        self.count = SampleCount()
        self.task_pool = TaskPool()
        self.conversations = (
            renderer().conversations(tokenizer, options.sampling.stop_token_ids, options.history)
            if options.max_turns > 1
            else None
        )
        self._calls: EnvironmentCalls
        self._on_ended: Callable[[Episode], None]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[int, Episode] = {}
        """Episodes that have not ended."""
        self._wanted: set[int] = set()
        """Open episodes that wait for a sample."""
        self._reading: list[Episode] = []
        """Open episodes that read what they were shown."""
        self._arrived: deque[Completion] = deque()
        """Samples that the event loop has not looked at."""

    # In the thread that generates.

    @property
    def reads_calls(self) -> bool:
        """Return whether calls of tools can be read."""
        return self._options.tool_parser is not None

    def can_read(self, episode: Episode) -> bool:
        """Return whether an open episode can be shown something, where its environment may yet do so, or has."""
        return episode.unread_observation is None if self.conversations is None else episode.number in self.conversations

    # On the event loop.

    def begin(self, calls: EnvironmentCalls, on_ended: Callable[[Episode], None]) -> None:
        """Work on this event loop from now on; `on_ended` is called with each episode that ends."""
        self._calls, self._on_ended = calls, on_ended
        self._loop = asyncio.get_running_loop()
        self._reading = []
        self.task_pool.begin()

    def end(self) -> None:
        """Change nothing any more, whatever comes. From any thread."""
        self._loop = None

    def take_arrived(self) -> None:
        """Take what has come while no event loop was at work; once all open episodes go on."""
        assert self._loop is not None
        self._take_arrived(self._loop)

    def go_on(self, episodes: Sequence[Episode]) -> None:
        """Take episodes that have not ended from where they are to their end."""
        self._open |= {episode.number: episode for episode in episodes}
        if self._options.timeout_s is not None and self._loop is not None:
            # A timer outlives most episodes, and what they have said is large.
            watched = [weakref.ref(episode) for episode in episodes]
            self._loop.call_later(self._options.timeout_s, self._time_out, watched, self.count.stopped_s())
        unasked = []
        for episode in episodes:
            if episode.unread_observation is not None:
                self._read(episode)
            elif episode.unanswered_turn is not None:
                self.task_pool.add(self._answer, episode, episode.number)
            elif episode.number not in self._wanted:
                unasked.append(episode)
        if unasked:
            self._ask(unasked)

    def forget(self, episodes: Iterable[Episode]) -> None:
        """Episodes are open no longer; what comes for them yet is thrown away."""
        were_open = False
        for episode in episodes:
            if self.conversations is not None:
                self.conversations.end(episode.number)
            if not episode.ended:  # else it was closed then
                were_open |= self._open.pop(episode.number, None) is not None
                self._wanted.discard(episode.number)
        if were_open:
            self.count.withdraw(self.requests.withdraw(lambda wanted: self._is_open(wanted.owner)))

    def _is_open(self, episode: Any) -> bool:
        return self._open.get(episode.number) is episode

    def fail(self, number: int, reason: str) -> None:
        """Note that the environment failed on an episode. The check for too many failures runs after the tasks at hand, so that
        its error has the full number."""
        self.failures.add(number, reason)
        self.task_pool.add(self._check_failures)

    async def _check_failures(self, _: None) -> None:
        self.failures.check()

    def _end(self, episode: Episode) -> None:
        episode.ended = True
        self._open.pop(episode.number, None)
        if self._options.on_tokens is not None and self._options.max_turns > 1:
            for tokens in episode.segment_tokens():
                self._options.on_tokens(tokens, episode.images)
        self._on_ended(episode)

    def _lose(self, episode: Episode, failure: Failure) -> None:
        episode.valid, episode.failure = False, failure.ending
        self._wanted.discard(episode.number)
        self.fail(episode.number, failure.reason)
        self._end(episode)

    def _say(self, episode: Episode, sampled: Completion) -> None:
        text = sampled.text
        calls: tuple[str, Sequence[ToolCall]] | tuple[()] = ()
        mark = opened_thought(self._tokenizer.show(episode.before_turn()))
        if episode.partial_turn or episode.tools:
            begun = [token for piece in episode.partial_turn for token in piece.tolist()]
            tokens = [*begun, *sampled.tokens.tolist()]
            text = self._tokenizer.decode(tokens) if begun else text
            calls = self._calls_in(tokens, episode.tools, mark) if episode.tools else ()
        episode.add_turn(sampled, text, *calls, begins_in_thought=bool(mark))
        if self.conversations is not None:
            last = int(sampled.tokens[-1]) if len(sampled.tokens) else None
            self.conversations.add_turn(episode.number, text, last)
        self.task_pool.add(self._answer, episode, episode.number)
        if self._options.on_tokens is not None and self._options.max_turns == 1:
            self._options.on_tokens(episode.context(), episode.images)

    def _calls_in(self, tokens: Sequence[int], tools: Sequence[Tool], mark: str) -> tuple[str, Sequence[ToolCall]]:
        """The text of a turn without its calls of tools, and these. Some forms have special tokens in them. `mark` begins the
        thought that the prompt ends in."""
        assert self._options.tool_parser is not None, "it is asked for where episodes begin"
        ended = bool(tokens) and tokens[-1] in self._options.sampling.stop_token_ids
        said = self._tokenizer.show(tokens[:-1] if ended else tokens)
        content, calls = self._options.tool_parser.parse(f"{mark}{said}", tools)
        return content.removeprefix(mark), calls

    def _time_out(self, watched: Sequence["weakref.ref[Episode]"], stopped_s: float) -> None:
        """Mask those of some episodes that go on, whatever the recipe does with failures. `stopped_s` is what the generator had
        been stopped for when their time began: what was added to it since is added to their time."""
        late = [episode for one in watched if (episode := one()) is not None and self._is_open(episode)]
        if not late or self._loop is None:
            return
        if self.count.stopped_s() > stopped_s:
            self._loop.call_later(self.count.stopped_s() - stopped_s, self._time_out, watched, self.count.stopped_s())
            return
        try:
            for episode in late:
                episode.timed_out = True
                reason = f"took longer than {self._options.timeout_s:g} s (rollout.episode_timeout_s)"
                self._lose(episode, Failure(reason=reason, kind="limit"))
        except BaseException as error:  # which the event loop would only print
            self.task_pool.fail(error)

    async def _answer(self, episode: Episode) -> None:
        """Let the environment answer the turn that was said."""
        if not self._is_open(episode) or episode.unanswered_turn is None:
            return
        place = (episode.number % self._num_samples, self._num_samples)
        call = self._runner.step(episode.state, episode.unanswered_turn, place, (episode.number, episode.turn))
        answer = await self._calls.make(call)
        if not self._is_open(episode):
            return  # given up meanwhile
        if isinstance(answer, Failure):
            self._runner.require(call, answer)
            self._lose(episode, answer)
            return
        episode.score(answer, self._tokenizer.decode)
        if episode.unread_observation is None or episode.turn + 1 >= self._options.max_turns or episode.budget <= 0:
            self._end(episode)
        else:
            self._read(episode)

    def _read(self, episode: Episode) -> None:
        """Let an episode read what it was shown, with all that are shown something at the same moment."""
        self._reading.append(episode)
        if len(self._reading) == 1:
            self.task_pool.add(self._read_all)

    async def _read_all(self, _: None) -> None:
        """Encode what was shown, and ask for the next turn of the episodes that go on."""
        assert self.conversations is not None
        await self._calls.others()
        reading, self._reading = [one for one in self._reading if self._is_open(one)], []
        shown = [episode.unread_observation for episode in reading if episode.unread_observation is not None]
        limits = [episode.budget + len(episode.context()) for episode in reading]
        found = self.conversations.read([episode.number for episode in reading], shown, limits)
        for episode, read in zip(reading, found, strict=True):
            if not isinstance(read, DataError):
                tokens, begins_segment = read
                episode.next_turn(tokens, begins_segment=begins_segment)
                if episode.ended:
                    self._end(episode)
            elif self._runner.masks_failures:  # a chat template that cannot tell how the conversation goes on
                self._lose(episode, Failure(reason=str(read)))
            else:
                raise read
        self._ask([episode for episode in reading if not episode.ended])

    def _ask(self, episodes: Sequence[Episode]) -> None:
        """Ask for the next turn of episodes, or for the rest of it. One array is one prompt to the queue."""
        self._wanted.update(episode.number for episode in episodes)
        wanted = [
            CompletionRequest(
                prompt=episode.context(),
                seed=seed_after(self._seed_of(episode.number, episode.turn), episode.num_partial_tokens),
                max_tokens=self._limit(episode),
                sampling=self._options.sampling,
                owner=episode,
                conversation=episode.number,
                routed_experts=self._options.routed_experts,
                sampling_mask=self._options.sampling_mask,
                goes_on=episode.num_generated > 0,
                images=episode.images,
            )
            for episode in episodes
        ]
        self.count.ask(len(wanted))
        self.requests.ask(wanted)

    def _take_arrived(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:  # one that was given up
            return
        try:
            while self._arrived:
                self._take(self._arrived.popleft())
        except BaseException as error:  # which the event loop would only print
            self.task_pool.fail(error)

    def _take(self, sampled: Completion) -> None:
        episode: Any = sampled.request.owner
        if not self._is_open(episode):
            return  # given up meanwhile
        self._wanted.discard(episode.number)
        if episode.partial_turn:
            sampled = until_stop(episode.partial_turn, sampled, self._tokenizer.decode)
        if self._is_cut(episode, sampled):
            episode.add_partial_turn(sampled)
            self._ask([episode])
        else:
            self._say(episode, sampled)

    def _limit(self, episode: Episode) -> int:
        """Most tokens to ask for."""
        return episode.turn_budget

    def _is_cut(self, episode: Episode, sampled: Completion) -> bool:  # noqa: ARG002 - a replay looks where it is
        """Return whether a turn is to go on behind what came of it."""
        return sampled.finish_reason == FinishReason.ABORTED

    # In the generator's threads.

    def _on_completions(self, samples: Sequence[Completion]) -> None:
        self._arrived.extend(samples)
        num_ended = sum(sampled.finish_reason != FinishReason.ABORTED for sampled in samples)
        self._on_sampled(*self.count.add_arrived(len(samples), num_ended))
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it was given up and is closed: the next one looks when it begins
                loop.call_soon_threadsafe(self._take_arrived, loop)
