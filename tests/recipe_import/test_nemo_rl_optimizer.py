"""The learning rate at each of NeMo-RL's training steps, and what else its optimizers mean."""

import math
from pathlib import Path

import pytest

from rlcore.spi import ConfigError
from rlcore.spi.context import ScheduleSpec
from rlcore_import.recipe import ImportedRecipe

from .nemo_recipes import grpo, reported

STEPS = 60
LINEAR = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 12}}"
FALLING = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1.0, end_factor: 0.2, total_iters: %d}}"
COSINE = "{name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: %d, eta_min: 1e-7}}"
CONSTANT = "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 1000}}"
MEGATRON = "{enabled: true, optimizer: {lr: 1e-6, min_lr: 1e-7, weight_decay: 0.1, clip_grad: 1.0}, scheduler: {%s}}"
RATE = 1e-6


def rising(step: int, length: int, start: float) -> float:
    """The share of the rate of a warm-up that moves once a training step."""
    return start + (1 - start) * step / length


def falling(step: int, begin: int, end: int, least: float, style: str) -> float:
    """The share of the rate between two steps."""
    done = min(1.0, (step - begin) / (end - begin))
    return least + (1 - least) * (1 - done if style == "linear" else (1 + math.cos(math.pi * done)) / 2)


def torch_recipe(tmp_path: Path, stages: str, *others: str) -> ImportedRecipe:
    return grpo(tmp_path, f"grpo.max_num_steps={STEPS}", f"policy.scheduler={stages}", *others)


def rates(found: ImportedRecipe) -> list[float]:
    """The mean over its updates of each step's share of the rate."""
    section = "schedule."
    spec = ScheduleSpec(**{key.removeprefix(section): value for key, value in found.values.items() if key.startswith(section)})
    updates = found.values["training.minibatches_per_step"]
    shares = [spec.share(update, STEPS * updates) for update in range(STEPS * updates)]
    return [sum(shares[step * updates : (step + 1) * updates]) / updates for step in range(STEPS)]


TORCH = {
    "constant": (f"[{CONSTANT}]", 0, 0.0, "constant"),
    "warm-up": (f"[{LINEAR}, {CONSTANT}, {{milestones: [12]}}]", 12, 0.1, "constant"),
    "warm-up and cosine": (f"[{LINEAR}, {COSINE % (STEPS - 12)}, {{milestones: [12]}}]", 12, 0.1, "cosine"),
    "warm-up and fall": (f"[{LINEAR}, {FALLING % (STEPS - 12)}, {{milestones: [12]}}]", 12, 0.1, "linear"),
    "cosine": (COSINE % STEPS, 0, 0.0, "cosine"),
    "fall": (f"[{FALLING % STEPS}]", 0, 0.0, "linear"),
    "none": ("null", 0, 0.0, "constant"),
}
OF_MEGATRON = {
    "constant": ("lr_decay_style: constant, lr_warmup_iters: 12, lr_warmup_init: 1e-7, lr_decay_iters: 1000", 0.1, "constant"),
    "cosine": (f"lr_decay_style: cosine, lr_warmup_iters: 12, lr_warmup_init: 0, lr_decay_iters: {STEPS}", 0.0, "cosine"),
    "linear": (f"lr_decay_style: linear, lr_warmup_iters: 12, lr_warmup_init: 0.0, lr_decay_iters: {STEPS}", 0.0, "linear"),
}


def expected(step: int, warmup: int, start: float, style: str, least: float) -> float:
    if step < warmup:
        return rising(step, warmup, start)
    return 1.0 if style == "constant" else falling(step, warmup, STEPS, least, style)


def require_rates(found: ImportedRecipe, warmup: int, start: float, style: str, least: float) -> None:
    """A warm-up is within its first step's share; all else within the way that a step's updates go."""
    for step, share in enumerate(rates(found)):
        slack = (
            max(start, 1 / warmup) + 1e-9
            if step < warmup
            else 0.5 * math.pi / (STEPS - warmup)
            if style != "constant"
            else 1e-12
        )
        assert share == pytest.approx(expected(step, warmup, start, style, least), abs=slack), step
    if warmup:
        assert found.values["schedule.warmup_steps"] == warmup * found.values["training.minibatches_per_step"]


