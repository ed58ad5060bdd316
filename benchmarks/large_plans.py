"""What "auto" would choose for the largest models on many GPUs, from shapes alone: python benchmarks/large_plans.py [--write]

A prediction of the trainer's estimate, not a measurement. `--write` puts the table into docs/megatron.md.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.spi import ConfigError
from rlcore_megatron.layouts.auto_layout import choose
from rlcore_megatron.layouts.memory import Estimate, Workload, estimate
from rlcore_megatron.layouts.stages import layers_of_stages
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.dims import ModelDims

DOCUMENT = Path(__file__).parents[1] / "docs" / "megatron.md"
BEGIN, END = "<!-- large plans -->\n", "<!-- end of large plans -->\n"
GIB = 2**30
MEMORY = {"80 GB": 79 * GIB, "141 GB": 139 * GIB}
"""What CUDA reports of an H100 and of an H200."""
WORLD_SIZES, LENGTHS = (64, 256, 1024), (8192, 32768, 131072)
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "Qwen3-235B-A22B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "DeepSeek-V3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 2048,
        "mlp_only_layers": [0, 1, 2],
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
"""What their config.json say, under the keys of Llama and Qwen."""
SIZES = {"TP": "tensor_parallel", "EP": "expert_parallel", "CP": "context_parallel", "PP": "pipeline_parallel"}


def plan(model: Mapping[str, Any], world_size: int, memory_bytes: int, length: int) -> tuple[MegatronConfig, Estimate] | None:
    """The choice and what it is predicted to need, all layers being computed again; None where nothing fits."""
    config = MegatronConfig(recompute="full", transformer_engine=True)
    load = Workload(world_size=world_size, model=model, device="cuda", max_sequence_length=length, memory_bytes=memory_bytes)
    dims = ModelDims.of(model)
    assert dims is not None
    try:
        chosen = choose(config, load).config
    except ConfigError:
        return None
    return chosen, estimate(dims, chosen, load)


def cell(model: Mapping[str, Any], found: tuple[MegatronConfig, Estimate] | None) -> str:
    """Sizes above 1, the layers of stages and the prediction."""
    if found is None:
        return "does not fit"
    config, needed = found
    sizes = " ".join(f"{name}{getattr(config, key)}" for name, key in SIZES.items() if getattr(config, key) > 1)
    counts = sorted(set(layers_of_stages(config, model["num_hidden_layers"])))
    layers = f", {' or '.join(map(str, counts))} layers" if config.pipeline_parallel > 1 else ""
    return f"{sizes or 'data alone'}{layers}: {needed.total / GIB:.0f} GiB"


def table() -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield f"| | GPUs | tokens | {' | '.join(MEMORY)} |"
    yield "|---|---|---|" + "---|" * len(MEMORY)
    for name, model in MODELS.items():
        for world_size in WORLD_SIZES:
            for length in LENGTHS:
                cells = (cell(model, plan(model, world_size, memory, length)) for memory in MEMORY.values())
                yield f"| {name} | {world_size:,} | {length:,} | {' | '.join(cells)} |"


def written(document: str) -> str:
    """The document with the table in it."""
    pattern = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
    lines = "\n".join(table())
    return pattern.sub(lambda _: f"{BEGIN}\n{lines}\n\n{END}", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT.name}")
    if parser.parse_args().write:
        DOCUMENT.write_text(written(DOCUMENT.read_text()))
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
