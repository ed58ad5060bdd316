"""The command `rlcore plan`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from rlcore_plan.layouts import Candidate
    from rlcore_plan.plan import Plan

SHOWN = 10
"""Layouts of the table without --all."""
PHASES = ("generation", "log-probabilities", "training", "refit", "other")
PARTS = ("weights", "gradients", "optimizer state", "activations", "logits")
ENGINE_PARTS = ("engine's weights", "KV cache", "engine's reserve")
SHORT = {
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "context_parallel": "CP",
    "expert_parallel": "EP",
    "replicas": "x",
}
FLAGS = {"activation_checkpointing": "recompute", "full": "recompute", "reduce_every_microbatch": "reduce-often"}
"""Sizes, in the table's words."""
WIDTH_WITHOUT_TERMINAL = 320


@click.command("plan")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--gpus", required=True, metavar="NUMBERxKIND", help="Such as 8xH100; kinds are H100, H200 and GB200.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines, each with the GPUs that --gpus says.")
@click.option("--mean-response", type=float, help="Tokens of an answer on average; else half of the recipe's limit.")
@click.option("--mean-prompt", type=float, help="Tokens of a prompt on average; else half of the recipe's limit.")
@click.option("--all", "show_all", is_flag=True, help="Show every layout that fits.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan_command(
    recipe: Path,
    overrides: tuple[str, ...],
    gpus: str,
    nodes: int | None,
    mean_response: float | None,
    mean_prompt: float | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Predict memory and step time of a recipe on GPUs that need not be here.

    Tries the layouts of every installed trainer and generator, or of those that the recipe names, and ranks those that fit by
    the seconds of a step. Reads config.json of the model and nothing else of it.
    """
    from rlcore_plan.devices import parse_devices
    from rlcore_plan.plan import plan_recipe

    plan = plan_recipe(recipe, overrides, parse_devices(gpus, nodes), mean_prompt=mean_prompt, mean_response=mean_response)
    if as_json:
        click.echo(json.dumps(plan_json(plan, everything=show_all), indent=2))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(f"{plan.devices}: {len(plan.fitting):,} of {len(plan.candidates):,} layouts fit", highlight=False)
    console.print(plan_table(shown(plan, everything=show_all)))
    for line in lines_below(plan):
        click.echo(line)


def shown(plan: "Plan", *, everything: bool) -> "tuple[Candidate, ...]":
    """The layouts of the table: all that fit, or the fastest and with them the fastest of each trainer and placement."""
    if everything:
        return plan.fitting
    kinds: set[object] = set()
    first = []
    for number, one in enumerate(plan.fitting):
        kind = (one.trainer, one.generator, placement(one))
        if number < SHOWN or kind not in kinds:
            first.append(one)
        kinds.add(kind)
    return tuple(first)


def placement(candidate: "Candidate") -> str:
    """Return the placement of a layout's generator."""
    keys = dict(candidate.overrides)
    number = keys.get("cluster.generator_gpus_per_node")
    return "-" if candidate.generator is None else "colocated" if not number else f"{number} of {keys['cluster.gpus_per_node']}"


def layout(candidate: "Candidate", role: str, name: str) -> str:
    """The sizes of a role above 1, and what else its section says."""
    prefix = f"{role}.{name}."
    sizes = {key.removeprefix(prefix): value for key, value in candidate.overrides if key.startswith(prefix)}
    words = [f"{SHORT[key]}{value}" for key, value in sizes.items() if key in SHORT and value != 1]
    words += [
        FLAGS.get(word := key if value is True else str(value), word)
        for key, value in sizes.items()
        if key not in SHORT and key != "gpu_memory_utilization" and value not in (False, "none")
    ]
    return " ".join([name, *words])


def plan_table(candidates: "Sequence[Candidate]") -> "Table":
    """Seconds by phase, and GiB by part, of each layout."""
    from rich.table import Table

    from rlcore_plan.devices import GIB

    table = Table(box=None, pad_edge=False)
    generates = any(one.generator for one in candidates)
    parts = (*PARTS, *(ENGINE_PARTS if generates else ()))
    for name in ("trainer", "generator", "placement"):
        table.add_column(name, no_wrap=True)
    for name in (
        "step s",
        *PHASES,
        "trainer GiB",
        *parts[: len(PARTS)],
        *(("generator GiB",) if generates else ()),
        *parts[len(PARTS) :],
    ):
        table.add_column(name, justify="right")
    for one in candidates:
        memory = {
            **one.memory,
            "activations": one.memory.get("activations", one.memory.get("copies of the optimizer's step", 0)),
        }
        cells = [f"{memory.get(part, 0) / GIB:.1f}" for part in parts]
        roles = [layout(one, "trainer", one.trainer), layout(one, "generator", one.generator) if one.generator else "-"]
        own = [f"{one.trainer_bytes / GIB:.1f}", *cells[: len(PARTS)]]
        engine = [f"{one.generator_bytes / GIB:.1f}", *cells[len(PARTS) :]] if generates else []
        seconds = [f"{one.total:.1f}", *(f"{one.seconds.get(phase, 0.0):.1f}" for phase in PHASES)]
        table.add_row(*roles, placement(one), *seconds, *own, *engine)
    return table


def lines_below(plan: "Plan") -> Iterator[str]:
    """Yield the assumptions, and the best layout as overrides."""
    best = plan.fitting[0]
    yield ""
    yield "Assumed:"
    for line in (*plan.assumptions, *best.assumptions):
        yield f"  {line}"
    yield "  Trainer and generator are each at their own peak; a device holds that, and what the other one keeps there."
    yield ""
    yield "The fastest, to paste behind the recipe:"
    yield f"  {' '.join(override_words(best))}"


def override_words(candidate: "Candidate") -> list[str]:
    """KEY=VALUE of each override."""
    from rlcore.schema.describe import toml_literal

    return [f"{key}={value if isinstance(value, str) else toml_literal(value)}" for key, value in candidate.overrides]


def plan_json(plan: "Plan", *, everything: bool) -> dict[str, Any]:
    """The plan as plain data; bytes and seconds."""
    return {
        "devices": {"kind": plan.devices.spec.name, "nodes": plan.devices.nodes, "per_node": plan.devices.per_node},
        "layouts": [
            {
                "trainer": one.trainer,
                "generator": one.generator,
                "step_s": one.total,
                "seconds": dict(one.seconds),
                "memory_bytes": dict(one.memory),
                "trainer_bytes": one.trainer_bytes,
                "generator_bytes": one.generator_bytes,
                "overrides": dict(one.overrides),
            }
            for one in shown(plan, everything=everything)
        ],
        "assumptions": [*plan.assumptions, *plan.fitting[0].assumptions],
    }
