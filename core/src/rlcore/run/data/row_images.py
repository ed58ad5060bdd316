"""The images of rows: paths beside a data set's file, and columns of images that messages leave places for."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.data import DatasetConfig
from rlcore.run.data.row_fields import PROMPT
from rlcore.schema.homes import expanded
from rlcore.spi import Row

COLUMNS = ("images", "image")
"""Where Hugging Face data sets have the images that messages name by {"type": "image"} alone."""


def with_images(row: dict[str, Any], config: DatasetConfig, folder: Path | None) -> Row:
    """The row, whose messages name their images: those without one take the next of the row's column of images, and relative
    paths begin at `folder`. A row whose messages hold text alone stays as it is."""
    column = _column(row)
    for name in (PROMPT, config.messages_field):
        messages: Any = row.get(name)
        if _has_parts(messages):
            row[name] = [_with_images(message, column, folder) for message in messages]
    return row


def _column(row: Mapping[str, Any]) -> Iterator[object]:
    for name in COLUMNS:
        if row.get(name) is not None:
            value = row[name]
            yield from value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
            return


def _has_parts(messages: object) -> bool:
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple) for message in messages
    )


def _with_images(message: Any, column: Iterator[object], folder: Path | None) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list | tuple):
        return message
    return {**message, "content": [_part(part, column, folder) for part in message["content"]]}


def _part(part: Any, column: Iterator[object], folder: Path | None) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    image = part.get("image")
    image = next(column, None) if image is None else image
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and folder is not None:
        image = str(folder / expanded(image))
    return {"type": "image", "image": image}
