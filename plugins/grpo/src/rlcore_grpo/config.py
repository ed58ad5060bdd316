"""`[algorithm.grpo]`: every option of GRPO and its meaning."""

from attrs import frozen

from rlcore_grpo.advantage_config import AdvantageConfig
from rlcore_grpo.loss_config import LossConfig


@frozen(kw_only=True)
class GrpoConfig(LossConfig, AdvantageConfig):
    """Group relative policy optimisation (arXiv:2402.03300).

    Algorithms that differ from it in their defaults are in `rlcore_grpo.presets`.
    """

    def is_set(self, key: str) -> bool:
        """Whether an option is another than the default. A preset's own defaults may be for what its user has turned off."""
        default: object = getattr(type(self)(), key)
        return bool(getattr(self, key) != default)
