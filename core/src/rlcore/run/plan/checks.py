"""Checks a plan: the model and options of plugins, and combinations that only these make impossible."""

from collections.abc import Iterator, Sequence
from functools import partial

from attrs import evolve

from rlcore.config.asynchrony import AsyncConfig
from rlcore.config.recipe import Recipe, RolloutConfig
from rlcore.model_files import config_number, model_problems
from rlcore.registry.provider_calls import run_check, shared_kernels
from rlcore.registry.selection import BACKEND_ROLES
from rlcore.run.data.levels import LEVEL_WINDOW
from rlcore.run.plan.agent_check import agent_problems
from rlcore.run.plan.auto_options import missing_planner
from rlcore.run.plan.batch_check import batch_problems
from rlcore.run.plan.evaluation_check import program_problems, server_notes
from rlcore.run.plan.generator_placement import generator_devices, sharing_problems
from rlcore.run.plan.hub_check import hub_problems
from rlcore.run.plan.reference_check import judge_problems
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.schema.homes import expanded
from rlcore.spi import AlgorithmNeeds, CheckContext, ConfigError, ModelError, ModelSpec, Note, Problem, capabilities


def check_plan(plan: RunPlan) -> tuple[Note, ...]:
    """Raise ConfigError with all that is wrong; ModelError where the model alone is. What plugins have to say of a recipe that
    is right."""
    recipe, model, needs = plan.recipe, plan.model, plan.algorithm.needs
    plugins = (*plan.chosen.values(), *plan.other_environments, *plan.sinks)
    problems: list[Problem | Note] = [
        *hub_problems(recipe),
        *program_problems(recipe),
        *_impossible(recipe, needs, measures=plan.algorithm.measures),
        *_refills(plan),
        *agent_problems(plan),
        *sharing_problems(recipe, plan.ranks_per_generator),
        *batch_problems(plan),
        *missing_planner(plan),
    ]
    if any(entry.provider is not None and entry.role in BACKEND_ROLES and entry.provider.reads_model for entry in plugins):
        problems += model_problems(model.path)
        problems += judge_problems(recipe)
    context = CheckContext(
        model=model,
        device=plan.device,
        world_size=1 if recipe.cluster is None else recipe.cluster.world_size,
        max_sequence_length=recipe.rollout.max_sequence_length,
        max_microbatch_tokens=plan.max_microbatch_tokens,
        needs_reference=needs.reference_logprobs and not plan.reference_is_apart,
        lora=plan.lora,
        generator_lora=plan.generator_lora,
        reference=None if plan.reference_is_apart else plan.reference,
        head=needs.head,
        critic=plan.critic,
        channel=plan.channel,
        delta=recipe.refit.delta,
        generator_devices=generator_devices(recipe, plan.device, plan.ranks_per_generator),
        planned_options=plan.planned_options,
        replays_routing=recipe.rollout.replay_routing,
        corrects_staleness=needs.corrects_staleness or needs.source != "rollouts",
        max_turns=recipe.rollout.max_turns,
        environment_timeout_s=None if recipe.environment is None else recipe.rollout.environment_timeout_s,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        num_train_steps=plan.num_train_steps,
    )
    for entry in plugins:
        found = list(run_check(entry, context, plugin_config(recipe, entry)))
        if entry.role == "trainer" and plan.critic is not None:
            # The same plugin with the same options, for another model.
            of_critic = evolve(
                context,
                model=plan.critic,
                needs_reference=False,
                lora=None,
                reference=None,
                head="value",
                optimizer=plan.critic_optimizer,
                num_train_steps=plan.num_critic_steps,
            )
            found += run_check(entry, of_critic, plugin_config(recipe, entry))
        if entry.role == "trainer" and plan.reference_is_apart:
            found += run_check(entry, _of_reference(plan, context), plan.reference_config)
        problems += [one for one in map(partial(_with_origin, plan), found) if one not in problems]
    problems += [*_kernel_notes(plan), *server_notes(plan)]
    return raise_problems(problems, model)


def _with_origin(plan: RunPlan, found: Problem | Note) -> Problem | Note:
    """A problem with a value that the run has planned also says what that came from: the recipe has no such value."""
    said = [note.removeprefix(f"{found.path}: ") for note in plan.notes if note.startswith(f"{found.path}: ")]
    if isinstance(found, Note) or not said or found.path.rpartition(".")[2] not in plan.planned_options:
        return found
    return evolve(found, remedy=". ".join((found.remedy.rstrip("."), *said)))


def _kernel_notes(plan: RunPlan) -> Iterator[Note]:
    """Kernels that a trainer or a generator has for the other's sake, which computes by others."""
    backends = [entry for entry in plan.chosen.values() if entry.role in BACKEND_ROLES]
    names = {entry.role: entry.name for entry in backends}
    kernels = {entry.role: shared_kernels(entry, plugin_config(plan.recipe, entry)) for entry in backends}
    if len(kernels) < 2 or len(set(kernels.values())) == 1:
        return
    for role, other in zip(kernels, reversed(kernels), strict=True):
        if kernels[role] is not None:
            text = (
                f"computes by {kernels[role]} kernels, and {other} {names[other]} by {kernels[other] or 'kernels of its own'}: "
                "their log-probabilities agree up to rounding alone. Have both compute by the same, or neither: they cost time"
            )
            yield Note(path=f"{role}.{names[role]}", text=text)


