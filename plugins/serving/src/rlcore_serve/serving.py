"""Chooses the model and the plugin of `rlcore serve`: a run's model, one of its checkpoints, or any other model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore import spi
from rlcore.config.load import raw_from, read_raw
from rlcore.config.recipe import Recipe
from rlcore.gpu import Device, detect_device
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.selection import select
from rlcore.run.plan.channel import has_other_model
from rlcore.run.plan.run_plan import dtype_of
from rlcore.run.plan.sections import convert_recipe, plugin_config
from rlcore.run.storage.checkpoint import MANIFEST, list_checkpoints, newest_checkpoint, require_intact
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import similar_path
from rlcore_model_files.directory import is_hub_name, model_problems
from rlcore_model_files.file_lock import file_lock
from rlcore_serve.exporting import export_checkpoint
from rlcore_serve.generator_server import Address, Note, serve_generator
from rlcore_serve.sessions.server import listening

RECIPE = "recipe.toml"
EXPORT_LOCK = ".export-lock"
ORIGIN = "exported-from.sha256"
"""File of an export: the digest of the manifest of the checkpoint that it was made of."""


@frozen(kw_only=True)
class Target:
    """The run, checkpoint or model directory that the user named."""

    model: str | None
    """A model's directory or Hub name; None where a checkpoint has to be exported first."""
    checkpoint: Path | None = None
    run: Path | None = None
    """The run directory that either belongs to."""


@frozen(kw_only=True, eq=False)
class Serving:
    """A checked choice of what serves what."""

    target: Target
    recipe: Recipe
    """The run's, or one that says nothing but the model."""
    registry: Registry
    generator: Entry
    device: Device


def find_target(named: str, checkpoint: str | None, note: Note) -> Target:
    """Find the model that RUN_OR_MODEL and --checkpoint name. A run's exported model comes before its checkpoints, of which the
    newest intact one is taken. CheckpointError where there is none, ConfigError where the path is something else."""
    path = expanded(named)
    if (path / RECIPE).is_file():
        return _run_target(path, checkpoint, note)
    if checkpoint is not None:
        raise spi.ConfigError(
            [
                spi.Problem(
                    path="--checkpoint", found=f"{checkpoint}, with {named}", expected=f"a run directory, with a {RECIPE}"
                )
            ]
        )
    if (path / MANIFEST).is_file():
        return Target(model=None, checkpoint=require_intact(path), run=path.resolve().parent.parent)
    is_path = path.exists() or not is_hub_name(named) or ("/" in named and path.parent.is_dir())
    if is_path and not (path / "config.json").is_file():
        raise spi.ConfigError([_nothing_to_serve(named, path)])
    return Target(model=str(path) if path.exists() else named)


def prepare_serving(
    target: Target, overrides: Sequence[str], generator: str | None, *, registry: Registry | None = None
) -> Serving:
    """Read the run's recipe, if there is one, and choose the generator that serves: `generator` where it is given, else the
    recipe's. `registry` stands in for the installed plugins, in tests. PluginError where it would serve another model."""
    raw = read_raw(target.run / RECIPE, overrides) if target.run is not None else raw_from(_bare(target), overrides)
    recipe, registry = convert_recipe(raw, registry)
    device = recipe.run.device if recipe.run.device != "auto" else detect_device()
    needs = {spi.capabilities.OWN_WEIGHTS: "no trainer brings weights to what is served"}
    entry = select(
        registry, "generator", generator or recipe.generator.name, device=device, needs=needs, dtype=dtype_of(recipe, device)
    )
    if has_other_model(entry):
        named = target.checkpoint if target.model is None else target.model
        raise spi.PluginError(
            f"{entry.label} answers with the model that its own section names, and would not serve {named}. "
            "Name another generator by --generator"
        )
    return Serving(target=target, recipe=recipe, registry=registry, generator=entry, device=device)


def check_address(host: str, port: int) -> None:
    """Check, before anything is loaded, that a server can listen there. ConfigError where it cannot, PluginError where aiohttp
    is missing."""
    listening(host, port).close()


