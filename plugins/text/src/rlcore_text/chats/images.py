"""Images in chat messages: their files, and how many tokens of a prompt stand for each."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from attrs import frozen

from rlcore.schema.file_limits import expanded, read_file
from rlcore.schema.printable import lone_surrogate
from rlcore.spi import DataError
from rlcore_model_files.images import decode_image

RECORD = ("bytes", "path", "image", "url")
"""Fields of an image that is a record."""


def image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The images among what a message holds, {"type": "image", "image": …} each."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def content_fault(content: object) -> str | None:
    """Return the fault of a message's content, which is text or a list of texts and images; None without one."""
    if isinstance(content, str):
        half = lone_surrogate(content)
        return f"a text with {half}" if half else None
    if not isinstance(content, list | tuple):
        return f"{type(content).__name__}, not text"
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image"):
            return f'a list with {part!r:.60} as part {number}, not {{"type": "text" | "image", …}}'
        if kind == "text" and not isinstance(part.get("text"), str):
            return f"a list whose part {number} has {type(part.get('text')).__name__} as its text"
        if kind == "text" and (half := lone_surrogate(part["text"])):
            return f"a list whose part {number} has {half} in its text"
        if kind == "image" and part.get("image") is None:
            return f"a list whose part {number} is an image without a file"
    return None


def shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as a chat template takes it: texts alone are one text, and images are named without their files."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    if not image_parts(message):
        return {**message, "content": "".join(part["text"] for part in content)}
    shown = [{"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in content]
    return {**message, "content": shown}


def images_of(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """The files of all images in messages, in order. DataError where one cannot be read."""
    return tuple(image_file(part.get("image")) for message in messages for part in image_parts(message))


def image_source(value: object, *, is_base64: bool = False) -> object:
    """An image as a data set names it: what a data: URL or base64 holds as bytes, a file: URL as its path, the first value of a
    record's RECORD fields, and anything else as it is. DataError for an address, since nothing is downloaded."""
    if isinstance(value, Mapping):
        if odd := [name for name, field in value.items() if field is not None and name not in RECORD]:
            raise DataError(f"an image with the unknown field {odd[0]!r}; expected one of {', '.join(RECORD)}")
        value = next(filter(None, map(value.get, RECORD)), None)
    if not isinstance(value, str):
        return value
    scheme, _, rest = value.partition(":")
    if is_base64 or scheme == "data":
        try:
            return base64.b64decode(rest.rpartition(",")[2] if scheme == "data" else value, validate=True)
        except ValueError as error:
            raise DataError(f"an image that is no base64 ({error}): {value!r:.40}") from error
    if scheme in ("http", "https"):
        raise DataError(f"the image {value!r:.80}; expected a file: nothing is downloaded. Save it beside the data set")
    return unquote(urlsplit(value).path) if scheme == "file" else value


def image_file(value: object) -> bytes:
    """An encoded image: bytes as they are, the content of a path, `bytes` or `path` of a record as data sets have it, or what
    Pillow has decoded, as PNG. DataError where it is none of these, or there is no such file."""
    value = image_source(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | Path):
        try:
            return read_file(expanded(value))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise DataError(f"the image {value} cannot be read: {reason}; expected a file") from error
    if not hasattr(value, "save"):
        raise DataError(f"found {type(value).__name__} as an image; expected a path, bytes, or an image of Pillow")
    buffer = io.BytesIO()
    value.save(buffer, format="PNG")
    return buffer.getvalue()


@frozen(kw_only=True, eq=False)
class Placeholders:
    """Puts as many placeholders into a rendered prompt as the model has tokens for its images."""

    processor: Any
    """The image processor of transformers."""
    token: str
    """The text of a placeholder."""

    def num_tokens(self, file: bytes) -> int:
        """Return the number of tokens that stand for an image. DataError where it cannot be decoded or scaled.

        It is the number of patches of the scaled image, divided by the number that the model merges into one token.
        """
        image = decode_image(file)
        try:
            patches = self.processor.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:
            raise DataError(f"an image of {image.width} x {image.height} pixels cannot be scaled: {error}") from error
        return int(patches) // int(self.processor.merge_size) ** 2

    def expanded(self, text: str, files: Sequence[bytes]) -> str:
        """A rendered prompt, whose template shows one placeholder an image, with those that the model reads. DataError where
        there are not as many of them as images."""
        pieces = text.split(self.token)
        if len(pieces) - 1 != len(files):
            raise DataError(
                f"found {len(pieces) - 1} placeholders {self.token!r} for {len(files)} images; expected one for each, by the "
                "chat template, and none in the text of messages"
            )
        shown = [self.token * self.num_tokens(file) for file in files]
        return "".join(piece + more for piece, more in zip(pieces, [*shown, ""], strict=True))
