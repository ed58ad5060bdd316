"""A model whose routers are undecided: the trainer follows the generator's choice of experts, or makes others."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, STEPS_ALONE, Workplace, expect_failure, read_metrics  # type: ignore[import-not-found]

OPTIONS = (
    "trainer.name=megatron",
    "generator.name=transformers",
    "model.dtype=bfloat16",
    "run.num_steps=2",
    "training.prompts_per_step=16",
    "rollout.max_response_tokens=12",
    *STEPS_ALONE,
    "optimizer.learning_rate=1e-3",
)


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16 rounding often decides which experts a token goes to, and it rounds otherwise in another implementation."""
    directory = make_model(
        tmp_path_factory.mktemp("undecided") / "model", "qwen3_moe", alphabet=DIGITS, max_length=64, num_layers=3
    )
    weights = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            shared = 0.5 * torch.randn(1, weight.shape[1], generator=random)
            weights[name] = shared + 2e-3 * torch.randn(weight.shape, generator=random)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_replayed_routing_brings_trainer_and_generator_together(workplace: Workplace, undecided: Path) -> None:
    first = {}
    for replays in ("false", "true"):
        name = f"run.name=replay-{replays}"
        options = (*OPTIONS, f"model.path={undecided}", f"rollout.replay_routing={replays}", name)
        result = workplace.rlcore("train", "grpo.toml", *options)
        assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
        first[replays] = read_metrics(workplace.run(f"replay-{replays}"))[0]
    assert "routing_agreement" not in first["false"]
    assert 0.5 < first["true"]["routing_agreement"] < 0.99, "the routers are not undecided"
    assert first["false"]["token_mult_prob_error"] > 1.02
    assert first["true"]["token_mult_prob_error"] < 1.006


def test_both_sides_have_to_know_of_it(workplace: Workplace, undecided: Path) -> None:
    options = ("rollout.replay_routing=true", "trainer.name=megatron", "generator.name=transformers")
    result = workplace.rlcore("train", "grpo.toml", *options)
    expect_failure(result, 2, "rollout.replay_routing: found true, with the model ", "which has no experts")
