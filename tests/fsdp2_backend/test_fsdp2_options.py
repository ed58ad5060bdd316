"""Provider, options and learning-rate schedule."""

import json
import shutil
import subprocess
import sys

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec
from rlcore.torchkit.schedule import learning_rate
from rlcore_fsdp2 import provider
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config, OptimizerConfig, ScheduleConfig


def test_provider_imports_nothing_heavy():
    code = (
        "import sys, rlcore_fsdp2.provider as p; p.PROVIDER.unavailable(); print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_usable_here():
    assert provider.PROVIDER.unavailable() is None


def rates(schedule: ScheduleConfig, num_steps: int) -> list[float]:
    return [learning_rate(1.0, schedule, step, num_steps) for step in range(num_steps + 2)]


def test_schedules():
    assert rates(ScheduleConfig(), 2) == [1.0, 1.0, 1.0, 1.0]
    assert rates(ScheduleConfig(warmup_steps=2), 2) == [0.5, 1.0, 1.0, 1.0]
    linear = ScheduleConfig(warmup_steps=2, decay="linear", min_learning_rate_ratio=0.2)
    assert rates(linear, 6) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates(ScheduleConfig(decay="cosine"), 2) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert rates(ScheduleConfig(warmup_steps=4, decay="cosine"), 2) == [0.25, 0.5, 0.75, 1.0]


@pytest.fixture
def context(model_directory):
    model = ModelSpec(path=str(model_directory()))
    return CheckContext(model=model, device="cpu", world_size=1, max_sequence_length=512)


def test_defaults_have_no_problem(context):
    assert list(check(context, Fsdp2Config())) == []


def test_every_option_out_of_range_is_reported_at_once(context):
    config = Fsdp2Config(
        optimizer=OptimizerConfig(learning_rate=0.0, betas=(1.0, -0.1), eps=0.0, weight_decay=-1.0, max_grad_norm=-1.0),
        schedule=ScheduleConfig(warmup_steps=-1, min_learning_rate_ratio=1.5),
        collective_timeout_s=0.0,
    )
    paths = [problem.path.removeprefix("trainer.fsdp2.") for problem in check(context, config)]
    assert paths == [
        *(f"optimizer.{name}" for name in ("learning_rate", "betas[0]", "betas[1]", "eps", "weight_decay", "max_grad_norm")),
        "schedule.warmup_steps",
        "schedule.min_learning_rate_ratio",
        "schedule.min_learning_rate_ratio",
        "collective_timeout_s",
    ]


def test_compiling_needs_a_compiler(context, monkeypatch):
    config = Fsdp2Config(compile_layers=True)
    monkeypatch.setattr(shutil, "which", {"clang++": "/usr/bin/clang++"}.get)
    assert list(check(context, config)) == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [problem.path for problem in check(context, config)] == ["trainer.fsdp2.compile_layers"]
    assert list(check(context, Fsdp2Config())) == []


def test_model_problems(context, model_directory, tmp_path):
    long = [str(problem) for problem in check(evolve(context, max_sequence_length=513), Fsdp2Config())]
    assert len(long) == 1
    assert "max_position_embeddings = 512; expected at least 513" in long[0]
    half = evolve(context, model=ModelSpec(path=context.model.path, dtype="float16"))
    assert [problem.path for problem in check(half, Fsdp2Config())] == ["model.dtype"]
    shutil.copytree(context.model.path, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    broken = evolve(context, model=ModelSpec(path=str(tmp_path / "model")))
    texts = [str(problem) for problem in check(broken, Fsdp2Config())]
    assert any("GPT2LMHeadModel" in text for text in texts)
    assert any("no weights" in text for text in texts)
