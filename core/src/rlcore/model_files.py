"""Read the config.json of a Hugging Face model directory, without importing torch or transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.schema.file_limits import expanded, read_file, unique_keys
from rlcore.spi.errors import Problem

CONFIG_FILE = "config.json"
AGAIN = "Copy or download it again"


def read_object(file: Path) -> dict[str, Any] | Problem:
    """Return the object in a JSON file, or a problem."""
    try:
        content = json.loads(read_file(file).decode(), object_pairs_hook=unique_keys)
    except OSError as error:
        return Problem(path=str(file), found=error.strerror or str(error), expected="a readable JSON file")
    except (ValueError, RecursionError) as error:
        return Problem(path=str(file), found=f"no valid JSON ({error})", expected="a JSON object", remedy=AGAIN)
    return (
        content
        if isinstance(content, dict)
        else Problem(path=str(file), found=type(content).__name__, expected="a JSON object")
    )


def config_number(model_path: str, name: str) -> int | None:
    """Return a positive number of config.json such as "vocab_size", a multimodal model's of its text part; None without one."""
    try:
        config = json.loads(read_file(expanded(model_path) / CONFIG_FILE).decode())
        number = config.get("text_config", config).get(name)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # a model on the Hub, or a damaged file, which its readers report
    return number if isinstance(number, int) and number > 0 else None


def reads_images(config: Mapping[str, Any]) -> bool:
    """Return whether the model with this config.json reads images besides text."""
    return bool(config.get("vision_config")) and image_token_id(config) is not None


def image_token_id(config: Mapping[str, Any]) -> int | None:
    """The token that stands for a part of an image; None where config.json names none."""
    number = config.get("image_token_id")
    return number if type(number) is int else None
