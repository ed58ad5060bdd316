"""Which plugins a run takes, and why it cannot take others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.registry.entries import DataSourceEntry
from rlcore.run.plan.prepare import prepare
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.spi import (
    SPI_VERSION,
    AlgorithmContext,
    AlgorithmNeeds,
    ConfigError,
    DataSourceProvider,
    PluginError,
    Provider,
    Role,
    RolloutBatch,
    TrainingBatch,
    capabilities,
)
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.algorithm import FakeAlgorithm, FakeAlgorithmConfig
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_TRAINER

DRAWS = Provider(
    name="draws",
    spi=SPI_VERSION,
    config=FakeAlgorithmConfig,
    backend="rlcore.testing.fakes.algorithm:FakeAlgorithm",
    priority=50,
)
Run = Callable[..., dict[str, Any]]
WITHOUT_SINKS = """
model.path = "none"
algorithm.name = "fake"
environment.name = "fake"
"""


def test_a_recipe_without_sinks_takes_those_with_a_priority_that_can_be_used(
    prepared: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """One that cannot be used causes a note where it is a default, and an error where the recipe names it."""
    recipe = tmp_path / "default.toml"
    recipe.write_text(WITHOUT_SINKS)
    absent = evolve(DRAWS, name="absent", unavailable=lambda: "its package is not installed: pip install it")
    sinks = Registry.from_providers({"sink": [DRAWS, evolve(DRAWS, name="tracks", priority=0), absent]})
    registry = evolve(fake_registry(), entries=(*fake_registry().entries, *sinks.of("sink")))
    plan = prepare(recipe, registry=registry)
    assert [sink.name for sink in plan.sinks] == list(plan.recipe.sinks.names or ()) == ["draws"]
    told = "sink 'absent' is not usable: its package is not installed: pip install it"
    assert plan.notes == (f"sinks.names: the run goes without a default: {told}",)
    with pytest.raises(PluginError, match=re.escape(told)):
        prepared('sinks.names=["absent"]', registry=registry)


@pytest.mark.parametrize(
    ("roles", "overrides", "missing"),
    [
        (("trainer", "algorithm", "environment"), (), "generator. Run: pip install rlcore-transformers"),
        (("trainer",), (), "generator, algorithm. Run: pip install rlcore-transformers rlcore-grpo"),
        ((), (), "trainer, generator, algorithm. Run: pip install rlcore-fsdp2 rlcore-transformers rlcore-grpo"),
    ],
)
def test_what_is_missing_for_a_run_is_told_at_once_with_what_installs_it(
    prepared: Callable[..., RunPlan], roles: tuple[Role, ...], overrides: tuple[str, ...], missing: str
) -> None:
    fakes = {"trainer": FAKE_TRAINER, "algorithm": FAKE_ALGORITHM, "environment": FAKE_ENVIRONMENT}
    with pytest.raises(PluginError) as raised:
        prepared(*overrides, registry=Registry.from_providers({role: [fakes[role]] for role in roles}))
    assert raised.value.__notes__ == [f"missing for a run with rewards: {missing}"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("gpro", 'Did you mean "grpo"? Run: pip install rlcore-grpo'), ("sft", "Run: pip install rlcore-sft")],
)
def test_an_algorithm_that_is_not_installed_comes_with_what_installs_it(
    prepared: Callable[..., RunPlan], name: str, told: str
) -> None:
    with pytest.raises(PluginError) as raised:
        prepared(f"algorithm.name={name}")
    assert str(raised.value).splitlines()[0] == f"algorithm {name!r} is not installed. {told}"


def test_a_dtype_that_a_backend_does_not_have_is_refused_before_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"bfloat16 \(model.dtype\), only in float16, float32"):
        run("model.dtype=bfloat16", "run.num_steps=1")
    assert not (tmp_path / "runs" / "run").exists()


def test_a_trainer_of_one_rank_is_refused_for_several(run: Run) -> None:
    with pytest.raises(PluginError, match=r"'multi_rank' \(\[cluster\] has 2 ranks\)"):
        run("cluster.gpus_per_node=2", "run.num_steps=1")


def test_a_run_says_which_plugin_auto_could_not_take_and_why(run: Run) -> None:
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    absent = evolve(FAKE_TRAINER, name="absent", priority=80, unavailable=lambda: "its engine is not installed: pip install it")
    entries = Registry.from_providers({"trainer": [absent]}).entries
    registry = evolve(fake_registry(), entries=(*fake_registry().entries, *entries))
    run("run.num_steps=1", progress=progress, registry=registry)
    reason = "as 'absent' (priority 80) cannot be: its engine is not installed: pip install it"
    assert [note for note in notes if reason in note] == [
        f"trainer 'fake' (priority {FAKE_TRAINER.priority}) is taken, {reason}"
    ]
    notes.clear()
    run("run.num_steps=1", "run.name=named", 'trainer.name="fake"', progress=progress, registry=registry)
    assert not any("absent" in note for note in notes)


@pytest.mark.parametrize(
    ("overrides", "taken"),
    [
        ((), "in_process"),
        (("cluster.gpus_per_node=1",), "fake"),
        (("cluster.execution=in_process",), "in_process"),
        (("cluster.execution=fake", "cluster.gpus_per_node=1"), "fake"),
    ],
)
def test_a_section_of_several_ranks_or_without_a_name_takes_an_execution_that_has_ranks(
    prepared: Callable[..., RunPlan], overrides: tuple[str, ...], taken: str
) -> None:
    plan = prepared(*overrides)
    assert plan.chosen["execution"].name == taken
    assert not plan.notes, "nobody expects one process to run several ranks"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("cluster.gpus_per_node=2", "cluster.call_timeout_s=5"),
            "no usable execution is installed for device cpu; install, enable or repair one. Run: pip install 'rlcore[ray]'",
        ),
        (("cluster.execution=ray", "cluster.address=auto"), "execution 'ray' is not installed. Run: pip install 'rlcore[ray]'"),
        (
            ("cluster.execution=in_process", "cluster.gpus_per_node=2"),
            "lacks the capability 'multi_rank' ([cluster] has 2 ranks)",
        ),
    ],
)
def test_ranks_without_an_execution_are_refused_with_the_line_that_installs_one(
    tmp_path: Path, overrides: tuple[str, ...], told: str
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(WITHOUT_SINKS)
    alone = [entry for entry in fake_registry().entries if (entry.role, entry.name) != ("execution", "fake")]
    with pytest.raises(PluginError) as raised:
        prepare(recipe, [*overrides, "run.device=cpu"], registry=evolve(fake_registry(), entries=tuple(alone)))
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("capability", "overrides", "reason"),
    [
        (capabilities.PREVIOUS_LOGPROBS, ("algorithm.fake.previous_logprobs=true",), "compares with the start of the step"),
        (capabilities.LORA, ("lora.rank=4",), "trains adapters"),
        (capabilities.ADAPTER_REFIT, ("lora.rank=4", 'refit.adapters="unmerged"'), "refit.adapters"),
        (capabilities.MANY_ADAPTERS, ("lora.rank=4", 'refit.adapters="unmerged"', "refit.max_adapters=2"), "max_adapters = 2"),
        (capabilities.MUON, ("optimizer.name=muon",), "optimizer.name"),
        (capabilities.MOMENTS_8BIT, ("optimizer.moments=8bit",), "optimizer.moments"),
        (capabilities.OPTIMIZER_GROUPS, ("optimizer.groups=[{parameters=['a'], betas=[0.1, 0.2]}]",), "optimizer.groups"),
        (capabilities.SCHEDULE_STEP, ("schedule.warmup_steps=3",), "changes the learning rate"),
    ],
)
def test_a_trainer_that_would_ignore_it_is_refused(
    prepared: Callable[..., RunPlan], capability: str, overrides: tuple[str, ...], reason: str
) -> None:
    others = {capabilities.LORA, capabilities.ADAPTER_REFIT, capabilities.MUON, capabilities.MOMENTS_8BIT}
    others |= {capabilities.OPTIMIZER_GROUPS, capabilities.MANY_ADAPTERS}
    trainer = evolve(FAKE_TRAINER, capabilities=(FAKE_TRAINER.capabilities | others) - {capability})
    others = tuple(entry for entry in fake_registry().entries if entry.role != "trainer")
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers({"trainer": [trainer]}).of("trainer")))
    with pytest.raises(PluginError, match=reason):
        prepared(*overrides, registry=registry)


def test_a_model_of_images_needs_backends_that_read_them(prepared: Callable[..., RunPlan], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {"depth": 2}, "image_token_id": 5}')
    with pytest.raises(PluginError, match="'images'") as raised:
        prepared(f"model.path={tmp_path}")
    assert {"trainer", "generator"} <= set(str(raised.value).split())


class Failing:
    """An algorithm that cannot be built."""

    def __init__(self, context: AlgorithmContext, config: FakeAlgorithmConfig) -> None:
        raise ERRORS[context.seed]

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        raise AssertionError


ERRORS = [PluginError("its library is too old"), ZeroDivisionError("its own")]


@pytest.mark.parametrize("seed", range(len(ERRORS)))
def test_what_else_is_wrong_is_told_with_an_algorithm_that_fails_to_build(prepared: Callable[..., RunPlan], seed: int) -> None:
    providers = {"algorithm": [evolve(FAKE_ALGORITHM, backend=f"{__name__}:Failing")]}
    others = tuple(entry for entry in fake_registry().entries if entry.role != "algorithm")
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))
    with pytest.raises(type(ERRORS[seed])) as raised:
        prepared(f"run.seed={seed}", 'sinks.names=["absent"]', 'environment.name="absent"', registry=registry)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert [name in told for name in (str(ERRORS[seed]), "sink 'absent'", "environment 'absent'")] == [True] * 3


class Dynamic(FakeAlgorithm):
    """An algorithm that is meant for groups whose rewards differ."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return evolve(super().needs, dynamic_sampling=True)


