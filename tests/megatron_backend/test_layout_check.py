"""Ranks numbered as Megatron numbers them, and every size that does not divide refused with the key to change."""

import math

import pytest
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlcore_megatron.layouts import layout_check
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.layout_check import layout_problems
from rlcore_megatron.setup.config import MegatronConfig

DENSE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
}
EXPERTS = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ONE = MegatronConfig(tensor_parallel=1, pipeline_parallel=1, context_parallel=1, expert_parallel=1)
SIZES = st.sampled_from([1, 2, 3, 4])


def layout_of(world_size: int = 1, rank: int = 0, **sizes: object) -> ParallelLayout:
    return ParallelLayout.of(evolve(ONE, **sizes), rank, world_size, DENSE, "cpu", 32)


def texts(world_size: int = 1, device: str = "cpu", model: dict | None = None, **sizes: object) -> list[str]:
    return [str(problem) for problem in layout_problems(evolve(ONE, **sizes), world_size, device, model)]


def generated_groups(sizes: tuple[int, ...], dimension: str) -> list[list[int]]:
    """Megatron's own groups of a dimension, each in order of rank."""
    from megatron.core.parallel_state import RankGenerator

    tensor, expert, data, pipeline, context = sizes
    return RankGenerator(tp=tensor, ep=expert, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp").get_ranks(dimension)


@given(tensor=SIZES, context=SIZES, data=SIZES, pipeline=SIZES)
@settings(max_examples=20, deadline=None)
def test_ranks_are_numbered_as_megatron_numbers_them(tensor: int, context: int, data: int, pipeline: int) -> None:
    world_size = tensor * context * data * pipeline
    made = [
        ParallelLayout(rank=rank, tensor=tensor, context=context, data=data, pipeline=pipeline) for rank in range(world_size)
    ]
    places = {"tp": "tensor_rank", "cp": "context_rank", "dp": "data_rank", "pp": "pipeline_rank"}
    for dimension, attribute in places.items():
        for group in generated_groups((tensor, 1, data, pipeline, context), dimension):
            assert [getattr(made[rank], attribute) for rank in group] == list(range(len(group)))
            others = [name for name in places.values() if name != attribute]
            assert len({tuple(getattr(made[rank], name) for name in others) for rank in group}) == 1
    assert all(one.world_size == world_size for one in made)


@given(expert_tensor=SIZES, expert=SIZES, expert_data=SIZES, pipeline=SIZES, tensor=SIZES)
@settings(max_examples=20, deadline=None)
def test_expert_ranks_are_numbered_as_megatron_numbers_them(
    expert_tensor: int, expert: int, expert_data: int, pipeline: int, tensor: int
) -> None:
    stage = expert_tensor * expert * expert_data
    assume(stage % tensor == 0)
    sizes = {"tensor": tensor, "data": stage // tensor, "pipeline": pipeline}
    made = [ParallelLayout(rank=rank, expert=expert, expert_tensor=expert_tensor, **sizes) for rank in range(stage * pipeline)]
    for dimension, attribute in {"tp": "expert_tensor_rank", "ep": "expert_rank"}.items():
        for group in generated_groups((expert_tensor, expert, expert_data, pipeline, 1), dimension):
            assert [getattr(made[rank], attribute) for rank in group] == list(range(len(group)))


def test_data_parallel_ranks_are_what_the_other_sizes_leave() -> None:
    made = [layout_of(16, rank, tensor_parallel=2, context_parallel=2, pipeline_parallel=2) for rank in range(16)]
    assert made[0].data == 2
    assert [one.data_layout.data_parallel_rank for one in made] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert {one.data_layout.data_parallel_size for one in made} == {2}
    # Of each data-parallel rank one speaks, on the stage that holds the head.
    assert [one.rank for one in made if one.is_first_of_data_rank] == [8, 12]
    assert [one.rank for one in made if one.is_first_stage] == list(range(8))
    assert [one.rank for one in made if one.is_last_stage] == list(range(8, 16))


def test_on_a_cpu_auto_is_one_everywhere() -> None:
    layout = ParallelLayout.of(MegatronConfig(tensor_parallel=2), 0, 4, DENSE, "cpu", 32)
    assert (layout.tensor, layout.context, layout.pipeline, layout.expert, layout.data) == (2, 1, 1, 1, 2)
    assert layout.reason == ""


def test_a_config_json_that_lacks_sizes_is_not_judged() -> None:
    assert texts(2, model={"num_attention_heads": 3}, tensor_parallel=2) == []


def test_what_divides_is_right() -> None:
    assert texts(8, model=DENSE, tensor_parallel=4, pipeline_parallel=2, virtual_pipeline_parallel=4) == []
    assert texts(3, model=DENSE, pipeline_parallel=3) == []
    assert texts(2, model=DENSE, pipeline_parallel=2, pipeline_layers=(3, 5)) == []
    assert texts(8, model=DENSE, tensor_parallel=2, context_parallel=4) == []
    assert texts(16, model=EXPERTS, tensor_parallel=4, expert_parallel=4, pipeline_parallel=2) == []
    assert texts(4, model=DENSE, tensor_parallel="auto", context_parallel=2, expert_parallel="auto") == []


@pytest.mark.parametrize(
    ("sizes", "world_size", "problem"),
    [
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2},
            4,
            "trainer.megatron: found tensor_parallel 2 x context_parallel 2 x pipeline_parallel 2 = 8 on 4 rank(s); expected a "
            "divisor of 4, the trainer's ranks. Lower one of them, or give the trainer more ranks",
        ),
        (
            {"expert_parallel": 4, "expert_tensor_parallel": 2},
            4,
            "trainer.megatron: found expert_tensor_parallel 2 x expert_parallel 4 x pipeline_parallel 1 = 8 on 4 rank(s); "
            "expected a divisor of 4, the trainer's ranks. Lower one of them, or give the trainer more ranks",
        ),
        (
            {"virtual_pipeline_parallel": 2},
            1,
            "trainer.megatron.virtual_pipeline_parallel: found 2 with pipeline_parallel 1; expected 1. "
            "Raise pipeline_parallel: parts of a model take turns on several stages",
        ),
        (
            {"virtual_pipeline_parallel": 2, "pipeline_parallel": "auto"},
            2,
            "trainer.megatron.virtual_pipeline_parallel: found 2 with pipeline_parallel 1; expected 1. "
            "Raise pipeline_parallel: parts of a model take turns on several stages",
        ),
        ({"fp8": True}, 1, "trainer.megatron.fp8: found true on cpu; expected false. Float8 needs a GPU"),
    ],
)
def test_what_no_model_can_run_in(sizes: dict, world_size: int, problem: str) -> None:
    assert problem in texts(world_size, **sizes)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (
            {"tensor_parallel": 3},
            "trainer.megatron.tensor_parallel: found tensor_parallel 3 for 8 attention heads; expected a divisor of 8. "
            "Choose one of 1, 2, 4, 8",
        ),
        (
            {"tensor_parallel": 6},
            "trainer.megatron.tensor_parallel: found tensor_parallel 6 for 4 key heads; expected a divisor or a multiple of 4. "
            "Choose one of 1, 2, 4, or a multiple of 4",
        ),
        (
            {"tensor_parallel": 5},
            "trainer.megatron.tensor_parallel: found tensor_parallel 5 for 128 tokens of the vocabulary; expected a divisor of "
            "128. Choose one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            {"tensor_parallel": 5},
            "trainer.megatron.tensor_parallel: found tensor_parallel 5 for 96 columns of the MLP; expected a divisor of 96. "
            "Choose one of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 5},
            "trainer.megatron.pipeline_parallel: found pipeline_parallel 2 x virtual_pipeline_parallel 5 for 8 layers; "
            "expected at most 8: each part of a stage has a layer at least. Lower one of them",
        ),
        (
            {"pipeline_parallel": 9},
            "trainer.megatron.pipeline_parallel: found pipeline_parallel 9 for 8 layers; expected at most 8: each part of a "
            "stage has a layer at least. Lower it",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_layers": (2, 3, 3)},
            "trainer.megatron.pipeline_layers: found 3 numbers with pipeline_parallel 2; expected 2, one for each part. "
            'Or set it to "even"',
        ),
        (
            {"pipeline_parallel": 2, "pipeline_layers": (3, 4)},
            'trainer.megatron.pipeline_layers: found 3 + 4 = 7 layers; expected 8, all of the model\'s. Or set it to "even"',
        ),
        (
            {"pipeline_parallel": "auto", "pipeline_layers": (4, 4)},
            "trainer.megatron.pipeline_layers: found 2 numbers with pipeline_parallel 1; expected 1, one for each part. "
            'Or set it to "even"',
        ),
        (
            {"context_parallel": 4, "tensor_parallel": 4},
            "trainer.megatron.context_parallel: found context_parallel 4 x tensor_parallel 4 for 8 attention heads; expected a "
            "divisor of 8: context ranks exchange their tokens for heads, of those that tensor_parallel leaves. "
            "Let the product be one of 1, 2, 4, 8",
        ),
        (
            {"expert_parallel": 2},
            "trainer.megatron.expert_parallel: found 2 for a model without experts; expected 1. "
            "Leave it out: it divides mixture-of-experts layers alone",
        ),
        (
            {"expert_tensor_parallel": 2},
            "trainer.megatron.expert_tensor_parallel: found 2 for a model without experts; expected 1. "
            "Leave it out: it divides mixture-of-experts layers alone",
        ),
    ],
)
def test_what_a_dense_model_cannot_run_in(sizes: dict, problem: str) -> None:
    world_size = math.prod(size for size in sizes.values() if isinstance(size, int))
    assert problem in texts(world_size, model=DENSE, **sizes)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (
            {"expert_parallel": 3},
            "trainer.megatron.expert_parallel: found expert_parallel 3 for 8 experts; expected a divisor of 8. "
            "Choose one of 1, 2, 4, 8",
        ),
        (
            {"expert_tensor_parallel": 5},
            "trainer.megatron.expert_tensor_parallel: found expert_tensor_parallel 5 for 48 columns of an expert; expected a "
            "divisor of 48. Choose one of 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
        ),
        (
            {"tensor_parallel": 2, "sequence_parallel": False},
            "trainer.megatron.sequence_parallel: found false with tensor_parallel 2 for a model with 8 experts; expected true: "
            "Megatron's routers train on tokens that tensor ranks divide. Leave it out, or set tensor_parallel to 1",
        ),
    ],
)
def test_what_a_model_with_experts_cannot_run_in(sizes: dict, problem: str) -> None:
    world_size = math.prod(size for size in sizes.values() if isinstance(size, int) and not isinstance(size, bool))
    assert problem in texts(world_size, model=EXPERTS, **sizes)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (
            {"expert_tensor_parallel": 2, "expert_parallel": 2},
            "2 with expert_parallel 2 on a CPU; expected 1: gloo gathers only tensors of equal size, and experts "
            "receive unequal numbers of tokens. Leave it out",
        ),
        (
            {"expert_tensor_parallel": 2},
            "2 with tensor_parallel 1 x context_parallel 1 on a CPU; expected 1: gloo gathers only tensors of equal size, and "
            "microbatches of data-parallel ranks differ in size. Leave it out, or choose a divisor of 1",
        ),
        (
            {"expert_tensor_parallel": 4, "tensor_parallel": 2},
            "4 with tensor_parallel 2 x context_parallel 1 on a CPU; expected 1: gloo gathers only tensors of equal size, and "
            "microbatches of data-parallel ranks differ in size. Leave it out, or choose a divisor of 2",
        ),
        ({"expert_tensor_parallel": 2, "tensor_parallel": 2}, None),
        ({"expert_tensor_parallel": 4, "tensor_parallel": 2, "context_parallel": 2}, None),
    ],
)
def test_ranks_on_a_cpu_share_experts_where_they_have_equally_many_tokens(sizes: dict, problem: str | None) -> None:
    expected = [] if problem is None else [f"trainer.megatron.expert_tensor_parallel: found {problem}"]
    assert texts(4, "cpu", EXPERTS, **sizes) == expected
    assert texts(4, "cuda", EXPERTS, **sizes) == []


