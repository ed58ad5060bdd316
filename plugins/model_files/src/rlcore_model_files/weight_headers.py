"""Find contradictions between the headers of a model's safetensors files, their index and config.json."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from rlcore.schema.suggestions import listed
from rlcore.spi.errors import Problem

Header = Mapping[str, Mapping[str, Any]]
"""The "dtype", "shape" and "data_offsets" of each tensor of a file: its first byte behind the header, and the one after it."""
TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Keys of the config.json of a model of images or sound under which its language model is described."""
_LAYER = re.compile(r"(?:language_model\.model|model\.language_model|model)\.layers\.(\d{1,9})\.")
_EMBEDDING = re.compile(r"(?:language_model\.model|model\.language_model|model)\.embed_tokens\.weight")
_HEAD = re.compile(r"(?:language_model\.)?lm_head\.weight")
_TYING_TYPES = re.compile(r"(vault)?gemma|cohere|ernie4_5|lfm2|smollm3|starcoder2|jetmoe|minicpm3")
"""Beginnings of the model types that tie the head to the embedding where config.json lacks tie_word_embeddings."""
_DECODER = re.compile(r"(?:model\.decoder|model|transformer|gpt_neox|backbone|decoder)\.")
"""Begins the names of a language model's tensors, by its family, unless its decoder was saved without a head."""
_BITS = re.compile(r"(?=BF16\Z|F(?:16|32|64|4|6_E2M3|6_E3M2|8_\w+)\Z|[IU](?:8|16|32|64)\Z|C64\Z)[A-Z]+(\d+)(_.*)?")
"""Names of the dtypes of safetensors, in which the number is the bits of a value."""
_MAX_BYTES = 2**63
_MAX_DIMENSIONS = 32
_OTHER_NUMBERS = re.compile(r"F(8|6|4)(_.*)?|C\d+")
"""Narrow floats, which have scales, and complex numbers, of which a reader drops a part."""
_INTEGERS = re.compile(r"[IU]\d+|BOOL")
_INTEGER_WEIGHT = re.compile(r".*(weight|_blocks|_proj|(?<!attn)(?<!attention)\.bias)")
"""Names of weights that are quantised where they are integers; others are buffers, such as positions and GPT-2's masks."""
_CHUNK = 2**24
"""Bytes of two tensors that are compared at a time."""


def tensors_length(header: Header) -> int:
    """Return the number of bytes that the tensors after a header take.

    ValueError, TypeError or LookupError where the tensors leave gaps or overlap, or where the length of one does not follow
    from its dtype and shape.
    """
    length = 0
    for entry in sorted(header.values(), key=lambda entry: tuple(entry["data_offsets"])):
        (start, end), shape, dtype = entry["data_offsets"], list(entry["shape"]), _BITS.fullmatch(entry["dtype"])
        numbers = [start, end, *shape[: _MAX_DIMENSIONS + 1]]
        are_sizes = all(type(number) is int and 0 <= number < _MAX_BYTES for number in numbers)
        if len(shape) > _MAX_DIMENSIONS or not are_sizes or start != length or end < start:
            raise ValueError(f"found {numbers}; expected bytes from {length} on")
        bits = 8 if dtype is None else int(dtype[1])  # BOOL
        if dtype is None and entry["dtype"] != "BOOL":
            raise ValueError(f"found the dtype {entry['dtype']!r:.40}; expected one of safetensors")
        if prod(shape) * bits != (end - start) * 8:
            raise ValueError(f"found {end - start} bytes; expected {shape} of {entry['dtype']}")
        length = end
    return length


def index_problems(index: Path, weight_map: Mapping[str, Any], headers: Mapping[Path, Header]) -> Iterator[Problem]:
    """Refuse tensors that the index and the shards do not place alike."""
    held: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header:
            held.setdefault(name, []).append(file.name)
    for what, names in {
        "in no file that it names": [name for name in weight_map if name not in held],
        "in another file than it says": [name for name, file in weight_map.items() if name in held and file not in held[name]],
        "that it does not name": [name for name in held if name not in weight_map],
        "in several files": [name for name, files in held.items() if len(files) > 1],
    }.items():
        if names:
            expected = "each tensor once, in the file that the index says"
            yield _problem(index, f"{listed(names)} {what}", expected, "Copy or download the model again")


