"""Makes the policy's prompt from the prompt of a row."""

from rlcore.spi import DataError, Observation, Problem, Row
from rlcore_rewards.config import PromptConfig

PROMPT = "prompt"


def observation_of(row: Row, config: PromptConfig) -> Observation:
    """The row's prompt as text or messages. DataError where it has none."""
    if PROMPT not in row:
        raise DataError(f"found a row with the fields {', '.join(map(repr, row))}; expected a prompt")
    form, system = config.prompt_format, config.system_prompt
    return Observation.of_prompt(row[PROMPT], prompt_format=form, system_prompt=system, tools=row.get("tools"))


def prompt_problems(section: str, config: PromptConfig) -> list[Problem]:
    """Problems of a section's keys for prompts."""
    if config.system_prompt is None or config.prompt_format == "chat":
        return []
    expected = 'none where prompt_format = "text"'
    remedy = 'Put it into the prompts, or set prompt_format = "chat".'
    return [Problem(path=f"{section}.system_prompt", found="a text", expected=expected, remedy=remedy)]
