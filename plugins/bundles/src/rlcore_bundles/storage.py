"""The folder of a bundle: bundle.json, arrays.safetensors, texts.json, and the weights in `model/` and `state/`.

bundle.json names the format's version, and the size and SHA-256 of every other file. Nothing in a bundle is executed.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlcore.files import storage_errors
from rlcore.reading import read_bytes
from rlcore.run.protocols import CollectedRollouts
from rlcore.secrets import masked
from rlcore.spi import CheckpointError, ContractError, EpisodeFailure
from rlcore.spi.arrays import AnyArray, put_rows, take_rows
from rlcore_bundles.arrays import Table, names_below, put_batch, put_column, put_turns, take_batch, take_column, take_turns
from rlcore_bundles.bundle import Bundle, Update
from rlcore_bundles.file_digests import sha256_of
from rlcore_bundles.header import FORMATS, HEADER, TEXTS, own_step_of, read_header, read_texts

ARRAYS: Final = "arrays.safetensors"
MODEL, STATE = "model", "state"
LONGEST: Final = 255
"""Characters of a file's name."""
_HEADER_FIELDS = ("step", "weight_version", "recipe", "environment", "alarm", "prompts", "metrics", "weights")
_OF_SAMPLES = ("rewards", "valid", "finish_reasons", "truncated", "success", "num_generated", "failed", "timed_out")
_FLAGS = ("valid", "truncated", "success", "failed", "timed_out")
_OF_UPDATE = ("num_loss_tokens", "num_loss_sequences", "schedule_step", "loss", "loss_config", "loss_value", "grad_norm")
_MORE_OF_UPDATE = ("learning_rate", "metrics", "gradient_norms")


