"""The core checks a model's files for whatever trainer or generator reads them, and for no other."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import CheckContext, ConfigError, ModelError, Note, PluginError, Problem, capabilities
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER, fake_registry

Prepare = Callable[..., RunPlan]


def reading(*roles: str) -> Registry:
    """The fakes, of which some read the model as a Hugging Face directory, which is what a provider does that says nothing."""
    entries = []
    for entry in fake_registry().entries:
        assert entry.provider is not None
        entries.append(evolve(entry, provider=evolve(entry.provider, reads_model=entry.role in roles)))
    return evolve(fake_registry(), entries=tuple(entries))


def test_notes_of_a_check_are_the_plans_and_problems_come_before_them(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = evolve(FAKE_TRAINER, check="judged:check")
    registry = Registry.from_providers(
        {"trainer": [trainer], "generator": [FAKE_GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    )
    note = Note(path="trainer.fake.size", text="small, and slow")
    contexts: list[CheckContext] = []
    module: Any = ModuleType("judged")
    module.check = lambda context, config: contexts.append(context) or [note]
    monkeypatch.setitem(sys.modules, "judged", module)
    assert prepared(registry=registry).notes == ("trainer.fake.size: small, and slow",)
    assert not contexts[0].corrects_staleness
    prepared("algorithm.fake.generation_ratio=true", registry=registry)
    assert contexts[1].corrects_staleness
    assert contexts[1].delta == "off"
    changes = evolve(FAKE_GENERATOR, capabilities=FAKE_GENERATOR.capabilities | {capabilities.DELTA_REFIT, "refit.directory"})
    senders = evolve(trainer, capabilities=trainer.capabilities | {capabilities.DELTA_REFIT, "refit.directory"})
    providers = {"trainer": [senders], "generator": [changes], "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    prepared("refit.delta=host", registry=Registry.from_providers(providers))
    assert contexts[2].delta == "host"
    problem = Problem(path="trainer.fake.size", found="0", expected="1")
    module.check = lambda context, config: [note, problem]
    with pytest.raises(ConfigError) as raised:
        prepared(registry=registry)
    assert raised.value.problems == (problem,)


@pytest.mark.parametrize(
    ("trainer", "generator", "noted"),
    [
        (None, None, []),
        ("exact", "exact", []),
        ("exact", None, [("trainer", "generator fake by kernels of its own")]),
        (None, "exact", [("generator", "trainer fake by kernels of its own")]),
        ("exact", "other", [("trainer", "generator fake by other"), ("generator", "trainer fake by exact")]),
    ],
)
def test_kernels_that_one_side_alone_has_are_noted(
    prepared: Prepare, trainer: str | None, generator: str | None, noted: list[tuple[str, str]]
) -> None:
    registry = Registry.from_providers(
        {
            "trainer": [evolve(FAKE_TRAINER, shared_kernels=lambda _: trainer)],
            "generator": [evolve(FAKE_GENERATOR, shared_kernels=lambda _: generator)],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )
    notes = prepared(registry=registry).notes
    assert len(notes) == len(noted)
    for role, text in noted:
        assert any(note.startswith(f"{role}.fake: computes by ") and text in note for note in notes), notes


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


@pytest.mark.parametrize(
    ("named", "remedy"),
    [("models/bsae", "Did you mean {folder}/models/base?"), ("runs/old", "The folder runs does not exist.")],
)
def test_what_can_only_be_meant_as_a_path_is_not_looked_for_on_the_hub(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, remedy: str
) -> None:
    (tmp_path / "here" / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError) as raised:
        prepared(f"model.path={named}", registry=reading("trainer"))
    (problem,) = raised.value.problems
    assert (problem.found, problem.remedy) == ("no such directory", remedy.format(folder=tmp_path / "here"))


def test_a_name_on_the_hub_that_a_folder_beside_the_recipe_makes_a_path_says_so(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "Qwen").mkdir()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('path = "none"', 'path = "Qwen/Qwen3-0.6B"'))
    with pytest.raises(ModelError) as raised:
        prepared(registry=reading("trainer"))
    (problem,) = raised.value.problems
    assert problem.path == str(tmp_path / "Qwen" / "Qwen3-0.6B")
    assert str(tmp_path / "Qwen") in problem.remedy


def test_one_that_reads_something_else_is_left_to_its_own_check(prepared: Prepare) -> None:
    prepared("model.path=/nonexistent", registry=reading())


def test_the_models_problems_are_reported_with_the_recipes(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("model.path=/nonexistent", "rollout.samples_per_prompt=1", registry=reading("trainer"))
    assert [problem.path for problem in raised.value.problems] == ["rollout.samples_per_prompt", "/nonexistent"]


Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("role", ["generator", "trainer"])
def test_truncated_sampling_needs_both_sides_unless_its_bias_is_accepted(run: Run, role: str) -> None:
    ratio, lost = "algorithm.fake.previous_logprobs=true", {capabilities.SAMPLING_MASK, capabilities.SAMPLING_MASK_REPLAY}
    bare = {"generator": FAKE_GENERATOR, "trainer": FAKE_TRAINER}
    bare[role] = evolve(bare[role], capabilities=bare[role].capabilities - lost)
    able = Registry.from_providers(
        {**{name: [one] for name, one in bare.items()}, "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    )
    with pytest.raises(PluginError) as raised:
        run(ratio, "rollout.top_k=3", "rollout.top_p=0.9", registry=able)
    for part in (role, "sampling_mask", "rollout.top_k = 3 and rollout.top_p = 0.9", "rollout.accept_truncation_bias = true"):
        assert part in str(raised.value)
    run(
        ratio,
        "rollout.top_k=3",
        "rollout.accept_truncation_bias=true",
        "run.num_steps=1",
        "training.max_token_mult_prob_error=inf",
        registry=able,
    )
    run("rollout.top_k=3", "run.name=compares-nothing", "run.num_steps=1", registry=able)


def test_a_bias_is_accepted_only_where_there_is_one(run: Run) -> None:
    ratio = "algorithm.fake.previous_logprobs=true"
    for overrides, found in (
        ((ratio,), "true, while neither rollout.top_k nor rollout.top_p"),
        (("rollout.top_k=3",), "true, with algorithm 'fake'"),
    ):
        with pytest.raises(ConfigError) as raised:
            run(*overrides, "rollout.accept_truncation_bias=true", "run.name=other")
        (problem,) = raised.value.problems
        assert problem.path == "rollout.accept_truncation_bias"
        assert problem.found.startswith(found)


def test_demonstrations_are_learned_at_no_temperature(run: Run) -> None:
    with pytest.raises(ConfigError) as raised:
        run("algorithm.fake.source=demonstrations", "rollout.temperature=0.7")
    (problem,) = raised.value.problems
    assert problem.path == "rollout.temperature"
    assert problem.found.startswith("0.7, with algorithm 'fake'")