@pytest.mark.parametrize("batch", [128, 32], ids=["one update", "four updates"])
@pytest.mark.parametrize(("stages", "warmup", "start", "style"), TORCH.values(), ids=TORCH)
def test_torchs_schedules_have_the_same_rate_at_each_step(
    tmp_path: Path, stages: str, warmup: int, start: float, style: str, batch: int
) -> None:
    found = torch_recipe(tmp_path, stages, f"policy.train_global_batch_size={batch}")
    assert found.values["training.minibatches_per_step"] == 128 // batch
    require_rates(found, warmup, start, style, 0.2 if "0.2" in stages else 0.1)
    moves = bool(warmup) or style != "constant"
    assert ("policy.scheduler" in reported(found)) is (start > 0 or (batch == 32 and moves))


@pytest.mark.parametrize("batch", [128, 32], ids=["one update", "four updates"])
@pytest.mark.parametrize(("schedule", "start", "style"), OF_MEGATRON.values(), ids=OF_MEGATRON)
def test_megatrons_schedules_have_the_same_rate_at_each_step(
    tmp_path: Path, schedule: str, start: float, style: str, batch: int
) -> None:
    overrides = [f"grpo.max_num_steps={STEPS}", f"policy.megatron_cfg={MEGATRON % schedule}"]
    found = grpo(tmp_path, *overrides, f"policy.train_global_batch_size={batch}")
    require_rates(found, 12, start, style, 0.1)
    keys = {key.rpartition(".")[2] for key in reported(found) if key.startswith("policy.megatron_cfg.scheduler")}
    assert keys == {*(["lr_warmup_init"] if start else ["lr_warmup_iters"]), *(["lr_warmup_iters"] if batch == 32 else [])}
    assert not {"policy.scheduler", "policy.optimizer.name", "policy.optimizer.kwargs.lr"} & reported(found)


@pytest.mark.parametrize(
    "stages",
    [
        f"[{COSINE % 30}]",
        f"[{FALLING % 30}]",
        "[{name: torch.optim.lr_scheduler.StepLR, kwargs: {step_size: 3}}]",
        "[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 0.5, total_iters: 9}}]",
        "[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, brand_new: 9}}]",
        f"[{CONSTANT}, {{milestones: [3], brand_new: 1}}]".replace("kwargs", "brand_new: 1, kwargs", 1),
        "[{brand_new: 1}]",
        f"[{CONSTANT}, {COSINE % 40}, {{milestones: [20]}}]",
    ],
)
def test_a_schedule_that_is_another_is_reported(tmp_path: Path, stages: str) -> None:
    assert "policy.scheduler" in reported(torch_recipe(tmp_path, stages))


@pytest.mark.parametrize("between", ["", f"{CONSTANT}, "])
def test_a_decay_that_begins_behind_the_warm_up_is_reported(tmp_path: Path, between: str) -> None:
    milestones = "12, 40" if between else "40"
    found = torch_recipe(tmp_path, f"[{LINEAR}, {between}{COSINE % (STEPS - 40)}, {{milestones: [{milestones}]}}]")
    assert "the decay begins after 12 steps, where there it begins after 40" in {one.why for one in found.unmapped}


@pytest.mark.parametrize("steps", [3, 30])
def test_an_argument_changes_one_element_of_a_schedule(tmp_path: Path, steps: int) -> None:
    stages = f"[{LINEAR}, {CONSTANT}, {{milestones: [30]}}]"
    found = torch_recipe(tmp_path, stages, f"policy.scheduler.0.kwargs.total_iters={steps}")
    assert found.values["schedule.warmup_steps"] == steps * found.values["training.minibatches_per_step"]


def test_a_warm_up_that_a_milestone_cuts_is_as_long_as_there(tmp_path: Path) -> None:
    found = torch_recipe(tmp_path, f"[{LINEAR}, {CONSTANT}, {{milestones: [5]}}]")
    assert found.values["schedule.warmup_steps"] == 5 * found.values["training.minibatches_per_step"]


