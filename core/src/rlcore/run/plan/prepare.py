"""From a recipe file to everything a run needs to know, with nothing allocated: what `rlcore check` does."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from rlcore.config.convert import OBSERVERS, SINKS, convert, selected_options
from rlcore.config.load import read_raw
from rlcore.config.recipe import Recipe, RolloutConfig
from rlcore.gpu import Device, detect_device
from rlcore.installed import is_installed
from rlcore.model_files import config_number, model_problems
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.binding import build_algorithm, build_environment, build_observers, require_module, run_check
from rlcore.registry.discovery import Entry, ObserverEntry, Registry, discover
from rlcore.registry.plugin_errors import is_outside
from rlcore.registry.selection import AUTO, AUTO_ROLES, passed_over, select
from rlcore.run.plan.channel import choose_channel
from rlcore.run.plan.generator_placement import generator_devices, generator_span, separate, span_problems
from rlcore.spi import (
    CHANNELS,
    ROLES,
    Algorithm,
    AlgorithmContext,
    AlgorithmNeeds,
    CheckContext,
    ConfigError,
    DtypeName,
    Environment,
    EnvironmentContext,
    GeneratorContext,
    ModelError,
    ModelSpec,
    ObserverContext,
    PluginError,
    Problem,
    RankInfo,
    Role,
    TrainerContext,
    capabilities,
)


@frozen(kw_only=True, eq=False)
class RunPlan:
    """A checked recipe with its chosen plugins."""

    recipe: Recipe
    registry: Registry
    chosen: Mapping[Role, Entry]
    """The plugin of each role that one plugin fills, where the recipe uses it."""
    sinks: tuple[Entry, ...]
    """Those that the recipe names."""
    device: Device
    model: ModelSpec
    algorithm: AlgorithmHandle
    environment: Environment | None
    channel: str | None
    """How weights travel; None where nothing generates."""
    span: int = 1
    """Neighbouring ranks that share one generator."""
    notes: tuple[str, ...] = ()
    """Which plugins of higher priority "auto" could not take, and why."""

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence."""
        return _max_sequence_length(self.recipe)

    @property
    def evaluates(self) -> bool:
        """Whether the held-out set is ever measured."""
        return evaluates(self.recipe)

    @property
    def observers(self) -> tuple[ObserverEntry, ...]:
        """The observers in use."""
        return self.registry.observers(self.recipe.observers.names)

    @property
    def chosen_names(self) -> dict[str, str]:
        """The plugin of each role, by name."""
        return {role: entry.name for role, entry in self.chosen.items()}

    @property
    def shares_devices(self) -> bool:
        """Whether trainer and generator take turns on the same device."""
        reach = None if self.channel is None else CHANNELS[self.channel].reach
        return reach not in (None, "separate") and self.device == "cuda" and not separate(self.recipe)

    def config(self, role: Role) -> Any:
        """The recipe's section of the chosen plugin."""
        return plugin_config(self.recipe, self.chosen[role])

    @property
    def observer_options(self) -> dict[str, object]:
        """By name, the recipe's section of each observer in use that takes options."""
        return observer_options(self.recipe, self.observers)

    def observed(self, run_directory: Path | None) -> "RunPlan":
        """The same with the observers of this process built, for a run or, without a directory, an evaluation. On a cluster
        hooks are called in other processes."""
        if self.recipe.cluster is not None:
            return self
        context = ObserverContext(run_directory=None if run_directory is None else run_directory.absolute())
        built = build_observers(self.observers, context, self.observer_options)
        return evolve(self, registry=evolve(self.registry, observer_entries=built))

    def trainer_context(self, rank_info: RankInfo) -> TrainerContext:
        """What the trainer of a rank is built with."""
        return TrainerContext(
            model=self.model,
            rank_info=rank_info,
            seed=self.recipe.run.seed,
            num_train_steps=self.recipe.run.num_steps * self.recipe.training.updates_per_step,
            needs_reference=self.algorithm.needs.reference_logprobs,
            max_sequence_length=self.max_sequence_length,
            max_microbatch_tokens=self.recipe.training.max_tokens_per_microbatch,
            optimizer=self.recipe.optimizer,
            schedule=self.recipe.schedule,
        )

    def generator_context(self, rank_info: RankInfo, log_directory: Path | None) -> GeneratorContext:
        """What the generator of a rank is built with."""
        return GeneratorContext(
            model=self.model,
            rank_info=rank_info,
            seed=self.recipe.run.seed,
            max_sequence_length=self.max_sequence_length,
            channel=self.channel or "in_process",
            devices=generator_devices(self.recipe, self.device, self.span, rank_info.local_rank),
            log_directory=log_directory,
            routed_experts=self.recipe.rollout.replay_routing,
        )


