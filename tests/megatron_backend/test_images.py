"""Models of images in every layout on gloo, against transformers on one sequence at a time; the table is in
megatron_image_cases."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as evolve_batch
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from image_support import ImageReference, image_batch
from megatron_image_cases import FAMILIES, ROWS, Launch, Place, check_row, model_of, prepare, run_all
from megatron_support import TEMPERATURE, make_backend
from rank_launch import collected, launch_rows, once
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rlcore.spi import (
    CheckContext,
    CloseRequest,
    ContractError,
    LogprobsRequest,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    TokenBatch,
)
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.checks.check import check
from rlcore_megatron.families.models import architecture_of, dims_of, load_config, standard_config
from rlcore_megatron.families.qwen_vl import qwen3_vl
from rlcore_megatron.families.vision_weights import vision_sources
from rlcore_megatron.layouts.memory import Workload, estimate
from rlcore_megatron.modules.attention import GridRotary
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model

Results = list[dict[str, str]]
CASES = [(row.num_ranks, row.name) for row in ROWS if row.num_ranks > 1]
ONE = {row.name: row for row in ROWS if row.num_ranks == 1}
KEPT = (
    "tp2+sp/qwen3_vl",
    "pp2+frozen/qwen3_vl",
    "pp2xvpp2/qwen2_5_vl",
    "dp2/qwen3_vl",
    "cp2/qwen2_vl",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("megatron-images")
    prepare(path)
    return path


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""

    @once
    def get(num_ranks: int) -> Results:
        names = tuple(case["name"] for case in collected(request, "test_layout") if case["num_ranks"] == num_ranks)
        given = Launch(num_ranks=num_ranks, root=root, names=names)
        return launch_rows(run_all, (given,), [given.results(rank) for rank in range(num_ranks)])

    return get


@pytest.mark.wide(keep=["one/qwen2_5_vl", "one+recompute/qwen3_vl"])
@pytest.mark.parametrize("name", ONE)
def test_one_rank(name: str, root: Path) -> None:
    place = Place(rank=0, num_ranks=1, root=root, names=())
    check_row(place, ONE[name])
    assert place.wrong == []


@pytest.mark.wide(keep=[f"{num_ranks}-{name}" for num_ranks, name in CASES if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_layout(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


def logprobs_of(trainer: MegatronBackend, batch: TokenBatch) -> np.ndarray:
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    return np.concatenate(trainer.get_logprobs(request).logprobs)


@pytest.fixture
def backend() -> Iterator[Callable[..., MegatronBackend]]:
    """Makes backends, which are closed at the end."""
    made: list[MegatronBackend] = []

    def make(directory: Path, **options: Any) -> MegatronBackend:
        made.append(make_backend(directory, **options))
        return made[-1]

    yield make
    for trainer in reversed(made):
        trainer.close(CloseRequest())


def test_a_placeholder_that_the_policy_said_is_a_token_as_any_other(
    root: Path, backend: Callable[..., MegatronBackend]
) -> None:
    directory = model_of(root, "qwen3_vl")
    batch, trainer = image_batch(directory, 0), backend(directory)
    said = batch.tokens.copy()
    said[batch.offsets[1] - 1] = load_config(ModelSpec(path=str(directory))).image_token_id
    changed = logprobs_of(trainer, evolve(batch, tokens=said))
    assert np.flatnonzero(np.abs(changed - logprobs_of(trainer, batch)) > 1e-6).tolist() == [batch.offsets[1] - 1]


def test_images_that_do_not_match_placeholders_are_refused(root: Path, backend: Callable[..., MegatronBackend]) -> None:
    directory = model_of(root, "qwen3_vl")
    batch = image_batch(directory, 0)
    with pytest.raises(ContractError, match="placeholders"):
        logprobs_of(backend(directory), evolve(batch, images=(batch.images[4], *batch.images[1:])))


def test_a_model_of_text_refuses_images(root: Path, tmp_path: Path, backend: Callable[..., MegatronBackend]) -> None:
    trainer = backend(make_model(tmp_path / "text", "qwen3"))
    with pytest.raises(ContractError, match="text alone"):
        logprobs_of(trainer, image_batch(model_of(root, "qwen3_vl"), 0))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_frozen_reference_reads_images_too(
    family: str, root: Path, tmp_path: Path, backend: Callable[..., MegatronBackend]
) -> None:
    directory = model_of(root, family)
    other = make_image_model(tmp_path / "other", family, num_layers=4, hidden_size=128, seed=2)
    batch = image_batch(directory, 0)
    trainer = backend(directory, needs_reference=True, reference=other)
    request = LogprobsRequest(
        microbatches=(batch,), model="reference", temperature=TEMPERATURE, entropy=False, weight_version=0
    )
    with torch.no_grad():
        expected = ImageReference(other).logprobs(batch)[0]
    np.testing.assert_allclose(np.concatenate(trainer.get_logprobs(request).logprobs), expected, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_frequency_turns_by_its_axis(interleaved: bool) -> None:
    """Sections of arXiv:2409.12191, section 2.1, and those of arXiv:2511.21631 in turns."""
    rotary = GridRotary(torch.ones(8), [4, 2, 2], interleaved=interleaved)
    batch = PackedBatch(qkv_format="sbhd", grid_positions=torch.tensor([[1], [2], [3]]), positions=torch.tensor([1]))
    expected = [1, 2, 3, 1, 2, 3, 1, 1] if interleaved else [1, 1, 1, 1, 2, 2, 3, 3]
    assert rotary(batch).flatten().tolist() == expected * 2
    assert rotary(evolve_batch(batch, grid_positions=None)).flatten().tolist() == [1] * 16


def found_problems(directory: Path, context: Mapping[str, Any] | None = None, **section: Any) -> list[str]:
    options = {"device": "cpu", "world_size": 1, "max_sequence_length": 64, **(context or {})}
    spec = ModelSpec(path=str(directory), dtype="float32")
    return [str(problem) for problem in check(CheckContext(model=spec, **options), MegatronConfig(**section))]


@pytest.mark.parametrize(
    ("family", "context", "section", "path", "expected"),
    [
        ("qwen3_vl", {}, {}, None, ""),
        ("qwen3_vl", {}, {"freeze": "vision"}, None, ""),
        ("qwen3_vl", {"lora": LoraSpec(rank=4)}, {}, "lora", "freeze"),
        ("qwen3_vl", {"head": "value"}, {}, "", "qwen3_vl"),
        ("qwen3_vl", {"world_size": 4}, {"pipeline_parallel": 4}, "trainer.megatron.pipeline_parallel", "at least 2"),
        ("qwen3_vl", {"world_size": 2}, {"pipeline_parallel": 2, "pipeline_layers": (1, 3)}, "", "at least 2"),
        ("qwen3_vl", {"world_size": 2}, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, "", "at least 2"),
        ("qwen2_5_vl", {"world_size": 4}, {"pipeline_parallel": 4}, None, ""),
    ],
)
def test_sections_are_checked(
    family: str, context: dict[str, Any], section: dict[str, Any], path: str | None, expected: str, root: Path
) -> None:
    found = found_problems(model_of(root, family), context, **section)
    if path is None:
        assert found == []
    else:
        (problem,) = found
        assert path in problem
        assert expected in problem


def test_megatrons_own_checkpoints_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (problem,) = found_problems(model_of(root, "qwen3_vl"), pretrained_checkpoint=str(tmp_path))
    assert problem.startswith("trainer.megatron.pretrained_checkpoint")


def test_gemma_3_is_refused_with_the_mask_that_it_needs(tmp_path: Path) -> None:
    content = {**AutoConfig.for_model("gemma3").to_dict(), "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(content, default=str))
    (problem,) = found_problems(tmp_path)
    assert "in both directions" in problem
    assert "language_model" in problem


@pytest.mark.parametrize("name", sorted(IMAGE_MODELS))
@pytest.mark.parametrize("place", ["model", "reference"])
def test_other_models_of_images_are_refused_with_the_trainer_that_computes_them(
    name: str, place: str, root: Path, tmp_path: Path
) -> None:
    content = {**AutoConfig.for_model(name).to_dict(), "architectures": [IMAGE_MODELS[name]]}
    (tmp_path / "config.json").write_text(json.dumps(content, default=str))
    directory = tmp_path if place == "model" else model_of(root, "qwen3_vl")
    context = {} if place == "model" else {"reference": ModelSpec(path=str(tmp_path), dtype="float32")}
    found = [problem for problem in found_problems(directory, context) if name in problem]
    if name in FAMILIES:
        assert not any("fsdp2" in problem for problem in found)
    else:
        (problem,) = found
        assert "which reads images" in problem
        assert 'trainer.name to "fsdp2"' in problem
        assert all(family in problem for family in FAMILIES)


@pytest.mark.parametrize("place", ["model", "reference"])
def test_a_model_without_an_image_processor_is_refused(place: str, root: Path, tmp_path: Path) -> None:
    whole, bare = model_of(root, "qwen3_vl"), tmp_path / "bare"
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*preprocessor_config.json"))
    given = {"model": (bare, {}), "reference": (whole, {"reference": ModelSpec(path=str(bare), dtype="float32")})}
    (problem,) = found_problems(*given[place])
    assert str(bare) in problem
    assert "preprocessor_config.json" in problem


def test_layers_add_the_features_of_at_most_as_many_of_the_tower(tmp_path: Path) -> None:
    make_image_model(tmp_path, "qwen3_vl", num_layers=1)
    (problem,) = found_problems(tmp_path)
    assert "deepstack_visual_indexes of 2 layers" in problem
    assert "num_hidden_layers" in problem


@pytest.mark.parametrize("listed", [None, [0], [0, 3, 5]])
def test_features_are_those_of_transformers_class(listed: list[int] | None) -> None:
    config = AutoConfig.for_model("qwen3_vl").to_dict()
    del config["vision_config"]["deepstack_visual_indexes"]
    config["vision_config"] |= {} if listed is None else {"deepstack_visual_indexes": listed}
    expected = AutoConfig.for_model(**config).vision_config.deepstack_visual_indexes
    assert sum(qwen3_vl(config).deepstack) == len(expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_files_may_have_the_names_of_transformers_modules(
    family: str, root: Path, tmp_path: Path, backend: Callable[..., MegatronBackend]
) -> None:
    directory = model_of(root, family)
    shutil.copytree(directory, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors, renamed = load_file(file), {"model.": "model.language_model.", "visual.": "model.visual."}
    new = {
        next((later + name.removeprefix(old) for old, later in renamed.items() if name.startswith(old)), name): tensor
        for name, tensor in tensors.items()
    }
    assert sum(name in tensors for name in new) == ("lm_head.weight" in tensors)
    save_file(new, file, {"format": "pt"})
    assert found_problems(tmp_path / "model") == []
    batch = image_batch(directory, 0)
    found = logprobs_of(backend(tmp_path / "model"), batch)
    np.testing.assert_array_equal(found, logprobs_of(backend(directory), batch))


def test_recomputation_of_the_tower_says_nothing(
    root: Path, backend: Callable[..., MegatronBackend], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    backend(model_of(root, "qwen3_vl"), config=MegatronConfig(recompute="full"))
    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []


def test_a_tower_to_freeze_has_to_be_there(tmp_path: Path) -> None:
    (problem,) = found_problems(make_model(tmp_path / "text", "qwen3"), freeze="vision")
    assert problem.startswith("trainer.megatron.freeze")


def test_sections_of_a_head_add_up(root: Path, tmp_path: Path) -> None:
    shutil.copytree(model_of(root, "qwen2_vl"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    content["text_config"]["rope_parameters"]["mrope_section"] = [8, 4]
    file.write_text(json.dumps(content))
    assert any("mrope_section = [8, 4]" in problem for problem in found_problems(tmp_path / "model"))


def test_keys_of_the_language_model_may_be_at_the_top(root: Path, tmp_path: Path) -> None:
    """As the files of Qwen2.5-VL have them, with a kind of rotary embedding that means the default."""
    shutil.copytree(model_of(root, "qwen2_5_vl"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    text = content.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    top = {"rope_scaling": scaling, "rope_theta": rope["rope_theta"], "tie_word_embeddings": False}
    file.write_text(json.dumps({**text, **content, **top}))
    assert found_problems(tmp_path / "model") == []
    nested, flat = (load_config(ModelSpec(path=str(path))) for path in (model_of(root, "qwen2_5_vl"), tmp_path / "model"))
    assert dims_of(flat) == dims_of(nested)
    assert architecture_of(flat).rotary_sections == architecture_of(nested).rotary_sections == (8, 4, 4)


@pytest.mark.parametrize("spec", [OptimizerSpec(), OptimizerSpec(name="muon")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_towers_memory_is_planned(family: str, spec: OptimizerSpec, root: Path) -> None:
    """Masters and AdamW's moments of the tower, also beside Muon, over two ranks."""
    directory = model_of(root, family)
    hf = load_config(ModelSpec(path=str(directory)))
    counted = sum(prod(source.tensors[0].shape) for source in vision_sources(hf))
    model = standard_config(hf)
    load = Workload(world_size=2, model=model, device="cuda", max_sequence_length=64, optimizer=spec)
    sizes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)
    trained, still = (estimate(dims_of(hf), MegatronConfig(**sizes, freeze=freeze), load) for freeze in ("none", "vision"))
    assert trained.weights == still.weights
    assert (trained.gradients - still.gradients) / 4 == pytest.approx(counted, rel=0.2)
    each = (12 if spec == OptimizerSpec() else 10) / 2
    assert (trained.optimizer - still.optimizer) / each == pytest.approx(counted, rel=0.2)
