"""Chooses the plugins of a run: those that the recipe names, or the best ones that can do what it needs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from rlcore.config.data import RowsConfig
from rlcore.config.data_problems import NO_FILES
from rlcore.config.model import CriticConfig
from rlcore.config.recipe import Recipe
from rlcore.gpu import Device
from rlcore.model_files import CONFIG_FILE, read_object, reads_images
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.binding import build_algorithm
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.plugin_errors import first_line
from rlcore.registry.provider_calls import as_configured
from rlcore.registry.selection import AUTO, AUTO_ROLES, BACKEND_ROLES, missing_text, passed_over, require_named, select
from rlcore.registry.states import entries_by_name
from rlcore.run.plan.algorithm_rules import mask_needs, replays_sampling_mask
from rlcore.run.plan.channel import takes_weights
from rlcore.run.plan.run_plan import RunPlan, dtype_of
from rlcore.run.plan.sections import execution_needs, observer_options, plugin_config
from rlcore.schema.file_limits import expanded
from rlcore.spi import Algorithm, DtypeName, OptimizerSpec, PluginError, Problem, Role, capabilities


def choose_plugins(recipe: Recipe, registry: Registry, device: Device, *, measures_own: bool = False) -> RunPlan:
    """The plan with its plugins, and nothing yet of what follows from them. `measures_own`: the model is measured as it is, so
    that a generator which takes no weights answers with its own, and no trainer is needed.

    PluginError tells of all that the recipe names and cannot be used; ConfigError where an observer lacks options.
    """
    registry = evolve(registry, entries=tuple(_without(recipe, entry) for entry in registry.entries))
    plan = _choose(recipe, registry, device, measures_own, rounds=False)
    trainer = plan.chosen.get("trainer")
    if trainer is None or capabilities.EXACT_LOGPROBS not in trainer.taken_away:
        return plan
    # Which trainer "auto" takes depends on what the algorithm needs, and that on whether the trainer rounds.
    return _choose(recipe, registry, device, measures_own, rounds=True)


def _choose(recipe: Recipe, registry: Registry, device: Device, measures_own: bool, *, rounds: bool) -> RunPlan:
    """The plan for a trainer that `rounds`, by its section, and so computes other log-probabilities than a plain pass."""
    errors, unusable = list[PluginError](), list[PluginError]()

    def take(role: Role, name: str, into: list[PluginError] = errors, **wanted: Any) -> list[Entry]:
        with _collected(into):
            return [select(registry, role, name, device=device, **wanted)]
        return []

    with _collected(errors):
        observer_options(recipe, registry.observers(recipe.observers.names))
    for key, source in _sources(recipe):
        with _collected(errors):
            require_named(key, source, registry.data_sources)
    dtype = dtype_of(recipe, device)
    into, names = ([], _default_sinks(registry)) if recipe.sinks.names is None else (errors, recipe.sinks.names)
    sinks = tuple(entry for name in names for entry in take("sink", name, into=into, needs={}))
    needs, found = {"generator": generator_needs(recipe)}, take("algorithm", recipe.algorithm.name, needs={})
    others: list[Entry] = []
    if recipe.environment is not None:
        found += take("environment", recipe.environment.name, needs={})
        of_sets = dict.fromkeys(recipe.data.environment_of_set.values())
        others = [entry for name in of_sets if name != recipe.environment.name for entry in take("environment", name, needs={})]
        found += take("generator", recipe.generator.name, into=unusable, needs=needs["generator"], dtype=dtype)
    usable = {entry.role: entry for entry in found}
    algorithm = None
    if "algorithm" in usable:
        with _collected(errors):
            algorithm = _algorithm(recipe, usable, dtype, exact=not rounds)
    if "generator" in usable and algorithm is not None and replays_sampling_mask(recipe, algorithm.needs):
        # Only now is it known that the algorithm compares: the choice is made again, among those that report what they kept.
        needs["generator"] |= mask_needs(recipe, capabilities.SAMPLING_MASK)
        found.remove(usable.pop("generator"))
        found += take("generator", recipe.generator.name, into=unusable, needs=needs["generator"], dtype=dtype)
        usable |= {entry.role: entry for entry in found}
        with _collected(errors):
            algorithm = _algorithm(recipe, usable, dtype, exact=not rounds)
    generates = algorithm is None or algorithm.needs.source == "rollouts" or recipe.evaluates
    errors += unusable if generates else []
    needs["trainer"] = {} if algorithm is None else trainer_needs(recipe, algorithm)
    answers_alone = generates and measures_own and "generator" in usable and not takes_weights(usable["generator"])
    needs["execution"] = execution_needs(recipe.cluster)
    if not answers_alone:
        found += take("trainer", recipe.trainer.name, needs=needs["trainer"], dtype=dtype)
        found += take("execution", _execution_name(recipe), needs=needs["execution"])
    if errors or algorithm is None:
        raise _all_of(errors, missing_text(registry))
    chosen = {entry.role: entry for entry in found if generates or entry.role != "generator"}
    named = evolve(recipe, sinks=evolve(recipe.sinks, names=tuple(sink.name for sink in sinks)))
    return RunPlan(
        recipe=_with_dynamic_sampling(named, algorithm),
        registry=registry,
        chosen=chosen,
        sinks=sinks,
        device=device,
        algorithm=algorithm,
        other_environments=tuple(others),
        notes=(
            *(f"sinks.names: the run goes without a default: {first_line(error)}" for error in into),
            *_passed_over(recipe, registry, chosen, device, needs, dtype),
        ),
    )


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of each data source that the recipe reads from."""
    for split in ("train", "evaluation"):
        data = getattr(recipe.data, split)
        if data is not None:
            named = {f"data.{split}.mix.{name}": part for name, part in (data.mix or {}).items()}
            sets: dict[str, RowsConfig] = {f"data.{split}": data} if data.mix is None else named
            yield from ((f"{key}.source", config.source) for key, config in sets.items() if config.source not in NO_FILES)


