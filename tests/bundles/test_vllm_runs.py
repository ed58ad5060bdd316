"""Proofs of a run that vLLM samples for: digests of its refits, a replay, a comparison of two runs, a certificate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.torch import load_file

import rlcore
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.certificate.certificate import certificate
from rlcore_bundles.difference import first_difference
from rlcore_bundles.replay import replay
from rlcore_bundles.run_difference import run_difference
from rlcore_bundles.storage import read_bundle
from rlcore_torchkit.digest import tensor_digest
from rlcore_torchkit.testing.models import make_model

pytestmark = pytest.mark.wide
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def sampled_by_vllm(recipe_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a bundle of its second step and receipts."""
    folder = tmp_path_factory.mktemp("vllm")
    # vLLM's attention on CPU takes heads of at least 32.
    make_model(folder / "model", alphabet="0123456789+=", max_length=32, hidden_size=64, num_heads=2)
    (folder / "score.py").write_text("def score(completion, answer):\n    return sum(map(ord, completion)) % 7 / 7\n")
    sections: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "environment": {"function": {"path": f"{folder / 'score.py'}:score"}},
        "run": {"num_steps": 3, "device": "cpu"},
        "generator": {"name": "vllm", "vllm": {"cpu_kv_cache_gib": 0.1}},
        "receipts": {"every_n_steps": 1, "max_waiting": 9},
    }
    return rlcore.train(recipe_of(folder, **sections), progress="silent").path


def bundle_of(run: Path) -> Bundle:
    return read_bundle(run / "bundles" / "step-000002")


def test_a_bundle_has_the_digests_of_the_weights_that_vllm_acknowledged(sampled_by_vllm: Path) -> None:
    bundle = bundle_of(sampled_by_vllm)
    files = (sampled_by_vllm / "bundles" / "step-000002" / "model").glob("*.safetensors")
    assert len(bundle.updates) == 2
    saved = {name: tensor_digest(one) for file in files for name, one in load_file(file).items()}
    assert dict(bundle.digests_before) == saved
    assert bundle.digests_after.keys() == saved.keys()
    assert bundle.digests_after != bundle.digests_before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_step_is_repeated(sampled_by_vllm: Path, dtype: str) -> None:
    found = replay(bundle_of(sampled_by_vllm), ["trainer.name=fsdp2", f"model.dtype={dtype}"])
    assert first_difference(found.rows) is None, found.rows


def test_log_probabilities_of_another_temperature_are_named(sampled_by_vllm: Path) -> None:
    bundle = bundle_of(sampled_by_vllm)
    batch = bundle.sampled.batch
    columns = {**batch.token_columns, "generation_logprobs": batch.token_columns["generation_logprobs"] / np.float32(0.97)}
    wrong = evolve(bundle, sampled=evolve(bundle.sampled, batch=evolve(batch, token_columns=columns)))
    found = first_difference(replay(wrong, ["trainer.name=fsdp2"], rewards=False).rows)
    assert found is not None
    assert found.quantity == "generator's log-probabilities"


def test_a_certificate_holds(sampled_by_vllm: Path) -> None:
    claims = {claim.name: claim for claim in certificate(sampled_by_vllm, replays=True).claims}
    for name in ("refits", "receipts", "versions of tokens", "bundles", "replays", "generator and trainer agree"):
        assert claims[name].verdict == "held", claims[name].text


def test_a_run_does_not_differ_from_itself(sampled_by_vllm: Path) -> None:
    found = run_difference(sampled_by_vllm, sampled_by_vllm)
    assert found.step is None
