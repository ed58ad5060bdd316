"""One episode: the policy's answers become actions, and the server's observations messages."""

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from rlcore.spi import EpisodeFailure, EpisodeResult, PluginError, RewardError, Row, fails_as
from rlcore.thoughts import without_thoughts
from rlcore_openenv.actions import Attempt, Translate, tools_of
from rlcore_openenv.config import OpenEnvConfig
from rlcore_openenv.connection import INVALID, Connection, Observed, RefusedError, fault_text
from rlcore_openenv.policy import Policy
from rlcore_openenv.views import Show

_OTHER_FIELDS = {"missing", "extra_forbidden"}
"""pydantic's types of faults that no answer brings about where the recipe names the fields."""

_LONG = EpisodeFailure(kind="limit", reason="the conversation had no room for another answer")
_NO_TURN_LEFT = EpisodeFailure(kind="limit", reason="no turn was left (environment.openenv.max_turns)")


@define(kw_only=True, eq=False)
class Episode:
    """An episode on a server that has been reset."""

    config: OpenEnvConfig
    connection: Connection
    policy: Policy
    translate: Translate
    show: Show
    observation: Mapping[str, Any] = field(factory=dict)
    """The last one."""
    messages: list[Mapping[str, Any]] = field(factory=list)
    rewards: list[float] = field(factory=list)
    num_turns: int = 0
    num_invalid: int = 0
    is_done: bool = False
    is_too_long: bool = False
    """Whether the conversation had no room for a further answer."""

    async def play(self, row: Row, first: Observed) -> EpisodeResult:
        """Go on until the server is done, the policy asks for no tool any more, or no turn or room is left. RewardError and
        PluginError where the episode cannot go on."""
        if first.done:
            raise RewardError("the OpenEnv server's reset is done already; expected an episode that has a step")
        self.observation = first.observation
        tools = await self._tools() if self.config.action == "tools" else []
        self._open(row)
        while not self.is_done and self.num_turns < self.config.max_turns:
            choice = await self.policy.answer(self.messages, tools)
            if choice is None:
                self.is_too_long = True
                break
            self.num_turns += 1
            message = choice["message"]
            self.messages.append(message)
            said = without_thoughts(message["content"] or "")
            await self._answered({**message, "content": said})
        if self.num_turns == 0:
            with fails_as("limit"):
                raise RewardError("the first observation has more tokens than rollout.max_prompt_tokens leaves room for")
        return self._result()

    async def _tools(self) -> list[dict[str, Any]]:
        tools = tools_of((await self.connection.step({"type": "list_tools"})).observation)
        if not tools:
            raise PluginError(
                'environment.openenv.action: found "tools" for a server that lists none; expected a server of MCP tools'
            )
        return tools

    def _open(self, row: Row) -> None:
        texts = [self.show(self.observation)]
        if self.config.prompt_field is not None:
            texts.insert(0, _prompt(row, self.config.prompt_field))
        opening = "\n\n".join(filter(None, texts))  # one message: many chat templates want turns to alternate
        if not opening:
            raise PluginError(
                "the observation of the OpenEnv server's reset has nothing for the policy to read. Name the row's field that "
                "tells the task: environment.openenv.prompt_field"
            )
        if self.config.system_prompt is not None:
            self.messages.append({"role": "system", "content": self.config.system_prompt})
        self.messages.append({"role": "user", "content": opening})

    async def _answered(self, message: Mapping[str, Any]) -> None:
        attempts = self.translate(message, self.observation)
        for attempt in attempts:
            text = await self._try(attempt)
            reply = {"role": "user", "content": text}
            if attempt.call_id is not None:
                reply = {"role": "tool", "tool_call_id": attempt.call_id, "content": text}
            self.messages.append(reply)
            if self.is_done:
                return
        self.is_done = not attempts

    async def _try(self, attempt: Attempt) -> str:
        """Return what the policy reads of it."""
        if attempt.action is None:
            return self._invalid(attempt.fault)
        try:
            with fails_as("tool" if self.config.action == "tools" else "environment"):
                observed = await self.connection.step(attempt.action)
        except RefusedError as error:
            return self._invalid(self._fault(error))
        if observed.reward is not None:
            self.rewards.append(observed.reward)
        self.observation, self.is_done = observed.observation, observed.done
        return "" if self.is_done else self.show(observed.observation)

    def _invalid(self, fault: str) -> str:
        self.num_invalid += 1
        self.rewards.append(self.config.invalid_action_reward)
        self.is_done = self.config.on_invalid_action == "end"
        return fault

    def _fault(self, error: RefusedError) -> str:
        """The text for the policy about an action that does not fit; any other error is raised."""
        if error.code != INVALID:
            raise error
        if self.config.action == "text" and any(fault.get("type") in _OTHER_FIELDS for fault in error.faults):
            found = (
                f"found {self.config.action_field!r}; expected the one field that the server's actions need, or another action"
            )
            raise PluginError(f"environment.openenv.action_field: {found}. {error}") from error
        return "The action is not valid. " + "; ".join(map(fault_text, error.faults))

    def _result(self) -> EpisodeResult:
        last = self.rewards[-1] if self.rewards else 0.0
        reward = last if self.config.reward == "last" else sum(self.rewards)
        metrics = {
            "turns": self.num_turns,
            "invalid_actions": self.num_invalid,
            "done": self.is_done,
            "too_long": self.is_too_long,
        }
        return EpisodeResult(
            reward=reward,
            success=reward >= self.config.success_reward,
            metrics={name: float(value) for name, value in metrics.items()},
            failure=_LONG if self.is_too_long else None if self.is_done else _NO_TURN_LEFT,
        )


def _prompt(row: Row, name: str) -> str:
    prompt = row.get(name)
    if not isinstance(prompt, str):
        found = f"a row whose field {name!r} is {prompt!r:.80}"
        raise PluginError(f"environment.openenv.prompt_field: found {found}; expected a text")
    return prompt
