"""What would keep checkpoints from being measured, as far as it is known before the run."""

import os
import shutil
from collections.abc import Iterator

from rlcore.config.checkpoint_evaluation import PLACEHOLDERS, SECTION, filled
from rlcore.config.recipe import Recipe
from rlcore.installed import is_installed
from rlcore.spi import Problem


def program_problems(recipe: Recipe) -> Iterator[Problem]:
    """The program, and the library that serves."""
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
    if options.serve and not is_installed("aiohttp"):
        found = "true, without the package aiohttp"
        remedy = "Run: pip install 'rlcore[serve]'"
        yield Problem(path=f"{SECTION}.serve", found=found, expected="the package, which serves models", remedy=remedy)
