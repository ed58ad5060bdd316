"""Faults of a reward model are reported before anything starts."""

import json
import shutil

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec, Note
from rlcore_reward_model.check import check
from rlcore_reward_model.config import RewardModelConfig
from rlcore_torchkit.testing.models import make_model

CONTEXT = CheckContext(model=ModelSpec(path="policy"), device="cpu", world_size=1, max_sequence_length=32)


def found(config, context=CONTEXT):
    return [problem.found for problem in check(context, config)]


def test_a_reward_model_is_fine_and_so_is_a_name_on_the_hub(reward_model):
    assert found(RewardModelConfig(path=str(reward_model))) == []
    assert found(RewardModelConfig(path="org/name")) == []


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", {"id2label": {"0": "bad", "1": "good"}}, "2 labels"),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM"),
        ("config.json", {"rope_theta": 5e5}, "rope_theta = 500000.0, and rope_parameters.rope_theta = 10000.0"),
        ("model.safetensors", None, "no weights"),
        ("tokenizer.json", None, "no tokenizer"),
    ],
)
def test_files_that_make_no_reward_model_are_named(reward_model, tmp_path, file, content, text):
    path = tmp_path / "model"
    shutil.copytree(reward_model, path)
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | content))
    assert found(RewardModelConfig(path=str(path))) == [text]


def test_a_directory_that_is_not_there_and_keys_that_do_nothing_are_named(tmp_path):
    config = RewardModelConfig(path=str(tmp_path / "nothing"), system_prompt="Be kind.", device="cuda")
    assert found(config) == ["no such directory", "a text", '"cuda", in a run on cpu']
    cuda = evolve(CONTEXT, device="cuda")
    assert found(RewardModelConfig(path=str(make_model(tmp_path / "m", head="value")), device="cuda"), cuda) == []


def test_memory_of_unknown_size_that_nothing_counts_is_noted(reward_model, monkeypatch):
    context = evolve(CONTEXT, device="cuda")
    (note,) = check(context, RewardModelConfig(path="org/name", device="cuda"))
    assert isinstance(note, Note)
    assert note.path == "environment.reward_model.device"
    assert "no directory org/name with a config.json" in note.text
    (note,) = check(evolve(context, planned_options={"memory_share"}), RewardModelConfig(path="org/name", device="cuda"))
    assert "Set memory_share of the generator to less" in note.text
    assert check(context, RewardModelConfig(path=str(reward_model), device="cuda")) == []
    assert check(context, RewardModelConfig(path="org/name")) == []
    monkeypatch.chdir(reward_model.parent)
    (note,) = check(context, RewardModelConfig(path=reward_model.name[:-1], device="cuda"))
    assert f"Did you mean {reward_model.name}?" in note.text


def test_options_of_servers_and_of_a_process_exclude_each_other(reward_model, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    path = str(reward_model)
    alone = RewardModelConfig(path=path, model="m", max_attempts=5)
    assert [problem.path.rpartition(".")[2] for problem in check(CONTEXT, alone)] == ["model", "max_attempts"]
    served = RewardModelConfig(path=path, base_urls=("127.0.0.1:1",), device="cuda", max_batch=3, api_key_env="NO_SUCH_KEY")
    keys = [problem.path.rpartition(".")[2] for problem in check(CONTEXT, served)]
    assert keys == ["device", "max_batch", "base_urls", "api_key_env"]
    slow = RewardModelConfig(path=path, base_urls=("http://127.0.0.1:1",), timeout_s=60.0)
    assert found(slow, evolve(CONTEXT, environment_timeout_s=30.0)) == ["60"]


def test_servers_need_the_tokenizer_alone(reward_model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reward_model / name, tmp_path / name)
    assert found(RewardModelConfig(path=str(tmp_path), base_urls=("http://127.0.0.1:1",))) == []