def _of_reference(plan: RunPlan, context: CheckContext) -> CheckContext:
    """What the trainer's check receives for a reference on devices of its own."""
    assert plan.recipe.cluster is not None
    return evolve(
        context,
        model=plan.reference or plan.model,
        world_size=plan.recipe.cluster.num_reference_ranks,
        needs_reference=True,
        needs_policy=False,
        reference=plan.reference,
        lora=None,
        generator_lora=None,
        critic=None,
        channel=None,
        generator_devices=None,
        replays_routing=False,
    )


def raise_problems(found: Sequence[Problem | Note], model: ModelSpec) -> tuple[Note, ...]:
    """Raise ConfigError where there are problems; ModelError where all are about the model. Returns the notes."""
    problems = [one for one in found if isinstance(one, Problem)]
    if problems and all(_is_about(problem, model) for problem in problems):
        raise ModelError(problems)
    if problems:
        raise ConfigError(problems)
    return tuple(one for one in found if isinstance(one, Note))


def _impossible(recipe: Recipe, needs: AlgorithmNeeds, *, measures: bool) -> Iterator[Problem]:
    """Combinations that cannot work with this algorithm, which `measures` held-out examples itself or does not."""
    if needs.source == "rollouts" and recipe.environment is None:
        yield Problem(
            path="environment",
            found="nothing",
            expected=f"an environment, which rewards the rollouts that algorithm {recipe.algorithm.name!r} trains on",
            remedy="Add a section [environment] with a name.",
        )
    if recipe.environment is None and recipe.data.evaluation is not None and not measures:
        yield Problem(
            path="data.evaluation",
            found=f"a held-out set, without an [environment], and algorithm {recipe.algorithm.name!r} measures none itself",
            expected="an environment, which judges the answers",
            remedy="Set environment.name, or leave out [data.evaluation].",
        )
    if needs.head == "value" and recipe.environment is not None:
        yield Problem(
            path="environment",
            found=f"the section, with algorithm {recipe.algorithm.name!r}, which trains a model of values",
            expected="no such section: nothing generates with such a model",
            remedy="Leave it out; held-out rows of [data.evaluation] are judged by the model itself.",
        )
    yield from _reference_problems(recipe, needs)
    yield from _critic_problems(recipe, needs)
    yield from _margin_problems(recipe, needs)
    if needs.source == "rollouts" and recipe.rollout.samples_per_prompt < needs.min_samples_per_prompt:
        yield Problem(
            path="rollout.samples_per_prompt",
            found=str(recipe.rollout.samples_per_prompt),
            expected=f"at least {needs.min_samples_per_prompt} for algorithm {recipe.algorithm.name!r}",
            remedy="Raise it; a group's statistics need several samples.",
        )
    if recipe.async_.max_staleness and needs.source == "rollouts" and not needs.corrects_staleness:
        yield Problem(
            path="async.max_staleness",
            found=f"{recipe.async_.max_staleness}, with algorithm {recipe.algorithm.name!r} as configured, which takes all "
            "samples for the present policy's",
            expected="0, or an algorithm that corrects for older weights by the ratio to the probabilities sampled with",
            remedy="Leave the key out, or turn the algorithm's importance correction on.",
        )
    yield from _pointless(recipe, needs)
    yield from _unknown_stop_tokens(recipe)


def _unknown_stop_tokens(recipe: Recipe) -> Iterator[Problem]:
    """Tokens to stop at that the model does not have, as far as its files are here."""
    vocab_size = config_number(recipe.model.path, "vocab_size")
    for index, token in enumerate(recipe.rollout.stop_token_ids or ()):
        if vocab_size is not None and token >= vocab_size:
            expected = f"a token below {vocab_size}, the model's vocabulary (vocab_size in its config.json)"
            yield Problem(path=f"rollout.stop_token_ids[{index}]", found=str(token), expected=expected)


def _refills(plan: RunPlan) -> Iterator[Problem]:
    """What dynamic sampling does not go with."""
    rollout, needs, algorithm = plan.recipe.rollout, plan.algorithm.needs, plan.recipe.algorithm.name
    if rollout.dynamic_sampling and (found := _equal_by_nature(plan)) is not None:
        meant = f"which algorithm {algorithm!r} is meant for, " if needs.dynamic_sampling else ""
        why, expected, remedy = found
        yield Problem(
            path="rollout.dynamic_sampling",
            found=f"true, {meant}with {why}",
            expected=expected,
            remedy=f"{remedy}, or set rollout.dynamic_sampling = false." if remedy else "Leave the key out.",
        )
    if not rollout.dynamic_sampling and rollout.max_refill_ratio != RolloutConfig().max_refill_ratio:
        yield Problem(
            path="rollout.max_refill_ratio",
            found=f"{rollout.max_refill_ratio:g}, without dynamic_sampling",
            expected="the default: no group is replaced",
            remedy="Set rollout.dynamic_sampling = true, or leave the key out.",
        )


