"""The section `[critic]`: the model that tells what the policy will earn."""

from typing import Annotated, Literal, TypeAlias

from attrs import evolve, frozen

from rlcore.schema.constraints import KNOWN_HOME, Count, above, at_least, not_empty
from rlcore.spi import OptimizerSpec

Offload: TypeAlias = Literal["none", "state", "all"]


@frozen(kw_only=True)
class CriticConfig:
    """`[critic]`: the model beside the policy that an algorithm with a critic trains to tell what will be earned. It has the
    same trainer, layout and schedule, in the same processes and on the same devices; all of its weights train, with or without
    a [lora]. Keys that are left out are those of [optimizer]."""

    path: Annotated[str, not_empty("Leave the key out for the policy's own model."), KNOWN_HOME] | None = None
    """A local Hugging Face directory, or a name on the Hub, of any size and with the policy's tokenizer; None is model.path.
    Values begin at 0, or with the head of values that the directory holds, as a reward model's does."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; with `path` alone."""
    learning_rate: Annotated[float, above(0)] | None = None
    """Peak learning rate."""
    weight_decay: Annotated[float, at_least(0)] | None = None
    """Decoupled decay of weight matrices."""
    max_grad_norm: Annotated[float, at_least(0, "0.0 never scales gradients down.")] | None = None
    """Gradients are scaled down to this global L2 norm; 0.0 never."""
    warmup_steps: Count = 0
    """First steps of the run that train the critic alone, while the policy stays as it is. The policy's schedule begins after
    them."""
    export: bool = False
    """Write, after the last step, a directory `critic` in the Hugging Face format, a model for sequence classification with one
    label: what another run's critic may begin with."""
    offload: Offload = "none"
    """The parts that leave the GPU's memory while the critic is idle, for the policy to train and the generator to run:
    nothing, optimizer state and gradients, or its weights too. While the generator works, offload.trainer moves it as well."""

    def optimizer(self, policy: OptimizerSpec) -> OptimizerSpec:
        """Its own, given the policy's."""
        own = {name: getattr(self, name) for name in ("learning_rate", "weight_decay", "max_grad_norm")}
        return evolve(policy, **{name: value for name, value in own.items() if value is not None})
