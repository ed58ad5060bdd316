"""A run one step behind, on Ray with vLLM engines of their own, killed at random moments: no prompt is lost and none repeated.

`make kills` kills it 50 times.
"""

import json
import os

import numpy as np
import pandas
import pytest

from rlcore_torchkit.testing.models import make_model

from .killed_run import KilledRun
from .system_support import DIGITS, Workplace, write_jsonl

NUM_KILLS = int(os.environ.get("RLCORE_KILLS", "2"))
NUM_STEPS = 5 * NUM_KILLS + 5
SUMS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(10, 100) for b in range(10, 100)]
AHEAD = (
    "async.max_staleness=1",
    "checkpoint.every_n_steps=2",
    "cluster.gpus_per_node=2",
    "cluster.placement=separate",
    "cluster.generator_gpus_per_node=1",
    "cluster.max_restarts=100",
    "cluster.object_store_mib=100",
    "data.train.path=sums.jsonl",
    "data.train.shuffle=false",
    "data.train.source=jsonl",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "generator.name=vllm",
    "generator.vllm.cpu_kv_cache_gib=0.1",
    "generator.vllm.max_num_seqs=8",
    "logging.rollouts_every_n_steps=1",
    "model.dtype=float32",
    "rollout.max_response_tokens=40",
    "run.device=cpu",
    f"run.num_steps={NUM_STEPS}",
    "run.name=killed",
)
"""Few samples at a time, and long ones: steps, refits and kills come in the midst of them."""


@pytest.mark.wide
@pytest.mark.timeout(600 + 120 * NUM_KILLS)
def test_no_prompt_is_lost_and_none_is_trained_on_twice(workplace: Workplace) -> None:
    folder = workplace.folder
    # The engine's attention on CPU takes heads of at least 32.
    model = make_model(folder / "wide", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)
    write_jsonl(folder / "sums.jsonl", SUMS)
    run = workplace.run("killed")
    killed = KilledRun(folder=folder, arguments=["grpo.toml", *AHEAD, f"model.path={model}"], directory=run, seed=NUM_KILLS)
    killed.run(NUM_KILLS)
    print(f"{dict(killed.kills)}, {killed.num_starts} starts")

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert max(line["async/staleness_max"] for line in lines) == 1
    assert (run / "summary.json").exists()
    samples = pandas.concat([pandas.read_parquet(run / "rollouts" / f"step-{line['step']:06d}.parquet") for line in lines])
    groups = samples.groupby(["step", "group"])["prompt"].agg(["first", "nunique", "size"])
    assert (set(groups["nunique"]), set(groups["size"])) == ({1}, {4})
    # In the order of the data, which is that in which groups begin.
    assert sorted(groups["first"]) == sorted(row["prompt"] for row in SUMS[: 4 * NUM_STEPS])
    began_with = [0, *(int(line["weight_version"]) for line in lines)]
    for sample in samples.itertuples():
        said = np.asarray(sample.weight_versions)[np.asarray(sample.loss_mask)]
        assert (np.diff(said) >= 0).all()
        assert began_with[max(0, sample.step - 2)] <= said[0]
        assert said[-1] <= began_with[sample.step - 1]
