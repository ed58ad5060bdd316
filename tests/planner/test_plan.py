"""Plans of a recipe: what planners are told, what fits, and what is said where nothing does."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from rlcore.config.load import read_raw
from rlcore.registry.discovery import Registry
from rlcore.run.plan.sections import convert_recipe
from rlcore.spi import ConfigError, ModelError, PlanContext, PlanOption, PluginError
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_plan.command import override_words
from rlcore_plan.devices import parse_devices
from rlcore_plan.plan import Plan, plan_recipe

from . import planners

GIB = 2**30


def test_the_fastest_that_fits_is_first(recipe, registry) -> None:
    plan = plan_recipe(recipe, [], parse_devices("8xH100", None), registry=registry)
    times = [one.total for one in plan.fitting]
    assert times == sorted(times)
    best = plan.fitting[0]
    # 60 GiB in training beside an engine asleep; 50 of state, so that offloading it leaves the engine more than it costs.
    assert best.trainer_bytes == 60 * GIB
    assert best.seconds["training"] == 20.0
    assert best.total == pytest.approx(sum(best.seconds.values()))
    assert dict(best.overrides)["cluster.gpus_per_node"] == 8


def test_devices_are_shared_or_divided(recipe, registry) -> None:
    plan = plan_recipe(recipe, [], parse_devices("8xH200", None), registry=registry)
    numbers = {dict(one.overrides).get("cluster.generator_gpus_per_node") for one in plan.candidates}
    assert numbers == {None, 2, 4, 6}
    (half,) = [one for one in plan.candidates if dict(one.overrides).get("cluster.generator_gpus_per_node") == 4][:1]
    assert half.seconds["training"] in (40.0, 80.0)
    assert half.seconds["generation"] > 20.0
    assert half.total == pytest.approx(sum(half.seconds.values()))


@pytest.mark.parametrize(
    "own", [[], ['cluster.placement="separate"', "cluster.gpus_per_node=8", "cluster.generator_gpus_per_node=4"]]
)
def test_overrides_make_a_recipe_that_is_valid(recipe, registry, own) -> None:
    """On several machines too, and where the recipe has another placement."""
    plan = plan_recipe(recipe, own, parse_devices("16xH200", None), registry=registry)
    by_placement = {
        "colocated" if not dict(one.overrides).get("cluster.generator_gpus_per_node") else "separate": one
        for one in plan.fitting
    }
    assert len(by_placement) == 2
    for expected, one in by_placement.items():
        words = [word for word in override_words(one) if word.startswith("cluster.")]
        found, _ = convert_recipe(read_raw(recipe, [*own, *words]), registry)
        assert (found.cluster.nodes, found.cluster.address, found.cluster.placement) == (2, "auto", expected)
    named = plan_recipe(recipe, [*own, "cluster.address=head:6379"], parse_devices("16xH200", None), registry=registry)
    assert not [one for one in named.candidates if "cluster.address" in dict(one.overrides)]


def test_generation_beside_training_is_hidden_where_a_recipe_lets_it_run_ahead(recipe, registry) -> None:
    overrides = ["async.max_staleness=1"]
    plan = plan_recipe(recipe, overrides, parse_devices("8xH200", None), registry=registry)
    for one in plan.candidates:
        everything = sum(one.seconds.values())
        apart = "cluster.placement" in dict(one.overrides)
        generation = one.seconds["generation"]
        assert one.total == pytest.approx(max(generation, everything - generation) if apart else everything)


@pytest.mark.parametrize(
    ("overrides", "times"),
    [
        (["training.epochs_per_step=3"], {"training": 3.0}),
        (["rollout.reuse=2", "async.max_staleness=1"], {"generation": 0.5}),
        (["rollout.max_samples_per_prompt=64"], {}),
    ],
)
def test_batches_that_are_used_again_train_longer_or_generate_less(recipe, registry, overrides, times) -> None:
    devices = parse_devices("8xH200", None)
    ahead = [one for one in overrides if one.startswith("async")]
    once, again = (plan_recipe(recipe, given, devices, registry=registry) for given in (ahead, overrides))
    by_keys = {one.overrides: one for one in once.candidates}
    assert len(by_keys) == len(again.candidates)
    for one in again.candidates:
        before = by_keys[one.overrides].seconds
        for phase in ("training", "generation", "refit", "log-probabilities"):
            assert one.seconds[phase] == pytest.approx(before[phase] * times.get(phase, 1.0))
    assert again.assumptions != once.assumptions


@pytest.mark.parametrize(("max_staleness", "shared", "apart"), [(0, 0, 0), (1, 2, 0), (2, 3, 2)])
def test_generators_are_told_how_the_steps_divide_what_runs_ahead(
    recipe, registry, monkeypatch, max_staleness, shared, apart
) -> None:
    """On shared devices of one step more than on their own, where the trainer has one step's groups in the meantime."""
    seen: list[PlanContext] = []

    def plan(context: PlanContext, config: object) -> Sequence[PlanOption]:
        seen.append(context)
        return plan_generator(context, config)

    plan_generator = planners.plan_generator
    monkeypatch.setattr(planners, "plan_generator", plan)
    found = plan_recipe(recipe, [f"async.max_staleness={max_staleness}"], parse_devices("8xH200", None), registry=registry)
    assert {len(context.generation_turns) for context in seen if context.is_shared} == {shared}
    assert {len(context.generation_turns) for context in seen if not context.is_shared} == {apart}
    for context in seen:
        if context.generation_turns:
            assert sum(context.generation_turns) == pytest.approx(context.response_lengths[-1])
    assert any(f"{max_staleness} step(s) ahead" in line for line in found.assumptions) == bool(max_staleness)


