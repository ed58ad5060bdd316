"""`check`: what is wrong with section and model, all at once, before anything is allocated."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, LoraSpec, ModelSpec
from rlcore_megatron.checkpoints import cache_directory
from rlcore_megatron.checkpoints.cache_directory import OWN
from rlcore_megatron.checks import check
from rlcore_megatron.setup import requirements
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model

SECTION = "trainer.megatron"
Usage = namedtuple("Usage", "total used free")

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """A function (architecture) -> directory; each is made once."""
    made: dict[str, Path] = {}

    def get(architecture: str = "qwen3") -> Path:
        if architecture not in made:
            made[architecture] = make_model(tmp_path_factory.mktemp("models") / architecture, architecture, max_length=128)
        return made[architecture]

    return get


@pytest.fixture
def texts(models):
    """A function (model, context options, section options) -> the problems as they are shown."""

    def find(model: Path | str | None = None, *, context: dict | None = None, **section: object) -> list[str]:
        options = {"device": "cpu", "world_size": 1, "max_sequence_length": 64, "dtype": "float32", **(context or {})}
        spec = ModelSpec(path=str(model or models()), dtype=options.pop("dtype"))
        return [
            str(problem) for problem in check.check(CheckContext(model=spec, **options), evolve(MegatronConfig(), **section))
        ]

    return find


def test_float8_in_a_narrow_model_is_noted(texts, models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rlcore_megatron.layouts.layout_check.transformer_engine_version", lambda: "2.12.0")
    wide = changed(models(), tmp_path / "wide", hidden_size=128, intermediate_size=128, num_attention_heads=8, head_dim=16)
    (note,) = texts(wide, context={"device": "cuda", "dtype": "bfloat16"}, fp8=True)
    assert note.startswith("trainer.megatron.fp8: float8 does not pay")


def changed(source: Path, target: Path, **values: object) -> Path:
    """A copy of a model with other values in its config.json."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_a_good_model_and_section_have_no_problems(texts, models, architecture: str) -> None:
    assert texts(models(architecture)) == []
    assert texts(models(architecture), context={"world_size": 4}, tensor_parallel=2, pipeline_parallel=2) == []


def test_a_model_on_the_hub_is_checked_once_loaded(texts) -> None:
    assert texts("Qwen/Qwen3-0.6B", context={"world_size": 2}, tensor_parallel=2, conversion_cache=True) == []


def test_a_model_that_is_no_language_model_of_its_family_is_refused_once(texts, models, tmp_path: Path) -> None:
    model = changed(models(), tmp_path / "other", architectures=["Qwen3ForTokenClassification"])
    (text,) = texts(model)
    assert text.startswith(f"{model / 'config.json'}: found architecture Qwen3ForTokenClassification; expected ")


