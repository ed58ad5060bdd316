"""Algorithms that are each wrong in one known way, made from the fake; each names the check of the kit that has to fail."""

import numpy as np
from attrs import evolve
from mutants import killed_by

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, GROUP_IDS, WEIGHT_VERSIONS
from rlcore.testing.fakes import algorithm
from rlcore.testing.fakes.algorithm import FakeAlgorithm, FakeAlgorithmConfig


class ChangedBatch(FakeAlgorithm):
    def build_batch(self, rollouts):
        return self.changed(super().build_batch(rollouts), rollouts)


class ChangedAdvantages(ChangedBatch):
    def changed(self, training, rollouts):
        column = self.advantages(training.batch.token_columns[ADVANTAGES].copy(), rollouts)
        return evolve(training, batch=training.batch.with_token_column(ADVANTAGES, column.astype(np.float32)))

    def per_token(self, rewards, rollouts):
        return np.where(rollouts.batch.loss_mask, np.repeat(rewards, rollouts.batch.lengths), 0.0)


class ChangedMask(ChangedBatch):
    def changed(self, training, rollouts):
        return evolve(training, batch=evolve(training.batch, loss_mask=self.mask(training.batch, rollouts)))


class ChangedLoss(FakeAlgorithm):
    def loss(self):
        return evolve(super().loss(), path=f"{__name__}:{self.function}")