def served_model(serving: Serving, note: Note) -> str:
    """The model's directory or Hub name, exported from the checkpoint first where it has to be."""
    target = serving.target
    if target.model is not None:
        return target.model
    assert target.checkpoint is not None
    assert target.run is not None
    final = target.run / "exports" / target.checkpoint.name
    origin = final / ORIGIN
    # Of several servers of a run that begin together one exports, and the others take what it has made.
    with file_lock(
        target.run / EXPORT_LOCK, lambda: note("waiting for another server, which exports a checkpoint of this run")
    ):
        try:
            digest = hashlib.sha256((target.checkpoint / MANIFEST).read_bytes()).hexdigest()
        except FileNotFoundError as error:
            raise spi.CheckpointError(
                f"{target.checkpoint} is gone since it was looked at: its run keeps the newest checkpoints alone "
                "(checkpoint.keep). Serve a newer one"
            ) from error
        if not (origin.is_file() and origin.read_text() == digest):
            note(f"exporting {target.checkpoint} to {final}")
            export_checkpoint(serving.recipe, serving.registry, serving.device, target.checkpoint, final, mark=(ORIGIN, digest))
    return str(final)


def serve(
    serving: Serving,
    model: str,
    *,
    host: str,
    port: int,
    name: str | None,
    max_sequence_length: int | None,
    api_key: str | None,
    note: Note,
) -> None:
    """Serve until the process is interrupted."""
    recipe, entry = serving.recipe, serving.generator
    assert entry.provider is not None
    if entry.provider.reads_model and (problems := model_problems(model)):
        raise spi.ModelError(problems)
    serve_generator(
        entry,
        plugin_config(recipe, entry),
        model=spi.ModelSpec(
            path=model,
            revision=recipe.model.revision if serving.target.run is None else None,
            dtype=dtype_of(recipe, serving.device),
            trust_remote_code=recipe.model.trust_remote_code,
        ),
        chat=recipe.model,
        device=serving.device,
        address=Address(host=host, port=port, name=name or default_name(serving.target), api_key=api_key),
        tool_parser=recipe.rollout.tool_parser,
        max_sequence_length=max_sequence_length,
        note=note,
    )


def default_name(target: Target) -> str:
    """Return the model's name for clients: the run's name, the last part of a directory's, or the Hub name itself."""
    if target.run is not None:
        return target.run.resolve().name
    assert target.model is not None
    return Path(target.model).resolve().name if Path(target.model).exists() else target.model


def _run_target(run: Path, checkpoint: str | None, note: Note) -> Target:
    if checkpoint is not None:
        return Target(model=None, checkpoint=require_intact(named_checkpoint(run, checkpoint)), run=run)
    if (run / "model" / "config.json").is_file():
        return Target(model=str(run / "model"), run=run)
    newest = newest_checkpoint(run / "checkpoints", note)
    if newest is None:
        raise spi.CheckpointError(f"{run} holds neither an exported model nor a checkpoint; expected a run that has saved one")
    return Target(model=None, checkpoint=newest, run=run)


def _nothing_to_serve(named: str, path: Path) -> spi.Problem:
    expected = f"a run directory (with a {RECIPE}), one of its checkpoints, a model directory, or a Hub name"
    if path.exists() and named:
        found = f"{named}, {'a directory' if path.is_dir() else 'a file'} that is neither"
        return spi.Problem(path="RUN_OR_MODEL", found=found, expected=expected)
    found = f"{named or 'nothing'}, which does not exist"
    return spi.Problem(path="RUN_OR_MODEL", found=found, expected=expected, remedy=similar_path(path))


def named_checkpoint(run: Path, name: str, option: str = "--checkpoint") -> Path:
    """Find a checkpoint of a run by the value of an option: step-N with or without its zeros, or the number alone."""
    found = list_checkpoints(run / "checkpoints")
    number = name.removeprefix("step-")
    if number.isdecimal():
        for path in found:
            if int(path.name.removeprefix("step-")) == int(number):
                return path
    listing = ", ".join(path.name for path in found) or "none"
    raise spi.CheckpointError(f"{option}: found no {name} in {run / 'checkpoints'}; there are {listing}")


def _bare(target: Target) -> dict[str, Any]:
    """A recipe for a model that no run belongs to; the names that a recipe must have beside it are never looked up."""
    return {
        "model": {"path": target.model},
        "algorithm": {"name": "none"},
        "data": {"train": {"source": "jsonl", "path": "none.jsonl"}},
    }