def write_bundle(bundle: Bundle, directory: Path, save_weights: Callable[[Path], object] | None = None) -> int:
    """Write a bundle as a new folder, which no reader sees before it is whole; return its bytes. `save_weights` writes `model/`
    and `state/`. StorageError where that fails."""
    partial = directory.with_name(f".{directory.name}.partial")
    with storage_errors("the bundle", directory.parent, otherwise="name another folder"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / ARRAYS).write_bytes(save(_table(bundle)))
        (partial / TEXTS).write_text(json.dumps(_texts(bundle)), encoding="utf-8")
        if save_weights is not None:
            save_weights(partial)
        files = {str(path.relative_to(partial)): _described(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        (partial / HEADER).write_text(json.dumps(_header(bundle) | {"files": files}, indent=1), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def read_bundle(directory: Path) -> Bundle:
    """Read a bundle. CheckpointError where a file is missing, cut or changed, or the format is a newer one."""
    header = read_header(directory)
    if problems := list(_file_problems(directory, header["files"])):
        raise CheckpointError("\n".join([f"{directory} is damaged:", *problems, "Record the step again, or copy it anew."]))
    try:
        table: Mapping[str, AnyArray] = load(read_bytes(directory / ARRAYS))
        return _bundle(header, table, read_texts(directory), directory)
    except (SafetensorError, ContractError, LookupError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{directory} is damaged: found {reason}; expected a bundle. Record the step again") from error


def bytes_without_weights(directory: Path) -> int:
    """The bytes of a bundle's folder without `model/` and `state/`."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _file_problems(directory: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the files that the header names."""
    if not {ARRAYS, TEXTS} <= files.keys():
        yield f"  - {HEADER}: found no list of files; expected {ARRAYS} and {TEXTS} in it"
        return
    for name, expected in files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts or any(len(part) > LONGEST for part in Path(name).parts):
            yield f"  - {HEADER}: found the file {name[:LONGEST]!r}; expected one within the folder"
        elif not path.is_file():
            yield f"  - {name}: found no such file; expected {expected['bytes']:,} bytes"
        elif (found := _described(path)) != expected:
            what = f"{found['bytes']:,} bytes" if found["bytes"] != expected["bytes"] else "another content than was written"
            yield f"  - {name}: found {what}; expected {expected['bytes']:,} bytes with the SHA-256 in {HEADER}"


def _header(bundle: Bundle) -> dict[str, Any]:
    updates = [{name: _plain(getattr(one, name)) for name in (*_OF_UPDATE, *_MORE_OF_UPDATE)} for one in bundle.updates]
    digests = {"before": dict(bundle.digests_before), "after": dict(bundle.digests_after)}
    own = (
        {}
        if bundle.own_step is None
        else {"own_step": attrs.asdict(bundle.own_step, filter=lambda _, value: value is not None)}
    )
    return {
        "format": FORMATS["run" if bundle.own_step is None else "own loop"],
        **own,
        **{name: _plain(getattr(bundle, name)) for name in _HEADER_FIELDS},
        "sampled": {"environment_metrics": _plain(bundle.sampled.environment_metrics)},
        "updates": updates,
        "digests": digests,
    }


def _texts(bundle: Bundle) -> dict[str, Any]:
    sampled = bundle.sampled
    return {
        "rows": [_plain(dict(row)) for row in sampled.rows],
        "row_hashes": list(bundle.row_hashes),
        "reset_seeds": list(sampled.reset_seeds),
        "responses": list(sampled.responses),
        "data_sets": list(sampled.data_sets),
        "num_endings": len(sampled.failures),
        "endings": _endings(sampled.failures, has_reasons=bundle.prompts == "kept"),
        "weight_version": sampled.weight_version,
        "oldest_version": sampled.oldest_version,
    }


def _endings(failures: Sequence[EpisodeFailure | None], *, has_reasons: bool) -> dict[str, Any]:
    """The endings of episodes as JSON, by number, without secrets and those by the policy. A reason may quote the prompt."""
    return {
        str(number): attrs.asdict(attrs.evolve(one, reason=masked(one.reason) if has_reasons else ""))
        for number, one in enumerate(failures)
        if one is not None
    }


def _table(bundle: Bundle) -> Table:
    table, sampled = Table(), bundle.sampled
    batch, trained = sampled.batch, bundle.trained
    put_batch(table, "sampled", batch)
    for name in _OF_SAMPLES:
        table[f"samples/{name}"] = getattr(sampled, name)
    for name, column in sampled.reward_components.items():
        table[f"components/{name}"] = column
    put_turns(table, "turns", sampled.turns)
    for name, column in bundle.scored.items():
        put_column(table, f"scored/{name}", column, batch.offsets, batch.loss_mask)
    if _is_of_samples(bundle):
        own = {name: column for name, column in trained.token_columns.items() if not _is_same(batch, bundle, name, column)}
        for name, column in own.items():
            put_column(table, f"own/{name}", column, batch.offsets, batch.loss_mask)
        for name, column in trained.sequence_columns.items():
            table[f"own_sequences/{name}"] = column
        table["trained_mask"] = np.packbits(trained.loss_mask)
        table["trained_names"] = np.frombuffer(json.dumps(sorted(trained.token_columns)).encode(), np.uint8)
    else:
        put_batch(table, "trained", trained)
    for number, update in enumerate(bundle.updates):
        table[f"updates/{number}/sequences"] = update.sequences
        columns = dict(update.columns) | ({} if update.logprobs is None else {":logprobs": update.logprobs})
        for name, column in columns.items():
            table[f"updates/{number}/columns/{name}"] = take_rows(column, trained.offsets, update.sequences)
    return {name: np.ascontiguousarray(array) for name, array in table.items()}


def _is_of_samples(bundle: Bundle) -> bool:
    """Return whether the training batch has the samples' own sequences."""
    batch, trained = bundle.sampled.batch, bundle.trained
    return np.array_equal(batch.offsets, trained.offsets) and np.array_equal(batch.tokens, trained.tokens)


def _is_same(batch: Any, bundle: Bundle, name: str, column: AnyArray) -> bool:
    before = bundle.scored.get(name, batch.token_columns.get(name))
    return before is not None and before.dtype == column.dtype and np.array_equal(before, column)


def _bundle(header: Mapping[str, Any], table: Mapping[str, AnyArray], texts: Mapping[str, Any], directory: Path) -> Bundle:
    batch = take_batch(table, "sampled")
    of_samples: dict[str, Any] = {name: table[f"samples/{name}"] for name in _OF_SAMPLES}
    _require_shapes(of_samples, batch.num_sequences, texts)
    sampled = CollectedRollouts(
        batch=batch,
        **of_samples,
        reward_components={name: table[f"components/{name}"] for name in names_below(table, "components/")},
        turns=take_turns(table, "turns"),
        environment_metrics=header["sampled"]["environment_metrics"],
        failures=_failures(texts),
        **{name: texts[name] for name in texts if name not in ("row_hashes", "endings", "num_endings")},
    )
    if len(sampled.failures) not in (0, len(sampled.first_sequences)):
        raise ValueError(f"{len(sampled.failures)} endings of {len(sampled.first_sequences)} episodes")
    scored = {
        name: take_column(table, f"scored/{name}", batch.offsets, batch.loss_mask) for name in names_below(table, "scored/")
    }
    trained = take_batch(table, "trained") if "trained/tokens" in table else _trained(table, batch, scored)
    return Bundle(
        **{name: header[name] for name in _HEADER_FIELDS},
        row_hashes=texts["row_hashes"],
        sampled=sampled,
        scored=scored,
        trained=trained,
        updates=[_update(one, table, number, trained) for number, one in enumerate(header["updates"])],
        digests_before=header["digests"]["before"],
        digests_after=header["digests"]["after"],
        own_step=own_step_of(header),
        directory=directory,
    )


def _failures(texts: Mapping[str, Any]) -> list[EpisodeFailure | None]:
    """The endings that `_endings` wrote; none where the bundle does not know them."""
    failures: list[EpisodeFailure | None] = [None] * texts.get("num_endings", 0)
    for number, one in texts.get("endings", {}).items():
        failures[int(number)] = EpisodeFailure(**one)
    return failures


def _require_shapes(of_samples: Mapping[str, AnyArray], num_sequences: int, texts: Mapping[str, Any]) -> None:
    """ValueError where a column of the samples has another length or kind, or the rows and their seeds are not as many."""
    for name, array in of_samples.items():
        kind = "i" if name == "num_generated" else "b" if name in _FLAGS else array.dtype.kind
        if array.shape != (num_sequences,) or array.dtype.kind != kind:
            raise ValueError(f"samples/{name} of {array.dtype} {list(array.shape)}, of {num_sequences} samples")
    if len(texts["rows"]) != len(texts["reset_seeds"]):
        raise ValueError(f"{len(texts['rows'])} rows and {len(texts['reset_seeds'])} seeds")


def _trained(table: Mapping[str, AnyArray], batch: Any, scored: Mapping[str, AnyArray]) -> Any:
    """The training batch on the samples' sequences."""
    own = names_below(table, "own/")
    columns = {}
    for name in json.loads(table["trained_names"].tobytes()):
        if name in own:
            columns[name] = take_column(table, f"own/{name}", batch.offsets, batch.loss_mask)
        else:
            columns[name] = scored[name] if name in scored else batch.token_columns[name]
    of_sequences = {name: table[f"own_sequences/{name}"] for name in names_below(table, "own_sequences/")}
    mask = np.unpackbits(table["trained_mask"], count=batch.num_tokens).astype(np.bool_)
    return attrs.evolve(batch, loss_mask=mask, token_columns=columns, sequence_columns=of_sequences)


def _update(record: Mapping[str, Any], table: Mapping[str, AnyArray], number: int, trained: Any) -> Update:
    sequences, prefix = table[f"updates/{number}/sequences"], f"updates/{number}/columns/"
    columns = {
        name.removeprefix(prefix): put_rows([column], trained.offsets, sequences)
        for name, column in table.items()
        if name.startswith(prefix)
    }
    logprobs = columns.pop(":logprobs", None)
    return Update(sequences=sequences, columns=columns, logprobs=logprobs, **record)


def _plain(value: Any) -> Any:
    """The value as JSON holds it, NaN and infinities as Python's; what JSON has no form for is text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
