"""What is refused before a run that trains a multi-token head."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from megatron_families import make_own
from multi_token_reference import make_with_head

from rlcore.spi import CheckContext, LoraSpec, ModelSpec
from rlcore_megatron.checks.check import check
from rlcore_megatron.setup.config import MegatronConfig

SECTION = "trainer.megatron"
MTP = MegatronConfig(mtp=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_head(tmp_path_factory.mktemp("head") / "model", "glm4_moe")


def context_of(directory: Path, **options) -> CheckContext:
    place = {"device": "cpu", "world_size": 1, "max_sequence_length": 16}
    return CheckContext(model=ModelSpec(path=str(directory)), **place, **options)


def changed(directory: Path, tmp_path: Path, **values) -> CheckContext:
    """A model beside it whose config.json says something else."""
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    content = json.loads((directory / "config.json").read_text()) | values
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(content))
    return context_of(tmp_path)


def test_a_head_of_the_files_may_train(directory):
    assert not check(context_of(directory), MTP)
    assert not check(context_of(directory), evolve(MTP, mtp_loss_weight=0.3))


def test_a_reference_on_devices_of_its_own_has_none_and_needs_none(directory):
    context = context_of(directory, needs_policy=False, needs_reference=True)
    assert not check(context, evolve(MTP, conversion_cache=False))


def test_a_weight_without_a_head_is_refused(directory):
    (problem,) = check(context_of(directory), MegatronConfig(mtp_loss_weight=0.3))
    assert problem.path == f"{SECTION}.mtp_loss_weight"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"fp8": True}, "fp8"),
        ({"transformer_engine": True}, "transformer_engine"),
        ({"conversion_cache": True}, "conversion_cache"),
        ({"pretrained_checkpoint": "elsewhere"}, "pretrained_checkpoint"),
    ],
)
def test_options_that_do_not_go_with_a_head(directory, options, path, tmp_path, monkeypatch):
    monkeypatch.setenv("RLCORE_MEGATRON_CHECKPOINT_DIR", str(tmp_path))
    problems = check(context_of(directory), evolve(MTP, **options))
    (problem,) = (problem for problem in problems if "mtp" in problem.found)
    assert problem.path == f"{SECTION}.{path}"


def test_adapters_are_refused(directory):
    problems = check(context_of(directory, lora=LoraSpec(rank=2)), MTP)
    assert [problem.found for problem in problems if problem.path == f"{SECTION}.mtp"] == ["true, with [lora]"]


def test_values_are_refused(directory):
    problems = check(context_of(directory, head="value"), MTP)
    assert f"{SECTION}.mtp" in [problem.path for problem in problems]


def test_families_without_a_head_are_refused(tmp_path):
    (problem,) = check(context_of(make_own(tmp_path, "gpt_oss")), MTP)
    assert problem.path == f"{SECTION}.mtp"
    assert "gpt_oss" in problem.found


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        ({"num_nextn_predict_layers": None}, "no num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": "one"}, 'num_nextn_predict_layers = "one"'),
    ],
)
def test_models_without_such_a_head_are_refused(directory, values, found, tmp_path):
    problems = check(changed(directory, tmp_path, **values), MTP)
    assert [problem for problem in problems if problem.found.startswith(found)], problems


def test_a_head_behind_a_layer_without_experts_is_refused(tmp_path):
    dense = make_own(tmp_path, "glm4_moe", num_nextn_predict_layers=1, first_k_dense_replace=9)
    problems = check(context_of(dense), MTP)
    assert [problem for problem in problems if problem.found.startswith("a last layer without experts")], problems


def test_tied_embeddings_are_refused(directory, tmp_path):
    problems = check(changed(directory, tmp_path, tie_word_embeddings=True), MTP)
    assert any(problem.found.startswith("tie_word_embeddings = true") for problem in problems), problems
