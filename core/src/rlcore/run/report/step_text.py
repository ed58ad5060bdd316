"""A step's figures in words."""

from collections.abc import Mapping

from rlcore.run.report.timing import STEP_PHASES

STEP_METRICS = {
    "eval/pass@1": ("pass@1", "{:.3f}"),
    "reward_mean": ("reward", "{:.3f}"),
    "eval/loss": ("held-out loss", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
    "response_length_mean": ("length", "{:.1f}"),
    "speculative/mean_acceptance_length": ("acceptance length", "{:.2f}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad_norm": ("grad norm", "{:.3f}"),
}
"""Metrics worth a place in a step's line, with their label and format."""


def describe_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of what the metrics hold; the loss only where there is no reward, since with one it says little."""
    shown = {name: style for name, style in STEP_METRICS.items() if name in metrics}
    if "reward_mean" in metrics:
        shown.pop("loss", None)
    return [(label, style.format(metrics[name])) for name, (label, style) in shown.items()]


def describe_times(metrics: Mapping[str, float]) -> list[str]:
    """One text on where the step's seconds went and the tokens per second; none where there are no times."""
    if "time/total_s" not in metrics:
        return []
    parts = {name: metrics.get(f"time/{name}_s", 0.0) for name in (*STEP_PHASES, "other")}
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)
    text = f"{metrics['time/total_s']:.2f} s" + (f" ({shown})" if shown else "")
    speed = metrics.get("tokens_per_second")
    return [text if speed is None else f"{text}  {speed:,.0f} tokens/s"]
