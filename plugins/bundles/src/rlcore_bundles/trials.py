"""Replays of a bundle with other settings, weights, kernels or packages, each compared with what the bundle holds."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import define, evolve, field, frozen

from rlcore.spi import ConfigError, Problem, RlcoreError, WorkerError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.components import START, nested, trainer_name
from rlcore_bundles.difference import GENERATOR, Row, compare
from rlcore_bundles.perturbed import perturbed_start
from rlcore_bundles.recomputed_rewards import Rewards, reason_to_skip, recomputed_rewards
from rlcore_bundles.replaying import Replayed, Start, plan_of, replayed
from rlcore_bundles.storage import read_bundle, write_bundle

Probe: TypeAlias = Literal["", "attention kernel", "dtype of the head"]
"""What a replay computes otherwise than the trainer would: nothing; attention by torch's plain kernel; or the product with the
head in float32."""

EXPECTED = "an interpreter with rlcore-bundles and a trainer"
LOGPROBS = "logprobs.float32"
"""The file of another interpreter's log-probabilities."""


@frozen(kw_only=True, eq=False)
class Computed:
    """A replay's step."""

    replayed: Replayed
    rewards: Rewards | str
    versions: Mapping[str, str]
    """The versions of packages there."""


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
    """The replay with the bundle's own settings and weights."""

    def run_own(self, what: str, num_perturbed: int) -> Outcome:
        """Replay with the bundle's own settings, after replays with all weights changed by one unit, up or down."""
        for number in range(1, num_perturbed + 1):
            self.count(f"{what}, with all weights changed by one unit")
            with tempfile.TemporaryDirectory() as folder:
                moved = perturbed_start(self.start, Path(folder), self.bundle.environment["dtype"], number)
                plan = plan_of(self.bundle, moved, (), nested(self.settings))
                self._perturbed.append(replayed(self.bundle, plan, moved, digests=False))
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
        own = trainer_name(self.bundle)
        if start.state is not None and settings["trainer.name"] not in (own, "auto"):
            start = evolve(start, state=None)
        try:
            if python is None:
                made = computed(self.bundle, settings, start, probe)
            else:
                made = _computed_by(python, self.bundle, settings, start)
        except (RlcoreError, RuntimeError, ValueError, IndexError, KeyError) as error:
            if python is not None and not isinstance(error, WorkerError):
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            return Outcome(rows=[Row(quantity=START, verdict="differs", where=lines[-1].strip(" -"))], versions={})
        whole = start.state is not None or self.bundle.weight_version == 0
        self._own = self._own or made.replayed
        rows = compare(self.bundle, made.replayed, self._perturbed, made.rewards, whole=whole, unperturbed=self._own)
        return Outcome(rows=rows, versions=made.versions)


def computed(bundle: Bundle, settings: Mapping[str, Any], start: Start, probe: Probe = "") -> Computed:
    """Compute a step with settings, given as dotted keys, in this process."""
    plan = plan_of(bundle, start, (), nested(settings))
    rewards = reason_to_skip(bundle, plan) or recomputed_rewards(bundle, plan)
    whole = start.state is not None or bundle.weight_version == 0
    wants = whole and plan.model.dtype == bundle.environment["dtype"] and bool(bundle.digests_after)
    with _probing(probe):
        again = replayed(bundle, plan, start, digests=wants)
    versions: Any = again.bundle.environment["distributions"]
    return Computed(replayed=again, rewards=rewards, versions=dict(versions))


@contextmanager
def _probing(probe: Probe) -> Iterator[None]:
    if probe == "attention kernel":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from rlcore_torchkit.layers.packed_attention import PLAIN_ATTENTION

        with sdpa_kernel(SDPBackend.MATH), _set(PLAIN_ATTENTION):
            yield
    elif probe == "dtype of the head":
        from rlcore_torchkit.head.logprobs import HEAD_IN_FLOAT32

        with _set(HEAD_IN_FLOAT32):
            yield
    else:
        yield


@contextmanager
def _set(variable: ContextVar[bool]) -> Iterator[None]:
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


def _computed_by(python: Path, bundle: Bundle, settings: Mapping[str, Any], start: Start) -> Computed:
    """Compute a step by another interpreter, with its packages. ConfigError where it has no rlcore-bundles of this kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bundle(evolve(bundle, weights="none"), folder / "bundle")
        places = {key: None if value is None else str(value) for key, value in _places(start).items()}
        (folder / "trial.json").write_text(json.dumps({"settings": dict(settings), "start": places}))
        # The interpreter is the user's own: what it prints is shown only where it fails.
        command = [str(python), "-m", "rlcore_bundles.trials", str(folder)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=dict(os.environ))
        except OSError as error:
            found = f"{python}, which cannot be executed: {error.strerror}"
            raise ConfigError([Problem(path="--python", found=found, expected=EXPECTED)]) from error
        if not (folder / "versions.json").is_file():
            last = (ran.stderr.strip().splitlines() or ["nothing"])[-1]
            found = f"{python}, which ended with {last!r}"
            raise ConfigError([Problem(path="--python", found=found, expected=EXPECTED)])
        return _read(folder)


def _places(start: Start) -> dict[str, Any]:
    return {"model": start.model, "adapters": start.adapters, "state": start.state}


def _read(folder: Path) -> Computed:
    """What another interpreter wrote."""
    said = json.loads((folder / "versions.json").read_text())
    if "error" in said:
        raise WorkerError(said["error"])
    made = read_bundle(folder / "made")
    logprobs = np.frombuffer((folder / LOGPROBS).read_bytes(), np.float32)
    rewards: Rewards | str = said["reason"]
    if not said["reason"]:
        rewards = Rewards(samples=made.sampled, failures={int(key): text for key, text in said["failures"].items()})
    again = Replayed(bundle=made, start_logprobs=logprobs, sampled_logprobs=logprobs, versions=frozenset([made.weight_version]))
    return Computed(replayed=again, rewards=rewards, versions=said["versions"])


def _main(folder: Path) -> None:
    """The other interpreter's side."""
    asked = json.loads((folder / "trial.json").read_text())
    model, adapters, state = (asked["start"][name] for name in ("model", "adapters", "state"))
    start = Start(model=model, adapters=adapters and Path(adapters), state=state and Path(state))
    bundle = read_bundle(folder / "bundle")
    try:
        made = computed(bundle, asked["settings"], start)
    except RlcoreError as error:
        (folder / "versions.json").write_text(json.dumps({"error": str(error)}))
        return
    skipped = isinstance(made.rewards, str)
    sampled = bundle.sampled if isinstance(made.rewards, str) else made.rewards.samples
    write_bundle(evolve(made.replayed.bundle, sampled=sampled, weights="none"), folder / "made")
    (folder / LOGPROBS).write_bytes(made.replayed.start_logprobs.tobytes())
    said = {
        "reason": made.rewards if skipped else "",
        "failures": {} if isinstance(made.rewards, str) else {str(key): one for key, one in made.rewards.failures.items()},
        "versions": dict(made.versions),
    }
    (folder / "versions.json").write_text(json.dumps(said))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