def with_dynamic() -> Registry:
    providers = {"algorithm": [evolve(FAKE_ALGORITHM, backend=f"{__name__}:Dynamic")]}
    others = tuple(entry for entry in fake_registry().entries if entry.role != "algorithm")
    return evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))


@pytest.mark.parametrize(("said", "plain", "dynamic"), [(None, False, True), ("true", True, True), ("false", False, False)])
def test_groups_of_equal_rewards_are_replaced_where_the_recipe_or_else_the_algorithm_says_so(
    prepared: Callable[..., RunPlan], said: str | None, plain: bool, dynamic: bool
) -> None:
    overrides = () if said is None else (f"rollout.dynamic_sampling={said}",)
    for registry, expected in ((fake_registry(), plain), (with_dynamic(), dynamic)):
        plan = prepared(*overrides, registry=registry)
        assert plan.recipe.rollout.dynamic_sampling is expected
        assert f"dynamic_sampling = {str(expected).lower()}" in plan.resolved


def test_what_dynamic_sampling_does_not_go_with_names_the_algorithm(prepared: Callable[..., RunPlan]) -> None:
    assert prepared("rollout.max_refill_ratio=2", registry=with_dynamic()).recipe.rollout.max_refill_ratio == 2.0
    with pytest.raises(ConfigError) as raised:
        prepared("rollout.max_refill_ratio=2", "rollout.dynamic_sampling=false", registry=with_dynamic())
    assert [problem.path for problem in raised.value.problems] == ["rollout.max_refill_ratio"]
    with pytest.raises(ConfigError) as raised:
        prepared("rollout.samples_per_prompt=1", registry=with_dynamic())
    found = {problem.path: problem.found for problem in raised.value.problems}
    assert "algorithm 'fake' is meant for" in found["rollout.dynamic_sampling"]


