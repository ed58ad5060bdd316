"""Rules of `[receipts]`: what cannot be computed again, and what it costs."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlcore.model_files import read_object, reads_images
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema.file_limits import expanded, memory_bytes
from rlcore.spi import Note, Problem

SECTION = "receipts"
GIB = 2**30


def section_problems(plan: RunPlan) -> Iterator[Problem | Note]:
    """Yield what is wrong with the table, and what a receipt leaves out."""
    options = plan.recipe.tables[SECTION]
    if not options.every_n_steps:  # type: ignore[attr-defined]
        return
    if plan.algorithm.needs.head != "tokens":
        found = f"algorithm {plan.recipe.algorithm.name!r}, whose model has no log-probabilities"
        yield Problem(path=SECTION, found=found, expected="one that trains a policy", remedy=f"Take [{SECTION}] out.")
        return
    yield from _model_problems(plan, 2 + options.max_waiting)  # type: ignore[attr-defined]
    yield from _left_out(plan)


def _model_problems(plan: RunPlan, num_copies: int) -> Iterator[Problem]:
    """Memory and disk that are not there, as far as the model's files are."""
    model = expanded(plan.model.path)
    if not (model / "config.json").is_file():
        return  # on the Hub, or reported by others
    config = read_object(model / "config.json")
    if not isinstance(config, Problem) and reads_images(config):
        expected = "a model of text: nothing prepares images for another computation"
        yield Problem(
            path=SECTION, found=f"{plan.model.path}, which reads images", expected=expected, remedy=f"Take [{SECTION}] out."
        )
    numbers = num_parameters(model)
    needed, there = 4 * numbers, memory_bytes()
    if needed > there:
        found = f"{there / GIB:.1f} GiB of available memory"
        expected = f"{needed / GIB:.1f} GiB: the model in float32, which receipts load in the driver's machine"
        yield Problem(path=SECTION, found=found, expected=expected, remedy=f"Take [{SECTION}] out.")
    target = expanded(plan.recipe.run.directory).absolute()
    while not target.is_dir():
        target = target.parent
    copies, free = num_copies * needed, shutil.disk_usage(target).free
    if copies > free:
        found = f"{free / GIB:.1f} GiB free in {target}"
        expected = f"{copies / GIB:.1f} GiB for {num_copies} copies of the model"
        remedy = f"Lower {SECTION}.max_waiting, or point run.directory elsewhere."
        yield Problem(path=SECTION, found=found, expected=expected, remedy=remedy)


def _left_out(plan: RunPlan) -> Iterator[Note]:
    """Say once what no receipt checks."""
    rollout = plan.recipe.rollout
    if plan.critic is not None:
        yield Note(path=SECTION, text="the critic's values are not computed again")
    if rollout.truncates and rollout.accept_truncation_bias:
        text = "the generator's log-probabilities are of a truncated distribution, and are not compared"
        yield Note(path=SECTION, text=text)
    if rollout.replay_routing:
        yield Note(path=SECTION, text="experts are chosen anew, in float32: single tokens may differ widely")
    if plan.overlaps:
        yield Note(path=SECTION, text="tokens of older weights than a step's are not compared with the generator")


def num_parameters(model: Path) -> int:
    """The numbers in the safetensors of a directory; 0 where it has none. No value is read."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as opened:
                total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            continue  # damaged, which the check of models says
    return total
