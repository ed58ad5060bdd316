"""Puts the images of a row into its messages: each placeholder takes the next image of the column."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.spi import DataError
from rlcore_text.chats.images import image_source
from rlcore_text.chats.messages import ASSISTANT, has_value, read_image_part, role_of

COLUMNS = ("images", "image")
"""Columns with the images for placeholders in messages."""
MARK = "<image>"
"""Placeholder of an image in a message's text."""


def column_images(row: Mapping[str, Any]) -> list[object] | None:
    """Return the images of a row's column; None where the row has no such column. DataError where both have images."""
    found = [row[name] for name in COLUMNS if has_value(row.get(name))]
    if not found:
        return [] if any(name in row for name in COLUMNS) else None
    if len(found) > 1:
        raise DataError(f"images in both {' and '.join(map(repr, COLUMNS))}; expected one column of them")
    (value,) = found
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return [one for one in value if one is not None] if is_list else [value]


def has_marks(prompt: object) -> bool:
    """Return whether the text of a prompt, or of one of its messages, has a mark."""
    if isinstance(prompt, str):
        return MARK in prompt
    messages = prompt if isinstance(prompt, list | tuple) else ()
    parts = [part for message in messages if isinstance(message, Mapping) for part in _parts_and_text(message)]
    return any(isinstance(part, Mapping) and MARK in str(part.get("text")) for part in parts)


def with_images(messages: Sequence[Any], column: Sequence[object] | None, folder: Path | None) -> list[Any]:
    """Fill the placeholders of messages with the images of the column; relative paths start from `folder`.

    Placeholders are parts without an image, or else marks in texts. Without any, all images go before the text of the first
    user's message. DataError where there are more placeholders than images, or fewer.
    """
    found = [_with_named(message) for message in messages]
    if column is not None:
        if not any(_has_images(message) for message in found):
            found = [_with_marks_as_places(message) for message in found]
        if not any(_has_images(message) for message in found):
            found = _with_places_in_front(found, len(column))
        if (places := sum(map(_places, found))) != len(column):
            raise DataError(
                f"places for {places} images in the messages and {len(column)} in the column of images; expected as many "
                f'(a place is {{"type": "image"}} among a message\'s parts, or {MARK} in its text)'
            )
    images = iter(column or ())
    return [_filled(message, images, folder) for message in found]


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return list(content) if isinstance(content, list | tuple) else []


def _with_named(message: Any) -> Any:
    """Return the message with each image in one form."""
    if not (parts := _parts(message)):
        return message
    return {**message, "content": [_named(part) for part in parts]}


def _named(part: Any) -> Any:
    return part if not isinstance(part, Mapping) or (image := read_image_part(part)) is None else image


def _has_images(message: Any) -> bool:
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in _parts(message))


def _is_place(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and part.get("image") is None


def _places(message: Any) -> int:
    return sum(map(_is_place, _parts(message)))


def _with_marks_as_places(message: Any) -> Any:
    """Return the message with a placeholder part for each mark in its text. Marks in answers stay text."""
    if not isinstance(message, Mapping) or role_of(message) == ASSISTANT:
        return message
    split = [piece for part in _parts_and_text(message) for piece in _split(part)]
    return _with_content(message, split) if any(map(_is_place, split)) else message


def _parts_and_text(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message; a content of text is one part."""
    content = message.get("value") if message.get("content") is None else message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else _parts(message)


def _with_content(message: Mapping[str, Any], content: Sequence[Any]) -> dict[str, Any]:
    return {**{name: value for name, value in message.items() if name != "value"}, "content": content}


def _split(part: Any) -> Iterator[Any]:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        yield part
        return
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _with_places_in_front(messages: Sequence[Any], number: int) -> list[Any]:
    for place, message in enumerate(messages):
        if number and role_of(message) == "user":
            shown = _with_content(message, [*[{"type": "image"}] * number, *_parts_and_text(message)])
            return [*messages[:place], shown, *messages[place + 1 :]]
    return list(messages)


def _filled(message: Any, images: Iterator[object], folder: Path | None) -> Any:
    if not (parts := _parts(message)):
        return message
    return {**message, "content": [_filled_part(part, images, folder) for part in parts]}


def _filled_part(part: Any, images: Iterator[object], folder: Path | None) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    image = part.get("image")
    image = image_source(next(images, None) if image is None else image)
    if isinstance(image, str) and folder is not None:
        image = str(folder / expanded(image))
    return {"type": "image", "image": image}
