"""Rules of what becomes of checkpoints: whether the program that measures them can run, and the model be uploaded."""

import os
import shutil
from collections.abc import Iterator

from rlcore.config.checkpoint_evaluation import PLACEHOLDERS, SECTION, filled
from rlcore.config.recipe import Recipe
from rlcore.installed import is_installed
from rlcore.published_plugins import remedy_for
from rlcore.registry.functions import only_function
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Note, Problem


def program_problems(recipe: Recipe) -> Iterator[Problem]:
    """The program, and the package that starts it."""
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
    if only_function("checkpoint_evaluator") is None:
        found, remedy = "the section, without a checkpoint evaluator", remedy_for("checkpoint_evaluator")
        yield Problem(path=SECTION, found=found, expected="one", remedy=remedy)


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


def hub_problems(recipe: Recipe) -> Iterator[Problem]:
    """The package and the token that an upload needs."""
    key, repository = "checkpoint.push_to_hub", recipe.checkpoint.push_to_hub
    if repository is None:
        return
    if not is_installed("huggingface_hub"):
        remedy = "Run: pip install 'rlcore[hub]'"
        yield Problem(path=key, found="the key, without the package huggingface_hub", expected="the package", remedy=remedy)
        return
    from huggingface_hub import get_token

    if get_token() is None:
        yield Problem(
            path=key,
            found=f'"{repository}", without a token of the Hub',
            expected="one that may write there",
            remedy="Set HF_TOKEN, or run: hf auth login",
        )