@killed_by("test_the_same_samples_make_the_same_batch")
class NoiseWithoutASeed(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return column * np.random.default_rng().uniform(0.9, 1.1)


@killed_by("test_nothing_is_kept_between_steps_but_the_state")
class BaselineNotSaved(ChangedAdvantages):
    baseline = 0.0

    def advantages(self, column, rollouts):
        self.baseline += float(rollouts.rewards.mean())
        return column - 0.01 * self.baseline * rollouts.batch.loss_mask


class Stateful(ChangedAdvantages):
    baseline = 0.0

    def advantages(self, column, rollouts):
        self.baseline = 0.5 * self.baseline + float(rollouts.rewards.mean())
        return column - self.baseline * rollouts.batch.loss_mask

    def save_state(self):
        return {"baseline": self.baseline}

    def load_state(self, state):
        self.baseline = state["baseline"]


@killed_by("test_nothing_is_kept_between_steps_but_the_state")
class StateNotLoaded(Stateful):
    def load_state(self, state):
        pass


@killed_by("test_nothing_is_kept_between_steps_but_the_state")
class StateRounded(Stateful):
    def save_state(self):
        return {"baseline": round(self.baseline, 1)}


@killed_by("test_a_state_can_be_gone_back_to")
class StateAddedToWhatIsThere(Stateful):
    def load_state(self, state):
        self.baseline += state["baseline"]


@killed_by("test_samples_are_left_as_they_are")
class ColumnChangedInPlace(ChangedBatch):
    def changed(self, training, rollouts):
        rollouts.batch.token_columns[GENERATION_LOGPROBS][:] -= 0.5
        return training


@killed_by("test_the_batch_keeps_tokens_and_groups")
class PromptsTrainedOn(ChangedMask):
    def mask(self, batch, rollouts):
        mask = np.ones_like(batch.loss_mask)
        mask[batch.offsets[:-1]] = False
        return mask


@killed_by("test_the_batch_keeps_tokens_and_groups")
class GroupsNumberedAnew(ChangedBatch):
    def changed(self, training, rollouts):
        numbers = np.arange(training.batch.num_sequences, dtype=np.int32)
        columns = {**training.batch.sequence_columns, GROUP_IDS: numbers}
        return evolve(training, batch=evolve(training.batch, sequence_columns=columns))


@killed_by("test_the_batch_keeps_tokens_and_groups")
class GroupsLeftOut(ChangedBatch):
    def changed(self, training, rollouts):
        return evolve(training, batch=evolve(training.batch, sequence_columns={}))


@killed_by("test_the_batch_keeps_tokens_and_groups")
class TokensShifted(ChangedBatch):
    def changed(self, training, rollouts):
        return evolve(training, batch=evolve(training.batch, tokens=np.roll(training.batch.tokens, -1)))


@killed_by("test_advantages_are_of_loss_tokens")
class AdvantagesOfPrompts(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return np.repeat(algorithm.group_advantages(rollouts), rollouts.batch.lengths)


@killed_by("test_columns_of_the_loss_are_there")
class ColumnThatNobodyBrings(FakeAlgorithm):
    def loss(self):
        found = super().loss()
        return evolve(found, token_columns=(*found.token_columns, "bonus"))


@killed_by("test_equal_rewards_are_no_error")
class DividedByTheDeviation(ChangedAdvantages):
    def advantages(self, column, rollouts):
        with np.errstate(all="ignore"):
            return column / rollouts.rewards.std()


@killed_by("test_equal_rewards_are_no_error")
class DividedByTheSpread(ChangedAdvantages):
    """Of the best and the worst."""

    def advantages(self, column, rollouts):
        with np.errstate(all="ignore"):
            return column / (rollouts.rewards.max() - rollouts.rewards.min())


@killed_by("test_samples_that_failed_count_for_nothing")
class FailedSamplesInTheMean(ChangedAdvantages):
    def advantages(self, column, rollouts):
        groups = rollouts.group_ids
        means = np.bincount(groups, rollouts.rewards) / np.bincount(groups)
        return self.per_token(rollouts.rewards - means[groups], rollouts)


@killed_by("test_samples_that_failed_count_for_nothing")
class FailedSamplesCountInTheSize(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return column / np.repeat(np.bincount(rollouts.group_ids)[rollouts.group_ids], rollouts.batch.lengths)


@killed_by("test_a_step_of_failed_samples_is_no_error")
class FailedSamplesTrainedOn(ChangedMask):
    def changed(self, training, rollouts):
        return evolve(super().changed(training, rollouts), no_signal=None)

    def mask(self, batch, rollouts):
        return batch.token_columns[WEIGHT_VERSIONS] >= 0


@killed_by("test_the_order_of_groups_does_not_matter")
class MeanOfTheFirstGroup(ChangedAdvantages):
    def advantages(self, column, rollouts):
        first = rollouts.group_ids == rollouts.group_ids[0]
        return self.per_token(rollouts.rewards - rollouts.rewards[first].mean(), rollouts)


@killed_by("test_the_order_of_groups_does_not_matter")
class LaterGroupsCountMore(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return column * np.repeat(1.0 + rollouts.group_ids, rollouts.batch.lengths)


@killed_by("test_better_answers_become_likelier")
class SignTurned(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return -column


@killed_by("test_better_answers_become_likelier")
class RewardsOfTheNeighbour(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return self.per_token(np.roll(rollouts.rewards, 1), rollouts)


@killed_by("test_there_is_something_to_learn")
class AdvantagesLost(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return np.zeros_like(column)


@killed_by("test_there_is_something_to_learn")
class AdvantagesInIntegers(ChangedAdvantages):
    def advantages(self, column, rollouts):
        return np.trunc(column)


@killed_by("test_sequences_without_a_signal_have_no_gradient")
class SignalOfTheWrongSequences(ChangedBatch):
    def changed(self, training, rollouts):
        return evolve(training, has_signal=rollouts.rewards > 0)


def scaled(output, factor):
    """The whole loss, its derivatives and metrics too."""
    found = output.loss
    grads = {
        name: None if (grad := getattr(found, name)) is None else factor * grad for name in ("logprob_grads", "entropy_grads")
    }
    return evolve(
        output,
        loss=algorithm.FakeLoss(value=factor * found.value, **grads),
        sums={name: factor * value for name, value in output.sums.items()},
    )


def mean_of_the_microbatch(inputs, config):
    own = max(int(inputs.loss_mask.sum()), 1)
    return scaled(algorithm.fake_policy_gradient(inputs, config), inputs.counts.num_loss_tokens / own)


def sequences_weigh_by_their_place(inputs, config):
    weights = np.repeat(1.0 + np.arange(len(inputs.offsets) - 1), np.diff(inputs.offsets)).astype(np.float32)
    columns = {**inputs.token_columns, ADVANTAGES: inputs.token_columns[ADVANTAGES] * weights}
    return algorithm.fake_policy_gradient(evolve(inputs, token_columns=columns), config)


def metric_of_the_microbatch(inputs, config):
    share = max(int(inputs.loss_mask.sum()), 1) / inputs.counts.num_loss_tokens
    output = algorithm.fake_policy_gradient(inputs, config)
    return evolve(output, sums={name: value / share for name, value in output.sums.items()})


def counts_ignored(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    return scaled(output, inputs.counts.num_loss_tokens / 40)


def divided_twice(inputs, config):
    return scaled(algorithm.fake_policy_gradient(inputs, config), 1 / inputs.counts.num_loss_sequences)


def gradient_halved(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    return evolve(output, loss=evolve(output.loss, logprob_grads=output.loss.logprob_grads / 2))


def gradient_of_the_first_tokens(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    grads = output.loss.logprob_grads.copy()
    grads[inputs.offsets[1:] - 1] = 0.0
    return evolve(output, loss=evolve(output.loss, logprob_grads=grads))


def gradient_without_the_ratio(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    ratio = np.exp(inputs.logprobs - inputs.previous_logprobs)
    return evolve(output, loss=evolve(output.loss, logprob_grads=output.loss.logprob_grads / ratio))


def entropy_pulled_down(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    return evolve(output, loss=evolve(output.loss, entropy_grads=-output.loss.entropy_grads))


def mask_ignored(inputs, config):
    weights = 1.0 / inputs.counts.num_loss_tokens
    output = algorithm.fake_policy_gradient(inputs, config)
    found, extra = output.loss, np.where(inputs.loss_mask, 0.0, weights)
    value = found.value + float((extra * inputs.logprobs).sum())
    return evolve(output, loss=evolve(found, value=value, logprob_grads=found.logprob_grads + extra))


def constant_added(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    return evolve(output, loss=evolve(output.loss, value=output.loss.value + 1.0))


def metric_of_the_loop(inputs, config):
    return with_metric(algorithm.fake_policy_gradient(inputs, config), "reward_mean")


def metric_of_the_trainer(inputs, config):
    return with_metric(algorithm.fake_policy_gradient(inputs, config), "importance_ratio")


def with_metric(output, name):
    return evolve(output, sums={**output.sums, name: 0.0})


def metric_without_tokens(inputs, config):
    output = algorithm.fake_policy_gradient(inputs, config)
    with np.errstate(all="ignore"):
        mean = np.float64(inputs.logprobs[inputs.loss_mask].sum()) / inputs.loss_mask.sum()
    return evolve(output, maxima={"logprob_mean": float(mean)})


@killed_by("test_the_cut_into_microbatches_does_not_matter")
class MeanOfTheMicrobatch(ChangedLoss):
    function = "mean_of_the_microbatch"


@killed_by("test_the_cut_into_microbatches_does_not_matter")
class SequencesWeighByTheirPlace(ChangedLoss):
    function = "sequences_weigh_by_their_place"


@killed_by("test_the_cut_into_microbatches_does_not_matter")
class MetricOfTheMicrobatch(ChangedLoss):
    function = "metric_of_the_microbatch"


@killed_by("test_the_counts_alone_are_divided_by")
class CountsIgnored(ChangedLoss):
    function = "counts_ignored"


@killed_by("test_the_counts_alone_are_divided_by")
class DividedTwice(ChangedLoss):
    function = "divided_twice"


@killed_by("test_gradients_are_slopes_of_the_loss")
class GradientHalved(ChangedLoss):
    function = "gradient_halved"


@killed_by("test_gradients_are_slopes_of_the_loss")
class LastTokensWithoutAGradient(ChangedLoss):
    function = "gradient_of_the_first_tokens"


@killed_by("test_gradients_are_slopes_of_the_loss")
class GradientWithoutTheRatio(ChangedLoss):
    function = "gradient_without_the_ratio"
    options = FakeAlgorithmConfig(previous_logprobs=True)


@killed_by("test_gradients_are_slopes_of_the_loss")
class EntropyPulledDown(ChangedLoss):
    function = "entropy_pulled_down"
    options = FakeAlgorithmConfig(entropy_coefficient=0.1)


@killed_by("test_the_entropy_of_a_metric_is_not_in_the_loss")
class BonusThatIsNeverLearned(FakeAlgorithm):
    options = FakeAlgorithmConfig(entropy_coefficient=0.1)

    def loss(self):
        return evolve(super().loss(), entropy="metric")


@killed_by("test_metrics_have_names_of_their_own")
class MetricOfTheLoop(ChangedLoss):
    function = "metric_of_the_loop"


@killed_by("test_metrics_have_names_of_their_own")
class MetricOfTheTrainer(ChangedLoss):
    function = "metric_of_the_trainer"


@killed_by("test_gradients_are_slopes_of_the_loss")
class RatioThatNobodyIsAskedFor(FakeAlgorithm):
    options = FakeAlgorithmConfig(previous_logprobs=True)

    @property
    def needs(self):
        return evolve(super().needs, previous_logprobs=False)


@killed_by("test_tokens_without_a_loss_have_no_part")
class MaskIgnored(ChangedLoss):
    function = "mask_ignored"


@killed_by("test_what_fills_a_rank_counts_nothing")
class ConstantAdded(ChangedLoss):
    function = "constant_added"


@killed_by("test_what_fills_a_rank_counts_nothing")
class MetricWithoutTokens(ChangedLoss):
    function = "metric_without_tokens"


@killed_by("test_better_answers_become_likelier")
class DemonstrationsForgotten(FakeAlgorithm):
    options = FakeAlgorithmConfig(source="demonstrations")

    def build_batch(self, rollouts):
        return evolve(
            super().build_batch(rollouts), loss=evolve(super().build_batch(rollouts).loss, path=f"{__name__}:unlikelihood")
        )


@killed_by("test_better_answers_become_likelier")
class RejectedAnswersChosen(FakeAlgorithm):
    options = FakeAlgorithmConfig(source="preferences")

    def build_batch(self, rollouts):
        found = super().build_batch(rollouts)
        return evolve(found, loss=evolve(found.loss, path=f"{__name__}:rejected_first"))


def unlikelihood(inputs, config):
    return scaled(algorithm.fake_likelihood(inputs, config), -1.0)


def rejected_first(inputs, config):
    return scaled(algorithm.fake_preference(inputs, config), -1.0)
