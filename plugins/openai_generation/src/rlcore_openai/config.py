"""The recipe's section `[generator.openai]`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import Constraint, Positive, Seconds

Urls = Annotated[tuple[str, ...], Constraint("of at least one address", bool)]


@frozen(kw_only=True)
class OpenAIConfig:
    """`[generator.openai]`: endpoints with OpenAI's API that return token ids answer; `model.path` names their tokenizer."""

    base_urls: Urls
    """Addresses of the API, such as ["https://127.0.0.1:8000/v1"]. Several share the requests, and have the same model."""
    model: str | None = None
    """The endpoints' name of the model; None where each has one alone."""
    api_key_env: str | None = None
    """The environment variable with the key; none where the endpoints ask for none. The key itself is written nowhere."""
    max_concurrent: Positive = 256
    """Most answers asked for at once of each endpoint; the others wait."""
    timeout_s: Seconds = 600.0
    """Most seconds for one attempt at an answer."""
    max_attempts: Positive = 5
    """Attempts per request. It is retried after a lost connection, a timeout and the states 408, 409, 429 and 5xx. Pauses grow,
    or follow the endpoint's request. With several endpoints, another one gets the retry."""
