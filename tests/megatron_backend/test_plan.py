"""The trainer's layouts for `rlcore plan`."""

import pytest
from attrs import evolve
from trainer_plans import TrainerPlans, plan_context

from rlcore.spi import ConfigError, PlanOption
from rlcore_megatron.layouts.plan import EXCHANGE_BYTES, plan
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_plan.devices import DEVICES

CONTEXT = plan_context()


class TestPlans(TrainerPlans):
    plan = staticmethod(plan)
    config = MegatronConfig


def test_what_is_left_to_the_trainer_of_a_run_is_what_fits() -> None:
    """As it chooses by the memory of the devices: more sizes on smaller ones."""
    large, small = (
        plan(evolve(CONTEXT, as_configured=True, device=evolve(CONTEXT.device, memory_bytes=size * 2**30)), MegatronConfig())
        for size in (80, 20)
    )
    assert [dict(option.options) for option in large] == [
        {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    ]
    (option,) = small
    assert max(map(int, option.options.values())) > 1
    with pytest.raises(ConfigError, match="layout that needs least"):
        plan(evolve(CONTEXT, as_configured=True, device=evolve(CONTEXT.device, memory_bytes=2**30)), MegatronConfig())


def test_float8_is_planned_where_its_engine_is_not_installed() -> None:
    """The machine that trains has it; what side float8 needs is that of the model."""
    plain, narrow = (plan(CONTEXT, MegatronConfig(fp8=fp8, transformer_engine=True)) for fp8 in (False, True))
    assert 0 < len(narrow) <= len(plain)
    assert narrow[0].idle["state"] > plain[0].idle["state"]
    assert plan(CONTEXT, MegatronConfig(fp8=True))
    assert plan(evolve(CONTEXT, model={**CONTEXT.model, "hidden_size": 2056}), MegatronConfig(fp8=True)) == []


def test_ranks_that_exchange_tokens_keep_more_beside_their_state() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "model_type": "qwen3_moe"}
    context = evolve(CONTEXT, model={**CONTEXT.model, **experts}, as_configured=True)
    sizes = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}
    (alone,), (divided,) = (plan(context, MegatronConfig(**sizes, expert_parallel=size)) for size in (1, 8))
    for option, kept in ((alone, 0), (divided, EXCHANGE_BYTES)):
        held = option.memory["weights"] + option.memory["optimizer state"]
        assert option.idle["none"] == held + kept
        assert option.idle["all"] == kept


def test_what_of_float8_the_section_takes_back_is_planned_so() -> None:
    context = evolve(CONTEXT, device=DEVICES["H200"], as_configured=True, max_microbatch_tokens=32768)
    sizes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)

    def planned(fp8: bool = True, **transformer: object) -> PlanOption:
        config = MegatronConfig(**sizes, fp8=fp8, transformer_engine=True, transformer=transformer)
        (option,) = plan(context, config)
        return option

    plain, narrow = planned(fp8=False), planned()
    kept = planned(fp8_recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    gradients = planned(fp8_wgrad=False)
    for phase in ("training", "log-probabilities"):
        assert narrow.seconds[phase] < kept.seconds[phase] < plain.seconds[phase]
    assert narrow.seconds["training"] < gradients.seconds["training"] < plain.seconds["training"]
    assert gradients.seconds["log-probabilities"] == narrow.seconds["log-probabilities"]
    assert planned(fp8_recipe="tensorwise", fp8_wgrad=False).seconds == narrow.seconds, "with delayed scaling alone"
    assert planned(num_layers_at_end_in_bf16=4).seconds == narrow.seconds, "a number alone keeps nothing"
    assert plain.memory["weights"] < kept.memory["weights"] < narrow.memory["weights"]
    num_layers = int(context.model["num_hidden_layers"])
    copies = narrow.memory["weights"] - plain.memory["weights"]
    assert kept.memory["weights"] - plain.memory["weights"] == pytest.approx(copies * (num_layers - 3) / num_layers)


def test_float8_makes_products_of_layers_and_experts_faster() -> None:
    context = evolve(CONTEXT, device=DEVICES["H200"], as_configured=True, max_microbatch_tokens=32768)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4096, "model_type": "qwen3_moe"}
    for model in (context.model, {**context.model, **experts}):
        sizes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)
        (plain,), (narrow,) = (
            plan(evolve(context, model=model), MegatronConfig(**sizes, fp8=fp8, transformer_engine=True))
            for fp8 in (False, True)
        )
        for phase in ("training", "log-probabilities"):
            assert 0.5 * plain.seconds[phase] < narrow.seconds[phase] < plain.seconds[phase]


def test_an_optimizer_on_the_host_takes_as_long_as_it_was_measured_to() -> None:
    """An update of 1.5 billion parameters took 2.124 s in place of 0.710 s on one H100 (docs/benchmarks.md)."""
    shape = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = {"model_type": "qwen2", **shape, **heads}
    context = evolve(
        CONTEXT, model=model, device=DEVICES["H100"], world_size=1, as_configured=True, dtype="bfloat16", updates=1
    )
    sizes = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    aware = {"use_precision_aware_optimizer": True}
    host = {**aware, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    (plain,), (offloaded,) = (plan(context, MegatronConfig(**sizes, optimizer=table)) for table in (aware, host))
    assert offloaded.seconds["training"] - plain.seconds["training"] == pytest.approx(2.124 - 0.710, rel=0.1)


def test_batch_invariant_layouts_are_those_that_checks_take() -> None:
    """Layers are not TransformerEngine's, and every tensor rank has the whole head."""
    model = {**CONTEXT.model, "model_type": "qwen3", "head_dim": 128}
    context = evolve(CONTEXT, model=model, dtype="bfloat16")
    config = MegatronConfig(batch_invariant=True, batch_invariant_parts=2, sequence_parallel=False)
    found, plain = plan(context, config), plan(context, MegatronConfig(sequence_parallel=False))
    sizes = {(option.options["tensor_parallel"], option.options["context_parallel"]) for option in found}
    assert sizes == {(1, 1), (2, 1)}
    divided, other = (
        next(one for one in options if one.options["tensor_parallel"] == 2 and one.options["context_parallel"] == 1)
        for options in (found, plain)
    )
    assert divided.memory["logits"] > other.memory["logits"] + 4 * model["vocab_size"] * model["hidden_size"]
    assert divided.memory["activations"] > other.memory["activations"]
