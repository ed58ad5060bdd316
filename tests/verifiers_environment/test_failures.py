"""Faults in rollouts of the real package: each ends in its row of the ledger, and trains as that row says."""

from pathlib import Path

import pytest

from rlcore_verifiers.package import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

from rlcore.spi import EnvironmentContext
from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.environment import VerifiersEnvironment

from ..rollout.agent_steps import played
from ..rollout.test_failure_table import check


@pytest.mark.parametrize(
    ("kind", "row", "words"),
    [
        ("sandbox", "infrastructure", "the sandbox is gone"),
        ("tool", "tool", "no search"),
        ("late", "limit", "timeout_reached"),
    ],
)
def test_a_fault_of_a_rollout_ends_in_its_row(kind: str, row: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = VerifiersConfig(name="owner/verifiers-worlds", args={"kind": kind})
    backend = VerifiersEnvironment(EnvironmentContext(seed=0), config)
    tasks = backend.rows("train")
    assert tasks is not None
    on_error = "error" if kind == "late" else "mask"  # a failure that is returned is masked whatever the recipe says
    step = played(backend, tasks[0], before=lambda number: None, on_error=on_error, timeout_s=120.0)
    check(step, row, "masked", words)
