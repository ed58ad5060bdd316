"""A model behind an endpoint that scores prompts: its options, and what is wrong with them."""

import os
from collections.abc import Iterator

from attrs import frozen

from rlcore.schema.constraints import Positive, Seconds, Text
from rlcore.spi import Problem


@frozen(kw_only=True)
class EndpointConfig:
    """A frozen model behind vLLM's OpenAI server or `rlcore serve`, which return the log-probabilities of prompts."""

    base_url: Text
    """Address of the API, such as "http://127.0.0.1:8001/v1"."""
    model: Text | None = None
    """The endpoint's name of the model. None where it has one alone."""
    api_key_env: str | None = None
    """The environment variable with the key; none where the endpoint asks for none. The key itself is written nowhere."""
    timeout_s: Seconds = 120.0
    """Most seconds for one request."""
    max_attempts: Positive = 4
    """Attempts per request. It is retried after a lost connection, a timeout and the states 408, 409, 429 and 5xx, with growing
    pauses."""
    max_concurrent: Positive = 32
    """Most requests at once, each with one sequence."""


def endpoint_problems(section: str, config: EndpointConfig) -> Iterator[Problem]:
    """Yield what is wrong with the options of an endpoint, in a section of the recipe."""
    if not config.base_url.startswith(("http://", "https://")):
        expected = "an address that begins with http:// or https://"
        yield Problem(path=f"{section}.base_url", found=repr(config.base_url), expected=expected)
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        found = f"{config.api_key_env}, which is not set"
        yield Problem(path=f"{section}.api_key_env", found=found, expected="a variable of the environment")
