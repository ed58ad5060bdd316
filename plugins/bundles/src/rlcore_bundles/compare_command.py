"""`rlcore compare`: a step under the code of another framework."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import attrs
import click

from rlcore_bundles.json_output import json_text

if TYPE_CHECKING:
    from rlcore_bundles.compared_batch import ComparedBatch
    from rlcore_bundles.peer_comparison import TermRow
    from rlcore_bundles.peer_process import Called
    from rlcore_bundles.rows import Row

UNEXPLAINED = 1
"""The exit code where a term differs and no convention explains it, or nothing could be compared."""
WIDTH = 120
SHOWN = 8
"""Metrics without a counterpart that are printed."""


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"found {value}; expected a finite number of nats", context, option)
    return value


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[OPTION=VALUE]...")
@click.option("--with", "peer", required=True, help="The framework, such as trl or verl.")
@click.option("--python", type=click.Path(path_type=Path), help="The environment or interpreter that has it; else this one.")
@click.option("--checkout", type=click.Path(path_type=Path), help="The framework's sources, where it is no installed package.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the framework, in place of the recipe's."
)
@click.option("--update", type=int, help="The optimizer step of the bundle, counted from 1; by default the last.")
@click.option(
    "--move",
    type=click.FloatRange(min=0),
    default=0.0,
    callback=_finite,
    metavar="NATS",
    help="Add a normal number of this size to each log-probability of the policy, so that clips act.",
)
@click.option(
    "--from", "dump", type=click.Path(path_type=Path), help="The framework's own dump of samples, in place of a bundle's."
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare_command(
    bundle: Path | None,
    overrides: Sequence[str],
    peer: str,
    python: Path | None,
    checkout: Path | None,
    settings: Sequence[str],
    update: int | None,
    move: float,
    dump: Path | None,
    as_json: bool,
) -> None:
    """Compute a bundle's step by another framework's code, and name the conventions that differ.

    OPTION=VALUE changes an option of rlcore's algorithm, such as advantage_epsilon=1e-4. The exit code is 1 where a term
    differs and no convention explains it, and where nothing can be compared.
    """
    if bundle is not None and "=" in str(bundle) and not bundle.exists():
        bundle, overrides = None, [str(bundle), *overrides]
    if (bundle is None) == (dump is None):
        raise click.UsageError(
            "expected either BUNDLE, a folder that `rlcore record` writes, or --from with a framework's dump"
        )
    # Imported here: the command's help needs no torch.
    from rlcore.config.load import raw_from
    from rlcore_bundles.compared_batch import batch_of
    from rlcore_bundles.peer_comparison import compare_terms
    from rlcore_bundles.peer_dumps import dump_batch, read_dump
    from rlcore_bundles.peer_process import adapter, as_record, call_adapter, written
    from rlcore_bundles.storage import read_bundle

    changes = raw_from({}, overrides).values
    adapter(peer)  # an unknown framework is refused before a bundle is read
    found = None if dump is None else read_dump(dump)
    if found is not None:
        batch = dump_batch(found, changes)
    else:
        assert bundle is not None
        batch = batch_of(read_bundle(bundle), update, changes, moved_by=move)
    if found is not None and found.advantages is not None:
        called = written(found, batch)
    else:
        called = call_adapter(peer, batch, dict(map(_pair, settings)), python=python, checkout=checkout)
    rows = compare_terms(batch, called.terms, called.reasons)
    if as_json:
        record = {"framework": as_record(called), "rows": [attrs.asdict(row) for row in rows], "notes": list(batch.notes)}
        click.echo(json_text(record))
    else:
        click.echo("\n".join(lines_of(rows, called, batch)))
    nothing = all(row.verdict == "not compared" for row in rows)
    if nothing or called.failures or any(not row.is_explained for row in rows):
        raise click.exceptions.Exit(UNEXPLAINED)


def lines_of(rows: "Sequence[TermRow]", called: "Called", batch: "ComparedBatch") -> list[str]:
    """The comparison as a table, the conventions behind it, and the framework's settings."""
    from rlcore_bundles.rows import table

    names = list(dict.fromkeys(one for row in rows for one in row.conventions))

    def result(row: "Row") -> str:
        by = ", ".join(str(names.index(one) + 1) for one in getattr(row, "conventions", ()))
        return row.verdict if row.verdict != "differs" else f"differs by convention {by}" if by else "differs, not explained"

    lines = [f"rlcore and {called.version}", "", *table("term", rows, result), ""]
    if names:
        lines.append(f"Conventions of {called.version}:")
        lines += [line for number, name in enumerate(names, 1) for line in _wrapped(f"  {number}. ", name)]
        lines.append("")
    lines += [f"{row.quantity}: not explained. {row.where}." for row in rows if not row.is_explained]
    lines += [f"{part}: {called.version} failed: {text}" for part, text in called.failures.items()]
    lines += [line for note in batch.notes for line in _wrapped("", note)]
    metrics = {name: value for name, value in called.terms.metrics.items() if name not in called.terms.metric_names}
    if called.settings:
        lines.append(f"Settings of {called.version}, from the recipe:")
        lines += [f"  {key} = {value}" for key, value in called.settings.items()]
        lines += [f"  no counterpart: {one}" for one in called.unmapped]
    if metrics:
        shown = ", ".join(f"{name} {value:.6g}" for name, value in list(metrics.items())[:SHOWN])
        more = f", and {len(metrics) - SHOWN} more with --json" if len(metrics) > SHOWN else ""
        lines += _wrapped("", f"Metrics without a counterpart: {shown}{more}")
    return [*lines, result_line(rows, called)]


def result_line(rows: "Sequence[TermRow]", called: "Called") -> str:
    """The result in a sentence."""
    compared = [row for row in rows if row.verdict != "not compared"]
    equal = sum(row.verdict in ("equal", "rounding") for row in compared)
    explained = sum(row.verdict == "differs" and row.is_explained for row in compared)
    unexplained = len(compared) - equal - explained
    parts = [f"{equal} of {len(compared)} terms are equal"]
    parts += [f"{explained} {'differs' if explained == 1 else 'differ'} by a convention"] if explained else []
    parts += [f"{unexplained} without an explanation"] if unexplained else []
    return f"With {called.version}, {', '.join(parts)}."


def _wrapped(begin: str, text: str) -> Iterator[str]:
    yield from wrap(text, WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin))


def _pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise click.UsageError(f"found {text!r}; expected KEY=VALUE")
    return key, value
