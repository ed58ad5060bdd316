"""Replays of a bundle with other settings, weights, kernels or packages, each compared with what the bundle holds."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from attrs import define, evolve, field, frozen

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, Problem, RlcoreError, WorkerError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.components import START, nested
from rlcore_bundles.difference import GENERATOR, compare
from rlcore_bundles.interpreters import executable, run_python
from rlcore_bundles.recomputed_rewards import Rewards
from rlcore_bundles.replay import Computed, computed, rounded, unrounded
from rlcore_bundles.replaying import Replayed, Start, plan_of
from rlcore_bundles.rows import Row
from rlcore_bundles.storage import read_bundle, write_bundle

Probe: TypeAlias = Literal["", "attention kernel", "dtype of the head"]
"""The part that a replay computes in another way than the trainer would: nothing; attention by torch's plain kernel; or the
product with the head in float32."""

EXPECTED = "an interpreter with rlcore-bundles and a trainer"
LOGPROBS = "logprobs.npy"
"""The file of another interpreter's log-probabilities."""


@frozen(kw_only=True, eq=False)
class Outcome:
    """A replay beside the bundle."""

    rows: Sequence[Row]
    versions: Mapping[str, str]

    def first(self, *, exact: bool) -> Row | None:
        """The first quantity that differs by more than rounding, or where `exact` by a bit; None where none does."""
        return next((row for row in self.rows if _differs(row, exact)), None)

    def agrees_up_to(self, quantity: str, *, exact: bool) -> bool:
        """Return whether a quantity and all before it are those of the bundle. The generator, another engine than the trainer,
        counts only where it is asked for."""
        names = [row.quantity for row in self.rows]
        if quantity not in names:
            return False
        rows = self.rows[: names.index(quantity) + 1]
        return not any(_differs(row, exact) for row in rows if quantity == GENERATOR or row.quantity != GENERATOR)


def _differs(row: Row, exact: bool) -> bool:
    if exact and row.quantity != GENERATOR:  # another engine than the trainer
        return row.verdict in ("differs", "rounding")
    return row.verdict == "differs"


@define(kw_only=True, eq=False)
class Trials:
    """The replays of one bundle. Its own settings and weights measure what rounding does."""

    bundle: Bundle
    settings: Mapping[str, Any]
    """The settings of the bundle's run, as dotted keys."""
    start: Start
    count: Callable[[str], None]
    """Called with what each replay does."""
    _perturbed: list[Replayed] = field(factory=list)
    _own: Replayed | None = None
    """The replay that rounding is measured against: with the bundle's own settings and weights."""

    def run_own(self, what: str, num_perturbed: int) -> Outcome:
        """Replay with the bundle's own settings, after replays with all weights changed by one unit, up or down."""
        self._own = unrounded(self.bundle, self.start, self._planned)
        for number in range(1, num_perturbed + 1):
            self.count(f"{what}, with all weights changed by one unit")
            dtype = self.bundle.environment["dtype"]
            self._perturbed.append(rounded(self.bundle, self.start, dtype, number, self._planned))
        return self.run(what)

    def run(
        self,
        what: str,
        settings: Mapping[str, Any] | None = None,
        *,
        start: Start | None = None,
        probe: Probe = "",
        python: Path | None = None,
    ) -> Outcome:
        """Replay with these settings, or the bundle's own. A replay that cannot be computed differs in START."""
        self.count(what)
        settings, start = self.settings if settings is None else settings, start or self.start
        try:
            if python is None:
                made = _computed(self.bundle, settings, start, probe)
            else:
                made = _computed_by(python, self.bundle, settings, start)
        except (RlcoreError, RuntimeError, ValueError, IndexError, KeyError) as error:
            if python is not None and not isinstance(error, WorkerError):
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            return Outcome(rows=[Row(quantity=START, verdict="differs", where=lines[-1].strip(" -"))], versions={})
        whole = made.start.is_whole(self.bundle)
        self._own = self._own or made.replayed
        rows = compare(self.bundle, made.replayed, self._perturbed, made.rewards, whole=whole, unperturbed=self._own)
        return Outcome(rows=rows, versions=made.versions)

    def _planned(self, start: Start) -> RunPlan:
        return plan_of(self.bundle, start, (), nested(self.settings))


def _computed(bundle: Bundle, settings: Mapping[str, Any], start: Start, probe: Probe = "") -> Computed:
    """Compute a step with settings, given as dotted keys, in this process."""
    with _probing(probe):
        return computed(bundle, plan_of(bundle, start, (), nested(settings)), start)


@contextmanager
def _probing(probe: Probe) -> Iterator[None]:
    if probe == "attention kernel":
        from rlcore_torchkit.layers.packed_attention import plain_attention

        with plain_attention():
            yield
    elif probe == "dtype of the head":
        from rlcore_torchkit.head.logprobs import head_in_float32

        with head_in_float32():
            yield
    else:
        yield


def _computed_by(python: Path, bundle: Bundle, settings: Mapping[str, Any], start: Start) -> Computed:
    """Compute a step by another interpreter, with its packages. ConfigError where it has no rlcore-bundles of this kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bundle(evolve(bundle, weights="none"), folder / "bundle")
        asked = {"settings": dict(settings), "start": attrs.asdict(start)}
        (folder / "trial.json").write_text(json.dumps(asked, default=str))
        ran = run_python(executable(python), ["-m", "rlcore_bundles.trials", str(folder)])
        if not (folder / "answer.json").is_file():
            found = f"{python}, which ended with {ran.last_lines(1) or 'nothing'!r}"
            raise ConfigError(
                [Problem(path="--python", found=found, expected="an interpreter with rlcore-bundles and a trainer")]
            )
        return _read(folder)


def _read(folder: Path) -> Computed:
    """Read the answer of another interpreter."""
    said = json.loads((folder / "answer.json").read_text())
    if "error" in said:
        raise WorkerError(said["error"])
    made = read_bundle(folder / "made")
    logprobs = np.load(folder / LOGPROBS, allow_pickle=False)
    rewards: Rewards | str = said["reason"]
    if not said["reason"]:
        rewards = Rewards(samples=made.sampled, failures={int(key): text for key, text in said["failures"].items()})
    again = Replayed(bundle=made, start_logprobs=logprobs, sampled_logprobs=logprobs, versions=frozenset([made.weight_version]))
    return Computed(replayed=again, rewards=rewards, start=_start(said["start"]))


def _start(places: Mapping[str, Any]) -> Start:
    model, adapters, state = (places[name] for name in ("model", "adapters", "state"))
    return Start(model=str(model), adapters=adapters and Path(adapters), state=state and Path(state))


def _main(folder: Path) -> None:
    """The other interpreter's side."""
    asked = json.loads((folder / "trial.json").read_text())
    bundle = read_bundle(folder / "bundle")
    try:
        made = _computed(bundle, asked["settings"], _start(asked["start"]))
    except RlcoreError as error:
        (folder / "answer.json").write_text(json.dumps({"error": str(error)}))
        return
    said: dict[str, Any] = {"reason": made.rewards, "start": attrs.asdict(made.start)}
    sampled = bundle.sampled
    if not isinstance(made.rewards, str):
        said |= {"reason": "", "failures": dict(made.rewards.failures)}
        sampled = made.rewards.samples
    write_bundle(evolve(made.replayed.bundle, sampled=sampled, weights="none"), folder / "made")
    np.save(folder / LOGPROBS, made.replayed.start_logprobs)
    (folder / "answer.json").write_text(json.dumps(said, default=str))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
