"""`rlcore show`: samples by group, with what they earned; whole runs are in tests/system/test_show.py."""

from typing import Any

import click
import pytest

from rlcore_report.show_command import lines_of


def sample(group: int, response: str, **options: Any) -> dict[str, Any]:
    defaults = {"step": 3, "prompt": f"prompt {group}", "reward": 1.0, "success": False, "valid": True}
    return {**defaults, "group": group, "response": response, "finish_reason": "stop", "num_generated": 5, **options}


SAMPLES = [
    sample(0, "one\ntwo\x1b[31m", advantages=[0.0, 0.5, 0.5], loss_mask=[False, True, True], success=True),
    sample(0, "x" * 50, reward=0.0, advantages=[0.0, -1.0, 2.0], loss_mask=[False, True, True]),
    sample(1, "", valid=False, reward=0.0, advantages=[0.0], loss_mask=[False]),
]


def test_groups_are_shown_with_rewards_and_advantages() -> None:
    assert list(lines_of(SAMPLES, None, 4, 20)) == [
        *("step 3: 3 samples in 2 groups, mean reward 0.500", "\ngroup 0", "  prompt", "    | prompt 0"),
        *("  reward 1.000, advantage +0.500, solved, 5 tokens, stop", "    | one", "    | two\\x1b[31m"),
        "  reward 0.000, advantage -1.000 to +2.000, 5 tokens, stop",
        f"    | {'x' * 10} … (30 characters) … {'x' * 10}",
        *("\ngroup 1", "  prompt", "    | prompt 1", "  reward 0.000, 5 tokens, stop, masked", "    |"),
    ]


def test_one_group_or_the_first_ones() -> None:
    first = list(lines_of(SAMPLES, None, 1, 0))
    assert "group 1" not in "".join(first)
    assert first[-1].startswith("\n1 more groups: --groups 2")
    assert f"    | {'x' * 50}" in first
    assert list(lines_of(SAMPLES, 1, 1, 0))[1:3] == ["\ngroup 1", "  prompt"]
    with pytest.raises(click.UsageError, match="--group: found 7.* 0 to 1"):
        list(lines_of(SAMPLES, 7, 1, 0))
    with pytest.raises(click.UsageError, match="--group: found 0; expected none"):
        list(lines_of([], 0, 1, 0))


def test_samples_without_advantages() -> None:
    assert "  reward 1.000, 5 tokens, stop" in list(lines_of([sample(0, "a")], None, 1, 0))
