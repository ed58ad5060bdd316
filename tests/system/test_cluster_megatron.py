"""The Megatron trainer in workers on Ray: the figures of one process, in layouts that take turns, also where a rank dies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_serve.serving import find_target, prepare_serving, served_model

from .system_support import Workplace, checkpoints, close, read_metrics  # type: ignore[import-not-found]

COMMON = (
    "training.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "checkpoint.every_n_steps=1",
    "evaluation.every_n_steps=2",
    "checkpoint.export=hf",
    "trainer.name=megatron",
)
NUM_STEPS = 10
LEGS = (
    (4, ("trainer.megatron.tensor_parallel=2", "trainer.megatron.pipeline_parallel=2", "cluster.gpus_per_node=4")),
    (NUM_STEPS, ("trainer.megatron.pipeline_parallel=2", "cluster.gpus_per_node=2")),
)
"""Layouts, and the step up to which each trains."""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    """One Ray for the module's runs."""
    with ray_session(RayConfig(gpus_per_node=4, object_store_mib=100), "cpu", None):
        yield


class Killer(threading.Thread):
    """Kills the last rank once it has trained two steps of the last leg."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_directory, self.killed = run, False

    def run(self) -> None:
        while (self.run_directory / "metrics.jsonl").read_bytes().count(b"\n") < LEGS[-2][0] + 3:
            time.sleep(0.02)
        log = (self.run_directory / "logs" / "rank-1.log").read_text()
        os.kill(int(log.rpartition("process ")[2].partition(")")[0]), signal.SIGKILL)
        self.killed = True


@pytest.mark.wide
def test_layouts_take_turns_and_a_rank_is_killed(workplace: Workplace) -> None:
    alone = workplace.train("grpo.toml", *COMMON, f"run.num_steps={NUM_STEPS}", "run.name=alone")
    run = workplace.run("run")
    killer = Killer(run)
    for number, (num_steps, layout) in enumerate(LEGS):
        if layout is LEGS[-1][1]:
            killer.start()
        resume = ["--resume"] if number else []
        result = workplace.rlcore("train", "grpo.toml", *COMMON, f"run.num_steps={num_steps}", *layout, *resume)
        assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
        assert result.stderr == ""
    killer.join(300)
    assert killer.killed
    assert "restart 1 of 3, from the newest checkpoint" in result.stdout
    for found, expected in zip(read_metrics(run), read_metrics(alone), strict=True):
        assert found == {name: close(value) for name, value in expected.items()}
    assert checkpoints(run) == checkpoints(alone)
    weights, expected = (load_file(folder / "model" / "model.safetensors") for folder in (run, alone))
    assert weights.keys() == expected.keys()
    # Adam divides by the gradient's own size: where that is near zero, rounding changes a step by percents of its length.
    assert all(torch.allclose(weights[name], tensor, atol=1e-3) for name, tensor in expected.items())
    served = served_model(prepare_serving(find_target(str(run), f"step-{NUM_STEPS:06d}", print), [], None), print)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(Path(served) / "model.safetensors").items())
