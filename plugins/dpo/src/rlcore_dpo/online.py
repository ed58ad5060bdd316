"""Online DPO on the driver: rewards choose a pair among the policy's own answers to a prompt."""

import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.spi.arrays import Int64Array
from rlcore_dpo.config import OnlineDpoConfig
from rlcore_torchkit.rl.advantages import group_advantages


class OnlineDpo:
    """Online direct preference optimisation (arXiv:2402.04792); the loss is that of `dpo`."""

    def __init__(self, context: spi.AlgorithmContext, config: OnlineDpoConfig) -> None:
        del context
        self.needs = spi.AlgorithmNeeds(
            source="rollouts",
            whole_groups=True,
            min_samples_per_prompt=2,
            reference_logprobs=config.reference == "initial",
        )
        self._loss = spi.LossSpec(path="rlcore_dpo.loss:dpo_loss", config=config)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """The pairs, the chosen answer first. ConfigError where an episode has several sequences.

        Metrics: `score_margin`, the mean over the pairs of the chosen answer's reward less the rejected one's; `tied_groups`,
        the share of groups without a pair.
        """
        if len(rollouts.first_sequences) < rollouts.batch.num_sequences:
            problem = spi.Problem(
                path="environment.name",
                found="an environment with an episode in several segments",
                expected='episodes of one sequence each, for algorithm.name = "online_dpo"',
                remedy="Choose an environment that keeps the conversation as it is, or another algorithm, such as grpo.",
            )
            raise spi.ConfigError([problem])
        pairs = _pairs(rollouts)
        rewards = rollouts.rewards[pairs].astype(np.float64)
        num_groups = len(np.unique(rollouts.group_ids))
        return spi.TrainingBatch(
            batch=_selected(rollouts.batch, pairs.reshape(-1)),
            loss=self._loss,
            metrics={
                "score_margin": float((rewards[:, 0] - rewards[:, 1]).mean()) if len(pairs) else 0.0,
                "tied_groups": 1 - len(pairs) / max(num_groups, 1),
            },
            no_signal=None if len(pairs) else f"none of the {num_groups} groups has two answers with different rewards",
        )


def _pairs(rollouts: spi.RolloutBatch) -> Int64Array:
    """int64 [P, 2]: the sequences with the highest and the lowest reward of each group, among those with loss tokens.

    Groups whose rewards are equal to rounding have none. Of equal rewards the last is chosen, and the first rejected.
    """
    answers = np.flatnonzero(rollouts.valid & (rollouts.batch.loss_lengths > 0))
    groups = rollouts.group_ids[answers]
    leads = group_advantages(rollouts.rewards[answers], groups, baseline="group_mean", normalisation="none", epsilon=0.0)
    order = np.lexsort((leads, groups))
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    lasts = np.append(firsts, len(groups))[1:] - 1
    differs = leads[order[lasts]] > 0
    pairs: Int64Array = answers[order[np.stack([lasts, firsts], axis=1)[differs]]]
    return pairs


def _selected(batch: spi.TokenBatch, sequences: Int64Array) -> spi.TokenBatch:
    """These sequences without the numbers of their episodes, which would fall where the later answer is chosen."""
    chosen = batch.select(sequences)
    columns = {name: column for name, column in chosen.sequence_columns.items() if name != spi.EPISODE_IDS}
    return evolve(chosen, sequence_columns=columns)
