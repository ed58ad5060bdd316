"""Sizes of models that are known, and what layouts are chosen for."""

from attrs import evolve

from rlcore_megatron.layouts.layout_check import AUTO_SIZES
from rlcore_megatron.layouts.memory import Workload
from rlcore_megatron.setup.config import MegatronConfig

GIB = 2**30
SMALL = {  # the shape of Qwen2.5-1.5B
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MIDDLE = {  # of Llama-3.1-8B
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LARGE = MIDDLE | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
EXPERTS = {  # of Qwen3-30B-A3B
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
AUTO = MegatronConfig(transformer_engine=True)
ONE = evolve(AUTO, **dict.fromkeys(AUTO_SIZES, 1))


def load_of(model: dict, world_size: int, memory_gib: int | None = 80, **options: object) -> Workload:
    options = {"max_sequence_length": 8192, **options}
    memory = None if memory_gib is None else memory_gib * GIB
    return Workload(world_size=world_size, model=model, device="cuda", memory_bytes=memory, **options)
