"""Models at saved checkpoints: transformers and PEFT load them, and they agree with the run's own export."""

from pathlib import Path

import pytest
import tomli
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .system_support import Workplace, expect_failure  # type: ignore[import-not-found]

OPTIONS = (
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "logging.rollouts_every_n_steps=0",
    "lora.rank=4",
    "optimizer.learning_rate=3e-2",
    "checkpoint.every_n_steps=1",
    "checkpoint.keep=4",
)
EXPORTS = ("exports.every_n_saves=2", 'exports.forms=["hf","peft"]')


def exported(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run / "weights")) for path in (run / "weights").glob("*/*"))


def test_models_of_every_second_save_are_those_that_other_tools_load(workplace: Workplace) -> None:
    run = workplace.train("grpo.toml", *OPTIONS, *EXPORTS, "run.num_steps=3", "checkpoint.export=hf")
    assert exported(run) == [f"step-00000{step}/{form}" for step in (2, 3) for form in ("adapter", "model")]
    last, before = (run / "weights" / f"step-00000{step}" for step in (3, 2))
    whole = load_file(run / "model" / "model.safetensors")
    found = load_file(last / "model" / "model.safetensors")
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    tokens = torch.tensor([[3, 4, 5, 6]])
    logits = []
    for step in (before, last):
        merged = AutoModelForCausalLM.from_pretrained(step / "model", dtype=torch.float32)(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(model_of(run), dtype=torch.float32)
        beside = PeftModel.from_pretrained(plain, step / "adapter")(tokens).logits
        torch.testing.assert_close(beside, merged, rtol=1e-4, atol=1e-4)
        logits.append(merged)
    assert not torch.equal(*logits)


def test_a_checkpoint_is_exported_after_the_run_as_it_was_beside_it(workplace: Workplace) -> None:
    run = workplace.train("grpo.toml", *OPTIONS, 'exports.forms=["hf","peft"]', "run.num_steps=2")
    for form, name, file in (("hf", "model", "model.safetensors"), ("peft", "adapter", "adapter_model.safetensors")):
        for step in (1, 2):
            output, beside = workplace.folder / f"{name}-{step}", run / "weights" / f"step-00000{step}" / name
            options = ("--step", str(step)) if step == 1 else ()
            result = workplace.rlcore("export", run, "--form", form, *options, "-o", output)
            assert (result.exit_code, result.stdout.strip()) == (0, str(output)), result.stderr
            assert (output / file).read_bytes() == (beside / file).read_bytes()
            assert (output / "config.json").exists() == (beside / "config.json").exists()
    expect_failure(workplace.rlcore("export", run), 2, "--output", "exists")
    expect_failure(workplace.rlcore("export", run, "--step", "7"), 6, "--step", "step-000001, step-000002")
    expect_failure(workplace.rlcore("export", workplace.folder), 2, "RUN", "recipe.toml")


def model_of(run: Path) -> str:
    """The model that a run begins with."""
    return str(tomli.loads((run / "recipe.toml").read_text())["model"]["path"])


def test_a_resumed_run_keeps_earlier_models_and_the_oldest_go(workplace: Workplace) -> None:
    options = (*OPTIONS, 'exports.forms=["peft"]', "exports.keep=2")
    run = workplace.train("grpo.toml", *options, "run.num_steps=2")
    kept = (run / "weights" / "step-000001" / "adapter").stat().st_mtime_ns
    assert exported(run) == ["step-000001/adapter", "step-000002/adapter"]
    result = workplace.rlcore(
        "train", "grpo.toml", "--resume", "--allow-changes", *options, "run.num_steps=3", "exports.keep=3"
    )
    assert result.exit_code == 0, result.stderr
    assert exported(run) == [f"step-00000{step}/adapter" for step in (1, 2, 3)]
    assert (run / "weights" / "step-000001" / "adapter").stat().st_mtime_ns == kept
    result = workplace.rlcore("train", "grpo.toml", "--resume", "--allow-changes", *options, "run.num_steps=4")
    assert result.exit_code == 0, result.stderr
    assert exported(run) == [f"step-00000{step}/adapter" for step in (3, 4)]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (('exports.forms=["peft"]',), ("exports.forms", "[lora]")),
        (("exports.every_n_saves=1", "checkpoint.every_n_steps=0", "checkpoint.at_end=false"), ("exports", "checkpoint")),
        (("exports.every_n_saves=0",), ("exports.every_n_saves",)),
        (("exports.forms=[]",), ("exports.forms",)),
    ],
)
def test_exports_that_cannot_be_are_refused(workplace: Workplace, overrides: tuple[str, ...], parts: tuple[str, ...]) -> None:
    expect_failure(workplace.rlcore("check", "grpo.toml", *overrides), 2, *parts)
