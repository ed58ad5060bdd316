"""Rules of what becomes of checkpoints: whether the program that measures them can run."""

import os
import shutil
from collections.abc import Iterator

from rlcore.config.checkpoint_evaluation import PLACEHOLDERS, SECTION, filled
from rlcore.config.recipe import Recipe
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Note, Problem


def program_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem where the program is not there."""
    options = recipe.checkpoint_evaluation
    if options is None:
        return
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


def server_notes(plan: RunPlan) -> Iterator[Note]:
    """A server beside the run, on its GPUs, that plans with all of a device: its "auto" knows of nothing else there."""
    options, generator = plan.recipe.checkpoint_evaluation, plan.chosen.get("generator")
    if options is None or not options.serve or plan.device != "cuda" or generator is None or generator.provider is None:
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
