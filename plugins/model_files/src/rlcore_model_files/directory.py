"""Find the faults of a Hugging Face model directory from its files alone. Only a tokenizer without a usual vocabulary imports
transformers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.installed import is_installed
from rlcore.model_files import AGAIN, CONFIG_FILE, config_number, read_object
from rlcore.schema.file_limits import MAX_BYTES, expanded, read_file, require_file, unique_keys, without_waiting
from rlcore.schema.suggestions import similar_path
from rlcore.spi.errors import Problem
from rlcore_model_files.weight_headers import Header, content_problems, index_problems, tensors_length

GENERATION_FILE = "generation_config.json"
END_TOKEN_FILES = (GENERATION_FILE, CONFIG_FILE)
"""Files that list the tokens that end an answer. The first one that exists counts, as in transformers."""
_TEXT_PARTS = ("decoder", "generator", "text_config")
"""Keys of a multimodal model's config.json under which the part that writes text is described."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILE = "tokenizer.json"
VOCABULARY = re.compile(r"tokenizer(\..+)?\.json|.+\.(model(\..+)?|tiktoken|spm)|.*tekken.*\.json|vocab\.txt")
"""Names of files that hold a whole vocabulary: of tokenizers, SentencePiece, tiktoken, Mistral and BERT."""
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".v3")
"""Suffixes of files that readers take whole into memory; MAX_BYTES limits them."""
_HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git\Z))(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)
"""Names on the Hub, by the rules of huggingface_hub, which need not be installed."""
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""Longest header that safetensors itself reads."""
_MAX_NAME_BYTES = 255
"""The longest name of a file on common systems."""


def model_problems(path: str, *, reads_weights: bool = True) -> list[Problem]:
    """Return the faults of the model at `path` for every reader: files that are missing, cut short, or contradict each other.
    Without `reads_weights` only those of its tokenizer.

    A name that is no existing path but can be one on the Hub is accepted; it is looked up when the model is loaded.
    """
    directory = expanded(path)
    if not directory.exists():
        if is_hub_name(path):
            return []
        is_path = (
            f"In a recipe, a name on the Hub is read as a path where its first part is a folder, as {directory.parent} is."
        )
        remedy = similar_path(directory) or is_path
        return [_problem(path, "no such directory", "a model directory, or a name on the Hub", remedy)]
    if not directory.is_dir():
        return [_problem(path, "a file", "a directory with config.json, safetensors files and a tokenizer")]
    return unreadable_files(directory) or [
        *(file_problems(directory) if reads_weights else ()),
        *_tokenizer_problems(directory),
        *_generation_problems(directory),
    ]


def unreadable_files(directory: Path) -> list[Problem]:
    """Return a problem for each file that transformers would wait for, such as a named pipe, that is too large to read, or that
    leads nowhere, as links of the Hub's cache do whose content is gone: each reader would go on without it."""
    problems = []
    for folder in (directory, directory / ADDITIONAL_TEMPLATES):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            try:
                if not file.is_dir():
                    require_file(file, MAX_BYTES if file.suffix in _READ_WHOLE else None)
            except FileNotFoundError:
                if file.is_symlink() and file.suffix in (*_READ_WHOLE, ".safetensors") and not file.name.startswith("."):
                    found = f"a link that leads nowhere ({file.readlink()})"
                    problems.append(_problem(file, found, "a file of a model", "Download the model again"))
            except OSError as error:
                problems.append(_problem(file, error.strerror or str(error), "a file of a model", "Take it out of the folder"))
    return problems


