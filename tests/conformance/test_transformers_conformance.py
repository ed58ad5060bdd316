"""rlcore-transformers passes the conformance kit."""

import pytest
import torch

from rlcore.spi import ModelSpec
from rlcore.testing import GeneratorConformance
from rlcore.testing.models import make_model
from rlcore_transformers.provider import PROVIDER


class TransformersConformance(GeneratorConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER


class TestTransformers(TransformersConformance):
    """A dense model with tied embeddings."""


class TestTransformersMixtureOfExperts(TransformersConformance):
    """Experts, and embeddings that are not tied."""

    @pytest.fixture
    def model(self, tmp_path_factory):
        return ModelSpec(path=str(_mixture_of_experts(tmp_path_factory, 0)))

    @pytest.fixture
    def other_model(self, tmp_path_factory):
        return ModelSpec(path=str(_mixture_of_experts(tmp_path_factory, 1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTransformersCuda(TransformersConformance):
    @pytest.fixture
    def device(self):
        return "cuda"


def _mixture_of_experts(tmp_path_factory, seed):
    directory = tmp_path_factory.getbasetemp() / f"conformance-mixture-of-experts-{seed}"
    return directory if directory.exists() else make_model(directory, "qwen3_moe", tied=False, seed=seed)
