"""Checks of a trainer that trains adapters."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlcore.spi import LoraSpec, Provider, TokenBatch, capabilities
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import reference_logprobs
from rlcore_conformance.references.tensors import Values, collect
from rlcore_conformance.trainers.trainer_fixtures import (
    OpenTrainer,
    TrainerFixtures,
    TrainerUnderTest,
    assert_resumes,
    export_request,
)

PREFIX = "base_model.model."


class TrainerLora(TrainerFixtures):
    """Adapters train, the weights below them stay, and what is exported is both."""

    @pytest.fixture
    def lora(self) -> LoraSpec:
        """Adapters of every linear layer; a recipe's default targets."""
        return LoraSpec(rank=3, alpha=6.0)

    @pytest.fixture
    def lora_trainer(self, provider: Provider, open_trainer: OpenTrainer, lora: LoraSpec) -> Iterator[TrainerUnderTest]:
        """A fresh trainer of adapters."""
        require(provider, capabilities.LORA)
        with open_trainer(lora=lora, needs_reference=True) as trainer:
            yield trainer

    def test_adapters_begin_without_effect(self, lora_trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """Policy, reference and export are the model, until a step moves the policy and the export alone."""
        expected, _ = reference_logprobs(lora_trainer.policy(), batch, 1.0)
        for model in ("policy", "reference"):
            lora_trainer.assert_near(lora_trainer.logprobs((batch,), model=model)[0], expected)
        (before,) = lora_trainer.logprobs((batch,), model="reference")
        lora_trainer.step((batch,))
        expected, _ = reference_logprobs(lora_trainer.policy(1), batch, 1.0)
        (policy,) = lora_trainer.logprobs((batch,), 1)
        lora_trainer.assert_near(policy, expected)
        assert (policy != before).any(), "the policy did not move"
        (same,) = lora_trainer.logprobs((batch,), 1, model="reference")
        np.testing.assert_array_equal(same, before, err_msg="the reference is the policy with its adapters")

    def test_weights_change_by_low_rank_products(
        self, lora_trainer: TrainerUnderTest, lora: LoraSpec, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """Weights with an adapter change by alpha / rank · B A, as saved for PEFT; all others stay bit by bit."""
        initial = lora_trainer.weights()
        for version in range(2):
            weights = lora_trainer.outcome((batch,), version).weights
        products = saved_products(lora_trainer, lora, tmp_path)
        assert products, "adapter_model.safetensors is empty"
        for name, after in weights.items():
            if name not in products:
                np.testing.assert_array_equal(after, initial[name], err_msg=f"{name} has no adapter and moved")
                continue
            assert products[name].any(), f"{name} has an adapter and did not move"
            np.testing.assert_allclose(after, initial[name] + products[name], rtol=0, atol=1e-5, err_msg=name)
        assert products.keys() <= weights.keys()

    def test_resumed_adapters_take_the_step_that_would_have_followed(
        self, open_trainer: OpenTrainer, lora: LoraSpec, lora_trainer: TrainerUnderTest, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """Adapters and their moments come back, on the same model."""
        assert_resumes(lora_trainer, partial(open_trainer, lora=lora, needs_reference=True), batch, tmp_path)

    def test_adapters_are_exported_apart(
        self, lora_trainer: TrainerUnderTest, provider: Provider, lora: LoraSpec, batch: TokenBatch
    ) -> None:
        """Beside the weights that the run began with, or alone; merged into these they are what is exported else."""
        require(provider, capabilities.ADAPTER_REFIT)
        initial = lora_trainer.weights()
        for version in range(2):
            weights = lora_trainer.outcome((batch,), version).weights
        apart, alone = (
            collect(lora_trainer.handle.export_weights(export_request(2, adapters=how))) for how in ("apart", "alone")
        )
        assert list(apart) == [*initial, *alone], "the model's weights come first, and then adapters"
        for name, value in alone.items():
            np.testing.assert_array_equal(apart[name], value, err_msg=name)
        for name, before in initial.items():
            np.testing.assert_array_equal(apart[name], before, err_msg=name)
            layer = name.removesuffix("weight")
            a, b = (alone.get(f"{layer}{key}") for key in ("lora_A.weight", "lora_B.weight"))
            product = 0.0 if a is None or b is None else lora.scale * (b @ a)
            np.testing.assert_allclose(before + product, weights[name], rtol=0, atol=1e-5, err_msg=name)
        assert any(value.any() for name, value in alone.items() if name.endswith("lora_B.weight")), "no adapter moved"


def saved_products(trainer: TrainerUnderTest, lora: LoraSpec, directory: Path) -> Values:
    """alpha / rank · B A of each layer in the PEFT directory that the trainer writes, by the weight's name."""
    from safetensors.numpy import load_file

    trainer.save(directory, "peft")
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", lora.rank, lora.alpha)
    tensors = load_file(directory / "adapter_model.safetensors")
    products = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            products[f"{name.removeprefix(PREFIX).removesuffix('.lora_A.weight')}.weight"] = lora.scale * (b @ a)
    return products
