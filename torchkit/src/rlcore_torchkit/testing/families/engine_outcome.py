"""The outcome of a family's trial in an engine."""

from typing import Any, Literal

from attrs import asdict, frozen

Verdict = Literal["agrees", "refused", "wrong", "cannot", "crashed", "not tried"]
SOUND = frozenset({"agrees", "refused", "cannot"})
"""Verdicts of families that are right, or that a run never samples from."""


@frozen(kw_only=True)
class EngineOutcome:
    """The verdict on a family, with its reason unless it agrees.

    "refused": rlcore refuses it before the run, or the refit. "cannot": the engine does not start or fails on it. "wrong": it
    samples, and log-probabilities or weights are not the trainer's. "crashed": the trial itself failed.
    """

    model_type: str
    implementation: str
    verdict: Verdict = "not tried"
    reason: str = ""
    dtype: str = ""
    distance: float | None = None
    """Largest difference of a sampled token's log-probability from transformers' in float32."""
    num_tensors: int = 0
    """Tensors of a checkpoint that a refit brings."""
    num_changed: int = 0
    """Those that the engine holds under another name, or joined with others."""
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Return whether no run can train on wrong samples of this family, and the trial came to an end."""
        return self.verdict in SOUND

    @property
    def line(self) -> str:
        """The outcome in a line."""
        distance = "" if self.distance is None else f"{self.dtype} {self.distance:.1e} "
        return f"{self.model_type}: {self.verdict} {distance}({self.seconds:.0f} s) {self.reason}".rstrip()

    def content(self) -> dict[str, Any]:
        """Plain values, of which `EngineOutcome(**content)` makes the outcome again."""
        return asdict(self)