class Indifferent(FakeAlgorithm):
    """An algorithm that is shown rewards, and reads none."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return evolve(super().needs, rewards=False)


UNREWARDED = evolve(FAKE_ENVIRONMENT, capabilities=FAKE_ENVIRONMENT.capabilities | {capabilities.NO_REWARDS})


@pytest.mark.parametrize(
    ("providers", "overrides", "found"),
    [
        ({"algorithm": [evolve(FAKE_ALGORITHM, backend=f"{__name__}:Indifferent")]}, (), "algorithm 'fake', which reads no"),
        ({}, ("algorithm.fake.source=demonstrations",), "algorithm 'fake', which trains on no rollouts"),
        ({"environment": [UNREWARDED]}, (), "environment 'fake', whose rewards are all 0"),
        ({}, ("rollout.samples_per_prompt=1",), "samples_per_prompt = 1"),
    ],
)
def test_groups_that_rewards_cannot_tell_apart_are_not_replaced(
    prepared: Callable[..., RunPlan], providers: dict[Role, list[Provider]], overrides: tuple[str, ...], found: str
) -> None:
    others = tuple(entry for entry in fake_registry().entries if entry.role not in providers)
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))
    with pytest.raises(ConfigError) as raised:
        prepared("rollout.dynamic_sampling=true", *overrides, registry=registry)
    (problem,) = [one for one in raised.value.problems if one.path == "rollout.dynamic_sampling"]
    assert problem.found.startswith(f"true, with {found}")


class DynamicAndIndifferent(FakeAlgorithm):
    """An algorithm that is meant for such groups only where it reads rewards."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return evolve(super().needs, dynamic_sampling=True, rewards=False)