def file_problems(directory: Path) -> Iterator[Problem]:
    """Yield the faults of config.json and of the weights in an existing directory."""
    yield from _config_problems(directory)
    yield from _weight_problems(directory)


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a directory, by its name; without those of files that are missing or damaged."""
    index = directory / INDEX_FILE
    shards = index_shards(index) if index.exists() else [SINGLE_FILE]
    files = [] if isinstance(shards, Problem) else [directory / shard for shard in shards]
    headers = [_read_header(file) for file in files]
    return {
        name: tuple(entry["shape"]) for header in headers if not isinstance(header, Problem) for name, entry in header.items()
    }


def is_hub_name(path: str) -> bool:
    """Return whether a path that does not exist can be a name on the Hub. A path below runs/, the folder of runs, is none."""
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith("runs/")


def eos_token_ids(file: Path) -> tuple[int, ...] | Problem:
    """Return the end-of-sequence tokens that a generation_config.json or a config.json lists, or a problem."""
    content = read_object(file)
    if isinstance(content, Problem):
        return content
    of_text = next((part for name in _TEXT_PARTS if isinstance(part := content.get(name), dict)), {})
    listed = of_text.get("eos_token_id") if content.get("eos_token_id") is None else content["eos_token_id"]
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if all(type(token) is int and token >= 0 for token in ids):
        return tuple(ids)
    return _problem(file, f"eos_token_id = {json.dumps(listed)}", "a token number, or a list of them")


def _problem(path: object, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=str(path), found=found, expected=expected, remedy=remedy)


def _config_problems(directory: Path) -> Iterator[Problem]:
    file = directory / CONFIG_FILE
    if not file.exists():
        yield _problem(directory, f"no {CONFIG_FILE}", "a Hugging Face model directory")
    elif isinstance(content := read_object(file), Problem):
        yield content


def _generation_problems(directory: Path) -> Iterator[Problem]:
    file = next((file for name in END_TOKEN_FILES if (file := directory / name).exists()), None)
    found = () if file is None else eos_token_ids(file)
    if isinstance(found, Problem) and (file != directory / CONFIG_FILE or isinstance(read_object(file), dict)):
        yield found


# Weights


def _weight_problems(directory: Path) -> Iterator[Problem]:
    """Yield the faults of the weights. The index counts where there is one, else the single file."""
    index = directory / INDEX_FILE
    shards: list[str] | Problem = [SINGLE_FILE]
    if index.exists():
        shards = index_shards(index)
    elif not (directory / SINGLE_FILE).exists():
        yield _problem(directory, "no weights", f"{SINGLE_FILE} or {INDEX_FILE} with its shards")
        return
    if isinstance(shards, Problem):
        yield shards
        return
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        yield _problem(directory, f"no {', '.join(missing)}", f"every file that {INDEX_FILE} names", "Complete the download")
    yield from _other_weights(directory, shards)
    headers: dict[Path, Header] = {}
    for file in (directory / shard for shard in shards if shard not in missing):
        header = _read_header(file)
        if isinstance(header, Problem):
            yield header
        else:
            headers[file] = header
    if len(headers) < len(shards):
        return
    if index.exists():
        yield from index_problems(index, json.loads(read_file(index))["weight_map"], headers)
    config = read_object(directory / CONFIG_FILE)
    if not isinstance(config, Problem):
        yield from content_problems(directory, config, headers)


def index_shards(index: Path) -> list[str] | Problem:
    """The files that an index names, in order, or what is wrong with it."""
    content = read_object(index)
    if isinstance(content, Problem):
        return content
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return _problem(index, "no weight_map", "a table from tensor names to files")
    if not isinstance(content.get("metadata"), dict):  # which transformers reads, and others do not
        return _problem(index, "no metadata", "a table, which may be empty", 'Add "metadata": {} to it')
    shards = sorted({str(shard) for shard in weight_map.values()})
    expected = "safetensors files in the model's own directory"
    outside = next((shard for shard in shards if not _is_file_name(shard)), None)
    return shards if outside is None else _problem(index, f"the file {outside:.99}", expected, AGAIN)


def _is_file_name(name: str) -> bool:
    is_short = len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
    return name.endswith(".safetensors") and Path(name).name == name and is_short and "\0" not in name


def _other_weights(directory: Path, shards: list[str]) -> Iterator[Problem]:
    """Refuse further weight files, which transformers or an engine would read in place of the model's."""
    found = {file.name for file in directory.glob("[!.]*.safetensors")} - set(shards)
    if (directory / INDEX_FILE).exists():
        found &= {SINGLE_FILE}  # transformers prefers it to the index; no reader takes other files that the index does not name
    if (directory / ADAPTER_FILE).exists():
        found |= {ADAPTER_FILE}
    if found:
        yield several_models(directory, sorted(found), INDEX_FILE if (directory / INDEX_FILE).exists() else SINGLE_FILE)


def several_models(path: object, others: list[str], beside: str) -> Problem:
    """Return the problem of a directory that also holds files of another model."""
    expected = "the files of one model: each reader would take others"
    remedy = "Move what does not belong to the model to another directory"
    return _problem(path, f"{', '.join(others)} beside {beside}", expected, remedy)


