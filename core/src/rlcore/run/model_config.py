"""What a local model's config.json states in numbers."""

import json
from pathlib import Path


def config_number(model_path: str, name: str) -> int | None:
    """A positive number such as "vocab_size", a multimodal model's for its text; None where none is stated."""
    try:
        config = json.loads((Path(model_path).expanduser() / "config.json").read_text(encoding="utf-8"))
        number = config.get("text_config", config).get(name)
    except (OSError, ValueError, AttributeError):  # a model on the Hub; what is wrong with a file is for its readers to say
        return None
    return number if isinstance(number, int) and number > 0 else None
