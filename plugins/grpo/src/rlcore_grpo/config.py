"""`[algorithm.grpo]`: every option of GRPO and its meaning."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, above, above_at_most, at_least_below
from rlcore_torchkit.rl.loss_config import AdvantageNormalisation, Baseline, LossConfig

_FINITE = Constraint("that is finite", math.isfinite)


@frozen(kw_only=True)
class AdvantageConfig:
    """How rewards become advantages, on the driver."""

    section: ClassVar[str] = "algorithm.grpo"
    """The section of a recipe that these options are of."""
    dynamic_sampling: ClassVar[bool] = False
    """Default of rollout.dynamic_sampling for this algorithm."""

    advantage_baseline: Baseline = "group_mean"
    """Subtracted from a reward: the mean of its group, the mean of the group's other rewards, the mean of the step's
    rewards, or nothing."""
    advantage_normalisation: AdvantageNormalisation = "std"
    """Divide the group's advantages by the standard deviation of its rewards; by that of the group's other rewards, but at
    least half the group's; by that of the step's rewards; or by the group's mean reward (of rewards of at least 0).
    "batch_whitening" takes the mean of the advantages of the step's tokens from each, and divides by their standard
    deviation. Or leave them."""
    advantage_per: Literal["episode", "turn"] = "episode"
    """Compare what episodes of a group earned in all, or turn by turn what each earned from there on: the advantage of a turn k
    is then the sum of its episode's rewards from k on, less the baseline over the group's episodes that have a turn k."""
    advantage_epsilon: Annotated[float, at_least_below(0, 1)] = 1e-6
    """Added to what is divided by. A group whose rewards are equal to rounding has advantages of 0 whatever it is."""
    reward_aggregation: Literal["sum", "normalise_then_sum"] = "sum"
    """Take the environment's reward, or the components that it names (StepResult.reward_components): the advantages of each
    are computed in its group, then added by `reward_weights`, and divided by the standard deviation of these sums over the
    step."""
    reward_weights: Mapping[str, Annotated[float, _FINITE]] = field(factory=dict)
    """Weights of the components, by name, with "normalise_then_sum"; 1 for those that are not here. Whether a group is
    replaced (rollout.dynamic_sampling) goes by all components, those of weight 0 too."""
    length_penalty: Literal["none", "soft_overlong", "linear", "group"] = "none"
    """Added to the reward by how many tokens the policy said: "soft_overlong" falls from 0 to -1 over the last part of
    rollout.max_response_tokens; "linear" is minus the share of rollout.max_response_tokens; "group" goes from 0.5 for the
    shortest episode of a group to -0.5 for its longest, and is at most 0 where the reward is not above 0. Of an agent's
    episode the first two take the longest answer, which is what that limit bounds; "group" takes all answers together."""
    length_penalty_weight: Annotated[float, above(0)] = 1.0
    """The factor of the length penalty."""
    length_penalty_buffer: Annotated[float, above_at_most(0, 1)] = 0.2
    """The last part of rollout.max_response_tokens over which "soft_overlong" falls, as a share of it."""
    kl_placement: Literal["loss", "reward", "reward_to_go"] = "loss"
    """With a `kl_coefficient`: a term of the loss; or what is taken off rewards before they are compared, the sum of the
    estimates over an episode's tokens, with `advantage_normalisation = "none"`; or off the advantage of each token, the sum
    from that token to the end of its sequence."""

    @property
    def compares(self) -> Literal["rewards", "turn_rewards", "reward_components"]:
        """The figures by which a group's samples are compared, as AlgorithmNeeds.compares."""
        if self.reward_aggregation == "normalise_then_sum":
            return "reward_components"
        return "turn_rewards" if self.advantage_per == "turn" else "rewards"

    @property
    def compares_groups(self) -> bool:
        """Return whether a sample is compared with the others of its group."""
        return self.advantage_baseline in ("group_mean", "leave_one_out")


@frozen(kw_only=True)
class GrpoConfig(LossConfig, AdvantageConfig):
    """Group relative policy optimisation (arXiv:2402.03300).

    Algorithms that differ from it in their defaults are in `rlcore_grpo.presets`.
    """

    def is_set(self, key: str) -> bool:
        """Whether an option is another than the default. A preset's own defaults may be for what its user has turned off."""
        default: object = getattr(type(self)(), key)
        return bool(getattr(self, key) != default)
