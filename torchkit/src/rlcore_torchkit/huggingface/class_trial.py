"""Builds the class of a model without weights, to find what config.json says that cannot be computed or contradicts weights."""

import json
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

from attrs import evolve

from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import listed
from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import Problem
from rlcore.spi.weights import VALUE_HEAD_WEIGHT, Head
from rlcore.time_limit import LateError, loading
from rlcore_model_files.directory import file_problems, stored_shapes
from rlcore_torchkit.architectures.decoders import described_family, is_image_model
from rlcore_torchkit.huggingface.models import (
    checkpoint_shapes,
    loading_problems,
    model_class,
    quiet_transformers,
    shape_problem,
)
from rlcore_torchkit.huggingface.safetensors_files import unknown_tensors
from rlcore_torchkit.transformers_import import import_transformers

Shapes = Mapping[str, tuple[int, ...]]
_HEAD = "lm_head.weight"
_MAX_NAMED = 3
_MAX_SHOWN = 300
"""Characters of what transformers says."""
_SEARCH_S = 5.0
"""Most seconds for finding the keys that a fault is due to."""
_MAX_VALUE = 200
"""Characters of a value of config.json."""


def class_problems(spec: ModelSpec, head: Head = "tokens") -> list[Problem]:
    """Return the problems of a local config.json with which the model's class cannot be built, or has other tensors than the
    weights. They name the keys.

    Code that comes with a model is not run, and files with faults of their own are left to `file_problems`. Trainer and
    generator of a run ask about the same files, which are looked at once.
    """
    directory = expanded(spec.path)
    files = sorted(directory.iterdir()) if directory.is_dir() else ()
    states = [(file.name, state.st_mtime_ns, state.st_size) for file in files if (state := _state(file)) is not None]
    return list(_problems(spec.path, tuple(states), head, runs_own_code=spec.trust_remote_code))


def _state(file: Path) -> os.stat_result | None:
    """Return the state of a file; None of a link that leads nowhere."""
    with suppress(OSError):
        return file.stat()
    return None


@lru_cache(maxsize=16)
def _problems(path: str, _states: tuple[tuple[str, int, int], ...], head: Head, *, runs_own_code: bool) -> tuple[Problem, ...]:
    directory = expanded(path)
    file, content = directory / CONFIG_FILE, read_object(directory / CONFIG_FILE)
    if isinstance(content, Problem) or not _has_class(content, head) or next(file_problems(directory), None) is not None:
        return ()
    if runs_own_code and content.get("auto_map"):
        return ()  # the code that comes with the model builds another class
    try:
        with loading(f"building the class of {directory}, without weights,"):
            return tuple(_found(path, file, content, head))
    except LateError as error:
        return (Problem(path=str(file), found=str(error), expected="numbers of layers and experts that can be built"),)


def _found(path: str, file: Path, content: Mapping[str, Any], head: Head) -> Iterator[Problem]:
    try:
        shapes, values = _built_shapes(json.dumps(content), head), _values(content)
    except Exception as error:  # classes of models fail on values of config.json with errors of any kind
        yield _unbuildable(file, content, head, error)
        return
    window = values.get("sliding_window")
    if "sliding_attention" in (values.get("layer_types") or ()) and type(window) is int and window < 1:
        expected = "a positive number, for the layers of sliding_attention"
        yield Problem(path=str(file), found=f"sliding_window = {window}", expected=expected)
    rope = values.get("rope_parameters") or {}
    rotated = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if (
        rope.get("rope_type", "default") != "default"
        and rotated not in (None, 1)
        and described_family(content, path) is not None
    ):
        expected = f"1: the class of {content['model_type']} rotates whole heads with rope_type {rope['rope_type']}"
        yield Problem(path=str(file), found=f"partial_rotary_factor = {json.dumps(rotated)}", expected=expected)
    chosen, experts = (_number(values, keys) for keys in (("num_experts_per_tok",), ("num_experts", "num_local_experts")))
    if experts and "num_experts_per_tok" in values and not 1 <= chosen <= experts:
        expected = f"1 to {experts}, which is the number of experts"
        found = f"num_experts_per_tok = {json.dumps(values['num_experts_per_tok'])}"
        yield Problem(path=str(file), found=found, expected=expected)
    for one, other in _contradictions(content):
        yield Problem(path=str(file), found=f"{one}, and {other}", expected="one value", remedy="Take one of the two out")
    if held := stored_shapes(file.parent):
        yield from _tensor_problems(path, content, head, shapes, held)