def test_what_any_trainer_refuses_of_a_model_is_refused(texts, models) -> None:
    found = texts(context={"max_sequence_length": 129, "dtype": "float16"})
    assert found == [
        "model.dtype: found float16; expected float32 or bfloat16. Set model.dtype to bfloat16: gradients in float16 would "
        "need a loss scale",
        f"{models() / 'config.json'}: found max_position_embeddings = 128; expected at least 129, the longest sequence of the "
        "recipe. Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or --max-length of `rlcore serve`, or use "
        "another model",
    ]


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic"])
def test_rotary_embeddings_that_scale_more_than_angles_are_refused(texts, models, tmp_path: Path, kind: str) -> None:
    model = changed(models(), tmp_path / kind, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    assert texts(model) == [
        f'{model / "config.json"}: found rope_type = "{kind}"; expected one of default, linear, llama3. Take another trainer '
        "for this model"
    ]


def test_sizes_tables_and_model_are_judged_at_once(texts) -> None:
    found = texts(
        context={"world_size": 3, "max_sequence_length": 999, "replays_routing": True},
        tensor_parallel=3,
        ddp={"nothing": 1},
        pretrained_checkpoint="/nowhere",
    )
    for part in ("max_position_embeddings", "tensor_parallel 3 for 4 attention heads", "ddp.nothing"):
        assert any(part in text for text in found), part
    for part in ("rollout.replay_routing: found true", f"{SECTION}.pretrained_checkpoint: found /nowhere, which is not there"):
        assert any(part in text for text in found), part


def test_routing_is_replayed_for_models_with_experts_alone(texts, models) -> None:
    context = {"replays_routing": True}
    assert texts(models("qwen3_moe"), context=context) == []
    (text,) = texts(context=context)
    assert text.startswith("rollout.replay_routing: found true, with the model")
    assert text.endswith("which has no experts; expected a mixture-of-experts model, or false")


def test_what_would_route_by_itself_all_the_same_is_refused(texts, models) -> None:
    moe, context = models("qwen3_moe"), {"replays_routing": True}
    options = {"recompute": "selective", "transformer": {"recompute_modules": ["moe"]}}
    assert texts(moe, **options) == []
    (text,) = texts(moe, context=context, **options)
    assert f'{SECTION}.transformer.recompute_modules: found "moe", which runs the router again' in text
    found = texts(moe, context=context, transformer={"moe_router_fusion": True})
    assert any(f"{SECTION}.transformer.moe_router_fusion: found true, whose kernel takes no routing" in text for text in found)


def test_the_engine_has_to_be_there_where_it_is_asked_for(texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "transformer_engine_version", lambda: None)
    assert texts(transformer_engine=True) == [
        f"{SECTION}.transformer_engine: found true, but TransformerEngine is not installed; expected it installed. "
        "pip install --no-build-isolation 'transformer_engine[pytorch]==2.12.0', or leave it out"
    ]
    monkeypatch.setattr(check, "transformer_engine_version", lambda: "2.12.0")
    assert texts(transformer_engine=True) == [
        f"{SECTION}.transformer_engine: found true on cpu; expected false. Its kernels need a GPU"
    ]


def test_an_engine_that_cannot_train_is_refused_until_it_is_switched_off(texts, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformer-engine": "2.17.0", "torch": "2.11.0+cu130"}
    monkeypatch.setattr(
        requirements, "installed_version", lambda name: requirements.Version(versions[name]) if name in versions else None
    )
    monkeypatch.setattr(requirements, "transformer_engine_version", lambda: requirements.Version("2.17.0"))
    monkeypatch.setattr(check, "transformer_engine_version", lambda: requirements.Version("2.17.0"))
    cuda = {"device": "cuda", "dtype": "bfloat16"}
    (found,) = texts(context=cuda)
    assert found == (
        f"{SECTION}.transformer_engine: found nothing, which takes the one installed: TransformerEngine 2.17.0 does not go "
        "with torch 2.11.0+cu130: its attention needs a newer cuDNN for the backward pass. pip install --no-build-isolation "
        "'transformer_engine[pytorch]==2.12.0'; expected a TransformerEngine that trains. Or set it to false"
    )
    assert "found true: " in texts(context=cuda, transformer_engine=True)[0]
    assert texts(context=cuda, transformer_engine=False) == []
    assert texts() == []


def test_auto_has_to_find_sizes(texts, models, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {"device": "cuda", "world_size": 3, "dtype": "bfloat16"}
    monkeypatch.setattr(check, "device_memories", lambda: None)
    assert texts(context=cuda) == []
    found = texts(context=cuda, virtual_pipeline_parallel=2)
    assert len(found) == 1
    assert 'virtual_pipeline_parallel 2 on 3 rank(s), which no sizes in place of "auto" go with' in found[0]
    monkeypatch.setattr(check, "device_memories", lambda: [80 * 2**30, 2**18, 80 * 2**30])
    (too_large,) = texts(context=cuda)
    assert "a GPU in the layout that needs least" in too_large
    assert "expected at most 0.2 MiB, which can be planned with of 0.2 MiB" in too_large
    assert texts(context=cuda, tensor_parallel=1, pipeline_parallel=1, context_parallel=1, expert_parallel=1) == []


def test_what_megatron_refuses_of_the_whole_is_told_in_its_words(texts) -> None:
    (found,) = texts(recompute="selective", transformer={"recompute_modules": ["everything"]})
    assert found.startswith(
        f"{SECTION}.transformer: found recompute_modules, refused with: Invalid choices for recompute_modules"
    )
    assert found.endswith("; expected values that Megatron's TransformerConfig takes for this model")
    assert texts(recompute="selective", transformer={"recompute_modules": ["mlp"]}) == []


def test_a_checkpoint_has_to_be_megatrons(texts, tmp_path: Path) -> None:
    root = tmp_path / "megatron"
    (root / "iter_0000100").mkdir(parents=True)
    expected = "expected a Megatron distributed checkpoint: a directory whose metadata.json names the format torch_dist"
    assert texts(pretrained_checkpoint=str(root)) == [
        f"{SECTION}.pretrained_checkpoint: found {root} with no readable metadata.json; {expected}. "
        f"Name the directory of one iteration, such as {root / 'iter_0000100'}"
    ]
    metadata = root / "iter_0000100" / "metadata.json"
    for content, found in (
        ("{", "no readable metadata.json"),
        ("[]", "no readable metadata.json"),
        ('{"sharded_backend": "zarr"}', "format zarr"),
    ):
        metadata.write_text(content)
        assert texts(pretrained_checkpoint=str(metadata.parent)) == [
            f"{SECTION}.pretrained_checkpoint: found {metadata.parent} with {found}; {expected}"
        ]
    assert texts(pretrained_checkpoint=str(metadata)) == [
        f"{SECTION}.pretrained_checkpoint: found {metadata}, a file; {expected}"
    ]
    metadata.write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    assert texts(pretrained_checkpoint=str(metadata.parent)) == []
    assert texts(pretrained_checkpoint=str(metadata.parent), conversion_cache=True) == [
        f"{SECTION}.conversion_cache: found true with checkpoint; expected one of the two. With checkpoint, nothing is "
        "converted from model.path"
    ]


def test_what_megatron_writes_is_accepted(texts, tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    save_config(CheckpointingConfig(sharded_backend="torch_dist"), str(tmp_path))
    assert texts(pretrained_checkpoint=str(tmp_path)) == []


def test_the_cache_is_made_nowhere_by_the_check(texts, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(conversion_cache=True) == []
    monkeypatch.setenv(OWN, "/proc/self/rlcore")
    assert [text.partition(":")[0] for text in texts(conversion_cache=True)] == [OWN]
    assert texts() == []
    assert not (home / ".cache").exists()


def test_a_cache_without_room_is_refused(texts, models, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (models() / "model.safetensors").stat().st_size
    place = home / ".cache" / "huggingface" / "rlcore"
    monkeypatch.setattr(cache_directory.shutil, "disk_usage", lambda path: Usage(2 * size, size, size - 1))
    (found,) = texts(conversion_cache=True)
    assert found.startswith(f"{place}: found {place} with 0.")
    assert "the size of the converted model. Free some, or: Set RLCORE_MEGATRON_CHECKPOINT_DIR to another directory" in found
    # Half as much in half the precision.
    assert texts(context={"dtype": "bfloat16"}, conversion_cache=True) == []
    monkeypatch.setattr(cache_directory.shutil, "disk_usage", lambda path: Usage(2 * size, size, size))
    assert texts(conversion_cache=True) == []


def test_what_is_converted_already_needs_neither_room_nor_permission(texts, models, home: Path, monkeypatch) -> None:
    from rlcore_megatron.checkpoints.conversion import MARK, copy_directory

    monkeypatch.setattr(cache_directory.shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    assert len(texts(conversion_cache=True)) == 1
    copy = copy_directory(ModelSpec(path=str(models()), dtype="float32"))
    copy.mkdir(parents=True)
    (copy / MARK).write_text("{}")
    assert texts(conversion_cache=True) == []


def test_adapters_have_limits_here(texts):
    assert texts(context={"lora": LoraSpec()}) == []
    assert texts(context={"lora": LoraSpec(dropout=0.1)}) == []
    given = {"lora": LoraSpec(dropout=0.1, targets=("q_porj",))}
    found = texts(context=given, transformer_engine=True, recompute="full")
    for path in ("lora.targets", "lora.dropout", f"{SECTION}.transformer_engine"):
        assert any(text.startswith(f"{path}: found ") for text in found), path
    assert texts(context={"lora": LoraSpec(dropout=0.1)}, recompute="full", pipeline_parallel=1) == []


def test_beside_a_critic_the_sizes_on_several_gpus_are_numbers(texts) -> None:
    """ "auto" would choose for one of the two as if it were alone."""
    beside = {"device": "cuda", "world_size": 2, "dtype": "bfloat16", "critic": ModelSpec(path="critic")}
    sizes = dict.fromkeys(("tensor_parallel", "expert_parallel", "context_parallel", "pipeline_parallel"), 1)
    (found,) = [text for text in texts(context=beside, **{**sizes, "pipeline_parallel": "auto"}) if "critic" in text]
    assert "pipeline_parallel" in found
    assert not [text for text in texts(context=beside, **sizes) if "critic" in text]
    assert not [text for text in texts(context={**beside, "device": "cpu"}) if "critic" in text]
