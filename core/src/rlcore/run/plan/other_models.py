"""Rules of the models of a run: directories, vocabularies, whether the algorithm asks for [reference] and [critic]."""

from collections.abc import Iterator, Mapping

from attrs import evolve

from rlcore.config.recipe import Recipe
from rlcore.model_files import config_number
from rlcore.published_plugins import remedy_for
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.run_parts import only_function
from rlcore.run.data.text import tokenizers
from rlcore.spi import AlgorithmNeeds, ConfigError, ModelError, Note, Problem, Tokenizer

REMEDY = "Take a model that was made with the same tokenizer."


def other_model_problems(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """Sections that the algorithm does not read or that it misses, and keys in them that do nothing."""
    yield from _reference_problems(recipe, needs)
    yield from _critic_problems(recipe, needs)


def _reference_problems(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """A reference that is missing, is no such model, or that nothing compares with."""
    if needs.reference_model and recipe.reference is None:
        yield Problem(
            path="reference",
            found="no such section",
            expected=f"the model that algorithm {recipe.algorithm.name!r} compares the policy with, such as its teacher",
            remedy="Add a section [reference] with the path of a model that has the policy's tokenizer.",
        )
    if recipe.reference is not None and not needs.reference_logprobs:
        yield Problem(
            path="reference",
            found=f"the section, with algorithm {recipe.algorithm.name!r} as configured, which compares with no reference",
            expected="no such section",
            remedy="Leave it out, or give the algorithm's term that compares a weight.",
        )
    cluster, lora = recipe.cluster, recipe.lora
    if cluster is None or not cluster.reference_gpus_per_node:
        if recipe.reference is not None and recipe.reference.trainer:
            yield Problem(
                path="reference.trainer",
                found=f"{', '.join(recipe.reference.trainer)}, without cluster.reference_gpus_per_node",
                expected="no such keys: the trainer's ranks hold the reference, in the policy's layout",
                remedy="Leave them out, or give the reference devices of its own.",
            )
        return
    path, found = "cluster.reference_gpus_per_node", str(cluster.reference_gpus_per_node)
    if not needs.reference_logprobs:
        found = f"{found}, with algorithm {recipe.algorithm.name!r}, which compares with no reference"
        yield Problem(path=path, found=found, expected="0, the default: they would hold nothing")
    elif lora is not None and lora.init_from is not None and recipe.reference is None:
        yield Problem(
            path=path,
            found=f"{found}, with lora.init_from: the reference is the policy as these adapters make it",
            expected="0, since the trainer holds them, or a [reference] that is a whole model",
        )


def _critic_problems(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """A section that nothing reads, and a warm-up that is all there is."""
    critic = recipe.critic
    if critic is None:
        return
    if not needs.critic:
        yield Problem(
            path="critic",
            found=f"the section, with algorithm {recipe.algorithm.name!r}, which trains no critic",
            expected="no such section",
            remedy="Leave it out, or take an algorithm that trains one.",
        )
    elif critic.warmup_steps >= recipe.run.num_steps:
        yield Problem(
            path="critic.warmup_steps",
            found=f"{critic.warmup_steps}, of run.num_steps = {recipe.run.num_steps}",
            expected="fewer: the policy would never be trained",
            remedy="Lower it, or raise run.num_steps.",
        )
    if critic.revision is not None and critic.path is None:
        yield Problem(
            path="critic.revision",
            found=f"{critic.revision!r}, without critic.path",
            expected="none: the critic begins with the policy's model, at model.revision",
            remedy="Leave it out, or name the model in critic.path.",
        )


def judge_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of these models' files, which are read alone."""
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
        expected="the same vocabulary: log-probabilities of other tokens do not concern the policy's",
        remedy=REMEDY,
    )


def missing_model_check() -> Iterator[Note]:
    """Yield a note where no installed package checks the files of models."""
    if only_function("model_check") is None:
        text = f"nothing checks the model's files before the run. {remedy_for('model_check')}".rstrip()
        yield Note(path="model.path", text=text)


def model_problems(path: str) -> tuple[Problem, ...]:
    """Return the faults of a model directory; none without a check. PluginError where the installed one is not usable."""
    check = only_function("model_check")
    if check is None or check.function is None:
        return ()
    with attributed("raised by", check.label):
        return tuple(check.function(path))
