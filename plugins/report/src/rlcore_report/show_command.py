"""`rlcore show`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from rlcore.schema.printable import printable

NUM_GROUPS = 4
"""Groups that are shown unless one is named."""
CHARACTERS = 600
"""Default number of characters of a text that are shown."""


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="The step; by default the last whose samples were kept.")
@click.option("--group", type=click.IntRange(min=0), help="One group of the step, by its number.")
@click.option("--groups", type=click.IntRange(min=1), default=NUM_GROUPS, show_default=True, help="How many groups to show.")
@click.option("--evaluation", is_flag=True, help="The answers of the evaluation behind the step, in place of its samples.")
@click.option(
    "--characters",
    type=click.IntRange(min=0),
    default=CHARACTERS,
    show_default=True,
    help="Most of each text; 0 for all of it.",
)
def show_command(run: Path, step: int | None, group: int | None, groups: int, evaluation: bool, characters: int) -> None:
    """Show samples with their rewards and advantages.

    RUN is a run directory. Each prompt is followed by its group of answers, with what they earned.
    """
    from rlcore.run.storage.saved_run import SavedRun

    saved = SavedRun.find(run)
    table = saved.answers(step) if evaluation else saved.samples(step)
    wanted = ["step", "group", "prompt", "response", "reward", "success", "valid", "finish_reason", "num_generated"]
    wanted += [name for name in ("advantages", "loss_mask") if "advantages" in table.column_names]
    for line in lines_of(table.select(wanted).to_pylist(), group, groups, characters):
        click.echo(line)


def lines_of(samples: Sequence[Mapping[str, Any]], group: int | None, num_groups: int, characters: int) -> Iterator[str]:
    """Yield the printed lines of samples: rows of a table of rollouts in which groups are adjacent.

    click.UsageError where `group` does not exist.
    """
    found = [(number, list(members)) for number, members in groupby(samples, itemgetter("group"))]
    rewards = [sample["reward"] for sample in samples if sample["valid"]]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    step = samples[0]["step"] if samples else 0
    yield f"step {step}: {len(samples)} samples in {len(found)} groups{mean}"
    if group is not None and group not in dict(found):
        expected = f"one of {found[0][0]} to {found[-1][0]}" if found else "none, as the step has no samples"
        raise click.UsageError(f"--group: found {group}; expected {expected}")
    shown = [(number, members) for number, members in found if group is None or number == group][:num_groups]
    for number, members in shown:
        yield f"\ngroup {number}"
        yield from _indented("prompt", members[0]["prompt"], characters)
        for sample in members:
            yield from _indented(_heading(sample), sample["response"], characters)
    if group is None and len(shown) < len(found):
        yield f"\n{len(found) - len(shown)} more groups: --groups {len(found)} shows all, --group N one of them"


def _heading(sample: Mapping[str, Any]) -> str:
    parts = [f"reward {sample['reward']:.3f}"]
    if (advantage := _advantage(sample)) is not None:
        parts.append(f"advantage {advantage}")
    parts += ["solved"] if sample["success"] else []
    parts += [f"{sample['num_generated']} tokens", sample["finish_reason"]]
    return ", ".join(parts if sample["valid"] else [*parts, "masked"])


def _advantage(sample: Mapping[str, Any]) -> str | None:
    """The advantage of the loss tokens; the least and the greatest where they differ, as where turns earn for themselves."""
    if "advantages" not in sample:
        return None
    values = [value for value, counts in zip(sample["advantages"], sample["loss_mask"], strict=True) if counts]
    if not values:
        return None
    low, high = (f"{bound:+.3f}" for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _indented(heading: str, text: str, characters: int) -> Iterator[str]:
    """A text below its heading, without its middle where it is long; what would move the cursor is written out."""
    if 0 < characters < len(text):
        half = characters // 2
        cut = f" … ({len(text) - 2 * half:,} characters) … "
        text = f"{text[:half]}{cut}{text[len(text) - half :]}"
    yield f"  {heading}"
    for line in text.split("\n"):
        yield f"    | {printable(line, len(line))}".rstrip()
