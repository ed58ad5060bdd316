"""Groups of episodes that agents run: each has a session, which asks for samples until the agent says its reward."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from attrs import define, evolve, field

from rlcore.spi import EpisodeFailure, EpisodeResult, SessionEndpoint
from rlcore_rollout.environment_calls import EnvironmentCalls, TaskPool
from rlcore_rollout.environment_results import Failure, MaskedFailures
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode_group import Compared, has_reward_variance
from rlcore_rollout.group_work import GroupWork, PromptEvents
from rlcore_rollout.step_plans import StepPlans
from rlcore_serve.sessions.interface import Segment, Session, SessionServer
from rlcore_serve.sessions.sampler import SessionSampler

DROPPED_ANSWERS = "dropped_answers"
"""The metric of an episode's samples without an answer, which no sequence holds: the agent hung up on them."""


@define(kw_only=True, eq=False)
class AgentEpisode:
    """One of the samples of a group."""

    number: int
    """Its number in the run: that of its group times the size of a group, and its own in the group."""
    result: EpisodeResult | None = None
    """None while it runs, and where its sample is masked."""
    failure: EpisodeFailure | None = None
    """The end of the episode; None where by the policy."""
    segments: list[Segment] = field(factory=list)
    """Its sampled segments, once it has ended."""
    ended: bool = False


@define(kw_only=True, eq=False)
class AgentGroup:
    """The episodes of one row."""

    number: int
    """Its number in the run."""
    episodes: list[AgentEpisode]

    @property
    def num_rewarded(self) -> int:
        """Its episodes that have a result."""
        return sum(episode.result is not None for episode in self.episodes)

    @property
    def rewards(self) -> list[float]:
        """See OpenGroup."""
        return [episode.result.reward for episode in self.episodes if episode.result is not None]

    @property
    def success_rate(self) -> float:
        """The share of these that solved it; 0.0 where there are none."""
        solved = sum(episode.result.success for episode in self.episodes if episode.result is not None)
        return solved / max(self.num_rewarded, 1)

    def all_ended(self) -> bool:
        """Return whether all episodes have ended."""
        return all(episode.ended for episode in self.episodes)

    def endings(self) -> list[EpisodeFailure | None]:
        """See OpenGroup."""
        return [episode.failure for episode in self.episodes if episode.ended]

    def finish(self) -> None:
        """See OpenGroup: an agent leaves nothing behind."""


