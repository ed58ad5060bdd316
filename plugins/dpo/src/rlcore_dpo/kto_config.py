"""`[algorithm.kto]`: every option of KTO and its meaning."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import above


@frozen(kw_only=True)
class KtoConfig:
    """KTO (arXiv:2402.01306): answers that are labelled as desirable or not, without pairs.

    r is an answer's log-probability less the reference's; z is the KL estimate of a step.
    """

    loss: Literal["kto", "apo_zero"] = "kto"
    """The loss of an answer. "kto": 1 - sigmoid(beta (r - z)) of a desirable one, 1 - sigmoid(beta (z - r)) of another, where z
    is the mean of r over the step's prompts with other rows' answers, at least 0. "apo_zero": the same with z = 0, which needs
    no such answers (arXiv:2408.06266, unpaired)."""
    beta: Annotated[float, above(0)] = 0.1
    """How closely the policy is held to the reference: the larger, the closer."""
    desirable_weight: Annotated[float, above(0)] = 1.0
    """Weight of a desirable answer's loss. The paper advises weights with desirable_weight times the number of desirable rows
    from 1 to 4/3 of undesirable_weight times the number of the others."""
    undesirable_weight: Annotated[float, above(0)] = 1.0
    """Weight of another answer's loss."""
