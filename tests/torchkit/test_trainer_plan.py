"""Plans of trainers use config.json and a step's work."""

import pytest
from attrs import evolve

from rlcore.spi import DeviceSpec, ModelError, OptimizerSpec, PlanContext
from rlcore_torchkit.trainer.step_costs import MEMORY, Layout, num_parameters
from rlcore_torchkit.trainer.trainer_plan import (
    NARROW_BYTES,
    crossing,
    planned_model,
    sent_copies,
    tokens_of,
    trainer_seconds,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}
DEVICE = DeviceSpec(
    name="one",
    memory_bytes=2**36,
    flops=1e15,
    bandwidth=4e12,
    link=4e11,
    network=5e10,
    host=4e10,
    devices_per_node=8,
)
CONTEXT = PlanContext(
    model=LLAMA,
    dtype="bfloat16",
    device=DEVICE,
    world_size=1,
    local_size=1,
    is_shared=False,
    free_bytes=2**36,
    num_sequences=64,
    prompt_tokens=10.0,
    samples_per_prompt=8,
    response_lengths=(10.0, 30.0),
    max_sequence_length=40,
    max_microbatch_tokens=128,
    updates=2,
    policy_passes=0.5,
    reference_passes=1.0,
)


def test_a_familys_config_is_read() -> None:
    assert planned_model(LLAMA).dims.num_kv_heads == 8
    assert planned_model({"text_config": LLAMA}).dims.hidden_size == 512
    assert planned_model(LLAMA | {"text_config": None}).dims.hidden_size == 512


@pytest.mark.parametrize("key", ["n_routed_experts", "num_local_experts", "num_experts"])
def test_experts_of_families_that_are_not_described_count(key: str) -> None:
    model = LLAMA | {"model_type": "unheard_of", key: 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    dims = planned_model(model | {"first_k_dense_replace": 1, "n_shared_experts": 2}).dims
    assert (dims.num_experts, dims.num_moe_layers, dims.shared_intermediate_size) == (16, 3, 128)


@pytest.mark.parametrize("model", [{"model_type": "llama"}, LLAMA | {"hidden_size": "wide"}, LLAMA | {"text_config": "none"}])
def test_a_config_without_sizes_is_refused(model: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        planned_model(model)


def test_a_rank_keeps_its_share_of_the_parts_that_are_sent() -> None:
    dims = planned_model(CONTEXT.model).dims
    assert sent_copies(CONTEXT, dims) == sent_copies(evolve(CONTEXT, delta_copies="whole"), dims) == {}
    (size,) = sent_copies(evolve(CONTEXT, delta_copies="parts", world_size=4), dims).values()
    assert size == int(2 * num_parameters(dims) / 4)


def test_tokens_are_those_of_the_step() -> None:
    tokens = tokens_of(CONTEXT)
    assert (tokens.number, tokens.squared, tokens.longest) == (64 * 30, 64 * (400 + 1600) / 2, 40)
    assert tokens_of(CONTEXT, 0.5).number == 32 * 30


def test_passes_and_updates_add_up() -> None:
    dims = planned_model(LLAMA).dims

    def seconds(context: PlanContext) -> dict[str, float]:
        return trainer_seconds(context, dims, Layout(), recomputes=False, state_bytes=1e6)

    both, policy = seconds(CONTEXT), seconds(evolve(CONTEXT, reference_passes=0.0))
    assert both["log-probabilities"] == pytest.approx(3 * policy["log-probabilities"])
    assert both["training"] == policy["training"] > 0
    assert seconds(evolve(CONTEXT, policy_passes=0.0, reference_passes=0.0))["log-probabilities"] == 0.0
    narrow = seconds(evolve(CONTEXT, optimizer=OptimizerSpec(moments="8bit")))["training"] - both["training"]
    traffic = CONTEXT.updates * NARROW_BYTES * num_parameters(dims) / CONTEXT.world_size
    assert narrow == pytest.approx(traffic / CONTEXT.device.bandwidth / MEMORY)


def test_dimensions_cross_machines_where_their_ranks_do() -> None:
    sizes = {"tensor": (8, 1), "context": (2, 8), "data": (1, 16)}
    assert crossing(sizes, 8) == {"context"}
    assert crossing(sizes, 16) == frozenset()
