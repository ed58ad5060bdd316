"""From a selected entry to a working plugin: check its class, build it, and bind its hooks.

A fresh pluggy manager per role holds the one backend and the observers around it, so that no other implementation answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import pluggy
from attrs import evolve

from rlcore.model_files import config_number
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.discovery import Entry, ObserverEntry
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.hooks import (
    CallRecord,
    backend_problems,
    guarded,
    hooks_of,
    marked_names,
    method_problems,
    observer_problems,
    recorded,
)
from rlcore.registry.own_plugins import PythonConfig
from rlcore.registry.plugin_errors import SLOW, attributed, in_time, listing_error
from rlcore.registry.provider_calls import import_object, provider_of, require_arguments
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.spi import ConfigError, Problem, capabilities
from rlcore.spi.algorithm import Algorithm, AlgorithmNeeds, StatefulAlgorithm
from rlcore.spi.context import AlgorithmContext, EnvironmentContext, GeneratorContext, TrainerContext
from rlcore.spi.environment import AgentEnvironment, Environment
from rlcore.spi.errors import ContractError, PluginError
from rlcore.spi.execution import OpenBackends
from rlcore.spi.generator import GeneratorSpec
from rlcore.spi.lifecycle import PROJECT
from rlcore.spi.observer import ObserverContext
from rlcore.spi.provider import Provider, Role
from rlcore.spi.sink import Sink, SinkContext
from rlcore.spi.trainer import SPLIT_HOOKS, TrainerLayout, TrainerSpec

STATE_METHODS = ("save_state", "load_state")
"""An algorithm has both or none."""
_SPECS: dict[Role, type] = {"trainer": TrainerSpec, "generator": GeneratorSpec}


class _Closable(Protocol):
    """An environment that starts threads or processes."""

    def close(self) -> None:
        """End them."""


_METHODS: dict[Role, tuple[type, tuple[str, ...]]] = {
    "algorithm": (Algorithm, ("build_batch",)),
    "environment": (Environment, ("reset", "step", "rows")),
    "sink": (Sink, ("log", "close")),
}
"""The protocol and its methods of each role whose methods are called directly."""


class _Hooks:
    """Hooks of one object, by name. pluggy compares what it registers with ==, so it never sees the object itself."""

    def __init__(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(hooks)


def bind(
    entry: Entry, backend: object, observers: Sequence[ObserverEntry] = (), record: CallRecord | None = None
) -> pluggy.PluginManager:
    """A manager that holds the backend of a trainer or generator, and the observers around it; `record` is of its calls.

    PluginError lists every hook of any of them that does not fit its specification; nothing is called before.
    """
    record = record or CallRecord()
    spec = _SPECS[entry.role]
    hooks = hooks_of(spec)
    problems = [f"{type(backend).__name__}.{problem}" for problem in backend_problems(type(backend), spec)]
    for name in hooks.keys() & getattr(backend, "__dict__", {}).keys():
        problems.append(f"{type(backend).__name__}.{name}: set on the object; expected a method of its class")
    for observer in observers:
        problems += [f"{observer.label}: {line}" for line in observer_problems(observer.observer, list(_SPECS.values()))]
    _require_fit(entry, problems)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    # A hook that the backend leaves out does what the specification says.
    methods = {name: getattr(backend, name, None) or partial(default, backend) for name, default in hooks.items()}
    manager.register(_Hooks({name: recorded(method, record) for name, method in methods.items()}), name=entry.name)
    for index, observer in enumerate(observers):
        relevant = [name for name in marked_names(observer.observer) if name in hooks]
        wrappers = {name: guarded(observer.label, name, getattr(observer.observer, name), record) for name in relevant}
        manager.register(_Hooks(wrappers), name=f"observer-{index}")
    return manager


def build_trainer(
    entry: Entry, context: TrainerContext, config: object, observers: Sequence[ObserverEntry] = ()
) -> TrainerHandle:
    """Build a trainer backend and bind it. What its constructor raises passes through, with a note that names it."""
    if context.head == "value":
        _require_values(entry, context)
    if not context.needs_policy:
        _require_reference_alone(entry, context)
    backend = _build(entry, "trainer", context, config)
    layout = getattr(backend, "layout", None)
    if not isinstance(layout, TrainerLayout) or not 0 <= layout.data_parallel_rank < layout.data_parallel_size:
        _require_fit(entry, [f"layout: found {layout!r}; expected a TrainerLayout, its rank below its size"])
    record = CallRecord()
    manager = bind(entry, backend, observers, record)
    has_whole_step = getattr(backend, "train_step", None) is not None
    return TrainerHandle(entry, manager.hook, record, cast("TrainerLayout", layout), context, has_whole_step)


def build_generator(
    entry: Entry, context: GeneratorContext, config: object, observers: Sequence[ObserverEntry] = ()
) -> GeneratorHandle:
    """Build a generator backend and bind it. What its constructor raises passes through, with a note that names it."""
    backend = _build(entry, "generator", context, config)
    record = CallRecord()
    manager = bind(entry, backend, observers, record)
    return GeneratorHandle(
        entry,
        manager.hook,
        record,
        max_sequence_length=context.max_sequence_length,
        own_weights=context.channel is None,
        vocab_size=config_number(context.model.path, "vocab_size"),
        max_adapters=context.max_adapters,
    )


def build_algorithm(entry: Entry, context: AlgorithmContext, config: object) -> AlgorithmHandle:
    """Build an algorithm, a plain object whose method is called directly."""
    with in_time(f"the building of {entry.label}", SLOW):
        backend = _build(entry, "algorithm", context, config)
    with attributed("raised by needs of", entry.label), in_time(f"needs of {entry.label}", SLOW):
        needs = getattr(backend, "needs", None)
    if not isinstance(needs, AlgorithmNeeds):
        _require_fit(entry, [f"needs: found {needs!r}; expected an AlgorithmNeeds"])
    try:
        return AlgorithmHandle(entry, cast("Algorithm", backend), cast("AlgorithmNeeds", needs))
    except ContractError as error:
        raise PluginError(f"{entry.label} does not fit its role: {error}") from error


def build_environment(entry: Entry, context: EnvironmentContext, config: object) -> Environment | AgentEnvironment:
    """Build an environment, a plain object whose methods are called directly; an AgentEnvironment by its capability."""
    with in_time(f"the building of {entry.label}", SLOW):
        return cast("Environment", _build(entry, "environment", context, config))


def require_environment(entry: Entry, environment: object) -> None:
    """PluginError where an object that a program brings has not the methods of an Environment, or of an AgentEnvironment where
    the entry's provider says so."""
    name, problems = type(environment).__name__, _class_problems(type(environment), "environment", provider_of(entry))
    _require_fit(entry, [f"{name}.{problem}" for problem in problems])


