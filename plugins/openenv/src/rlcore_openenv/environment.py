"""The environment `openenv`: each episode is one of an OpenEnv server's environment."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from rlcore.spi import DataError, EnvironmentContext, EpisodeResult, LazyRows, Row, SessionEndpoint
from rlcore_openenv.actions import translator
from rlcore_openenv.config import FIRST_EVALUATION_SEED, OpenEnvConfig
from rlcore_openenv.connection import FULL, Connection, Observed, RefusedError, connected
from rlcore_openenv.episode import Episode
from rlcore_openenv.policy import Policy
from rlcore_openenv.views import view

SEED = "seed"
RETRY_S = 0.25
"""Seconds after which a server that is full is asked again."""


class OpenEnvBackend:
    """Plays episodes on the servers that the recipe names."""

    def __init__(self, context: EnvironmentContext, config: OpenEnvConfig) -> None:  # noqa: ARG002 - episodes have their seeds
        self._config = config
        self._translate, self._show = translator(config), view(config)
        self._num_episodes = Counter(dict.fromkeys(config.urls, 0))

    def rows(self, split: str) -> Sequence[Row] | None:
        """Rows that are seeds alone; None where they come from the recipe's data."""
        if not self._config.num_train:
            return None
        if split == "train":
            return LazyRows(self._config.num_train, lambda number: {SEED: number})
        return LazyRows(self._config.num_evaluation, lambda number: {SEED: FIRST_EVALUATION_SEED + number})

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        """Play an episode. RewardError where the server is not there, goes away, or replies with an error."""
        fields = self._reset_fields(row, seed)
        with self._server() as url:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
                self._begun(http, url, fields) as (connection, first),
            ):
                episode = Episode(
                    config=self._config,
                    connection=connection,
                    policy=Policy(http, session),
                    translate=self._translate,
                    show=self._show,
                )
                return await episode.play(row, first)

    def _reset_fields(self, row: Row, seed: int) -> Mapping[str, Any]:
        """The fields that reset the server: a row's own seed comes before the run's."""
        names = self._config.reset_fields
        fields = {SEED: seed} | {name: value for name, value in row.items() if names is None or name in (*names, SEED)}
        try:
            json.dumps(fields)
        except (TypeError, ValueError) as error:
            expected = "values of JSON, or environment.openenv.reset_fields with the names of those to send"
            raise DataError(f"found a row that the OpenEnv server cannot be sent: {error}; expected {expected}") from error
        return fields

    @contextmanager
    def _server(self) -> Iterator[str]:
        """The address of the server with the fewest episodes, which then has one more."""
        url, _ = min(self._num_episodes.items(), key=lambda item: item[1])
        self._num_episodes[url] += 1
        try:
            yield url
        finally:
            self._num_episodes[url] -= 1

    @asynccontextmanager
    async def _begun(
        self, http: aiohttp.ClientSession, url: str, fields: Mapping[str, Any]
    ) -> AsyncIterator[tuple[Connection, Observed]]:
        """A connection on which an episode has begun. A full server is asked again until the time to connect is over."""
        limit_s = self._config.connect_timeout_s
        end = time.monotonic() + limit_s
        while True:
            async with connected(http, url, limit_s) as connection:
                try:
                    first = await connection.reset(fields)
                except RefusedError as error:
                    if error.code != FULL or time.monotonic() >= end:
                        raise
                else:
                    yield connection, first
                    return
            await asyncio.sleep(RETRY_S)
