"""Reads rows of data sets, of any source: checks fields, applies the recipe's field names, brings messages into one form."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from rlcore.config.data import DatasetConfig
from rlcore.schema.printable import lone_surrogate
from rlcore.schema.suggestions import nearest
from rlcore.spi import ConfigError, DataError, Message, Problem, Row
from rlcore_text.chats.conversation import behind_prompt
from rlcore_text.chats.images import image_parts
from rlcore_text.chats.message_order import order_fault
from rlcore_text.chats.messages import ASSISTANT, IN_LOSS, has_value, read_messages, read_tools, role_of
from rlcore_text.chats.public_fields import FIELDS, PublicField, misspelt_column, names_of
from rlcore_text.formats.choice import AUTO, OWN, FormatChoice
from rlcore_text.rows.row_images import COLUMNS, MARK, column_images, has_marks, holds_image, with_images

PROMPT, COMPLETION = "prompt", "completion"
_USUAL_PROMPT_FIELDS = ("question", "problem", "instruction", "messages", "input", "query", "text")
REJECTED = ("rejected_response", "rejected_messages")
"""ms-swift's columns for the rejected answer beside a chat."""
JOINED = ("input", "context")
"""Columns with a further part of the prompt, where the recipe names its first part."""
OF_ANSWERS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
"""Fields of an answer's message, which rows of a text and its completion have as columns."""
MAPPED = tuple(f"{name}_field" for name in ("prompt", "completion", "messages", "chosen", "rejected", "margin"))
_USUAL = {option: getattr(DatasetConfig(), option) for option in MAPPED}
_WRITTEN_MESSAGES = re.compile(r"""\s*(\[\s*)?\{\s*(["'])(role|content|from|value|tool_calls)\2\s*:""")
"""The beginning of messages that are written as JSON, or as Python prints them."""
NULLS = "null in it stays. Where Arrow has filled it in, give the data set itself instead of a list or a JSONL file of it"


def _format_of(reader: "RowReader") -> FormatChoice:
    """Return the format of a reader's rows. ConfigError where the recipe names a format and fields of its own."""
    config = reader.config
    mapped = [option for option, usual in _USUAL.items() if option != "margin_field" and getattr(config, option) != usual]
    if mapped and config.format not in (AUTO, OWN):
        found, expected = f"{config.format!r}, beside {', '.join(mapped)}", "no names of fields: a format has its own"
        remedy = f'Take them out, or set {reader.key}.format = "{OWN}".'
        raise ConfigError([Problem(path=f"{reader.key}.format", found=found, expected=expected, remedy=remedy)])
    return FormatChoice(
        wanted=config.format,
        key=reader.key,
        use="preferences" if not reader.has_prompts else "demonstrations" if reader.may_be_chats else "rollouts",
        told=reader.told,
        detects=not mapped and not reader.for_agents and config.source != "environment",
    )


