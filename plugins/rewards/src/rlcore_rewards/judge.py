"""The environment `judge`: one turn an episode, scored by a model behind OpenAI's API."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any

from rlcore.installed import is_installed
from rlcore.schema.file_limits import expanded, read_file
from rlcore.secrets import keep_secret, masked
from rlcore.spi import (
    CheckContext,
    ConfigError,
    DataError,
    EnvironmentContext,
    PluginError,
    Problem,
    ResetResult,
    RewardError,
    Row,
    StepResult,
    Turn,
    fails_as,
)
from rlcore_rewards.judge_config import JudgeConfig
from rlcore_rewards.judge_template import filled, pattern_fault, row_fields, score_of
from rlcore_rewards.prompts import PROMPT, observation_of, prompt_problems
from rlcore_rewards.rubric import CRITERIA, criteria_of, listed, scores_of, weighed
from rlcore_workers.functions import brief

SECTION = "environment.judge"
CLOSE_S = 2.0
WRONG = ("AuthenticationError", "PermissionDeniedError", "NotFoundError", "BadRequestError", "UnprocessableEntityError")
"""Errors of the client that the next request would meet too."""


class JudgeBackend:
    """Asks the judge about each answer."""

    def __init__(self, context: EnvironmentContext, config: JudgeConfig) -> None:  # noqa: ARG002
        self._config = config
        self._template = template_of(config)
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}
        """One for each event loop, to which its connections belong."""
        self._kept: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[str]] = {}
        """Replies by their prompts, and those under way."""

    def rows(self, split: str) -> Sequence[Row] | None:  # noqa: ARG002
        """Return None: prompts come from the recipe's data."""
        return None

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """The row's prompt. DataError where the row has none, or lacks a field that the judge is told."""
        if missing := [name for name in row_fields(self._template) if name not in row]:
            has = ", ".join(map(repr, row))
            raise DataError(f"{SECTION}: the prompt names row[{missing[0]}]; expected a field of the row, which has {has}")
        if self._config.criteria_field is not None:
            criteria_of(row, self._config)
        return ResetResult(observation=observation_of(row, self._config), state=row)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """The score, as a reward from 0.0 to 1.0. RewardError where there is none; PluginError where the endpoint refuses."""
        config = self._config
        with fails_as("grader"):
            if config.criteria or config.criteria_field is not None:
                return await self._by_rubric(state, turn.text)
            score = score_of(await self._reply(filled(self._template, state[PROMPT], turn.text, state)), config)
        low, high = config.score_range
        reward = (score - low) / (high - low)
        return StepResult(reward=reward, done=True, success=reward >= config.success_reward, metrics={"score": score})

    def close(self) -> None:
        """Close the connections; the next call opens others."""
        clients, self._clients = self._clients, {}
        for loop, client in clients.items():
            if not loop.is_closed() and loop.is_running():
                with contextlib.suppress(TimeoutError):
                    asyncio.run_coroutine_threadsafe(client.close(), loop).result(CLOSE_S)

    async def _by_rubric(self, row: Row, answer: str) -> StepResult:
        """The weighted mean of the criteria's scores; each part is a component of the reward."""
        config, criteria = self._config, criteria_of(row, self._config)
        groups = [criteria] if config.criteria_requests == "one" else [[one] for one in criteria]
        texts = [filled(self._template, row[PROMPT], answer, row, listed(group)) for group in groups]
        replies = await asyncio.gather(*map(self._reply, texts))
        if config.criteria_requests == "one":
            scores = scores_of(replies[0], criteria, config)
        else:
            scores = [score_of(reply, config) for reply in replies]
        parts = weighed(scores, criteria, config)
        named = parts if config.criteria_field is None else {}
        reward = sum(parts.values())
        return StepResult(
            reward=reward,
            done=True,
            success=reward >= config.success_reward,
            reward_components=named if len(named) > 1 else {},
            metrics={"score": reward},
        )

    async def _reply(self, text: str) -> str:
        """The judge's reply, asked for once where replies are kept."""
        if not self._config.cache_size:
            return await self._asked(text)
        key = (asyncio.get_running_loop(), text)
        task = self._kept.pop(key, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.ensure_future(self._asked(text))
        self._kept[key] = task  # the newest last
        while len(self._kept) > self._config.cache_size:
            del self._kept[next(iter(self._kept))]
        return await asyncio.shield(task)

    async def _asked(self, text: str) -> str:
        config = self._config
        try:
            answer = await self._endpoint().chat.completions.create(
                model=config.model,
                messages=[{"role": "user", "content": text}],
                temperature=config.temperature,
                max_tokens=config.max_tokens,
            )
        except Exception as error:  # of a library that is imported only here
            cause = "" if error.__cause__ is None else f" ({error.__cause__})"
            what = masked(f"{self._label}: {type(error).__name__}: {error}{cause}")
            # Not `from error`, whose own words are what the endpoint said.
            with fails_as("infrastructure"):
                raise (PluginError if type(error).__name__ in WRONG else RewardError)(what) from None
        try:
            content = answer.choices[0].message.content
            if isinstance(content, list):
                content = "".join(part["text"] for part in content if part["type"] == "text")
            if content is None or isinstance(content, str):
                return content or ""
        except (AttributeError, LookupError, TypeError):
            pass
        raise RewardError(masked(f"{self._label}: replied {brief(answer)}; expected choices[0].message.content, a text"))

    @property
    def _label(self) -> str:
        return f"the judge {self._config.model!r} at {self._config.base_url}"

    def _endpoint(self) -> Any:
        from openai import AsyncOpenAI

        from rlcore_rewards.bounded_replies import bounded_client

        loop, config = asyncio.get_running_loop(), self._config
        if loop not in self._clients:
            http_client: Any = bounded_client(config.timeout_s)  # openai 2 types it by httpx, 3 by httpx2, and takes both
            self._clients[loop] = AsyncOpenAI(
                base_url=config.base_url,
                api_key="none" if config.api_key_env is None else keep_secret(os.environ.get(config.api_key_env, "")),
                timeout=config.timeout_s,
                http_client=http_client,
                max_retries=config.max_attempts - 1,
            )
        return self._clients[loop]


def template_of(config: JudgeConfig) -> str:
    """The template of the judge's prompt. ConfigError where it cannot be read."""
    if config.prompt is not None or config.prompt_file is None:
        return config.prompt or ""
    try:
        return read_file(expanded(config.prompt_file)).decode()
    except (OSError, UnicodeDecodeError) as error:
        problem = _problem("prompt_file", f"{config.prompt_file} ({error})", "a file with text in UTF-8")
        raise ConfigError([problem]) from error


def check(context: CheckContext | None, config: JudgeConfig) -> list[Problem]:
    """Return what is wrong with the section."""
    problems = prompt_problems(SECTION, config)
    if not is_installed("openai"):
        found, remedy = "the section, without the package openai", "Run: pip install 'rlcore[rewards]'"
        problems.append(Problem(path=SECTION, found=found, expected="the package", remedy=remedy))
    if not config.base_url.startswith(("http://", "https://")):
        problems.append(_problem("base_url", repr(config.base_url), "an address that begins with http:// or https://"))
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        problems.append(_problem("api_key_env", f"{config.api_key_env}, which is not set", "a variable of the environment"))
    if config.score_field is None and (fault := pattern_fault(config.score_pattern)):
        problems.append(_problem("score_pattern", fault, "a regular expression with one group"))
    limit_s = None if context is None else context.environment_timeout_s
    if limit_s is not None and config.timeout_s >= limit_s:
        expected = f"less than rollout.environment_timeout_s, which is {limit_s:g}"
        problems.append(_problem("timeout_s", f"{config.timeout_s:g}", expected))
    if config.cache_size and config.temperature:
        found = f"{config.cache_size}, with temperature = {config.temperature:g}, whose replies differ"
        problems.append(_problem("cache_size", found, "0, or temperature = 0.0"))
    if config.criteria and config.criteria_field is not None:
        problems.append(_problem("criteria_field", f"{config.criteria_field!r} beside criteria", "one of the two"))
    has_rubric = bool(config.criteria) or config.criteria_field is not None
    if config.criteria_requests == "each" and not has_rubric:
        problems.append(_problem("criteria_requests", '"each", without criteria', "criteria, or no such key"))
    return problems + _template_problems(config, has_rubric=has_rubric)


def _template_problems(config: JudgeConfig, *, has_rubric: bool) -> list[Problem]:
    if (config.prompt is None) == (config.prompt_file is None):
        found = "neither" if config.prompt is None else "both"
        return [Problem(path=SECTION, found=f"{found} of prompt and prompt_file", expected="one of the two")]
    try:
        template = template_of(config)
    except ConfigError as error:
        return list(error.problems)
    key = "prompt" if config.prompt is not None else "prompt_file"
    if has_rubric and CRITERIA not in template:
        return [_problem(key, f"{template!r:.60}", f"a text with {CRITERIA} in it", "The judge would see no criterion.")]
    if "{completion}" in template:
        return []
    return [_problem(key, f"{template!r:.60}", "a text with {completion} in it", "The judge would never see the answer.")]


def _problem(key: str, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=f"{SECTION}.{key}", found=found, expected=expected, remedy=remedy)
