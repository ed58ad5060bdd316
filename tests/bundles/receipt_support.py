"""Faults that tests plant in a run, and what its receipts say."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import rlcore_transformers.engine as engine
from rlcore.run.execution.groups import InProcessTrainer
from rlcore.run.execution.in_process import InProcessRoute
from rlcore_bundles.receipts import observer
from rlcore_transformers.weights import HeldWeights
from rlcore_workers.pool import WorkerPool

LOST = "model.layers.0.mlp.up_proj.weight"
NAMED_LATER = ("time/", "tokens_per", "generated_tokens_per", "receipts/")
"""Beginnings of the names of figures that a run with receipts has alone, or that depend on the clock."""


def receipts_in(run: Path) -> dict[int, dict[str, Any]]:
    """The receipts of a run, by step."""
    found = [json.loads(path.read_text()) for path in sorted((run / "receipts").glob("step-*.json"))]
    return {one["step"]: one for one in found}


def scaled_trainer(patch: pytest.MonkeyPatch) -> None:
    """A trainer whose log-probabilities are 1.03 times the right ones."""
    right = InProcessTrainer.logprobs
    patch.setattr(InProcessTrainer, "logprobs", lambda self, *given: right(self, *given) * 1.03)


def colder_generator(patch: pytest.MonkeyPatch) -> None:
    """A generator that samples at 0.97 of its temperature."""
    right = engine.sample_tokens
    patch.setattr(
        engine,
        "sample_tokens",
        lambda logits, keys, sampling: right(logits, keys, evolve(sampling, temperature=0.97 * sampling.temperature)),
    )


def stale_tensor(patch: pytest.MonkeyPatch) -> None:
    """A generator that keeps the first values of a tensor, and acknowledges the refit all the same."""
    right, first = HeldWeights.receive, dict[str, Any]()

    def receive(self: Any, *given: Any) -> Any:
        digests = right(self, *given)
        first.setdefault(LOST, self.tensors[LOST].clone())
        self.tensors = self.tensors | first
        return digests

    patch.setattr(HeldWeights, "receive", receive)


def _rerouted(patch: pytest.MonkeyPatch, change: Callable[[Mapping[str, int]], dict[str, int]]) -> None:
    right = InProcessRoute.sync_weights

    def sync_weights(self: InProcessRoute, order: Any) -> Any:
        refitted = right(self, order)
        return evolve(refitted, digests=change(refitted.digests))

    patch.setattr(InProcessRoute, "sync_weights", sync_weights)


def lost_tensor(patch: pytest.MonkeyPatch) -> None:
    """A refit that leaves a tensor out."""
    _rerouted(patch, lambda digests: {name: digest for name, digest in digests.items() if name != LOST})


def changed_tensor(patch: pytest.MonkeyPatch) -> None:
    """A refit that brings other values of a tensor."""
    _rerouted(patch, lambda digests: {**digests, LOST: digests[LOST] ^ 1})


def uncomputed(patch: pytest.MonkeyPatch, answer: dict[str, Any]) -> None:
    """A process of receipts that computes nothing, and answers this."""

    class Pool(WorkerPool):
        async def call(self, request: object) -> Any:
            return answer

    patch.setattr(observer, "WorkerPool", Pool)


FAULTS: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "scaled trainer": (scaled_trainer, "the trainer's log-probabilities are 1.03 times the independent ones"),
    "colder generator": (colder_generator, "the generator's log-probabilities are those of temperature 0.97"),
    "stale tensor": (stale_tensor, "the generator's log-probabilities differ from the independent ones"),
    "lost tensor": (lost_tensor, f"the refit left out {LOST}"),
    "changed tensor": (changed_tensor, f"the refit brought other values of {LOST}"),
}
"""Each fault, and how the finding begins."""