def test_planners_are_told_the_work(recipe, monkeypatch) -> None:
    seen: list[PlanContext] = []

    def plan(context: PlanContext, config: object) -> list[PlanOption]:
        seen.append(context)
        return [PlanOption(memory={"weights": GIB}, idle={"none": GIB}, seconds={"training": 1.0})]

    monkeypatch.setattr(planners, "plan_trainer", plan)
    trainer = evolve(FAKE_TRAINER, plan=f"{planners.__name__}:plan_trainer")
    generator = evolve(FAKE_GENERATOR, plan=f"{planners.__name__}:plan_generator")
    roles = {"trainer": [trainer], "generator": [generator], "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    found = plan_recipe(
        recipe,
        ["training.minibatches_per_step=2"],
        parse_devices("16xH100", None),
        mean_response=100.0,
        registry=Registry.from_providers(roles),
    )
    shared = next(context for context in seen if context.is_shared)
    assert (shared.world_size, shared.local_size, shared.num_sequences, shared.updates) == (16, 8, 128, 2)
    assert sum(shared.response_lengths) / len(shared.response_lengths) == pytest.approx(100.0, rel=1e-3)
    assert shared.model == {"hidden_size": 8}
    assert shared.dtype == "bfloat16"
    assert any("100 tokens" in line and "--mean-response" in line for line in found.assumptions)


@pytest.mark.parametrize(
    ("overrides", "shared", "apart"),
    [
        ([], "none", "none"),
        (["refit.delta=host"], "none", "none"),
        (["refit.delta=device"], "whole", "parts"),
        (["refit.delta=device", "refit.channel=directory"], "whole", "whole"),
        (["refit.delta=device", "refit.channel=shards"], "whole", "parts"),
    ],
)
def test_planners_are_told_what_refits_of_changes_keep(recipe, registry, monkeypatch, overrides, shared, apart) -> None:
    seen: list[PlanContext] = []
    monkeypatch.setattr(planners, "SEEN", seen.append)
    plan_recipe(recipe, overrides, parse_devices("8xH200", None), registry=registry)
    assert {context.delta_copies for context in seen if context.is_shared} == {shared}
    assert {context.delta_copies for context in seen if not context.is_shared} == {apart}


