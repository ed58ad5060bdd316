"""Checks, before the run, whether its exported model can be uploaded."""

from collections.abc import Iterator

from rlcore.config.recipe import Recipe
from rlcore.installed import is_installed
from rlcore.spi import Problem

KEY = "checkpoint.push_to_hub"


def hub_problems(recipe: Recipe) -> Iterator[Problem]:
    """The package and the token that an upload needs."""
    repository = recipe.checkpoint.push_to_hub
    if repository is None:
        return
    if not is_installed("huggingface_hub"):
        remedy = "Run: pip install 'rlcore[hub]'"
        yield Problem(path=KEY, found="the key, without the package huggingface_hub", expected="the package", remedy=remedy)
        return
    from huggingface_hub import get_token

    if get_token() is None:
        yield Problem(
            path=KEY,
            found=f'"{repository}", without a token of the Hub',
            expected="one that may write there",
            remedy="Set HF_TOKEN, or run: hf auth login",
        )
