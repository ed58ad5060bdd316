"""What a layout takes of a GPU, against what transformers counts and what was measured."""

import pytest
from attrs import evolve
from megatron_shapes import EXPERTS, GIB, LARGE, MIDDLE, ONE, SMALL, load_of

from rlcore.spi import LoraSpec, OptimizerGroup, OptimizerSpec
from rlcore_megatron.layouts.memory import Parameters, estimate
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.models import standard_config
from rlcore_torchkit.testing.models import make_model


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
    assert estimate(dims, ONE, evolve(load, reference=load.model)).weights == 2 * one.weights
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


def test_of_adapters_alone_are_gradients_and_optimizer_state() -> None:
    """2 bytes of a frozen weight, and 16 of an adapter's: float32, with gradient and moments."""
    dims, spec = ModelDims.of(SMALL), LoraSpec(rank=32)
    one = estimate(dims, ONE, evolve(load_of({"model_type": "qwen2"} | SMALL, 1), lora=spec))
    parameters = Parameters.of(dims, ONE).dense
    widths = SMALL["hidden_size"], SMALL["intermediate_size"]
    keys = SMALL["num_key_value_heads"] * widths[0] // SMALL["num_attention_heads"]
    of_layer = 2 * 2 * widths[0] + 2 * (widths[0] + keys) + 3 * sum(widths)
    adapters = 32 * SMALL["num_hidden_layers"] * of_layer
    assert (one.weights, one.gradients, one.optimizer) == (2 * parameters + 4 * adapters, 4 * adapters, 8 * adapters)
    assert one.step == 0
    whole = estimate(dims, ONE, load_of(SMALL, 1))
    assert (one.activations, one.logits) == (whole.activations, whole.logits)
    assert one.total < whole.total / 2


def test_the_fullest_stage_is_that_with_most_experts() -> None:
    """Of a model whose first layers have none, the last stage, though both have as many layers."""
    model = EXPERTS | {"mlp_only_layers": list(range(EXPERTS["num_hidden_layers"] // 2))}
    dims, config = ModelDims.of(model), evolve(ONE, pipeline_parallel=2)
    assert dims is not None
    experts = 3 * dims.hidden_size * dims.moe_intermediate_size * dims.num_experts * dims.num_layers / 2
    assert Parameters.of(dims, config).expert == experts


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 6), ("float32", 4)])
def test_layers_with_sinks_keep_their_scores(dtype: str, num_bytes: int) -> None:
    """In float32, and weights rounded from them: of each head and layer a square of the longest sequence's length, twice of the
    layer that is computed backwards; of this one alone where they are computed again."""
    model = {"model_type": "gpt_oss"} | EXPERTS | {"moe_intermediate_size": EXPERTS["intermediate_size"]}
    dims = ModelDims.of(model)
    with_sinks, without = load_of(model, 4, dtype=dtype), load_of(EXPERTS, 4, dtype=dtype)
    scores = EXPERTS["num_attention_heads"] * with_sinks.max_sequence_length**2 * num_bytes
    all_layers, other = EXPERTS["num_hidden_layers"] + 1, {"transformer": {"recompute_modules": ["moe"]}}
    ways = ({}, all_layers), ({"recompute": "selective"}, 1), ({"recompute": "selective", **other}, all_layers)
    for way, num_layers in (*ways, ({"recompute": "full"}, 1)):
        for sizes, share in (({}, 1), ({"tensor_parallel": 2}, 2), ({"context_parallel": 4}, 4)):
            config = evolve(ONE, **way, **sizes)
            more = estimate(dims, config, with_sinks).activations - estimate(dims, config, without).activations
            assert more == pytest.approx(num_layers * scores / share)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 8), ("float32", 8)])
def test_layers_with_soft_caps_keep_their_scores_behind_the_cap_too(dtype: str, num_bytes: int) -> None:
    model = {"model_type": "gemma2"} | MIDDLE
    dims = ModelDims.of(model)
    capped, without = load_of(model, 4, dtype=dtype), load_of(model | {"attn_logit_softcapping": None}, 4, dtype=dtype)
    scores = MIDDLE["num_attention_heads"] * capped.max_sequence_length**2 * num_bytes
    assert dims is not None
    more = estimate(dims, ONE, capped).activations - estimate(dims, ONE, without).activations
    assert more == pytest.approx((MIDDLE["num_hidden_layers"] + 1) * scores)


def test_slopes_of_capped_logits_are_counted() -> None:
    """In float32, beside the logits and their gradient."""
    model = {"model_type": "gemma2"} | MIDDLE
    dims = ModelDims.of(model)
    assert dims is not None
    capped, plain = (estimate(dims, ONE, load_of(model | caps, 4)).logits for caps in ({}, {"final_logit_softcapping": None}))
    assert capped == pytest.approx(1.5 * plain)


