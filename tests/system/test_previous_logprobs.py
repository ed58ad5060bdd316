"""What a ratio is taken against where the generator's log-probabilities are exact, and options that need the trainer's."""

import pytest

from .system_support import STEPS_ALONE, Workplace, read_metrics  # type: ignore[import-not-found]

OPTIONS = (
    "generator.name=transformers",
    "run.num_steps=3",
    "training.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "training.minibatches_per_step=2",
    *STEPS_ALONE,
)


def test_the_penalty_of_kl_cov_is_no_matter_of_rounding(workplace: Workplace) -> None:
    """Two trainers, whose roundings differ, make the same run of it."""
    options = (*OPTIONS, "algorithm.grpo.objective=kl_cov", "algorithm.grpo.covariance_share=0.2")
    runs = [
        workplace.train("grpo.toml", *options, f"trainer.name={name}", f"run.name={name}") for name in ("fsdp2", "megatron")
    ]
    one, other = map(read_metrics, runs)
    assert sum(record["updates"] for record in one) > 2
    assert max(record["high_covariance"] for record in one if record["updates"]) > 0.1
    for found, expected in zip(other, one, strict=True):
        assert found == {name: pytest.approx(value, rel=1e-4, abs=1e-4) for name, value in expected.items()}


def test_geometric_bounds_leave_out_samples_of_older_weights(workplace: Workplace) -> None:
    bounds = ("algorithm.grpo.geometric_minimum=0.9999", "algorithm.grpo.geometric_maximum=1.0001")
    fresh, *stale = read_metrics(workplace.train("grpo.toml", *OPTIONS, *bounds, "async.max_staleness=1"))
    assert fresh["geometric_masked"] == 0
    assert max(record["geometric_masked"] for record in stale if record["updates"]) > 0.5


@pytest.mark.parametrize(("fp8", "taken"), [("false", "generation"), ("true", "trainer")])
def test_a_trainer_in_float8_is_compared_with_itself(workplace: Workplace, fp8: str, taken: str) -> None:
    """Its first update's ratio is 1 to the bit then; a plain trainer's is so to rounding."""
    pytest.importorskip("torchao", reason="needs torchao, the extra fp8")
    options = (*OPTIONS, "trainer.name=fsdp2", f"trainer.fsdp2.fp8={fp8}", "training.minibatches_per_step=1")
    records = [record for record in read_metrics(workplace.train("grpo.toml", *options)) if record["updates"]]
    assert records
    for record in records:
        assert ("importance_weight" in record) == (taken == "trainer")
        assert record["ratio_max"] == pytest.approx(1, abs=0 if taken == "trainer" else 1e-4)
        assert (record["token_mult_prob_error"] > 1.0005) == (fp8 == "true")


def test_a_section_of_a_trainer_that_is_not_taken_rounds_nothing(workplace: Workplace) -> None:
    options = (*OPTIONS, "trainer.name=auto", "trainer.megatron.fp8=true", "training.minibatches_per_step=1")
    records = [record for record in read_metrics(workplace.train("grpo.toml", *options)) if record["updates"]]
    assert records
    assert not any("importance_weight" in record for record in records), "the generator's are exact, as fsdp2's are"