@pytest.mark.parametrize("stages", ["x", "[1]", f"[{LINEAR.replace('12', '-1')}, {CONSTANT}, {{milestones: [1]}}]"])
def test_a_schedule_of_another_form_is_refused(tmp_path: Path, stages: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.scheduler"):
        torch_recipe(tmp_path, stages)


def test_weight_decay_is_that_of_matrices(tmp_path: Path) -> None:
    key = "policy.optimizer.kwargs.weight_decay"
    assert (key in reported(grpo(tmp_path)), key in reported(grpo(tmp_path, f"{key}=0"))) == (True, False)
    schedule = "start_weight_decay: 0.3, end_weight_decay: 0.4"
    found = grpo(tmp_path, f"policy.megatron_cfg={MEGATRON % schedule}")
    assert found.values["optimizer.weight_decay"] == 0.3
    assert "policy.megatron_cfg.scheduler.end_weight_decay" in reported(found)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy.optimizer.kwargs.lr=0"], "policy.optimizer.kwargs.lr"),
        ([f"policy.megatron_cfg={MEGATRON.replace('1e-6', '0') % ''}"], "policy.megatron_cfg.optimizer.lr"),
        (["policy.optimizer.kwargs.betas=[0.9]"], "policy.optimizer.kwargs.betas"),
        (["policy.optimizer.kwargs.betas=[0.9,1]"], "policy.optimizer.kwargs.betas"),
        (["policy.optimizer.kwargs.eps=0"], "policy.optimizer.kwargs.eps"),
    ],
)
def test_what_no_optimizer_can_have_is_refused(tmp_path: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        grpo(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.optim.AdamW", {}),
        ("torchao.optim.AdamW8bit", {"optimizer.moments": "8bit"}),
        ("torch.optim.Muon", {"optimizer.name": "muon"}),
    ],
)
def test_name_of_a_class_is_its_kind(tmp_path: Path, name: str, expected: dict[str, str]) -> None:
    found = grpo(tmp_path, f"policy.optimizer.name={name}")
    assert {key: found.values.get(key) for key in expected} == expected
    assert "policy.optimizer.name" not in reported(found)


def test_another_optimizer_is_reported(tmp_path: Path) -> None:
    assert "policy.optimizer.name" in reported(grpo(tmp_path, "policy.optimizer.name=torch.optim.SGD"))


def muon_of(found: ImportedRecipe) -> dict[str, object]:
    section = "optimizer.muon."
    return {key.removeprefix(section): value for key, value in found.values.items() if key.startswith(section)}


@pytest.mark.parametrize(
    ("options", "scale", "is_reported"),
    [
        ("muon_scale_mode: spectral, muon_extra_scale_factor: 0.2", "match_rms_adamw", False),
        ("muon_scale_mode: shape_scaling", "original", False),
        ("muon_scale_mode: shape_scaling, muon_extra_scale_factor: 0.5", "original", True),
        ("muon_scale_mode: unit_rms_norm", "match_rms_adamw", True),
    ],
)
def test_muon_of_megatron_has_its_options(tmp_path: Path, options: str, scale: str, is_reported: bool) -> None:
    optimizer = f"{{optimizer: muon, lr: 1e-6, weight_decay: 0.1, muon_momentum: 0.9, muon_num_ns_steps: 6, {options}}}"
    found = grpo(tmp_path, f"policy.megatron_cfg={{enabled: true, optimizer: {optimizer}}}")
    assert muon_of(found) == {"momentum": 0.9, "nesterov": False, "newton_schulz_steps": 6, "scale": scale}
    assert found.values["optimizer.name"] == "muon"
    assert ("policy.megatron_cfg.optimizer.muon_scale_mode" in reported(found)) is is_reported


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"momentum": 0.95, "nesterov": True, "newton_schulz_steps": 5, "scale": "original"}),
        (
            ", momentum: 0.9, nesterov: false, ns_steps: 6, adjust_lr_fn: match_rms_adamw",
            {"momentum": 0.9, "nesterov": False, "newton_schulz_steps": 6, "scale": "match_rms_adamw"},
        ),
    ],
)
def test_muon_of_torch_has_torchs_options(tmp_path: Path, arguments: str, expected: dict[str, object]) -> None:
    found = grpo(tmp_path, f"policy.optimizer={{name: torch.optim.Muon, kwargs: {{lr: 1e-3{arguments}}}}}")
    assert muon_of(found) == expected
    assert found.values["optimizer.weight_decay"] == 0.1
    assert "optimizer.eps" not in found.values
    of_adamw = {"betas", "eps"}  # of the file, whose table the argument merges with
    assert {key.rpartition(".")[2] for key in reported(found) if "kwargs" in key} == {*of_adamw, "weight_decay"}


@pytest.mark.parametrize("option", ["muon_momentum: 1.0", "muon_num_ns_steps: 120"])
def test_options_of_muon_beyond_a_recipes_bounds_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=option.partition(":")[0]):
        grpo(tmp_path, f"policy.megatron_cfg={{enabled: true, optimizer: {{optimizer: muon, lr: 1e-6, {option}}}}}")