def test_ranks_may_share_key_heads_whose_rows_they_divide() -> None:
    assert texts(8, model=DENSE, tensor_parallel=8) == []
    (text,) = texts(8, model=DENSE | {"num_key_value_heads": 1, "head_dim": 2}, tensor_parallel=8)
    assert "tensor_parallel 8 for 20 rows of queries, keys and values; expected a divisor of 20" in text


def test_without_tensor_parallel_sequence_parallel_says_nothing() -> None:
    assert texts(1, model=EXPERTS, sequence_parallel=False) == []
    assert texts(2, model=DENSE, tensor_parallel=2, sequence_parallel=False) == []


def test_all_problems_come_at_once() -> None:
    found = texts(7, model=DENSE, tensor_parallel=3, pipeline_parallel=9, expert_parallel=2)
    assert len(found) == 7
    assert sum("trainer.megatron.tensor_parallel" in text for text in found) == 3


@pytest.mark.parametrize("installed", [False, True])
def test_float8_needs_the_engine_and_sides_that_are_multiples(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(layout_check, "transformer_engine_version", lambda: "2.12.0" if installed else None)
    model = DENSE | {"hidden_size": 72, "head_dim": 8}
    found = texts(4, "cuda", model, tensor_parallel=4, fp8=True)
    missing = "trainer.megatron.fp8: found true with no TransformerEngine; expected layers of TransformerEngine. "
    assert any(text.startswith(missing) for text in found) is not installed
    assert [text.removeprefix("trainer.megatron.fp8: found true with ") for text in found if " = " in text] == [
        "hidden_size = 72; expected a multiple of 16. Set it to false",
        "num_key_value_heads · head_dim / tensor_parallel = 8; expected a multiple of 16. Set it to false",
        "intermediate_size / tensor_parallel = 24; expected a multiple of 16. Set it to false",
    ]
    assert any("transformer_engine = false" in text for text in texts(1, "cuda", fp8=True, transformer_engine=False))


def test_float8_sides_of_the_expert_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_check, "transformer_engine_version", lambda: "2.12.0")
    model = EXPERTS | {"head_dim": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 72}
    (problem,) = texts(2, "cuda", model, fp8=True)
    assert "the shared expert's columns / tensor_parallel = 72" in problem
