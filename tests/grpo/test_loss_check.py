"""Options of the loss that do not go together."""

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec
from rlcore_grpo.check import check
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.presets import GmpoConfig

CONTEXT = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=8, max_turns=2)


def test_constant_length_belongs_to_constant_normalisation_alone():
    good = GrpoConfig(loss_normalisation="constant", constant_length=32)
    assert not check(CONTEXT, good)
    assert not check(CONTEXT, evolve(good, constant_length=None))
    assert not check(CONTEXT, GrpoConfig())
    (problem,) = check(CONTEXT, evolve(good, loss_normalisation="token"))
    assert problem.path == "algorithm.grpo.constant_length"


@pytest.mark.parametrize(
    ("path", "wrong", "mended"),
    [
        ("ratio", {"objective": "gmpo", "ratio": "sequence"}, {"ratio": "token"}),
        ("ratio", {"objective": "vespo", "ratio": "sequence_product"}, {"objective": "clipped"}),
        ("ratio", {"objective": "policy_gradient", "ratio": "sequence_token"}, {"objective": "sapo"}),
        ("dual_clip", {"objective": "cispo", "dual_clip": 3.0}, {"dual_clip": None}),
        ("advantage_per", {"ratio": "sequence", "advantage_per": "turn"}, {"ratio": "sequence_token"}),
        ("advantage_per", {"ratio": "sequence", "advantage_per": "process"}, {"ratio": "sequence_token"}),
        ("advantage_per", {"objective": "gmpo", "advantage_per": "turn"}, {"objective": "clipped"}),
        ("importance_minimum", {"importance_minimum": 2.0}, {"importance_maximum": 3.0}),
        ("geometric_minimum", {"geometric_minimum": 1.5, "geometric_maximum": 1.2}, {"geometric_minimum": 0.8}),
        (
            "importance_correction",
            {"objective": "vespo", "importance_correction": "sequence"},
            {"importance_correction": "token"},
        ),
        ("previous_logprobs", {"previous_logprobs": "generation", "geometric_minimum": 0.5}, {"geometric_minimum": 0.0}),
        ("previous_logprobs", {"previous_logprobs": "generation", "objective": "kl_cov"}, {"previous_logprobs": "trainer"}),
        ("covariance_minimum", {"objective": "clip_cov", "covariance_minimum": 7.0}, {"covariance_maximum": 8.0}),
        ("clip_high", {"objective": "sapo", "clip_high": 0.3}, {"objective": "cispo"}),
        ("sapo_temperature_negative", {"sapo_temperature_negative": 2.0}, {"objective": "sapo"}),
        ("vespo_decay_positive", {"objective": "sapo", "vespo_decay_positive": 2.0}, {"objective": "vespo"}),
        ("covariance_share", {"covariance_share": 0.1}, {"objective": "kl_cov"}),
        ("covariance_maximum", {"objective": "kl_cov", "covariance_maximum": 2.0}, {"objective": "clip_cov"}),
        ("covariance_penalty", {"objective": "clip_cov", "covariance_penalty": 2.0}, {"objective": "kl_cov"}),
        ("kl_importance", {"kl_importance": "previous"}, {"kl_coefficient": 0.1}),
        ("kl_maximum", {"kl_maximum": 10.0}, {"kl_coefficient": 0.1}),
        ("clip_high", {"clip_high": -0.1}, {"objective": "cispo"}),
        ("clip_high", {"objective": "cispo", "clip_low": 0.2, "clip_high": -0.3}, {"clip_low": 1.0}),
        ("importance_bound", {"importance_correction": "none", "importance_bound": "mask"}, {"importance_correction": "token"}),
        ("importance_bound", {"objective": "vespo", "importance_bound": "mask"}, {"importance_bound": "truncate"}),
        ("importance_minimum", {"importance_correction": "none", "importance_minimum": 0.5}, {"importance_minimum": 0.0}),
        ("entropy_metric", {"entropy_minimum": 0.5, "entropy_metric": "estimate"}, {"entropy_metric": "exact"}),
    ],
)
def test_an_option_that_would_do_nothing_or_harm_is_refused(path, wrong, mended):
    (problem,) = check(CONTEXT, GrpoConfig(**wrong))
    assert problem.path == f"algorithm.grpo.{path}"
    assert problem.remedy
    assert not check(CONTEXT, GrpoConfig(**{**wrong, **mended}))


def test_everything_wrong_is_told_at_once():
    config = GrpoConfig(objective="vespo", ratio="sequence", dual_clip=2.0, constant_length=3, importance_minimum=9.0)
    assert {problem.path.rpartition(".")[2] for problem in check(CONTEXT, config)} == {
        "ratio",
        "dual_clip",
        "constant_length",
        "importance_minimum",
    }


def test_a_presets_own_defaults_are_no_mistake_of_its_user():
    assert not check(CONTEXT, GmpoConfig(objective="policy_gradient", loss_normalisation="token"))
    (problem,) = check(CONTEXT, GmpoConfig(objective="policy_gradient", clip_high=0.2))
    assert problem.path == "algorithm.gmpo.clip_high"
