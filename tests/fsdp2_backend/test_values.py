"""A head of values in every layout against plain transformers in float64."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from fsdp2_support import exported, make_config
from fsdp2_value_cases import LAYOUTS, make, run_all
from lora_cases import cases, results_of
from rank_launch import collected
from value_cases import BATCHES, SAVE_AFTER, assert_weights, check_parity, prepare, share_of
from value_support import NUM_STEPS, ValueReference, value_context, value_request

from rlcore.spi import CloseRequest, LoadStateRequest, ModelError, ValuesRequest
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_torchkit.testing.models import make_model

from ..tiers import each_part

RESUMED = {"tp2+sp/qwen3"}
"""The layout whose checkpoint one process resumes."""
KEPT = {*each_part([name for num_ranks, name in cases(LAYOUTS) if num_ranks < 4]), *RESUMED}
"""Each layout of fewer than four ranks and each family once."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("values")
    prepare(root)
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], list[dict[str, str]]]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_layouts_equal_plain_transformers")} | RESUMED
    return results_of(root, run_all, names)


@pytest.mark.wide(keep=[f"{number}-{name}" for number, name in cases(LAYOUTS) if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), cases(LAYOUTS))
def test_layouts_equal_plain_transformers(num_ranks, name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "from_tokens"])
def test_one_process_equals_plain_transformers(name, root):
    check_parity(root, f"one-{name}", name, lambda context: make(context, {}), {})


def test_one_process_resumes_what_tensor_ranks_saved(root, results):
    results(2)
    backend = Fsdp2Backend(value_context(root / "models" / "qwen3"), make_config())
    loaded = backend.load_state(LoadStateRequest(directory=root / "tp2+sp-qwen3" / "resume"))
    assert loaded.weight_version == SAVE_AFTER
    batch = BATCHES[SAVE_AFTER]
    backend.train_step(value_request(share_of(batch, backend), batch.counts(), SAVE_AFTER))
    assert_weights(exported(backend, NUM_STEPS), torch.load(root / "qwen3.pt")["weights"])
    backend.close(CloseRequest())


def test_values_of_a_model_in_bfloat16_are_taken_in_float32(root):
    context = value_context(root / "models" / "qwen3")
    backend = Fsdp2Backend(evolve(context, model=evolve(context.model, dtype="bfloat16")), make_config())
    (values,) = backend.get_values(ValuesRequest(microbatches=(BATCHES[0],), weight_version=0)).values
    with torch.no_grad():
        expected = ValueReference(root / "models" / "qwen3").values(BATCHES[0]).numpy()
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, atol=0.05)
    assert len(np.unique(values.astype(np.float16))) > len(values) // 2
    backend.train_step(value_request((BATCHES[0],), BATCHES[0].counts(), 0))
    backend.close(CloseRequest())


def test_a_classifier_with_other_labels_or_without_its_head_is_refused(tmp_path):
    model = make_model(tmp_path / "model", "qwen3", head="value")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ModelError, match="2 labels"):
        Fsdp2Backend(value_context(model), make_config())
    language = make_model(tmp_path / "language", "qwen3")
    content = json.loads((language / "config.json").read_text())
    classifier = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (language / "config.json").write_text(json.dumps(content | classifier))
    with pytest.raises(ModelError, match=r"score\.weight"):
        Fsdp2Backend(value_context(language), make_config())