def _contradictions(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield two keys with their values where both say one thing, and differently: readers would take either."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def said(key: str, value: object) -> str:
        return f"{key} = {json.dumps(value):.{_MAX_VALUE}}"

    for alias, key in CONFIG_MAPPING[content["model_type"]].attribute_map.items():
        if content.get(alias) is not None and content.get(key) is not None and content[alias] != content[key]:
            yield said(alias, content[alias]), said(key, content[key])
    table, scaling = content.get("rope_parameters"), content.get("rope_scaling")
    if not isinstance(table, Mapping):
        return
    of_scaling = {"rope_type" if key == "type" else key: value for key, value in (scaling or {}).items()}
    for key, value in {"rope_theta": content.get("rope_theta"), **of_scaling}.items():
        if value is not None and value != table.get(key) and not any(isinstance(each, Mapping) for each in table.values()):
            name = f"rope_scaling.{key}" if key in of_scaling else key
            yield said(name, value), said(f"rope_parameters.{key}", table.get(key))


def _number(values: Mapping[str, Any], keys: Collection[str]) -> int:
    """Return the first value that is a number."""
    return next((value for key in keys if type(value := values.get(key)) is int), 0)


def _tensor_problems(path: str, content: Mapping[str, Any], head: Head, shapes: Shapes, held: Shapes) -> Iterator[Problem]:
    """Refuse weights that are not those of the class."""
    bare = {name: name.removeprefix("model.") for name in shapes}  # as of a decoder that was saved without a head
    names = {name: own if name not in held and own in held else name for name, own in bare.items()}
    is_described = described_family(content, path) is not None
    missing = _certain({own: name for name, own in names.items() if own not in held}, held, is_described=is_described)
    surplus = {name: name for name in held.keys() - {*names.values()} - {_HEAD}}
    missing = [name for name in missing if head != "value" or name != VALUE_HEAD_WEIGHT]
    wrong = sorted(name for name, own in names.items() if held.get(own, shapes[name]) != shapes[name])[:_MAX_NAMED]
    longest = max(missing, key=len, default="")
    keys = _deciding_keys([*filter(None, (longest, *wrong))], content, head)
    if missing:
        (problem,) = loading_problems(path, {"missing_keys": missing, "mismatched_keys": ()})
        yield evolve(problem, expected=f"{problem.expected}{keys[longest]}")
    for name in wrong:
        yield shape_problem(path, names[name], held[names[name]], shapes[name], keys[name])
    yield from unknown_tensors(_certain(surplus, names.values(), is_described=is_described), content, path)


def _certain(names: Mapping[str, str], others: Collection[str], *, is_described: bool) -> list[str]:
    """Return the names, by those of their files, that the other side lacks under each name that transformers reads.

    It renames tensors of many models while it loads them, and joins experts. A name is certain where the other side has the
    same one with another number, or another tensor of the module.
    """
    kinds, modules = {*map(_kind, others)}, {other.rpartition(".")[0] for other in others}
    return [
        name
        for own, name in names.items()
        if (is_described and ".experts." not in own) or _kind(own) in kinds or own.rpartition(".")[0] in modules or own == _HEAD
    ]


def _kind(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _has_class(content: Mapping[str, Any], head: Head) -> bool:
    """Return whether transformers itself has the class, so that none comes with the model."""
    import_transformers()
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind, of_tokens = str(content.get("model_type")), modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    of_values = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    known = kind in (of_values if head == "value" else of_tokens) or is_image_model(content)
    return known and kind in CONFIG_MAPPING_NAMES


@lru_cache(maxsize=16)
def _built_shapes(content: str, head: Head) -> Shapes:
    """Return the shape of each tensor of a checkpoint, by the class for this config.json."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = _decoded(content)
    if values.get("quantization_config") is not None:  # transformers asks for the key alone
        raise ValueError("it names no method")
    with quiet_transformers(), warnings.catch_warnings(action="ignore"), torch.device("meta"):
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        if head == "value":
            config.num_labels = 1
        model = model_class(values, head).from_config(config, dtype=torch.float32, attn_implementation="eager")
        return checkpoint_shapes(model)


def _values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the values that the class takes for keys that it lacks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with quiet_transformers():
        config = CONFIG_MAPPING[content["model_type"]].from_dict(_decoded(json.dumps(content)))
        values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"quantization_config": None}


def _decoded(text: str) -> dict[str, Any]:
    """Read JSON, with infinite numbers as transformers writes them, {"__float__": "Infinity"}."""
    content: dict[str, Any] = json.loads(
        text, object_hook=lambda found: float(found["__float__"]) if found.keys() == {"__float__"} else found
    )
    return content


def _unbuildable(file: Path, content: Mapping[str, Any], head: Head, error: Exception) -> Problem:
    """Return the problem of a class that cannot be built. It names the keys without which, or with 1, the class could be."""
    blamed, until = [], monotonic() + _SEARCH_S
    for key, value in content.items():
        if monotonic() > until:
            break
        rest = {name: other for name, other in content.items() if name != key}
        for changed in (rest, {**rest, key: 1}) if type(value) is int else (rest,):
            with suppress(Exception):
                _built_shapes(json.dumps(changed), head)
                blamed.append(f"{key} = {json.dumps(value):.{_MAX_VALUE}}")
                break
    told = " ".join(str(error).split())[:_MAX_SHOWN]
    reason = f"{type(error).__name__}: {told}" if isinstance(error, LookupError) or not told else told
    found = f"{listed(blamed, _MAX_NAMED)} ({reason})" if blamed else reason
    return Problem(path=str(file), found=found, expected="values from which transformers can build the model")


def _deciding_keys(names: Collection[str], content: Mapping[str, Any], head: Head) -> dict[str, str]:
    """Return, in words and by tensor, the keys of config.json that decide whether there is this tensor, and its shape."""
    from transformers import PreTrainedConfig

    built = _built_shapes(json.dumps(content), head)
    found: dict[str, list[str]] = {name: [] for name in names}
    unsized, until = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}, monotonic() + _SEARCH_S
    for key, value in _values(content).items() if names else ():
        if key in unsized or monotonic() > until:
            continue
        said = f"{key} = {json.dumps(value)}{'' if key in content else ', which it lacks'}"
        others: tuple[Any, ...] = (2 * value, value // 2, 1) if type(value) is int else ()
        for other in (not value,) if type(value) is bool else ([],) if isinstance(value, list) else others:
            with suppress(Exception):
                shapes = _built_shapes(json.dumps({**content, key: other}), head)
                for name in names:
                    if shapes.get(name) != built.get(name) and said not in found[name]:
                        found[name].append(said)
    return {name: f", by {listed(keys, _MAX_NAMED)} in {CONFIG_FILE}" if keys else "" for name, keys in found.items()}
