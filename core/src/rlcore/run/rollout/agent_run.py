"""Runs episodes of an agent environment beside the generator's stream: the calling thread generates, the agents run on the
environment's event loop, and ask through the server of sessions."""

import threading
from collections.abc import Callable, Iterator, Sequence

from attrs import define, field

from rlcore.run.protocols import GeneratorGroup
from rlcore.run.rollout.environment_calls import POLL_S, EnvironmentCalls
from rlcore.run.rollout.environment_runner import Driven, EpisodeRunner, all_or_first
from rlcore.run.rollout.episode_failure import Failure
from rlcore.run.rollout.masked_failures import MaskedFailures
from rlcore.run.rollout.session_sampler import SessionSampler
from rlcore.sessions.record import Segment
from rlcore.sessions.session import Session
from rlcore.spi import EpisodeResult, Row, SessionEndpoint


@define(kw_only=True, eq=False)
class AgentEpisode:
    """One of the N episodes of a step."""

    number: int
    row: Row
    seed: int
    result: EpisodeResult | None = None
    """None while it runs, and where its environment failed."""
    segments: list[Segment] = field(factory=list)
    """What was sampled in it."""
    has_ended: bool = False


class AgentRun:
    """Episodes under way."""

    def __init__(
        self,
        *,
        episodes: Sequence[AgentEpisode],
        runner: EpisodeRunner,
        failures: MaskedFailures,
        sampler: SessionSampler,
        open_session: Callable[[AgentEpisode], tuple[Session, SessionEndpoint]],
        finish_session: Callable[[Session], list[Segment]],
        on_ended: Callable[[int], None],
    ) -> None:
        """`on_ended` gets the number of episodes that have ended."""
        self._episodes = episodes
        self._runner = runner
        self._failures = failures
        self._sampler = sampler
        self._open_session = open_session
        self._finish_session = finish_session
        self._on_ended = on_ended
        self._error: BaseException | None = None

    def run(self, generator: GeneratorGroup, weight_version: int) -> None:
        """Run all episodes to their end. Raises what ends the run."""
        self._sampler.feed.begin(weight_version)
        driven = self._runner.start(self._begin)
        watching = threading.Thread(target=self._watch, args=(driven,), daemon=True, name="rlcore-agents")
        watching.start()
        try:
            generator.stream(self._sampler.feed, weight_version)
        except BaseException:
            driven.cancel()
            raise
        finally:
            self._sampler.close()
            watching.join()
        if self._error is not None:
            raise self._error

    def _watch(self, driven: Driven) -> None:
        """Wait for the episodes, and end the stream with them."""
        try:
            while not driven.poll(POLL_S):
                pass
        except BaseException as error:
            self._error = error
        finally:
            self._sampler.feed.end()

    async def _begin(self, calls: EnvironmentCalls) -> None:
        """Run every episode that has not ended: from its beginning where its event loop was given up."""
        left = [episode for episode in self._episodes if not episode.has_ended]
        todo = iter(left)
        await all_or_first([self._lane(todo, calls) for _ in range(min(self._runner.max_concurrent, len(left)))])

    async def _lane(self, todo: Iterator[AgentEpisode], calls: EnvironmentCalls) -> None:
        """Run one episode after another."""
        for episode in todo:
            await self._play(episode, calls)

    async def _play(self, episode: AgentEpisode, calls: EnvironmentCalls) -> None:
        sessions: list[Session] = []

        def begin() -> SessionEndpoint:
            session, endpoint = self._open_session(episode)
            sessions.append(session)
            return endpoint

        call = self._runner.run(episode.row, episode.seed, begin, (episode.number, len(self._episodes)))
        try:
            outcome = await calls.make(call)
        finally:
            segments = [segment for session in sessions for segment in self._finish_session(session)]
        episode.segments, episode.has_ended = segments, True
        if isinstance(outcome, Failure):
            self._runner.require(call, outcome)
            self._failures.add(episode.number, outcome.reason)
            self._failures.check()
        else:
            episode.result = outcome
        self._on_ended(sum(episode.has_ended for episode in self._episodes))
