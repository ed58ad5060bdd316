"""Checks that the models of [reference] and [critic] have the policy's vocabulary."""

from collections.abc import Iterator, Mapping

from attrs import evolve

from rlcore.config.recipe import Recipe
from rlcore.model_files import config_number, model_problems
from rlcore.run.data.text import tokenizers
from rlcore.spi import ConfigError, ModelError, Problem, Tokenizer

REMEDY = "Take a model that was made with the same tokenizer."


def judge_problems(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with the files of these models, from these alone."""
    needed = config_number(recipe.model.path, "vocab_size")
    for section, path, _ in _judges(recipe):
        yield from model_problems(path)
        rows = config_number(path, "vocab_size")
        if rows is not None and needed is not None and rows < needed:
            yield Problem(
                path=section,
                found=f"{path} with vocab_size = {rows}",
                expected=f"at least {needed}, that of the policy {recipe.model.path}, which may sample any of its tokens",
                remedy=REMEDY,
            )


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """ConfigError where the tokenizer of one of them has another vocabulary than the policy's."""
    if (vocabulary := tokenizer.vocabulary) is None:
        return
    problems = [
        problem
        for section, path, revision in _judges(recipe)
        if (problem := _other_vocabulary(recipe, vocabulary, section, path, revision)) is not None
    ]
    if problems:
        raise ConfigError(problems)


def _judges(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Key, path and revision of each model that a recipe names beside the policy."""
    if recipe.reference is not None:
        yield "reference.path", recipe.reference.path, recipe.reference.revision
    if recipe.critic is not None and recipe.critic.path is not None:
        yield "critic.path", recipe.critic.path, recipe.critic.revision


def _other_vocabulary(recipe: Recipe, mine: Mapping[str, int], section: str, path: str, revision: str | None) -> Problem | None:
    try:
        other = tokenizers().load_tokenizer(evolve(recipe.model, path=path, revision=revision, chat_template=None))
    except ModelError as error:
        raise ModelError([evolve(problem, path=section) for problem in error.problems]) from error
    theirs = other.vocabulary or {}
    different = sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
    if not different:
        return None
    first = different[0]
    return Problem(
        path=section,
        found=f"{path}, whose tokenizer differs from the policy's in {len(different)} tokens: "
        f"{first!r:.40} is number {theirs.get(first, 'none')} there and {mine.get(first, 'none')} here",
        expected="the same vocabulary: what is told of other tokens says nothing of the policy's",
        remedy=REMEDY,
    )