def prepare(
    path: Path, overrides: Sequence[str] = (), *, evaluating: bool = False, registry: Registry | None = None
) -> RunPlan:
    """Read, check and select. Raises what is wrong, all problems of one kind at once; allocates nothing.

    `evaluating`: the held-out set is measured, whatever the recipe says of a training. `registry` stands in for the installed
    plugins, in tests.
    """
    raw = read_raw(path, overrides)
    registry = registry or discover(disabled_plugins(raw.values))
    recipe = convert(raw, sections(registry), unchecked(registry))
    if evaluating:
        recipe = evolve(recipe, evaluation=evolve(recipe.evaluation, at_start=True))
    return prepare_recipe(recipe, registry)


def prepare_recipe(recipe: Recipe, registry: Registry) -> RunPlan:
    """`prepare` from a recipe in memory."""
    if recipe.cluster is not None:
        check_ray()
    # PluginError where an observer is unfit, ConfigError where a global one lacks options.
    observer_options(recipe, registry.observers(recipe.observers.names))
    device = recipe.run.device if recipe.run.device != "auto" else detect_device()
    declared, registry = registry, _as_configured(recipe, registry)
    chosen: dict[Role, Entry] = {}
    sinks = tuple(select(registry, "sink", name, device=device, needs={}) for name in recipe.sinks.names)
    chosen["algorithm"] = select(registry, "algorithm", recipe.algorithm.name, device=device, needs={})
    if recipe.environment is not None:
        chosen["environment"] = select(registry, "environment", recipe.environment.name, device=device, needs={})
    generator = _generator(recipe, registry, device)
    found = None if isinstance(generator, PluginError) else generator
    algorithm = _algorithm(recipe, chosen["algorithm"], found, dtype_of(recipe, device))
    if generator is not None and (algorithm.needs.source == "rollouts" or evaluates(recipe)):
        if isinstance(generator, PluginError):
            raise generator
        chosen["generator"] = generator
    needs = {"generator": generator_needs(recipe), "trainer": trainer_needs(recipe, algorithm)}
    dtype = dtype_of(recipe, device)
    chosen["trainer"] = select(registry, "trainer", recipe.trainer.name, device=device, needs=needs["trainer"], dtype=dtype)
    channel = choose_channel(recipe, chosen, device, declared)
    model = model_spec(recipe, device)
    span = generator_span(recipe, chosen)
    _check(recipe, (*chosen.values(), *sinks), algorithm, model, device, channel, span)
    environment = None
    if "environment" in chosen:
        context = EnvironmentContext(seed=recipe.run.seed)
        environment = build_environment(chosen["environment"], context, plugin_config(recipe, chosen["environment"]))
    return RunPlan(
        recipe=recipe,
        registry=registry,
        chosen=chosen,
        sinks=sinks,
        device=device,
        model=model,
        algorithm=algorithm,
        environment=environment,
        channel=channel,
        span=span,
        notes=tuple(
            note
            for role in AUTO_ROLES
            if role in chosen and getattr(recipe, role).name == AUTO
            for note in passed_over(registry, chosen[role], device=device, needs=needs[role], dtype=dtype)
        ),
    )


def disabled_plugins(values: Mapping[str, Any]) -> tuple[str, ...]:
    """`plugins.disable` of a recipe not yet checked; a wrong type is reported with everything else, later."""
    section = values.get("plugins")
    names = section.get("disable") if isinstance(section, Mapping) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list | tuple) else ()


@frozen(kw_only=True)
class NoOptions:
    """`[observers.NAME]`: takes no options."""


def sections(registry: Registry) -> dict[str, dict[str, type]]:
    """The config class of every plugin that is fit for use, by its section of the recipe and name."""
    found: dict[str, dict[str, type]] = {
        _section(role): {
            entry.name: entry.provider.config for entry in registry.of(role) if entry.provider and entry.error is None
        }
        for role in ROLES
    }
    observers = [entry for entry in registry.observer_entries if entry.observer is not None and entry.error is None]
    return found | {OBSERVERS: {entry.name: entry.config or NoOptions for entry in observers}}


def unchecked(registry: Registry) -> dict[str, set[str]]:
    """By their section of the recipe, the plugins that are disabled or broken, so that nothing can check their sections."""
    installed: dict[str, Sequence[Entry | ObserverEntry]] = {_section(role): registry.of(role) for role in ROLES}
    installed[OBSERVERS] = registry.observer_entries
    unfit = {role: {entry.name for entry in of if entry.disabled or entry.error is not None} for role, of in installed.items()}
    return {role: names - sections(registry)[role].keys() for role, names in unfit.items()}


def plugin_config(recipe: Recipe, entry: Entry) -> Any:
    """The recipe's section for a plugin."""
    assert entry.provider is not None
    section = _section(entry.role)
    return selected_options(getattr(recipe, section), section, entry.name, entry.provider.config)