def build_sink(entry: Entry, context: SinkContext, config: object) -> Sink:
    """Build a sink, a plain object whose methods are called directly."""
    return cast("Sink", _build(entry, "sink", context, config))


def build_execution(entry: Entry, context: object, config: object) -> AbstractContextManager[OpenBackends]:
    """Call an execution for a run. `context` is an rlcore.execution.ExecutionContext."""
    made = _build(entry, "execution", context, config)
    if not isinstance(made, AbstractContextManager):
        raise PluginError(f"{entry.label} returned a {type(made).__name__}; expected a context manager of an OpenBackends")
    return made


def build_observers(
    entries: Sequence[ObserverEntry], context: ObserverContext, options: Mapping[str, object]
) -> tuple[ObserverEntry, ...]:
    """The observers of this process: those whose entry point names a class are built with the context, and with the options of
    their name. PluginError where one does not fit; what a constructor raises passes through, with a note that names it."""
    return tuple(_built(entry, context, options) for entry in entries)


def _built(entry: ObserverEntry, context: ObserverContext, options: Mapping[str, object]) -> ObserverEntry:
    if not isinstance(entry.observer, type):
        return entry
    if entry.config is not None and not isinstance(options.get(entry.name), entry.config):
        found = "found no options for it" if entry.name not in options else "found another class's options for it"
        raise PluginError(f"{entry.label}: {found}; expected the packages of the driver's machine on every machine")
    with attributed("raised while building", entry.label):
        observer = entry.observer(evolve(context, options=options.get(entry.name)))
    _require_fit(entry, list(observer_problems(observer, (TrainerSpec, GeneratorSpec))))
    return evolve(entry, observer=observer)