@pytest.mark.parametrize(
    ("algorithm", "overrides"), [("DynamicAndIndifferent", ()), ("Dynamic", ("algorithm.fake.source=demonstrations",))]
)
def test_a_recipe_that_does_not_ask_for_it_is_not_refused_for_what_its_algorithm_is_meant_for(
    prepared: Callable[..., RunPlan], algorithm: str, overrides: tuple[str, ...]
) -> None:
    providers = {"algorithm": [evolve(FAKE_ALGORITHM, backend=f"{__name__}:{algorithm}")]}
    others = tuple(entry for entry in fake_registry().entries if entry.role != "algorithm")
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))
    assert prepared(*overrides, registry=registry).recipe.rollout.dynamic_sampling is False


def test_an_environment_that_rewards_beside_one_that_does_not_tells_groups_apart(prepared: Callable[..., RunPlan]) -> None:
    providers = {"environment": [UNREWARDED, evolve(FAKE_ENVIRONMENT, name="other")]}
    others = tuple(entry for entry in fake_registry().entries if entry.role not in providers)
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))
    both = 'data.train.mix={one={source="environment"}, two={source="environment", environment="other"}}'
    plan = prepared("rollout.dynamic_sampling=true", both, registry=registry)
    assert len(plan.environments) == 2
    assert plan.recipe.rollout.dynamic_sampling


class Exact(FakeAlgorithm):
    """An algorithm that tells whether it may take the generator's log-probabilities for the trainer's."""

    def __init__(self, context: AlgorithmContext, config: FakeAlgorithmConfig) -> None:
        super().__init__(context, evolve(config, previous_logprobs=not context.generation_logprobs_exact))


@pytest.mark.parametrize("name", ["auto", "fake", "other"])
@pytest.mark.parametrize(("declared", "taken"), [(False, False), (True, False), (True, True)])
def test_log_probabilities_are_exact_unless_the_trainer_that_is_taken_rounds(
    prepared: Callable[..., RunPlan], name: str, declared: bool, taken: bool
) -> None:
    exact = {capabilities.EXACT_LOGPROBS}
    trainer = evolve(
        FAKE_TRAINER,
        capabilities=FAKE_TRAINER.capabilities | (exact if declared else set()),
        disabled_capabilities=lambda _config: frozenset(exact if taken else ()),
    )
    other = evolve(FAKE_TRAINER, name="other", priority=99)
    providers = {"algorithm": [evolve(FAKE_ALGORITHM, backend=f"{__name__}:Exact")], "trainer": [trainer, other]}
    others = tuple(entry for entry in fake_registry().entries if entry.role not in providers)
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))
    plan = prepared(f"trainer.name={name}", "trainer.fake={}", registry=registry)
    assert plan.chosen["trainer"].name == ("fake" if name == "fake" else "other")
    assert plan.algorithm.needs.previous_logprobs == (taken and name == "fake")


