"""The trainer's layouts for `rlcore plan`."""

import pytest
from attrs import evolve
from trainer_plans import TrainerPlans, plan_context

from rlcore.spi import LoraSpec, OptimizerSpec
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


def test_moments_that_are_decoded_have_room_in_a_plan() -> None:
    """A step of moments in 8 bits needs 80 bytes of 2**22 elements where activations and logits take less."""
    narrow = OptimizerSpec(moments="8bit")
    context = evolve(plan_context(), as_configured=True, max_microbatch_tokens=1, max_sequence_length=1)
    plain, eight_bit = (plan(evolve(context, optimizer=spec), Fsdp2Config())[0].memory for spec in (OptimizerSpec(), narrow))
    room = {name: memory["activations"] + memory["logits"] for name, memory in (("plain", plain), ("8bit", eight_bit))}
    assert room["plain"] < 80 * 2**22
    assert room["8bit"] == 80 * 2**22


def test_float64_doubles_what_float32_holds() -> None:
    """Master weights, gradients, moments, activations and logits."""
    context = evolve(plan_context(), as_configured=True)
    wide, plain = (plan(evolve(context, dtype=dtype), Fsdp2Config())[0].memory for dtype in ("float64", "float32"))
    assert all(abs(wide[name] - 2 * size) <= 2 for name, size in plain.items() if size)


def test_weights_on_the_host_cost_their_way_and_the_hosts_update() -> None:
    """Each microbatch brings 4 bytes a parameter twice. A microbatch of few tokens waits for them; a large one hides them, and
    the updates of the host remain: 4 bytes of gradient on the way, 28 bytes at 34 GB/s."""
    context = evolve(plan_context(), as_configured=True, device=DEVICES["H100"], world_size=1, max_microbatch_tokens=512)
    for tokens, waits in ((512, True), (65536, False)):
        small = evolve(context, max_microbatch_tokens=tokens)
        (plain,), (offloaded,) = (plan(small, Fsdp2Config(cpu_offload=offload)) for offload in (False, True))
        parameters = (plain.memory["optimizer state"]) / 8
        updates = small.updates * parameters * (4 / small.device.host + 28 / 34e9)
        added = offloaded.seconds["training"] - updates
        assert (added > 1.2 * plain.seconds["training"]) is waits
        assert waits or added == pytest.approx(plain.seconds["training"], rel=0.02)  # less the device's own update
        assert offloaded.seconds["log-probabilities"] >= plain.seconds["log-probabilities"]


@pytest.mark.parametrize(
    ("lora", "reshards", "trained", "scored"),
    [
        (None, True, 2 * 4, 4 / 2 + 2),
        (None, False, 4, 4 / 2 + 2),
        (LoraSpec(rank=8), True, 2 * 2, 2 / 2 + 2),
        (LoraSpec(rank=8), False, 2, 2 / 2 + 2),
    ],
)
def test_weights_come_from_the_host_in_the_dtype_that_they_are_kept_in(
    lora: LoraSpec | None, reshards: bool, trained: float, scored: float
) -> None:
    """Bytes a parameter and microbatch: masters are float32, the base of adapters and a reference bfloat16. The policy scores
    half of the samples. A slow way from the host leaves nothing else to see."""
    slow = evolve(plan_context().device, host=1e8)
    context = evolve(plan_context(), as_configured=True, device=slow, world_size=1, lora=lora)
    (option,) = plan(context, Fsdp2Config(cpu_offload=True, reshard_after_forward=reshards))
    seconds = option.seconds
    assert seconds["training"] / seconds["log-probabilities"] == pytest.approx(trained / scored, rel=0.1)
