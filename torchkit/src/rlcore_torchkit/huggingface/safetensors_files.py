"""Read parts of tensors from the safetensors files of a Hugging Face model."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, field, frozen

from rlcore.model_files import AGAIN, CONFIG_FILE
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import listed
from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import ModelError, Problem
from rlcore_model_files.directory import INDEX_FILE, SINGLE_FILE, file_problems, index_shards, several_models

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_T = TypeVar("_T")
MAX_NAMED = 20
_MAX_LISTED = 3
_OLD_BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|attn\.(masked_)?bias|attention\.(masked_)?bias)$|^mtp\.")
"""Buffers that older versions of transformers saved, and layers that predict further tokens."""


@frozen(kw_only=True, eq=False)
class TensorFiles:
    """The open safetensors files of a model."""

    path: str
    """The path that errors name."""
    tensors: Mapping[str, Any]
    """The open file of each tensor, by name."""
    places: Mapping[str, Path]
    """The path of that file."""
    stored: Mapping[str, str] = field(factory=dict)
    """The name in its file, of each tensor that goes by another here."""

    def renamed(self, prefixes: Mapping[str, str], known: Collection[str]) -> "TensorFiles":
        """These files, with other beginnings of the names that are not `known`, where those with the beginning that `prefixes`
        has for theirs are."""
        names = {name: self._known_name(name, prefixes, known) for name in self.tensors}
        return evolve(
            self,
            tensors={known: self.tensors[name] for name, known in names.items()},
            places={known: self.places[name] for name, known in names.items()},
            stored={known: name for name, known in names.items() if known != name},
        )

    def _known_name(self, name: str, prefixes: Mapping[str, str], known: Collection[str]) -> str:
        """Return the name itself where no known one stands for it, or the files have both."""
        others = (new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old))
        return next((other for other in others if name not in known and other in known and other not in self.tensors), name)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].get_slice(self.stored.get(name, name)).get_shape())

    def read(self, name: str, bounds: Sequence[slice], dtype: "torch.dtype") -> "Tensor":
        """Return the block of a tensor, on the host in this dtype; nothing else of it is read. `bounds` are not negative.
        ModelError, naming the file, where it cannot be read, or holds NaN or numbers that are infinite in the dtype."""
        from safetensors import SafetensorError

        try:
            block: Tensor = self.tensors[name].get_slice(self.stored.get(name, name))[tuple(bounds)].to(dtype)
        except (OSError, SafetensorError) as error:
            raise ModelError([_unreadable(self.places[name], f"{name}: {error}")]) from error
        self.raise_problems(list(not_finite({name: block}, str(self.places[name]))))
        return block

    def raise_unknown(self, known: Collection[str], config: Mapping[str, Any]) -> None:
        """Raise ModelError where files hold tensors that are not `known`, the names that the model of config.json has."""
        self.raise_problems(unknown_tensors(self.tensors.keys() - set(known), config, self.path))

    def problem(self, found: str, expected: str) -> Problem:
        return Problem(path=self.path, found=found, expected=expected)

    def raise_problems(self, problems: Sequence[Problem]) -> None:
        """Raise ModelError with the first of the problems, where there are any."""
        raise_model_problems(self.path, problems)


def unknown_tensors(names: Collection[str], config: Mapping[str, Any], path: str) -> list[Problem]:
    """Return a problem that lists these names: tensors which the model of config.json does not have.

    Buffers of older versions of transformers, and layers that predict further tokens, are left out.
    """
    numbers = (config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    layers, ahead = (number if type(number) is int else 0 for number in numbers)
    ignored = tuple(f"model.layers.{layers + number}." for number in range(ahead))
    unknown = sorted(name for name in names if not name.startswith(ignored) and _OLD_BUFFER.search(name) is None)
    if not unknown:
        return []
    found = f"{listed(unknown, _MAX_LISTED)} in the weights"
    remedy = "Take config.json and weights of one model: with these tensors left out it would be another"
    return [Problem(path=path, found=found, expected="the tensors of the model that config.json describes", remedy=remedy)]


def not_finite(tensors: Mapping[str, "Tensor"], path: str) -> Iterator[Problem]:
    """Refuse tensors that hold NaN or infinite numbers."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield Problem(path=path, found=f"NaN or infinite numbers in {name}", expected="finite weights", remedy=AGAIN)


