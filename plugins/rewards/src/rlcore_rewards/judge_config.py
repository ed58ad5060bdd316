"""Options of the environment `judge`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import Constraint, FileText, Positive, Seconds, Text, at_least
from rlcore_rewards.config import PromptConfig

_SCORES = Constraint("of two, the least score and the greatest", lambda value: -1e9 < value[0] < value[1] < 1e9)


@frozen(kw_only=True)
class JudgeConfig(PromptConfig):
    """`[environment.judge]`: a model behind OpenAI's API scores each answer; prompts come from `[data]`."""

    base_url: Text
    """Address of the API, such as "http://127.0.0.1:8001/v1"."""
    model: Text
    """The endpoint's name of the model that judges."""
    api_key_env: str | None = None
    """The environment variable with the key; none where the endpoint asks for none. The key itself is written nowhere."""
    prompt: str | None = None
    """The judge's prompt, with {completion}, {prompt} and {row[FIELD]} in it."""
    prompt_file: FileText | None = None
    """A file with that text, beside the recipe; one of the two."""
    score_pattern: str = (
        r"(?i)score\W*?(?:(?:\(|\[)(?![\s(\[]*-?[\d.]+(?:\s*/\s*\d+)?\s*[)\]])[^)\]]*[)\]]\W*?)?(-?\d*\.?\d+)"
        r"(?!\d|\.\d|[-–]\d| ?to \d| [-–] \d+\s*(?:[:.)\]]|$))"
    )
    """A regular expression whose one group is the score. Of several matches in the judge's answer the last one counts. The
    default does not take the range in "score (0-10): 7" as a score."""
    score_field: str | None = None
    """In its place, a field of the JSON object that the judge answers with."""
    score_range: Annotated[tuple[float, float], _SCORES] = (0.0, 10.0)
    """The least and the greatest score, which are the rewards 0.0 and 1.0; another score is an error."""
    temperature: Annotated[float, at_least(0)] = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Positive = 512
    """Longest answer of the judge."""
    timeout_s: Seconds = 20.0
    """Most seconds for one request."""
    max_attempts: Positive = 3
    """Attempts per request. It is retried after a lost connection, a timeout and the states 408, 409, 429 and 5xx. Pauses grow,
    or follow the endpoint's request."""
    max_concurrent: Positive = 32
    """Most requests at once."""
