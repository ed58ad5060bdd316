"""The reward of a right answer."""

from rlcore.thoughts import without_thoughts


async def exact_answer(completion: str, answer: object) -> float:
    """Return 1 where a completion without thoughts equals the answer, whatever white space surrounds either; else 0."""
    return float(without_thoughts(completion).strip() == str(answer).strip())
