"""Checks a plan by the rules of its parts: those of the core, then each plugin's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from attrs import evolve

from rlcore.config.recipe import Recipe
from rlcore.installed import DISABLE_VARIABLE
from rlcore.model_files import config_number
from rlcore.published_plugins import how_to_install, remedy_for
from rlcore.registry.provider_calls import run_check, shared_kernels
from rlcore.registry.run_parts import LoopObserverEntry, is_disabled, loop_observers, only_function
from rlcore.registry.selection import BACKEND_ROLES
from rlcore.run.plan.algorithm_rules import algorithm_problems
from rlcore.run.plan.auto_options import missing_planner
from rlcore.run.plan.batch_check import batch_problems
from rlcore.run.plan.channel import generator_devices, sharing_problems
from rlcore.run.plan.collector import collector_problems
from rlcore.run.plan.other_models import judge_problems, missing_model_check, model_problems
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, ConfigError, ModelError, ModelSpec, Note, PluginError, Problem, capabilities


def check_plan(plan: RunPlan) -> tuple[Note, ...]:
    """Raise ConfigError with all that is wrong; ModelError where the model alone is. What plugins have to say of a recipe that
    is right."""
    recipe, model = plan.recipe, plan.model
    plugins = (*plan.chosen.values(), *plan.other_environments, *plan.sinks)
    problems: list[Problem | Note] = [
        *observer_problems(plan),
        *algorithm_problems(plan),
        *_unknown_stop_tokens(recipe),
        *agent_problems(plan),
        *sharing_problems(recipe, plan.ranks_per_generator),
        *batch_problems(plan),
        *missing_planner(plan),
        *missing_cache(plan),
    ]
    if any(entry.provider is not None and entry.role in BACKEND_ROLES and entry.provider.reads_model for entry in plugins):
        problems += missing_model_check()
        problems += model_problems(model.path)
        problems += judge_problems(recipe)
    try:
        problems += collector_problems(plan)
    except PluginError:
        raise_problems(problems, model)  # what is wrong with the recipe comes first
        raise
    context = _context(plan)
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
    problems += _kernel_notes(plan)
    return raise_problems(problems, model)


def _context(plan: RunPlan) -> CheckContext:
    """Arguments of the checks of plugins."""
    recipe, needs = plan.recipe, plan.algorithm.needs
    return CheckContext(
        model=plan.model,
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
    """Return the context of the trainer's check for a reference on devices of its own."""
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


def _unknown_stop_tokens(recipe: Recipe) -> Iterator[Problem]:
    """Tokens to stop at that the model does not have, as far as its files are here."""
    vocab_size = config_number(recipe.model.path, "vocab_size")
    for index, token in enumerate(recipe.rollout.stop_token_ids or ()):
        if vocab_size is not None and token >= vocab_size:
            expected = f"a token below {vocab_size}, the model's vocabulary (vocab_size in its config.json)"
            yield Problem(path=f"rollout.stop_token_ids[{index}]", found=str(token), expected=expected)


def _is_about(problem: Problem, model: ModelSpec) -> bool:
    """Return whether a problem names the model's directory or a file in it."""
    directory = expanded(model.path)
    return expanded(problem.path).is_relative_to(directory)


def agent_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problem of data sets of which agents run the episodes of some."""
    providers = {entry.name: entry.provider for entry in plan.environments}
    kinds = {name: found is not None and capabilities.AGENT in found.capabilities for name, found in providers.items()}
    if len(set(kinds.values())) > 1:
        yield Problem(
            path="data.train.mix",
            found=f"the environments {', '.join(kinds)}, of which agents run the episodes of some",
            expected="environments of one kind",
        )


def missing_cache(plan: RunPlan) -> Iterator[Note]:
    """Yield a note where the run has a use for a cache, and none is installed. PluginError where that is not usable."""
    needs = plan.algorithm.needs
    if not needs.reference_logprobs or only_function("reference_cache") is not None:
        return
    if needs.source != "rollouts":
        without = "each epoch computes the reference's log-probabilities anew"
    elif plan.reference_is_apart:
        without = "each step waits for the reference, which is not asked while samples come in"
    else:
        return
    yield Note(path="algorithm.name", text=f"{without}. {remedy_for('reference_cache')}".rstrip())


def schedule_notes(plan: RunPlan) -> Iterator[Note]:
    """A warm-up that does not end, and a decay that does not begin. None where the trainer's plugin has said what it does with
    `[schedule]`: the rate's course is its own then.
    """
    if any(note.startswith("schedule: ") for note in plan.notes):
        return
    schedule, num_updates = plan.recipe.schedule, plan.num_train_steps
    warmup, decays = schedule.warmup_steps, schedule.decay != "constant"
    run = f"the run makes {num_updates} optimizer steps (run.num_steps · updates of a step)"
    if plan.critic_warmup_steps:
        run = f"{run[:-1]}, less critic.warmup_steps)"
    if warmup > num_updates:
        reached = f"{100 * num_updates / warmup:.3g}% of the learning rate is all that it reaches"
        follows = f", and the {schedule.decay} decay never begins" if decays else ""
        yield Note(path="schedule.warmup_steps", text=f"{warmup}, while {run}: {reached}{follows}")
    elif warmup == num_updates and decays:
        yield Note(path="schedule.decay", text=f'"{schedule.decay}" never begins: the warm-up takes {warmup} steps, and {run}')


KEYS: Mapping[str, tuple[str, Callable[[Recipe], bool]]] = {
    "bundles": (
        "logging.bundles_every_n_steps",
        lambda recipe: recipe.logging.bundles_every_n_steps > 0 or recipe.logging.bundles_on_alarm,
    ),
    "checkpoint_evaluation": ("checkpoint_evaluation", lambda recipe: recipe.checkpoint_evaluation is not None),
    "model_card": ("checkpoint.model_card", lambda recipe: recipe.checkpoint.model_card and recipe.checkpoint.export != "none"),
    "push_to_hub": ("checkpoint.push_to_hub", lambda recipe: recipe.checkpoint.push_to_hub is not None),
}
"""Key of a recipe, and whether a recipe sets it, by the name of the observer that it asks for."""


def wanted_observers(recipe: Recipe) -> tuple[LoopObserverEntry, ...]:
    """Return the installed observers that a run has. PluginError where one of them is not usable."""
    found = loop_observers([name for name, (_, is_set) in KEYS.items() if not is_set(recipe)])
    return tuple(entry for entry in found if getattr(entry.provider, "config", None) is None or entry.name in recipe.tables)


def observer_problems(plan: RunPlan) -> Iterator[Problem | Note]:
    """Yield the keys whose observer is not installed, and what the installed ones find wrong."""
    recipe = plan.recipe
    entries = wanted_observers(recipe)
    names = {entry.name for entry in entries}
    for name, (key, is_set) in KEYS.items():
        if is_set(recipe) and name not in names:
            remedy = how_to_install("loop_observer", name, ())
            if is_disabled(name):
                remedy = f"{DISABLE_VARIABLE} disables it: take its name out"
            if name == "model_card":
                remedy += ". Or set checkpoint.model_card = false"
            yield Problem(path=key, found="that, without a usable package for it", expected="both", remedy=remedy)
    for entry in entries:
        yield from entry.check(plan)
