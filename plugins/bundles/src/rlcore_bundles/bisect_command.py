"""`rlcore bisect`: the component that brings the difference of two steps."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import click

from rlcore.run.storage.saved_run import SavedRun
from rlcore.spi import ConfigError, Problem
from rlcore_bundles.bisecting import bisect
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.header import HEADER
from rlcore_bundles.interpreters import executable
from rlcore_bundles.json_output import json_text
from rlcore_bundles.recording import record
from rlcore_bundles.run_difference import run_difference
from rlcore_bundles.storage import read_bundle
from rlcore_bundles.swaps import MOST_REPLAYS
from rlcore_bundles.verdicts import Bisection

FOLDER = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("good", type=FOLDER)
@click.argument("bad", type=FOLDER)
@click.option("--step", type=int, help="The step, where GOOD and BAD are runs; by default the first in which they part.")
@click.option(
    "--python",
    "pythons",
    type=FOLDER,
    multiple=True,
    help="Another environment, or its interpreter, which may have other versions of packages; may be given several times.",
)
@click.option("--replays", type=click.IntRange(4), default=MOST_REPLAYS, show_default=True, help="The most replays.")
@click.option("--trust-remote-code", "trusts", is_flag=True, help="Execute code that comes with a model, if the recipe does.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def bisect_command(
    good: Path, bad: Path, step: int | None, pythons: Sequence[Path], replays: int, trusts: bool, as_json: bool
) -> None:
    """Name the component that makes two steps differ.

    GOOD and BAD are bundles or run directories. A few replays swap components: trainer, kernels, dtypes, packing,
    packages, environment, reward, chat template, options of the algorithm. The exit code is 1 where the two differ.
    """

    def tell(text: str) -> None:
        click.echo(text, err=True)

    pythons = [Path(executable(python)) for python in pythons]
    with _bundles(good, bad, step, tell) as pair:
        found = None if pair is None else bisect(*pair, pythons, most=replays, trusts=trusts, tell=tell)
    if found is None:
        found = Bisection(components=[], kind="none")
    click.echo(json_text(attrs.asdict(found)) if as_json else "\n".join(lines_of(found)))
    if found.kind != "none":
        click.get_current_context().exit(1)


@contextmanager
def _bundles(good: Path, bad: Path, step: int | None, tell: Callable[[str], None]) -> Iterator[tuple[Bundle, Bundle] | None]:
    """Yield both bundles; of two runs those of a step, recorded where the runs have not kept it. None where runs are equal."""
    are_bundles = [(path / HEADER).is_file() for path in (good, bad)]
    if any(are_bundles):
        problems = []
        if not all(are_bundles):
            found = f"{bad if are_bundles[0] else good}, which is none"
            problems.append(Problem(path="GOOD, BAD", found=found, expected="two bundles or two runs"))
        if step is not None:
            problems.append(Problem(path="--step", found=str(step), expected="none with bundles, which are one step each"))
        if problems:
            raise ConfigError(problems)
        yield read_bundle(good), read_bundle(bad)
        return
    if step is None:
        step = run_difference(good, bad).step
    if step is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_of_run(run, step, Path(folder) / name, tell) for run, name in ((good, "good"), (bad, "bad")))
        yield first, second


def _of_run(run: Path, step: int, folder: Path, tell: Callable[[str], None]) -> Bundle:
    """The bundle of a run's step: the one that it keeps, if that has weights where the step needs them, or a new one."""
    kept = SavedRun.find(run).path / "bundles" / f"step-{step:06d}"
    if (kept / HEADER).is_file():
        bundle = read_bundle(kept)
        if bundle.weights != "none" or bundle.weight_version == 0:
            return bundle
    found = record(run, step, folder, weights="state", tell=tell)
    if found.differing:
        tell(f"step {step} of {run} is not repeated here in {len(found.differing)} figures: its bundle shows this installation")
    return read_bundle(folder)


def lines_of(found: Bisection) -> Iterator[str]:
    """Yield the result in sentences."""
    if found.kind == "none":
        yield "Nothing differs."
        return
    names = [name if name[0].isupper() else f"the {name}" for name in found.components]
    listed = " together with ".join(names)
    verb = "brings" if len(names) == 1 else "bring"
    size = "a difference within rounding" if found.is_rounding else "the difference"
    if not found.is_complete:
        yield f"No replay was left to choose: one or several of {', '.join(names)} {verb} {size}."
    else:
        yield f"{listed[0].upper()}{listed[1:]} {verb} {size}."
    yield f"  first in {found.quantity}{f': {found.where}' if found.where else ''}"
    if found.difference:
        yield f"  by {found.difference:.4g}; rounding brings at most {found.bound:.3g}"
    yield from (f"  {line}" for line in found.lines)
    if found.remark:
        yield f"  {found.remark}"
    left = [one for one in found.others if one not in found.lines]
    if left:
        yield "Also different, without bringing it:"
        yield from (f"  {one}" for one in left)
    yield f"{len(found.replays)} replays"
