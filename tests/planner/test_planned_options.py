"""What "auto" of a generator's section becomes: from both plans, once, for the run and all that resume it."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pytest
import tomli
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema.constraints import above_at_most
from rlcore.spi import CheckContext, Note, PlanContext, PlanOption, PluginError, Problem, RankInfo, capabilities
from rlcore.testing.fakes.generator import FakeGeneratorConfig
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_plan import planned_options as module
from rlcore_plan.device_room import GENERATOR_SHARE, TRAINER_SHARE

GIB = 2**30
ON_CUDA = ("run.device=cuda", "model.dtype=float32")


@frozen(kw_only=True)
class ShareConfig(FakeGeneratorConfig):
    """A section with a share."""

    share: Annotated[float, above_at_most(0, 1)] | Literal["auto"] = "auto"
    """A share of a device."""


class Planners:
    """What both plans say, and what they were asked."""

    trainer: Sequence[PlanOption] = ()
    generator: Callable[[PlanContext], Sequence[PlanOption]]
    asked: list[PlanContext]
    checked: list[CheckContext]


PLANNERS = Planners()


def plan_trainer(context: PlanContext, config: object) -> Sequence[PlanOption]:
    PLANNERS.asked.append(context)
    return PLANNERS.trainer


def plan_generator(context: PlanContext, config: object) -> Sequence[PlanOption]:
    PLANNERS.asked.append(context)
    return PLANNERS.generator(context)


def check_generator(context: CheckContext, config: object) -> Sequence[Problem | Note]:
    PLANNERS.checked.append(context)
    return ()


def trainer_option(*, names: Sequence[str] = ("none", "state", "all"), **options: Any) -> PlanOption:
    idle = {"none": 20 * GIB, "state": 10 * GIB, "all": 0}
    return PlanOption(
        options=options,
        memory={"weights": 20 * GIB, "activations": 10 * GIB},
        idle={name: idle[name] for name in names},
        seconds={"training": 1.0},
    )


def share_of(context: PlanContext) -> list[PlanOption]:
    """All that is free."""
    share = int(100 * context.free_bytes / context.device.memory_bytes + 1e-6) / 100
    return [PlanOption(options={"share": share}, memory={"KV cache": context.free_bytes}, seconds={"generation": 1.0})]


def registry_of(
    *, trainer: Any = FAKE_TRAINER, generator: Any = FAKE_GENERATOR, environment: Any = FAKE_ENVIRONMENT
) -> Registry:
    generator = evolve(
        generator,
        config=ShareConfig,
        plan=f"{__name__}:plan_generator",
        check=f"{__name__}:check_generator",
        planned_options={"share"},
    )
    return Registry.from_providers(
        {"trainer": [trainer], "generator": [generator], "algorithm": [FAKE_ALGORITHM], "environment": [environment]}
    )


WITH_PLAN = evolve(FAKE_TRAINER, plan=f"{__name__}:plan_trainer")


@pytest.fixture
def resolved(prepared, tmp_path, monkeypatch) -> Callable[..., RunPlan]:
    """A plan on devices of 80 GiB, whose model is a config.json alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8}')
    monkeypatch.setattr(module, "device_memories", lambda: [80 * GIB] * 4)
    monkeypatch.setattr(PLANNERS, "trainer", (trainer_option(),))
    monkeypatch.setattr(PLANNERS, "generator", share_of, raising=False)
    monkeypatch.setattr(PLANNERS, "asked", [], raising=False)
    monkeypatch.setattr(PLANNERS, "checked", [], raising=False)

    def resolve(*overrides: str, registry: Registry | None = None) -> RunPlan:
        return prepared(
            f"model.path={tmp_path / 'model'}", *ON_CUDA, *overrides, registry=registry or registry_of(trainer=WITH_PLAN)
        )

    return resolve


def share(plan: RunPlan) -> object:
    return plan.config("generator").share


def note(plan: RunPlan) -> str:
    (text,) = [one for one in plan.notes if one.startswith("generator.fake.share")]
    return text


def rounded(size: float) -> float:
    return int(100 * size / (80 * GIB) + 1e-6) / 100


