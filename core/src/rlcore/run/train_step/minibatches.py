"""The updates of a step: which sequences each is made on."""

from collections.abc import Callable

import numpy as np

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.run.data.seeds import Stream
from rlcore.spi.arrays import Int64Array
from rlcore.spi.execution import Minibatch


def minibatches_of(training: spi.TrainingBatch, recipe: Recipe, step: int) -> list[Minibatch]:
    """Return the step's minibatches, without those that have no signal: AdamW would move the weights all the same, by its
    moments and its decay."""
    num_warmup_steps = 0 if recipe.critic is None else recipe.critic.warmup_steps
    batch, planned = training.batch, (step - 1 - num_warmup_steps) * recipe.training.minibatches_per_step
    num_loss_tokens = batch.loss_lengths
    counted = num_loss_tokens if training.has_signal is None else num_loss_tokens * training.has_signal
    return [
        Minibatch.of(batch, sequences, num_loss_tokens, planned + number)
        for number, sequences in enumerate(_sequences(batch, recipe, step))
        if counted[sequences].any()
    ]


def minibatches_with_signal(
    training: spi.TrainingBatch, recipe: Recipe, step: int, note: Callable[[str], None]
) -> list[Minibatch]:
    """The step's minibatches. None, with a note, or RewardError where the recipe wants that, for a step with nothing to learn
    from."""
    reason, minibatches = training.no_signal, list[Minibatch]()
    if reason is None and not training.batch.loss_mask.any():
        reason = "no token takes part in the loss"
    if reason is None:
        minibatches = minibatches_of(training, recipe, step)
        reason = None if minibatches else "no sequence that takes part in the loss has a signal"
    if reason is not None:
        message = f"step {step} has nothing to learn from: {reason}"
        if recipe.training.on_no_signal == "error":
            remedy = "Make the tasks easier or harder, raise rollout.samples_per_prompt, or set training.on_no_signal=skip."
            raise spi.RewardError(f"{message}. {remedy}")
        note(f"{message}; no update was made")
    return minibatches


def _sequences(batch: spi.TokenBatch, recipe: Recipe, step: int) -> list[Int64Array]:
    """The sequences of each update: whole groups, shuffled where there are several updates."""
    num_updates = recipe.training.minibatches_per_step
    if num_updates == 1:
        return [np.arange(batch.num_sequences)]
    groups = batch.sequence_columns.get(spi.GROUP_IDS)
    if groups is None:
        raise spi.ContractError(
            f"the training batch lacks the sequence column {spi.GROUP_IDS}; expected the rollouts' columns kept"
        )
    random = np.random.default_rng([recipe.run.seed, Stream.MINIBATCHES, step])
    order = random.permutation(np.unique(groups))
    return [np.flatnonzero(np.isin(groups, group_ids)) for group_ids in np.array_split(order, num_updates)]
