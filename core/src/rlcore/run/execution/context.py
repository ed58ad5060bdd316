"""The arguments of an execution, the plugins that it loads in each process, and its start."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from attrs import evolve, frozen

from rlcore.installed import disabled_by_variable
from rlcore.registry.binding import build_execution, build_generator, build_observers, build_trainer
from rlcore.registry.discovery import Entry, ObserverEntry, discover
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.selection import ChosenPlugin, load_chosen
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.execution.arguments import BackendArguments, GeneratorArguments, TrainerArguments
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.spi import ContractError, ObserverContext
from rlcore.spi.execution import ExecutionProgress, OpenBackends, TextDecoder


@frozen(kw_only=True, eq=False)
class LoadedPlugins:
    """Plugins loaded in this process, with the observers of one rank: they build its backends."""

    trainer: Entry
    generator: Entry | None
    observers: tuple[ObserverEntry, ...]

    def build_trainer(self, arguments: TrainerArguments) -> TrainerHandle:
        """Build a trainer, a critic or a reference. All ranks build at the same time, since they wait for each other."""
        return build_trainer(self.trainer, arguments.context, arguments.config, self.observers)

    def build_generator(self, arguments: GeneratorArguments) -> GeneratorHandle:
        """Build a generator, once all ranks of its devices have made room for it."""
        assert self.generator is not None
        return build_generator(self.generator, arguments.context, arguments.config, self.observers)


@frozen(kw_only=True, eq=False)
class ChosenPlugins:
    """The names and versions of the plugins that the driver chose. They pickle."""

    trainer: ChosenPlugin
    generator: ChosenPlugin | None
    disabled: tuple[str, ...]
    """Observers, among others, to leave out."""
    observers: tuple[str, ...]
    """The observers that the recipe names."""
    observer_options: Mapping[str, bytes]
    """The recipe's section, by name, of each observer in use that takes options. Pickled one by one, so that a machine reads
    those of the observers that it has."""
    run_directory: Path | None

    def load(self, rank: int, *, observed: bool = True) -> LoadedPlugins:
        """Load the same plugins in this process, without observers where it is not `observed`.

        PluginError where the machine lacks one, or has another version.
        """
        generator = None if self.generator is None else load_chosen(self.generator)
        observers = discover(self.disabled).observers(self.observers) if observed else ()
        context = ObserverContext(run_directory=self.run_directory, rank=rank)
        sections = self.observer_options
        options = {entry.name: pickle.loads(sections[entry.name]) for entry in observers if entry.name in sections}
        built = build_observers(observers, context, options)
        return LoadedPlugins(trainer=load_chosen(self.trainer), generator=generator, observers=built)


@frozen(kw_only=True, eq=False)
class RunPlugins:
    """The plugins of a run in the driver: they build its backends there, or are sent by name to other processes."""

    _loaded: LoadedPlugins
    """The chosen observers, which are not built yet."""
    _observer_options: Mapping[str, object]
    _observer_names: tuple[str, ...]
    _disabled: tuple[str, ...]
    _run_directory: Path | None

    @classmethod
    def of(cls, plan: BackendPlan, run_directory: Path | None) -> "RunPlugins":
        """Return the plugins of a plan."""
        loaded = LoadedPlugins(trainer=plan.chosen["trainer"], generator=plan.chosen.get("generator"), observers=plan.observers)
        return cls(
            loaded=loaded,
            observer_options=plan.observer_options,
            observer_names=plan.recipe.observers.names,
            disabled=plan.recipe.plugins.disable,
            run_directory=run_directory,
        )

    def load_here(self, rank: int = 0) -> LoadedPlugins:
        """Return the plugins for backends in the driver's own process. Observers are built: call it once for each rank."""
        context = ObserverContext(run_directory=self._run_directory, rank=rank)
        return evolve(self._loaded, observers=build_observers(self._loaded.observers, context, self._observer_options))

    def chosen(self) -> ChosenPlugins:
        """Return the names and versions of the plugins, for other processes to load."""
        trainer, generator = self._loaded.trainer, self._loaded.generator
        return ChosenPlugins(
            trainer=ChosenPlugin.of(trainer),
            generator=None if generator is None else ChosenPlugin.of(generator),
            disabled=(*self._disabled, *disabled_by_variable()),
            observers=self._observer_names,
            observer_options={name: pickle.dumps(options) for name, options in self._observer_options.items()},
            run_directory=self._run_directory,
        )


@frozen(kw_only=True, eq=False)
class ExecutionContext:
    """A run as its execution knows it, in the driver."""

    arguments: BackendArguments
    """Which backends the run has, and what to build each with."""
    plugins: RunPlugins
    """Builds the backends, in the driver or in other processes."""
    progress: ExecutionProgress

    @classmethod
    def of(
        cls, plan: BackendPlan, decoder: TextDecoder, log_directory: Path | None, progress: ExecutionProgress
    ) -> "ExecutionContext":
        """Return the context of a plan."""
        run_directory = None if log_directory is None else log_directory.absolute().parent
        arguments = BackendArguments.of(plan, decoder, log_directory)
        return cls(arguments=arguments, plugins=RunPlugins.of(plan, run_directory), progress=progress)


T = TypeVar("T")


@contextmanager
def execution(
    plan: BackendPlan, decoder: TextDecoder, log_directory: Path | None, progress: ExecutionProgress
) -> Iterator[OpenBackends]:
    """Yield what opens the backends, for the whole run; `log_directory` is for the output of processes.

    PluginError where the execution cannot be built; ContractError where one of its contexts suppresses an error of the run.
    """
    context, entry = ExecutionContext.of(plan, decoder, log_directory, progress), plan.chosen["execution"]
    with _lets_errors_pass(build_execution(entry, context, plan.config("execution")), entry.label) as opened:
        yield lambda: _lets_errors_pass(opened(), entry.label)


@contextmanager
def _lets_errors_pass(inner: AbstractContextManager[T], label: str) -> Iterator[T]:
    """Enter a context of an execution. ContractError where leaving it suppresses an error."""
    raised: BaseException | None = None
    with inner as entered:
        try:
            yield entered
        except BaseException as error:
            raised = error
            raise
    if raised is not None:
        raise ContractError(f"{label} suppressed an error of the run; expected contexts that let it pass") from raised