class AgentGroups(GroupWork[AgentGroup]):
    """Runs agents, each from its beginning to its end: none can be left and taken up again. Where their server or their event
    loop ends, they begin again."""

    ends_without_samples: ClassVar[bool] = False

    def __init__(
        self,
        *,
        server: SessionServer,
        sampler: SessionSampler,
        compares: Compared,
        plans: StepPlans,
        runner: EpisodeRunner,
        failures: MaskedFailures,
        group_size: int,
        groups_per_step: int,
        on_ended: Callable[[int, int], None],
    ) -> None:
        """`server` answers by `sampler`; `compares` is what tells the samples of a group apart. `on_ended` gets how many of the
        open groups' episodes have ended, and how many there are."""
        self.requests, self.count, self.task_pool = sampler.requests, sampler.count, TaskPool()
        self.plans, self.failures, self.group_size = plans, failures, group_size
        self._server = server
        self._sampler = sampler
        self._compares = compares
        self._runner = runner
        self._samples_per_step = groups_per_step * group_size
        self._tell = on_ended
        self._serves = False
        self._calls: EnvironmentCalls | None = None
        self._on_ended: Callable[[int], None]
        self._groups: dict[int, AgentGroup] = {}
        """The open groups that have run here."""
        self._num_ended = 0
        """Their episodes that have ended."""
        self._running: dict[AgentEpisode, Session] = {}
        """The episodes that an agent is at."""

    def now(self) -> float:
        """See GroupWork: an agent that waits for a generator that is stopped loses none of its time."""
        return super().now() - self.count.stopped_s()

    def open(self) -> None:
        """See GroupWork: serve sessions."""
        if not self._serves:
            self._sampler.open()
            self._server.open()
            self._serves = True

    def close(self) -> None:
        """See GroupWork."""
        self._sampler.close()
        if self._serves:
            self._serves = False
            self._server.close()

    def new_group(self, number: int) -> AgentGroup:
        """See GroupWork."""
        first = number * self.group_size
        return AgentGroup(number=number, episodes=[AgentEpisode(number=first + place) for place in range(self.group_size)])

    def begin(
        self,
        calls: EnvironmentCalls,
        on_ended: Callable[[int], None],
        look: Callable[[], None],  # noqa: ARG002 - agents ask when they like
        prompts: PromptEvents,  # noqa: ARG002 - and show their prompts to nobody
    ) -> None:
        """See GroupWork."""
        self._calls, self._on_ended = calls, on_ended
        self._give_up(list(self._running))  # those of an event loop that was given up
        self.task_pool.begin()

    def start(self, groups: Collection[AgentGroup], *, together: bool) -> None:  # noqa: ARG002 - each asks when it likes
        """See GroupWork."""
        for group in groups:
            if group.number not in self._groups:
                self._groups[group.number] = group
                self._num_ended += _num_ended(group)
            self._play_all([episode for episode in group.episodes if not episode.ended])
            if group.all_ended():
                self._on_ended(group.number)

    def forget(self, groups: Collection[AgentGroup]) -> None:
        """See GroupWork: agents that are at work are cancelled."""
        for group in groups:
            if self._groups.pop(group.number, None) is not None:
                self._num_ended -= _num_ended(group)
            self._give_up(group.episodes)

    def restart(self, group: AgentGroup, *, is_at_work: bool) -> bool:
        """See GroupWork."""
        restarted, begun = [], [episode for episode in group.episodes if self._has_asked(episode)]
        for episode in begun:
            restarted.append(AgentEpisode(number=episode.number))
            group.episodes[episode.number % self.group_size] = restarted[-1]
        self._give_up(begun)
        if is_at_work:
            self._play_all(restarted)
        return len(restarted) == self.group_size

    def has_signal(self, group: AgentGroup) -> bool:
        """See GroupWork: whether what is compared differs among its episodes, each of which is one turn."""
        results = [episode.result for episode in group.episodes if episode.result is not None]
        rewards, components = [(one.reward,) for one in results], [one.reward_components for one in results]
        return has_reward_variance(rewards, components, self._compares)

    def saved(self, group: AgentGroup) -> dict[str, Any] | None:
        """See GroupWork: a group whose agents have all ended. A run of another environment reads it without this package."""
        if not group.all_ended():
            return None
        return {"group": group.number, "episodes": [(one.result, one.segments, one.failure) for one in group.episodes]}

    def resumed(self, kept: Any) -> AgentGroup | None:
        """See GroupWork."""
        if not isinstance(kept, dict) or len(kept["episodes"]) != self.group_size:
            return None
        group = self.new_group(kept["group"])
        for episode, (result, segments, failure) in zip(group.episodes, kept["episodes"], strict=True):
            episode.result, episode.segments, episode.failure, episode.ended = result, segments, failure, True
        return group

    def _play_all(self, episodes: Collection[AgentEpisode]) -> None:
        for episode in episodes:
            self.task_pool.add(self._play, episode, episode.number)

    def _is_open(self, episode: AgentEpisode) -> bool:
        number, place = divmod(episode.number, self.group_size)
        return number in self._groups and self._groups[number].episodes[place] is episode

    def _has_asked(self, episode: AgentEpisode) -> bool:
        return episode in self._running and self._running[episode].num_samples > 0

    async def _play(self, episode: AgentEpisode) -> None:
        if not self._is_open(episode) or self._calls is None:
            return
        number, place = divmod(episode.number, self.group_size)
        plan, of_step = self.plans.of_step(self.plans.step_of(number)), self.plans.place_of(number)
        in_step = of_step * self.group_size + place
        sessions: list[Session] = []

        def begin() -> SessionEndpoint:
            sessions.append(self._server.begin((*plan.draws.key, in_step)))
            self._running[episode] = sessions[0]
            return sessions[0].endpoint

        seed, of = plan.draws.reset_seeds[of_step], (in_step, self._samples_per_step)
        call = self._runner.run(plan.rows[of_step], seed, begin, of, episode)
        try:
            outcome = await self._calls.make(call)
        finally:
            num_dropped = sum(session.num_unanswered for session in sessions)
            segments = [segment for session in sessions for segment in self._finish(session)]
            if self._running.get(episode) in sessions:  # else of another event loop's attempt
                self._running.pop(episode, None)  # another event loop may have given it up at this moment
        if not self._is_open(episode):
            return  # given up meanwhile
        if isinstance(outcome, Failure):
            self._runner.require(call, outcome)
            self.failures.add(episode.number, outcome.reason)
            self.failures.check()
            episode.failure = outcome.ending
        else:
            metrics = {**outcome.metrics, DROPPED_ANSWERS: float(num_dropped)}
            episode.result, episode.failure = evolve(outcome, metrics=metrics), outcome.failure
        episode.segments, episode.ended = segments, True
        self._num_ended += 1
        self._tell(self._num_ended, len(self._groups) * self.group_size)
        self._on_ended(number)

    def _finish(self, session: Session) -> Sequence[Segment]:
        segments = session.finish()
        self._sampler.give_up(session.number)
        return segments

    def _give_up(self, episodes: Collection[AgentEpisode]) -> None:
        """Cancel the agents that are at some episodes, and answer them no more."""
        given_up = []
        for episode in episodes:
            if (session := self._running.pop(episode, None)) is not None:
                self._finish(session)
                given_up.append(episode)
        if self._calls is not None:
            self._calls.give_up(given_up)


def _num_ended(group: AgentGroup) -> int:
    return sum(episode.ended for episode in group.episodes)
