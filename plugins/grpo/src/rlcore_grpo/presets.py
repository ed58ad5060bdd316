"""Algorithms that are GRPO with other defaults: each takes every option of `[algorithm.grpo]` in a section of its own."""

from collections.abc import Callable
from math import exp
from typing import TypeVar

from attrs import Attribute, fields_dict, frozen

from rlcore.spi import Provider
from rlcore_grpo.config import GrpoConfig

ConfigT = TypeVar("ConfigT", bound=GrpoConfig)


def preset(**defaults: object) -> Callable[[type[ConfigT]], type[ConfigT]]:
    """A decorator that makes a subclass of GrpoConfig a config class with these defaults. TypeError for a name that is no
    option."""
    if unknown := defaults.keys() - fields_dict(GrpoConfig).keys():
        raise TypeError(f"found the defaults {', '.join(sorted(unknown))}; expected options of GrpoConfig")

    def with_defaults(_: type, fields: list["Attribute[object]"]) -> list["Attribute[object]"]:
        return [field.evolve(default=defaults.get(field.name, field.default)) for field in fields]

    return frozen(kw_only=True, field_transformer=with_defaults)


def _provider(config: type[GrpoConfig]) -> Provider:
    return Provider(
        name=config.section.removeprefix("algorithm."),
        spi=(2, 0),
        priority=50,
        config=config,
        backend="rlcore_grpo.algorithm:Grpo",
        check="rlcore_grpo.check:check",
    )


@preset(advantage_normalisation="none", loss_normalisation="constant")
class DrGrpoConfig(GrpoConfig):
    """Dr.GRPO (arXiv:2503.20783): a long answer and a hard prompt weigh as much as any other."""

    section = "algorithm.dr_grpo"


@preset(clip_high=0.28, length_penalty="soft_overlong")
class DapoConfig(GrpoConfig):
    """DAPO (arXiv:2503.14476): a higher upper clip range, the mean over tokens, soft overlong punishment, and dynamic sampling
    (rollout.dynamic_sampling is true unless the recipe says otherwise)."""

    section = "algorithm.dapo"
    dynamic_sampling = True


@preset(
    advantage_baseline="leave_one_out",
    advantage_normalisation="none",
    ratio="sequence_product",
    loss_normalisation="sequence",
)
class RlooConfig(GrpoConfig):
    """REINFORCE leave-one-out (arXiv:2402.14740): the reward less the mean of its group's others; an answer is one action,
    whose ratio is the product over its tokens."""

    section = "algorithm.rloo"


@preset(
    advantage_baseline="none",
    advantage_normalisation="batch_whitening",
    kl_placement="reward_to_go",
    kl_estimator="k1",
    kl_coefficient=1e-3,
)
class ReinforcePpConfig(GrpoConfig):
    """REINFORCE++ (arXiv:2501.03262): the reward less the KL divergence from each token on, whitened over the step's tokens."""

    section = "algorithm.reinforce_pp"


@preset(advantage_normalisation="batch_whitening", kl_estimator="k2", kl_gradient="estimate", kl_coefficient=1e-3)
class ReinforcePpBaselineConfig(GrpoConfig):
    """REINFORCE++ with baseline (arXiv:2501.03262): the reward less its group's mean, whitened over the step's tokens, and the
    KL divergence in the loss."""

    section = "algorithm.reinforce_pp_baseline"


@preset(advantage_normalisation="mean")
class MaxRlConfig(GrpoConfig):
    """Maximum likelihood reinforcement learning (MaxRL, arXiv:2602.02710): the reward less its group's mean, divided by that
    mean."""

    section = "algorithm.maxrl"


@preset(reward_aggregation="normalise_then_sum")
class GdpoConfig(GrpoConfig):
    """GDPO (arXiv:2601.05242): each of the environment's reward components is normalised in its group before they are added."""

    section = "algorithm.gdpo"


@preset(ratio="sequence", loss_normalisation="sequence", clip_low=3e-4, clip_high=4e-4)
class GspoConfig(GrpoConfig):
    """GSPO (arXiv:2507.18071): one ratio for a sequence, the geometric mean over its tokens."""

    section = "algorithm.gspo"


@preset(objective="cispo", clip_low=1.0, clip_high=4.0)
class CispoConfig(GrpoConfig):
    """CISPO (arXiv:2506.13585): ratios weigh log-probabilities as constants, so that no token loses its gradient; they are
    clipped from above alone, at 5 (ScaleRL, arXiv:2510.13786)."""

    section = "algorithm.cispo"


@preset(objective="sapo", loss_normalisation="sequence")
class SapoConfig(GrpoConfig):
    """SAPO (arXiv:2511.20347): a sigmoid of the ratio fades tokens out instead of clipping them."""

    section = "algorithm.sapo"


@preset(objective="gmpo", loss_normalisation="sequence", clip_low=1 - exp(-0.4), clip_high=exp(0.4) - 1)
class GmpoConfig(GrpoConfig):
    """GMPO (arXiv:2507.20673): the geometric mean of a sequence's ratios, each clipped to e^-0.4 and e^0.4."""

    section = "algorithm.gmpo"


@preset(objective="vespo")
class VespoConfig(GrpoConfig):
    """VESPO (arXiv:2602.10693): log-probabilities weighed by a smooth kernel of the whole sequence's ratio."""

    section = "algorithm.vespo"


DR_GRPO = _provider(DrGrpoConfig)
DAPO = _provider(DapoConfig)
RLOO = _provider(RlooConfig)
REINFORCE_PP = _provider(ReinforcePpConfig)
REINFORCE_PP_BASELINE = _provider(ReinforcePpBaselineConfig)
MAXRL = _provider(MaxRlConfig)
GDPO = _provider(GdpoConfig)
GSPO = _provider(GspoConfig)
CISPO = _provider(CispoConfig)
SAPO = _provider(SapoConfig)
GMPO = _provider(GmpoConfig)
VESPO = _provider(VespoConfig)
