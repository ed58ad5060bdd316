"""`[algorithm.grpo]`: every option of GRPO and its meaning."""

from attrs import frozen

from rlcore_grpo.advantage_config import AdvantageConfig
from rlcore_grpo.loss_config import LossConfig


@frozen(kw_only=True)
class GrpoConfig(LossConfig, AdvantageConfig):
    """Group relative policy optimisation (arXiv:2402.03300).

    Dr.GRPO (arXiv:2503.20783) is `advantage_normalisation = "none"` with `loss_normalisation = "constant"`.
    """
