"""A drafter that cannot draft is refused before anything is allocated, by one clear message."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlcore.spi import CheckContext, GeneratorContext, ModelSpec, Problem, RankInfo
from rlcore_torchkit.distributed.format_bytes import GIB
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.checks import check as check_module
from rlcore_vllm.checks.check import check
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import engine_settings

sys.path.insert(0, str(Path(__file__).parent))

from vllm_drafters import change_config, make_draft_model, make_head, make_with_own_head

Problems = Callable[..., list[Problem]]
METHODS = ("draft_model", "eagle", "eagle3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("drafted") / "model", "qwen3", max_length=128, hidden_size=128)


@pytest.fixture
def drafter(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """The directory of a good drafter, but for these values in its config.json."""

    def make(method: str = "draft_model", **changed: Any) -> Path:
        directory = tmp_path / "small"
        if method == "draft_model":
            make_draft_model(directory, model, load_file(model / "model.safetensors"))
        else:
            make_head(directory, method, model)
        change_config(directory, changed)
        return directory

    return make


@pytest.fixture
def problems(model: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """The problems of a section with this drafter."""
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    monkeypatch.setattr(check_module, "device_memories", lambda: [80 * GIB] * 4)

    def find(
        directory: Path | None, *, device: Any = "cpu", length: int = 64, policy: Path | str = model, **options: Any
    ) -> list[Problem]:
        dtype = "float32" if device == "cpu" else "bfloat16"
        spec = ModelSpec(path=str(policy), dtype=dtype)  # type: ignore[arg-type]
        context = CheckContext(model=spec, device=device, world_size=1, max_sequence_length=length)
        named = {} if directory is None else {"speculative_model": str(directory)}
        return list(check(context, VllmConfig(cpu_kv_cache_gib=0.1, gpu_memory_utilization=0.5, **named, **options)))

    return find


def only(problems: list[Problem]) -> str:
    (problem,) = problems
    return f"{problem.path}: found {problem.found}; expected {problem.expected}. {problem.remedy}"


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_fits_has_no_problems(problems: Problems, drafter: Callable[..., Path], method: Any) -> None:
    directory = drafter(method)
    assert problems(directory, speculative_method=method) == []
    assert problems(directory, speculative_method=method, device="cuda") == []


def test_keys_that_exclude_each_other(problems: Problems, drafter: Callable[..., Path]) -> None:
    directory = drafter()
    assert only(problems(directory, speculative_ngram=2)).startswith("generator.vllm.speculative_ngram: found 2")
    found = problems(None, speculative_method="eagle", speculative_tokens=3)
    assert [problem.path for problem in found] == ["generator.vllm.speculative_method", "generator.vllm.speculative_tokens"]
    for options in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        assert "8 bits" in only(problems(directory, device="cuda", **options))


def test_a_directory_that_is_not_there_or_damaged(problems: Problems, drafter: Callable[..., Path]) -> None:
    directory = drafter()
    assert "no such directory" in only(problems(directory / "elsewhere"))
    (directory / "model.safetensors").unlink()
    assert "no weights" in only(problems(directory))
    (directory / "config.json").unlink()
    assert "no config.json" in problems(directory)[0].found


@pytest.mark.parametrize("method", METHODS)
def test_another_vocabulary(problems: Problems, drafter: Callable[..., Path], method: Any) -> None:
    found = only(problems(drafter(method, vocab_size=4096), speculative_method=method))
    assert "vocab_size = 4096" in found
    assert "policy" in found


def test_other_tokens_of_the_same_number(problems: Problems, drafter: Callable[..., Path]) -> None:
    directory = drafter()
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    (directory / "spaces.json").write_text(json.dumps(content, indent=8))
    (directory / "spaces.json").replace(file)
    assert problems(directory) == []
    table = content["model"]["vocab"]
    one, other = list(table)[-2:]
    table[one], table[other] = table[other], table[one]
    file.write_text(json.dumps(content))
    assert "with other tokens" in only(problems(directory))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_for_other_hidden_states(problems: Problems, drafter: Callable[..., Path], method: Any) -> None:
    assert "hidden_size = 64" in only(problems(drafter(method, hidden_size=64), speculative_method=method))


def test_what_vllm_would_take_for_another_method(problems: Problems, drafter: Callable[..., Path]) -> None:
    directory = drafter()
    renamed = directory.rename(directory.with_name("Small-EAGLE3"))
    assert 'speculative_method = "eagle3"' in only(problems(renamed))
    file = renamed.rename(directory) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "deepseek_v3"}))
    assert "deepseek_v3" in only(problems(directory))


def test_layouts_and_lengths_are_the_drafters_too(problems: Problems, drafter: Callable[..., Path]) -> None:
    short = drafter(max_position_embeddings=32, num_key_value_heads=1, num_attention_heads=1, head_dim=48)
    found = problems(short, tensor_parallel=2)
    assert {problem.found.split(" (of")[0] for problem in found} == {
        "2, with a model of 1 attention heads",
        "head_dim = 48",
        "max_position_embeddings = 32",
    }


def test_the_drafters_cache_takes_its_share(problems: Problems, drafter: Callable[..., Path]) -> None:
    assert problems(None, length=100) == []
    assert "cpu_kv_cache_gib" in only(problems(drafter(num_hidden_layers=40_000), length=100))


def test_the_engine_leaves_the_drafter_a_token_of_each_sequence(model: Path) -> None:
    context = GeneratorContext(model=ModelSpec(path=str(model)), rank_info=RankInfo(), seed=0, max_sequence_length=64)
    config = VllmConfig(max_num_seqs=16, max_num_batched_tokens=64, speculative_model="small")
    settings = engine_settings(context, config)
    assert settings.has_drafter
    assert settings.arguments["max_num_batched_tokens"] == 64 + 16
    assert not engine_settings(context, VllmConfig(speculative_ngram=2)).has_drafter
    own = engine_settings(context, VllmConfig(max_num_seqs=16, max_num_batched_tokens=64, speculative_method="mtp"))
    assert own.has_drafter
    assert own.arguments["max_num_batched_tokens"] == 64 + 16
    assert "model" not in own.arguments["speculative_config"]


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_own_head(tmp_path_factory.mktemp("headed") / "model")


@pytest.fixture
def changed(with_head: Path, tmp_path: Path) -> Callable[..., Path]:
    """The directory of a model with a multi-token head, with these values in its config.json."""

    def make(name: str = "changed", **values: Any) -> Path:
        directory = tmp_path / name
        shutil.copytree(with_head, directory)
        change_config(directory, values)
        return directory

    return make


def test_the_policys_own_head_has_no_problems(problems: Problems, with_head: Path, changed: Callable[..., Path]) -> None:
    for device in ("cpu", "cuda"):
        assert problems(None, policy=with_head, speculative_method="mtp", speculative_tokens=2, device=device) == []
        assert problems(changed(device), policy=with_head, speculative_method="mtp", device=device) == []


def test_a_model_without_a_head(problems: Problems, changed: Callable[..., Path]) -> None:
    without = changed("none", num_nextn_predict_layers=0)
    assert "num_nextn_predict_layers = 0" in only(problems(None, policy=without, speculative_method="mtp"))
    named = changed("named", num_nextn_predict_layers=2)
    assert "no model.layers.3.eh_proj.weight" in only(problems(None, policy=named, speculative_method="mtp"))
    file = without / "config.json"
    content = json.loads(file.read_text())
    del content["num_nextn_predict_layers"]
    file.write_text(json.dumps(content))
    assert "no num_nextn_predict_layers" in only(problems(None, policy=without, speculative_method="mtp"))


def test_layers_that_are_no_number_are_the_models_own_problem(problems: Problems, changed: Callable[..., Path]) -> None:
    assert "num_hidden_layers" in only(problems(None, policy=changed(num_hidden_layers="two"), speculative_method="mtp"))


def test_a_family_without_multi_token_heads(problems: Problems) -> None:
    found = only(problems(None, speculative_method="mtp"))
    assert found.startswith("generator.vllm.speculative_method")
    assert "qwen3" in found
    assert "glm4_moe" in found


def test_a_head_that_guesses_more_tokens_at_a_time(problems: Problems, changed: Callable[..., Path]) -> None:
    policy = changed(num_nextn_predict_layers=2)
    file = policy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.2.eh_proj.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    for tokens in (1, 2, 4):
        assert problems(None, policy=policy, speculative_method="mtp", speculative_tokens=tokens) == []
    found = only(problems(None, policy=policy, speculative_method="mtp", speculative_tokens=3))
    assert found.startswith("generator.vllm.speculative_tokens: found 3; expected at most 2")


def test_the_head_of_another_model(problems: Problems, with_head: Path, changed: Callable[..., Path]) -> None:
    found = problems(changed(num_nextn_predict_layers=2), policy=with_head, speculative_method="mtp")
    assert [problem.found for problem in found] == ["num_nextn_predict_layers = 2"]
    other = changed("other", hidden_size=32, num_hidden_layers=3)
    found = problems(other, policy=with_head, speculative_method="mtp")
    assert [problem.found for problem in found] == ["hidden_size = 32", "num_hidden_layers = 3"]
    short = changed("short", max_position_embeddings=32)
    assert "32" in only(problems(short, policy=with_head, speculative_method="mtp"))


def test_what_the_policys_own_head_does_not_go_with(
    problems: Problems, with_head: Path, changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mtp = {"policy": with_head, "speculative_method": "mtp"}
    assert 'with speculative_method = "mtp"' in only(problems(None, speculative_ngram=2, **mtp))
    for options in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        found = only(problems(None, device="cuda", **mtp, **options))
        assert found.startswith("generator.vllm.speculative_method")
        assert "8 bits" in found
    renamed = changed("eagle-glm")
    assert "method eagle" in only(problems(None, policy=renamed, speculative_method="mtp"))
    monkeypatch.chdir(tmp_path)
    assert "download it first" in only(problems(None, policy="owner/glm", speculative_method="mtp"))
