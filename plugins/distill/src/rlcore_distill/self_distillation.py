"""Self-distillation on the driver: the teacher is the policy's own model, which reads a demonstration beside the question."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.run.data.text import row_name
from rlcore.spi.arrays import BoolArray, Int64Array
from rlcore_distill.algorithm import OF_SAMPLES
from rlcore_distill.self_config import SdftConfig, SdpoConfig, SelfDistillConfig
from rlcore_distill.teacher_prompts import Retold, TeacherPrompts, rows_of_sequences

LOSS = "rlcore_distill.loss:reverse_kl_loss"


class SelfDistillation(ABC):
    """Brings the policy's distribution to its own behind another prompt, at the tokens of its samples."""

    def __init__(self, context: spi.AlgorithmContext, config: SelfDistillConfig, *, rewards: bool, group_size: int = 1) -> None:
        is_policy = config.teacher == "policy"
        self.needs = spi.AlgorithmNeeds(
            source="rollouts",
            reference_logprobs=not is_policy,
            reference_logprobs_in_rollouts=not is_policy,
            policy_logprobs_in_rollouts=is_policy,
            min_samples_per_prompt=group_size,
            rewards=rewards,
            untruncated_sampling=True,
            corrects_staleness=True,
        )
        self.section = config.section
        self.prompts = TeacherPrompts(config.section, context.max_prompt_tokens)
        self._column = spi.PREVIOUS_LOGPROBS if is_policy else spi.REFERENCE_LOGPROBS
        self._loss = spi.LossSpec(path=LOSS, config=config, token_columns=OF_SAMPLES)

    @abstractmethod
    def read_rows(self, rows: Sequence[spi.Row], tokenizer: spi.Tokenizer) -> None:
        """Check the rows' fields, and keep the tokenizer. DataError where a row lacks what the teacher reads."""

    @abstractmethod
    def teacher_batch(self, rollouts: spi.RolloutBatch) -> spi.TokenBatch:
        """The samples behind the teacher's prompts."""

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Every sampled token, with the teacher's log-probability in the column REFERENCE_LOGPROBS."""
        columns = dict(rollouts.batch.token_columns)
        columns[spi.REFERENCE_LOGPROBS] = columns.pop(self._column)
        return spi.TrainingBatch(batch=evolve(rollouts.batch, token_columns=columns), loss=self._loss)

    def require_texts(self, rows: Sequence[spi.Row], field: str, what: str, *, may_be_empty: bool) -> None:
        """DataError where rows have no text in a field."""
        wrong = [
            number
            for number, row in enumerate(rows)
            if not isinstance(text := row.get(field), str) or not (may_be_empty or text.strip())
        ]
        if wrong:
            fields = ", ".join(map(repr, rows[wrong[0]]))
            raise spi.DataError(
                f"data.train: found {len(wrong)} of {len(rows)} rows without a text in {field!r}, such as "
                f"{row_name(rows, wrong[0])}, which has {fields}; expected {what} in every row. "
                f"Name the field with {self.section}.{'demonstration' if not may_be_empty else 'feedback'}_field"
            )


class Sdft(SelfDistillation):
    """Self-distillation fine-tuning: the teacher reads the demonstration of the prompt's row."""

    def __init__(self, context: spi.AlgorithmContext, config: SdftConfig) -> None:
        super().__init__(context, config, rewards=False)
        self._config = config

    def read_rows(self, rows: Sequence[spi.Row], tokenizer: spi.Tokenizer) -> None:
        """See SelfDistillation."""
        self.prompts.tokenizer = tokenizer
        self.require_texts(rows, self._config.demonstration_field, "the teacher's demonstration", may_be_empty=False)
        self.prompts.require_room(rows, self._retold)

    def teacher_batch(self, rollouts: spi.RolloutBatch) -> spi.TokenBatch:
        """See SelfDistillation."""
        rows = rows_of_sequences(rollouts)
        return self.prompts.batch(rollouts, lambda number, question: self._retold(rows[number], question))

    def _retold(self, row: spi.Row, question: str) -> str:
        demonstration = row[self._config.demonstration_field]
        return self._config.teacher_prompt_template.format(prompt=question, demonstration=demonstration)


