"""Norms of the gradients of exported tensors, against plain transformers and autograd in float32."""

from itertools import count

import pytest
from attrs import evolve
from fsdp2_support import OPTIMIZER, make_batch, make_config, step_request
from gradient_norm_cases import BATCH, check_adapters, check_one_rank, check_pieces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.spi import BoundError, CloseRequest
from rlcore_fsdp2.backend import Fsdp2Backend

SETTINGS = {"adamw": {}, "muon": {"name": "muon"}, "8bit": {"moments": "8bit"}}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_one_rank_equals_autograd(architecture, tied, model_directory, backend):
    directory = model_directory(architecture, tied=tied)
    check_one_rank(backend(directory), directory)


@pytest.mark.parametrize("kind", ["muon", "8bit"])
def test_norms_are_those_of_any_optimizer(kind, model_directory, backend):
    directory = model_directory("qwen3_moe", tied=False)
    check_one_rank(backend(directory, optimizer=evolve(OPTIMIZER, **SETTINGS[kind])), directory)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_adapters_have_norms_of_their_own(architecture, model_directory, tmp_path):
    made = []

    def make(context):
        made.append(Fsdp2Backend(context, make_config()))
        return made[0]

    check_adapters(make, model_directory(architecture, tied=architecture == "qwen3"), tmp_path)
    made[0].close(CloseRequest())


def test_norms_depend_on_no_microbatches(backend):
    trainer, versions = backend(), count(step=2)
    cuts = st.sampled_from(("none", "microbatch", "piece"))
    length = BATCH.num_sequences - 1

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(order=st.permutations(range(BATCH.num_sequences)), cuts=st.lists(cuts, min_size=length, max_size=length))
    def check(order, cuts):
        check_pieces(trainer, next(versions), order, cuts)

    check()


def test_a_working_copy_has_the_norms_of_its_masters(backend):
    result = backend(dtype="bfloat16").train_step(evolve(step_request((BATCH,), BATCH.counts()), gradient_norms=True))
    assert sum(norm**2 for norm in result.gradient_norms.values()) ** 0.5 == pytest.approx(result.grad_norm, rel=1e-5)


def test_a_refused_step_is_refused_with_norms_too(backend):
    trainer, batch = backend(), make_batch(seed=1)
    request = evolve(step_request((batch,), batch.counts()), bounds={"tokens": 0.5}, gradient_norms=True)
    with pytest.raises(BoundError):
        trainer.train_step(request)
    assert trainer.train_step(evolve(request, bounds={})).gradient_norms
