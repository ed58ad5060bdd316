"""Trainer and generator in one process: the driver's own, or a worker that holds them all."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from attrs import frozen

from rlcore.registry.binding import build_generator, build_observers
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.handle import closed_after
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.execution.arguments import BackendArguments
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.context import ExecutionContext, LoadedPlugins
from rlcore.run.execution.groups import InProcessGenerator, InProcessTrainer
from rlcore.run.execution.residency import make_room
from rlcore.spi import ObserverContext, RankInfo
from rlcore.spi.cluster import ClusterConfig
from rlcore.spi.execution import Backends, OpenBackends, RefitCommand, Refitted, TextDecoder


@frozen(kw_only=True, eq=False)
class InProcessRoute:
    """Carries weights from the one trainer to the one generator of this process."""

    trainer: TrainerHandle
    generator: GeneratorHandle

    def sync_weights(self, order: RefitCommand) -> Refitted:
        """Export the trainer's weights and refit the generator with them."""
        export = self.trainer.export_weights(order.export)
        result = self.generator.refit(order.request(export))
        return Refitted(drafts=result.drafts, sent_bytes=result.sent_bytes, digests=result.digests)


@contextmanager
def in_process(context: ExecutionContext, config: ClusterConfig) -> Iterator[OpenBackends]:  # noqa: ARG001 - an execution's
    """The core's own execution: everything in the driver's process."""
    yield partial(open_backends, context.arguments, context.plugins.load_here())


@contextmanager
def open_backends(arguments: BackendArguments, plugins: LoadedPlugins) -> Iterator[Backends]:
    """Build all backends of a run in this process, and close them at the end whatever happens."""
    trainer = plugins.build_trainer(arguments.trainer)
    with closed_after(trainer), _critic(arguments, plugins) as critic:
        group = _group(arguments, trainer)
        if arguments.generator is None:
            yield Backends(trainer=group, generator=None, route=None)
            return
        make_room(trainer, arguments.trainer.room)
        generator = plugins.build_generator(arguments.generator)
        with closed_after(generator):
            route = InProcessRoute(trainer=trainer, generator=generator)
            generators = InProcessGenerator(handle=generator, decoder=arguments.decoder)
            yield Backends(trainer=group, generator=generators, route=route, critic=critic)


@contextmanager
def generator_alone(plan: BackendPlan, decoder: TextDecoder) -> Iterator[InProcessGenerator]:
    """A generator that answers with weights of its own, closed at the end whatever happens."""
    context = plan.generator_context(RankInfo(device=plan.device), None)
    observers = build_observers(plan.observers, ObserverContext(run_directory=None), plan.observer_options)
    generator = build_generator(plan.chosen["generator"], context, plan.config("generator"), observers)
    with closed_after(generator):
        yield InProcessGenerator(handle=generator, decoder=decoder)


@contextmanager
def _critic(arguments: BackendArguments, plugins: LoadedPlugins) -> Iterator[InProcessTrainer | None]:
    """The critic, which leaves the device to a generator that is to be started there; None where none is trained."""
    if arguments.critic is None:
        yield None
        return
    handle = plugins.build_trainer(arguments.critic)
    with closed_after(handle):
        make_room(handle, arguments.critic.room)
        yield _group(arguments, handle)


def _group(arguments: BackendArguments, handle: TrainerHandle) -> InProcessTrainer:
    return InProcessTrainer(
        handle=handle,
        max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
        temperature=arguments.temperature,
        whole_groups=arguments.whole_groups,
    )
