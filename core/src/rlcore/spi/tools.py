"""Tools that a policy may call, and its calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from attrs import field, frozen

Tool: TypeAlias = Mapping[str, Any]
"""{"type": "function", "function": {"name": text, "description": text, "parameters": a JSON schema of the arguments}}"""


@frozen(kw_only=True)
class ToolCall:
    """One call of a tool that the policy wrote, whether or not it could be read."""

    id: str
    """Names the call among those of its turn."""
    name: str
    """The tool's name, whether or not there is such a tool; empty where none could be read."""
    arguments: Mapping[str, Any] = field(factory=dict)
    """Parsed from JSON; empty where `error` is not None."""
    text: str
    """The call as the policy wrote it."""
    error: str | None = None
    """Why the call could not be read; None where it could."""


ParseToolCalls: TypeAlias = Callable[[str, Sequence[Tool]], tuple[str, Sequence[ToolCall]]]
"""(text of a turn with its special tokens, tools of the episode) -> (text without the calls, calls in order)."""


class ToolParser(Protocol):
    """Finds the calls of tools in a turn."""

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text without the calls, and the calls in order, those that could not be read among them. Never raises."""