def _section(role: Role) -> str:
    """The recipe's section that chooses plugins of a role."""
    return SINKS if role == "sink" else role


def observer_options(recipe: Recipe, observers: Sequence[ObserverEntry]) -> dict[str, object]:
    """By name, the recipe's section of each of these that takes options. ConfigError names all required keys left out."""
    options: dict[str, object] = {}
    problems: list[Problem] = []
    for entry in observers:
        if entry.config is not None:
            try:
                options[entry.name] = selected_options(recipe.observers, OBSERVERS, entry.name, entry.config)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options


def evaluates(recipe: Recipe) -> bool:
    """Whether the recipe measures the held-out set at any time."""
    wanted = recipe.evaluation.every_n_steps > 0 or recipe.evaluation.at_start or recipe.evaluation.at_end
    return recipe.environment is not None and recipe.data.evaluation is not None and wanted


def dtype_of(recipe: Recipe, device: Device) -> DtypeName:
    """Return the compute dtype of a section."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def model_spec(recipe: Recipe, device: Device) -> ModelSpec:
    """What backends learn of the model."""
    return ModelSpec(
        path=recipe.model.path,
        revision=recipe.model.revision,
        dtype=dtype_of(recipe, device),
        trust_remote_code=recipe.model.trust_remote_code,
    )


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
    return needs


def trainer_needs(recipe: Recipe, algorithm: Algorithm) -> dict[str, str]:
    """Capabilities that the recipe and its algorithm need of the trainer."""
    needs = {}
    if algorithm.needs.reference_logprobs:
        needs[capabilities.REFERENCE_POLICY] = f"algorithm {recipe.algorithm.name!r} compares with the reference policy"
    if algorithm.needs.previous_logprobs:
        needs[capabilities.PREVIOUS_LOGPROBS] = f"algorithm {recipe.algorithm.name!r} compares with the start of the step"
    if recipe.schedule.decay != "constant" or recipe.schedule.warmup_steps:
        needs[capabilities.SCHEDULE_STEP] = "[schedule] changes the learning rate over the run"
    if recipe.cluster is not None and recipe.cluster.world_size > 1:
        needs[capabilities.MULTI_RANK] = f"[cluster] has {recipe.cluster.world_size} ranks"
    if algorithm.needs.entropy:
        needs[capabilities.ENTROPY] = f"algorithm {recipe.algorithm.name!r} asks for the entropy"
    if recipe.checkpoint.export == "hf":
        needs[capabilities.SAVE_HF] = 'checkpoint.export = "hf"'
    if recipe.rollout.replay_routing:
        needs[capabilities.ROUTING_REPLAY] = "rollout.replay_routing = true"
    return needs


def require_device(prepared: RunPlan) -> None:
    """Raise ConfigError where the run would compute in this process on a device that is not there."""
    if prepared.device == "cuda" and prepared.recipe.cluster is None and detect_device() == "cpu":
        problem = Problem(
            path="run.device",
            found='"cuda", and no GPU that the installed torch can use',
            expected='a machine with an NVIDIA driver and torch built for CUDA, or "cpu"',
            remedy='Set run.device to "auto" to take what there is.',
        )
        raise ConfigError([problem])


def check_ray() -> None:
    """Raise ConfigError where the recipe asks for workers on Ray, which is not installed."""
    if not is_installed("ray"):
        problem = Problem(
            path="cluster",
            found="the section, without the package ray",
            expected="the package installed on every machine",
            remedy="Run: pip install 'rlcore[ray]', or leave the section out to run in one process.",
        )
        raise ConfigError([problem])


def _as_configured(recipe: Recipe, registry: Registry) -> Registry:
    """The registry with each backend's capabilities less those that its section of the recipe takes away."""
    return evolve(registry, entries=tuple(_without(recipe, entry) for entry in registry.entries))


def _without(recipe: Recipe, entry: Entry) -> Entry:
    provider = entry.provider
    if entry.role not in AUTO_ROLES or provider is None or entry.error is not None:
        return entry
    options = getattr(recipe, entry.role).options.get(entry.name)
    if options is None:
        return entry
    try:
        lost = frozenset(provider.disabled_capabilities(options))
    except BaseException as error:
        if is_outside(error):
            raise
        raise PluginError(
            f"{entry.label}: its function `disabled_capabilities` raised {type(error).__name__}: {error}"
        ) from error
    return evolve(entry, provider=evolve(provider, capabilities=provider.capabilities - lost))


def _generator(recipe: Recipe, registry: Registry, device: Device) -> Entry | PluginError | None:
    """The generator, or why there is none: whether the run needs one only the algorithm can say."""
    if recipe.environment is None:
        return None
    try:
        needs, dtype = generator_needs(recipe), dtype_of(recipe, device)
        return select(registry, "generator", recipe.generator.name, device=device, needs=needs, dtype=dtype)
    except PluginError as error:
        return error


