"""The interface of algorithms: driver-side numpy that turns rollouts into a training batch, and the name of a loss."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import field, frozen

from rlcore.spi.arrays import AnyArray, BoolArray, Float32Array, Int32Array, Int64Array, UInt8Array, check_array, check_offsets
from rlcore.spi.batch import EPISODE_IDS, GROUP_IDS, TokenBatch
from rlcore.spi.environment import Row
from rlcore.spi.errors import ContractError
from rlcore.spi.generator import FinishReason
from rlcore.spi.loss import LossSpec
from rlcore.spi.weights import Head

if TYPE_CHECKING:
    from rlcore.spi.tokenizer import Tokenizer


@frozen(kw_only=True)
class AlgorithmNeeds:
    """The inputs that an algorithm needs of the loop; read once, before anything is allocated."""

    source: Literal["rollouts", "demonstrations", "preferences", "labelled"]
    """Generated and rewarded samples; prompt/completion pairs from the data set; its prompts with a chosen and a rejected
    answer each; or pairs with a label, each beside its prompt with another row's completion."""
    previous_logprobs: bool = False
    """The loss reads LossInputs.previous_logprobs in every update. The loop asks the trainer for them before a step's first
    update, for the minibatches after it; the first needs none, since nothing has changed since its own forward pass, unless
    that drops inputs of adapters (LoraSpec.dropout)."""
    reference_logprobs: bool = False
    """Every minibatch carries `reference_logprobs`. Those of rows of a data set are computed once for each row, and kept in the
    run directory; those of rollouts in every step."""
    reference_model: bool = False
    """The reference is another model than the policy, such as a teacher, so that a recipe has to name it in [reference]."""
    policy_logprobs_in_rollouts: bool = False
    """RolloutBatch.batch carries the token column `previous_logprobs`: the trainer's at the step's first weights."""
    reference_logprobs_in_rollouts: bool = False
    """With `reference_logprobs`: RolloutBatch.batch carries them already, so that rewards may depend on them. A loss that reads
    them then names them in LossSpec.token_columns."""
    entropy: bool = False
    """The loss asks for the entropy (LossSpec.entropy is not "none")."""
    min_samples_per_prompt: int = 1
    untruncated_sampling: bool = False
    """The loss compares the generator's log-probabilities with the trainer's, in ratios or weights, so that both have to be of
    one distribution. Where a recipe truncates sampling, the generator then says what it chose each token among and the trainer
    normalises over that (TokenBatch.sampling_mask), unless the recipe accepts the bias."""
    corrects_staleness: bool = False
    """The loss weighs or clips each token by the ratio to the probability that it was sampled with, so that samples of older
    weights can be trained on; without it a recipe with async.max_staleness above 0 is refused."""
    margins: bool = False
    """The loss reads the sequence column `margins` of preferences, where a recipe names a field of margins
    (data.*.margin_field); such a recipe with any other algorithm is refused."""
    whole_groups: bool = False
    """The loss compares the sequences of a group: each microbatch holds whole groups, whose sequences are adjacent and in their
    order. A group of more than training.max_tokens_per_microbatch tokens gets a microbatch of its own."""
    rewards: bool = True
    """The training reads the rewards of rollouts. Where they are only reported, a recipe that replaces groups by them
    (rollout.dynamic_sampling) is refused."""
    compares: Literal["rewards", "turn_rewards", "reward_components"] = "rewards"
    """Value by which the samples of a group are compared: the episode's reward; its reward from each turn on, where
    RolloutBatch.turns separates turns; or each named component of its reward. Where these are equal in a group,
    rollout.dynamic_sampling replaces the group, and data.zero_variance_weight draws its prompt less often."""
    dynamic_sampling: bool = False
    """The algorithm is meant for groups whose rewards differ (arXiv:2503.14476): rollout.dynamic_sampling is true
    unless the recipe says otherwise."""
    head: Head = "tokens"
    """The output layer of the trained model (TrainerContext.head). "value" is for models that judge, such as reward models:
    nothing generates with one, so that `source` is not "rollouts", and no log-probabilities exist."""
    critic: bool = False
    """A second model, with the head "value", is trained beside the policy ([critic] in a recipe): RolloutBatch.batch carries
    the token column `values`, and TrainingBatch.critic_loss trains it. For rollouts alone."""
    split_step: bool = False
    """Optimizer steps come in pieces: the trainer needs the capability `split_step`."""


