"""What a recipe is refused for before an engine starts; none of it needs SGLang."""

import json
from pathlib import Path

from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec, Note
from rlcore_sglang.check import check
from rlcore_sglang.config import SglangConfig

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def context(tmp_path: Path, **changes: object) -> CheckContext:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    return CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=96)


def test_a_recipe_that_fits(tmp_path: Path) -> None:
    assert list(check(context(tmp_path), SglangConfig())) == []
    assert list(check(context(tmp_path), SglangConfig(tensor_parallel=2))) == []
    assert list(check(context(tmp_path), SglangConfig(tensor_parallel=6))) == []


def test_devices_that_cannot_share_the_heads(tmp_path: Path) -> None:
    for size in (3, 4):
        (problem,) = check(context(tmp_path), SglangConfig(tensor_parallel=size))
        assert problem.path == "generator.sglang.tensor_parallel"
        assert problem.found == f"{size}, for 6 heads and 2 of keys and values"


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    config = SglangConfig(tensor_parallel=4, engine={"tp_size": 2, "chunked_prefill_size": 64})
    problems = check(evolve(context(tmp_path), max_sequence_length=513), config)
    assert [problem.path for problem in problems] == [
        "generator.sglang.engine.tp_size",
        str(tmp_path / "config.json"),
        "generator.sglang.tensor_parallel",
    ]
    assert problems[1].found == "max_position_embeddings = 512"


def test_a_family_that_nothing_describes(tmp_path: Path) -> None:
    (problem,) = check(context(tmp_path, model_type="mamba", architectures=["MambaForCausalLM"]), SglangConfig())
    assert "mamba" in problem.found


def test_a_gpu_is_said_to_be_untried(tmp_path: Path) -> None:
    (note,) = check(evolve(context(tmp_path), device="cuda"), SglangConfig())
    assert isinstance(note, Note)
    assert "CPUs alone" in note.text