@pytest.mark.parametrize(("offload", "kept"), [("none", 20), ("state", 10), ("all", 0)])
def test_it_is_what_the_trainer_leaves_while_it_is_idle(resolved, offload: str, kept: int) -> None:
    plan = resolved(f"offload.trainer={offload}")
    assert share(plan) == rounded((71 - kept) * GIB)
    assert f"of 80.0 GiB the trainer keeps {kept}.0" in note(plan)
    assert f'"auto" is {share(plan)}:' in note(plan)
    assert plan.planned_options == PLANNERS.checked[-1].planned_options == {"share"}
    of_trainer, of_generator = PLANNERS.asked
    assert of_trainer.as_configured
    assert of_generator.as_configured
    assert (of_trainer.world_size, of_trainer.model, of_trainer.dtype) == (1, {"hidden_size": 8}, "float32")


def test_beside_an_engine_that_stays_awake_it_is_what_the_peak_leaves(resolved) -> None:
    plan = resolved("offload.generator_sleep_mode=false")
    assert share(plan) == rounded(TRAINER_SHARE * 80 * GIB - 30 * GIB)
    assert "stays awake (weights 20.0, activations 10.0)" in note(plan)
    sleepless = evolve(FAKE_GENERATOR, capabilities=FAKE_GENERATOR.capabilities - {capabilities.RESIDENCY})
    assert share(resolved(registry=registry_of(trainer=WITH_PLAN, generator=sleepless))) == share(plan)


def test_engines_apart_from_the_trainer_get_nearly_all(resolved, monkeypatch) -> None:
    """And no estimate of a trainer is asked for."""
    names = {"refit.nccl"}
    trainer = evolve(FAKE_TRAINER, capabilities=(FAKE_TRAINER.capabilities - {"refit.in_process"}) | names)
    generator = evolve(FAKE_GENERATOR, capabilities=(FAKE_GENERATOR.capabilities - {"refit.in_process"}) | names)
    monkeypatch.setattr(module, "device_memories", lambda: [80 * GIB, 40 * GIB])
    plan = resolved(registry=registry_of(trainer=trainer, generator=generator))
    assert plan.channel == "nccl"
    assert share(plan) == GENERATOR_SHARE
    assert "devices of 40.0 GiB to themselves" in note(plan)
    (context,) = PLANNERS.asked
    assert not context.is_shared


@pytest.mark.parametrize(
    ("overrides", "channel", "memory", "world", "is_shared", "copies"),
    [
        (("refit.channel=directory",), "directory", 80, (4, 2), True, "none"),
        (("refit.delta=device",), "directory", 80, (4, 2), True, "whole"),
        (("cluster.placement=separate", "cluster.generator_gpus_per_node=1"), "nccl", 60, (2, 1), False, "none"),
        (
            ("cluster.placement=separate", "cluster.generator_gpus_per_node=1", "refit.delta=device"),
            "shards",
            60,
            (2, 1),
            False,
            "parts",
        ),
    ],
)
def test_on_a_cluster_the_driver_plans_by_its_own_devices_of_the_role(
    resolved, monkeypatch, overrides, channel, memory, world, is_shared, copies
) -> None:
    """Two machines with two devices each, of which the driver's second one is smaller."""
    monkeypatch.setattr(module, "device_memories", lambda: [80 * GIB, (80 if is_shared else 60) * GIB])
    names = {"refit.directory", "refit.nccl", "refit.shards", capabilities.DELTA_REFIT, capabilities.MULTI_RANK}
    trainer = evolve(WITH_PLAN, capabilities=(FAKE_TRAINER.capabilities - {"refit.in_process"}) | names)
    generator = evolve(FAKE_GENERATOR, capabilities=(FAKE_GENERATOR.capabilities - {"refit.in_process"}) | names)
    plan = resolved(
        "cluster.nodes=2",
        "cluster.gpus_per_node=2",
        *overrides,
        registry=registry_of(trainer=trainer, generator=generator),
    )
    assert plan.channel == channel
    context = PLANNERS.asked[-1]
    assert (context.world_size, context.local_size) == world
    assert (context.is_shared, context.delta_copies, context.device.memory_bytes) == (is_shared, copies, memory * GIB)
    assert plan.generator_context(RankInfo(device="cuda"), None).channel == channel
    assert share(plan) != "auto"


def plan_judge(context: PlanContext, config: object) -> Sequence[PlanOption]:
    return [PlanOption(memory={"weights": 8 * GIB}, seconds={})]