@pytest.mark.parametrize("rounds", [True, False])
def test_a_trainer_that_rounds_and_lacks_what_the_algorithm_then_needs_is_passed_over(
    prepared: Callable[..., RunPlan], rounds: bool
) -> None:
    """Which `auto` takes, and what the algorithm needs, follow from each other."""
    exact = frozenset({capabilities.EXACT_LOGPROBS})
    rounding = evolve(
        FAKE_TRAINER,
        name="rounding",
        priority=99,
        capabilities=(FAKE_TRAINER.capabilities | exact) - {capabilities.PREVIOUS_LOGPROBS},
        disabled_capabilities=lambda _config: exact if rounds else frozenset(),
    )
    providers = {
        "algorithm": [evolve(FAKE_ALGORITHM, backend=f"{__name__}:Exact")],
        "trainer": [evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities | exact), rounding],
    }
    others = tuple(entry for entry in fake_registry().entries if entry.role not in providers)
    registry = evolve(fake_registry(), entries=(*others, *Registry.from_providers(providers).entries))
    plan = prepared("trainer.name=auto", registry=registry)
    assert plan.chosen["trainer"].name == ("fake" if rounds else "rounding")
    assert plan.algorithm.needs.previous_logprobs == rounds
    assert any("'rounding' (priority 99) cannot be" in note for note in plan.notes) == rounds


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("csv", r"data.train.source: 'csv' is not installed. Run: pip install rlcore-datasets"),
        ("huggingface", r"data.train.source: 'huggingface' is not installed. Run: pip install 'rlcore-datasets\[hub\]'"),
        ("jsonll", r"data.train.source: 'jsonll' is not installed. Did you mean \"jsonl\"\?$"),
        ("elsewhere", "data.train.source: 'elsewhere' is not installed$"),
        ("broken", "data.train.source: 'broken' is not usable: it names"),
        ("absent", "data.train.source: 'absent' is not usable: no such driver"),
    ],
)
def test_a_data_source_that_cannot_be_used_is_refused(prepared: Callable[..., RunPlan], source: str, expected: str) -> None:
    """With everything else that is wrong, before anything is allocated."""
    described = (
        DataSourceProvider(name="jsonl", spi=SPI_VERSION, read="rlcore.run.data.jsonl_rows:read"),
        DataSourceProvider(name="broken", spi=SPI_VERSION, read="not_there:read"),
        DataSourceProvider(
            name="absent", spi=SPI_VERSION, read="rlcore.run.data.jsonl_rows:read", unavailable=lambda: "no such driver"
        ),
    )
    entries = [DataSourceEntry(name=one.name, distribution="sources", version="1").holding(one) for one in described]
    registry = evolve(fake_registry(), data_sources=tuple(entries))
    with pytest.raises(PluginError, match=re.compile(expected, re.MULTILINE)) as raised:
        prepared(f"data.train.source={source}", "data.train.path=x", 'sinks.names=["none"]', registry=registry)
    assert "sink 'none' is not installed" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "error", "expected"),
    [
        (("cluster.gpu_per_node=2",), PluginError, "cluster.gpu_per_node is read by no usable execution; did you mean"),
        (("cluster.adress=auto",), PluginError, "cluster.adress is read by no usable execution"),
        (("cluster.gpu_per_node=2", "run.sed=1"), ConfigError, "Did you mean cluster.gpus_per_node?"),
    ],
)
def test_a_key_of_the_cluster_that_nobody_reads_is_reported_where_no_execution_is_usable(
    prepared: Callable[..., RunPlan], overrides: tuple[str, ...], error: type[Exception], expected: str
) -> None:
    alone = [entry for entry in fake_registry().entries if (entry.role, entry.name) != ("execution", "fake")]
    with pytest.raises(error) as caught:
        prepared("cluster.execution=ray", *overrides, registry=evolve(fake_registry(), entries=tuple(alone)))
    assert expected in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
