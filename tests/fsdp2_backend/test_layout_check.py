"""The numbering of ranks, and what is found wrong with parallel sizes before anything starts."""

import importlib.util
import json

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ConfigError, ModelSpec
from rlcore_fsdp2 import layout_check
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_model_files.directory import model_problems


@pytest.fixture
def problems(model_directory):
    """A function (world size, architecture, **options) -> path and text of every problem."""

    def find(world_size, architecture="qwen3", device="cpu", **options):
        model = ModelSpec(path=str(model_directory(architecture)))
        context = CheckContext(model=model, device=device, world_size=world_size, max_sequence_length=64)
        return [(problem.path, str(problem)) for problem in check(context, Fsdp2Config(**options))]

    return find


def test_ranks_are_numbered_with_the_tensor_dimension_fastest():
    config = Fsdp2Config(tensor_parallel=2, context_parallel=3, replicate=2)
    layouts = [ParallelLayout.of(config, rank, 24) for rank in range(24)]
    assert {layout.shard for layout in layouts} == {2}
    assert {layout.world_size for layout in layouts} == {24}
    assert [layout.tensor_rank for layout in layouts[:4]] == [0, 1, 0, 1]
    assert [layout.context_rank for layout in layouts[:7]] == [0, 0, 1, 1, 2, 2, 0]
    assert [layout.data.data_parallel_rank for layout in layouts] == [rank // 6 for rank in range(24)]
    assert {layout.data.data_parallel_size for layout in layouts} == {4}
    assert [layout.rank for layout in layouts if layout.is_first_of_data_rank] == [0, 6, 12, 18]
    assert {layout.fsdp for layout in layouts} == {6}


def test_neighbours_share_the_experts():
    config = Fsdp2Config(expert_parallel=2, context_parallel=2)
    assert [ParallelLayout.of(config, rank, 4).expert_rank for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("world_size", "architecture", "options"),
    [
        (1, "qwen3", {}),
        (4, "qwen3", {"tensor_parallel": 2, "context_parallel": 2}),
        (8, "llama", {"tensor_parallel": 2, "replicate": 4}),
        (4, "qwen3_moe", {"expert_parallel": 4, "context_parallel": 2}),
        (3, "qwen2", {}),
        (4, "qwen3_moe", {"tensor_parallel": 2, "cpu_offload": True}),
    ],
)
def test_sizes_that_fit_have_no_problem(world_size, architecture, options, problems):
    assert problems(world_size, architecture, **options) == []


def test_ranks_that_do_not_divide(problems):
    [(path, text)] = problems(6, tensor_parallel=2, replicate=2)
    assert path == "trainer.fsdp2"
    assert "replicate 2 x context_parallel 1 x tensor_parallel 2 = 4 on 6 rank(s); expected a divisor of 6" in text
    [(path, text)] = problems(6, "qwen3_moe", expert_parallel=4)
    assert path == "trainer.fsdp2.expert_parallel"
    assert "expected a divisor of 6" in text


def test_everything_that_a_model_cannot_share_is_reported_at_once(problems):
    texts = [text for _, text in problems(5, "qwen3_moe", tensor_parallel=5)]
    assert len(texts) == 4
    for count, key in ((4, "num_attention_heads"), (2, "num_key_value_heads"), (101, "vocab_size"), (4, "num_experts")):
        matching = [text for text in texts if key in text]
        assert len(matching) == 1, key
        assert f"tensor_parallel = 5 for {count} " in matching[0] or key == "vocab_size"
    dense = " ".join(text for _, text in problems(5, "llama", tensor_parallel=5))
    assert "intermediate_size" in dense
    assert "Choose one of 1, 2, 3, 4, 6" in dense
    [(path, text)] = problems(8, "qwen3", context_parallel=8)
    assert path == "trainer.fsdp2.context_parallel"
    assert "context_parallel = 8 for 4 attention heads" in text
    [(_, text)] = problems(8, "qwen3", context_parallel=4, tensor_parallel=2)
    assert "context_parallel x tensor_parallel = 8 for 4 attention heads" in text


def test_experts_that_are_not_there_or_do_not_divide(problems):
    [(path, text)] = problems(2, "qwen3", expert_parallel=2)
    assert (path, "for a model without experts" in text) == ("trainer.fsdp2.expert_parallel", True)
    [(path, text)] = problems(3, "qwen3_moe", expert_parallel=3)
    assert "expert_parallel = 3 for 4 experts" in text


def test_float8_needs_torchao_and_sides_of_whole_blocks(problems, monkeypatch):
    monkeypatch.setattr(layout_check, "find_spec", lambda name: None)
    [(path, text)] = problems(1, fp8=True)
    assert path == "trainer.fsdp2.fp8"
    assert "pip install 'rlcore-fsdp2[fp8]'" in text
    monkeypatch.setattr(layout_check, "find_spec", importlib.util.find_spec)
    texts = [text for _, text in problems(2, fp8=True, tensor_parallel=2, device="cuda")]
    assert any("head_dim / tensor_parallel = 8; expected a multiple of 16" in text for text in texts)


def test_a_model_that_the_check_could_not_see_is_refused_by_the_trainer(model_directory, backend):
    with pytest.raises(ConfigError) as raised:
        backend(model_directory("llama"), config=Fsdp2Config(expert_parallel=2), world_size=2, rendezvous="file:///nowhere")
    assert [problem.path for problem in raised.value.problems] == ["trainer.fsdp2.expert_parallel"]


def test_a_config_that_is_no_table_is_left_to_the_cores_model_check(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps([]))
    context = CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=64)
    assert not list(check(context, Fsdp2Config()))
    assert any("found list" in str(problem) for problem in model_problems(str(tmp_path)))
    assert list(check(evolve(context, model=ModelSpec(path="hub/name")), Fsdp2Config(tensor_parallel=2, replicate=1)))


def test_context_ranks_do_not_share_states_of_a_model_of_images():
    text = {"layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4}
    model = {"model_type": "qwen3_5", "vision_config": {"depth": 2}, "text_config": text}
    (problem,) = layout_check.undescribed_problems(Fsdp2Config(context_parallel=2), model)
    assert (problem.path, problem.expected) == ("trainer.fsdp2.context_parallel", "1")
    assert list(layout_check.undescribed_problems(Fsdp2Config(), model)) == []
