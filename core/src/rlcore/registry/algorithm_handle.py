"""The handle of an algorithm: one call, whose mistakes are found before anything is trained on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, get_args, get_type_hints

import numpy as np
from attrs import asdict, evolve, fields

from rlcore.registry.checks import check_int, check_loss_path, check_metrics, check_own_names, check_record
from rlcore.registry.discovery import Entry
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.sample_checks import check_sampled, check_vocabulary
from rlcore.schema.types import is_choice
from rlcore.spi.algorithm import (
    Algorithm,
    AlgorithmNeeds,
    MeasuringAlgorithm,
    PromptingAlgorithm,
    RolloutBatch,
    RowReadingAlgorithm,
    StatefulAlgorithm,
    TrainingBatch,
    TurnRewards,
    ValueMeasuringAlgorithm,
)
from rlcore.spi.arrays import AnyArray, Float32Array, check_array, check_range, read_only
from rlcore.spi.batch import GENERATION_LOGPROBS, GROUP_IDS, TokenBatch
from rlcore.spi.environment import Row
from rlcore.spi.errors import ContractError, RlcoreError
from rlcore.spi.loss import LossSpec
from rlcore.spi.tokenizer import Tokenizer

AlgorithmState: TypeAlias = Mapping[str, AnyArray | float]
"""The state that an algorithm keeps between steps."""


class AlgorithmHandle:
    """An algorithm, bound. Its own exception passes through with a note that names it."""

    def __init__(self, entry: Entry, algorithm: Algorithm, needs: AlgorithmNeeds) -> None:
        """`needs` is what the algorithm says, read once; ContractError where it needs what there is not."""
        self.entry = entry
        self.needs = needs
        self._algorithm = algorithm
        self.vocab_size: int | None = None
        """Tokens that the model has, once its files are read; None where these do not say."""
        _check_needs(self.needs)

    @property
    def is_stateful(self) -> bool:
        """True where the algorithm keeps state between steps."""
        return isinstance(self._algorithm, StatefulAlgorithm)

    @property
    def measures(self) -> bool:
        """True where the algorithm learns from rows of a data set, and measures held-out rows."""
        protocol = ValueMeasuringAlgorithm if self.needs.head == "value" else MeasuringAlgorithm
        return self.needs.source != "rollouts" and isinstance(self._algorithm, protocol)

    @property
    def reprompts(self) -> bool:
        """True where log-probabilities in rollouts are of sequences behind a teacher's prompts."""
        return isinstance(self._algorithm, PromptingAlgorithm)

    def measure(self, examples: RolloutBatch, logprobs: Float32Array, reference: Float32Array | None) -> dict[str, float]:
        """Its figures of held-out examples. ContractError or NonFiniteError where they are none."""
        return self._figures("measure", examples, logprobs, reference)

    def measure_values(self, examples: RolloutBatch, values: Float32Array) -> dict[str, float]:
        """Its figures of held-out examples, by the values after their tokens. Errors as of `measure`."""
        return self._figures("measure_values", examples, values)

    def _figures(self, method: str, examples: RolloutBatch, *columns: Float32Array | None) -> dict[str, float]:
        figures = self._called(method, _protected(examples), *(one if one is None else read_only(one) for one in columns))
        try:
            check_metrics("figures", figures)
        except RlcoreError as error:
            raise type(error)(f"{self.entry.label}: {method} returned what it must not: {error}") from error
        return dict(figures)

    def _called(self, method: str, *arguments: object) -> Any:
        with attributed(f"raised in {method} of", self.entry.label):
            return getattr(self._algorithm, method)(*arguments)

    def read_rows(self, rows: Sequence[Row], tokenizer: Tokenizer) -> None:
        """Show the rows to train on to an algorithm that reads them. DataError where it cannot train on one."""
        if isinstance(self._algorithm, RowReadingAlgorithm):
            self._called("read_rows", rows, tokenizer)

    def teacher_batch(self, rollouts: RolloutBatch) -> TokenBatch:
        """Return the sequences whose log-probabilities the samples get: the teacher's, of an algorithm that has one, else the
        samples' own. ContractError where they have other loss tokens."""
        if not self.reprompts:
            return rollouts.batch
        batch: TokenBatch = self._called("teacher_batch", _protected(rollouts))
        if not np.array_equal(batch.tokens[batch.loss_mask], rollouts.batch.tokens[rollouts.batch.loss_mask]):
            raise ContractError(f"{self.entry.label}: teacher_batch: found other loss tokens; expected those of the samples")
        return batch

    def save_state(self) -> AlgorithmState | None:
        """A copy of what it keeps between steps; None where it keeps nothing. ContractError where that is no state."""
        if not isinstance(self._algorithm, StatefulAlgorithm):
            return None
        state = self._called("save_state")
        try:
            return _copied(state)
        except ContractError as error:
            raise ContractError(f"{self.entry.label}: save_state returned what it must not: {error}") from error

    def load_state(self, state: AlgorithmState) -> None:
        """Go back to a state, of which the algorithm gets a copy."""
        self._called("load_state", _copied(state))

    def made_of(self, rollouts: RolloutBatch) -> TrainingBatch:
        """Return the algorithm's batch for these samples, unchecked."""
        return self._algorithm.build_batch(_protected(rollouts))

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """Return the batch that the step trains on. ContractError or NonFiniteError where it breaks the interface."""
        _check_origin(rollouts.batch, self.vocab_size)
        with attributed("raised in build_batch of", self.entry.label):
            returned = self.made_of(rollouts)
        try:
            batch = check_record(returned, TrainingBatch)
            _check_batch(batch, self.vocab_size)
            _check_critic_loss(batch, self.needs)
            if rollouts.batch.sampling_mask is not None and batch.batch.sampling_mask is None:
                raise ContractError("batch.sampling_mask: found None; expected the rollouts' rows of its tokens")
            if self.needs.whole_groups:
                _check_groups(batch.batch)
        except RlcoreError as error:
            raise type(error)(f"{self.entry.label}: build_batch returned what it must not: {error}") from error
        return batch


