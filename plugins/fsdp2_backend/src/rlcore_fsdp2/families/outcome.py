"""The outcome of a family's trial."""

from typing import Literal

from attrs import frozen

Verdict = Literal["agrees", "refused", "wrong", "crashed", "not tried"]


@frozen(kw_only=True)
class Outcome:
    """The verdicts on trainer and generator of one model_type, each with its reason unless it agrees."""

    model_type: str
    class_name: str
    trainer: Verdict
    trainer_reason: str = ""
    generator: Verdict = "not tried"
    generator_reason: str = ""
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Return whether both agree or say why they refuse."""
        return self.trainer in ("agrees", "refused") and self.generator in ("agrees", "refused", "not tried")