def _read_header(file: Path) -> Header | Problem:
    """Return the header of a safetensors file, or a problem where the file is cut short or damaged.

    The format: 8 bytes with the length of a JSON header, which says at which bytes behind it each tensor lies.
    """
    header: dict[str, Any] = {}
    try:
        require_file(file)
        with open(file, "rb", opener=without_waiting) as opened:
            size = file.stat().st_size
            start = opened.read(8) or b""
            length = int.from_bytes(start, "little")
            if start == _LFS_POINTER[:8] and (start + opened.read(15)).startswith(_LFS_POINTER):
                return _problem(file, "a pointer of Git LFS", "the weights that it stands for", "Run: git lfs pull")
            if length > _MAX_HEADER_BYTES:
                raise ValueError
            if len(start) == 8 and 8 + length <= size:
                opened.seek(8)
                header = json.loads(opened.read(length), object_pairs_hook=unique_keys)
                notes = header.pop("__metadata__", None) or {}
                if not all(isinstance(note, str) for note in notes.values()):
                    raise ValueError
                length += tensors_length(header)
    except OSError as error:
        return _problem(file, error.strerror or str(error), "a readable safetensors file")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return _problem(file, "a header that is none of safetensors", "a readable safetensors file", AGAIN)
    if 8 + length != size:
        found = f"{size:,} bytes" if 8 + length > size else f"{size:,} bytes, more than its header speaks of"
        return _problem(file, found, f"{8 + length:,} bytes, as its header says", AGAIN)
    return header


# Tokenizer


def _tokenizer_problems(directory: Path) -> Iterator[Problem]:
    if not has_vocabulary(directory):
        expected = "tokenizer.json (or another vocabulary, such as tokenizer.model, or vocab.json and merges.txt)"
        yield _problem(directory, "no tokenizer", expected)
        return
    for name in (TOKENIZER_FILE, "tokenizer_config.json"):
        file = directory / name
        content = read_object(file) if file.exists() else {}
        if isinstance(content, Problem):
            yield content
        else:
            yield from _vocabulary_problems(directory, file, content)


def has_vocabulary(directory: Path) -> bool:
    """Return whether a directory has the vocabulary of a tokenizer, Python code for one, or the name of a class without one."""
    names = {file.name for file in directory.iterdir()}
    settings = read_object(directory / "tokenizer_config.json") if "tokenizer_config.json" in names else {}
    if isinstance(settings, dict) and settings.get("auto_map"):
        return True
    if {"vocab.json", "merges.txt"} <= names or any(map(VOCABULARY.fullmatch, names)):
        return True
    config = read_object(directory / CONFIG_FILE)
    tables = [table for table in (settings, config) if isinstance(table, dict)]
    named = next((name for table in tables if isinstance(name := table.get("tokenizer_class"), str)), "")
    needed = _files_of_class(named)
    return needed is not None and needed <= names


def _files_of_class(name: str) -> frozenset[str] | None:
    """Return the files that a tokenizer's class of transformers reads, which may be none, as of ByT5 and CANINE; None for other
    names, and where transformers is not installed."""
    if not name or not is_installed("transformers"):
        return None
    import transformers  # it takes a second, for directories that hold no usual vocabulary

    kind = getattr(transformers, name, None)
    files = getattr(kind, "vocab_files_names", None)
    return frozenset(files.values()) - {"tokenizer_config.json"} if isinstance(files, dict) else None


def _vocabulary_problems(directory: Path, file: Path, content: dict[str, Any]) -> Iterator[Problem]:
    """Refuse tokens whose number is beyond the rows of the embedding."""
    rows = config_number(str(directory), "vocab_size")
    beyond = {text: number for text, number in vocabulary(content) if rows is not None and number >= rows}
    if beyond:
        first = min(beyond, key=beyond.__getitem__)
        others = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        yield _problem(
            file,
            f"the token {first!r:.40} of number {beyond[first]}{others}",
            f"numbers below {rows}, which is vocab_size in {CONFIG_FILE}",
            "Take the tokenizer that belongs to the model, or resize the model's embeddings and save it",
        )


def vocabulary(tokenizer: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a tokenizer.json, or those that a tokenizer_config.json adds, with their numbers.

    The vocabulary may be a table or a list of pairs; other forms are left out.
    """
    model = tokenizer.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(listed, dict):
        yield from ((text, number) for text, number in listed.items() if type(number) is int)
    elif isinstance(listed, list):
        yield from ((str(pair[0]), number) for number, pair in enumerate(listed) if isinstance(pair, list) and pair)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and type(token.get("id")) is int:
            yield str(token.get("content")), token["id"]
    decoder = tokenizer.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else []:
        if isinstance(token, dict) and number.isdecimal():
            yield str(token.get("content")), int(number)
