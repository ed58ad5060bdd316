"""Results of environment calls: checked results, failures, and how many of a step's samples may be masked."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import numpy as np
from attrs import define, field, frozen

from rlcore import spi
from rlcore.registry.plugin_errors import described, message_of
from rlcore.run.data.text import renderer
from rlcore.schema.printable import lone_surrogate
from rlcore.spi import (
    ContractError,
    EpisodeFailure,
    EpisodeResult,
    FailureKind,
    Observation,
    ResetResult,
    RewardError,
    StepResult,
    failure_kind,
)
from rlcore.spi.arrays import check_array
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
"""Errors of the environment, the data or the installation, which the next episode would have too: never masked."""
MAX_ELEMENTS = 8
MAX_DEPTH = 3
ONE_LINE = 10**6


@frozen(kw_only=True, eq=False)
class Failure:
    """An episode that failed, and whose sample is masked where the recipe lets the run go on."""

    reason: str
    kind: FailureKind = "environment"
    is_returned: bool = False
    """True where the environment returned it: the sample is then masked whatever the recipe does with errors."""
    error: BaseException | None = None
    """The environment's exception; None where it took too long."""
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
        kind = failure_kind(error if "failure" in vars(error) else cause)
        return cls(reason=reason, kind=kind, error=error, cause=cause)

    @classmethod
    def returned(cls, failure: EpisodeFailure) -> "Failure":
        """Return the failure that an environment's result names."""
        reason = failure.reason or f"returned a failure of the kind {failure.kind!r}"
        return cls(reason=reason, kind=failure.kind, is_returned=True)

    @property
    def ending(self) -> EpisodeFailure:
        """The failure as the episode's end."""
        return EpisodeFailure(kind=self.kind, reason=self.reason, masked=True)

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
    """The owner of the samples in words, such as a step."""
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
        counts = Counter(first_line(reason) for reason in self.reasons.values())
        listed = [f"{count} x {reason}" for reason, count in counts.most_common(MAX_REASONS)]
        if len(counts) > MAX_REASONS:
            others = sum(counts.values()) - sum(count for _, count in counts.most_common(MAX_REASONS))
            listed.append(f"{others} x something else")
        number = f"{len(self.reasons)} of {self.num_counted} samples of {self.of}"
        return f"the environment failed on {number}: {'; '.join(listed)}"


def first_line(reason: str) -> str:
    """Return the first line of a reason, without its end where it is long."""
    line = (reason.splitlines() or [""])[0]
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"


