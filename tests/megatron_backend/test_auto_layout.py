"""What "auto" chooses: sizes that divide and fit, no more of them than there has to be, and the reason in a sentence."""

from math import prod

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ConfigError
from rlcore.testing.models import make_model
from rlcore_megatron.auto_layout import choose
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.layout import ParallelLayout
from rlcore_megatron.layout_check import AUTO_SIZES, layout_problems
from rlcore_megatron.memory import USABLE, Parameters, Workload, estimate
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.models import standard_config

GIB = 2**30
SMALL = {  # the shape of Qwen2.5-1.5B
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MIDDLE = {  # of Llama-3.1-8B
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LARGE = MIDDLE | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
EXPERTS = {  # of Qwen3-30B-A3B
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
MODELS = {"small": SMALL, "middle": MIDDLE, "large": LARGE, "experts": EXPERTS}
AUTO = MegatronConfig(transformer_engine=True)
ONE = evolve(AUTO, **dict.fromkeys(AUTO_SIZES, 1))

configs = st.builds(
    lambda fixed, recompute: evolve(AUTO, recompute=recompute, **fixed),
    st.dictionaries(st.sampled_from(AUTO_SIZES), st.sampled_from([1, 2, 4]), max_size=2),
    st.sampled_from(["none", "selective", "full"]),
)
loads = st.builds(
    Workload,
    world_size=st.sampled_from([1, 2, 4, 6, 8, 16, 32, 64]),
    model=st.sampled_from(list(MODELS.values())),
    device=st.just("cuda"),
    max_sequence_length=st.sampled_from([512, 8192, 65536]),
    max_microbatch_tokens=st.sampled_from([None, 1024, 16384]),
    memory_bytes=st.integers(8, 200).map(lambda size: size * GIB),
    local_size=st.sampled_from([1, 4, 8]),
    needs_reference=st.booleans(),
)


def load_of(model: dict, world_size: int, memory_gib: int | None = 80, **options: object) -> Workload:
    options = {"max_sequence_length": 8192, **options}
    memory = None if memory_gib is None else memory_gib * GIB
    return Workload(world_size=world_size, model=model, device="cuda", memory_bytes=memory, **options)


def sizes_of(config: MegatronConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in AUTO_SIZES if getattr(config, name) != 1}


def num_shared(config: MegatronConfig) -> int:
    return prod(getattr(config, name) for name in AUTO_SIZES if name != "expert_parallel")


def attempt(config: MegatronConfig, load: Workload) -> MegatronConfig | None:
    try:
        return choose(config, load).config
    except ConfigError:
        return None


@given(config=configs, load=loads)
@settings(max_examples=150, deadline=None)
def test_what_is_chosen_divides_and_fits_and_keeps_what_was_set(config: MegatronConfig, load: Workload) -> None:
    chosen = attempt(config, load)
    if chosen is None:
        return
    assert layout_problems(chosen, load.world_size, "cuda", load.model) == []
    for name in AUTO_SIZES:
        assert getattr(config, name) in ("auto", getattr(chosen, name))
    if config.tensor_parallel == "auto":
        assert load.local_size % chosen.tensor_parallel == 0 or load.world_size % chosen.tensor_parallel == 0
        assert chosen.tensor_parallel <= load.local_size
    if any(getattr(config, name) == "auto" for name in AUTO_SIZES):
        dims = ModelDims.of(load.model)
        assert estimate(dims, chosen, load).total <= USABLE * load.memory_bytes


@given(config=configs, load=loads, more=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_more_memory_never_gives_more_parallelism(config: MegatronConfig, load: Workload, more: int) -> None:
    chosen = attempt(config, load)
    with_more = attempt(config, evolve(load, memory_bytes=load.memory_bytes + more * GIB))
    if chosen is not None:
        assert with_more is not None
        assert num_shared(with_more) <= num_shared(chosen)
        if num_shared(with_more) == num_shared(chosen):
            cost = [
                (c.pipeline_parallel, c.context_parallel, c.tensor_parallel, c.expert_parallel) for c in (with_more, chosen)
            ]
            assert cost[0] <= cost[1]


@given(load=loads, config=configs)
@settings(max_examples=50, deadline=None)
def test_what_fits_one_rank_divides_nothing(load: Workload, config: MegatronConfig) -> None:
    vast = evolve(load, memory_bytes=10**6 * GIB)
    fixed = evolve(ONE, **{name: size for name in AUTO_SIZES if (size := getattr(config, name)) != "auto"})
    if not layout_problems(fixed, load.world_size, "cuda", load.model):
        assert choose(config, vast).config == evolve(config, **{name: getattr(fixed, name) for name in AUTO_SIZES})


@pytest.mark.parametrize(
    ("model", "world_size", "memory", "options", "sizes"),
    [
        ("small", 1, 80, {}, {}),
        ("middle", 8, 140, {}, {}),
        ("middle", 8, 80, {}, {"tensor_parallel": 2}),
        ("middle", 8, 140, {"max_sequence_length": 65536}, {"tensor_parallel": 4}),
        ("small", 8, 80, {"max_sequence_length": 65536}, {"tensor_parallel": 2, "context_parallel": 2}),
        ("large", 32, 80, {}, {"tensor_parallel": 8, "context_parallel": 2, "pipeline_parallel": 2}),
        ("experts", 32, 140, {}, {"expert_parallel": 8}),
        # No tensor ranks over machines of one GPU.
        ("middle", 8, 80, {"local_size": 1}, {"context_parallel": 4}),
        # A machine of six: four would straddle two of them.
        ("middle", 12, 60, {"local_size": 6}, {"tensor_parallel": 2}),
    ],
)
def test_layouts_of_known_models(model: str, world_size: int, memory: int, options: dict, sizes: dict) -> None:
    load = load_of(MODELS[model], world_size, memory, **options)
    assert sizes_of(choose(AUTO, load).config) == sizes


def test_the_reason_is_a_sentence_with_what_it_saves() -> None:
    layout = ParallelLayout.of(AUTO, 5, 8, MIDDLE, "cuda", 8192, memory_bytes=80 * GIB)
    assert (layout.tensor, layout.data, layout.rank) == (2, 4, 5)
    assert layout.reason == (
        "tensor_parallel 2: 54.0 GiB a GPU instead of 95.2 GiB, of 80.0 GiB "
        "(weights 7.5 GiB, gradients 15.0 GiB, optimizer 11.2 GiB, activations 18.8 GiB, logits 1.5 GiB)"
    )
    alone = choose(AUTO, load_of(SMALL, 1))
    names = "tensor_parallel = expert_parallel = context_parallel = pipeline_parallel = 1"
    assert alone.reason.startswith(f"{names}: 44.4 GiB a GPU, of 80.0 GiB (weights 2.9 GiB")


def test_without_knowing_the_memory_the_smallest_that_divide_are_taken() -> None:
    unknown = choose(evolve(AUTO, virtual_pipeline_parallel=2), load_of(MIDDLE, 8, None))
    assert sizes_of(unknown.config) == {"pipeline_parallel": 2}
    assert unknown.reason == "pipeline_parallel 2: the smallest sizes that divide; whether it fits is not known"


def test_sizes_that_are_all_numbers_are_left_alone() -> None:
    config = evolve(ONE, tensor_parallel=2)
    choice = choose(config, load_of(LARGE, 2, 1))
    assert (choice.config, choice.reason) == (config, "")


def too_large(config: MegatronConfig, load: Workload) -> str:
    with pytest.raises(ConfigError) as raised:
        choose(config, load)
    (problem,) = raised.value.problems
    return str(problem)


def test_what_fits_nowhere_says_how_much_it_needs() -> None:
    assert too_large(AUTO, load_of(LARGE, 8)) == (
        "trainer.megatron: found 171.4 GiB a GPU in the layout that needs least, tensor_parallel 8 (weights 16.4 GiB, "
        "gradients 32.9 GiB, optimizer 98.6 GiB, activations 22.6 GiB, logits 1.0 GiB); expected at most 70.4 GiB, which can "
        "be planned with of 80.0 GiB. Give the trainer more GPUs. Sizes that are numbers are not held to this estimate"
    )


@pytest.mark.parametrize(
    ("load", "remedy"),
    [
        (load_of(SMALL, 1, 80, max_sequence_length=65536), 'Set trainer.megatron.recompute to "full"'),
        (
            load_of(SMALL, 1, 40, max_sequence_length=1024, max_microbatch_tokens=2**18),
            "Lower training.max_tokens_per_microbatch",
        ),
        (
            load_of(SMALL, 1, 40, max_sequence_length=2**18),
            "Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or give the trainer more GPUs",
        ),
        (load_of(MIDDLE, 1), "Give the trainer more GPUs"),
    ],
)
def test_the_remedy_is_one_that_would_do(load: Workload, remedy: str) -> None:
    assert f"GiB. {remedy}. Sizes" in too_large(AUTO, load)


def test_sizes_that_nothing_goes_with_are_named() -> None:
    assert too_large(evolve(AUTO, virtual_pipeline_parallel=2), load_of(MIDDLE, 1)) == (
        'trainer.megatron: found virtual_pipeline_parallel 2 on 1 rank(s), which no sizes in place of "auto" go with; expected '
        "sizes that divide ranks, heads, layers, experts and vocabulary. Change these, or give the trainer another "
        "number of ranks"
    )


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("qwen3", False), ("llama", False), ("qwen3_moe", False)])
def test_parameters_are_counted_as_transformers_has_them(tmp_path, architecture: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = make_model(tmp_path / "model", architecture, tied=tied)
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    dims = ModelDims.of(standard_config(config))
    whole = Parameters.of(dims, ONE)
    assert whole.dense + whole.expert == matrices
    assert (whole.expert > 0) == (architecture == "qwen3_moe")
    # Ranks that divide everything hold it all between them, but for what each keeps: routers, and both stages' tables.
    routers = dims.num_moe_layers * dims.hidden_size * dims.num_experts
    halves = Parameters.of(dims, evolve(ONE, tensor_parallel=2, expert_parallel=2))
    assert 2 * (halves.dense + halves.expert) == matrices + routers
    stages = Parameters.of(dims, evolve(ONE, pipeline_parallel=2))
    assert 2 * (stages.dense + stages.expert) == matrices + (dims.vocab_size * dims.hidden_size if tied else 0)


def test_what_ranks_share_is_divided_and_nothing_else() -> None:
    load = load_of(MIDDLE, 8)
    dims = ModelDims.of(MIDDLE)
    one = estimate(dims, ONE, load)
    tensor, context, stages = (
        estimate(dims, evolve(ONE, **{name: 2}), load) for name in ("tensor_parallel", "context_parallel", "pipeline_parallel")
    )
    assert (tensor.weights, tensor.gradients) == (one.weights // 2, one.gradients // 2)
    assert tensor.activations == pytest.approx(one.activations / 2)
    # The distributed optimizer divides its state over all ranks with the same weights: whatever the layout, over all ranks.
    assert tensor.optimizer == pytest.approx(one.optimizer) == pytest.approx(context.optimizer)
    assert (context.weights, context.activations) == (one.weights, pytest.approx(one.activations / 2))
    # The first of two stages has two microbatches in flight.
    assert stages.activations == pytest.approx(one.activations)
    assert one.weights // 2 <= stages.weights < one.weights * 0.54
    assert estimate(dims, evolve(ONE, recompute="full"), load).activations < one.activations / 8
    assert estimate(dims, ONE, evolve(load, needs_reference=True)).weights == 2 * one.weights
    wide = estimate(dims, ONE, evolve(load, dtype="float32"))
    assert (wide.weights, wide.gradients, wide.activations) == (2 * one.weights, one.gradients, 2 * one.activations)
    assert wide.optimizer == pytest.approx(one.optimizer * 8 / 12, abs=1)
    assert estimate(dims, evolve(ONE, tensor_parallel=2, sequence_parallel=False), load).activations > tensor.activations
    assert estimate(dims, evolve(ONE, transformer_engine=False), load).activations > one.activations


def test_bytes_a_parameter_are_those_of_mixed_precision() -> None:
    """2 of weights, 4 of gradients and 12 of masters and moments."""
    one = estimate(ModelDims.of(SMALL), ONE, load_of(SMALL, 1))
    parameters = Parameters.of(ModelDims.of(SMALL), ONE).dense
    assert (one.weights, one.gradients, one.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    aware = {"use_precision_aware_optimizer": True}
    halved = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"}
    quarter = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    for table, size in (
        (aware, 10),
        (aware | halved, 6),
        (aware | {"store_param_remainders": False}, 12),
        (aware | quarter, 3),
    ):
        narrow = estimate(ModelDims.of(SMALL), evolve(ONE, optimizer=table), load_of(SMALL, 1))
        assert narrow.optimizer == size * parameters
    reduced = evolve(ONE, ddp={"grad_reduce_in_fp32": False})
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        load = evolve(load_of(SMALL, 1), dtype=dtype)
        assert estimate(ModelDims.of(SMALL), reduced, load).gradients == size * parameters
    assert parameters == pytest.approx(1.54e9, rel=0.01)


def test_an_optimizers_step_takes_the_place_of_activations_in_the_peak() -> None:
    """Float32 copies of what it updates at a time: at most 2**28 elements, or the largest tensor."""
    shape, load = ModelDims.of(SMALL), load_of(SMALL, 1)
    aware = {"use_precision_aware_optimizer": True}
    moments = aware | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    parameters = Parameters.of(shape, ONE).dense
    for table, ddp, size in (
        ({}, {}, 0),
        (aware, {"grad_reduce_in_fp32": False}, 0),
        (moments, {}, 8 * 2**28),
        (moments | {"main_params_dtype": "float16"}, {}, 12 * 2**28),
        ({}, {"grad_reduce_in_fp32": False}, 4 * parameters),
        (
            aware | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75},
            {"grad_reduce_in_fp32": False},
            parameters,
        ),
    ):
        found = estimate(shape, evolve(ONE, optimizer=table, ddp=ddp), load)
        assert found.step == int(size)
        held = found.weights + found.gradients + found.optimizer
        assert found.total == held + max(found.activations + found.logits, found.step)
    assert estimate(shape, evolve(ONE, optimizer=moments), load_of(SMALL, 16)).step == int(8 * parameters / 16)
    assert estimate(shape, evolve(ONE, ddp={"grad_reduce_in_fp32": False}), evolve(load, dtype="float32")).step == 0
    table = ModelDims.of(LARGE)
    assert estimate(table, evolve(ONE, optimizer=moments), load).step == 8 * table.vocab_size * table.hidden_size
    short = evolve(load, max_sequence_length=64)
    largest = estimate(shape, evolve(ONE, optimizer=moments), short)
    assert str(largest).endswith(f"optimizer {largest.optimizer / GIB:.1f} GiB, copies of the optimizer's step 2.0 GiB")


def test_activations_are_near_those_measured() -> None:
    """One H200, forward and backward without an optimizer: 30.6 GB at the peak, of which 2.5 GB are logits in bfloat16 and as
    much again their gradient."""
    load = load_of(SMALL, 1)
    one = estimate(ModelDims.of(SMALL), ONE, load)
    measured = 30.6e9 - 4 * 8192 * 151936
    assert one.weights + one.gradients + one.activations == pytest.approx(measured, rel=0.15)
