"""The tables of docs/plan.md: predictions of `rlcore plan` beside what was measured, and for large models.

As a script, writes both into the page.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen
from measured_plans import MEASURED

from rlcore_plan.devices import GIB, parse_devices
from rlcore_plan.layouts import Candidate
from rlcore_plan.plan import Plan, plan_recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "plan.md"
MEASURED_MARKS = ("<!-- measured -->\n", "<!-- end of measured -->\n")
LARGE_MARKS = ("<!-- large models -->\n", "<!-- end of large models -->\n")


def measured_table() -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield "| | GPUs | step s, measured | predicted | | trainer's peak GB, measured | predicted | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in MEASURED:
        seconds, size = row.predicted()
        memory = "| | " if row.peak_gb is None else f"{row.peak_gb:.1f} | {size:.1f} | {size / row.peak_gb - 1:+.0%}"
        number, kind = row.gpus.split("x")
        time = f"{row.step_s:.3g} | {seconds:.3g} | {seconds / row.step_s - 1:+.0%}"
        yield f"| [{row.name}]({row.source}) | {number} {kind} | {time} | {memory} |"


@frozen(kw_only=True)
class Large:
    """A model, and a step's work for it."""

    name: str
    number: int
    config: Mapping[str, Any]
    overrides: tuple[str, ...] = field(default=())


RECIPE = """
[model]
path = "model"

[algorithm]
name = "grpo"

[algorithm.grpo]
kl_coefficient = 0.01

[environment]
name = "math"

[rollout]
samples_per_prompt = 16
max_prompt_tokens = 1024
max_response_tokens = 7168

[training]
prompts_per_step = 256
minibatches_per_step = 4
max_tokens_per_microbatch = 8192
"""
MEAN_RESPONSE = 2000.0
KINDS = ("H100", "H200", "GB200")
LARGE = (
    Large(
        name="Llama-3.3-70B",
        number=64,
        config={
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    Large(
        name="Qwen3-235B-A22B",
        number=128,
        config={
            "model_type": "qwen3_moe",
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
    ),
    Large(
        name="DeepSeek-V3",
        number=512,
        config={
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
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
        overrides=("generator.vllm.quantization=fp8",),
    ),
)
"""What their config.json say of sizes."""


def large_plan(model: Large, kind: str, directory: Path) -> Plan:
    """The plan of the recipe for a model; ConfigError where nothing fits."""
    folder = directory / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE)
    return plan_recipe(recipe, model.overrides, parse_devices(f"{model.number}x{kind}", None), mean_response=MEAN_RESPONSE)


def large_table() -> Iterator[str]:
    """The lines of the table in Markdown."""
    from rlcore_plan.command import PHASES

    yield f"| | GPUs | trainer | generator | placement | step s | {' | '.join(PHASES)} | trainer GiB | generator GiB |"
    yield "|---" * (8 + len(PHASES)) + "|"
    for model in LARGE:
        for kind in KINDS:
            yield large_row(model, kind)


def large_row(model: Large, kind: str) -> str:
    """The line of a model on devices of a kind."""
    return f"| {model.name} | {model.number} {kind} | {_large_cells(model, kind)} |"


def _large_cells(model: Large, kind: str) -> str:
    from rlcore.spi import ConfigError
    from rlcore_plan.command import PHASES, layout, placement

    with tempfile.TemporaryDirectory() as scratch:
        try:
            best: Candidate = large_plan(model, kind, Path(scratch)).fitting[0]
        except ConfigError as error:
            (problem,) = error.problems
            return f"does not fit: {problem.remedy}" + " |" * (5 + len(PHASES))
    sizes = (layout(best, "trainer", best.trainer), layout(best, "generator", str(best.generator)), placement(best))
    seconds = (f"{best.total:.0f}", *(f"{best.seconds[phase]:.1f}" for phase in PHASES))
    return " | ".join((*sizes, *seconds, f"{best.trainer_bytes / GIB:.0f}", f"{best.generator_bytes / GIB:.0f}"))


def with_measured(document: str) -> str:
    """The document with the table of measured plans in it."""
    return _with_table(document, MEASURED_MARKS, measured_table())


def written(document: str) -> str:
    """The document with both tables in it."""
    return _with_table(with_measured(document), LARGE_MARKS, large_table())


def large_rows(document: str) -> list[str]:
    """The document's lines of large models."""
    begin, end = LARGE_MARKS
    return document.partition(begin)[2].partition(end)[0].strip().splitlines()[2:]


def _with_table(document: str, marks: tuple[str, str], lines: Iterator[str]) -> str:
    begin, end = marks
    text = "\n".join(lines)
    return re.sub(f"{begin}.*{end}", f"{begin}\n{text}\n\n{end}", document, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