RESERVED_METRICS = ("failed", "timed_out")
"""Names below `environment/` that the core writes itself."""
LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32 in the end."""


def check_reset(result: Any, vocab_size: int | None) -> ResetResult:
    """Check the result of `reset`, which may hold tokens below `vocab_size`. ContractError where it is something else."""
    if not isinstance(result, ResetResult):
        raise ContractError(f"returned {type(result).__name__}; expected rlcore.spi.ResetResult")
    _check_observation(result.observation, vocab_size)
    _check_tools(result.observation)
    return result


def check_step(result: Any, vocab_size: int | None, num_characters: int | None = None) -> StepResult | Failure:
    """Check the result of `step` on a turn of so many characters, and return it, or the failure that masks its sample.
    ContractError where it is something else, RewardError where a figure is not finite as float32."""
    if not isinstance(result, StepResult):
        raise ContractError(f"returned {type(result).__name__}; expected rlcore.spi.StepResult")
    _check_number("the reward", result.reward)
    if type(result.done) is not bool or type(result.success) is not bool:
        raise ContractError(f"returned done={shown(result.done, 40)}, success={shown(result.success, 40)}; expected bools")
    if result.done != (result.observation is None):
        given = "an observation" if result.done else "no observation"
        raise ContractError(f"returned done={result.done} and {given}; expected an observation exactly where not done")
    if result.observation is not None:
        _check_observation(result.observation, vocab_size)
        if result.observation.tools:
            raise ContractError("returned an observation with tools; expected them at reset, where the episode begins")
        if result.observation.messages is not None and (fault := renderer().reply_fault(result.observation.messages)):
            raise ContractError(f"returned an observation {fault}")
    _check_components(result.reward_components)
    if result.part_rewards != {}:
        _check_parts(result.part_rewards, num_characters)
    _check_metrics(result.metrics)
    masked = _masked_by(result.failure)
    if result.failure is not None and not result.done:
        raise ContractError("returned a failure and done=False; expected a failure where the episode ends")
    return masked or result


def check_episode(result: Any) -> EpisodeResult | Failure:
    """Check the result of `run`, and return it, or the failure that masks its sample. ContractError where it is something
    else, RewardError where a figure is not finite as float32."""
    if not isinstance(result, EpisodeResult):
        raise ContractError(f"returned {type(result).__name__}; expected rlcore.spi.EpisodeResult")
    _check_number("the reward", result.reward)
    if type(result.success) is not bool:
        raise ContractError(f"returned success={shown(result.success, 40)}; expected a bool")
    _check_components(result.reward_components)
    _check_metrics(result.metrics)
    return _masked_by(result.failure) or result


def _masked_by(failure: Any) -> Failure | None:
    """Check how an episode ended, and return that where it masks the sample."""
    if failure is None:
        return None
    if not isinstance(failure, EpisodeFailure):
        raise ContractError(f"returned the failure {shown(failure, 80)}; expected rlcore.spi.EpisodeFailure or None")
    faults = []
    if failure.kind not in get_args(FailureKind):
        faults.append(f"the kind {shown(failure.kind, 40)}; expected one of {', '.join(get_args(FailureKind))}")
    if not isinstance(failure.reason, str) or lone_surrogate(failure.reason):
        faults.append(f"the reason {shown(failure.reason, 80)}; expected Unicode text")
    if type(failure.masked) is not bool:
        faults.append(f"masked={shown(failure.masked, 40)}; expected a bool")
    if faults:
        raise ContractError(f"returned a failure with {', and with '.join(faults)}")
    return None if failure.is_trained else Failure.returned(failure)


def _check_components(components: Any) -> None:
    _check_mapping("reward_components", components)
    for name, value in components.items():
        if type(value) is float and type(name) is str and name.isascii() and -LARGEST <= value <= LARGEST:
            continue  # as nearly all are: this is done several times a turn
        if not isinstance(name, str):
            raise ContractError(f"returned a reward component called {shown(name, 40)}; expected a string")
        _check_characters("a reward component called", name)
        _check_number("the reward component ", value, name)


def _check_parts(rewards: Any, num_characters: int | None) -> None:
    if not isinstance(rewards, Mapping):
        raise ContractError(f"returned {type(rewards).__name__} as part_rewards; expected a mapping of places to floats")
    for end, value in rewards.items():
        if type(end) is not int or not 0 < end <= (end if num_characters is None else num_characters):
            within = "" if num_characters is None else f" to {num_characters}, the characters of the turn"
            raise ContractError(f"returned the reward of a part that ends at {shown(end, 40)}; expected an int from 1{within}")
        _check_number("the reward of the part that ends at ", value, str(end))


def _check_mapping(name: str, values: Any) -> None:
    if type(values) is not dict and not isinstance(values, Mapping):  # to ask an abstract class takes its time
        raise ContractError(f"returned {type(values).__name__} as {name}; expected a mapping of names to floats")


def _check_metrics(metrics: Any) -> None:
    _check_mapping("metrics", metrics)
    for name, value in metrics.items():
        plain = type(value) is float and type(name) is str and name.isascii()
        if plain and name not in RESERVED_METRICS and -LARGEST <= value <= LARGEST:
            continue
        if not isinstance(name, str) or name in RESERVED_METRICS:
            taken = f", which is the core's own: {', '.join(RESERVED_METRICS)}" if name in RESERVED_METRICS else ""
            raise ContractError(f"returned a metric called {shown(name, 40)}{taken}; expected another name")
        _check_characters("a metric called", name)
        _check_number("the metric ", value, name)


def _check_characters(what: str, name: str) -> None:
    if half := lone_surrogate(name):
        raise ContractError(f"returned {what} {name!r}, with {half}; expected Unicode text")


def _check_number(what: str, value: object, name: str | None = None) -> None:
    """`name` is put behind `what` in messages alone: this is called once a turn at least."""
    if type(value) is float and -LARGEST <= value <= LARGEST:
        return  # before an abstract class is asked
    if isinstance(value, (float, Real)) and abs(float(value)) <= LARGEST:
        return
    called = what if name is None else f"{what}{name!r}"
    if not isinstance(value, (float, Real)):
        raise ContractError(f"returned {called} {shown(value, 40)}; expected a float")
    raise RewardError(f"returned {called} {value}; expected a finite number, as float32")


def _check_tools(observation: Observation) -> None:
    """ContractError for tools that are none, and beside anything but messages, where no chat template could show them."""
    tools, expected = (
        observation.tools,
        'expected {"type": "function", "function": {"name": …, "parameters": …}}, as JSON has it',
    )
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ContractError(f"returned an observation with tools that are {type(tools).__name__}; expected a sequence")
    if tools and observation.messages is None:
        raise ContractError(
            "returned an observation with tools and no messages; expected messages, whose chat template shows them"
        )
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ContractError(f"returned an observation with the tool {shown(tool, 80)}; {expected}")
        try:
            json.dumps(tool, ensure_ascii=False).encode()  # half a character has no bytes
        except (TypeError, ValueError) as error:
            raise ContractError(f"returned an observation with the tool {shown(tool, 80)}: {error}; {expected}") from error


def _check_observation(observation: Any, vocab_size: int | None) -> None:
    if not isinstance(observation, Observation):
        raise ContractError(f"returned the observation {type(observation).__name__}; expected rlcore.spi.Observation")
    given = [name for name in ("messages", "text", "tokens") if getattr(observation, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise ContractError(f"returned an observation with {found}; expected exactly one of messages, text, tokens")
    if observation.tokens is None:
        fault = renderer().prompt_fault(observation.text if observation.messages is None else observation.messages)
        if observation.text is not None and not isinstance(observation.text, str):
            fault = f"the text {shown(observation.text, 40)}"
        if fault is not None:
            raise ContractError(f"returned an observation with {fault}; expected text, or messages with role and content")
        return
    check_array("observation.tokens", observation.tokens, np.int32)
    if not len(observation.tokens) or observation.tokens.min() < 0:
        found = f"the token {observation.tokens.min()}" if len(observation.tokens) else "no tokens"
        raise ContractError(f"returned an observation with {found}; expected at least one, none below 0")
    if vocab_size is not None and observation.tokens.max() >= vocab_size:
        found = f"the token {observation.tokens.max()}"
        raise ContractError(f"returned an observation with {found}; expected tokens below {vocab_size}, the model's vocabulary")
