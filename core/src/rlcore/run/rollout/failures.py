"""Failures of environments: what one episode's error means, and how many of a step's samples may be masked."""

from collections import Counter
from collections.abc import Iterable, Iterator

from attrs import define, field, frozen

from rlcore import spi
from rlcore.registry.plugin_errors import described, message_of
from rlcore.spi import RewardError
from rlcore.spi.errors import ProblemsError

FINAL: tuple[type[spi.RlcoreError], ...] = (
    spi.ConfigError,
    spi.ContractError,
    spi.DataError,
    spi.ModelError,
    spi.PluginError,
    spi.StorageError,
    spi.WorkerError,
)
"""What is wrong with the environment, the data or the installation, and will be in the next episode too: never masked."""
MAX_ELEMENTS = 8
MAX_DEPTH = 3
ONE_LINE = 10**6


@frozen(kw_only=True, eq=False)
class Failure:
    """An episode that the environment failed on, where the recipe says to mask those."""

    reason: str
    error: BaseException | None = None
    """What the environment raised; None where it took too long."""
    cause: BaseException | None = None
    """`error`; of a group the member that ends the run, else the first."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure that an environment's exception stands for."""
        found = list(_members(error))
        cause = next((one for one in found if isinstance(one, (KeyboardInterrupt, *FINAL))), found[0])
        if isinstance(cause, (spi.RewardError, *FINAL)) and cause.__cause__ is None:
            reason = message_of(cause)
        else:
            reason = f"raised {described(cause)}"
        if isinstance(error, BaseExceptionGroup):
            reason += f" (one of {len(found)} in {described(error)})"
        return cls(reason=reason, error=error, cause=cause)

    @property
    def interrupts(self) -> bool:
        """Return whether the environment wants the run to end as Ctrl-C ends it."""
        return isinstance(self.cause, KeyboardInterrupt)

    @property
    def is_final(self) -> bool:
        """Return whether it is one of FINAL."""
        return isinstance(self.cause, FINAL)

    def final_error(self, where: str) -> spi.RlcoreError:
        """Return the error that ends the run for such a failure; `where` names the call that failed."""
        kind = next(kind for kind in FINAL if isinstance(self.cause, kind))
        if not isinstance(self.cause, ProblemsError):
            return kind(f"{where}, {self.reason}")
        error = kind(self.cause.problems)  # which no text makes
        error.add_note(f"raised in {where}")
        return error


def shown(value: object, max_characters: int) -> str:
    """The beginning of a value's repr. Of long texts and containers no more is made than that, and a repr that raises is said,
    so that it takes no error's place."""
    from rich.pretty import pretty_repr  # imported here, since only an error needs it

    try:
        text = pretty_repr(value, max_width=ONE_LINE, max_length=MAX_ELEMENTS, max_string=max_characters, max_depth=MAX_DEPTH)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text[:max_characters]


def _members(error: BaseException) -> Iterator[BaseException]:
    """A group's errors, those of the groups in it too; else the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for member in error.exceptions:
        yield from _members(member)


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