JUDGE = evolve(FAKE_ENVIRONMENT, plan=f"{__name__}:plan_judge")


def test_an_environment_on_the_devices_is_left_what_it_has(resolved) -> None:
    judged = registry_of(trainer=WITH_PLAN, environment=JUDGE)
    plan = resolved(registry=judged)
    assert share(plan) == rounded((71 - 20 - 8) * GIB)
    assert 'offload.trainer = "none", the environment fake has 8.0, and 43.0 can be given to engines' in note(plan)
    awake = resolved("offload.generator_sleep_mode=false", registry=judged)
    assert share(awake) == rounded(TRAINER_SHARE * 80 * GIB - 30 * GIB - 8 * GIB)


def test_a_number_in_the_recipe_stays(resolved) -> None:
    plan = resolved("generator.fake.share=0.3")
    assert share(plan) == 0.3
    assert PLANNERS.asked == []
    assert plan.planned_options == PLANNERS.checked[-1].planned_options == frozenset()


def test_on_a_cpu_nothing_is_planned(resolved) -> None:
    plan = resolved("run.device=cpu")
    assert share(plan) == "auto"
    assert PLANNERS.asked == []
    assert not [one for one in plan.notes if "share" in one]


UNKNOWN = {
    "a trainer without a plan": ((), FAKE_TRAINER, "estimates no memory"),
    "a trainer that tells no such residency": ((trainer_option(names=("all",)),), WITH_PLAN, 'offload.trainer = "none"'),
    "several layouts that are not the recipe's": (
        (trainer_option(delay_s=1.0), trainer_option(delay_s=2.0)),
        WITH_PLAN,
        "2 layouts; expected that of the recipe",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_where_nothing_is_known_it_stays_and_a_note_says_why(resolved, monkeypatch, case: str) -> None:
    options, trainer, why = UNKNOWN[case]
    monkeypatch.setattr(PLANNERS, "trainer", options)
    plan = resolved(registry=registry_of(trainer=trainer))
    assert share(plan) == "auto"
    assert why in note(plan)
    assert plan.planned_options == frozenset()


def test_a_critic_beside_the_policy_is_in_no_estimate(resolved) -> None:
    plan = resolved("algorithm.fake.critic=true")
    assert share(plan) == "auto"
    assert "critic" in note(plan)


def test_of_several_layouts_the_one_without_changes_is_the_recipes(resolved, monkeypatch) -> None:
    """Plans written before `as_configured` have all layouts."""
    monkeypatch.setattr(PLANNERS, "trainer", (trainer_option(delay_s=1.0), trainer_option()))
    assert "keeps 20.0" in note(resolved())


def test_without_a_gpu_in_sight_or_a_model_it_stays(resolved, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module, "device_memories", lambda: None)
    assert "nvidia-smi shows the driver no such device" in note(resolved())
    monkeypatch.setattr(module, "device_memories", lambda: [80 * GIB])
    (tmp_path / "model" / "config.json").unlink()
    plan = resolved()
    assert share(plan) == "auto"
    assert "config.json" in note(plan)


@pytest.mark.parametrize("said", [{}, {"share": "auto"}, {"share": 2.0}])
def test_a_plan_without_a_value_that_the_section_allows_is_the_plugins_error(resolved, monkeypatch, said) -> None:
    monkeypatch.setattr(PLANNERS, "generator", lambda _: [PlanOption(options=said, memory={}, seconds={"generation": 1.0})])
    with pytest.raises(PluginError, match="its planned_options"):
        resolved()


def test_the_run_has_the_number_and_one_that_resumes_has_it_again(run, resolved, tmp_path) -> None:
    """The record is the recipe as it ran; nothing of it is another value when the run goes on."""
    _ = resolved  # sets the devices and plans
    registry, model = registry_of(trainer=WITH_PLAN), f"model.path={tmp_path / 'model'}"
    run(model, *ON_CUDA, "run.num_steps=2", registry=registry)
    (file,) = (tmp_path / "runs").glob("*/recipe.toml")
    recorded = tomli.loads(file.read_text())["generator"]["fake"]["share"]
    assert recorded == rounded(51 * GIB)
    run(model, *ON_CUDA, "run.num_steps=2", registry=registry, resume=True)
    assert tomli.loads(file.read_text())["generator"]["fake"]["share"] == recorded
    assert not list(file.parent.glob("recipe-*.toml"))
