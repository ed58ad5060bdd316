"""The reference on devices of its own: what its pool is built with and what a recipe cannot ask; and who is asked."""

from collections.abc import Callable

import numpy as np
import pytest

from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.train_step.scorers import Reference
from rlcore.spi import ConfigError, RankInfo, TokenBatch
from rlcore.spi.execution import Backends

Prepare = Callable[..., RunPlan]
COMPARES = "algorithm.fake.kl_coefficient=0.1"
APART = ("run.device=cpu", "cluster.gpus_per_node=2", "cluster.reference_gpus_per_node=1")


class Group:
    """A trainer that notes the versions it is asked at."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def logprobs(self, batch, sequences, model, weight_version):
        self.asked.append((model, weight_version))
        return np.zeros(batch.num_tokens, np.float32)


def test_the_trainer_is_asked_at_its_version_and_a_pool_at_0() -> None:
    batch = TokenBatch(tokens=np.zeros(3, np.int32), offsets=np.array([0, 3]), loss_mask=np.zeros(3, bool))
    trainer, pool = Group(), Group()
    for reference in (None, pool):
        backends = Backends(trainer=trainer, generator=None, route=None, reference=reference)  # type: ignore[arg-type]
        assert Reference.of(backends).logprobs(batch, np.array([0]), 4).shape == (3,)
        assert Reference.of(backends).is_beside(trainer) == (reference is None)  # type: ignore[arg-type]
    assert (trainer.asked, pool.asked) == ([("reference", 4)], [("reference", 0)])


def test_the_pool_holds_the_reference_and_the_trainer_does_not(prepared: Prepare) -> None:
    plan = prepared(COMPARES, "reference.path=teacher", *APART, "model.dtype=float32")
    trainer = plan.trainer_context(RankInfo())
    assert (trainer.needs_policy, trainer.needs_reference, trainer.reference) == (True, False, None)
    pool = plan.reference_context(RankInfo(rank=1, world_size=2))
    assert (pool.needs_policy, pool.needs_reference, pool.rank_info.rank) == (False, True, 1)
    assert pool.reference is not None
    assert (pool.model.path, pool.reference.path) == ("teacher", "teacher")
    beginning = prepared(COMPARES, *APART).reference_context(RankInfo())
    assert (beginning.model.path, beginning.reference) == ("none", None)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((*APART,), "which compares with no reference"),
        ((COMPARES, "cluster.gpus_per_node=2", "cluster.reference_gpus_per_node=2"), "2 of 2"),
        (
            (
                COMPARES,
                "cluster.gpus_per_node=3",
                "cluster.reference_gpus_per_node=2",
                "cluster.placement=separate",
                "cluster.generator_gpus_per_node=1",
            ),
            "2 of 3, 1 of which generate",
        ),
    ],
)
def test_what_no_pool_can_be_is_refused(prepared: Prepare, overrides: tuple[str, ...], found: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("run.device=cpu", *overrides)
    (problem,) = raised.value.problems
    assert problem.path == "cluster.reference_gpus_per_node"
    assert found in problem.found


def test_the_pool_has_the_trainers_options_but_for_its_own(prepared: Prepare) -> None:
    named = (COMPARES, "reference.path=teacher", "trainer.fake.initial_scale=0.5", "trainer.fake.vocab_size=90")
    plan = prepared(*named, *APART, "reference.trainer={initial_scale=0.25}")
    config = plan.reference_config
    assert (config.initial_scale, config.vocab_size, plan.config("trainer").initial_scale) == (0.25, 90, 0.5)
    for options, key in (({"scale": 1}, "reference.trainer.scale"), ({"vocab_size": "many"}, "reference.trainer.vocab_size")):
        told = ", ".join(f"{name}={value!r}" for name, value in options.items())
        with pytest.raises(ConfigError) as raised:
            prepared(*named, *APART, f"reference.trainer={{{told}}}")
        assert [problem.path for problem in raised.value.problems] == [key]
    with pytest.raises(ConfigError) as raised:
        prepared(*named, "reference.trainer={initial_scale=0.25}")
    assert [problem.path for problem in raised.value.problems] == ["reference.trainer"]