@frozen(kw_only=True, eq=False)
class TurnRewards:
    """The rewards of the K turns of N episodes; turns of an episode are adjacent and in order. A turn whose parts have
    rewards of their own (StepResult.part_rewards) counts as one turn for each part."""

    rewards: Float32Array
    """float32 [K], finite."""
    offsets: Int64Array
    """int64 [N+1]: episode n has the turns offsets[n] to offsets[n+1] - 1."""
    turn_of: Int32Array
    """int32 [T]: which of its episode's turns, from 0, a token was generated in; -1 where it was not generated."""
    continues: BoolArray | None = None
    """bool [K]: True for a part that goes on in the turn before; None where no turn has parts."""

    def __attrs_post_init__(self) -> None:
        check_array("turns.rewards", self.rewards, np.float32)
        check_offsets("turns.offsets", self.offsets, len(self.rewards), allow_empty=True)
        check_array("turns.turn_of", self.turn_of, np.int32)


@frozen(kw_only=True, eq=False)
class RolloutBatch:
    """Samples of one step, grouped by prompt; the samples of a group are adjacent."""

    batch: TokenBatch
    """Whole conversations. loss_mask is True where the policy generated the token; the token columns `generation_logprobs`
    and `weight_versions` and the sequence column `group_ids` are there, and `values` with AlgorithmNeeds.critic. For
    demonstrations loss_mask is True on the completion and the token columns are absent. Preferences are groups of two
    sequences, the prompt with the chosen answer and then with the rejected one; loss_mask is True on the answers and the token
    that ends them. Labelled rows are such groups too: the prompt with its own answer, and then with that of the row before."""
    rewards: Float32Array
    """float32 [N], finite; 0.0 where `valid` is False and for demonstrations. Of preferences 1.0 for the chosen answer and 0.0
    for the rejected one. Of labelled rows 1.0 or 0.0, the label, for both sequences."""
    valid: BoolArray
    """bool [N]: False for a sample whose environment failed and that the recipe says to mask: it must get no gradient
    and not enter its group's statistics. Its loss_mask is already False everywhere."""
    finish_reasons: UInt8Array
    """uint8 [N]: FinishReason of the last turn."""
    truncated: BoolArray = field()
    """bool [N]: whether a limit of tokens or turns cut the episode off in this sequence or behind it, so that it would have
    gone on; by default, whether the last turn was cut off (FinishReason.LENGTH)."""
    reward_components: Mapping[str, Float32Array] = field(factory=dict)
    """float32 [N] by name, finite: the parts of the reward that the environment names (StepResult.reward_components), summed
    over turns, of each sequence's episode; 0.0 where an episode has no such part, and where `valid` is False. Empty where
    none is named."""
    turns: TurnRewards | None = None
    """The reward of each turn; None where every episode has one turn."""
    rows: Sequence[Row] = ()
    """[G]: the row of each group; none where a source of samples does not know them."""
    weight_version: int = 0
    """Version of the weights that the first update finds. A token is of the policy that it trains where the column
    `weight_versions` has this number, and of an older one where it has a lower one."""

    @property
    def group_ids(self) -> Int32Array:
        """int32 [N]: index of the prompt within the step, non-decreasing; the batch's sequence column."""
        return self.batch.sequence_columns[GROUP_IDS]

    @property
    def first_sequences(self) -> Int64Array:
        """int64 [E]: the first sequence of each of E episodes; every sequence where the batch has no `episode_ids`."""
        return np.flatnonzero(self._begins)

    @property
    def episode_of(self) -> Int64Array:
        """int64 [N]: the episode of each sequence, counted from 0 without gaps."""
        return np.cumsum(self._begins) - 1

    @property
    def _begins(self) -> BoolArray:
        """bool [N]: whether a sequence is its episode's first."""
        episodes = self.batch.sequence_columns.get(EPISODE_IDS)
        if episodes is None:
            return np.ones(self.batch.num_sequences, np.bool_)
        begins: BoolArray = np.diff(episodes, prepend=episodes[:1] - 1) != 0
        return begins

    @truncated.default
    def _truncated(self) -> BoolArray:
        cut: BoolArray = self.finish_reasons == FinishReason.LENGTH
        return cut

    def __attrs_post_init__(self) -> None:
        num_sequences = self.batch.num_sequences
        check_array("rewards", self.rewards, np.float32, num_sequences)
        columns = self.batch.sequence_columns
        for name in (GROUP_IDS, *({EPISODE_IDS} & columns.keys())):
            check_array(name, columns.get(name), np.int32, num_sequences)
            if (falls := np.diff(columns[name]) < 0).any():
                found = f"sequence {int(falls.argmax()) + 1} has a lower number than the one before"
                raise ContractError(f"{name}: {found}; expected them to rise")
        check_array("valid", self.valid, np.bool_, num_sequences)
        check_array("finish_reasons", self.finish_reasons, np.uint8, num_sequences)
        check_array("truncated", self.truncated, np.bool_, num_sequences)
        for name, column in self.reward_components.items():
            check_array(f"reward_components[{name!r}]", column, np.float32, num_sequences)
        if not np.isfinite(self.rewards).all():
            worst = int(np.isfinite(self.rewards).argmin())
            raise ContractError(f"rewards: found {self.rewards[worst]} for sample {worst}; expected finite numbers")


