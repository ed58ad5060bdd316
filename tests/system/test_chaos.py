"""Faults of all kinds at random moments: the run goes on, or says what stopped it and is resumed, and has the same metrics.

`make chaos` has many of them, in all layouts; the suite one, in one process.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model

from .chaos_faults import CLOCK_MODULE, FAULTS, mount, unmount
from .chaos_run import ChaosRun
from .system_support import DIGITS, Workplace, close, read_metrics

NUM_FAULTS = int(os.environ.get("RLCORE_FAULTS", "1"))
SEED = int(os.environ.get("RLCORE_SEED", "0"))
COMMON = (
    "checkpoint.every_n_steps=2",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "evaluation.every_n_steps=3",
    "logging.rollouts_every_n_steps=3",
    "model.dtype=float32",
    "run.device=cpu",
)
RAY = (
    "cluster.gpus_per_node=2",
    "cluster.object_store_mib=100",
    "cluster.max_restarts=100",
    "cluster.call_timeout_s=60",
    "cluster.straggler_timeout_s=20",
)
LAYOUTS = {
    "one process": ("trainer.name=fsdp2", "generator.name=transformers"),
    "two ranks": ("trainer.name=fsdp2", "generator.name=transformers", *RAY),
    "stages and engines": (
        "trainer.name=megatron",
        "trainer.megatron.pipeline_parallel=2",
        "generator.name=vllm",
        "generator.vllm.cpu_kv_cache_gib=0.1",
        "refit.channel=shared_memory",
        *RAY,
    ),
}
AHEAD = "async.max_staleness=1"
LAYOUTS |= {f"{name} ahead": (*options, AHEAD) for name, options in LAYOUTS.items()}
KINDS = list(filter(None, os.environ.get("RLCORE_KINDS", "").split(","))) or list(FAULTS)
CHOSEN = os.environ.get("RLCORE_LAYOUTS", "one process").split(",")
FAULTS_PER_RUN = 10
STARTS = range(0, NUM_FAULTS, FAULTS_PER_RUN)
RUNS = [(SEED + place, min(FAULTS_PER_RUN, NUM_FAULTS - start)) for place, start in enumerate(STARTS)]
"""The seed of each, and its faults."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rlc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_disk(workplace: Workplace) -> Iterator[None]:
    """A file system of its own for the runs, where this machine allows that."""
    runs = workplace.folder / "runs"
    runs.mkdir()
    mounted = mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(runs))
    yield
    if mounted:
        unmount(runs)


@pytest.mark.wide
@pytest.mark.timeout(1200 + 400 * FAULTS_PER_RUN)
@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize(("seed", "num_faults"), RUNS)
@pytest.mark.parametrize("layout", CHOSEN)
def test_it_comes_through_with_the_metrics_of_an_undisturbed_run(
    workplace: Workplace, temporary: Path, layout: str, seed: int, num_faults: int
) -> None:
    """One whose generation runs ahead is compared with a replay of its schedule, which has its figures to rounding."""
    folder = workplace.folder
    # The engine's attention on CPU takes heads of at least 32.
    model = make_model(folder / "wide", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CLOCK_MODULE)
    arguments = ["grpo.toml", *COMMON, *LAYOUTS[layout], f"model.path={model}"]
    chaos = ChaosRun(
        folder=folder,
        temporary=temporary,
        arguments=[*arguments, "run.name=chaos"],
        directory=workplace.run("chaos"),
        seed=seed,
    )
    has_engines = "generator.name=vllm" in LAYOUTS[layout]
    chaos.run(num_faults, [kind for kind in KINDS if has_engines or kind != "kill engine"])
    for (kind, outcome), number in sorted(Counter((each.kind, each.outcome) for each in chaos.outcomes).items()):
        print(f"| {layout} | {kind} | {outcome} | {number} |")
    assert not chaos.problems, "\n\n".join(chaos.problems)
    run, is_ahead = workplace.run("chaos"), AHEAD in LAYOUTS[layout]
    replayed = ("--replay-schedule", str(run / "schedule.jsonl")) if is_ahead else ()
    result = workplace.rlcore("train", *arguments, "run.name=whole", f"run.num_steps={chaos.num_steps}", *replayed)
    assert result.exit_code == 0, result.output
    found, expected = read_metrics(run), read_metrics(workplace.run("whole"))
    closest = partial(pytest.approx, rel=1e-3, abs=1e-4) if is_ahead else close
    assert found == [{name: closest(value) for name, value in record.items()} for record in expected]
    print(f"{layout}, seed {seed}: {len(chaos.outcomes)} faults, and the metrics of an undisturbed run", flush=True)
