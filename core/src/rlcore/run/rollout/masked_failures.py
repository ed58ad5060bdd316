"""Samples that their environment failed on, where the recipe masks them: how many, why, and when there are too many."""

from collections import Counter
from collections.abc import Iterable

from attrs import define, field

from rlcore.spi import RewardError

MAX_REASONS = 3
MAX_CHARACTERS = 160


@define(kw_only=True, eq=False)
class MaskedFailures:
    """The failed samples among the N of a step, or of an evaluation."""

    num_samples: int
    of: str
    """What the samples are of, in words."""
    max_fraction: float
    """rollout.max_failed_fraction"""
    reasons: dict[int, str] = field(factory=dict)
    """The reason of each failure, by the sample's number."""
    _replaced: dict[int, int] = field(factory=dict)
    """The samples of each group that another has replaced, and that counts until it is forgotten."""

    def add(self, sample: int, reason: str) -> None:
        """Note a sample's failure; the first one counts."""
        self.reasons.setdefault(sample, reason)

    @property
    def num_counted(self) -> int:
        """N, and the samples of groups that others have replaced since the last step: their failures count too."""
        return self.num_samples + sum(self._replaced.values())

    def replace(self, group: int, group_size: int) -> None:
        """Another group takes the place of this one."""
        self._replaced[group] = group_size

    def forget(self, group_size: int, groups: Iterable[int]) -> None:
        """The samples of some groups count no longer."""
        for group in groups if self.reasons or self._replaced else ():
            self._replaced.pop(group, None)
            for sample in range(group * group_size, (group + 1) * group_size):
                self.reasons.pop(sample, None)

    def check(self) -> None:
        """RewardError where more samples failed than the recipe lets pass."""
        if len(self.reasons) > self.max_fraction * self.num_counted:
            raise RewardError(
                f"{self}. That is more than rollout.max_failed_fraction = {self.max_fraction:g} of them. Repair the "
                "environment or the data, or raise it"
            )

    def __str__(self) -> str:
        counts = Counter(_shortened(reason) for reason in self.reasons.values())
        listed = [f"{count} x {reason}" for reason, count in counts.most_common(MAX_REASONS)]
        if len(counts) > MAX_REASONS:
            others = sum(counts.values()) - sum(count for _, count in counts.most_common(MAX_REASONS))
            listed.append(f"{others} x something else")
        number = f"{len(self.reasons)} of {self.num_counted} samples of {self.of}"
        return f"the environment failed on {number}: {'; '.join(listed)}"


def _shortened(reason: str) -> str:
    line = (reason.splitlines() or [""])[0]
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"