def _default_sinks(registry: Registry) -> tuple[str, ...]:
    """Sinks of a recipe that names none. A run leaves out those that cannot be used here."""
    sound = entries_by_name(registry.of("sink"))
    return tuple(name for name, entry in sound.items() if entry.provider is not None and entry.provider.priority > 0)


def _passed_over(
    recipe: Recipe,
    registry: Registry,
    chosen: Mapping[Role, Entry],
    device: Device,
    needs: Mapping[str, Mapping[str, str]],
    dtype: DtypeName,
) -> Iterator[str]:
    """Yield a sentence for each plugin that "auto" prefers to the chosen one and could not use."""
    named = {"execution": _execution_name(recipe), **{role: getattr(recipe, role).name for role in BACKEND_ROLES}}
    for role in AUTO_ROLES:
        if role in chosen and named[role] == AUTO:
            of_backends = dtype if role in BACKEND_ROLES else None
            candidates = _several_ranks(registry) if needs["execution"] else registry
            yield from passed_over(candidates, chosen[role], device=device, needs=needs[role], dtype=of_backends)


def _several_ranks(registry: Registry) -> Registry:
    """The registry without executions that run one process, and that nobody expects to run several ranks."""

    def runs_ranks(entry: Entry) -> bool:
        return entry.provider is None or capabilities.MULTI_RANK in entry.provider.capabilities

    entries = [entry for entry in registry.entries if entry.role != "execution" or runs_ranks(entry)]
    return evolve(registry, entries=tuple(entries))


def _execution_name(recipe: Recipe) -> str:
    return AUTO if recipe.cluster is None else recipe.cluster.execution


@contextmanager
def _collected(errors: list[PluginError]) -> Iterator[None]:
    """Collect PluginErrors, so that one error reports them all. Any other error is raised with the collected ones as notes."""
    try:
        yield
    except PluginError as error:
        errors.append(error)
    except Exception as error:
        for other in errors:
            error.add_note(f"wrong as well: {other}")
        raise


def _all_of(errors: Sequence[PluginError], missing: str | None) -> PluginError:
    """Return one error with the text of all, and a note on roles without a usable plugin."""
    error = errors[0] if len(errors) == 1 else PluginError("\n".join(map(str, errors)))
    if missing is not None:
        error.add_note(missing)
    return error


def _with_dynamic_sampling(recipe: Recipe, algorithm: AlgorithmHandle) -> Recipe:
    """The recipe, which says whether groups of equal rewards are replaced: what it says itself, or else the algorithm."""
    if recipe.rollout.dynamic_sampling is not None:
        return recipe
    needs = algorithm.needs
    tells_apart = needs.dynamic_sampling and needs.source == "rollouts" and needs.rewards
    return evolve(recipe, rollout=evolve(recipe.rollout, dynamic_sampling=tells_apart))


def generator_needs(recipe: Recipe) -> dict[str, str]:
    """Capabilities that the recipe's sampling needs, each with the key that asks for it."""
    needs = {}
    for section, options in (("rollout", recipe.rollout), ("evaluation", recipe.evaluation)):
        if options.top_k > 0:
            needs[capabilities.TOP_K] = f"{section}.top_k = {options.top_k}"
        if options.top_p < 1.0:
            needs[capabilities.TOP_P] = f"{section}.top_p = {options.top_p}"
    if recipe.rollout.stop_strings:
        needs[capabilities.STOP_STRINGS] = "rollout.stop_strings"
    if recipe.rollout.replay_routing:
        needs[capabilities.ROUTED_EXPERTS] = "rollout.replay_routing = true"
    return needs | _refit_needs(recipe) | _image_needs(recipe)


