"""The checkpoints of clients: folders below one directory, each with a description.

DIRECTORY/MODEL/KIND/NAME/ holds `checkpoint.json` and the files. The client names it tinker://MODEL/KIND/NAME.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, evolve, field, frozen

from rlcore.files import storage_errors, write_atomically
from rlcore_tinker.errors import RequestError

Kind = Literal["weights", "sampler_weights", "external_weights"]
TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The protocol's type of each kind."""
DESCRIPTION = "checkpoint.json"
FILES = "files"
"""The folder of a checkpoint that holds what the trainer wrote."""
PARTIAL, REPLACED = ".partial", ".replaced"
"""The ends of folders' names: of a checkpoint that is being written, and of the one whose place it takes."""
SCHEME = "tinker://"
LEAST_TTL_S, MOST_TTL_S = 3600, 10 * 366 * 86400
MAX_MODELS = 10**9
"""The numbers of a client's models are below it: a checkpoint's path has nine digits for them."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}")
_MODEL = re.compile(r"[A-Za-z0-9_-]{1,80}:train:[0-9]{1,9}")


@frozen(kw_only=True)
class Checkpoint:
    """One checkpoint, as its description says."""

    model_id: str
    kind: Kind
    name: str
    created: str
    """When it was made, in ISO 8601."""
    weights: str
    """The name of its weights: equal where the weights are (rlcore_tinker.weights)."""
    base_model: str
    lora_rank: int | None = None
    """None after full fine-tuning."""
    stored_rank: int | None = None
    """The recipe's lora.rank, which the trainer's files have the shapes of."""
    size_bytes: int = 0
    public: bool = False
    user_metadata: Mapping[str, str] | None = None
    expires: str | None = None
    """When it is deleted, in ISO 8601; None for never."""
    folder: Path = field(default=Path(), metadata={"stored": False})

    @property
    def checkpoint_id(self) -> str:
        """The protocol's id of a checkpoint within its model."""
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        """The protocol's path of a checkpoint."""
        return f"{SCHEME}{self.model_id}/{self.checkpoint_id}"

    @property
    def files(self) -> Path:
        """The folder of what the trainer wrote."""
        return self.folder / FILES

    @property
    def is_expired(self) -> bool:
        """Return whether its time is over."""
        return self.expires is not None and datetime.fromisoformat(self.expires) <= datetime.now(UTC)

    def body(self) -> dict[str, Any]:
        """Return the protocol's JSON of a checkpoint."""
        return {
            "checkpoint_id": self.checkpoint_id,
            "checkpoint_type": TYPES[self.kind],
            "time": self.created,
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": self.public,
            "user_metadata": None if self.user_metadata is None else dict(self.user_metadata),
            "expires_at": self.expires,
        }


class Checkpoints:
    """The checkpoints below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check_new(self, model_id: str, kind: Kind, name: str, *, overwrite: bool) -> None:
        """RequestError where the name is none of a folder, or taken."""
        if not _NAME.fullmatch(name):
            raise RequestError(f"path: found {name!r:.140}; expected a name of letters, digits, '.', '_' and '-'")
        if not overwrite and (self._folder(model_id, kind, name) / DESCRIPTION).is_file():
            raise RequestError(f"path: found {name!r}, which this model has saved before; expected a new name, or overwrite")

    def write(self, described: Checkpoint, write: Callable[[Path], Any]) -> Checkpoint:
        """Make a checkpoint of the files that `write` puts into the folder that it gets, whole or not at all."""
        final = self._folder(described.model_id, described.kind, described.name)
        building, replaced = (final.parent / f".{final.name}{suffix}" for suffix in (PARTIAL, REPLACED))
        with storage_errors(f"the checkpoint {described.path}", final.parent):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            write(building / FILES)
            size = sum(file.stat().st_size for file in building.rglob("*") if file.is_file())
            described = evolve(described, size_bytes=size, folder=final)
            _describe(building, described)
            if final.exists():
                final.rename(replaced)
            building.rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
        return described

    def clean(self) -> None:
        """Finish or remove what a server left that ended while it wrote: a whole checkpoint takes its name. No other server may
        use the directory."""
        for partial in self._directory.glob(f"*/*/.*{PARTIAL}"):
            final = partial.parent / partial.name[1 : -len(PARTIAL)]
            if (partial / DESCRIPTION).is_file() and not final.exists():
                partial.rename(final)
            else:
                shutil.rmtree(partial, ignore_errors=True)
        for replaced in self._directory.glob(f"*/*/.*{REPLACED}"):
            shutil.rmtree(replaced, ignore_errors=True)

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint of a path. RequestError where there is none."""
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3 and parts[1] in TYPES:
            found = self.of(parts[0], f"{parts[1]}/{parts[2]}")
            if found is not None:
                return found
        raise RequestError(
            f"found the path {path!r:.200}, where this server has no checkpoint; expected one that it saved, as "
            "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME",
            status=404,
        )

    def of(self, model_id: str, checkpoint_id: str) -> Checkpoint | None:
        """Return a model's checkpoint by its id; None where there is none, or it expired."""
        kind, _, name = checkpoint_id.partition("/")
        if not _MODEL.fullmatch(model_id) or kind not in TYPES or not _NAME.fullmatch(name):
            return None
        return _read(self._directory / _folder_name(model_id) / kind / name)

    def all(self, model_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a model, or all, the newest first. Those whose time is over are deleted."""
        if model_id is not None and not _MODEL.fullmatch(model_id):
            return []
        pattern = "*" if model_id is None else _folder_name(model_id)
        found = [one for path in self._directory.glob(f"{pattern}/*/*/{DESCRIPTION}") if (one := _read(path.parent))]
        return sorted(found, key=lambda one: one.created, reverse=True)

    def change(self, checkpoint: Checkpoint, **fields: Any) -> None:
        """Rewrite fields of a description."""
        _describe(checkpoint.folder, evolve(checkpoint, **fields))

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint."""
        shutil.rmtree(checkpoint.folder)

    def _folder(self, model_id: str, kind: Kind, name: str) -> Path:
        return self._directory / _folder_name(model_id) / kind / name


def expiry(ttl_seconds: int | None) -> str | None:
    """Return when a checkpoint of this time to live expires. RequestError where the protocol does not allow it."""
    if ttl_seconds is None:
        return None
    if not LEAST_TTL_S <= ttl_seconds <= MOST_TTL_S:
        raise RequestError(f"ttl_seconds: found {ttl_seconds}; expected 3600 (an hour) to {MOST_TTL_S} (ten years)")
    return (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


def now() -> str:
    """Return the time in ISO 8601."""
    return datetime.now(UTC).isoformat()


def _folder_name(model_id: str) -> str:
    return model_id.replace(":", "_")


def _describe(folder: Path, checkpoint: Checkpoint) -> None:
    stored = asdict(checkpoint, filter=lambda attribute, _: attribute.metadata.get("stored", True))
    write_atomically(folder / DESCRIPTION, json.dumps(stored))


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None where there is none, or its time is over, and it is deleted."""
    try:
        checkpoint = Checkpoint(**json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")), folder=folder)
    except (OSError, ValueError, TypeError):
        return None
    if checkpoint.is_expired:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return checkpoint


def holds(files: Path, weights: str) -> bool:
    """Return whether a folder of files has the weights of this name, which another checkpoint of its name may have replaced."""
    described = _read(files.parent)
    return files.is_dir() and (described is None or described.weights == weights)


def files_of(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the path of each file of a checkpoint, relative to its folder of files."""
    for file in sorted(checkpoint.files.rglob("*")):
        if file.is_file():
            yield file.relative_to(checkpoint.files).as_posix()
