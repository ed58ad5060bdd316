"""How the kit builds an algorithm, gives it samples, and evaluates its losses as a trainer would."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from attrs import evolve, frozen

from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.registry.binding import build_algorithm
from rlcore.spi import (
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    AlgorithmContext,
    GlobalCounts,
    LossSpec,
    Provider,
    RolloutBatch,
    TokenBatch,
    TrainingBatch,
)
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore_conformance.algorithms.loss_values import EvaluateLoss, Figures, HeldConstants, LossValue, torch_loss, total
from rlcore_conformance.algorithms.rollout_data import MAX_TOKENS, SAMPLES_PER_PROMPT, log_probabilities, make_rollouts
from rlcore_conformance.references.fixtures import ProviderFixtures, entry_of

OpenAlgorithm: TypeAlias = Callable[[], AlgorithmHandle]


@frozen(kw_only=True, eq=False)
class LossUnderTest:
    """A loss and the whole batch of one optimizer step, with what a model tells of its tokens."""

    spec: LossSpec
    batch: TokenBatch
    """Its tokens are their numbers among those of the samples."""
    figures: Figures
    """By these numbers."""
    evaluate: EvaluateLoss
    whole_groups: bool

    def told(self, tokens: Any) -> dict[str, Float32Array]:
        """The figures of some tokens, by their numbers."""
        return {name: figure[tokens] for name, figure in self.figures.items()}

    def of(self, sequences: Int64Array, counts: GlobalCounts | None = None) -> LossValue:
        """The loss of one microbatch; the counts are those of the whole batch unless given."""
        part = self.batch.select(sequences)
        return self.evaluate(self.spec, part, counts or self.batch.counts(), self.told(part.tokens), None)

    def added_up(self, microbatches: Sequence[Int64Array]) -> LossValue:
        """The loss of all microbatches, its gradients by the numbers of tokens."""
        parts = [self.of(sequences) for sequences in microbatches]
        tokens = [self.batch.select(sequences).tokens for sequences in microbatches]
        return total(parts, tokens, len(self.figures["logprobs"]))

    def whole(self) -> LossValue:
        """The loss of the whole batch in one microbatch."""
        return self.added_up([np.arange(self.batch.num_sequences)])

    def value(self, figures: Figures, constants: HeldConstants) -> float:
        """The loss of the whole batch at other figures, with the same constants."""
        told = {name: figure[self.batch.tokens] for name, figure in figures.items()}
        return self.evaluate(self.spec, self.batch, self.batch.counts(), told, constants).value


@frozen(kw_only=True, eq=False)
class AlgorithmUnderTest:
    """An algorithm's handle, with the calls that the checks repeat."""

    handle: AlgorithmHandle
    open: OpenAlgorithm
    evaluate: EvaluateLoss
    minibatches_per_step: int

    def losses(self, rollouts: RolloutBatch, *, on_policy: bool = False) -> list[LossUnderTest]:
        """The losses of a first update on these samples: the policy's, and the critic's where there is one."""
        training = self.open().build_batch(rollouts)
        critic = [training.critic_loss] if training.critic_loss is not None else []
        return [self.loss(training, spec, rollouts, on_policy=on_policy) for spec in (training.loss, *critic)]

    def loss(
        self, training: TrainingBatch, spec: LossSpec, rollouts: RolloutBatch, *, on_policy: bool = False
    ) -> LossUnderTest:
        """A loss with the columns and figures that the loop and a trainer add; `on_policy` where the model is the one that the
        samples are of."""
        needs, num_tokens = self.handle.needs, MAX_TOKENS
        is_valued = spec is training.critic_loss or needs.head == "value"
        generated = log_probabilities(num_tokens, 13)
        if (column := rollouts.batch.token_columns.get(GENERATION_LOGPROBS)) is not None:
            generated[rollouts.batch.tokens] = column
        noise = np.zeros(num_tokens) if on_policy else np.random.default_rng(14).normal(0.0, 0.2, num_tokens)
        figures = {"logprobs": (generated + noise).astype(np.float32)}
        if is_valued:
            values = np.random.default_rng(15).standard_normal(num_tokens).astype(np.float32)
            figures = {"logprobs": np.zeros(num_tokens, np.float32), "values": values}
        elif spec.entropy != "none":
            figures["entropy"] = -log_probabilities(num_tokens, 16)
        batch = training.batch
        if needs.reference_logprobs and not needs.reference_logprobs_in_rollouts and not is_valued:
            told = log_probabilities(num_tokens, 17)[batch.tokens]
            batch = batch.with_token_column(REFERENCE_LOGPROBS, np.where(batch.loss_mask, told, np.float32(0)))
            spec = with_column(spec, REFERENCE_LOGPROBS)
        # A loop computes none for the updates of a step behind the first unless the algorithm says that it needs them.
        if not is_valued and (needs.previous_logprobs or self.minibatches_per_step == 1):
            previous = generated if on_policy else (generated - 0.5 * noise).astype(np.float32)
            figures["previous_logprobs"] = previous
            batch = batch.with_token_column(PREVIOUS_LOGPROBS, previous[batch.tokens])
            spec = evolve(with_column(spec, PREVIOUS_LOGPROBS), previous_logprobs="given")
        return LossUnderTest(spec=spec, batch=batch, figures=figures, evaluate=self.evaluate, whole_groups=needs.whole_groups)


class AlgorithmFixtures(ProviderFixtures):
    """The fixtures of an algorithm's checks; each can be overridden."""

    @pytest.fixture
    def algorithm_context(self) -> AlgorithmContext:
        """The context from which it is built."""
        return AlgorithmContext(
            seed=0,
            samples_per_prompt=SAMPLES_PER_PROMPT,
            minibatches_per_step=2,
            temperature=1.0,
            generation_logprobs_exact=False,
        )

    @pytest.fixture
    def evaluate_loss(self) -> EvaluateLoss:
        """How its losses are evaluated: in torch, on the CPU."""
        return torch_loss

    @pytest.fixture
    def open_algorithm(self, provider: Provider, config: Any, algorithm_context: AlgorithmContext) -> OpenAlgorithm:
        """Builds a fresh algorithm."""
        return lambda: build_algorithm(entry_of("algorithm", provider, "cpu"), algorithm_context, config)

    @pytest.fixture
    def algorithm(
        self, open_algorithm: OpenAlgorithm, evaluate_loss: EvaluateLoss, algorithm_context: AlgorithmContext
    ) -> AlgorithmUnderTest:
        """A fresh algorithm."""
        return AlgorithmUnderTest(
            handle=open_algorithm(),
            open=open_algorithm,
            evaluate=evaluate_loss,
            minibatches_per_step=algorithm_context.minibatches_per_step,
        )

    @pytest.fixture
    def rollouts(self, algorithm: AlgorithmUnderTest) -> RolloutBatch:
        """A step's samples, demonstrations or preferences, as it needs them."""
        return make_rollouts(algorithm.handle.needs)


def with_column(spec: LossSpec, name: str) -> LossSpec:
    """The loss, which gets one more column."""
    return evolve(spec, token_columns=tuple(dict.fromkeys((*spec.token_columns, name))))
