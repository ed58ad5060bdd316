"""What follows from a plan: what backends are built with, and who shares a device."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.run.plan.run_plan import RunPlan, dtype_of
from rlcore.spi import RankInfo

Prepare = Callable[..., RunPlan]


@pytest.mark.parametrize(
    ("written", "device", "dtype"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float16", "cpu", "float16"), ("float16", "cuda", "float16")],
)
def test_the_dtype_is_the_recipes_or_else_the_devices(prepared: Prepare, written: str, device: str, dtype: str) -> None:
    recipe = prepared().recipe
    assert dtype_of(evolve(recipe, model=evolve(recipe.model, dtype=written)), device) == dtype


def test_backends_are_built_with_the_recipes_model_lengths_and_seed(prepared: Prepare) -> None:
    plan = prepared("run.seed=7", "run.num_steps=5", "training.minibatches_per_step=3", "model.revision=main", "run.device=cpu")
    trainer = plan.trainer_context(RankInfo(rank=1, world_size=2))
    assert (trainer.seed, trainer.num_train_steps, trainer.max_sequence_length) == (7, 15, 24)
    assert trainer.rank_info.rank == 1
    assert not trainer.needs_reference
    assert (trainer.optimizer.learning_rate, trainer.schedule) == (0.1, plan.recipe.schedule)
    generator = plan.generator_context(RankInfo(), Path("logs"))
    assert (generator.channel, generator.devices, generator.log_directory) == ("in_process", None, Path("logs"))
    assert (generator.seed, generator.max_sequence_length, generator.routed_experts) == (7, 24, False)
    for model in (trainer.model, generator.model):
        assert (model.path, model.revision, model.dtype, model.trust_remote_code) == ("none", "main", "float32", False)


def test_an_algorithm_that_compares_with_the_reference_has_the_trainer_keep_it(prepared: Prepare) -> None:
    assert prepared("algorithm.fake.kl_coefficient=0.1").trainer_context(RankInfo()).needs_reference


@pytest.mark.parametrize(
    ("device", "channel", "shares"),
    [
        ("cuda", "in_process", True),
        ("cuda", "cuda_ipc", True),
        ("cuda", "nccl", False),
        ("cuda", None, False),
        ("cpu", "in_process", False),
    ],
)
def test_trainer_and_generator_take_turns_where_one_gpu_holds_both(
    prepared: Prepare, device: str, channel: str | None, shares: bool
) -> None:
    assert evolve(prepared(), device=device, channel=channel).shares_devices == shares
