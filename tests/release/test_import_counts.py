"""Counts of imported recipes: which recipes a checkout has, what becomes of each, and the document's part."""

from pathlib import Path

import pytest

from .conftest import ROOT, script

POLICY = "policy: {model_name: %s, train_global_batch_size: 8, dtensor_cfg: {enabled: true, tensor_parallel_size: %d}}\n"
REST = "sft: {max_num_steps: 2, brand_new: 1}\ncluster: {num_nodes: 1, gpus_per_node: 2}\ndata: {train: {data_path: a/b}}\n"
SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
echo started > /tmp/rlcore-import-counts-must-not-be-there || true
size=${SIZE:-8}
DATA=(data.train_batch_size=${size} "data.train_files=$NEEDED/train.parquet")
date 2>/dev/null | tee log.txt
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer "${DATA[@]}" model_engine=megatron ~critic \\
    trainer.logger='["console"]' "$@" | tee run.log
"""


@pytest.fixture(scope="module")
def counts():
    return script("import_counts")


@pytest.fixture
def nemo_rl(tmp_path: Path) -> Path:
    """Two recipes that are imported, three that are refused, and a fragment."""
    configs = tmp_path / "examples" / "configs"
    configs.mkdir(parents=True)
    for name, model, size in (
        ("one", "acme/small", 1),
        ("two", "acme/other", 2),
        ("three", "acme/small", 3),
        ("none", "null", 1),
    ):
        (configs / f"{name}.yaml").write_text(POLICY % (model, size) + REST)
    (configs / "ppo.yaml").write_text("policy: {model_name: x}\nppo: {seed: 1}\n")
    (configs / "fragment.yaml").write_text("sft: {seed: 1}\n")
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n")
    return tmp_path


def test_each_recipe_passes_or_has_a_reason(counts, nemo_rl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = counts.problem_of
    monkeypatch.setattr(
        counts, "problem_of", lambda found, name, scratch: checked(found, name, scratch) or ("wrong" if "two" in name else "")
    )
    found = counts.counted("NeMo-RL", nemo_rl, tmp_path)
    assert (found.commit, found.recipes, found.imported, found.passed) == ("0123456", 5, 2, 1)
    assert sorted(found.refused) == [
        "policy.dtensor_cfg.tensor_parallel_size: expected sizes whose product divides the trainer's 2 ranks; it is 3",
        "policy.model_name: expected a model",
        "the table ppo: a critic has its own options: write [algorithm.ppo] and [critic]",
    ]
    assert found.wrong == {"configs/two.yaml": "wrong"}
    assert dict(found.unknown) == {"sft.brand_new": 2}
    assert "| NeMo-RL | 0123456 | 5 | 2 | 1 | 0 | 1 |" in counts.table([found], "2026-01-01").splitlines()


def test_bash_says_the_arguments_of_a_script_and_runs_nothing(counts, tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "ppo_trainer"
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "other.sh").write_text("python3 -m verl.trainer.main_eval data.x=1\n")
    (case,) = counts.verl_cases(tmp_path)
    assert case.overrides == (
        "data.train_batch_size=8",
        "data.train_files=/data/train.parquet",
        "model_engine=megatron",
        "~critic",
        'trainer.logger=["console"]',
    )
    assert case.file == tmp_path / "verl" / "trainer" / "config" / "ppo_trainer.yaml"
    assert not Path("/tmp/rlcore-import-counts-must-not-be-there").exists()


def test_the_document_has_the_scripts_part(counts) -> None:
    document = (ROOT / "docs" / "importing.md").read_text()
    part = document.partition(counts.BEGIN)[2].partition(counts.END)[0]
    head = next(line for line in counts.table([], "").splitlines() if line.startswith("| Library"))
    assert head in part.splitlines()
    assert {line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")} == {"Library", *counts.LIBRARIES}
