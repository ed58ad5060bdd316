"""The outcome of a family's trial."""

from typing import Literal

from attrs import frozen

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
    """How the trainer computes the model, where it does."""
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Return whether both agree with transformers, or say why they refuse."""
        return {self.trainer, self.generator} <= {"agrees", "refused"}

    @property
    def line(self) -> str:
        """The outcome in a line."""
        reasons = "; ".join(dict.fromkeys(reason for reason in (self.trainer_reason, self.generator_reason) if reason))
        return f"{self.model_type}: {self.trainer}, {self.generator} ({self.seconds:.0f} s) {reasons}".rstrip()
