"""Verdicts on an engine, of which the generator `transformers` is one, as it is and with planted faults."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from rlcore import spi
from rlcore_torchkit.testing.families.engine_trial import engine_error, try_family

from .tried_engine import HELD, LLAMA, Engine


class Spoiled:
    """A backend whose refits or samples something is wrong with."""

    def __init__(self, backend: Any, **replaced: Callable[..., Any]) -> None:
        self._backend, self._replaced = backend, replaced

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._backend, name)
        replaced = self._replaced.get(name)
        return own if replaced is None else lambda request: replaced(own, request)


def skip_second(refit: Any, request: spi.RefitRequest) -> spi.RefitResult:
    """Acknowledge the second refit without taking it over."""
    if request.weight_version == 1:
        return refit(request)
    names = {named.name: named.digest for bucket in request.weights.buckets for named in bucket.tensors}
    return spi.RefitResult(weight_version=request.weight_version, digests=names)


def claim_another(refit: Any, request: spi.RefitRequest) -> spi.RefitResult:
    result = refit(request)
    return evolve(result, digests={name: digest + 1 for name, digest in result.digests.items()})


def refuse(refit: Any, request: spi.RefitRequest) -> spi.RefitResult:
    raise spi.RefitError("refit: one tensor is missing")


def of_first(generate: Any, request: spi.GenerateRequest) -> spi.GenerateResult:
    return generate(evolve(request, weight_version=1))


def fail(generate: Any, request: spi.GenerateRequest) -> spi.GenerateResult:
    raise spi.WorkerError("the engine failed:\nTraceback (most recent call last):\nKeyError: 'kernel'")


def spoiled(**replaced: Any) -> Callable[[Any], Any]:
    return lambda backend: Spoiled(backend, **replaced)


@pytest.mark.parametrize(
    ("engine", "verdict", "reason"),
    [
        pytest.param(Engine(), "agrees", "", id="as it is"),
        pytest.param(Engine(held=HELD | {"model.fused": 3}), "wrong", "model.fused of 1", id="another tensor held"),
        pytest.param(Engine(held=HELD | {"more": 3}), "wrong", "more of 1", id="a further tensor held"),
        pytest.param(
            Engine(spoil=spoiled(refit=skip_second, generate=of_first)), "wrong", "after refit 2", id="a refit not taken over"
        ),
        pytest.param(Engine(spoil=spoiled(refit=claim_another)), "wrong", "not those of the files", id="other digests"),
        pytest.param(Engine(spoil=spoiled(refit=refuse)), "refused", "one tensor is missing", id="a refused refit"),
        pytest.param(Engine(spoil=spoiled(generate=fail)), "cannot", "KeyError: 'kernel'", id="a failing engine"),
    ],
)
def test_a_planted_fault_is_found(engine, verdict, reason, tmp_path):
    outcome = try_family(engine, LLAMA, "float32", tmp_path)
    assert outcome.verdict == verdict, outcome.line
    assert reason in outcome.reason
    assert outcome.is_sound == (verdict != "wrong")


def test_what_is_refused_before_the_run_and_what_has_no_tiny_model(tmp_path):
    pairs = (("gemma3", "refused"), ("musicgen", "not tried"))
    families = [evolve(LLAMA, model_type=name, class_name="Gemma3ForConditionalGeneration") for name, _ in pairs]
    verdicts = [try_family(Engine(), family, "float32", tmp_path / family.model_type).verdict for family in families]
    assert verdicts == [verdict for _, verdict in pairs]


def test_the_engines_own_error_is_named():
    text = "replica: failed\nTraceback (most recent call last):\n  File x\nvllm.errors.SomeError: no kernel\nmore"
    assert engine_error(spi.WorkerError(text)) == "vllm.errors.SomeError: no kernel"
    bare = "vLLM failed\nTraceback (most recent call last):\n  File x\n    assert kind\n           ^^^^\nAssertionError"
    assert engine_error(spi.WorkerError(bare)) == "AssertionError: assert kind"
    outer = spi.WorkerError("it did not start")
    outer.__cause__ = ValueError("a  head of 3")
    assert engine_error(outer) == "ValueError: a head of 3"
