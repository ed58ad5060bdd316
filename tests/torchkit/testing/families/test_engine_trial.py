"""Verdicts on an engine, of which the generator `transformers` is one, as it is and with planted faults."""

from collections.abc import Callable
from typing import Any

import numpy as np
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


def shift(generate: Any, request: spi.GenerateRequest) -> spi.GenerateResult:
    """Samples 0.05 away: half of what a fixed limit of 0.1 would let pass."""
    result = generate(request)
    return evolve(result, logprobs=result.logprobs - np.float32(0.05))


def fail(generate: Any, request: spi.GenerateRequest) -> spi.GenerateResult:
    raise failed_in("site-packages/kernels", "site-packages/torch")


def fail_here(generate: Any, request: spi.GenerateRequest) -> spi.GenerateResult:
    raise KeyError("kernel")


def failed_in(*folders: str) -> spi.WorkerError:
    """Return an engine's error whose traceback goes through these folders."""
    frames = "".join(f'  File "/x/{folder}/ops.py", line 3, in run\n    call()\n' for folder in folders)
    return spi.WorkerError(f"the engine failed:\nTraceback (most recent call last):\n{frames}KeyError: 'kernel'")


def fail_in_rlcore(generate: Any, request: spi.GenerateRequest) -> spi.GenerateResult:
    raise failed_in("site-packages/kernels", "src/rlcore_kernels")


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
        pytest.param(Engine(spoil=spoiled(refit=refuse)), "wrong", "one tensor is missing", id="a failed refit"),
        pytest.param(Engine(spoil=spoiled(generate=fail)), "cannot", "KeyError: 'kernel'", id="a failing engine"),
        pytest.param(Engine(spoil=spoiled(generate=fail_in_rlcore)), "crashed", "kernel", id="a failing worker of rlcore"),
        pytest.param(Engine(spoil=spoiled(generate=fail_here)), "crashed", "kernel", id="a failing generator"),
        pytest.param(Engine(own=KeyError("kernel")), "cannot", "kernel", id="an engine that fails alone"),
        pytest.param(
            Engine(own=failed_in("src/rlcore_kernels")), "crashed", "kernel", id="rlcore fails beside the engine alone"
        ),
    ],
)
def test_a_planted_fault_is_found(engine, verdict, reason, tmp_path):
    outcome = try_family(engine, LLAMA, "float32", tmp_path)
    assert outcome.verdict == verdict, outcome.line
    assert reason in outcome.reason
    assert outcome.is_sound == (verdict not in ("wrong", "crashed"))


def test_what_a_trainer_refuses_is_not_tried(tmp_path):
    outcome = try_family(Engine(trainer="no_such"), LLAMA, "float32", tmp_path)
    assert outcome.verdict == "not tried"
    assert "no_such" in outcome.reason


@pytest.mark.parametrize("replaced", [{}, {"generate": shift}], ids=["as it is", "shifted"])
def test_bfloat16_is_held_to_the_rounding_of_transformers(replaced, tmp_path):
    outcome = try_family(Engine(spoil=spoiled(**replaced)), LLAMA, "bfloat16", tmp_path)
    assert outcome.verdict == ("wrong" if replaced else "agrees"), outcome.line
    assert outcome.mean is not None


def test_what_has_no_tiny_model_is_not_tried(tmp_path):
    pairs = (("gemma3", "not tried"), ("musicgen", "not tried"))
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
