"""The policy-gradient loss as a LossSpec, without torch."""

from typing import Literal

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, LossSpec
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE
from rlcore_torchkit.rl.loss_config import LossConfig
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS


def policy_gradient_spec(config: LossConfig) -> LossSpec:
    """The loss with these options, which are resolved, and the columns that it reads with them."""
    entropy: Literal["none", "metric", "loss"] = "metric" if config.entropy_metric == "exact" else "none"
    reference = (REFERENCE_LOGPROBS,) if config.kl_coefficient else ()
    chosen = (HIGH_COVARIANCE,) if config.chooses_by_covariance else ()
    likelihood = (LIKELIHOOD_WEIGHTS,) if config.likelihood_coefficient else ()
    return LossSpec(
        path="rlcore_torchkit.rl.policy_gradient:policy_gradient_loss",
        config=config,
        token_columns=(ADVANTAGES, GENERATION_LOGPROBS, *reference, *chosen, *likelihood),
        entropy="loss" if config.entropy_coefficient else entropy,
    )