def trainer_needs(recipe: Recipe, algorithm: Algorithm) -> dict[str, str]:
    """Capabilities that the recipe and its algorithm need of the trainer."""
    asked, name, cluster = algorithm.needs, f"algorithm {recipe.algorithm.name!r}", recipe.cluster
    reference, critic = recipe.reference, recipe.critic or CriticConfig()
    num_ranks = 1 if cluster is None else max(cluster.world_size, cluster.num_reference_ranks)
    apart = asked.reference_logprobs and cluster is not None and cluster.reference_gpus_per_node > 0
    changes_rate = recipe.schedule.decay != "constant" or recipe.schedule.warmup_steps > 0
    rows = (
        (asked.reference_logprobs, capabilities.REFERENCE_POLICY, f"{name} compares with the reference policy"),
        (apart, capabilities.REFERENCE_ALONE, "cluster.reference_gpus_per_node holds the reference apart from the policy"),
        (reference is not None, capabilities.REFERENCE_MODEL, f"reference.path = {reference and reference.path!r}"),
        (asked.previous_logprobs, capabilities.PREVIOUS_LOGPROBS, f"{name} compares with the start of the step"),
        (changes_rate, capabilities.SCHEDULE_STEP, "[schedule] changes the learning rate over the run"),
        (asked.split_step, capabilities.SPLIT_STEP, f"{name} makes optimizer steps in pieces"),
        (num_ranks > 1, capabilities.MULTI_RANK, f"[cluster] has {num_ranks} ranks"),
        (asked.head == "value", capabilities.VALUE_HEAD, f"{name} trains a model of values"),
        (asked.critic, capabilities.VALUE_HEAD, f"{name} trains a critic"),
        (critic.export, capabilities.SAVE_HF, "critic.export = true"),
        (asked.entropy, capabilities.ENTROPY, f"{name} asks for the entropy"),
        (recipe.lora is not None, capabilities.LORA, "[lora] trains adapters"),
        (recipe.checkpoint.export == "hf", capabilities.SAVE_HF, 'checkpoint.export = "hf"'),
        (recipe.checkpoint_evaluation is not None, capabilities.SAVE_HF, "[checkpoint_evaluation] exports checkpoints' models"),
        (recipe.rollout.replay_routing, capabilities.ROUTING_REPLAY, "rollout.replay_routing = true"),
    )
    needs = {capability: reason for is_needed, capability, reason in rows if is_needed}
    needs |= _optimizer_needs("optimizer", recipe.optimizer)
    if asked.critic:
        needs = _optimizer_needs("critic", critic.optimizer(recipe.optimizer)) | needs
    if replays_sampling_mask(recipe, asked):
        needs |= mask_needs(recipe, capabilities.SAMPLING_MASK_REPLAY)
    return needs | _refit_needs(recipe) | _image_needs(recipe)


def _optimizer_needs(section: str, spec: OptimizerSpec) -> dict[str, str]:
    muon = {capabilities.MUON: f'{section}.name = "muon"'} if spec.name == "muon" else {}
    moments = {capabilities.MOMENTS_8BIT: f'{section}.moments = "8bit"'} if spec.moments == "8bit" else {}
    return muon | moments | ({capabilities.OPTIMIZER_GROUPS: f"[[{section}.groups]]"} if spec.groups else {})


def _image_needs(recipe: Recipe) -> dict[str, str]:
    config = read_object(expanded(recipe.model.path) / CONFIG_FILE)
    is_needed = not isinstance(config, Problem) and reads_images(config)
    return {capabilities.IMAGES: f"the model {recipe.model.path} reads images"} if is_needed else {}


def _refit_needs(recipe: Recipe) -> dict[str, str]:
    refit = recipe.refit
    adapters = {capabilities.ADAPTER_REFIT: 'refit.adapters = "unmerged"'} if refit.adapters == "unmerged" else {}
    if refit.max_adapters > 1:
        adapters[capabilities.MANY_ADAPTERS] = f"refit.max_adapters = {refit.max_adapters}"
    delta = {capabilities.DELTA_REFIT: f'refit.delta = "{recipe.refit.delta}"'} if recipe.refit.delta != "off" else {}
    return adapters | delta


def _without(recipe: Recipe, entry: Entry) -> Entry:
    provider = entry.provider
    if entry.role not in BACKEND_ROLES or provider is None or entry.error is not None:
        return entry
    options = getattr(recipe, entry.role).options.get(entry.name)
    if not isinstance(options, provider.config):  # none, or those of another plugin of its name
        return entry
    return as_configured(entry, options)


def _algorithm(recipe: Recipe, chosen: Mapping[Role, Entry], dtype: DtypeName, *, exact: bool) -> AlgorithmHandle:
    provider = chosen["generator"].provider if "generator" in chosen else None
    exact = exact and provider is not None and capabilities.EXACT_LOGPROBS in provider.capabilities
    return build_chosen_algorithm(recipe, chosen["algorithm"], dtype, exact=exact)


def build_chosen_algorithm(recipe: Recipe, entry: Entry, dtype: DtypeName, *, exact: bool = False) -> AlgorithmHandle:
    """The recipe's algorithm; `exact` says whether generator and trainer both promise exact log-probabilities."""
    exact = exact and dtype in ("float32", "float64") and not recipe.rollout.accept_truncation_bias
    return build_algorithm(entry, recipe.algorithm_context(dtype, exact=exact), plugin_config(recipe, entry))
