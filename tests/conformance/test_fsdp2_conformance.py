"""rlcore-fsdp2 passes the conformance kit, for every architecture that it names."""

import pytest
import torch

from rlcore.spi import ModelSpec
from rlcore.testing import TrainerConformance
from rlcore.testing.models import make_model
from rlcore_fsdp2.provider import PROVIDER


class Fsdp2Conformance(TrainerConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER


class TestFsdp2(Fsdp2Conformance):
    """A dense model with tied embeddings."""


class TestFsdp2MixtureOfExperts(Fsdp2Conformance):
    """Experts, and embeddings that are not tied."""

    @pytest.fixture
    def model(self, tmp_path_factory):
        directory = tmp_path_factory.getbasetemp() / "conformance-mixture-of-experts"
        if not directory.exists():
            make_model(directory, "qwen3_moe", tied=False)
        return ModelSpec(path=str(directory))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFsdp2Cuda(Fsdp2Conformance):
    @pytest.fixture
    def device(self):
        return "cuda"
