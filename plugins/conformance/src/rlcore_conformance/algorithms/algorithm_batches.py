"""Checks of the batch that an algorithm makes of a step's samples on the driver."""

import pickle

import numpy as np
import pytest

from rlcore.spi import ADVANTAGES, GROUP_IDS, AlgorithmNeeds, RolloutBatch, TrainingBatch
from rlcore_conformance.algorithms.algorithm_fixtures import AlgorithmFixtures, AlgorithmUnderTest, OpenAlgorithm
from rlcore_conformance.algorithms.rollout_data import make_rollouts, taken, with_rewards, without

RELATIVE, ABSOLUTE = 1e-3, 1e-6
"""How near derivatives of losses have to be that are computed on other microbatches, in float32."""


class AlgorithmBatches(AlgorithmFixtures):
    """Advantages, filters and columns."""

    def test_the_same_samples_make_the_same_batch(self, open_algorithm: OpenAlgorithm, rollouts: RolloutBatch) -> None:
        """A resumed run goes on as one that was never stopped: nothing is drawn at random but from the context's seed."""
        require_equal(open_algorithm().build_batch(rollouts), open_algorithm().build_batch(rollouts))

    def test_nothing_is_kept_between_steps_but_the_state(self, open_algorithm: OpenAlgorithm, rollouts: RolloutBatch) -> None:
        """A fresh algorithm that loads the state of `save_state` goes on exactly."""
        first, resumed = open_algorithm(), open_algorithm()
        others = make_rollouts(first.needs, seed=1)
        first.build_batch(rollouts)
        if first.is_stateful:
            state = first.save_state()
            assert state is not None
            resumed.load_state(state)
        require_equal(first.build_batch(others), resumed.build_batch(others))

    def test_a_state_can_be_gone_back_to(self, open_algorithm: OpenAlgorithm, rollouts: RolloutBatch) -> None:
        """An algorithm that is given an earlier state forgets what came after it."""
        algorithm = open_algorithm()
        if not algorithm.is_stateful:
            pytest.skip(f"{algorithm.entry.name} keeps nothing between steps")
        state = algorithm.save_state()
        assert state is not None
        expected = algorithm.build_batch(rollouts)
        algorithm.load_state(state)
        require_equal(expected, algorithm.build_batch(rollouts))

    def test_samples_are_left_as_they_are(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Tokens, masks and columns of the rollouts are the loop's."""
        before = pickle.dumps(rollouts.batch)
        algorithm.handle.build_batch(rollouts)
        assert pickle.dumps(rollouts.batch) == before, "build_batch changed the samples in place; expected it to copy them"

    def test_the_batch_keeps_tokens_and_groups(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Every sequence is one of the samples, of the same group; no token gets a loss that had none."""
        batch = algorithm.handle.build_batch(rollouts).batch
        known = {rollouts.batch.tokens[start]: index for index, start in enumerate(rollouts.batch.offsets[:-1])}
        assert GROUP_IDS in batch.sequence_columns, f"the batch has no sequence column {GROUP_IDS!r}; expected the rollouts'"
        for index, start in enumerate(batch.offsets[:-1]):
            source = known.get(batch.tokens[start])
            assert source is not None, f"sequence {index} begins with a token that begins none of the samples"
            tokens, group = batch.select(np.asarray([index])), batch.sequence_columns[GROUP_IDS][index]
            original = rollouts.batch.select(np.asarray([source]))
            assert np.array_equal(tokens.tokens, original.tokens), f"sequence {index} has other tokens than its sample"
            assert group == rollouts.group_ids[source], f"sequence {index} is of group {group}; expected that of its sample"
            added = tokens.loss_mask & ~original.loss_mask
            assert not added.any(), f"sequence {index} has loss tokens that its sample has not"

    def test_advantages_are_of_loss_tokens(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """The column is float32 and 0 elsewhere."""
        batch = algorithm.handle.build_batch(rollouts).batch
        if ADVANTAGES not in batch.token_columns:
            pytest.skip("its batch has no advantages")
        advantages = batch.token_columns[ADVANTAGES]
        assert advantages.dtype == np.float32, f"advantages are {advantages.dtype}; expected float32"
        assert not advantages[~batch.loss_mask].any(), "tokens without a loss have advantages; expected 0.0"

    def test_columns_of_the_loss_are_there(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Each name in `token_columns` is one of the batch's, or one that the loop adds by what the algorithm needs."""
        training = algorithm.handle.build_batch(rollouts)
        for spec in filter(None, (training.loss, training.critic_loss)):
            loss = algorithm.loss(training, spec, rollouts)
            missing = set(spec.token_columns) - set(loss.batch.token_columns)
            assert not missing, f"{spec.path} reads the token columns {sorted(missing)}, which nobody provides"
            assert pickle.loads(pickle.dumps(spec)) == spec, f"the options of {spec.path} change on their way to a worker"

    def test_equal_rewards_are_no_error(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """Equal rewards of all samples make finite advantages and losses, also where they are divided by the
        rewards' deviation."""
        require_rewards(algorithm.handle.needs)
        for reward in (0.0, 1.0, 1 / 3):
            equal = with_rewards(rollouts, np.full(rollouts.batch.num_sequences, reward, np.float32))
            for loss in algorithm.losses(equal):
                whole, where = loss.whole(), f"where all rewards are {reward:.3g}"
                require_finite(whole.gradients, where)
                figures = {"the loss": whole.value, **whole.sums, **whole.maxima}
                wrong = sorted(name for name, value in figures.items() if not np.isfinite(value))
                assert not wrong, f"{wrong} are not finite {where}"

    def test_samples_that_failed_count_for_nothing(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """A step with a sample that has no reward is the step without that sample."""
        require_rewards(algorithm.handle.needs)
        failed = np.zeros(rollouts.batch.num_sequences, np.bool_)
        failed[[1, 6]] = True
        with_them = [loss.whole() for loss in algorithm.losses(without(rollouts, failed))]
        left = [loss.whole() for loss in algorithm.losses(taken(rollouts, np.flatnonzero(~failed)))]
        for found, expected in zip(with_them, left, strict=True):
            for name, gradient in found.gradients.items():
                message = f"failed samples change the derivatives with respect to {name}"
                np.testing.assert_allclose(gradient, expected.gradients[name], RELATIVE, ABSOLUTE, err_msg=message)

    def test_a_step_of_failed_samples_is_no_error(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """It has no signal, and says so."""
        require_rewards(algorithm.handle.needs)
        training = algorithm.handle.build_batch(without(rollouts, np.ones(rollouts.batch.num_sequences, np.bool_)))
        learns = training.no_signal is None and training.batch.loss_mask.any()
        assert not learns, "every sample failed, and the batch has loss tokens and a signal"

    def test_the_order_of_groups_does_not_matter(self, algorithm: AlgorithmUnderTest, rollouts: RolloutBatch) -> None:
        """A step's prompts come in any order."""
        groups = rollouts.group_ids
        order = np.concatenate([np.flatnonzero(groups == group) for group in np.unique(groups)[::-1]])
        found = [loss.whole() for loss in algorithm.losses(taken(rollouts, order))]
        expected = [loss.whole() for loss in algorithm.losses(taken(rollouts, np.arange(len(groups))))]
        for one, other in zip(found, expected, strict=True):
            for name, gradient in one.gradients.items():
                message = f"the order of prompts changes the derivatives with respect to {name}"
                np.testing.assert_allclose(gradient, other.gradients[name], RELATIVE, ABSOLUTE, err_msg=message)


def require_rewards(needs: AlgorithmNeeds) -> None:
    """Skip the test unless samples are rewarded."""
    if needs.source != "rollouts":
        pytest.skip(f"it learns from {needs.source}, not from rewards")


def require_finite(gradients: object, where: str) -> None:
    """Fail where a derivative is not finite."""
    assert isinstance(gradients, dict)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), f"derivatives with respect to {name} are not finite {where}"


def require_equal(found: TrainingBatch, expected: TrainingBatch) -> None:
    """Fail where two batches are not the same to the last bit."""
    assert np.array_equal(found.batch.tokens, expected.batch.tokens), "the batches have other tokens"
    assert np.array_equal(found.batch.offsets, expected.batch.offsets), "the batches have other sequences"
    assert np.array_equal(found.batch.loss_mask, expected.batch.loss_mask), "the batches have other loss masks"
    signals, others = np.asarray(found.has_signal), np.asarray(expected.has_signal)
    assert np.array_equal(signals, others), "other sequences have a signal"
    for kind in ("token_columns", "sequence_columns"):
        columns, others = getattr(found.batch, kind), getattr(expected.batch, kind)
        assert set(columns) == set(others), f"the batches have other {kind}"
        differing = [name for name, column in columns.items() if not np.array_equal(column, others[name])]
        assert not differing, f"the {kind} {differing} differ where the samples are the same"
    assert found.loss == expected.loss, "the losses differ"
    assert found.critic_loss == expected.critic_loss, "the critic's losses differ"
    assert dict(found.metrics) == dict(expected.metrics), "the metrics differ"
    assert found.no_signal == expected.no_signal, "one batch has a signal, the other not"
