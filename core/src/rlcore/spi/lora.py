"""Low-rank adapters that train in place of the weights: the section `[lora]`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import KNOWN_HOME, Constraint, Positive, Text, above, at_least_below

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer of the decoder's layers."""

_TARGETS = Constraint(
    f'that are not empty, each once, or "{ALL_LINEAR}" alone',
    lambda value: all(value) and len(set(value)) == len(value) > 0 and (len(value) == 1 or ALL_LINEAR not in value),
)


@frozen(kw_only=True)
class LoraSpec:
    """`[lora]`: low-rank adapters (arXiv:2106.09685) train, and the model's own weights stay as they are.

    A linear layer W [out, in] computes W x + alpha / rank · B A dropout(x), with A [rank, in] and B [out, rank] in float32. A
    begins uniform in ±1/√in, as PEFT's does, from the run's seed and the layer's name; B begins at zero.
    """

    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, above(0)] = 32.0
    """The adapters' product is scaled by alpha / rank."""
    dropout: Annotated[float, at_least_below(0, 1)] = 0.0
    """Share of each adapter's inputs that a train step sets to zero; the others are divided by 1 - dropout."""
    targets: Annotated[tuple[str, ...], _TARGETS] = (ALL_LINEAR,)
    """The linear layers with an adapter, by the end of their names as in PEFT's target_modules, such as "q_proj" or
    "self_attn.q_proj". "all-linear" is every one in the decoder's layers: routers, fused experts and the head are none."""
    init_from: Annotated[Text, KNOWN_HOME] | None = None
    """A PEFT directory of the same rank, alpha and targets whose adapters the run begins with."""

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' product."""
        return self.alpha / self.rank
