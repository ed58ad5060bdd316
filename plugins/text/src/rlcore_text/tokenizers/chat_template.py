"""Renders messages with a tokenizer's chat template, and refuses messages that the template leaves out."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from rlcore.schema.suggestions import nearest
from rlcore.spi import DataError
from rlcore.time_limit import TEMPLATE_S, time_limit
from rlcore_text.chats.images import Placeholders, image_parts, images_of, shown_message
from rlcore_text.chats.messages import ASSISTANT, OWN, THOUGHTS, meant_role, read_messages, thought_of
from rlcore_text.tokenizers.template_environment import replace_environment

PROBE = "rlcore-probe-7391"
"""Content of a made-up message, which shows where a template puts the content."""
MAX_BYTES = 2**30
"""Most memory that the process takes while a template renders."""
MAX_CHARACTERS = 2**27
"""Most characters of a rendered text: no model reads a hundredth of it."""
MAX_ROLES = 32
"""Most roles of one conversation: each may take two further renderings."""
MAX_ROLE_CHARACTERS = 64
MAX_SHOWN = 10_000
"""Parts of messages that are remembered as shown."""
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's chat templates besides the default."""
PROCESSOR_TEMPLATE_FILE, PROCESSOR_FILE = "chat_template.json", "processor_config.json"
"""Files in which older vision-language models have their chat template. Processors read the first before any other file."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the chat template for prompts, and of the one for prompts with tools, which few tokenizers have."""


def named_templates(found: object) -> dict[str, str]:
    """Return chat templates by name, from any form that tokenizers have: a text, which is the default, or several with names.
    ValueError for anything else."""
    if isinstance(found, list | tuple):
        if odd := [each for each in found if not isinstance(each, Mapping) or each.keys() != {"name", "template"}]:
            raise ValueError(f"found the chat template {odd[0]!r:.80}; expected an object with name and template alone")
        if len(names := [each["name"] for each in found]) > len({*names}):
            raise ValueError(f"found several chat templates of one name: {', '.join(map(repr, names))}")
        found = {each["name"]: each["template"] for each in found}
    named: Mapping[Any, Any] = found if isinstance(found, Mapping) else {} if found is None else {DEFAULT: found}
    for name, template in named.items():
        if not isinstance(template, str):
            raise ValueError(f"found {type(template).__name__} as the chat template {name!r}; expected text")
    return {str(name): template for name, template in named.items()}


def template_for(found: object, *, has_tools: bool) -> str | None:
    """Return the chat template that transformers takes for a prompt with or without tools; None where there is none."""
    named = named_templates(found)
    return named.get(WITH_TOOLS if has_tools and WITH_TOOLS in named else DEFAULT)


def with_defaults(template: str, variables: Mapping[str, str | bool | int | float]) -> str:
    """A Jinja template that renders as `template` does with these variables, unless it is given others of the names."""
    written = {name: str(value).lower() if isinstance(value, bool) else repr(value) for name, value in variables.items()}
    lines = [f"{{%- set {name} = {name} if {name} is defined else {value} %}}\n" for name, value in written.items()]
    return "".join([*lines, template])


def write_templates(directory: Path, templates: Mapping[str, str], variables: Mapping[str, str | bool | int | float]) -> None:
    """Replace the chat templates in a model directory, with these variables as defaults."""
    if not templates:
        return
    (directory / PROCESSOR_TEMPLATE_FILE).unlink(missing_ok=True)
    others = directory / ADDITIONAL_TEMPLATES
    shutil.rmtree(others, ignore_errors=True)
    for name, template in templates.items():
        file = directory / "chat_template.jinja" if name == DEFAULT else others / f"{Path(name).name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(with_defaults(template, variables), encoding="utf-8")


