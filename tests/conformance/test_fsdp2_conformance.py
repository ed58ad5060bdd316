"""rlcore-fsdp2 passes the conformance kit, for every architecture that it names."""

import pytest
import torch
from attrs import evolve

from rlcore_conformance import TrainerConformance
from rlcore_conformance.references.fixtures import tiny_model
from rlcore_conformance.trainers.trainer_numerics import TrainerNumerics
from rlcore_fsdp2.provider import PROVIDER


class Fsdp2Conformance(TrainerConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER


class TestFsdp2(Fsdp2Conformance):
    """A dense model with tied embeddings."""


@pytest.mark.wide
class TestFsdp2MixtureOfExperts(Fsdp2Conformance):
    """Experts, and embeddings that are not tied."""

    @pytest.fixture
    def model(self, tmp_path_factory):
        return tiny_model(tmp_path_factory, seed=0, architecture="qwen3_moe", tied=False)


@pytest.mark.wide
class TestFsdp2Bfloat16(TrainerNumerics):
    """As a trainer that has no float32 would pass."""

    @pytest.fixture
    def provider(self):
        return evolve(PROVIDER, dtypes={"bfloat16"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFsdp2Cuda(Fsdp2Conformance):
    @pytest.fixture
    def device(self):
        return "cuda"
