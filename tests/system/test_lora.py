"""Runs that train adapters: from the recipe to files that transformers and PEFT load."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import RefitRequest, RefitResult
from rlcore_serve.serving import find_target, prepare_serving, served_model
from rlcore_torchkit.testing.models import make_model

from .system_support import (  # type: ignore[import-not-found]
    DIGITS,
    STEPS_ALONE,
    Workplace,
    expect_failure,
    read_metrics,
)

OPTIONS = (
    "trainer.name=fsdp2",
    "generator.name=transformers",
    "run.num_steps=3",
    "run.seed=2",
    "lora.rank=4",
    "optimizer.learning_rate=3e-2",
    "algorithm.grpo.kl_coefficient=0.01",
    *STEPS_ALONE,
)


VLLM = ("generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are as wide as vLLM's attention on CPU takes."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements that each refit brings."""
    sizes: list[int] = []
    refit = GeneratorHandle.refit

    def watched(handle: GeneratorHandle, request: RefitRequest) -> RefitResult:
        sizes.append(sum(math.prod(spec.shape) for spec in request.weights.specs))
        return refit(handle, request)

    monkeypatch.setattr(GeneratorHandle, "refit", watched)
    return sizes


@pytest.mark.wide(keep=["megatron-vllm-auto"])
@pytest.mark.parametrize("adapters", ["merged", "auto"])
@pytest.mark.parametrize("generator", [(), VLLM], ids=["transformers", "vllm"])
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_adapters_reach_the_generator_and_the_disk(
    workplace: Workplace,
    wide: Path,
    sent: list[int],
    trainer: str,
    generator: tuple[str, ...],
    adapters: str,
) -> None:
    """The generator samples from the trainer's policy in every step, whether adapters travel in the weights or without them;
    the exported adapters are what was trained."""
    options = ("checkpoint.export=peft", "run.name=adapters", f"trainer.name={trainer}", f"refit.adapters={adapters}")
    workplace.train("grpo.toml", *OPTIONS, *generator, *options, f"model.path={wide}")
    metrics = read_metrics(workplace.run("adapters"))
    assert [step["step"] for step in metrics] == [1, 2, 3]
    assert max(step["token_mult_prob_error"] for step in metrics) < 1.0001, "the generator has other weights"
    assert metrics[-1]["kl"] > 1e-4, "the adapters did not move the policy"
    directory = workplace.run("adapters") / "adapter"
    assert json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"] == str(wide)
    trained = load_file(directory / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in trained.items() if name.endswith("lora_B.weight"))
    of_model = sum(tensor.numel() for tensor in load_file(wide / "model.safetensors").values())
    of_adapters = sum(tensor.numel() for tensor in trained.values())
    first, *others = sent
    assert first == of_model + (0 if adapters == "merged" else of_adapters)
    assert len(others) >= 2
    assert set(others) == {of_model if adapters == "merged" else of_adapters}


@pytest.mark.wide(keep=["fsdp2"])
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_a_run_begins_with_the_adapters_of_another(workplace: Workplace, model: Path, trainer: str) -> None:
    """They are its reference too, also where it is resumed when they are gone."""
    options = (*OPTIONS, f"trainer.name={trainer}")
    workplace.train("grpo.toml", *options, "checkpoint.export=peft", "run.name=first")
    begin = f"lora.init_from={workplace.run('first') / 'adapter'}"
    second = (begin, "checkpoint.export=hf", "checkpoint.at_end=true", "run.name=second")
    workplace.train("grpo.toml", *options, *second, "run.num_steps=1")
    assert abs(read_metrics(workplace.run("second"))[0]["kl"]) < 1e-6, "its reference is not what it began with"
    alone = (begin, f"reference.path={model}", "run.num_steps=1", "run.name=alone")
    workplace.train("grpo.toml", *options, *alone)
    assert read_metrics(workplace.run("alone"))[0]["kl"] > 1e-4, "it began with the model alone"
    other = workplace.rlcore("check", "grpo.toml", *options, begin, "lora.rank=8")
    expect_failure(other, 2, "adapter_config.json: found r = 4", "lora.rank = 8")
    workplace.train("grpo.toml", *options, *second, "run.name=baseline_run", "run.num_steps=2")
    shutil.rmtree(workplace.run("first"))
    merged = load_file(workplace.run("second") / "model" / "model.safetensors")
    assert not any("lora" in name for name in merged)
    target = find_target(str(workplace.run("second") / "checkpoints" / "step-000001"), None, print)
    exported = load_file(Path(served_model(prepare_serving(target, (), None), print)) / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in merged.items()), "the checkpoint is another model"
    workplace.train("grpo.toml", *options, *second, "run.num_steps=2", "--resume")
    last, expected = (read_metrics(workplace.run(name))[1] for name in ("second", "baseline_run"))
    assert last["kl"] == pytest.approx(expected["kl"], rel=1e-4, abs=1e-7)
    measured = workplace.rlcore(
        "eval", "grpo.toml", *options, begin, "--checkpoint", workplace.run("second") / "checkpoints" / "step-000002"
    )
    assert measured.exit_code == 0, measured.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ('lora.targets=["q_proj", "c_attn"]', ("lora.targets: found ", "c_attn", "q_proj, k_proj")),
        ("lora.init_from=nowhere", ("adapter_config.json: found ",)),
    ],
)
def test_bad_adapters_are_told_before_the_run(workplace: Workplace, option: str, words: tuple[str, ...]) -> None:
    expect_failure(workplace.rlcore("train", "grpo.toml", *OPTIONS, option), 2, *words)