@frozen(kw_only=True, eq=False)
class ChatTemplate:
    """The chat template of a `transformers` tokenizer."""

    backend: Any
    """The tokenizer."""
    variables: Mapping[str, Any]
    """The variables that the template reads besides messages and tools."""
    placeholders: Callable[[], Placeholders | None]
    """The function that puts placeholders for images into prompts; None for a model of text alone."""
    _shown: set[tuple[str, str, bool]] = field(factory=set, init=False)
    """Templates with a part of messages that they show, and whether in the first one."""
    _thoughts: dict[str, list[str]] = field(factory=dict, init=False)
    """Names of thoughts that each template shows."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, answered: bool = False
    ) -> str:
        """Messages up to where the assistant's answer begins; `answered`, to where the last of them ends. DataError where there
        is no template, and where it refuses what it is given or passes over it. For each image the text has as many
        placeholders as the model reads tokens."""
        template = template_for(self.backend.chat_template, has_tools=bool(tools))
        if template is None:
            names = ", ".join(named_templates(self.backend.chat_template))
            named = f" for it, only {names}. Set model.chat_template to the name of one"
            remedy = named if names else ". Set model.chat_template to one"
            what = "a prompt is a list of chat messages, but the tokenizer has no chat template"
            raise DataError(f"{what}{remedy}, or give prompts as plain text")
        if tools and not reads("tools", template):
            raise DataError(
                "a prompt has tools, but the chat template never shows any. Set model.chat_template to one that does, or "
                "describe them in a message and read the calls in the answer"
            )
        messages = read_messages(messages, keeps_unreadable=True)
        if any(map(image_parts, messages)) and self.placeholders() is None:
            raise DataError(
                "a prompt has images, but the model reads text alone: its config.json has no vision_config. Take the images "
                "out, or use a model of images"
            )
        if any(message.get("tool_calls") for message in messages) and not reads("tool_calls", template):
            raise DataError("a message has tool_calls, but the chat template never shows any. Write them into its content")
        _require_roles(messages, template)
        conversation = [self._template_message(message, template, tools) for message in messages]
        text = self._render(conversation, tools, answered=answered)
        self._require_fields_shown(conversation, tools, text, answered=answered)
        if len(self._shown) > MAX_SHOWN:
            self._shown.clear()
        for number, message in enumerate(conversation):
            for part, probed in _probes(message):
                place = (template, f"{part} {message['role']!r}", number == 0)
                if place not in self._shown:
                    self._require_shown([*conversation[:number], probed, *conversation[number + 1 :]], number, part, tools)
                    self._shown.add(place)
        return self._with_images(text, messages)

    def _template_message(self, message: Mapping[str, Any], template: str, tools: Sequence[Any]) -> dict[str, Any]:
        """Return a message in the form for the template, with its thought under the name that the template reads."""
        found = {name: value for name, value in shown_message(message).items() if name not in (*THOUGHTS, "weight")}
        if thought := thought_of(message):
            if template not in self._thoughts:
                named = [name for name in THOUGHTS if re.search(rf"""[.'"]{name}\b""", template)]
                self._thoughts[template] = [name for name in named if self._shows_thought(name, tools)]
            if not (known := self._thoughts[template]):
                name = next(name for name in THOUGHTS if message.get(name))
                raise DataError(
                    f"a message has {name}, a thought beside its content, but the chat template never shows any. Write it into "
                    "the content, as <think>…</think> or as the model has it"
                )
            found[known[0]] = thought
        return found

    def _shows_thought(self, name: str, tools: Sequence[Any]) -> bool:
        """Return whether the template shows a field `name` of an answer, with or without a call."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        for calls in ({}, {"tool_calls": [call]}):
            answer = {"role": ASSISTANT, "content": "" if calls else ".", name: PROBE, **calls}
            try:
                if PROBE in self._render([{"role": "user", "content": "."}, answer], tools, answered=True):
                    return True
            except DataError:  # it takes no such messages
                continue
        return False

    def _require_fields_shown(
        self, conversation: Sequence[dict[str, Any]], tools: Sequence[Any], text: str, *, answered: bool
    ) -> None:
        """Refuse, with a DataError, an unknown field of messages that the rendered text does not show."""
        template = str(self.backend.chat_template)
        for name in sorted({name for message in conversation for name in message} - OWN):
            if (template, name, True) in self._shown:
                continue
            without = [{key: value for key, value in message.items() if key != name} for message in conversation]
            if self._render(without, tools, answered=answered) == text:
                near = nearest(name, sorted(OWN))
                hint = f" Did you mean {near!r}?" if near else " Take it out"
                raise DataError(f"a message has the unknown field {name!r}, which the chat template does not show.{hint}")
            self._shown.add((template, name, True))

    def _with_images(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text with placeholders for the images of the messages."""
        placeholders = self.placeholders()
        return text if placeholders is None else placeholders.expanded(text, images_of(messages))

    def _require_shown(self, probed: Sequence[dict[str, Any]], number: int, part: str, tools: Sequence[Any]) -> None:
        """Refuse, with a DataError, a template that leaves out the part of a message that is PROBE in `probed`.

        Many templates know four roles only, and some show one call a turn."""
        try:
            is_shown = PROBE in self._render(probed, tools, answered=probed[-1]["role"] == ASSISTANT)
        except DataError:  # it looks into the content
            return
        if not is_shown:
            role, where = probed[number]["role"], "" if number == 0 else " behind the first message"
            other = "" if role in ("user", ASSISTANT) else "give it another role, such as 'system' or 'user', or "
            remedy = f"{other}set model.chat_template to one that shows it"
            raise DataError(f"the chat template leaves out {part} {role!r}{where}. {remedy[0].upper()}{remedy[1:]}")

    def _render(
        self, conversation: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, answered: bool = False
    ) -> str:
        options = {"tools": [dict(tool) for tool in tools] or None, "add_generation_prompt": not answered}
        replace_environment()
        for form in (conversation, [_with_arguments_as_text(message) for message in conversation]):
            try:
                with time_limit("the chat template", TEMPLATE_S, max_bytes=MAX_BYTES):
                    text = str(self.backend.apply_chat_template(list(form), tokenize=False, **options, **self.variables))
                if len(text) > MAX_CHARACTERS:
                    raise OverflowError(f"its text has {len(text):,} characters; expected at most {MAX_CHARACTERS:,}")
                return text
            except Exception as error:  # templates raise any exception, mostly jinja2.TemplateError
                # Some templates, such as DeepSeek's, concatenate arguments as text and raise TypeError for objects: try text.
                if form is not conversation or not any(message.get("tool_calls") for message in conversation):
                    raise DataError(f"the chat template refuses the messages {conversation!r:.200}: {error}") from error
        raise AssertionError("the second form returns or raises")


def _require_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Refuse, with a DataError, a role that is most likely a slip, unless the template names it, and too many roles."""
    roles = dict.fromkeys(message["role"] for message in messages)
    if len(roles) > MAX_ROLES:
        raise DataError(f"messages have {len(roles)} different roles; expected at most {MAX_ROLES}")
    if long := next((role for role in roles if len(role) > MAX_ROLE_CHARACTERS), None):
        raise DataError(f"a message has a role of {len(long)} characters, {long!r:.40}; expected at most {MAX_ROLE_CHARACTERS}")
    for role in roles:
        if (meant := meant_role(role)) and not re.search(rf"""(['"]){re.escape(role)}\1""", template):
            raise DataError(
                f"a message has the role {role!r:.40}, which the chat template does not name. Did you mean {meant!r}? Rename "
                "it, or set model.chat_template to one that names the role"
            )


def _probes(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part of a message that a template has to show, in words, with the message that has PROBE in its place. The
    text of an answer with calls is no such part."""
    content, calls = message.get("content"), message.get("tool_calls", ())
    if not calls:
        text = PROBE if isinstance(content, str) else [*image_parts(message), {"type": "text", "text": PROBE}]
        yield "what has the role", {**message, "content": text}
    for number, call in enumerate(calls[:2]):  # those behind the second are further calls too
        named = {**call, "function": {**call["function"], "name": PROBE}}
        part = f"{'the first call' if number == 0 else 'further calls'} of the role"
        yield part, {**message, "tool_calls": [*calls[:number], named, *calls[number + 1 :]]}


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [
        one["arguments"] if isinstance(one["arguments"], str) else json.dumps(one["arguments"], ensure_ascii=False)
        for one in functions
    ]
    calls = [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]
    return {**message, "tool_calls": calls}


def reads(name: str, template: str | None) -> bool:
    """Return whether a variable occurs in a template."""
    text = template or ""
    return name in text and re.search(rf"\b{re.escape(name)}\b", text) is not None


def unread_names(names: Iterable[str], templates: object) -> list[str]:
    """Return the names that none of a tokenizer's chat templates reads."""
    texts = named_templates(templates).values()
    return [name for name in names if not any(reads(name, text) for text in texts)]