def _algorithm(recipe: Recipe, entry: Entry, generator: Entry | None, dtype: DtypeName) -> AlgorithmHandle:
    truncated = recipe.rollout.truncates
    exact = (
        generator is not None
        and generator.provider is not None
        and (capabilities.EXACT_LOGPROBS in generator.provider.capabilities)
    )
    context = AlgorithmContext(
        seed=recipe.run.seed,
        samples_per_prompt=recipe.rollout.samples_per_prompt,
        updates_per_step=recipe.training.updates_per_step,
        temperature=recipe.rollout.temperature,
        generation_logprobs_exact=exact and dtype == "float32" and not truncated,
    )
    vocabulary_size = config_number(recipe.model.path, "vocab_size")
    return build_algorithm(entry, context, plugin_config(recipe, entry), vocabulary_size)


def _check(
    recipe: Recipe,
    plugins: Collection[Entry],
    algorithm: Algorithm,
    model: ModelSpec,
    device: Device,
    channel: str | None,
    span: int,
) -> None:
    """Raise what the chosen plugins find wrong, and what only they make impossible: ModelError where the model alone is."""
    problems = [*_impossible(recipe, algorithm), *span_problems(recipe, span)]
    if any(entry.provider is not None and entry.role in AUTO_ROLES and entry.provider.reads_model for entry in plugins):
        problems += model_problems(model.path)
    context = CheckContext(
        model=model,
        device=device,
        world_size=1 if recipe.cluster is None else recipe.cluster.world_size,
        max_sequence_length=_max_sequence_length(recipe),
        max_microbatch_tokens=recipe.training.max_tokens_per_microbatch,
        needs_reference=algorithm.needs.reference_logprobs,
        channel=channel,
        generator_devices=generator_devices(recipe, device, span),
        replays_routing=recipe.rollout.replay_routing,
        environment_timeout_s=None if recipe.environment is None else recipe.rollout.environment_timeout_s,
    )
    for entry in plugins:
        require_module(entry)
        found = run_check(entry, context, plugin_config(recipe, entry))
        problems += [problem for problem in found if problem not in problems]
    if problems and all(_is_about(problem, model) for problem in problems):
        raise ModelError(problems)
    if problems:
        raise ConfigError(problems)


def _impossible(recipe: Recipe, algorithm: Algorithm) -> Iterator[Problem]:
    """Combinations that cannot work with this algorithm."""
    needs = algorithm.needs
    if needs.source == "rollouts" and recipe.environment is None:
        yield Problem(
            path="environment",
            found="nothing",
            expected=f"an environment, which rewards the rollouts that algorithm {recipe.algorithm.name!r} trains on",
            remedy="Add a section [environment] with a name.",
        )
    if needs.untruncated_sampling and recipe.rollout.truncates and not recipe.rollout.accept_truncation_bias:
        for key in ("top_k", "top_p"):
            value = getattr(recipe.rollout, key)
            if value == getattr(RolloutConfig(), key):
                continue
            yield Problem(
                path=f"rollout.{key}",
                found=f"{value}, with algorithm {recipe.algorithm.name!r}, which compares the generator's probabilities with "
                "the trainer's",
                expected="the whole distribution (top_k = 0, top_p = 1.0): the generator's probabilities are of the tokens "
                "that it kept, the trainer's are of all, so ratios and importance weights are biased",
                remedy="Leave it out, or accept that bias with rollout.accept_truncation_bias = true.",
            )
    if needs.source == "rollouts" and recipe.rollout.samples_per_prompt < needs.min_samples_per_prompt:
        yield Problem(
            path="rollout.samples_per_prompt",
            found=str(recipe.rollout.samples_per_prompt),
            expected=f"at least {needs.min_samples_per_prompt} for algorithm {recipe.algorithm.name!r}",
            remedy="Raise it; a group's statistics need several samples.",
        )
    yield from _pointless(recipe, needs)


def _pointless(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """Keys of [rollout] that do nothing with this algorithm, or what nobody can mean."""
    rollout, algorithm = recipe.rollout, f"with algorithm {recipe.algorithm.name!r}, which"
    if rollout.accept_truncation_bias and not needs.untruncated_sampling:
        yield Problem(
            path="rollout.accept_truncation_bias",
            found=f"true, {algorithm} compares no probabilities with the generator's",
            expected="false: truncated sampling biases nothing there",
        )
    if needs.source == "rollouts":
        return
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


def _max_sequence_length(recipe: Recipe) -> int:
    return recipe.rollout.max_prompt_tokens + recipe.rollout.max_response_tokens


def _is_about(problem: Problem, model: ModelSpec) -> bool:
    """Whether a problem names the model's directory or a file in it."""
    directory = Path(model.path).expanduser()
    return Path(problem.path).expanduser().is_relative_to(directory)
