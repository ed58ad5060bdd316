"""`[algorithm.grpo]`: every option of GRPO and its meaning."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, above, above_at_most, at_least_below
from rlcore_torchkit.rl.endpoint_config import EndpointConfig
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
    """The baseline that is subtracted from a reward. "group_mean": the mean of its group. "leave_one_out": the mean of the
    group's other rewards. "batch_mean": the mean of the step's rewards. "none": nothing."""
    advantage_normalisation: AdvantageNormalisation = "std"
    """The divisor of advantages. "std": the standard deviation of the group's rewards. "leave_one_out_std": that of the group's
    other rewards, but at least half of "std". "batch_std": that of the step's rewards. "mean": the group's mean reward, for
    rewards of at least 0. "batch_whitening": subtract the mean over the step's tokens, then divide by their standard
    deviation. "sample_whitening": the same over its samples. "none": no division."""
    advantage_per: Literal["episode", "turn", "process"] = "episode"
    """The unit that is compared in a group. "episode": the whole reward of each episode. "turn": the return of each turn. The
    return of turn k is the sum of rewards from k on; its baseline is over the group's episodes that have a turn k. "process":
    the reward of each turn, among those of all turns of the group; a turn's advantage is the sum of its own and of later turns'
    normalised rewards (process supervision, section 4.1.3). A part of a turn with a reward of its own counts as a turn."""
    advantage_epsilon: Annotated[float, at_least_below(0, 1)] = 1e-6
    """Added to the divisor of advantages. A group whose rewards are equal to rounding has advantages of 0 in any case."""
    reward_aggregation: Literal["sum", "normalise_then_sum"] = "sum"
    """The reward that is compared. "sum": the environment's reward. "normalise_then_sum": its components
    (StepResult.reward_components). Their advantages are computed in each group and added by `reward_weights`. The sums are
    divided by their standard deviation over the step."""
    reward_weights: Mapping[str, Annotated[float, _FINITE]] = field(factory=dict)
    """Weights of the components, by name, with "normalise_then_sum"; others have weight 1. rollout.dynamic_sampling compares
    all components, those of weight 0 too."""
    length_penalty: Literal["none", "soft_overlong", "linear", "group"] = "none"
    """Penalty that is added to the reward, by the number of generated tokens. "soft_overlong": from 0 to -1 over the last part
    of rollout.max_response_tokens. "linear": minus the share of rollout.max_response_tokens. "group": from 0.5 for the
    shortest episode of a group to -0.5 for its longest, and at most 0 where the reward is not above 0. "none": no penalty. For
    an agent's episode, the first two count its longest answer, and "group" counts all answers together."""
    length_penalty_weight: Annotated[float, above(0)] = 1.0
    """The factor of the length penalty."""
    length_penalty_buffer: Annotated[float, above_at_most(0, 1)] = 0.2
    """The last part of rollout.max_response_tokens over which "soft_overlong" falls, as a share of it."""
    kl_placement: Literal["loss", "reward", "reward_to_go"] = "loss"
    """The place of the KL term, with a `kl_coefficient`. "loss": a term of the loss. "reward": subtract the sum over an
    episode's tokens from its reward, before rewards are compared; needs `advantage_normalisation = "none"`. "reward_to_go":
    subtract the sum from each token to the end of its sequence from the token's advantage."""
    reference_endpoint: EndpointConfig | None = None
    """The reference policy behind an endpoint, with a `kl_coefficient`; it has the policy's tokenizer. None: the trainer holds
    the reference."""

    @property
    def compares(self) -> Literal["rewards", "turn_rewards", "reward_components"]:
        """The figures by which a group's samples are compared, as AlgorithmNeeds.compares."""
        if self.reward_aggregation == "normalise_then_sum":
            return "reward_components"
        return "rewards" if self.advantage_per == "episode" else "turn_rewards"

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
