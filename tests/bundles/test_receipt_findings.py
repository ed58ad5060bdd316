"""Causes of differences, on logits made by hand; digests and truncated sequences of a job."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlcore.spi import TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore_bundles.receipts.compute import compared_tensors, independent_logprobs
from rlcore_bundles.receipts.findings import Difference, Independent, difference, finding
from rlcore_torchkit.digest import tensor_digest

BOUND = 1e-4
BY_HALF = "by 0.5 in the mean of 9 tokens"
EACH = np.ones(256, np.bool_)


def _sampled(spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits float64 [256, 32], and a token of each row drawn from them."""
    torch.manual_seed(5)
    logits = spread * torch.randn(256, 32, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    return logits.log_softmax(-1).gather(1, tokens)[:, 0].numpy()


def _independent(logits: torch.Tensor, tokens: torch.Tensor) -> Independent:
    mean = (logits.softmax(-1) * logits).sum(-1)
    slopes = (logits.gather(1, tokens)[:, 0] - mean).numpy()
    return Independent(logprobs=_logprobs(logits, tokens), slopes=slopes, computed=EACH)


def _found(logprobs: Any, independent: Independent, bound: float = BOUND) -> Difference:
    found = difference(logprobs.astype(np.float32), independent, EACH, bound)
    assert found is not None
    return found


@pytest.mark.parametrize("temperature", [0.9, 0.97, 1.0, 1.03, 1.2])
def test_another_temperature_is_measured(temperature: float) -> None:
    logits, tokens = _sampled()
    found = _found(_logprobs(logits / temperature, tokens), _independent(logits, tokens))
    assert found.temperature == pytest.approx(temperature, abs=0.3 * (temperature - 1) ** 2 + 1e-6)
    assert found.cause == ("" if temperature == 1.0 else "temperature")


@pytest.mark.parametrize("factor", [0.9, 0.99, 1.03, 2.0])
def test_a_factor_is_measured(factor: float) -> None:
    logits, tokens = _sampled()
    found = _found(factor * _logprobs(logits, tokens), _independent(logits, tokens))
    assert (found.cause, found.factor) == ("factor", pytest.approx(factor, rel=1e-5))


def test_rounding_is_no_cause_and_other_weights_are_neither() -> None:
    logits, tokens = _sampled()
    independent = _independent(logits, tokens)
    noise = torch.randn(256, 32, dtype=torch.float64)
    assert _found(_logprobs(logits + 1e-5 * noise, tokens), independent).cause == ""
    assert _found(_logprobs(logits + 0.05 * noise, tokens), independent).cause == "weights"
    assert _found(_logprobs(logits + 0.05 * noise, tokens), independent, bound=1.0).cause == ""


@pytest.mark.parametrize(
    ("temperature", "num_tokens", "cause"),
    [(0.97, 256, "temperature"), (1.0, 256, ""), (0.995, 256, ""), (0.97, 20, "")],
    ids=["colder", "right", "hardly colder", "few tokens"],
)
def test_many_tokens_show_a_temperature_that_rounding_hides(temperature: float, num_tokens: int, cause: str) -> None:
    logits, tokens = _sampled()
    noise = 0.02 * torch.randn(256, 32, dtype=torch.float64)
    found = difference(
        _logprobs((logits + noise) / temperature, tokens).astype(np.float32),
        _independent(logits, tokens),
        np.arange(256) < num_tokens,
        0.1,
    )
    assert found is not None
    assert found.mean < 0.1
    assert found.cause == cause


def test_a_number_that_is_none_is_beyond_every_bound() -> None:
    logits, tokens = _sampled()
    logprobs = _logprobs(logits, tokens)
    logprobs[7] = np.nan
    found = _found(logprobs, _independent(logits, tokens), bound=1e9)
    assert (found.cause, found.greatest, found.token) == ("weights", np.inf, 7)


def test_tokens_that_were_not_computed_are_not_compared() -> None:
    logits, tokens = _sampled()
    independent = _independent(logits, tokens)
    assert difference(np.zeros(256, np.float32), independent, ~EACH, BOUND) is None
    half = np.arange(256) < 100
    found = difference(_logprobs(logits, tokens).astype(np.float32), independent, half, BOUND)
    assert found is not None
    assert found.num_tokens == 100


def _of(cause: str) -> Difference:
    return Difference(num_tokens=9, mean=0.5, greatest=1.0, token=0, temperature=0.97, factor=1.03, cause=cause)


@pytest.mark.parametrize(
    ("trainer", "generation", "tensors", "expected"),
    [
        ("", "", None, ""),
        ("", "", {"missing": [], "changed": []}, ""),
        (
            "",
            "temperature",
            None,
            f"the generator's log-probabilities are those of temperature 0.776, {BY_HALF}",
        ),
        (
            "",
            "weights",
            None,
            f"the generator's log-probabilities differ from the independent ones {BY_HALF}, and those of the trainer do not",
        ),
        (
            "",
            "",
            {"missing": list("abcde"), "changed": ["x"]},
            "the refit left out a, b, c and 2 more; the refit brought other values of x",
        ),
    ],
)
def test_the_finding_names_every_cause(trainer: str, generation: str, tensors: Any, expected: str) -> None:
    assert finding(_of(trainer), _of(generation), tensors, temperature=0.8) == expected


def test_both_parts_may_differ_and_one_may_be_missing() -> None:
    assert "do not" not in finding(_of("weights"), _of("factor"), None, 1.0)
    assert finding(_of("weights"), None, None, 1.0).startswith("the trainer's log-probabilities differ")
    assert finding(None, None, None, 1.0) == ""


def test_tensors_are_compared_by_name_in_the_dtype_of_the_refit(sums: Path) -> None:
    model = sums / "model"
    held = {name: one for file in model.glob("*.safetensors") for name, one in load_file(file).items()}
    for dtype in ("float32", "bfloat16"):
        digests = {name: tensor_digest(one.to(getattr(torch, dtype))) for name, one in held.items()}
        found, whole = compared_tensors(model, dtype, digests)
        assert found == {"compared": len(held), "missing": [], "changed": []}
        assert len(whole) == 64
        first, second, *_ = digests
        found, _ = compared_tensors(
            model, dtype, {name: digest for name, digest in digests.items() if name != first} | {second: 1}
        )
        assert found is not None
        assert (found["missing"], found["changed"]) == ([first] if first != "lm_head.weight" else [], [second])
    assert compared_tensors(model, "float32", {})[0] is None
    assert compared_tensors(model, "float32", {"base_model.lora_A.weight": 1})[0] is None


def test_a_sequence_is_computed_from_its_beginning_alone(sums: Path) -> None:
    lengths = [9, 12, 4]
    random = np.random.default_rng(2)
    offsets = offsets_of(lengths)
    mask = np.ones(sum(lengths), np.bool_)
    mask[offsets[:-1]] = False
    batch = TokenBatch(tokens=random.integers(0, 12, sum(lengths)).astype(np.int32), offsets=offsets, loss_mask=mask)
    options: dict[str, Any] = {"temperature": 0.7, "num_threads": 1, "trust_remote_code": False}
    whole = independent_logprobs(sums / "model", batch, max_tokens=99, **options)
    part = independent_logprobs(sums / "model", batch, max_tokens=6, **options)
    assert whole.computed.sum() == sum(lengths) - 3
    assert part.computed.sum() == 5 + 5 + 3
    np.testing.assert_allclose(part.logprobs[part.computed], whole.logprobs[part.computed], atol=1e-6)
    # The slope is the derivative by log(1/temperature).
    step = 1e-3
    colder = independent_logprobs(sums / "model", batch, max_tokens=99, **options | {"temperature": 0.7 * np.exp(-step)})
    np.testing.assert_allclose((colder.logprobs - whole.logprobs) / step, whole.slopes, atol=1e-2)
