"""Write the language model of a model of images or sound as a separate model directory.

python -m rlcore_torchkit.huggingface.language_model MODEL DIRECTORY [--revision REVISION]
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.model_files import CONFIG_FILE
from rlcore.schema.problem import RlcoreError
from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import ModelError, Problem
from rlcore_model_files.directory import INDEX_FILE, file_problems
from rlcore_model_files.weight_headers import TEXT_KEYS
from rlcore_torchkit.huggingface.hf_directory import copy_companions, model_storage_errors
from rlcore_torchkit.huggingface.safetensors_files import model_file, unknown_tensors, weight_files
from rlcore_torchkit.transformers_import import import_transformers

if TYPE_CHECKING:
    from torch import Tensor

PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.model.",
    "text_model.",
    "llm.model.",
    "llm.",
)
"""Prefixes of the language model's tensors in the files of the whole model; the first that matches counts."""
SHARED_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys that are taken from the top of config.json where the language model's part lacks them."""


def take_language_model(spec: ModelSpec, directory: Path) -> None:
    """Write the language model of the model at `spec`, with its tokenizer, to a directory that does not exist yet.

    The tensors of one file are in memory at a time. ModelError where transformers has no class for the language model, or where
    the tensors are not those of the class; the directory is removed then.
    """
    if directory.exists():
        raise ModelError([Problem(path=str(directory), found="a path that exists", expected="one for a new directory")])
    config = _language_config(spec)
    with model_storage_errors(directory):
        directory.mkdir(parents=True)
        try:
            names = _write_weights(weight_files(spec), directory)
            if not any(name.startswith("lm_head.") for name in names) and _is_tied(spec):
                config["tie_word_embeddings"] = True
            (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            copy_companions(spec, directory)
            problems = [*file_problems(directory), *_tensor_problems(spec.path, directory)]
            if problems:
                raise ModelError(problems)
        except BaseException:
            shutil.rmtree(directory)
            raise


def _language_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of the language model."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = model_file(spec, CONFIG_FILE)
    config = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), Mapping)), None)
    if text is None:
        found, expected = f"no {' or '.join(TEXT_KEYS)} in {CONFIG_FILE}", "a model of images or sound"
        raise ModelError([Problem(path=spec.path, found=found, expected=expected)])
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text.get("model_type")))
    if class_name is None:
        found = f"a language model of model_type {text.get('model_type')}"
        raise ModelError([Problem(path=spec.path, found=found, expected="a causal language model that transformers knows")])
    shared = {key: config[key] for key in SHARED_KEYS if key in config and key not in text}
    return {**text, **shared, "architectures": [class_name]}


def _is_tied(spec: ModelSpec) -> bool:
    """Return whether the whole model's head is its embedding, which its class decides where config.json does not say it."""
    from transformers import AutoConfig

    with suppress(Exception):  # of a class that comes with the model, or that transformers does not know
        return bool(AutoConfig.from_pretrained(spec.path, revision=spec.revision).tie_word_embeddings)
    return False


def own_name(name: str) -> str | None:
    """Return a tensor's name in the language model's directory; None for a tensor of another part."""
    if name.startswith("lm_head."):
        return name
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    rest = name.removeprefix(prefix)
    return rest if rest.startswith(("lm_head.", "model.")) else f"model.{rest}"


def _write_weights(files: list[Path], directory: Path) -> Collection[str]:
    """Write the language model's tensors. Return their names."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        with safe_open(file, "pt") as opened:
            names = {name: own for name in list(opened.keys()) if (own := own_name(name)) is not None}
            twice = [name for name, count in Counter([*places, *names.values()]).items() if count > 1]
            if twice:
                found = f"{min(twice)}, and the same under another prefix or in another file"
                raise ModelError([Problem(path=str(file), found=found, expected="each tensor once")])
            tensors: dict[str, Tensor] = {own: opened.get_tensor(name) for name, own in names.items()}
        if tensors:
            shard = f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(tensors, directory / shard, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, shard)
    index = {"metadata": {}, "weight_map": places}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return places


def _tensor_problems(path: str, directory: Path) -> Iterator[Problem]:
    """Refuse missing and surplus tensors, by a model of the class on the meta device."""
    from transformers import AutoConfig

    from rlcore_torchkit.huggingface.models import checkpoint_shapes, empty_model

    expected = checkpoint_shapes(empty_model(AutoConfig.from_pretrained(directory), path))
    found = set(json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"])
    if missing := expected.keys() - found:
        given = f"no {min(missing)} among the tensors of its language model"
        yield Problem(path=path, found=given, expected="each tensor of its class in transformers")
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    yield from unknown_tensors(found - expected.keys() - {"lm_head.weight"}, config, path)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m rlcore_torchkit.huggingface.language_model", description=__doc__.splitlines()[0]
    )
    parser.add_argument("model", help="a directory, or a name on the Hub")
    parser.add_argument("directory", type=Path, help="where the language model goes")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    arguments = parser.parse_args()
    try:
        take_language_model(ModelSpec(path=arguments.model, revision=arguments.revision, dtype="float32"), arguments.directory)
    except RlcoreError as error:
        print(error, file=sys.stderr)
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