def content_problems(directory: Path, config: Mapping[str, Any], headers: Mapping[Path, Header]) -> Iterator[Problem]:
    """Refuse weights whose names, shapes or dtypes contradict config.json."""
    tensors = {name: (file, entry) for file, header in headers.items() for name, entry in header.items()}
    yield from _dtype_problems(config, headers)
    twice = [name for name in tensors if (prefix := _DECODER.match(name)) and name.removeprefix(prefix[0]) in tensors]
    if twice:
        yield _problem(directory, f"{listed(twice)}, and the same without the prefix", "each tensor once")
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), Mapping)), config)
    yield from _layer_problems(directory, text, tensors)
    embedding = next((name for name in tensors if _EMBEDDING.fullmatch(name)), None)
    if embedding is None:
        return
    _, entry = tensors[embedding]
    expected = [text.get("vocab_size"), text.get("hidden_size")]
    sizes_are_stated = all(type(size) is int for size in expected) and not config.get("quantization_config")
    if sizes_are_stated and list(entry["shape"]) != expected:
        says = f"{expected}, as vocab_size and hidden_size in config.json say"
        yield _problem(directory, f"{embedding} of shape {list(entry['shape'])}", says)
    head = next((name for name in tensors if _HEAD.fullmatch(name)), None)
    ties_unasked = _TYING_TYPES.match(str(config.get("model_type"))) is not None
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", ties_unasked))
    if tied is True and head is not None and not _is_same(*tensors[embedding], *tensors[head]):
        expected_head = "one tensor, or tie_word_embeddings = false in config.json"
        yield _problem(directory, f"{head} that is not {embedding}", expected_head)


def _dtype_problems(config: Mapping[str, Any], headers: Mapping[Path, Header]) -> Iterator[Problem]:
    """Refuse floats of at most 8 bits, complex numbers and integers without a quantization_config, which says their scales."""
    if config.get("quantization_config"):
        return
    for file, header in headers.items():
        narrow = [name for name, entry in header.items() if _is_narrow(name, entry)]
        if narrow:
            found = f"{listed(narrow)} in {header[narrow[0]]['dtype']}, without a quantization_config in config.json"
            expected = "weights in float32, bfloat16 or float16, or what says their scales"
            yield _problem(file, found, expected, "Take the model's config.json whole, or save the model dequantised")


def _is_narrow(name: str, entry: Mapping[str, Any]) -> bool:
    dtype = entry["dtype"]
    return bool(_OTHER_NUMBERS.fullmatch(dtype)) or bool(_INTEGER_WEIGHT.fullmatch(name) and _INTEGERS.fullmatch(dtype))


PREDICTS_FURTHER = ".eh_proj.weight"
"""The end of the name of a tensor that only layers which predict further tokens have."""


def _layer_problems(directory: Path, text: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[Problem]:
    numbers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    stated, ahead = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if not numbers or type(stated) is not int:
        return
    most = stated + (ahead if type(ahead) is int else 0)
    heads = {int(match[1]) for name in tensors if (match := _LAYER.match(name)) and name.endswith(PREDICTS_FURTHER)}
    if max(numbers) >= most or len(numbers) < stated or numbers - {*range(stated), *heads}:
        yield _problem(directory, f"weights of {len(numbers)} layers", f"{stated}, as num_hidden_layers says")


def _is_same(file: Path, entry: Mapping[str, Any], other_file: Path, other: Mapping[str, Any]) -> bool:
    """Return whether two tensors have the same values. Both are read only where their shapes and dtypes are equal."""
    if (entry["shape"], entry["dtype"]) != (other["shape"], other["dtype"]):
        return False
    with file.open("rb") as one, other_file.open("rb") as two:
        for opened, (start, _) in ((one, entry["data_offsets"]), (two, other["data_offsets"])):
            opened.seek(8 + int.from_bytes(opened.read(8), "little") + start)
        left = entry["data_offsets"][1] - entry["data_offsets"][0]
        while left > 0:
            length = min(left, _CHUNK)
            if one.read(length) != two.read(length):
                return False
            left -= length
    return True


def _problem(path: Path, found: str, expected: str, remedy: str = "Take config.json and weights of one model") -> Problem:
    return Problem(path=str(path), found=found, expected=expected, remedy=remedy)
