"""The algorithm in a session's plan: the caller's program takes its place."""

from rlcore.spi import AlgorithmContext, AlgorithmNeeds, ContractError, RolloutBatch, TrainingBatch
from rlcore_session.provider import SessionConfig


class SessionAlgorithm:
    """Tells the plan what a session needs of trainer and generator."""

    def __init__(self, context: AlgorithmContext, config: SessionConfig) -> None:
        del context
        self.needs = AlgorithmNeeds(
            source="rollouts",
            reference_logprobs=config.reference,
            corrects_staleness=True,
            rewards=False,
            split_step=True,
        )

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """ContractError: no loop of rlcore's runs beside a session."""
        del rollouts
        raise ContractError("build_batch: found a call; expected none, since a session's program makes its own batches")