def raise_model_problems(path: str, problems: Sequence[Problem], max_named: int = MAX_NAMED) -> None:
    """Raise ModelError with the first `max_named` problems of the files at `path` and the number of the others, if any."""
    if problems:
        num_left = len(problems) - max_named
        more = [Problem(path=path, found=f"{num_left} more like these", expected="none")] if num_left > 0 else []
        raise ModelError([*problems[:max_named], *more])


@contextmanager
def open_tensors(spec: ModelSpec) -> Iterator[TensorFiles]:
    """Open all tensors of the model at `spec`. ModelError where a file is missing or cannot be read."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        places: dict[str, Path] = {}
        for file in weight_files(spec):
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError([_unreadable(file, str(error))]) from error
            tensors |= dict.fromkeys(opened.keys(), opened)
            places |= dict.fromkeys(opened.keys(), file)
        yield TensorFiles(path=spec.path, tensors=tensors, places=places)


def _unreadable(file: Path, found: str) -> Problem:
    return Problem(path=str(file), found=found, expected="a readable safetensors file")


def weight_files(spec: ModelSpec) -> list[Path]:
    """Return the safetensors files of a directory, or of a name on the Hub after fetching and checking them; ModelError."""
    index = model_file(spec, INDEX_FILE)
    shards = [SINGLE_FILE] if index is None else index_shards(index)
    if isinstance(shards, Problem):
        raise ModelError([shards])
    is_local = expanded(spec.path).is_dir()
    if SINGLE_FILE not in shards and not is_local and _is_on_hub(spec, SINGLE_FILE):
        raise ModelError([several_models(spec.path, [SINGLE_FILE], INDEX_FILE)])  # before gigabytes are fetched
    found = {shard: model_file(spec, shard) for shard in shards}
    missing = [shard for shard, file in found.items() if file is None]
    if missing:
        raise ModelError([Problem(path=spec.path, found=f"no {', '.join(missing)}", expected="the model's safetensors files")])
    files = [file for file in found.values() if file is not None]
    if not is_local and model_file(spec, CONFIG_FILE) is not None:
        raise_model_problems(spec.path, list(file_problems(files[0].parent)))
    return files


def check_hub_files(spec: ModelSpec) -> None:
    """Raise ModelError where safetensors files of a name on the Hub contradict each other or config.json. A model without any
    is transformers' to convert, and a directory is checked by its path."""
    if not expanded(spec.path).is_dir() and any(model_file(spec, name) for name in (INDEX_FILE, SINGLE_FILE)):
        weight_files(spec)


def model_file(spec: ModelSpec, name: str) -> Path | None:
    """Find one of the model's files; None where it has none of that name."""
    directory = expanded(spec.path)
    if directory.is_dir():
        return directory / name if (directory / name).exists() else None
    from transformers.utils import cached_file

    found = _asked_hub(
        spec, lambda: cached_file(spec.path, name, revision=spec.revision, _raise_exceptions_for_missing_entries=False)
    )
    return None if found is None else Path(found)


def _is_on_hub(spec: ModelSpec, name: str) -> bool:
    """Return whether a model on the Hub has a file of that name. The file is not fetched."""
    from transformers.utils.hub import has_file

    return bool(_asked_hub(spec, lambda: has_file(spec.path, name, revision=spec.revision)))


def _asked_hub(spec: ModelSpec, ask: Callable[[], _T]) -> _T:
    from httpx import HTTPError

    try:
        return ask()
    except (OSError, HTTPError) as error:
        problem = Problem(path=spec.path, found=str(error), expected="a model on the Hub, or a directory")
        raise ModelError([problem]) from error
