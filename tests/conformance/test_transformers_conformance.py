"""rlcore-transformers passes the conformance kit."""

import pytest
import torch

from rlcore_conformance import GeneratorConformance
from rlcore_conformance.references.fixtures import tiny_model
from rlcore_transformers.provider import PROVIDER


class TransformersConformance(GeneratorConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER


class TestTransformers(TransformersConformance):
    """A dense model with tied embeddings."""


@pytest.mark.wide
class TestTransformersMixtureOfExperts(TransformersConformance):
    """Experts, and embeddings that are not tied."""

    @pytest.fixture
    def model(self, tmp_path_factory):
        return tiny_model(tmp_path_factory, seed=0, architecture="qwen3_moe", tied=False)

    @pytest.fixture
    def other_model(self, tmp_path_factory):
        return tiny_model(tmp_path_factory, seed=1, architecture="qwen3_moe", tied=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTransformersCuda(TransformersConformance):
    @pytest.fixture
    def device(self):
        return "cuda"
