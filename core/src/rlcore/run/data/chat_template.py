"""Messages through a tokenizer's chat template, and nothing of them left out."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from attrs import field, frozen

from rlcore.images import Placeholders, image_parts, images_of, shown_message
from rlcore.spi import DataError
from rlcore.time_limit import TEMPLATE_S, time_limit

TODAY = date(2024, 7, 26)
"""What templates that ask for the date are told, so that a prompt is the same on each day of a run, and of one that is resumed.
Llama's take it where they know no date."""
PROBE = "rlcore-probe-7391"
"""Stands for a message's content where only its place is wanted."""


def with_defaults(template: str, variables: Mapping[str, str | bool | int | float]) -> str:
    """A Jinja template that renders as `template` does with these variables, unless it is given others of the names."""
    written = {name: str(value).lower() if isinstance(value, bool) else repr(value) for name, value in variables.items()}
    lines = [f"{{%- set {name} = {name} if {name} is defined else {value} %}}\n" for name, value in written.items()]
    return "".join([*lines, template])


@frozen(kw_only=True, eq=False)
class ChatTemplate:
    """The chat template of a `transformers` tokenizer."""

    backend: Any
    """The tokenizer."""
    variables: Mapping[str, Any]
    """What the template reads besides messages and tools."""
    placeholders: Callable[[], Placeholders | None]
    """What puts placeholders for images into prompts; None for a model of text alone."""
    _shown: set[tuple[str, str, bool]] = field(factory=set, init=False)
    """Templates with a role whose messages they show, and whether as the first one."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, answered: bool = False
    ) -> str:
        """Messages up to where the assistant's answer begins; `answered`, to where the last of them ends. DataError where there
        is no template, and where it refuses what it is given or passes over it. For each image the text has as many
        placeholders as the model reads tokens."""
        template = self.backend.chat_template
        if template is None:
            raise DataError(
                "a prompt is a list of chat messages, but the tokenizer has no chat template. Set model.chat_template "
                "to one, or give prompts as plain text"
            )
        if tools and not reads("tools", str(template)):
            raise DataError(
                "a prompt has tools, but the chat template never shows any. Set model.chat_template to one that does, or "
                "describe them in a message and read the calls in the answer"
            )
        if any(message.get("tool_calls") for message in messages) and not reads("tool_calls", str(template)):
            raise DataError("a message has tool_calls, but the chat template never shows any. Write them into its content")
        conversation = [shown_message(message) for message in messages]
        text = self._render(conversation, tools, answered=answered)
        for number, message in enumerate(conversation):
            role = str(message.get("role"))
            place = (str(template), role, number == 0)
            if role not in ("user", "assistant") and place not in self._shown:
                self._require_shown(conversation, number, role, tools)
                self._shown.add(place)
        return self._with_images(text, messages)

    def _with_images(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text with placeholders for the images of the messages."""
        placeholders, has_images = self.placeholders(), any(map(image_parts, messages))
        if placeholders is None and has_images:
            raise DataError(
                "a prompt has images, but the model reads text alone: its config.json has no vision_config. Take the images "
                "out, or use a model of images"
            )
        return text if placeholders is None else placeholders.expanded(text, images_of(messages))

    def _require_shown(self, conversation: Sequence[dict[str, Any]], number: int, role: str, tools: Sequence[Any]) -> None:
        """DataError where the template passes over a message: many know no role but four."""
        probed = [*conversation[:number], conversation[number] | {"content": PROBE}, *conversation[number + 1 :]]
        try:
            is_shown = PROBE in self._render(probed, tools)
        except DataError:  # it looks into the content
            return
        if not is_shown:
            where = "" if number == 0 else " behind the first message"
            raise DataError(
                f"the chat template leaves out what has the role {role!r}{where}. Give it another role, such as 'system' or "
                "'user', or set model.chat_template to one that shows it"
            )

    def _render(
        self, conversation: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, answered: bool = False
    ) -> str:
        today = {"strftime_now": TODAY.strftime} if reads("strftime_now", str(self.backend.chat_template)) else {}
        try:
            with time_limit("the chat template", TEMPLATE_S):
                text = self.backend.apply_chat_template(
                    list(conversation),
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=not answered,
                    **today,
                    **self.variables,
                )
        except Exception as error:  # templates raise whatever they like, mostly jinja2.TemplateError
            raise DataError(f"the chat template refuses the messages {conversation!r:.200}: {error}") from error
        return str(text)


def reads(name: str, template: str | None) -> bool:
    """Whether a variable occurs in a template."""
    return re.search(rf"\b{re.escape(name)}\b", template or "") is not None
