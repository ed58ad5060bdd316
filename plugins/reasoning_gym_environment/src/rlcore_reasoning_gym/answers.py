"""Finds the answer in a response."""

from rlcore.thoughts import without_thoughts
from rlcore_reasoning_gym.config import ReasoningGymConfig


def answer_of(response: str, config: ReasoningGymConfig, *, is_thinking: bool = False) -> str | None:
    """The answer, without white space around it; None where the response has none, or has it in a thought alone. With
    `is_thinking` the response begins within a thought."""
    response = without_thoughts(response, is_thinking=is_thinking or config.thought_in_prompt)
    if config.answer_from == "tag":
        answer = _within(response, config.answer_tag)
    elif config.answer_from == "last_line":
        answer = response.strip().rpartition("\n")[2]
    else:
        answer = response
    return answer.strip() or None


def as_response(answer: str, config: ReasoningGymConfig) -> str:
    """A response with that answer and nothing else."""
    return f"<{config.answer_tag}>{answer}</{config.answer_tag}>" if config.answer_from == "tag" else answer


def instruction_of(config: ReasoningGymConfig) -> str:
    """The text below the question."""
    if config.instruction is not None:
        return config.instruction
    if config.answer_from == "tag":
        tag = config.answer_tag
        return f"Put the final answer alone between <{tag}> and </{tag}>."
    if config.answer_from == "last_line":
        return "Put the final answer alone on the last line."
    return "Reply with the final answer alone."


def _within(response: str, tag: str) -> str:
    """The content of the last closed tag: from its nearest opening, so that a tag that is only spoken of opens nothing."""
    before, closed, _ = response.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside if closed and opened else ""