def test_norms_behind_attention_and_mlp_are_counted() -> None:
    """Their inputs and outputs, of a layer's hidden size each."""
    gemma, llama = ({"model_type": name} | MIDDLE for name in ("gemma3_text", "llama"))
    dims, loads = ModelDims.of(gemma), [load_of(model, 4, dtype="float32") for model in (gemma, llama)]
    assert dims is not None
    with_norms, without = (estimate(dims, ONE, load).activations for load in loads)
    elements = 4 * dims.hidden_size * loads[0].max_sequence_length * (dims.num_layers + 1)
    assert with_norms - without == pytest.approx(4 * elements)


def test_weights_in_8_bits_are_copied_by_rows_and_by_columns() -> None:
    load, dims = load_of(LARGE, 8), ModelDims.of(LARGE)
    plain, copied = (estimate(dims, config, load) for config in (ONE, evolve(ONE, fp8=True)))
    tables = 2 * dims.vocab_size * dims.hidden_size
    assert copied.weights - plain.weights == 2 * int(Parameters.of(dims, ONE).total - tables)
    assert (copied.gradients, copied.optimizer) == (plain.gradients, plain.optimizer)


def test_a_multi_token_head_is_one_layer_more_on_the_last_stage() -> None:
    dims, with_head = ModelDims.of(EXPERTS), evolve(ONE, mtp=True)
    longer = ModelDims.of(EXPERTS | {"num_hidden_layers": dims.num_layers + 1})
    projection = 2 * dims.hidden_size**2
    assert Parameters.of(dims, with_head).total == Parameters.of(longer, ONE).total + projection
    load = load_of(EXPERTS, 8)
    assert estimate(dims, with_head, load).activations == pytest.approx(estimate(longer, ONE, load).activations)
    # The last of two stages has the head and, lent, the first's embedding; a reference has none.
    apart = evolve(with_head, pipeline_parallel=2)
    last = Parameters.of(longer, evolve(ONE, pipeline_parallel=2, pipeline_layers=(24, 25))).total + projection
    assert Parameters.of(dims, apart).total == last
    assert estimate(dims, apart, load).weights == 2 * (last + dims.vocab_size * dims.hidden_size)
    of_reference = estimate(dims, ONE, load).weights
    assert (
        estimate(dims, with_head, evolve(load, reference=EXPERTS)).weights
        == estimate(dims, with_head, load).weights + of_reference
    )
    frozen = evolve(load, trains=False)
    assert estimate(dims, with_head, frozen) == estimate(dims, ONE, frozen)


@pytest.mark.parametrize(
    ("spec", "of_matrices", "of_tables"),
    [
        (OptimizerSpec(), 12, 12),
        (OptimizerSpec(groups=(OptimizerGroup(parameters=("*",)),)), 10, 10),
        (OptimizerSpec(name="muon"), 6, 10),
        (OptimizerSpec(moments="8bit"), 4 + 8 / 256, 4 + 8 / 256),
        (OptimizerSpec(name="muon", moments="8bit"), 6, 4 + 8 / 256),
        (OptimizerSpec(name="muon", groups=(OptimizerGroup(parameters=("*",), name="adamw"),)), 10, 10),
    ],
)
def test_state_is_that_of_each_tensors_method(spec: OptimizerSpec, of_matrices: float, of_tables: float) -> None:
    """The 2 bytes of masters that bfloat16 weights lack, and Muon's momentum or two moments, in 8 bits with a scale of 256."""
    dims = ModelDims.of(MIDDLE)
    tables = (1 if dims.tied else 2) * dims.vocab_size * dims.hidden_size
    matrices = Parameters.of(dims, ONE).total - tables
    found = estimate(dims, ONE, evolve(load_of(MIDDLE, 1), optimizer=spec))
    assert found.optimizer == pytest.approx(of_matrices * matrices + of_tables * tables, rel=1e-6)
    wide = estimate(dims, ONE, evolve(load_of(MIDDLE, 1), optimizer=spec, dtype="float32"))
    masters = 2 if spec != OptimizerSpec() else 4
    assert wide.optimizer == pytest.approx(found.optimizer - masters * (matrices + tables), rel=1e-6)


def test_a_step_by_tensor_has_room_for_what_it_gathers_and_decodes() -> None:
    dims = ModelDims.of(MIDDLE)
    plain, muon, narrow = (
        estimate(dims, ONE, evolve(load_of(MIDDLE, 1), optimizer=spec)).step
        for spec in (OptimizerSpec(), OptimizerSpec(name="muon"), OptimizerSpec(moments="8bit"))
    )
    assert plain == 0
    assert 0 < narrow < GIB < muon < 2 * GIB
