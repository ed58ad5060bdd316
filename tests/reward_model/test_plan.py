"""A reward model's memory on a device follows from its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from trainer_plans import MODEL, plan_context
from transformers import AutoModelForSequenceClassification

from rlcore_reward_model.config import RewardModelConfig
from rlcore_reward_model.plan import plan
from rlcore_torchkit.testing.models import make_model

GIB = 2**30


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_weights_are_those_that_transformers_loads(tmp_path: Path, family: str) -> None:
    """Without a vocabulary's head, tied or not."""
    path = make_model(tmp_path / "model", family, head="value", hidden_size=128, max_length=64)
    loaded = AutoModelForSequenceClassification.from_pretrained(path)
    expected = sum(one.numel() for one in loaded.parameters())
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        config: Any = {"path": str(path), "device": "cuda", "dtype": dtype}
        (option,) = plan(plan_context(), RewardModelConfig(**config))
        assert option.memory["reward model's weights"] == pytest.approx(item * expected, rel=0.01)


def test_what_it_works_with_grows_with_batch_and_length_up_to_the_models_own(tmp_path: Path) -> None:
    def work(length: int = 2048, **options: Any) -> int:
        config = RewardModelConfig(path=str(tmp_path), device="cuda", **options)
        (option,) = plan(evolve(plan_context(), max_sequence_length=length), config)
        assert option.memory["reward model's weights"] > 2e9
        return option.memory["reward model's work"] - GIB

    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 4096}))
    # Hidden states and an MLP of 32,768 tokens in float32, and 16 masks of 2,048 x 2,048.
    assert work() == 16 * (2048 * (6 * 2048 + 3 * 8192) * 4 + 2048**2 * 5)
    assert work(max_batch=8) == work() // 2
    assert work(dtype="bfloat16") < work()
    assert work(4096) == work(8192) > 2 * work()


def test_on_a_cpu_it_has_nothing_and_an_unknown_size_is_said(tmp_path: Path) -> None:
    assert plan(plan_context(), RewardModelConfig(path="org/name")) == ()
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    for path in ("org/name", str(tmp_path)):
        (option,) = plan(plan_context(), RewardModelConfig(path=path, device="cuda"))
        assert option.memory == {}
        assert f"the size of {path} is not known" in option.assumptions[0]