class Sdpo(SelfDistillation):
    """Self-distillation policy optimization: the teacher reads an answer of the group that succeeded, and feedback."""

    def __init__(self, context: spi.AlgorithmContext, config: SdpoConfig) -> None:
        super().__init__(context, config, rewards=True, group_size=2 if config.feedback_field is None else 1)
        self._config = config
        self._most_of_solution = context.max_response_tokens

    def read_rows(self, rows: Sequence[spi.Row], tokenizer: spi.Tokenizer) -> None:
        """See SelfDistillation. The teacher's prompt has to have room for an answer of rollout.max_response_tokens."""
        self.prompts.tokenizer = tokenizer
        if (field := self._config.feedback_field) is not None:
            self.require_texts(rows, field, "feedback, which may be empty,", may_be_empty=True)
        self.prompts.require_room(
            rows, lambda row, question: self._retold(question, "", self._feedback(row)) or "", self._most_of_solution
        )

    def teacher_batch(self, rollouts: spi.RolloutBatch) -> spi.TokenBatch:
        """See SelfDistillation. A sample without a solution and without feedback stays behind its own prompt."""
        solutions, batch, rows = self._solutions(rollouts), rollouts.batch, rows_of_sequences(rollouts)
        generated = batch.token_columns[spi.WEIGHT_VERSIONS] >= 0

        def retold(number: int, question: str) -> Retold:
            solution = ""
            if (of := int(solutions[number])) >= 0:
                part = slice(*batch.offsets[of : of + 2].tolist())
                solution = self.prompts.tokenizer.decode(batch.tokens[part][generated[part]])
            return self._retold(question, solution, self._feedback(rows[number]), is_solved=of >= 0)

        return self.prompts.batch(rollouts, retold)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Every sampled token of the samples whose teacher reads more than they do.

        Metrics: `success_group_fraction`, the share of groups with an answer that succeeded; `reprompt_sample_fraction`, the
        share of samples that are learned from.
        """
        training = super().build_batch(rollouts)
        is_taught = self._solutions(rollouts) >= 0
        if self._config.feedback_field is not None and rollouts.rows:
            is_taught |= np.array([bool(self._feedback(row)) for row in rows_of_sequences(rollouts)], np.bool_)
        is_taught &= rollouts.batch.loss_lengths > 0
        batch, succeeded = training.batch, self._succeeded(rollouts)
        mask = batch.loss_mask & np.repeat(is_taught, batch.lengths)
        num_groups = max(len(np.unique(rollouts.group_ids)), 1)
        columns = dict(batch.token_columns)
        for name in OF_SAMPLES:
            columns[name] = np.where(mask, columns[name], 0).astype(columns[name].dtype)
        return evolve(
            training,
            batch=evolve(batch, loss_mask=mask, token_columns=columns),
            metrics={
                "success_group_fraction": len(np.unique(rollouts.group_ids[succeeded])) / num_groups,
                "reprompt_sample_fraction": float(is_taught.mean()) if len(is_taught) else 0.0,
            },
            no_signal=None if is_taught.any() else "no group has an answer that succeeded beside another one, nor feedback",
            has_signal=is_taught,
        )

    def _succeeded(self, rollouts: spi.RolloutBatch) -> BoolArray:
        """bool [N]: the samples that succeeded."""
        reached: BoolArray = rollouts.rewards >= self._config.success_reward_threshold
        return reached & rollouts.valid & (rollouts.batch.loss_lengths > 0)

    def _solutions(self, rollouts: spi.RolloutBatch) -> Int64Array:
        """int64 [N]: of each sample the first other one of its group that succeeded; -1 where there is none."""
        succeeded, found = np.flatnonzero(self._succeeded(rollouts)), np.full(len(rollouts.rewards), -1, np.int64)
        groups = rollouts.group_ids
        for number, group in enumerate(groups.tolist()):
            others = succeeded[(groups[succeeded] == group) & (succeeded != number)]
            found[number] = others[0] if len(others) else -1
        return found

    def _feedback(self, row: spi.Row) -> str:
        field = self._config.feedback_field
        return "" if field is None else str(row[field]).strip()

    def _retold(self, question: str, solution: str, feedback: str, *, is_solved: bool = True) -> Retold:
        if not is_solved and not feedback:
            return None
        config = self._config
        return config.reprompt_template.format(
            prompt=question,
            solution=config.solution_template.format(successful_previous_attempt=solution) if is_solved else "",
            feedback=config.feedback_template.format(feedback_raw=feedback) if feedback else "",
        )
