"""Trains on prompts in this process, with the inner ring alone: no checkpoints, no evaluation, no overlap."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from attrs import frozen

from rlcore import spi
from rlcore.config.convert import selected_options
from rlcore.config.recipe import Recipe
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.binding import build_algorithm, build_environment, build_generator, build_trainer
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.handle import closed_after
from rlcore.run.data.prompt_stream import PromptStream
from rlcore.run.execution.groups import InProcessGenerator, InProcessTrainer
from rlcore.run.execution.in_process import InProcessRoute
from rlcore.run.execution.refit import Refitter
from rlcore.run.execution.residency import Residency
from rlcore.run.execution.weight_sync import GeneratorSync
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.loop import Loop
from rlcore.run.protocols import LoopObserver, LoopPosition, MetricsTo, WeightSync
from rlcore.run.report.metrics_file import append_metrics
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.synchronous.source import SynchronousSource
from rlcore.run.train_step.mismatch_monitor import MismatchMonitor
from rlcore.run.train_step.policy import PolicyLearner
from rlcore.run.train_step.scorers import Reference, scorers_of
from rlcore.spi import Tokenizer
from rlcore.spi.execution import Backends


class Unsaved:
    """Keeps nothing of a run but its metrics."""

    can_save = False

    def save(self, position: LoopPosition, rollouts: bytes | None, *, prune: bool) -> None:
        """See Saver: there are no checkpoints."""

    def completed(self, *, wait: bool) -> int | None:  # noqa: ARG002
        """See Saver."""
        return None

    def export_to(self, final: Path, kind: Literal["hf", "peft"] = "hf") -> Path:  # noqa: ARG002
        """See Saver."""
        raise spi.StorageError(f"{final}: a run of the inner ring exports no model")


@frozen(kw_only=True, eq=False)
class SynchronousRun:
    """A recipe whose plugins are named, and the rows that it trains on."""

    recipe: Recipe
    registry: Registry
    tokenizer: Tokenizer
    rows: Sequence[spi.Row]
    observers: Sequence[LoopObserver] = ()
    """Observers of the run besides its metrics file."""

    def train(self, metrics_file: Path, progress: Progress) -> None:
        """Train to the last step, with a line of the metrics file a step."""
        clock, guard, algorithm = PhaseClock(progress), InterruptGuard(), self._algorithm()
        with self._backends(algorithm) as backends, closing(self._source(backends, clock)) as source:
            loop = Loop(
                recipe=self.recipe,
                algorithm=algorithm,
                source=source,
                scorers=[*scorers_of(algorithm, Reference.of(backends), backends.trainer, clock)],
                learners=[self._policy(algorithm, backends, clock, progress)],
                weights=self._weights(backends, clock, progress, guard),
                saver=Unsaved(),
                observers=[
                    MetricsTo(write=partial(append_metrics, metrics_file)),
                    MetricsTo(write=progress.step),
                    *self.observers,
                ],
                progress=progress,
                clock=clock,
                guard=guard,
                position=LoopPosition(),
            )
            progress.started(metrics_file.parent, 0, self.recipe.run.num_steps)
            with guard.entered():
                loop.run()

    def _algorithm(self) -> AlgorithmHandle:
        entry, config = self._plugin("algorithm")
        algorithm = build_algorithm(entry, self.recipe.algorithm_context("float32", exact=False), config)
        needs = algorithm.needs
        if needs.source != "rollouts" or needs.critic:
            raise spi.ContractError(f"{entry.label}: the inner ring trains the policy alone, on its rollouts")
        return algorithm

    @contextmanager
    def _backends(self, algorithm: AlgorithmHandle) -> Iterator[Backends]:
        """Trainer and generator in this process, on its CPU."""
        recipe, rank_info = self.recipe, spi.RankInfo(device="cpu")
        entry, config = self._plugin("trainer")
        context = spi.TrainerContext(
            model=self._model,
            rank_info=rank_info,
            seed=recipe.run.seed,
            num_train_steps=recipe.run.num_steps * recipe.training.updates_per_step,
            needs_reference=algorithm.needs.reference_logprobs,
            max_sequence_length=recipe.rollout.max_sequence_length,
            optimizer=recipe.optimizer,
            schedule=recipe.schedule,
        )
        trainer = build_trainer(entry, context, config)
        with closed_after(trainer):
            entry, config = self._plugin("generator")
            generation = spi.GeneratorContext(
                model=self._model,
                rank_info=rank_info,
                seed=recipe.run.seed,
                max_sequence_length=recipe.rollout.max_sequence_length,
            )
            generator = build_generator(entry, generation, config)
            with closed_after(generator):
                group = InProcessTrainer(
                    handle=trainer,
                    max_tokens_per_microbatch=recipe.training.max_tokens_per_microbatch,
                    temperature=recipe.rollout.temperature,
                    whole_groups=algorithm.needs.whole_groups,
                )
                generators = InProcessGenerator(handle=generator, decoder=self.tokenizer)
                yield Backends(trainer=group, generator=generators, route=InProcessRoute(trainer=trainer, generator=generator))

    def _source(self, backends: Backends, clock: PhaseClock) -> SynchronousSource:
        recipe, rollout = self.recipe, self.recipe.rollout
        entry, config = self._plugin("environment")
        environment = build_environment(entry, spi.EnvironmentContext(seed=recipe.run.seed), config)
        assert backends.generator is not None, "built above"
        return SynchronousSource(
            generator=backends.generator,
            environment=cast("spi.Environment", environment),
            tokenizer=self.tokenizer,
            rows=self.rows,
            order=PromptStream(
                num_rows=len(self.rows),
                batch_size=recipe.training.prompts_per_step,
                seed=recipe.run.seed,
                shuffle=recipe.data.train.shuffle,
            ),
            sampling=spi.SamplingParams(
                temperature=rollout.temperature,
                top_k=rollout.top_k,
                top_p=rollout.top_p,
                stop_token_ids=self.tokenizer.stop_token_ids,
                stop_strings=rollout.stop_strings,
            ),
            samples_per_prompt=rollout.samples_per_prompt,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            max_turns=rollout.max_turns,
            seed=recipe.run.seed,
            clock=clock,
        )

    def _policy(self, algorithm: AlgorithmHandle, backends: Backends, clock: PhaseClock, progress: Progress) -> PolicyLearner:
        training = self.recipe.training
        monitor = MismatchMonitor(
            trainer=backends.trainer,
            writer=None,
            progress=progress,
            warn_above=training.warn_token_mult_prob_error,
            end_above=training.max_token_mult_prob_error,
        )
        return PolicyLearner(
            trainer=backends.trainer,
            algorithm=algorithm,
            reference=Reference.of(backends),
            monitor=monitor,
            clock=clock,
            has_dropout=False,
            samples_truncated=self.recipe.rollout.truncates,
        )

    def _weights(self, backends: Backends, clock: PhaseClock, progress: Progress, guard: InterruptGuard) -> WeightSync:
        assert backends.generator is not None, "built above"
        assert backends.route is not None, "built above"
        refit = self.recipe.refit
        refitter = Refitter(
            route=backends.route,
            generator=backends.generator,
            channel="in_process",
            dtype=self._model.dtype,
            max_bucket_bytes=refit.max_bucket_mib * 2**20,
            max_attempts=refit.max_attempts,
            may_alias=True,
            clock=clock,
            progress=progress,
        )
        residency = Residency(trainer=backends.trainer, generator=backends.generator, clock=clock)
        return GeneratorSync(refitter=refitter, residency=residency, guard=guard)

    @property
    def _model(self) -> spi.ModelSpec:
        return self.recipe.model.spec("float32")

    def _plugin(self, role: Literal["trainer", "generator", "algorithm", "environment"]) -> tuple[Entry, Any]:
        """The plugin that the recipe names for a role, with its options."""
        choice = getattr(self.recipe, role)
        for entry in self.registry.of(role):
            if choice is not None and entry.name == choice.name and entry.provider is not None:
                return entry, selected_options(choice, role, entry.name, entry.provider.config)
        named = "none" if choice is None else repr(choice.name)
        raise spi.PluginError(f"{role}: found {named}; expected the name of an installed plugin")