def _equal_by_nature(plan: RunPlan) -> tuple[str, str, str] | None:
    """Why no group teaches more than another by its rewards: what is found, what is expected, and another remedy than to keep
    such groups, if any."""
    needs, algorithm = plan.algorithm.needs, f"algorithm {plan.recipe.algorithm.name!r}"
    if needs.source != "rollouts":
        return f"{algorithm}, which trains on no rollouts", "false: there are no groups", ""
    if not needs.rewards:
        return f"{algorithm}, which reads no rewards", "false: groups of equal rewards teach as much as others", ""
    if plan.recipe.rollout.samples_per_prompt == 1:
        expected = "groups of several samples: the rewards of one are always equal"
        return "samples_per_prompt = 1", expected, "Raise rollout.samples_per_prompt"
    environments, none = plan.environments, capabilities.NO_REWARDS
    if environments and all(one.provider is not None and none in one.provider.capabilities for one in environments):
        names = " and ".join(repr(one.name) for one in environments)
        return f"environment {names}, whose rewards are all 0", "rewards that can differ", "Take an environment that rewards"
    return None


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


def _margin_problems(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """Margins of pairs that no loss reads."""
    for path, config in (("data.train", recipe.data.train), ("data.evaluation", recipe.data.evaluation)):
        parts = {} if config is None else {path: config, **{f"{path}.mix.{name}": one for name, one in config.parts().items()}}
        for key, one in parts.items():
            if one.margin_field is not None and not needs.margins:
                found = f'"{one.margin_field}", with algorithm {recipe.algorithm.name!r}, which reads no margins'
                yield Problem(path=f"{key}.margin_field", found=found, expected="no such key")


def _pointless(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """Keys of [rollout] that do nothing with this algorithm, or what nobody can mean."""
    rollout, algorithm = recipe.rollout, f"with algorithm {recipe.algorithm.name!r}, which"
    if rollout.accept_truncation_bias and not needs.untruncated_sampling:
        yield Problem(
            path="rollout.accept_truncation_bias",
            found=f"true, {algorithm} compares no probabilities with the generator's",
            expected="false: truncated sampling biases nothing there",
        )
    weight = recipe.data.zero_variance_weight
    if weight != 1.0 and (needs.source != "rollouts" or rollout.samples_per_prompt == 1):
        why = f"with algorithm {recipe.algorithm.name!r}, which trains on no rollouts"
        yield Problem(
            path="data.zero_variance_weight",
            found=f"{weight:g}, {why if needs.source != 'rollouts' else 'with rollout.samples_per_prompt = 1'}",
            expected="1.0, the default: no prompt has several samples whose rewards could differ",
        )
    if (problem := _level_problem(recipe, needs)) is not None:
        yield problem
    if needs.source == "rollouts":
        return
    if recipe.async_ != AsyncConfig():
        yield Problem(path="async", found=f"the section, {algorithm} trains on no rollouts", expected="no such section")
    if rollout.replay_routing:
        yield Problem(
            path="rollout.replay_routing",
            found=f"true, {algorithm} trains on no rollouts",
            expected="false: there is no routing to replay",
        )
    if rollout.temperature != 1.0:
        yield Problem(
            path="rollout.temperature",
            found=f"{rollout.temperature}, {algorithm} trains on no rollouts",
            expected="1.0: what is learned would be the probabilities at that temperature",
            remedy="Leave it out; evaluation.temperature is that of evaluations.",
        )


def _level_problem(recipe: Recipe, needs: AlgorithmNeeds) -> Problem | None:
    """Levels rise by the success of whole groups of samples."""
    threshold, window, rollout = recipe.data.curriculum_threshold, recipe.data.level_window, recipe.rollout
    if threshold is None:
        if window in (None, LEVEL_WINDOW):
            return None
        return Problem(
            path="data.level_window", found=f"{window}, without data.curriculum_threshold", expected="no such key, or both"
        )
    why = ""
    if needs.source != "rollouts":
        why = f"with algorithm {recipe.algorithm.name!r}, which trains on no rollouts"
    elif rollout.samples_per_prompt == 1:
        why = "with rollout.samples_per_prompt = 1"
    elif rollout.dynamic_sampling:
        why = "with rollout.dynamic_sampling, which replaces the groups that are solved as a whole"
    elif recipe.data.zero_variance_weight < 1:
        why = f"with data.zero_variance_weight = {recipe.data.zero_variance_weight:g}, which passes over solved rows"
    if not why:
        return None
    expected = "no such key: levels rise with the success of groups of several samples, all of which count"
    return Problem(path="data.curriculum_threshold", found=f"{threshold:g}, {why}", expected=expected)


def _is_about(problem: Problem, model: ModelSpec) -> bool:
    """Return whether a problem names the model's directory or a file in it."""
    directory = expanded(model.path)
    return expanded(problem.path).is_relative_to(directory)
