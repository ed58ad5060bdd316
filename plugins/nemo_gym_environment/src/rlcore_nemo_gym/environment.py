"""The environment `nemo_gym`: an agent server of NeMo Gym runs each episode, and says its reward."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlcore.schema.types import is_number
from rlcore.spi import DataError, EnvironmentContext, EpisodeFailure, EpisodeResult, RewardError, Row, SessionEndpoint, fails_as
from rlcore_nemo_gym.agent_servers import find_agent, run_episode
from rlcore_nemo_gym.config import SECTION, NemoGymConfig
from rlcore_nemo_gym.failures import FAILURE, failure_class_kind, masked_sample
from rlcore_nemo_gym.policy_server import KEY, PolicyEpisode, PolicyServer
from rlcore_nemo_gym.rows import PARAMS, agent_of, params_of, read_rows
from rlcore_workers.functions import brief

_LONG = EpisodeFailure(kind="limit", reason="a prompt had no room for an answer (rollout.max_sequence_length)")


class NemoGymBackend:
    """Runs episodes on the servers that the recipe names."""

    def __init__(self, context: EnvironmentContext, config: NemoGymConfig) -> None:  # noqa: ARG002 - agents draw their own seeds
        self._config = config
        self._policy = PolicyServer(config.policy_host, config.policy_port, developer_as_system=config.developer_as_system)

    def rows(self, split: str) -> Sequence[Row] | None:
        """The rows of the files; None where they come from the recipe's data."""
        files, name = self._config.train_files, "train_files"
        if split == "evaluation":
            files, name = self._config.evaluation_files, "evaluation_files"
        return read_rows(files, f"{SECTION}.{name}") if files else None

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:  # noqa: ARG002
        """Run an episode. DataError for a row that is none of NeMo Gym's, RewardError where a server is not there or fails, or
        the policy was not asked: what other rows may not meet."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s)
        with self._policy.episode(session) as episode:
            task = self._task(row, episode)
            async with aiohttp.ClientSession(timeout=limits) as http:
                url = self._config.agent_url or await find_agent(http, self._config.head_url, self._agent(row))
                try:
                    reply = await run_episode(http, url, task)
                except RewardError as error:  # whose kind is that of its cause
                    raise RewardError(f"{error}{self._reason(episode)}") from error
        if not episode.num_answers and not episode.is_too_long:
            raise RewardError(f"the agent server {url} rewards an episode without an answer{self._reason(episode)}")
        return episode_result(reply, url, episode, self._config)

    def close(self) -> None:
        """Listen for NeMo Gym's model server no more."""
        self._policy.close()

    def _agent(self, row: Row) -> str:
        name = self._config.agent or agent_of(row)
        if name is None:
            raise RewardError(
                f"found the agent_ref {brief(row.get('agent_ref'))}; expected one with a name, or {SECTION}.agent"
            )
        return name

    def _task(self, row: Row, episode: PolicyEpisode) -> Mapping[str, Any]:
        """The request to the agent server: the row, which names its episode."""
        params = {name: value for name, value in params_of(row).items() if name not in self._config.leave_out}
        params["metadata"] = {**(params.get("metadata") or {}), **episode.metadata}
        task = {**row, PARAMS: params}
        try:
            json.dumps(task)
        except (TypeError, ValueError) as error:
            raise DataError(f"found a row that no server can be sent: {error}; expected values of JSON") from error
        return task

    def _reason(self, episode: PolicyEpisode) -> str:
        """The known reason of an episode that came to nothing."""
        address = f"http://{self._config.policy_host}:{self._config.policy_port}/v1"
        if episode.refusal is not None:
            return f". The policy had refused a request: {episode.refusal}"
        if episode.is_too_long and not episode.num_answers:
            return f": the row's {PARAMS} have more tokens than rollout.max_prompt_tokens leaves room for"
        if episode.num_strangers:
            remedy = f"Use an agent that hands on {PARAMS}.metadata, and give judges a model server of their own"
            return f". Requests came to {address} without metadata.{KEY}. {remedy}"
        if episode.stray is not None:
            return f". The policy at {address} had refused a request: {episode.stray}"
        if not episode.num_answers:
            return f". Nothing came to {address}: expected it as openai_base_url of the agent's model server"
        return ""


def episode_result(reply: Mapping[str, Any], url: str, episode: PolicyEpisode, config: NemoGymConfig) -> EpisodeResult:
    """Read an agent server's reply. RewardError where it has no reward, or a field that is no metric."""
    where, reward = f"the agent server {url}", reply.get("reward")
    if reply.get(FAILURE):
        with fails_as(failure_class_kind(reply[FAILURE])):
            raise RewardError(f"{where} replied that the episode failed: {FAILURE} is {brief(reply[FAILURE])}")
    if not is_number(reward):
        raise RewardError(f"{where} replied the reward {brief(reward)}; expected a finite number")
    components = reply.get("reward_components") or {}
    if not isinstance(components, Mapping) or not all(map(is_number, components.values())):
        raise RewardError(f"{where} replied the reward_components {brief(components)}; expected a mapping of finite numbers")
    odd = [name for name in config.metrics if not is_number(reply.get(name)) and not isinstance(reply.get(name), bool)]
    if odd:
        expected = f"a finite number, true or false, as {SECTION}.metrics names it"
        raise RewardError(f"{where} replied {brief(reply.get(odd[0]))} as {odd[0]!r}; expected {expected}")
    metrics = {name: float(reply[name]) for name in config.metrics}
    metrics |= {"answers": float(episode.num_answers), "too_long": float(episode.is_too_long)}
    return EpisodeResult(
        reward=float(reply["reward"]),
        success=bool(reply["reward"] >= config.success_reward),
        reward_components={str(name): float(value) for name, value in components.items()},
        metrics=metrics,
        failure=masked_sample(reply) or (_LONG if episode.is_too_long else None),
    )
