"""`[algorithm.dpo]`: every option of direct preference optimisation and its meaning."""

from typing import Annotated, Any, ClassVar, Literal

from attrs import Attribute, frozen

from rlcore.schema.constraints import above, at_least, at_least_below


@frozen(kw_only=True)
class DpoConfig:
    """Direct preference optimisation (arXiv:2305.18290) and its family, on pairs of a chosen and a rejected answer.

    An answer's score s is log p(answer | prompt), less the reference's; h is the chosen answer's score less the rejected one's.
    SimPO (arXiv:2405.14734) is `reference = "none"`, `length_normalised = true`, a `beta` of 2 or more and a `margin`.
    """

    section: ClassVar[str] = "algorithm.dpo"
    """The section of a recipe that these options are of."""

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "odds_ratio"] = "sigmoid"
    """The loss of a pair with margin h. "sigmoid": -log sigmoid(beta h) (DPO). "hinge": max(0, 1 - beta h) (SLiC,
    arXiv:2305.10425, as in arXiv:2309.06657). "ipo": (h - 1 / (2 beta))^2 (arXiv:2310.12036), which its authors use with
    `length_normalised`. "robust": DPO corrected for the bias of a share `label_smoothing` of swapped pairs (arXiv:2403.00409).
    "apo_zero": raises the chosen answer and lowers the rejected one. "apo_down": lowers both, the rejected one more (both
    arXiv:2408.06266). "odds_ratio": -beta log sigmoid of the log odds ratio of the answers' mean probabilities (ORPO,
    arXiv:2403.07691); it needs `reference = "none"` and `length_normalised`."""
    beta: Annotated[float, above(0)] = 0.1
    """How closely the policy is held to the reference: the larger, the closer. With "ipo" it is the paper's tau."""
    label_smoothing: Annotated[float, at_least_below(0, 0.5)] = 0.0
    """Assumed share of swapped pairs. It smooths the loss "sigmoid" (cDPO), and corrects the bias of "robust"."""
    reference: Literal["initial", "none"] = "initial"
    """The base of the scores: the initial weights, or the model that [reference] names; or nothing, which needs no
    second model."""
    length_normalised: bool = False
    """Divide an answer's score by its number of tokens, so that long answers do not win by their length."""
    margin: Annotated[float, at_least(0)] = 0.0
    """Subtracted from beta h in "sigmoid": the target margin of the chosen answer (SimPO's gamma)."""
    sft_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the chosen answer's negative log-likelihood, a mean over its tokens, beside that (RPO, arXiv:2404.19733)."""


_ORPO = {"loss": "odds_ratio", "reference": "none", "length_normalised": True, "sft_coefficient": 1.0}


def _orpo_defaults(_: type, fields: "list[Attribute[Any]]") -> "list[Attribute[Any]]":
    return [field.evolve(default=_ORPO.get(field.name, field.default)) for field in fields]


@frozen(kw_only=True, field_transformer=_orpo_defaults)
class OrpoConfig(DpoConfig):
    """ORPO (arXiv:2403.07691): the likelihood of the chosen answer, and `beta` times the loss of the odds ratio. It needs no
    reference."""

    section = "algorithm.orpo"


@frozen(kw_only=True)
class OnlineDpoConfig(DpoConfig):
    """Online DPO (arXiv:2402.04792): pairs of the policy's own answers, the one with a prompt's highest reward and the one with
    its lowest."""

    section = "algorithm.online_dpo"
