"""A checked recipe with what was chosen for it: all that a run needs to know, with nothing allocated."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from rlcore import spi
from rlcore.config.data import Split
from rlcore.config.dump import dump_toml
from rlcore.config.model import CriticConfig
from rlcore.config.recipe import Recipe
from rlcore.gpu import Device
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.discovery import Entry, ObserverEntry, Registry
from rlcore.registry.selection import BACKEND_ROLES
from rlcore.run.plan.channel import generator_devices, separate
from rlcore.run.plan.sections import observer_options, plugin_config, reference_config


@frozen(kw_only=True, eq=False)
class RunPlan:
    """A checked recipe with its chosen plugins."""

    recipe: Recipe
    registry: Registry
    chosen: Mapping[spi.Role, Entry]
    """The plugin of each role that one plugin fills, where the recipe uses it."""
    sinks: tuple[Entry, ...]
    """The sinks that the recipe names."""
    device: Device
    algorithm: AlgorithmHandle
    environment: spi.Environment | spi.AgentEnvironment | None = None
    other_environments: tuple[Entry, ...] = ()
    """The environments that data sets name, besides the one in `chosen`."""
    channel: str | None = None
    """How weights travel; None where nothing generates."""
    ranks_per_generator: int = 1
    """Neighbouring ranks that share one generator."""
    given_rows: Mapping[Split, Sequence[Any]] = field(factory=dict)
    """The rows that a program brings, by the data set that they are of."""
    evaluating: bool = False
    """True where a model is measured and nothing trained."""
    continues: bool = False
    """True where the trainer's state is a checkpoint's: adapters that the run began with are in it, and not read again."""
    replay_schedule: Path | None = None
    """The schedule.jsonl of a run of this recipe: each step then trains on the groups that it names, and each part of a sample
    is generated with the weights that it names. None where no run is repeated."""
    planned_options: frozenset[str] = frozenset()
    """Keys of the generator's section that said "auto", and hold what its plan says."""
    notes: tuple[str, ...] = ()
    """Which plugins of higher priority "auto" could not take, and why; what plugins have to say of the recipe."""

    @property
    def runs_agents(self) -> bool:
        """Return whether episodes run by themselves, and ask the policy through OpenAI's API."""
        entry = self.chosen.get("environment")
        return entry is not None and entry.provider is not None and spi.capabilities.AGENT in entry.provider.capabilities

    @property
    def runs_here(self) -> bool:
        """Return whether trainer and generator compute on the driver's machine: an execution of several ranks may use
        others."""
        entry = self.chosen.get("execution")
        return entry is None or entry.provider is None or spi.capabilities.MULTI_RANK not in entry.provider.capabilities

    @property
    def answers_alone(self) -> bool:
        """Return whether the generator answers with weights of its own, beside no trainer."""
        return "generator" in self.chosen and "trainer" not in self.chosen

    @property
    def environments(self) -> tuple[Entry, ...]:
        """All environments, that of sets which name none first."""
        first = self.chosen.get("environment")
        return () if first is None else (first, *self.other_environments)

    @property
    def resets_cheaply(self) -> bool:
        """Return whether the environments can be asked for every prompt before the run."""
        capability, entries = spi.capabilities.CHEAP_RESET, self.environments
        return bool(entries) and all(one.provider is not None and capability in one.provider.capabilities for one in entries)

    @property
    def model(self) -> spi.ModelSpec:
        """The facts about the model that backends get."""
        return model_spec(self.recipe, self.device)

    @property
    def measures_examples(self) -> bool:
        """Return whether held-out rows are measured by the algorithm itself, and not by answers that an environment judges."""
        recipe, wanted = self.recipe, self.recipe.evaluation
        times = wanted.every_n_steps > 0 or wanted.at_start or wanted.at_end
        return self.algorithm.measures and recipe.environment is None and recipe.data.evaluation is not None and times

    @property
    def reference(self) -> spi.ModelSpec | None:
        """Return the reference's model; None where the reference is the policy's beginning."""
        named = self.recipe.reference
        return None if named is None else evolve(self.model, path=named.path, revision=named.revision)

    @property
    def reference_is_apart(self) -> bool:
        """Return whether the reference has devices of its own."""
        cluster = self.recipe.cluster
        return self.algorithm.needs.reference_logprobs and cluster is not None and cluster.reference_gpus_per_node > 0

    @property
    def reference_config(self) -> Any:
        """The options of the trainer's plugin for whatever holds the reference."""
        entry = self.chosen["trainer"]
        return reference_config(self.recipe, entry) if self.reference_is_apart else self.config("trainer")

    @property
    def critic(self) -> spi.ModelSpec | None:
        """The model that the critic begins with; None where none is trained."""
        named = self.recipe.critic or CriticConfig()
        if not self.algorithm.needs.critic:
            return None
        return self.model if named.path is None else evolve(self.model, path=named.path, revision=named.revision)

    @property
    def observers(self) -> tuple[ObserverEntry, ...]:
        """The observers in use."""
        return self.registry.observers(self.recipe.observers.names)

    @property
    def resolved(self) -> str:
        """The recipe as it runs, as TOML."""
        names = {str(role): entry.name for role, entry in self.chosen.items()}
        return dump_toml(self.recipe, names, [entry.name for entry in self.observers])

    @property
    def shares_devices(self) -> bool:
        """Return whether trainer and generator take turns on the same device."""
        reach = None if self.channel is None else spi.find_channel(self.channel).reach
        return reach not in (None, "separate") and self.device == "cuda" and not separate(self.recipe)

    @property
    def overlaps(self) -> bool:
        """Return whether the generator goes on while the trainer trains: the recipe lets samples be stale, and each has devices
        of its own."""
        return bool(self.recipe.async_.max_staleness) and separate(self.recipe)

    @property
    def max_microbatch_tokens(self) -> int:
        """Tokens of the largest microbatch, unless a single sequence has more: the recipe's, or those of a group that has to
        stay whole."""
        needs, recipe = self.algorithm.needs, self.recipe
        group = 1
        if needs.whole_groups:
            group = {"rollouts": recipe.rollout.samples_per_prompt, "demonstrations": 1}.get(needs.source, 2)
        bound = recipe.training.max_tokens_per_microbatch
        return bound if group == 1 else max(bound, group * recipe.rollout.max_sequence_length)

    @property
    def lora(self) -> spi.LoraSpec | None:
        """The recipe's adapters, as the trainer learns of them."""
        lora = self.recipe.lora
        return lora if lora is None or not self.continues else evolve(lora, init_from=None)

    @property
    def generator_lora(self) -> spi.LoraSpec | None:
        """The adapters that travel unmerged; None where there are none, or where they are merged in."""
        if self.recipe.refit.adapters == "merged" or not {"generator", "trainer"} <= self.chosen.keys():
            return None
        providers = [self.chosen[role].provider for role in BACKEND_ROLES]
        both = all(each is not None and spi.capabilities.ADAPTER_REFIT in each.capabilities for each in providers)
        return self.recipe.lora if both else None

    def config(self, role: spi.Role) -> Any:
        """The recipe's section of the chosen plugin."""
        return plugin_config(self.recipe, self.chosen[role])

    @property
    def observer_options(self) -> dict[str, object]:
        """The recipe's section of each observer in use that takes options, by the observer's name."""
        return observer_options(self.recipe, self.observers)

    def trainer_context(self, rank_info: spi.RankInfo) -> spi.TrainerContext:
        """The arguments of a rank's trainer."""
        return spi.TrainerContext(
            model=self.model,
            rank_info=rank_info,
            seed=self.recipe.run.seed,
            num_train_steps=self.num_train_steps,
            needs_reference=self.algorithm.needs.reference_logprobs and not self.reference_is_apart,
            reference=None if self.reference_is_apart else self.reference,
            max_sequence_length=self.recipe.rollout.max_sequence_length,
            max_microbatch_tokens=self.max_microbatch_tokens,
            optimizer=self.recipe.optimizer,
            schedule=self.recipe.schedule,
            lora=self.lora,
            head=self.algorithm.needs.head,
        )

    def reference_context(self, rank_info: spi.RankInfo) -> spi.TrainerContext:
        """Return the context with which the trainer's plugin builds a rank's reference, where that has devices of its own."""
        return evolve(
            self.trainer_context(rank_info),
            model=self.reference or self.model,
            needs_reference=True,
            needs_policy=False,
            reference=self.reference,
            lora=None,
        )

    def critic_context(self, rank_info: spi.RankInfo) -> spi.TrainerContext | None:
        """Return the context with which the trainer's plugin builds a rank's critic; None where there is none, as in an
        evaluation."""
        if self.critic is None or self.evaluating:
            return None
        return evolve(
            self.trainer_context(rank_info),
            model=self.critic,
            num_train_steps=self.num_critic_steps,
            needs_reference=False,
            reference=None,
            optimizer=self.critic_optimizer,
            lora=None,
            head="value",
        )

    @property
    def num_train_steps(self) -> int:
        """Optimizer steps of the policy in the whole run, as planned: those of its resumptions among them."""
        return max(self.recipe.run.num_steps - self.critic_warmup_steps, 1) * self.recipe.training.updates_per_step

    @property
    def num_critic_steps(self) -> int:
        """Optimizer steps of a critic in the whole run."""
        return self.recipe.run.num_steps * self.recipe.training.updates_per_step

    @property
    def critic_optimizer(self) -> spi.OptimizerSpec:
        """Return the critic's optimizer."""
        return (self.recipe.critic or CriticConfig()).optimizer(self.recipe.optimizer)

    @property
    def critic_warmup_steps(self) -> int:
        """First steps that train the critic alone."""
        return 0 if self.recipe.critic is None else self.recipe.critic.warmup_steps

    def generator_context(self, rank_info: spi.RankInfo, log_directory: Path | None) -> spi.GeneratorContext:
        """The arguments of a rank's generator."""
        return spi.GeneratorContext(
            model=self.model,
            rank_info=rank_info,
            seed=self.recipe.run.seed,
            max_sequence_length=self.recipe.rollout.max_sequence_length,
            channel=None if self.answers_alone else self.channel or "in_process",
            devices=generator_devices(self.recipe, self.device, self.ranks_per_generator, rank_info.local_rank),
            log_directory=log_directory,
            routed_experts=self.recipe.rollout.replay_routing,
            lora=self.generator_lora,
            delta=self.recipe.refit.delta,
            max_adapters=self.recipe.refit.max_adapters,
        )


def dtype_of(recipe: Recipe, device: Device) -> spi.DtypeName:
    """Return the compute dtype of a section."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def model_spec(recipe: Recipe, device: Device) -> spi.ModelSpec:
    """The facts about the model that backends get."""
    return recipe.model.spec(dtype_of(recipe, device))
