"""A recipe's reference: what it needs of trainers and algorithms, and what its files show."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, PluginError, RankInfo, capabilities
from rlcore.testing.fakes import fake_registry

Prepare = Callable[..., RunPlan]
COMPARES = "algorithm.fake.kl_coefficient=0.1"


def without_reference_models() -> Registry:
    entries = []
    for entry in fake_registry().entries:
        assert entry.provider is not None
        lost = {capabilities.REFERENCE_MODEL}
        entries.append(evolve(entry, provider=evolve(entry.provider, capabilities=entry.provider.capabilities - lost)))
    return evolve(fake_registry(), entries=tuple(entries))


def test_the_trainer_learns_of_it(prepared: Prepare) -> None:
    plan = prepared(COMPARES, "reference.path=teacher", "reference.revision=main")
    named = plan.trainer_context(RankInfo()).reference
    assert named == evolve(plan.model, path="teacher", revision="main")
    assert prepared(COMPARES).trainer_context(RankInfo()).reference is None


def test_a_trainer_that_knows_one_model_alone_is_refused(prepared: Prepare) -> None:
    prepared(COMPARES, registry=without_reference_models())
    with pytest.raises(PluginError, match="reference_model"):
        prepared(COMPARES, "reference.path=teacher", registry=without_reference_models())


def test_a_reference_that_nothing_compares_with_is_refused(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("reference.path=teacher")
    (problem,) = raised.value.problems
    assert problem.path == "reference"


def test_one_beside_the_recipe_is_found_from_anywhere(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'{recipe.read_text()}\n[reference]\npath = "teacher"\n')
    plan = prepared(COMPARES)
    assert plan.reference is not None
    assert plan.reference.path == str(tmp_path / "teacher")


def test_adapters_that_a_run_begins_with_are_in_its_checkpoints(prepared: Prepare) -> None:
    """Where a run goes on, they are not read again."""
    entries = []
    for entry in fake_registry().entries:
        assert entry.provider is not None
        entries.append(evolve(entry, provider=evolve(entry.provider, capabilities=entry.provider.capabilities | {"lora"})))
    plan = prepared(COMPARES, "lora.init_from=first/adapter", registry=evolve(fake_registry(), entries=tuple(entries)))
    begins = plan.trainer_context(RankInfo()).lora
    assert begins is not None
    assert str(begins.init_from).endswith("first/adapter")
    assert evolve(plan, continues=True).trainer_context(RankInfo()).lora == evolve(begins, init_from=None)
