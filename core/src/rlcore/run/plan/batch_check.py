"""Checks an algorithm with a small made-up batch: its losses must exist, and the run must provide the columns they read."""

import linecache
from collections.abc import Iterator
from traceback import walk_tb

import numpy as np

from rlcore import spi
from rlcore.registry.module_source import columns_read, path_problem
from rlcore.registry.plugin_errors import is_outside
from rlcore.run.plan.choice import build_chosen_algorithm
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi.arrays import AnyArray
from rlcore.time_limit import loading

NUM_GROUPS, LENGTH = 2, 4
"""Number of groups, and of tokens of each sample. The first half of the tokens is the prompt."""


def batch_problems(plan: RunPlan) -> Iterator[spi.Problem]:
    """Yield losses that do not exist and columns that the run does not provide.

    The algorithm is built anew, so that the check does not change the run's. Any other error may come from the made-up samples,
    and is ignored.
    """
    entry, needs = plan.chosen["algorithm"], plan.algorithm.needs
    algorithm = build_chosen_algorithm(plan.recipe, entry, plan.model.dtype)
    path, owner = "algorithm.name", f'"{entry.name}" ({entry.origin})'
    try:
        with loading(f"a batch of made-up samples, of {entry.label}"):
            training = algorithm.made_of(_samples(plan))
    except BaseException as error:
        if is_outside(error):
            raise
        if (column := _missing_column(error)) is not None:
            yield _unbrought(plan, f"{owner}, which reads {column}")
        return
    if not isinstance(training, spi.TrainingBatch) or not isinstance(training.batch, spi.TokenBatch):
        return
    later = {spi.REFERENCE_LOGPROBS: needs.reference_logprobs, spi.PREVIOUS_LOGPROBS: needs.previous_logprobs}
    token_columns = {*training.batch.token_columns, *(name for name, is_added in later.items() if is_added)}
    for loss in (training.loss, training.critic_loss):
        if not isinstance(loss, spi.LossSpec):
            continue
        if problem := path_problem(loss.path):
            expected = "a function that can be imported, as package.module:function"
            yield spi.Problem(path=path, found=f"{owner}, whose loss is {problem}", expected=expected, remedy=_REMEDY)
            continue
        asked = loss.token_columns if isinstance(loss.token_columns, tuple) else ()
        for name in asked:
            if name not in token_columns:
                yield _unbrought(plan, f"{owner}, whose loss {loss.path!r} reads the token column {name!r}")
        read = columns_read(loss.path)
        for name in read.token - {*asked, *(name for name, is_added in later.items() if is_added)}:
            found = f"{owner}, whose loss {loss.path!r} reads the token column {name!r}, which it does not ask for"
            yield spi.Problem(path=path, found=found, expected=f"{name!r} in LossSpec.token_columns", remedy=_REMEDY)
        for name in read.sequence - training.batch.sequence_columns.keys():
            yield _unbrought(plan, f"{owner}, whose loss {loss.path!r} reads the sequence column {name!r}")


_REMEDY = "It is a fault of the plugin: upgrade it, tell its authors, or take another algorithm."


def _unbrought(plan: RunPlan, found: str) -> spi.Problem:
    samples = _samples(plan).batch
    brought = ", ".join([*samples.token_columns, *samples.sequence_columns])
    expected = f"a column that the algorithm adds to its batch, or one of those that samples come with: {brought}"
    return spi.Problem(path="algorithm.name", found=f"{found}, which nobody brings", expected=expected, remedy=_REMEDY)


def _samples(plan: RunPlan) -> spi.RolloutBatch:
    """Samples with the columns that the run brings: half of a group's rewards are 1, the others 0."""
    needs, recipe = plan.algorithm.needs, plan.recipe
    per_group = {"rollouts": recipe.rollout.samples_per_prompt, "demonstrations": 1}.get(needs.source, 2)
    num_sequences = NUM_GROUPS * per_group
    num_tokens = num_sequences * LENGTH
    is_answer = np.tile(np.arange(LENGTH) >= LENGTH // 2, num_sequences)
    token_columns: dict[str, AnyArray] = {}
    if needs.source == "rollouts":
        token_columns[spi.GENERATION_LOGPROBS] = np.where(is_answer, np.float32(-0.5), np.float32(0))
        token_columns[spi.WEIGHT_VERSIONS] = np.where(is_answer, 0, -1).astype(np.int32)
    if needs.reference_logprobs_in_rollouts:
        token_columns[spi.REFERENCE_LOGPROBS] = np.where(is_answer, np.float32(-0.75), np.float32(0))
    if needs.policy_logprobs_in_rollouts:
        token_columns[spi.PREVIOUS_LOGPROBS] = np.where(is_answer, np.float32(-0.5), np.float32(0))
    if needs.critic:
        token_columns[spi.VALUES] = np.full(num_tokens, 0.25, np.float32)
    sequence_columns: dict[str, AnyArray] = {spi.GROUP_IDS: np.repeat(np.arange(NUM_GROUPS, dtype=np.int32), per_group)}
    if recipe.data.train.margin_field is not None:
        sequence_columns[spi.MARGINS] = np.ones(num_sequences, np.float32)
    rewards = (np.arange(num_sequences) % 2 == 0).astype(np.float32) * np.float32(needs.source != "demonstrations")
    return spi.RolloutBatch(
        batch=spi.TokenBatch(
            tokens=np.zeros(num_tokens, np.int32),
            offsets=np.arange(num_sequences + 1, dtype=np.int64) * LENGTH,
            loss_mask=is_answer,
            token_columns=token_columns,
            sequence_columns=sequence_columns,
        ),
        rewards=rewards,
        reward_components={"made_up": rewards} if needs.compares == "reward_components" else {},
        valid=np.ones(num_sequences, np.bool_),
        finish_reasons=np.full(num_sequences, spi.FinishReason.STOP, np.uint8),
    )


def _missing_column(error: BaseException) -> str | None:
    """Return the missing column of a KeyError, where the line that raised it reads a column."""
    frames = list(walk_tb(error.__traceback__))
    if not isinstance(error, KeyError) or not frames or not error.args:
        return None
    frame, number = frames[-1]
    line = linecache.getline(frame.f_code.co_filename, number, frame.f_globals)
    kinds = [kind for kind in ("token", "sequence") if f"{kind}_columns" in line]
    return f"the {kinds[0]} column {error.args[0]!r}" if kinds else None