@frozen(kw_only=True, eq=False)
class RowReader:
    """Reads the rows of one data set."""

    config: DatasetConfig
    key: str
    """The data set's section of the recipe."""
    has_prompts: bool = True
    """True where each row has to have a prompt. Rows of preferences need none."""
    may_be_chats: bool = False
    """True for demonstrations, whose rows may be whole chats in place of prompt and completion."""
    for_agents: bool = False
    """True where agents get the rows unchanged."""
    folder: Path | None = None
    """Folder that relative paths of images start from; None for the working directory."""
    told: dict[str, str] = field(factory=dict)
    """Collects fields that rows have and the core does not read, each with the note that is shown before the run."""
    form: FormatChoice = field(init=False, default=Factory(_format_of, takes_self=True))

    @property
    def is_learned(self) -> bool:
        """Return whether rows hold the answers to learn from."""
        return self.may_be_chats or not self.has_prompts

    @property
    def maps(self) -> bool:
        """True where the recipe names a field other than the default."""
        return any(getattr(self.config, option) != usual for option, usual in _USUAL.items())

    def read(self, row: Mapping[str, Any], where: str) -> Row:
        """Return the row with its prompt and completion under these names, and its messages and tools in one form. DataErrors
        name the row by `where`."""
        row = self.in_own_form(row, where)
        found = dict(row)
        for name, field_name in ((PROMPT, self.config.prompt_field), (COMPLETION, self.config.completion_field)):
            if field_name != name and field_name in row:
                found[name] = row[field_name]
        is_chat = self.may_be_chats and self.config.messages_field in row
        if PROMPT not in found:
            self.require_prompt_field(list(map(str, row)), where)
        try:
            if not self.for_agents:
                self._require_known(found)
                self._read_columns(found, is_chat and found.get(COMPLETION) is None)
        except DataError as error:
            raise DataError(f"{self.key}: {where}: found {error}") from error
        except RecursionError as error:
            raise DataError(f"{self.key}: {where}: found values that are nested too deeply; expected fewer levels") from error
        if is_chat and not self.for_agents:
            self._require_one_form(found, where)
        is_agents = self.for_agents and _are_messages(found.get(PROMPT)) and bool(found[PROMPT])
        is_joined = self.may_be_chats and COMPLETION not in found and self.config.messages_field in found
        if self.has_prompts and not is_chat and not is_joined and not is_agents:
            found[PROMPT] = self._prompt(found[PROMPT], where)
        self._require_mapped(row, where)
        return found

    def in_own_form(self, row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Return the row's fields as the format of the data set has them in rlcore. DataErrors name the row by `where`."""
        try:
            return self.form.row(row)
        except DataError as error:
            raise DataError(f"{self.key}: {where}: found {error}") from error

    def require_prompt_field(self, names: Sequence[str], where: str) -> None:
        """Refuse, with a DataError, the fields of a row that needs a prompt or a whole chat and has neither."""
        config = self.config
        if not self.has_prompts or (self.may_be_chats and config.messages_field in names):
            return
        if self.may_be_chats and config.messages_field != _USUAL["messages_field"]:
            raise no_such_field(self.key, where, config.messages_field, names, "messages_field")
        if config.prompt_field not in names:
            raise no_such_field(self.key, where, config.prompt_field, names)

    def _prompt(self, prompt: Any, where: str) -> str | Sequence[Message]:
        try:
            return read_prompt(prompt)
        except DataError as error:
            raise DataError(
                f"{self.key}: {where}: the field {self.config.prompt_field!r} holds {error}; expected text, or a list of chat "
                'messages {"role": …, "content": …}'
            ) from error

    def _require_mapped(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse, with a DataError, a row without a field that the recipe names."""
        for option, usual in _USUAL.items():
            name = getattr(self.config, option)
            if name == usual or has_value(row.get(name)) or (row.get(name) is not None and not self.is_learned):
                continue
            if name not in row:
                raise no_such_field(self.key, where, name, list(map(str, row)), option)
            found = "null" if row[name] is None else "an empty value"
            raise DataError(f"{self.key}: {where} has {found} as {name!r}; expected a value in every row ({self.key}.{option})")

    def _require_one_form(self, row: Mapping[str, Any], where: str) -> None:
        """DataError where the recipe names fields of one form, and a row with a chat is learned in the other."""
        chat, has_completion = self.config.messages_field, row.get(COMPLETION) is not None
        option = "messages_field" if has_completion else "prompt_field"
        if (name := getattr(self.config, option)) == _USUAL[option]:
            return
        found = f"a chat as {chat!r} and {'a' if has_completion else 'no'} completion"
        remedy = "Take one of the two out" if has_completion else f"Name it with completion_field, or leave {option} out"
        raise DataError(
            f"{self.key}: {where} has {found}; expected a row in which {name!r} is learned ({self.key}.{option}). {remedy}"
        )

    def _require_known(self, row: Mapping[str, Any]) -> None:
        """Refuse fields that the table refuses, with a DataError, and collect those that it reports."""
        for one in FIELDS:
            if one.level != "row" or one.decision not in ("refused", "reported"):
                continue
            for name in one.names:
                if not has_value(row.get(name)) or not self._applies(name, row[name]):
                    continue
                if one.decision == "refused" and self._refuses(one, name):
                    raise DataError(f"the field {name!r}, which is not read: {one.meaning}. Take it out, or rename it")
                self.told[name] = one.meaning if self.is_learned else "the environment gets it, and the policy does not see it"

        chat = self.config.messages_field
        if self.may_be_chats and has_value(row.get(COMPLETION)) and has_value(row.get(chat)):
            self.told[chat] = "it is not read: the row has a completion, which is learned instead"
        for name in REJECTED if self.may_be_chats else ():
            if has_value(row.get(name)) and not self._is_mapped(name):
                self.told[name] = "preferences alone read it"
        for name, near in ((name, misspelt_column(str(name))) for name in row):
            if near in self._columns and has_value(row[name]) and not has_value(row.get(near)) and not self._is_mapped(name):
                what = "it is not read" if self.is_learned else "the environment gets it, and the policy does not see it"
                self.told[name] = f"{what}. Did you mean {near!r}?"

    @property
    def _columns(self) -> frozenset[str]:
        """The columns that are read under these names in rows of this form."""
        answers = {"messages", COMPLETION} if self.may_be_chats else set() if self.has_prompts else {"chosen", "rejected"}
        return frozenset({"tools", "images", *answers})

    def _is_mapped(self, name: str) -> bool:
        return name in {getattr(self.config, option) for option in MAPPED}

    def _applies(self, name: str, value: object) -> bool:
        """Return whether a field of this name has its public meaning in this row, rather than the recipe's or none."""
        if self._is_mapped(name):
            return False
        if name in ("label", "kto_tag"):
            return _is_flag(value) and self.may_be_chats
        if name in JOINED:
            return self.config.prompt_field == "instruction" or (self.is_learned and self.config.prompt_field != PROMPT)
        if name in OF_ANSWERS:
            return self.is_learned
        return name != "margin" or not self.has_prompts

    def _refuses(self, one: PublicField, name: str) -> bool:
        """Return whether a refused field is refused in rows of this form, rather than reported."""
        if name in JOINED and self.config.prompt_field != "instruction":
            return False
        return self.is_learned or not one.for_environment

    def _read_columns(self, row: dict[str, Any], is_chat: bool) -> None:
        """Bring tools, images and messages of the row into one form."""
        if row.get("tools") is not None:
            row["tools"] = read_tools(row["tools"])
        self._tell_of_calls(row)
        images = column_images(row)
        self._tell_of_images(row)
        place = self.config.messages_field if is_chat else PROMPT
        if images is None and has_marks(row.get(place)):
            self.told[place] = f"it has {MARK}, a place for an image, and rows have no column of images: that stays text"
        prompt: Any = row.get(PROMPT)
        self._tell_of_written_messages(row)
        if not self.has_prompts:
            if images:
                raise DataError(
                    "a column of images; expected text alone: preferences between answers to images cannot be learned"
                )
            self._read_rejected(row)
            return
        completion: Any = row.get(COMPLETION)
        if self.may_be_chats and _are_messages(completion) and _are_messages(prompt):
            row[self.config.messages_field] = behind_prompt([*map(_unlearned, prompt)], completion)
            del row[COMPLETION]
            is_chat = True
        if images and isinstance(prompt, str) and not is_chat:
            raise DataError(
                "a column of images beside a prompt of plain text; expected chat messages, which have places for them"
            )
        name = self.config.messages_field if is_chat else PROMPT
        if _are_messages(row.get(name)):
            row[name] = with_images(row[name], images, self.folder)

    def _tell_of_images(self, row: Mapping[str, Any]) -> None:
        """Refuse images in columns of other names where rows are learned, with a DataError, and collect notes elsewhere."""
        for name in row:
            if name in COLUMNS or self._is_mapped(name) or not holds_image(row[name]):
                continue
            if self.is_learned:
                raise DataError(
                    f"images in the column {name!r}; expected them in 'images' or 'image'. Rename it, or take it out"
                )
            self.told[name] = "it holds images, and the policy does not see them: images stand in 'images' or 'image'"

    def _tell_of_written_messages(self, row: Mapping[str, Any]) -> None:
        """Collect notes on texts that are prompts or answers, and hold the JSON of messages."""
        names = [PROMPT, COMPLETION] if self.may_be_chats else [PROMPT]
        if not self.has_prompts:
            names += [self.config.chosen_field, self.config.rejected_field, "rejected_response"]
        for name in names:
            if isinstance(text := row.get(name), str) and _WRITTEN_MESSAGES.match(text):
                self.told[name] = "it is JSON text of messages, and stays text. Write the messages as a list, not as text"

    def _tell_of_calls(self, row: Mapping[str, Any]) -> None:
        """Collect notes on unknown fields of tools, and on nulls in arguments and schemas."""
        functions = [tool["function"] for tool in row.get("tools") or ()]
        fields = {name for function in functions for name, value in function.items() if has_value(value)}
        for name in sorted(fields - names_of("tool", "used", "no effect")):
            self.told[f"tools.{name}"] = "no tool has it; it goes to the chat template as it is"
        for name, values in (("parameters", functions), ("arguments", _arguments_of(row))):
            if any(map(_has_nulls, values)):
                self.told[f"function.{name}"] = NULLS

    def _read_rejected(self, row: dict[str, Any]) -> None:
        """Turn ms-swift's chat and rejected answer into a chosen and a rejected chat.

        A rejected response stands in place of all that follows the last query, a message of the user's or of a tool's.
        DataError for several columns of one meaning.
        """
        chosen, rejected = self.config.chosen_field, self.config.rejected_field
        others = [name for name in dict.fromkeys((rejected, *REJECTED)) if has_value(row.get(name))]
        if len(others) > 1:
            raise DataError(f"both {others[0]!r} and {others[1]!r}; expected one rejected answer")
        messages: Any = row.get(self.config.messages_field)
        if others and others[0] in REJECTED and rejected not in REJECTED and _are_messages(messages):
            if has_value(row.get(chosen)):
                raise DataError(f"both {chosen!r} and {self.config.messages_field!r}; expected one chosen answer")
            other: Any = row[others[0]]
            row[chosen] = messages
            if others[0] == "rejected_response":
                answer = [{"role": ASSISTANT, "content": other}] if isinstance(other, str) else other
                if not _are_messages(answer):
                    raise DataError(f"{type(other).__name__} as 'rejected_response'; expected text, or messages")
                queries = [number for number, message in enumerate(messages) if _is_query(message)]
                other = [*messages[: queries[-1] + 1 if queries else 0], *answer]
            row[rejected] = other


def no_such_field(key: str, where: str, wanted: str, found: Sequence[str], option: str = "prompt_field") -> DataError:
    """Return the error for a row without a field that the recipe names."""
    asked = option
    usual = _USUAL_PROMPT_FIELDS if option == "prompt_field" else ()
    near = nearest(wanted, found) or next((name for name in usual if name in found), None)
    if option == "prompt_field" and "conversations" in found:
        option, near = "messages_field", "conversations"
    hint = f'. Did you mean {key}.{option} = "{near}"?' if near else f". Set {key}.{option} to one of them"
    listed = ", ".join(map(repr, found)) or "none"
    return DataError(f"{key}: {where} lacks the field {wanted!r} ({key}.{asked}); found the fields {listed}{hint}")


def read_prompt(value: object) -> str | Sequence[Message]:
    """Read a prompt: text, or chat messages. The DataError's text completes a sentence that begins with "found"."""
    if not isinstance(value, str):
        return read_messages(value)
    if not value:
        raise DataError("an empty text")
    if half := lone_surrogate(value):
        raise DataError(f"a text with {half}")
    return value


def prompt_fault(value: object) -> str | None:
    """Return the reason why `value` is no prompt; None where it is one."""
    try:
        read_prompt(value)
    except DataError as error:
        return str(error)
    return None


def reply_fault(messages: Sequence[Message]) -> str | None:
    """Return the reason why messages, which are a prompt, are no reply to a turn of the policy's; None where they are one."""
    read = read_messages(messages)
    if any(map(image_parts, read)):
        return "with images; expected them at reset, where the episode begins"
    if read[-1]["role"] == ASSISTANT:
        return "that ends with the assistant's message; expected one that it answers"
    if fault := order_fault(read, follows_answer=True):
        return f"with {fault}"
    return None


def tools_beside(prompt: object, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Read the tools of a row. DataError where its prompt is plain text, since only a chat template can show tools."""
    tools = read_tools(row.get("tools"))
    if tools and isinstance(prompt, str):
        raise DataError("tools beside a prompt of plain text; expected chat messages, whose template shows them")
    return tools


def _are_messages(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_flag(value: object) -> bool:
    """Return whether a value is true or false, in the form of any source: CSV has texts."""
    return isinstance(value, bool | np.bool_) or (isinstance(value, str) and value.strip().lower() in ("true", "false"))


def _is_query(message: object) -> bool:
    """Return whether an answer follows the message, as ms-swift sees it: not behind its role tool_response."""
    return role_of(message) == "user" or (isinstance(message, Mapping) and message.get("role") == "tool")


def _has_nulls(value: object) -> bool:
    """Return whether an object in a value, at any depth, has a field that is null."""
    if isinstance(value, Mapping):
        return any(item is None or _has_nulls(item) for item in value.values())
    return isinstance(value, list | tuple) and any(map(_has_nulls, value))


def _arguments_of(row: Mapping[str, Any]) -> Iterator[object]:
    """Yield the arguments of all calls in a row's messages."""
    for messages in filter(_are_messages, row.values()):
        for message in messages:
            calls = message.get("tool_calls") if isinstance(message, Mapping) else None
            for call in calls if isinstance(calls, list | tuple) else ():
                function = call.get("function", call) if isinstance(call, Mapping) else None
                yield function.get("arguments") if isinstance(function, Mapping) else None


def _unlearned(message: Any) -> Any:
    if role_of(message) != ASSISTANT:
        return message
    return {name: value for name, value in message.items() if name not in IN_LOSS} | {"weight": 0}
