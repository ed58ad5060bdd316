"""Rules of `[checkpoint_evaluation]`: what its command stands for, and whether its program can run."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema.suggestions import did_you_mean
from rlcore.spi import Note, Problem

SECTION = "checkpoint_evaluation"
OF_SERVER = ("port", "url")
"""Placeholders that stand for something of `rlcore serve`."""
PLACEHOLDERS = ("model", "step", "run_directory", "output", *OF_SERVER)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def section_problems(plan: RunPlan) -> Iterator[Problem | Note]:
    """Yield what is wrong with the section of a recipe that has one."""
    options, checkpoint = plan.recipe.checkpoint_evaluation, plan.recipe.checkpoint
    assert options is not None, "only such runs are observed"
    yield from placeholder_problems(options)
    yield from result_problems(options)
    if not checkpoint.every_n_steps and not checkpoint.at_end:
        yield Problem(
            path=SECTION,
            found="the section, with checkpoint.every_n_steps = 0 and checkpoint.at_end = false",
            expected="checkpoints to measure",
            remedy="Set checkpoint.every_n_steps, or leave the section out.",
        )
    if options.serve_arguments and not options.serve:
        yield Problem(
            path=f"{SECTION}.serve_arguments",
            found="arguments, with serve = false",
            expected="none: nothing is served",
            remedy=f"Set {SECTION}.serve = true, or leave them out.",
        )
    yield from program_problems(options)
    yield from server_notes(plan, options)


def placeholder_problems(options: CheckpointEvaluationConfig) -> Iterator[Problem]:
    """Yield a problem for each placeholder of the command that stands for nothing."""
    for number, argument in enumerate(options.command):
        for name in _PLACEHOLDER.findall(argument):
            path = f"{SECTION}.command[{number}]"
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
                hint = did_you_mean(name, PLACEHOLDERS).strip(" ;,.")
                yield Problem(path=path, found=f"{{{name}}}", expected=f"one of {known}", remedy=hint)
            elif name in OF_SERVER and not options.serve:
                remedy = f"Set {SECTION}.serve = true."
                yield Problem(path=path, found=f"{{{name}}}, with serve = false", expected="a server", remedy=remedy)


def result_problems(options: CheckpointEvaluationConfig) -> Iterator[Problem]:
    """A file of figures that is not below {output}, or a pattern that is none."""
    if (pattern := options.result_file) is None:
        return
    found, path = f'"{pattern}"', PurePath(pattern)
    if path.is_absolute() or ".." in path.parts:
        remedy = "Have the program write to {output}, and name the file from there."
        yield Problem(path=f"{SECTION}.result_file", found=found, expected="a path below {output}", remedy=remedy)
        return
    try:
        next(Path(os.devnull).glob(pattern), None)
    except ValueError as error:
        yield Problem(path=f"{SECTION}.result_file", found=f"{found} ({error})", expected="a path or a pattern of files")


def program_problems(options: CheckpointEvaluationConfig) -> Iterator[Problem]:
    """Yield a problem where the program is not there."""
    program, path = options.command[0], options.environment.get("PATH", os.environ.get("PATH", ""))
    is_fixed = filled((program,), dict.fromkeys(PLACEHOLDERS, "")) == (program,)
    if is_fixed and shutil.which(program, path=path) is None:
        where = "a path from where the run is started" if "/" in program else f"looked for in {path or 'an empty PATH'}"
        yield Problem(
            path=f"{SECTION}.command[0]",
            found=f'"{program}", {where}, which is no program that can be run',
            expected="one that is installed",
            remedy="Install it, or name it by its whole path.",
        )


def server_notes(plan: RunPlan, options: CheckpointEvaluationConfig) -> Iterator[Note]:
    """A server beside the run, on its GPUs, that plans with all of a device: its "auto" knows of nothing else there."""
    generator = plan.chosen.get("generator")
    if not options.serve or plan.device != "cuda" or generator is None or generator.provider is None:
        return
    given = " ".join(options.serve_arguments).replace("--generator=", "--generator ")
    keys = [f"generator.{generator.name}.{key}" for key in sorted(generator.provider.planned_options)]
    is_another = "--generator" in given and f"--generator {generator.name}" not in given
    elsewhere = "CUDA_VISIBLE_DEVICES" in options.environment or "run.device=" in given or is_another
    if keys and not elsewhere and not all(f"{key}=" in given for key in keys):
        text = (
            f"the server runs beside training and generation on their GPUs, and takes {' and '.join(keys)} as for a device of "
            "its own. Set that in serve_arguments to what the run leaves free, or name other devices by CUDA_VISIBLE_DEVICES "
            f"in {SECTION}.environment"
        )
        yield Note(path=f"{SECTION}.serve", text=text)


def filled(command: tuple[str, ...], values: Mapping[str, object]) -> tuple[str, ...]:
    """The command with values in place of the placeholders; other braces stay as they are."""
    return tuple(_PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), argument) for argument in command)
