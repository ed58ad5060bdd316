"""Checking and loading of Hugging Face causal language models. Importing this file imports neither torch nor transformers."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import ModelError, Problem
from rlcore.torchkit.transformers_import import import_transformers

if TYPE_CHECKING:
    import torch

SUPPORTED_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_MAX_NAMED = 3
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def check_model(path: str) -> list[Problem]:
    """What is wrong with the model at `path`, from its directory's files alone; empty where nothing is.

    A name that is no existing path but can be one on the Hub is accepted; it is looked up when the model is loaded.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        if _HUB_NAME.fullmatch(path):
            return []
        return [_problem(path, "no such directory", "a model directory, or a name on the Hub")]
    if not directory.is_dir():
        return [_problem(path, "a file", "a directory with config.json, safetensors files and a tokenizer")]
    return [*_config_problems(directory), *_weight_problems(directory), *_tokenizer_problems(directory)]


def architecture_of(config: Any) -> str:
    """The supported architecture that a transformers config names; ModelError otherwise."""
    problem = _architecture_problem(str(getattr(config, "name_or_path", "")), config.to_dict())
    if problem is not None:
        raise ModelError([problem])
    return str(config.architectures[0])


def load_config(spec: ModelSpec) -> Any:
    """The model's transformers config; ModelError where it cannot be had or its architecture is not supported."""
    _raise_problems(check_model(spec.path))
    import_transformers()
    from transformers import AutoConfig

    with model_errors(spec.path), _quiet():
        config = AutoConfig.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    architecture_of(config)
    return config


def load_model(spec: ModelSpec, *, dtype: "torch.dtype", device: "torch.device | str" = "cpu") -> Any:
    """The transformers causal language model with packed attention, in `dtype`, in eval mode, on `device`.

    On device "meta" it has shapes and names but no values. Nothing is printed. ModelError where it cannot be loaded.
    """
    config = load_config(spec)
    import torch
    from transformers import AutoModelForCausalLM

    from rlcore.torchkit.attention import register_packed_attention

    options = {"dtype": dtype, "attn_implementation": register_packed_attention()}
    options["trust_remote_code"] = spec.trust_remote_code
    if torch.device(device).type == "meta":
        with torch.device("meta"), _quiet():
            return AutoModelForCausalLM.from_config(config, **options).eval()
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with model_errors(spec.path), _quiet():
        model, loading = AutoModelForCausalLM.from_pretrained(spec.path, config=config, revision=spec.revision, **options)
    _raise_problems(_loading_problems(spec.path, loading))
    return model.eval().to(device)


def _loading_problems(path: str, loading: dict[str, Any]) -> list[Problem]:
    """Tensors that the weights lack or hold in another shape, which transformers fills with random numbers."""
    missing, problems = sorted(loading["missing_keys"]), []
    if missing:
        problems.append(_problem(path, f"no {_shortened(missing)} in the weights", "every tensor of the architecture"))
    for name, found, expected in sorted(loading["mismatched_keys"])[:_MAX_NAMED]:
        problems.append(_problem(path, f"{name} of shape {list(found)}", f"{list(expected)}, as config.json says"))
    return problems


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _problem(path: object, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=str(path), found=found, expected=expected, remedy=remedy)


def _raise_problems(problems: list[Problem]) -> None:
    if problems:
        raise ModelError(problems)


def _read_json(file: Path) -> dict[str, Any] | Problem:
    """The object in a JSON file, or what is wrong with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return _problem(file, error.strerror or str(error), "a readable JSON file")
    except ValueError as error:
        return _problem(file, f"no valid JSON ({error})", "a JSON object")
    return content if isinstance(content, dict) else _problem(file, type(content).__name__, "a JSON object")


def _config_problems(directory: Path) -> list[Problem]:
    file = directory / "config.json"
    if not file.exists():
        return [_problem(directory, "no config.json", "a Hugging Face model directory")]
    config = _read_json(file)
    problem = config if isinstance(config, Problem) else _architecture_problem(str(file), config)
    return [] if problem is None else [problem]


def _architecture_problem(path: str, config: dict[str, Any]) -> Problem | None:
    architectures = config.get("architectures") or ["none"]
    expected = "one of " + ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(architectures, list) or architectures[0] not in SUPPORTED_ARCHITECTURES:
        return _problem(path, f"architecture {architectures[0]}", expected, "Use a model of one of these architectures")
    if config.get("use_sliding_window"):
        return _problem(
            path, "use_sliding_window = true", "full causal attention", "Set it to false if all sequences are short"
        )
    return None


def _weight_problems(directory: Path) -> list[Problem]:
    index = directory / INDEX_FILE
    if not index.exists():
        found = (directory / SINGLE_FILE).exists()
        return [] if found else [_problem(directory, "no weights", f"{SINGLE_FILE} or {INDEX_FILE} with its shards")]
    content = _read_json(index)
    if isinstance(content, Problem):
        return [content]
    shards = content.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        return [_problem(index, "no weight_map", "a table from tensor names to files")]
    missing = sorted({str(shard) for shard in shards.values() if not (directory / str(shard)).exists()})
    if not missing:
        return []
    return [_problem(directory, f"no {', '.join(missing)}", f"every file that {INDEX_FILE} names", "Complete the download")]


def _tokenizer_problems(directory: Path) -> list[Problem]:
    if any(all((directory / name).exists() for name in names) for names in _TOKENIZER_FILES):
        return []
    return [_problem(directory, "no tokenizer", "tokenizer.json (or tokenizer.model, or vocab.json and merges.txt)")]


@contextmanager
def model_errors(path: str) -> Iterator[None]:
    """ModelError for what transformers raises when files are missing, damaged or unreachable."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        problem = _problem(path, reason, "a model that transformers can load", "Check the path, or that the Hub is reachable")
        raise ModelError([problem]) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and only errors from transformers; its settings are restored."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
