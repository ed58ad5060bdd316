"""The way in which a session's chats show tools, and read calls of them."""

from attrs import frozen

from rlcore.spi import ParseToolCalls
from rlcore.spi import ToolParser as AnyToolParser
from rlcore_text.chats.plain_tools import shows_tools
from rlcore_text.chats.tool_calls import FORMS, ToolParser

PLAIN = "hermes"
"""The form of calls where the chat template reads no tools."""


@frozen(kw_only=True, eq=False)
class SessionTools:
    """How tools are shown, and what reads their calls."""

    parse: ParseToolCalls | None
    """None where tools are refused."""
    form: str
    """The name of the form that `parse` reads."""
    is_in_template: bool
    """False where the chat template reads no tools, so that the conversation's text describes them."""

    @classmethod
    def of(cls, parser: AnyToolParser | None, chat_template: str | None) -> "SessionTools":
        """Return those of a run's parser, which is None where the chat template shows no form that it knows."""
        is_plain = parser is None and not shows_tools(chat_template)
        found = ToolParser(PLAIN, FORMS[PLAIN]) if is_plain else parser
        name = found.name if isinstance(found, ToolParser) else ""
        return cls(parse=None if found is None else found.parse, form=name, is_in_template=not is_plain)
