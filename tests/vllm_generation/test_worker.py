"""The worker's part of a refit: what goes wrong on a rank is its answer and never raised."""

import contextlib
import os
import socket
from types import SimpleNamespace

import pytest
import torch

from rlcore.spi import RefitError

pytest.importorskip("vllm")

from rlcore_vllm.ranks import invariant, worker
from rlcore_vllm.ranks.worker import WorkerExtension


class Worker(WorkerExtension):
    """Notes what is called, in place of vLLM's worker; `failure` is what loading raises."""

    device, rank, vllm_config = torch.device("cpu"), 1, None
    failure = None

    def __init__(self):
        self.calls = []
        self._weight_update_active = False
        self.weight_transfer_engine = SimpleNamespace(
            abandon=lambda: self.calls.append("abandon"),
            brings_weights=True,
            finish_weight_update=lambda: self.calls.append("own finish"),
            put_adapters_in_place=lambda: self.calls.append("adapters"),
            reset_weight_update_target=lambda: self.calls.append("reset"),
            acknowledgement=lambda: {"weight_version": 5, "digests": {"a": 1}},
        )

    def init_weight_transfer_engine(self, content):
        self.calls.append(("connect", content))

    def start_weight_update(self):
        self.calls.append("start")
        self._weight_update_active = True

    def update_weights(self, content):
        self.calls.append(content)
        if self.failure is not None:
            raise self.failure

    def finish_weight_update(self):
        self.calls.append("finish")
        self._weight_update_active = False


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(worker, "set_current_vllm_config", contextlib.nullcontext)
    return Worker()


def test_a_rank_describes_how_it_is_reached(rank):
    place = {"pid": os.getpid(), "host": socket.gethostname(), "rank": 1, "device": "cpu"}
    assert rank.rlcore_refit("describe", {}) == place


def test_the_steps_of_a_refit_are_vllms_calls_in_order(rank):
    answers = [rank.rlcore_refit(step, {"of": step}) for step in ("connect", "begin", "bucket", "finish")]
    assert answers == [{}, {}, {}, {"weight_version": 5, "digests": {"a": 1}}]
    begin, bucket = {"manifest": {"of": "begin"}}, {"bucket": {"of": "bucket"}}
    assert rank.calls == [("connect", {"of": "connect"}), "start", begin, bucket, "finish", "adapters"]


def test_a_refit_of_adapters_alone_leaves_out_what_vllm_does_behind_other_weights(rank):
    """It would forget the adapters that stay."""
    rank.weight_transfer_engine.brings_weights = False
    for step in ("begin", "finish"):
        rank.rlcore_refit(step, {})
    assert rank.calls == ["start", {"manifest": {}}, "own finish", "reset", "adapters"]
    rank.calls.clear()
    rank.rlcore_refit("begin", {})
    assert rank.calls == ["start", {"manifest": {}}]  # none is under way that has to be abandoned


@pytest.mark.parametrize(
    ("failure", "key", "text"),
    [(RefitError("refit: changed on the way"), "refused", "refit: changed"), (OSError("gone"), "failed", "OSError: gone")],
)
def test_what_goes_wrong_is_the_answer(rank, failure, key, text):
    rank.failure = failure
    answer = rank.rlcore_refit("bucket", {})
    assert list(answer) == [key]
    assert text in answer[key]


def test_a_step_that_there_is_not_is_a_failure_too(rank):
    assert "ValueError: no step dance of a refit" in rank.rlcore_refit("dance", {})["failed"]


def test_a_refit_whose_sender_gave_up_is_abandoned_before_the_next(rank):
    rank.rlcore_refit("begin", {})
    rank.calls.clear()
    rank.rlcore_refit("begin", {})
    assert rank.calls[:3] == ["abandon", "reset", "start"]


def test_vllm_has_what_batch_invariant_engines_replace(monkeypatch):
    from vllm.model_executor.layers import layernorm, linear
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    replaced = ((layernorm, "rms_norm_batch_invariant"), (LogitsProcessor, invariant.HEAD), (linear, invariant.SUM))
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    invariant.use_invariant_kernels()
    assert getattr(LogitsProcessor, invariant.HEAD) is invariant.apply_head
    assert layernorm.rms_norm_batch_invariant.__qualname__.startswith("sum_first")
    assert getattr(linear, invariant.SUM) is invariant.sum_of_ranks