def _build(entry: Entry, role: Role, context: object, config: object) -> object:
    provider = provider_of(entry)
    cls = import_object(entry, provider.backend)
    if not (isinstance(cls, type) or (role == "execution" and callable(cls))):
        raise PluginError(f"{entry.label}: backend {provider.backend!r} is a {type(cls).__name__}; expected a class")
    if entry.role != role:
        raise ContractError(f"{entry.label} cannot be built as a {role}")
    _require_fit(entry, [f"{cls.__name__}.{problem}" for problem in _class_problems(cls, role, provider)])
    if not isinstance(config, provider.config):
        raise ContractError(f"{entry.label}: config is a {type(config).__name__}; expected {provider.config.__name__}")
    require_arguments(entry, cls.__name__, cls)
    with attributed("raised while building", entry.label):
        return cast("object", cls(context, config))


def _require_values(entry: Entry, context: TrainerContext) -> None:
    """ContractError unless a trainer can have the head "value", of which no reference is asked."""
    if capabilities.VALUE_HEAD not in provider_of(entry).capabilities:
        needed = f"the capability {capabilities.VALUE_HEAD!r}, which it does not declare"
        raise ContractError(f'{entry.label}: context.head "value" needs {needed}')
    if context.needs_reference or context.reference is not None:
        raise ContractError(f'{entry.label}: found a reference beside context.head "value"; expected none: values have none')


def _require_reference_alone(entry: Entry, context: TrainerContext) -> None:
    """ContractError unless a trainer can be built for its reference alone."""
    if capabilities.REFERENCE_ALONE not in provider_of(entry).capabilities:
        needed = f"the capability {capabilities.REFERENCE_ALONE!r}, which it does not declare"
        raise ContractError(f"{entry.label}: context.needs_policy = False needs {needed}")
    if not context.needs_reference or context.lora is not None:
        raise ContractError(f"{entry.label}: context.needs_policy = False; expected needs_reference beside it, and no lora")


def _class_problems(cls: type, role: Role, provider: Provider) -> Iterator[str]:
    """Yield the faults of a plugin's class before it is built."""
    if role in _SPECS:
        yield from backend_problems(cls, _SPECS[role])
        hooks = {"get_values": capabilities.VALUE_HEAD, "use_adapter": capabilities.MANY_ADAPTERS}
        hooks |= dict.fromkeys(SPLIT_HOOKS, capabilities.SPLIT_STEP)
        hooks["forward_backward_together"] = capabilities.ADAPTERS_TOGETHER
        for name, capability in hooks.items() if role == "trainer" else ():
            if capability in provider.capabilities and getattr(cls, name, None) is None:
                yield f"{name}: missing; expected it beside the capability {capability!r}"
    elif role == "execution":
        return
    elif role == "environment" and capabilities.AGENT in provider.capabilities:
        yield from method_problems(cls, AgentEnvironment, ("run", "rows"))
    else:
        yield from method_problems(cls, *_METHODS[role])
    if role == "environment" and hasattr(cls, "close"):
        yield from method_problems(cls, _Closable, ("close",))
    if role == "algorithm" and any(hasattr(cls, name) for name in STATE_METHODS):
        yield from method_problems(cls, StatefulAlgorithm, STATE_METHODS)


def _require_fit(entry: Entry | ObserverEntry, problems: Sequence[str]) -> None:
    if problems:
        raise listing_error(f"{entry.label} does not fit its role, {len(problems)} problem(s)", problems)


class MissingEnvironment(Environment):
    """Refuses to be built: ConfigError."""

    def __init__(self, context: EnvironmentContext, config: PythonConfig) -> None:  # noqa: ARG002
        expected = "an environment that a program hands over: rlcore.train(recipe, environment=…), also where a run is resumed"
        raise ConfigError([Problem(path="environment.name", found='"python", and none', expected=expected)])
