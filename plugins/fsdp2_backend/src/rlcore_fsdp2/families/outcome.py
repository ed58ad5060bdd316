"""The outcome of a family's trial."""

from typing import Literal

from attrs import frozen

from rlcore_torchkit.testing.families.corrections import UNTRIED

Verdict = Literal["agrees", "refused", "wrong", "crashed", "not tried"]


@frozen(kw_only=True)
class Outcome:
    """The verdicts on trainer and generator of one model_type, each with its reason unless it agrees."""

    model_type: str
    class_name: str
    trainer: Verdict = "not tried"
    trainer_reason: str = ""
    generator: Verdict = "not tried"
    generator_reason: str = ""
    way: str = ""
    """The trainer's way to compute the model; "" where it refuses it."""
    options: str = ""
    """Options of the tiny model that the class's default configuration lacks, and without which it is refused."""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Return whether both agree with transformers."""
        return {self.trainer, self.generator} == {"agrees"}

    @property
    def is_sound(self) -> bool:
        """Return whether both agree with transformers, or say why they refuse, or no tiny model can be made, as is known."""
        return {self.trainer, self.generator} <= {"agrees", "refused"} or self.model_type in UNTRIED

    @property
    def line(self) -> str:
        """The outcome in a line."""
        reasons = "; ".join(dict.fromkeys(reason for reason in (self.trainer_reason, self.generator_reason) if reason))
        return f"{self.model_type}: {self.trainer}, {self.generator} ({self.seconds:.0f} s) {reasons}".rstrip()
