"""Trainer and generator in the driver's own process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from rlcore.registry.binding import build_generator, build_trainer
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.groups import InProcessGenerator, InProcessTrainer
from rlcore.run.execution.residency import make_room, room_beside_critic, room_for_generator
from rlcore.run.execution.shutdown import closed_after
from rlcore.run.protocols import Backends, RefitCommand, Refitted
from rlcore.spi import RankInfo, RefitRequest


@frozen(kw_only=True, eq=False)
class InProcessRoute:
    """Carries weights from the one trainer to the one generator of this process."""

    trainer: TrainerHandle
    generator: GeneratorHandle

    def sync_weights(self, order: RefitCommand) -> Refitted:
        """Export the trainer's weights and refit the generator with them."""
        export = self.trainer.export_weights(order.export)
        version, may_alias = order.export.weight_version, order.may_alias
        request = RefitRequest(
            weight_version=version, channel=order.channel, weights=export, may_alias=may_alias, delta=order.delta
        )
        result = self.generator.refit(request)
        return Refitted(drafts=result.drafts, sent_bytes=result.sent_bytes)


@contextmanager
def in_process(prepared: BackendPlan, tokenizer: Tokenizer, log_directory: Path | None) -> Iterator[Backends]:
    """Trainer and generator, closed at the end whatever happens."""
    rank_info, observers = RankInfo(device=prepared.device), prepared.observers
    context = prepared.trainer_context(rank_info)
    trainer = build_trainer(prepared.chosen["trainer"], context, prepared.config("trainer"), observers)
    with closed_after(trainer), _critic(prepared, rank_info) as critic:
        group = _group(prepared, trainer)
        if "generator" not in prepared.chosen:
            yield Backends(trainer=group, generator=None, route=None)
            return
        make_room(trainer, room_for_generator(prepared))
        generator_context = prepared.generator_context(rank_info, log_directory)
        entry = prepared.chosen["generator"]
        generator = build_generator(entry, generator_context, prepared.config("generator"), observers)
        with closed_after(generator):
            route = InProcessRoute(trainer=trainer, generator=generator)
            generators = InProcessGenerator(handle=generator, tokenizer=tokenizer)
            yield Backends(trainer=group, generator=generators, route=route, critic=critic)


@contextmanager
def generator_alone(prepared: BackendPlan, tokenizer: Tokenizer) -> Iterator[InProcessGenerator]:
    """A generator that answers with weights of its own, closed at the end whatever happens."""
    context = prepared.generator_context(RankInfo(device=prepared.device), None)
    generator = build_generator(prepared.chosen["generator"], context, prepared.config("generator"), prepared.observers)
    with closed_after(generator):
        yield InProcessGenerator(handle=generator, tokenizer=tokenizer)


@contextmanager
def _critic(prepared: BackendPlan, rank_info: RankInfo) -> Iterator[InProcessTrainer | None]:
    """The critic, which leaves the device to a generator that is to be started there; None where none is trained."""
    context = prepared.critic_context(rank_info)
    if context is None:
        yield None
        return
    handle = build_trainer(prepared.chosen["trainer"], context, prepared.config("trainer"), prepared.observers)
    with closed_after(handle):
        make_room(handle, room_beside_critic(prepared))
        yield _group(prepared, handle)


def _group(prepared: BackendPlan, handle: TrainerHandle) -> InProcessTrainer:
    return InProcessTrainer(
        handle=handle,
        max_tokens_per_microbatch=prepared.recipe.training.max_tokens_per_microbatch,
        temperature=prepared.recipe.rollout.temperature,
        whole_groups=prepared.algorithm.needs.whole_groups,
    )