def test_what_an_environment_has_on_a_device_is_left_to_it(recipe, registry) -> None:
    """On devices that train; also where nothing fits, and only what the recipe names counts."""
    judge, idle = (evolve(FAKE_ENVIRONMENT, name=name, plan=f"{planners.__name__}:plan_judge") for name in ("fake", "idle"))
    entries = Registry.from_providers({"environment": [judge, idle]}).of("environment")
    others = [entry for entry in registry.entries if entry.role != "environment"]
    judged, devices = evolve(registry, entries=(*others, *entries)), parse_devices("8xH100", None)
    plain, plan = (plan_recipe(recipe, [], devices, registry=one) for one in (registry, judged))
    assert "On the first device the environment fake has 8.0 GiB; as much is left free on each that trains." in plan.assumptions

    def rooms(plan: Plan, *, apart: bool) -> set[tuple[int, int]]:
        """The smallest free GiB of trainer and generator."""
        found = [one.free_bytes for one in plan.candidates if ("cluster.placement" in dict(one.overrides)) == apart]
        return {(trainer // GIB, generator // GIB) for trainer, generator in found}

    assert rooms(plan, apart=True) == {(trainer - 8, generator) for trainer, generator in rooms(plain, apart=True)}
    assert rooms(plan, apart=False) == {(trainer - 8, generator - 8) for trainer, generator in rooms(plain, apart=False)}
    with pytest.raises(ConfigError, match=r"environment fake has 8\.0"):
        plan_recipe(recipe, [], parse_devices("1xH100", None), registry=judged)


def test_an_environment_that_is_none_is_refused(recipe, registry) -> None:
    with pytest.raises(PluginError, match="'fakee'"):
        plan_recipe(recipe, ["environment.name=fakee"], parse_devices("8xH100", None), registry=registry)


APART = ("algorithm.fake.kl_coefficient=0.1", "cluster.gpus_per_node=8", "cluster.reference_gpus_per_node=2")


def test_a_reference_apart_takes_its_devices_and_no_memory_of_the_others(recipe, registry, monkeypatch) -> None:
    seen: list[PlanContext] = []
    monkeypatch.setattr(planners, "SEEN", seen.append)
    plan = plan_recipe(recipe, APART, parse_devices("16xH200", None), registry=registry)
    assert {context.local_size for context in seen} <= {1, 2, 3, 4, 5, 6}
    assert max(context.world_size for context in seen) == 12
    assert {(context.reference, context.reference_passes) for context in seen} == {(None, 0.0)}
    assert any("reference has 2 device(s) of each machine" in line for line in plan.assumptions)
    for one in plan.candidates:
        words = [word for word in override_words(one) if word.startswith("cluster.")]
        found, _ = convert_recipe(read_raw(recipe, [*APART, *words]), registry)
        assert (found.cluster.gpus_per_node, found.cluster.num_reference_ranks) == (8, 4)
        assert 0 < found.cluster.ranks_per_node <= 6
    seen.clear()
    plan_recipe(recipe, [*APART, "cluster.reference_gpus_per_node=0"], parse_devices("8xH200", None), registry=registry)
    assert {context.reference_passes for context in seen} == {1.0}


def test_a_reference_apart_has_to_leave_devices(recipe, registry) -> None:
    with pytest.raises(ConfigError, match="found 2, with --gpus of 1 x 2 H200"):
        plan_recipe(recipe, APART, parse_devices("2xH200", None), registry=registry)


def test_where_nothing_fits_the_smallest_that_does_is_named(recipe, registry) -> None:
    with pytest.raises(ConfigError) as error:
        plan_recipe(recipe, [], parse_devices("1xH100", None), registry=registry)
    text = str(error.value)
    assert "1 x 1 H100, on which no layout fits" in text
    assert "weights 200.0" in text
    assert "1 x 4 H100 would do" in text  # half of 100 GiB and 10 beside 2 of an engine asleep, of 70


def test_what_cannot_be_planned_is_refused(recipe, registry) -> None:
    devices = parse_devices("8xH100", None)
    for overrides, words in (
        (["trainer.name=fake_ranked"], "a trainer that offers plans, of which are installed: fake"),
        (["model.path=nowhere/at/all"], "nowhere/at/all"),
    ):
        with pytest.raises((ConfigError, ModelError, PluginError)) as error:
            plan_recipe(recipe, overrides, devices, registry=registry)
        assert words in str(error.value) or "unknown" in str(error.value)
    with pytest.raises(ConfigError, match="--mean-response: found 5000.* 1000"):
        plan_recipe(recipe, [], devices, mean_response=5000.0, registry=registry)


def test_a_planner_that_returns_anything_else_is_named(recipe, registry, monkeypatch) -> None:
    monkeypatch.setattr(planners, "plan_trainer", lambda context, config: [1])
    with pytest.raises(PluginError, match="expected a sequence of PlanOption"):
        plan_recipe(recipe, [], parse_devices("8xH100", None), registry=registry)
