"""KL terms have the value, place and gradient that verl gives them."""

import pytest

from . import peer_verl
from .peer_verl import Batch
from .verl_batches import ACTOR, AGGREGATIONS, LOSS, Read, loss_of


@pytest.mark.parametrize("kind", ["kl", "mse", "low_var_kl"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_terms_of_kl_and_entropy_are_verls(read_verl: Read, verl_batch: Batch, kind: str, aggregation: str) -> None:
    overrides = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}", f"{ACTOR}.kl_loss_coef=0.3"]
    overrides += [f"{ACTOR}.entropy_coeff=0.02", f"{ACTOR}.loss_agg_mode={aggregation}", f"+{ACTOR}.loss_scale_factor=25"]
    losses = peer_verl.policy_loss(verl_batch, "vanilla", low=0.2, high=0.3)
    losses = losses + 0.3 * peer_verl.kl_estimate(verl_batch.policy, verl_batch.reference, kind) - 0.02 * verl_batch.entropy
    expected = peer_verl.aggregate(losses, verl_batch.mask, aggregation, 25)
    assert loss_of(read_verl(*overrides), verl_batch) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=rloo"], "reward"),
        (["algorithm.adv_estimator=grpo", "+algorithm.norm_adv_by_std_in_grpo=False"], "reward"),
        (["algorithm.adv_estimator=grpo"], "reward_to_go"),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "reward_to_go"),
        (["algorithm.adv_estimator=grpo", f"{LOSS}.loss_mode=geo_mean"], None),
        (["algorithm.adv_estimator=gdpo"], None),
        (["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.kl_ctrl.kl_coef=0"], None),
    ],
)
def test_where_a_divergence_of_the_reward_goes(read_verl: Read, overrides: list[str], expected: str | None) -> None:
    found = read_verl("algorithm.use_kl_in_reward=True", *overrides)
    assert found.values.get("algorithm.grpo.kl_placement") == expected
    numerics = [one.key for one in found.unmapped if "generator's log-probabilities" in one.why]
    assert numerics == ([] if expected is None else ["algorithm.kl_penalty"])


def test_a_kl_type_with_a_plus_has_the_gradient_of_the_square(read_verl: Read) -> None:
    found = read_verl(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=low_var_kl+")
    assert (found.values["algorithm.grpo.kl_estimator"], found.values["algorithm.grpo.kl_gradient"]) == ("k2", "estimate")
