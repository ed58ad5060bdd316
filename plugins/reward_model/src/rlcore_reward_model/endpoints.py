"""A reward model behind vLLM's server: its values of token sequences."""

import asyncio
import math
import os
from collections.abc import Sequence

import aiohttp

from rlcore.secrets import keep_secret
from rlcore.spi import PluginError, RewardError, WorkerError, fails_as
from rlcore_openai.endpoint import Endpoint
from rlcore_openai.endpoint_pool import EndpointPool
from rlcore_openai.errors import WrongAnswerError
from rlcore_reward_model.config import RewardModelConfig


class RewardEndpoints:
    """Servers of one reward model, which share the requests. It belongs to one event loop."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._ready = asyncio.Lock()
        self._pool: EndpointPool | None = None

    async def value(self, tokens: Sequence[int]) -> float:
        """Return the model's value at the last of L tokens. RewardError where no server answers; PluginError where one serves
        no such model or refuses."""

        async def once(endpoint: Endpoint) -> float:
            # Without the activation: the value itself, not the probability that vLLM makes of it.
            body = {"model": endpoint.model, "input": list(tokens), "use_activation": False}
            reply = await endpoint.asked("/classify", body)
            try:
                (one,), num_tokens = reply["data"], reply["usage"]["prompt_tokens"]
                values = one["probs"]
            except (KeyError, TypeError, ValueError) as error:
                raise WrongAnswerError(f"a reply without data and usage ({type(error).__name__})") from error
            if not isinstance(values, list) or len(values) != 1:
                shown = f"{len(values)} values" if isinstance(values, list) else repr(values)[:60]
                raise WrongAnswerError(f"{shown} of a sequence, where a reward model has one")
            if num_tokens != len(tokens):
                raise WrongAnswerError(f"a value of {num_tokens} tokens for {len(tokens)}")
            if type(values[0]) not in (int, float) or not math.isfinite(values[0]):
                raise WrongAnswerError(f"the value {values[0]!r:.60}, where a finite number is")
            return float(values[0])

        with fails_as("infrastructure"):
            try:
                return await (await self._opened()).answer(once)
            except WorkerError as error:
                raise RewardError(str(error)) from error

    async def _opened(self) -> EndpointPool:
        """Return the servers, whose models are looked up once."""
        async with self._ready:
            if self._pool is None:
                config = self._config
                key = keep_secret(os.environ.get(config.api_key_env, "")) if config.api_key_env else ""
                endpoints = [
                    Endpoint(
                        url=url.rstrip("/").removesuffix("/v1"),
                        session=self.session,
                        key=key,
                        timeout_s=config.timeout_s,
                        places=asyncio.Semaphore(config.max_concurrent),
                    )
                    for url in config.base_urls
                ]
                for endpoint in endpoints:
                    alone = EndpointPool(
                        endpoints=[endpoint],
                        max_attempts=config.max_attempts,
                        expected="vLLM's server (vllm serve --runner pooling)",
                    )
                    endpoint.model = await alone.answer(self._model)
                expected = "the value of a sequence classifier with one label (vllm serve --runner pooling)"
                self._pool = EndpointPool(endpoints=endpoints, max_attempts=config.max_attempts, expected=expected)
            return self._pool

    async def _model(self, endpoint: Endpoint) -> str:
        reply = await endpoint.asked("/v1/models")
        try:
            names = [str(card["id"]) for card in reply["data"]]
        except (KeyError, TypeError) as error:
            raise WrongAnswerError("no list of models") from error
        wanted = self._config.model or (names[0] if len(names) == 1 else None)
        if wanted not in names:
            served = ", ".join(f"{name:.60}" for name in names[:8]) or "none"
            expected = "one alone, or environment.reward_model.model" if wanted is None else repr(wanted)
            raise PluginError(f"{endpoint.url}: found the models {served}; expected {expected}")
        return wanted
