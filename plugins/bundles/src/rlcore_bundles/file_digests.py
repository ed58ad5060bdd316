"""Digests of the files that a recipe names: functions, templates, and a model's configuration and tokenizer."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OF_MODEL = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of a model's directory that are small and decide on prompts."""
DOT = "\0"
"""Stands for a dot in a key's own name."""


def file_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each file that a recipe names, by its key; of a model's directory by `model.path/FILE`."""
    found = {}
    for key, value in leaves(recipe):
        texts = value if isinstance(value, list) else [value]
        for text in (one for one in texts if isinstance(one, str)):
            if (path := file_of(text)) is not None and not key.startswith("data."):
                found[key] = sha256_of(path)
    model = Path(str(recipe["model"]["path"]))
    for name in OF_MODEL:
        if (model / name).is_file():
            found[f"model.path/{name}"] = sha256_of(model / name)
    return found


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each value of a table and of those below it. A dot within a name is a zero byte."""
    for own, value in table.items():
        name = own.replace(".", DOT)
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def file_of(text: str) -> Path | None:
    """The file of a path, or of `FILE.py:FUNCTION`; None where there is none."""
    for candidate in (text, text.rpartition(":")[0]):
        try:
            if candidate and len(candidate) < 1000 and Path(candidate).is_file():
                return Path(candidate)
        except (OSError, ValueError):
            continue
    return None