def _copied(state: object) -> AlgorithmState:
    if not isinstance(state, Mapping):
        raise ContractError(f"found a {type(state).__name__}; expected a mapping from names to numbers and numpy arrays")
    if odd := [name for name in state if not isinstance(name, str)]:
        raise ContractError(f"found the key {odd[0]!r}; expected a string")
    return {name: _copied_value(name, value) for name, value in state.items()}


def _copied_value(name: str, value: object) -> AnyArray | float:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.copy()
    if isinstance(value, int | float) and type(value) in (int, float):
        return value
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"{value!r:.60} of type {type(value).__name__}"
    raise ContractError(f"{name!r}: found {kind}; expected an int, a float, or a numpy array of numbers or truth values")


def _protected(rollouts: RolloutBatch) -> RolloutBatch:
    """The samples with read-only arrays: what an algorithm wrote into them would be trained on, and be in the step's metrics
    and the samples of the run directory, without a trace."""
    batch, turns = rollouts.batch, rollouts.turns
    columns = {**batch.sequence_columns, GROUP_IDS: rollouts.group_ids}
    own = {field.name: getattr(rollouts, field.name) for field in fields(RolloutBatch)}
    own |= {name: read_only(value) for name, value in own.items() if isinstance(value, np.ndarray)}
    own["batch"] = evolve(batch, sequence_columns=columns).read_only()
    own["reward_components"] = {name: read_only(part) for name, part in rollouts.reward_components.items()}
    of_turns = {} if turns is None else asdict(turns, recurse=False, filter=lambda _, value: value is not None)
    own["turns"] = turns and TurnRewards(**{name: read_only(value) for name, value in of_turns.items()})
    return RolloutBatch(**own)


_NEEDS_OF_TOKENS = ("previous_logprobs", "reference_logprobs", "reference_model", "entropy", "untruncated_sampling")


