"""`rlcore failures`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlcore.schema.printable import printable

if TYPE_CHECKING:
    from rlcore_report.failures import FailureLedger, Sums

MAX_ROWS = 8
"""Rows that are shown of each reason."""
HEAD = ("", "episodes", "trained", "masked", "asked again", "dropped", "mean reward", "|advantage|")
OF_EVALUATIONS = ("", "episodes", "mean reward")


@click.command("failures")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def failures_command(run: Path, as_json: bool) -> None:
    """Say how the episodes of a run ended, and what failures moved.

    RUN is a run directory. Each episode ends as policy, environment, grader, tool, infrastructure or limit. For each of these
    the table has the number of episodes, what became of them, and their part in reward and gradient.
    """
    from rlcore.run.storage.saved_run import SavedRun
    from rlcore.spi import CheckpointError
    from rlcore_report.failures import FILE, read_ledger

    directory = SavedRun.find(run).path
    ledger = read_ledger(directory)
    if ledger is None:
        raise CheckpointError(
            f"found no {FILE} in {directory}; expected that of a run which samples from its policy: rlcore-rollout writes it "
            "in each step"
        )
    if as_json:
        click.echo(json.dumps(ledger.as_json(), indent=1))
    else:
        for line in lines_of(ledger, str(run)):
            click.echo(printable(line))


def lines_of(ledger: "FailureLedger", name: str) -> Iterator[str]:
    """Yield the printed text."""
    episodes = sum(sums.episodes for sums in ledger.kinds.values())
    yield f"{name}: {ledger.num_steps} steps, {episodes:,} episodes"
    yield from _table([HEAD, *(_row(kind, sums) for kind, sums in ledger.kinds.items())])
    yield "|advantage| is the mean over steps of the episodes' share of sum |advantage| over the step's loss tokens."
    before, after = ledger.mean_reward, ledger.mean_reward_as_zero
    if before is not None and after is not None and any(sums.of_outcome["masked"] for sums in ledger.kinds.values()):
        yield (
            "Masked episodes are in no loss and in no group's mean. As rewards of 0 they would have moved the mean reward "
            f"from {before:.3f} to {after:.3f}."
        )
    yield from _reasons(ledger)
    if (measured := ledger.evaluations) is not None:
        episodes = sum(sums.episodes for sums in measured.kinds.values())
        yield ""
        yield f"{measured.num_steps} evaluations, {episodes:,} episodes; one that failed counts as unsolved"
        rows = [(kind, f"{sums.episodes:,}", f"{sums.mean_reward or 0.0:.3f}") for kind, sums in measured.kinds.items()]
        yield from _table([OF_EVALUATIONS, *rows])
        yield from _reasons(measured)


def _reasons(ledger: "FailureLedger") -> Iterator[str]:
    """Yield each reason with its steps and rows."""
    for (kind, outcome, reason), sums in ledger.reasons.items():
        yield ""
        yield f"{kind}, {outcome}: {sums.episodes:,} x {reason}"
        yield f"  steps {_ranges(sorted(sums.steps))}"
        if sums.rows:
            shown = sums.rows.most_common(MAX_ROWS)
            more = ", and others" if sum(count for _, count in shown) < sums.episodes else ""
            yield f"  {', '.join(f'{row} x {count}' for row, count in shown)}{more}"


def _row(kind: str, sums: "Sums") -> tuple[str, ...]:
    counts = (sums.episodes, *(sums.of_outcome[outcome] for outcome in HEAD[2:6]))
    reward, share = sums.mean_reward, sums.share
    return (
        kind,
        *(f"{count:,}" for count in counts),
        "-" if reward is None else f"{reward:.3f}",
        "-" if share is None else f"{100 * share:.1f} %",
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines whose first column is aligned to the left, and all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        yield "  ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))])


def _ranges(steps: Sequence[int]) -> str:
    """Numbers as ranges, such as "1-3, 7"; the middle is left out where there are many."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(texts if len(texts) <= MAX_ROWS else [*texts[: MAX_ROWS - 1], "…", texts[-1]])
