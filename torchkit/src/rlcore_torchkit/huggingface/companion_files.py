"""Find the files that belong to a model besides its weights: of its tokenizer, processors, chat templates and generation."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.model_files import read_object
from rlcore_model_files.directory import VOCABULARY

_VOCABULARIES = re.compile(r"VOCAB_FILES_NAMES\s*=\s*\{([^}]*)\}", re.IGNORECASE)
_VALUE = re.compile(r":\s*[\"']([^\"'/]+)[\"']")
_QUOTED = re.compile(r"[\"']([\w.-]+)[\"']")
_NO_COMPANIONS = re.compile(
    r".*(\.py|\.safetensors|\.bin|\.pt|\.pth|\.gguf|\.h5)|config\.json|adapter_config\.json|.*\.index\.json"
)
"""Files that are no companions: code, weights, and JSON files that exports write anew or that describe weights."""


@cache
def known_names() -> frozenset[str]:
    """Return all names that transformers knows. Those of tokenizers are read from sources: to import all takes seconds."""
    from transformers import tokenization_utils_base as base
    from transformers import utils

    names = {
        *(base.ADDED_TOKENS_FILE, base.FULL_TOKENIZER_FILE, base.SPECIAL_TOKENS_MAP_FILE, base.TOKENIZER_CONFIG_FILE),
        *(utils.GENERATION_CONFIG_NAME, utils.PROCESSOR_NAME, utils.FEATURE_EXTRACTOR_NAME, utils.IMAGE_PROCESSOR_NAME),
        *(utils.VIDEO_PROCESSOR_NAME, utils.AUDIO_TOKENIZER_NAME),
        *(utils.CHAT_TEMPLATE_FILE, utils.LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE),
    }
    package = find_spec("transformers")
    assert package is not None, "it is imported above"
    assert package.origin is not None, "it is a package"
    for file in Path(package.origin).parent.glob("models/*/tokenization_*.py"):
        for table in _VOCABULARIES.findall(file.read_text(encoding="utf-8")):
            names |= set(_VALUE.findall(table))
    return frozenset(names)


def companion_names(folder: Path) -> Iterator[str]:
    """Yield the names of the companions in a folder.

    These are the names that transformers knows, additional chat templates, and files that the tokenizer's own code names.
    """
    from transformers.utils import CHAT_TEMPLATE_DIR

    named = {name for file in folder.glob("*.py") for name in _QUOTED.findall(file.read_text(encoding="utf-8"))}
    for file in sorted(folder.iterdir()):
        is_known = file.name in known_names() or file.name in named or VOCABULARY.fullmatch(file.name)
        if is_known and file.is_file() and not _NO_COMPANIONS.fullmatch(file.name):
            yield file.name
    for file in sorted((folder / CHAT_TEMPLATE_DIR).glob("*.jinja")):
        yield f"{CHAT_TEMPLATE_DIR}/{file.name}"


def own_code(file: Path) -> Mapping[str, Any]:
    """Return the auto_map of a JSON file, which names classes in the model's own code; empty without one."""
    content = read_object(file) if file.suffix == ".json" else {}
    found = content.get("auto_map") if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}
