"""Arguments of the backends of a run, on each rank."""

from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from rlcore.gpu import Device
from rlcore.registry.discovery import Entry
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.residency import room_beside_critic, room_for_generator
from rlcore.spi import GeneratorContext, RankInfo, SetResidencyRequest, TrainerContext
from rlcore.spi.cluster import ClusterConfig
from rlcore.spi.execution import TextDecoder


@frozen(kw_only=True, eq=False)
class TrainerArguments:
    """The arguments of a trainer's backend, the same on every rank but for `rank_info`. They pickle."""

    context: TrainerContext
    config: Any
    """The section of the trainer's plugin."""
    capabilities: frozenset[str]
    """Capabilities of the trainer's plugin, as configured."""
    room: SetResidencyRequest | None
    """The place of its memory while a generator starts on the same device; None where that need not care."""

    def on(self, rank_info: RankInfo) -> "TrainerArguments":
        """Return the arguments of one rank."""
        return evolve(self, context=evolve(self.context, rank_info=rank_info))


@frozen(kw_only=True, eq=False)
class GeneratorArguments:
    """The arguments of a generator's backend. They pickle."""

    context: GeneratorContext
    config: Any
    """The section of the generator's plugin."""
    capabilities: frozenset[str]
    """Capabilities of the generator's plugin, as configured."""
    ranks_per_generator: int
    """Neighbouring ranks of a node that share one generator, where trainer and generator share their devices; the first of them
    builds it."""

    def on(self, rank_info: RankInfo, cluster: ClusterConfig, log_directory: Path | None) -> "GeneratorArguments":
        """Return the arguments of the generator that a rank hosts; its engine writes its output below `log_directory`."""
        devices = None
        if rank_info.device == "cuda":
            devices = cluster.generator_devices(rank_info.local_rank, self.ranks_per_generator)
        return evolve(self, context=evolve(self.context, rank_info=rank_info, devices=devices, log_directory=log_directory))


@frozen(kw_only=True, eq=False)
class BackendArguments:
    """The arguments of all backends of a run. They pickle; tokenizers with code of their own need cloudpickle."""

    trainer: TrainerArguments
    critic: TrainerArguments | None
    """The second trainer, on the ranks of the policy's; None where none is trained."""
    reference: TrainerArguments | None
    """The trainer that holds the reference on devices of its own; None where there is none, or the policy's trainer holds
    it."""
    generator: GeneratorArguments | None
    """None where nothing generates."""
    device: Device
    max_tokens_per_microbatch: int
    temperature: float
    """The temperature of sampling, at which log-probabilities are computed."""
    whole_groups: bool
    """True where the loss compares the sequences of a group, so that a microbatch holds whole groups."""
    decoder: TextDecoder
    """Makes the texts of samples, in the process that generates them."""
    log_directory: Path | None
    """The folder for the output of processes; None where there is no run, as in an evaluation."""

    @classmethod
    def of(cls, plan: BackendPlan, decoder: TextDecoder, log_directory: Path | None) -> "BackendArguments":
        """Return the arguments of a plan's backends."""
        rank_info = RankInfo(device=plan.device)

        config, found = plan.config("trainer"), _capabilities(plan.chosen["trainer"])
        trainer = TrainerArguments(
            context=plan.trainer_context(rank_info), config=config, capabilities=found, room=room_for_generator(plan)
        )
        critic, generator = plan.critic_context(rank_info), None
        if (entry := plan.chosen.get("generator")) is not None:
            generator = GeneratorArguments(
                context=plan.generator_context(rank_info, log_directory),
                config=plan.config("generator"),
                capabilities=_capabilities(entry),
                ranks_per_generator=plan.ranks_per_generator,
            )
        reference = None
        if plan.reference_is_apart:
            context, config = plan.reference_context(rank_info), plan.reference_config
            reference = evolve(trainer, context=context, config=config, room=None)
        return cls(
            trainer=trainer,
            critic=None if critic is None else evolve(trainer, context=critic, room=room_beside_critic(plan)),
            reference=reference,
            generator=generator,
            device=plan.device,
            max_tokens_per_microbatch=plan.recipe.training.max_tokens_per_microbatch,
            temperature=plan.recipe.rollout.temperature,
            whole_groups=plan.algorithm.needs.whole_groups,
            decoder=decoder,
            log_directory=log_directory,
        )


def _capabilities(entry: Entry) -> frozenset[str]:
    return frozenset() if entry.provider is None else entry.provider.capabilities
