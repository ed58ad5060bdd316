"""A step's work for the plans of trainers and generators, to test them with."""

from rlcore.spi import DeviceSpec, PlanContext

MODEL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
"""The sizes of Llama-3.2-1B, untied."""
DEVICE = DeviceSpec(
    name="test",
    memory_bytes=80 * 2**30,
    flops=1e15,
    bandwidth=4e12,
    link=4e11,
    network=5e10,
    host=4e10,
    devices_per_node=8,
)


def plan_context() -> PlanContext:
    """A step of a model of a billion parameters on one machine."""
    return PlanContext(
        model=MODEL,
        dtype="bfloat16",
        device=DEVICE,
        world_size=8,
        local_size=8,
        is_shared=True,
        free_bytes=70 * 2**30,
        num_sequences=512,
        prompt_tokens=100.0,
        samples_per_prompt=8,
        response_lengths=(100.0, 400.0, 1000.0),
        max_sequence_length=2048,
        max_microbatch_tokens=8192,
        updates=2,
        policy_passes=0.5,
        reference_passes=1.0,
        reference=MODEL,
    )
