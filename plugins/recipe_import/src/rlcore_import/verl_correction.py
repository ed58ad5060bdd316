"""Imports verl's rollout correction: weights and masks for the generator's other numerics."""

from typing import Any

from rlcore_import.source import Source
from rlcore_import.verl_keys import GRPO, PPO
from rlcore_import.verl_rows import CORRECTION, ROLLOUT


def import_correction(source: Source, values: dict[str, Any], section: str, *, is_bypassed: bool, reads_type: bool) -> None:
    """Import the weights and masks that correct for the generator's numerics."""
    kind = source.text(f"{CORRECTION}.rollout_is")
    low, high = _bounds(source, f"{CORRECTION}.rollout_is_threshold", source.take(f"{CORRECTION}.rollout_is_threshold", 2.0))
    measures = source.flag(f"{ROLLOUT}.calculate_log_probs", default=True)
    how = source.text(f"{CORRECTION}.loss_type", "ppo_clip")
    values[f"{section}.importance_correction"] = "none"
    if is_bypassed:
        _bypass(source, values, section, kind=kind, maximum=high, is_reinforce=reads_type and how == "reinforce")
    elif kind not in (None, "token", "sequence"):
        source.report(f"{CORRECTION}.rollout_is", "no such weights: none are taken")
    elif kind is not None and not measures:
        source.report(
            f"{ROLLOUT}.calculate_log_probs", "without the generator's probabilities verl weighs nothing", changes_meaning=False
        )
    elif kind is not None:
        if section == PPO and kind == "sequence":
            source.report(f"{CORRECTION}.rollout_is", "with a critic weights are those of tokens")
            kind = "token"
        values |= {f"{section}.importance_correction": kind, f"{section}.importance_maximum": high}
        if low is not None and section == GRPO:
            values |= {f"{section}.importance_minimum": low, f"{section}.importance_bound": "mask"}
        elif low is not None:
            source.report(f"{CORRECTION}.rollout_is_threshold", "with a critic a weight outside of its bounds is cut, not 0")
    _rejection(source, values, section, is_on=measures and not is_bypassed)


def _bypass(
    source: Source, values: dict[str, Any], section: str, *, kind: str | None, maximum: float, is_reinforce: bool
) -> None:
    """Import bypass_mode, whose ratio is against the generator's probabilities."""
    if values.get(f"{section}.objective") == "kl_cov":
        source.report(f"{CORRECTION}.bypass_mode", "the loss kl_cov needs the trainer's probabilities")
        return
    values[f"{section}.previous_logprobs"] = "generation"
    if not is_reinforce:
        return
    if section == PPO:
        source.report(f"{CORRECTION}.loss_type", "with a critic the clipped loss is the only one")
        return
    for name in ("clip_low", "clip_high", "dual_clip"):
        values.pop(f"{GRPO}.{name}", None)
    if kind is None:
        values[f"{GRPO}.objective"] = "policy_gradient"
        return
    ratio = "sequence_product" if kind == "sequence" else "token"
    values |= {f"{GRPO}.objective": "cispo", f"{GRPO}.ratio": ratio, f"{GRPO}.clip_low": 1.0}
    values[f"{GRPO}.clip_high"] = max(0.0, maximum - 1)  # cispo then weighs log-probabilities by a ratio up to `maximum`


def _rejection(source: Source, values: dict[str, Any], section: str, *, is_on: bool) -> None:
    kind, bounds = source.text(f"{CORRECTION}.rollout_rs"), source.take(f"{CORRECTION}.rollout_rs_threshold")
    if kind is None:
        return
    if kind != "seq_mean_k1" or section == PPO or not is_on or bounds is None:
        why = "no such mask: geometric_minimum and geometric_maximum are those of seq_mean_k1, without bypass_mode"
        source.report(f"{CORRECTION}.rollout_rs", why)
        return
    low, high = _bounds(source, f"{CORRECTION}.rollout_rs_threshold", bounds)
    low = 1 / high if low is None else low
    # verl bounds the generator's probability over the trainer's, rlcore its inverse.
    values |= {f"{GRPO}.geometric_minimum": 1 / high, f"{GRPO}.geometric_maximum": 1 / low}
    source.report(f"{CORRECTION}.rollout_rs", "sequences that are left out count in the mean over the update")


def _bounds(source: Source, key: str, written: Any) -> tuple[float | None, float]:
    """Return the lower bound or None, and the upper bound, of "LOW_HIGH" or one number."""
    try:
        numbers = [float(part) for part in str(written).split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or isinstance(written, bool) or not all(number > 0 for number in numbers):
        source.refuse(key, 'a number above 0, or two as "LOW_HIGH"')
        return None, 2.0
    if sorted(numbers) != numbers or (len(numbers) == 2 and numbers[0] == numbers[1]):
        source.refuse(key, "a lower bound below the upper one")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]