def _check_needs(needs: AlgorithmNeeds) -> None:
    for name, tp in get_type_hints(AlgorithmNeeds).items():
        if choices := (False, True) if tp is bool else get_args(tp):
            _check_choice(f"needs.{name}", getattr(needs, name), choices)
    if needs.reference_logprobs_in_rollouts and not needs.reference_logprobs:
        raise ContractError("needs.reference_logprobs_in_rollouts: found True without reference_logprobs; expected both")
    excluded = [name for name in (*_NEEDS_OF_TOKENS, "policy_logprobs_in_rollouts") if getattr(needs, name)]
    if needs.head == "value" and (excluded or needs.source == "rollouts"):
        found = " and ".join([*excluded, *(['source = "rollouts"'] if needs.source == "rollouts" else [])])
        raise ContractError(f'needs.head: found "value" with {found}; expected "tokens": a model of values has no such thing')
    if needs.critic and needs.source != "rollouts":
        raise ContractError(f'needs.critic: found True with source = {needs.source!r}; expected it with "rollouts" alone')
    check_int("needs.min_samples_per_prompt", needs.min_samples_per_prompt, at_least=1)


def _check_batch(training: TrainingBatch, vocab_size: int | None) -> None:
    if not isinstance(training.batch, TokenBatch):
        raise ContractError(f"batch: found a {type(training.batch).__name__}; expected a TokenBatch")
    _check_values(training.batch, vocab_size)
    _check_loss("loss", training.loss, ("none", "metric", "loss"))
    reason = training.no_signal
    if reason is not None and (not isinstance(reason, str) or not reason):
        raise ContractError(f"no_signal: found {reason!r}; expected the reason in words, or None where there is a signal")
    if training.has_signal is not None:
        check_array("has_signal", training.has_signal, np.bool_, training.batch.num_sequences)
    check_metrics("metrics", training.metrics)
    check_own_names("metrics", training.metrics)


def _check_loss(name: str, loss: object, entropy: Sequence[str]) -> None:
    if not isinstance(loss, LossSpec):
        raise ContractError(f"{name}: found a {type(loss).__name__}; expected a LossSpec")
    check_loss_path(loss.path)
    columns = loss.token_columns
    if not isinstance(columns, tuple) or not all(isinstance(column, str) for column in columns):
        raise ContractError(f"{name}.token_columns: found {columns!r}; expected a tuple of names")
    _check_choice(f"{name}.entropy", loss.entropy, entropy)


def _check_critic_loss(training: TrainingBatch, needs: AlgorithmNeeds) -> None:
    if needs.critic:
        _check_loss("critic_loss", training.critic_loss, ("none",))
    elif training.critic_loss is not None:
        raise ContractError("critic_loss: found one without needs.critic; expected None: there is no critic to train")


def _check_groups(batch: TokenBatch) -> None:
    """Groups are to stay whole, so they have to be known, and their sequences adjacent."""
    group_ids = batch.sequence_columns.get(GROUP_IDS)
    if group_ids is None or (np.diff(group_ids) < 0).any():
        found = "none" if group_ids is None else "one whose numbers fall"
        raise ContractError(
            f"batch.sequence_columns[{GROUP_IDS!r}]: found {found}; expected the rollouts' (needs.whole_groups)"
        )


def _check_origin(batch: TokenBatch, vocab_size: int | None) -> None:
    """Refuse samples with a token that the model does not have, in the name of their origin rather than of the algorithm."""
    if GENERATION_LOGPROBS in batch.token_columns:
        check_sampled(batch.largest_token(batch.loss_mask), vocab_size)
    check_vocabulary("a prompt or row", batch.largest_token(), vocab_size)


def _check_values(batch: TokenBatch, vocab_size: int | None) -> None:
    """Tokens that the model has, and finite numbers: a trainer could only fail on others, and would be blamed for them."""
    batch.check_tokens("batch.tokens", math.inf if vocab_size is None else vocab_size - 1)
    for kind, columns in (("token_columns", batch.token_columns), ("sequence_columns", batch.sequence_columns)):
        for name, column in columns.items():
            if column.dtype.kind == "f" and column.ndim == 1:
                check_range(f"batch.{kind}[{name!r}]", column)


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if not is_choice(value, choices):
        raise ContractError(f"{name}: found {value!r}; expected one of {', '.join(map(repr, choices))}")
