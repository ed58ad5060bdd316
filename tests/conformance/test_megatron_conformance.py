"""rlcore-megatron passes the conformance kit, for a dense model and one with experts."""

from importlib.util import find_spec

import pytest
import torch

from rlcore_conformance import TrainerConformance
from rlcore_conformance.references.fixtures import tiny_model
from rlcore_megatron.provider import PROVIDER
from rlcore_megatron.setup.config import MegatronConfig


class MegatronConformance(TrainerConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER

    @pytest.fixture
    def config(self):
        return MegatronConfig()


class TestMegatron(MegatronConformance):
    """A dense model with tied embeddings."""


@pytest.mark.wide
class TestMegatronMixtureOfExperts(MegatronConformance):
    """Experts, and embeddings that are not tied."""

    @pytest.fixture
    def model(self, tmp_path_factory):
        return tiny_model(tmp_path_factory, seed=0, architecture="qwen3_moe", tied=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestMegatronCuda(MegatronConformance):
    @pytest.fixture
    def device(self):
        return "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs TransformerEngine")
class TestMegatronTransformerEngine(MegatronConformance):
    @pytest.fixture
    def device(self):
        return "cuda"

    @pytest.fixture
    def config(self):
        return MegatronConfig(transformer_engine=True)