@frozen(kw_only=True, eq=False)
class TrainingBatch:
    """The batch that a step trains on."""

    batch: TokenBatch
    """Carries every column that `loss.token_columns` names, except those that the loop adds by AlgorithmNeeds, and keeps the
    sequence columns of the rollouts' batch. Sequences may be left out. Trainer and generator are compared
    (LossSpec.generation_mismatch) where it keeps the token columns `generation_logprobs` and `weight_versions`, and every token
    of its loss_mask was generated at the step's first weights: one loss token of a prompt or of older weights turns it off."""
    loss: LossSpec
    metrics: Mapping[str, float] = field(factory=dict)
    """Driver-side figures of the step."""
    no_signal: str | None = None
    """Why this batch has nothing to learn from (all rewards equal, say); None where it has."""
    has_signal: BoolArray | None = None
    """bool [N]: False for a sequence whose part of the loss has no gradient, nor its part of `critic_loss`. A minibatch of such
    sequences alone makes no update. None: every sequence may have one."""
    critic_loss: LossSpec | None = None
    """The critic's loss, on the same minibatches and after the policy; it asks for no entropy. There with
    AlgorithmNeeds.critic, and only then."""


class Algorithm(Protocol):
    """An algorithm backend, built as Class(AlgorithmContext, config). It keeps no state between steps, unless it is a
    StatefulAlgorithm."""

    @property
    def needs(self) -> AlgorithmNeeds:
        """Return the inputs that the loop must provide."""

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """Advantages, filters and batch columns of one step. All arrays of the samples but a sampling mask's are read-only."""


@runtime_checkable
class StatefulAlgorithm(Algorithm, Protocol):
    """An algorithm that keeps something between steps, such as a moving baseline, and so has these two methods.

    Its state is saved in every checkpoint and given back on a resumption, to the last bit.
    """

    def save_state(self) -> Mapping[str, AnyArray | float]:
        """Everything that later calls of build_batch depend on, by name: numbers, and numpy arrays of numbers or truth values.
        Called before the first step and after each; the arrays are copied at once."""

    def load_state(self, state: Mapping[str, AnyArray | float]) -> None:
        """Go back to what save_state returned, maybe in an earlier process. Its arrays are the algorithm's own from then on."""


@runtime_checkable
class MeasuringAlgorithm(Algorithm, Protocol):
    """An algorithm on rows of a data set that can tell how well held-out ones are known, and so has this method."""

    def measure(self, examples: RolloutBatch, logprobs: Float32Array, reference: Float32Array | None) -> Mapping[str, float]:
        """Figures of held-out examples, which are logged as `eval/<name>`. `logprobs` float32 [T] are the trainer's at
        its present weights, 0.0 at first tokens; `reference` the reference's, where the algorithm needs them."""


@runtime_checkable
class RowReadingAlgorithm(Algorithm, Protocol):
    """An algorithm that learns from fields of the prompts' rows, and so has this method."""

    def read_rows(self, rows: Sequence[Row], tokenizer: "Tokenizer") -> None:
        """Called once with the rows to train on, before any backend is built. DataError where it cannot train on one."""


@runtime_checkable
class PromptingAlgorithm(Algorithm, Protocol):
    """An algorithm whose teacher reads other prompts than the policy, and so has this method."""

    def teacher_batch(self, rollouts: RolloutBatch) -> TokenBatch:
        """The samples' sequences behind the teacher's prompts, with the same loss tokens. Log-probabilities in rollouts (see
        AlgorithmNeeds) are those of these sequences, 0.0 outside the loss mask."""


@runtime_checkable
class ValueMeasuringAlgorithm(Algorithm, Protocol):
    """An algorithm with the head "value" that can tell how well held-out rows are judged, and so has this method."""

    def measure_values(self, examples: RolloutBatch, values: Float32Array) -> Mapping[str, float]:
        """Figures of held-out examples, which are logged as `eval/<name>`. `values` float32 [T] are the trainer's at its
        present weights, after each token."""
