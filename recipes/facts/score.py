"""The reward of a fact."""


def score(completion: str, privileged_context: str) -> float:
    """Return 1 for the fact's digit, else 0."""
    return float(completion.strip() == privileged_context)
