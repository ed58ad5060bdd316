"""`rlcore check`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlcore.cli.arguments import recipe_arguments
from rlcore.schema.file_limits import expanded
from rlcore.schema.printable import printable

if TYPE_CHECKING:
    from rlcore.run.plan.run_plan import RunPlan
    from rlcore.spi import ClusterConfig, Role


DATA = {"train": "train data", "evaluation": "held-out data"}
MAX_LINES, MAX_CHARACTERS = 24, 2000
"""Most characters of the first prompt that are shown."""


@click.command("check")
@recipe_arguments
def check_command(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Check a recipe and say what would run.

    Reports every unknown key, wrong type and impossible combination at once. Reads the data whole, as a run does at its start,
    and shows the first prompt as the model will see it, with the answer to learn or the fields that the environment gets.
    Builds no model, and fetches nothing from the Hub.
    """
    from rlcore.run.plan.prepare import prepare, require_device
    from rlcore_doctor.preview import preview

    prepared = prepare(recipe, overrides)
    require_device(prepared)
    for warning in prepared.registry.warnings:
        click.echo(f"warning: {printable(warning)}", err=True)
    for note in prepared.notes:
        click.echo(f"note: {printable(str(note))}", err=True)
    seen = preview(prepared)
    for note in seen.notes:
        click.echo(f"note: {printable(str(note))}", err=True)
    click.echo(f"ok: {recipe}")
    for name, text in _lines(prepared):
        click.echo(f"  {name:<13} {printable(text)}")
    for split, rows in seen.rows.items():
        click.echo(f"  {DATA[split]:<13} {rows}")
    prompt = {} if seen.first_prompt is None else {"first prompt": seen.first_prompt}
    for name, text in {**prompt, **seen.target}.items():
        click.echo(f"  {printable(name)}")
        for line in _shortened(text):
            click.echo(f"    | {printable(line)}")


def _shortened(text: str) -> Iterator[str]:
    """Return a prompt's first lines, to be shown."""
    lines = text[:MAX_CHARACTERS].split("\n")
    yield from lines[:MAX_LINES]
    if len(text) > MAX_CHARACTERS or len(lines) > MAX_LINES:
        yield f"... ({len(text):,} characters)"


def _lines(prepared: "RunPlan") -> Iterator[tuple[str, str]]:
    """Yield the names of the plugins that would run."""
    from rlcore.run.storage.run_directory import RunDirectory

    recipe = prepared.recipe
    for role in ("trainer", "generator", "algorithm", "environment"):
        if role in prepared.chosen:
            yield role, _plugin(prepared, role, getattr(recipe, role).name)
    for sink in prepared.sinks:
        yield "sink", f"{sink.name} {sink.version} of {sink.distribution}"
    for observer in prepared.observers:
        how = "global" if observer.is_global else "named"
        yield "observer", f"{observer.name} {observer.version} of {observer.distribution} ({how})"
    where = "" if expanded(recipe.model.path).exists() else ", not a directory here: to be fetched from the Hub"
    yield "model", f"{recipe.model.path}{where} ({prepared.model.dtype} on {prepared.device})"
    if recipe.cluster is not None:
        if "execution" in prepared.chosen:
            yield "execution", _plugin(prepared, "execution", recipe.cluster.execution)
        yield "cluster", _cluster(prepared, recipe.cluster)
    if prepared.channel is not None:
        yield "refit", prepared.channel
    training, rollout = recipe.training, recipe.rollout
    batch = f"{training.prompts_per_step} prompts"
    if prepared.algorithm.needs.source == "preferences":
        batch += " with two answers each"
    elif prepared.algorithm.needs.source == "rollouts":
        batch += f" x {rollout.samples_per_prompt} samples of at most {rollout.max_response_tokens} tokens"
    yield "each step", f"{batch}, {training.updates_per_step} update(s)"
    yield "steps", str(recipe.run.num_steps)
    yield "evaluation", _evaluation(prepared)
    yield "run directory", str(RunDirectory.of(recipe.run).path)


def _plugin(prepared: "RunPlan", role: "Role", wanted: str) -> str:
    """A chosen plugin and how it was chosen, given what the recipe says."""
    entry = prepared.chosen[role]
    how = "named"
    if wanted == "auto" and entry.provider is not None:
        how = f"auto, priority {entry.provider.priority}"
    return f"{entry.name} {entry.version} of {entry.distribution} ({how})"


def _cluster(prepared: "RunPlan", cluster: "ClusterConfig") -> str:
    """Describe which devices trainer and generator use."""
    ranks = f"{cluster.nodes} x {cluster.ranks_per_node} {'GPU' if prepared.device == 'cuda' else 'process'}(s) train"
    if cluster.reference_gpus_per_node:
        ranks = f"{cluster.nodes} x {cluster.reference_gpus_per_node} hold the reference, {ranks}"
    if "generator" not in prepared.chosen:
        return ranks
    if cluster.placement == "separate":
        return f"{ranks}, {cluster.nodes} x {cluster.generator_gpus_per_node} generate"
    return f"{ranks} and generate in turn" + (
        f", each {prepared.ranks_per_generator} with one generator" if prepared.ranks_per_generator > 1 else ""
    )


def _evaluation(prepared: "RunPlan") -> str:
    options = prepared.recipe.evaluation
    if not (prepared.recipe.evaluates or prepared.measures_examples):
        return "off"
    every = f"every {options.every_n_steps} steps" if options.every_n_steps > 0 else ""
    return ", ".join(filter(None, ("at the start" if options.at_start else "", every, "at the end" if options.at_end else "")))
