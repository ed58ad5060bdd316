"""Norms of the gradients of exported tensors, against plain transformers and autograd in float32."""

from itertools import count

import pytest
from attrs import evolve
from gradient_norm_cases import BATCH, check_adapters, check_one_rank, check_pieces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_support import OPTIMIZER, make_backend

from rlcore.spi import CloseRequest
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model


@pytest.mark.parametrize(
    ("architecture", "tied", "options"),
    [
        ("qwen3", True, {}),
        ("qwen3_moe", False, {}),
        ("qwen3_moe", True, {"name": "muon"}),
        ("qwen3", False, {"moments": "8bit"}),
    ],
    ids=lambda value: str(value),
)
def test_one_rank_equals_autograd(architecture, tied, options, tmp_path):
    directory = make_model(tmp_path / "model", architecture, tied=tied)
    backend = make_backend(directory, optimizer=evolve(OPTIMIZER, **options))
    check_one_rank(backend, directory)
    backend.close(CloseRequest())


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_adapters_have_norms_of_their_own(architecture, tmp_path):
    made = []

    def make(context):
        made.append(MegatronBackend(context, MegatronConfig()))
        return made[0]

    check_adapters(make, make_model(tmp_path / "model", architecture, tied=architecture == "qwen3"), tmp_path)
    made[0].close(CloseRequest())


def test_norms_depend_on_no_microbatches(tmp_path):
    backend, versions = make_backend(make_model(tmp_path / "model", "qwen3_moe", tied=True)), count(step=2)
    cuts = st.sampled_from(("none", "microbatch", "piece"))
    length = BATCH.num_sequences - 1

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(order=st.permutations(range(BATCH.num_sequences)), cuts=st.lists(cuts, min_size=length, max_size=length))
    def check(order, cuts):
        check_pieces(backend, next(versions), order, cuts)

    check()
    backend.close(CloseRequest())
