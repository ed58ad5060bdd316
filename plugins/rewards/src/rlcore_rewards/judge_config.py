"""Options of the environment `judge`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Count, FileText, Positive, Seconds, Text, above, at_least
from rlcore_rewards.config import PromptConfig

_SCORES = Constraint("of two, the least score and the greatest", lambda value: -1e9 < value[0] < value[1] < 1e9)


@frozen(kw_only=True)
class CriterionConfig:
    """`[environment.judge.criteria.NAME]`: a criterion of a rubric."""

    text: Text
    """The criterion in words, for the judge."""
    weight: Annotated[float, above(0)] = 1.0
    """Its share of the reward, divided by the sum of all weights."""


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
    criteria: Mapping[str, CriterionConfig] = field(factory=dict)
    """A rubric: criteria that the judge scores one by one, each in score_range. The prompt then has {criteria} in it, and the
    reward is the weighted mean of the scores, as values from 0.0 to 1.0 (arXiv:2507.17746)."""
    criteria_field: str | None = None
    """In its place, a field of the row with its own rubric: a list of {"criterion": text, "weight": number}."""
    criteria_requests: Literal["one", "each"] = "one"
    """"one": one request about all criteria, which the judge answers with a JSON object of scores by the criteria's names.
    "each": a request for each criterion, whose score is read as without a rubric."""
    cache_size: Count = 0
    """Replies of the judge that are kept in memory, for a temperature of 0. The same prompt, such as that of an answer that
    several samples give, is then asked about once. 0 keeps none."""
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
