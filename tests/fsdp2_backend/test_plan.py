"""The trainer's layouts for `rlcore plan`."""

from attrs import evolve
from trainer_plans import TrainerPlans, plan_context

from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.plan import plan
from rlcore_plan.devices import DEVICES


class TestPlans(TrainerPlans):
    plan = staticmethod(plan)
    config = Fsdp2Config


def test_float8_makes_products_of_layers_faster_but_not_experts() -> None:
    context = evolve(plan_context(), device=DEVICES["H200"], as_configured=True, max_microbatch_tokens=32768)
    experts = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 8192, "model_type": "qwen3_moe"}
    gains = []
    for model in (context.model, {**context.model, **experts}):
        (plain,), (narrow,) = (plan(evolve(context, model=model), Fsdp2Config(fp8=fp8)) for fp8 in (False, True))
        gains.append(plain.seconds["training"] / narrow.seconds["training"])
    assert gains[0] > 1.1 > gains[1]
