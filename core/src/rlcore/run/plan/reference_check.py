"""Whether the model of [reference] can judge what the policy says: it has to know the same tokens by the same numbers."""

from collections.abc import Iterator

from attrs import evolve

from rlcore.config.recipe import Recipe
from rlcore.model_files import config_number, model_problems
from rlcore.run.data.tokenizer import PretrainedTokenizer, Tokenizer, load_tokenizer
from rlcore.spi import ConfigError, ModelError, ModelSpec, Problem

SECTION = "reference.path"
REMEDY = "Take a model that was made with the same tokenizer."


def reference_problems(model: ModelSpec, reference: ModelSpec | None) -> Iterator[Problem]:
    """What is wrong with the files of a reference, from these alone."""
    if reference is None:
        return
    yield from model_problems(reference.path)
    rows, needed = config_number(reference.path, "vocab_size"), config_number(model.path, "vocab_size")
    if rows is not None and needed is not None and rows < needed:
        yield Problem(
            path=SECTION,
            found=f"{reference.path} with vocab_size = {rows}",
            expected=f"at least {needed}, that of the policy {model.path}, which may sample any of its tokens",
            remedy=REMEDY,
        )


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """ConfigError where the reference's tokenizer has another vocabulary than the policy's."""
    if recipe.reference is None or not isinstance(tokenizer, PretrainedTokenizer):
        return
    named = evolve(recipe.model, path=recipe.reference.path, revision=recipe.reference.revision, chat_template=None)
    try:
        other = load_tokenizer(named)
    except ModelError as error:
        raise ModelError([evolve(problem, path=SECTION) for problem in error.problems]) from error
    assert isinstance(other, PretrainedTokenizer), "load_tokenizer loads no others"
    mine, theirs = tokenizer.backend.get_vocab(), other.backend.get_vocab()
    different = sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
    if not different:
        return
    first = different[0]
    raise ConfigError(
        [
            Problem(
                path=SECTION,
                found=f"{recipe.reference.path}, whose tokenizer differs from the policy's in {len(different)} tokens: "
                f"{first!r:.40} is number {theirs.get(first, 'none')} there and {mine.get(first, 'none')} here",
                expected="the same vocabulary: log-probabilities of other tokens say nothing of the policy's",
                remedy=REMEDY,
            )
        ]
    )
