"""The core checks a model's files for whatever trainer or generator reads them, and for no other."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, ModelError
from rlcore.testing.fakes import fake_registry

Prepare = Callable[..., RunPlan]


def reading(*roles: str) -> Registry:
    """The fakes, of which some read the model as a Hugging Face directory, which is what a provider does that says nothing."""
    entries = []
    for entry in fake_registry().entries:
        assert entry.provider is not None
        entries.append(evolve(entry, provider=evolve(entry.provider, reads_model=entry.role in roles)))
    return evolve(fake_registry(), entries=tuple(entries))


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_foreign_backends_model_is_checked(prepared: Prepare, tmp_path: Path, role: str) -> None:
    with pytest.raises(ModelError) as raised:
        prepared("model.path=/nonexistent", registry=reading(role))
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [("/nonexistent", "no such directory")]
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError) as raised:
        prepared(f"model.path={tmp_path / 'model'}", registry=reading(role))
    assert len(raised.value.problems) == 3
    assert {problem.path for problem in raised.value.problems} == {str(tmp_path / "model")}
    prepared("model.path=org/name", registry=reading(role))


def test_one_that_reads_something_else_is_left_to_its_own_check(prepared: Prepare) -> None:
    prepared("model.path=/nonexistent", registry=reading())


def test_the_models_problems_are_reported_with_the_recipes(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("model.path=/nonexistent", "rollout.samples_per_prompt=1", registry=reading("trainer"))
    assert [problem.path for problem in raised.value.problems] == ["rollout.samples_per_prompt", "/nonexistent"]
