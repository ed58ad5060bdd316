"""Checks of an algorithm's losses inside a trainer, on the samples of one optimizer step."""

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.checks import check_own_names
from rlcore.spi import GROUP_IDS, MISMATCH_METRICS, ContractError, GlobalCounts, RolloutBatch, TokenBatch
from rlcore.spi.arrays import Int64Array
from rlcore_conformance.algorithms.algorithm_batches import ABSOLUTE, RELATIVE, require_finite
from rlcore_conformance.algorithms.algorithm_fixtures import AlgorithmFixtures, AlgorithmUnderTest, LossUnderTest
from rlcore_conformance.algorithms.loss_values import HeldConstants, LossValue
from rlcore_conformance.algorithms.rollout_data import with_rewards
from rlcore_conformance.references.reference import Float64Array

STEP = 1e-2
"""By how much a figure is moved, in nats, to see how the loss answers: float32 shows the change, and curvature does not."""
SLOPE_TOLERANCE = 0.02
"""Most that a derivative may be off, as a share of the greatest."""
KINK = 0.1
"""A figure at which the slopes on both sides differ by more than this share of the greatest is not compared: a bound begins."""


class AlgorithmLosses(AlgorithmFixtures):
    """Values, derivatives and metrics of its losses."""

    def test_gradients_are_slopes_of_the_loss(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """By differences of the loss's values, figure by figure; what the loss detaches is held constant in them too."""
        for loss in algorithm.losses(rollouts):
            for name, gradient in loss.whole().gradients.items():
                backward, forward = _slopes(loss, name)
                greatest = max(float(np.abs(gradient).max()), float(np.abs(forward).max()))
                smooth = np.abs(forward - backward) <= KINK * greatest + ABSOLUTE
                assert smooth.mean() > 0.5, f"the loss has a kink at most of the {name}"
                slopes = (forward + backward) / 2
                wrong = smooth & (np.abs(gradient - slopes) > SLOPE_TOLERANCE * greatest + 1e-5)
                worst = int(np.abs(np.where(wrong, gradient - slopes, 0)).argmax())
                assert not wrong.any(), (
                    f"{loss.spec.path}: the derivative with respect to {name} of token {worst} is {gradient[worst]:.6g}; "
                    f"the loss changes by {slopes[worst]:.6g}"
                )

    def test_the_entropy_of_a_metric_is_not_in_the_loss(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """With LossSpec.entropy = "metric" it has no gradient: a bonus would be in the figure and never be learned."""
        measured = [loss for loss in algorithm.losses(rollouts) if loss.spec.entropy == "metric"]
        if not measured:
            pytest.skip("no loss asks for the entropy as a metric")
        for loss in measured:
            moved = {**loss.figures, "entropy": loss.figures["entropy"] + np.float32(0.5)}
            found, expected = loss.value(moved, HeldConstants()), loss.value(loss.figures, HeldConstants())
            assert np.isclose(found, expected, RELATIVE, ABSOLUTE), (
                f"{loss.spec.path}: the loss is {found:.6g} instead of {expected:.6g} where the entropy is higher, which "
                'LossSpec.entropy = "metric" gives no gradient; expected "loss", or a loss without the entropy'
            )

    def test_metrics_have_names_of_their_own(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Neither the loop's, such as `loss` or `reward_mean`, nor those of MISMATCH_METRICS, which a run refuses."""
        for loss in algorithm.losses(rollouts):
            whole = loss.whole()
            taken = {*whole.sums, *whole.maxima} & {*MISMATCH_METRICS}
            assert not taken, f"{loss.spec.path}: found the metrics {sorted(taken)}, which trainers report; expected others"
            try:
                check_own_names(f"{loss.spec.path}: metrics", [*whole.sums, *whole.maxima])
            except ContractError as error:
                raise AssertionError(str(error)) from error

    def test_there_is_something_to_learn(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Samples of different rewards, demonstrations and preferences have a finite gradient that is not 0."""
        for loss in algorithm.losses(rollouts):
            whole = loss.whole()
            require_finite(whole.gradients, "on ordinary samples")
            assert any(gradient.any() for gradient in whole.gradients.values()), f"{loss.spec.path} has no gradient at all"

    def test_better_answers_become_likelier(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """The loss falls where the best answer of a group gains against the worst, where a demonstration or a desirable answer
        becomes likelier, or another labelled answer less likely, if the model is the one that was sampled."""
        needs = algorithm.handle.needs
        if needs.reference_model or needs.critic or algorithm.handle.reprompts:
            pytest.skip("what it learns is told by a teacher or a critic, not by rewards alone")
        if needs.head == "value" and needs.source == "demonstrations":
            pytest.skip("a model of values finds no answer likelier")
        loss = algorithm.losses(rollouts, on_policy=True)[0]
        (gradient,) = [loss.whole().gradients["values" if needs.head == "value" else "logprobs"]]
        batch = rollouts.batch
        pushes = np.add.reduceat(gradient[batch.tokens], batch.offsets[:-1])
        if needs.source == "demonstrations":
            assert pushes.sum() < 0, f"{loss.spec.path}: demonstrations become less likely"
            return
        if needs.source == "labelled":
            is_wrong = np.where(rollouts.rewards[0::2] > 0, pushes[0::2] >= 0, pushes[0::2] <= 0)
            assert not is_wrong.any(), f"{loss.spec.path}: answer {int(is_wrong.argmax())} moves against its label"
            return
        for group in np.unique(rollouts.group_ids):
            members = np.flatnonzero(rollouts.group_ids == group)
            best, worst = members[rollouts.rewards[members].argmax()], members[rollouts.rewards[members].argmin()]
            assert pushes[best] < pushes[worst], f"{loss.spec.path}: in group {group} the worst answer gains against the best"

    def test_the_cut_into_microbatches_does_not_matter(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Parts of the loss add up to the same value, derivatives and metrics, however the sequences are cut and ordered."""
        for loss in algorithm.losses(rollouts):
            expected = loss.whole()
            for cut, microbatches in cuts(loss.batch, whole_groups=loss.whole_groups).items():
                require_same(loss.added_up(microbatches), expected, f"{loss.spec.path}, cut {cut}")

    def test_the_counts_alone_are_divided_by(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Tokens and sequences count half in a step that has twice as many."""
        for loss in algorithm.losses(rollouts):
            counts, every = loss.batch.counts(), np.arange(loss.batch.num_sequences)
            doubled = GlobalCounts(num_loss_tokens=2 * counts.num_loss_tokens, num_loss_sequences=2 * counts.num_loss_sequences)
            alone, shared = loss.of(every), loss.of(every, doubled)
            message = f"{loss.spec.path}: found {shared.value:.6g} with twice the counts; expected {alone.value / 2:.6g}"
            assert np.isclose(2 * shared.value, alone.value, RELATIVE, ABSOLUTE), message

    def test_tokens_without_a_loss_have_no_part(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Nothing is learned from prompts: neither by log-probabilities nor by entropies."""
        for loss in algorithm.losses(rollouts):
            beside = loss.batch.tokens[~loss.batch.loss_mask]
            for name, gradient in loss.whole().gradients.items():
                if name != "values":  # that of the token before counts
                    assert not gradient[beside].any(), (
                        f"{loss.spec.path}: tokens without a loss have a gradient by their {name}"
                    )

    def test_what_fills_a_rank_counts_nothing(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """A rank without sequences gets some without loss tokens and with columns of zeros, which add nothing."""
        for loss in algorithm.losses(rollouts):
            group = np.flatnonzero(loss.batch.sequence_columns[GROUP_IDS] == loss.batch.sequence_columns[GROUP_IDS][0])
            part = loss.batch.select(group)
            columns = {name: np.zeros_like(column) for name, column in part.token_columns.items()}
            filler = evolve(part, loss_mask=np.zeros(part.num_tokens, np.bool_), token_columns=columns)
            found = loss.evaluate(loss.spec, filler, loss.batch.counts(), loss.told(part.tokens), None)
            assert found.value == 0.0, f"{loss.spec.path}: found {found.value:.6g} without loss tokens; expected 0.0"
            for name, gradient in found.gradients.items():
                assert not gradient.any(), f"{loss.spec.path}: {name} have a gradient without loss tokens"
            figures = {**found.sums, **found.maxima}
            wrong = sorted(name for name, value in figures.items() if not np.isfinite(value))
            wrong += sorted(name for name, value in found.sums.items() if value != 0.0)
            assert not wrong, f"{loss.spec.path}: the metrics {wrong} count what has no loss tokens"

    def test_sequences_without_a_signal_have_no_gradient(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Sequences without a signal, as `has_signal` says where it is given, have no gradient: updates on them alone are never
        made."""
        if algorithm.handle.needs.source == "rollouts":
            rewards = rollouts.rewards.copy()
            rewards[rollouts.group_ids == 0] = 1.0
            rollouts = with_rewards(rollouts, rewards)
        training = algorithm.handle.build_batch(rollouts)
        if training.has_signal is None:
            pytest.skip("it names no sequences without a signal")
        for spec in filter(None, (training.loss, training.critic_loss)):
            gradients = algorithm.loss(training, spec, rollouts).whole().gradients
            silent = training.batch.tokens[~np.repeat(training.has_signal, training.batch.lengths)]
            for name, gradient in gradients.items():
                assert not gradient[silent].any(), f"{spec.path}: sequences without a signal have a gradient by their {name}"


def cuts(batch: TokenBatch, *, whole_groups: bool) -> dict[str, Sequence[Int64Array]]:
    """Microbatches by name: those of groups, and of single sequences where a group may be taken apart."""
    groups = batch.sequence_columns[GROUP_IDS]
    by_group = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    found: dict[str, Sequence[Int64Array]] = {
        "by groups": by_group,
        "by groups in the other order": [np.concatenate(by_group[::-1])],
    }
    if not whole_groups:
        every = np.arange(batch.num_sequences)
        found["by sequences"] = np.split(every, batch.num_sequences)
        found["in reversed order"] = np.array_split(every[::-1], 3)
    return found


def require_same(found: LossValue, expected: LossValue, where: str) -> None:
    """Fail where value, derivatives or metrics differ by more than rounding."""
    assert np.isclose(found.value, expected.value, RELATIVE, 1e-5), f"{where}: {found.value}; expected {expected.value}"
    for name, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, expected.gradients[name], RELATIVE, ABSOLUTE, err_msg=f"{where}: {name}")
    for kind in ("sums", "maxima"):
        figures, others = getattr(found, kind), getattr(expected, kind)
        assert set(figures) == set(others), f"{where}: metrics {sorted(figures)}; expected {sorted(others)}"
        for name, value in figures.items():
            assert np.isclose(value, others[name], RELATIVE, 1e-5), f"{where}: {name} {value}; expected {others[name]}"


def _slopes(loss: LossUnderTest, name: str) -> tuple[Float64Array, Float64Array]:
    """Return how the loss changes as each figure falls, and as it rises; those of tokens that are not in the batch are 0."""
    figure, constants = loss.figures[name], HeldConstants()
    here = loss.value(loss.figures, constants)
    slopes = np.zeros((2, len(figure)))
    for token in loss.batch.tokens:
        for row, step in enumerate((-STEP, STEP)):
            moved = figure.copy()
            moved[token] += np.float32(step)
            change = float(moved[token]) - float(figure[token])
            slopes[row, token] = (loss.value({**loss.figures, name: moved}, constants) - here) / change
    return slopes[0], slopes[1]
