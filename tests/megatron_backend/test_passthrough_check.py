"""What is wrong with the tables for Megatron's own classes: keys, types, and values that go wrong together."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from megatron_families import make_own
from megatron_support import make_backend, make_batch, step_request
from packaging.version import Version

from rlcore.spi import CheckContext, CloseRequest, ModelSpec
from rlcore_megatron.checks import passthrough_check
from rlcore_megatron.checks.check import check
from rlcore_megatron.checks.passthrough_check import passthrough_problems
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.testing.models import make_model

MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}
DENSE = ModelDims.of(MODEL)
EXPERTS = ModelDims.of(MODEL | {"num_experts": 8})
STAGES = {"pipeline_parallel": 2}
INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}


def texts(device: str = "cpu", dims: ModelDims | None = None, section: dict | None = None, **tables: dict) -> list[str]:
    config = evolve(MegatronConfig(), **(section or {}), **tables)
    return [str(problem) for problem in passthrough_problems(config, device, "bfloat16", dims)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine is installed."""
    monkeypatch.setattr(passthrough_check, "uses_transformer_engine", lambda config, device, dtype: device == "cuda")
    monkeypatch.setattr(passthrough_check, "transformer_engine_version", lambda: Version("2.12.0"))


def test_empty_tables_are_right_and_import_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough_check, "megatron_class", lambda table: pytest.fail("imported Megatron"))
    assert texts() == []


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        (
            {"ddp": {"overlap_grad_reducce": True}},
            "trainer.megatron.ddp.overlap_grad_reducce: found an unknown key; expected a field of Megatron's "
            "DistributedDataParallelConfig. Did you mean overlap_grad_reduce?",
        ),
        (
            {"scheduler": {"warmup": 3}},
            "trainer.megatron.scheduler.warmup: found an unknown key; expected a field of Megatron's OptimizerParamScheduler. "
            "megatron.core.optimizer_param_scheduler lists them",
        ),
        (
            {"ddp": {"bucket_size": "large"}},
            'trainer.megatron.ddp.bucket_size: found "large" (a string); expected an integer, as Megatron\'s '
            "DistributedDataParallelConfig has it",
        ),
        (
            {"ddp": {"bucket_size": 1.5}},
            "trainer.megatron.ddp.bucket_size: found 1.5 (a number); expected an integer, as Megatron's "
            "DistributedDataParallelConfig has it",
        ),
        (
            {"ddp": {"overlap_grad_reduce": "true"}},
            'trainer.megatron.ddp.overlap_grad_reduce: found "true" (a string); expected true or false, as Megatron\'s '
            "DistributedDataParallelConfig has it. Write true, without quotes.",
        ),
        (
            {"transformer": {"moe_z_loss_coeff": True}},
            "trainer.megatron.transformer.moe_z_loss_coeff: found true; expected a number, as Megatron's "
            "TransformerConfig has it",
        ),
        (
            {"transformer": {"moe_router_dtype": "fp16"}},
            'trainer.megatron.transformer.moe_router_dtype: found "fp16" (a string); expected one of "fp32", "fp64", as '
            'Megatron\'s TransformerConfig has it. Did you mean "fp64"?',
        ),
        (
            {"transformer": {"attention_backend": "fast"}},
            'trainer.megatron.transformer.attention_backend: found "fast" (a string); expected one of "flash", "fused", '
            '"unfused", "local", "auto", as Megatron\'s TransformerConfig has it. Did you mean "flash"?',
        ),
        (
            {"transformer": {"moe_aux_loss_coeff": ["a"]}},
            'trainer.megatron.transformer.moe_aux_loss_coeff[0]: found "a" (a string); expected a number, as Megatron\'s '
            "TransformerConfig has it",
        ),
        (
            {"transformer": {"quant_recipe": "mine"}},
            "trainer.megatron.transformer.quant_recipe: found a field for a function or an object; expected a field of "
            "Megatron's TransformerConfig that a recipe can hold. Leave it out: the trainer sets those that it needs",
        ),
        (
            {"transformer": {"tensor_model_parallel_size": 2}},
            "trainer.megatron.transformer.tensor_model_parallel_size: found a field that is not for this table to set; "
            "expected another field of Megatron's TransformerConfig. Set trainer.megatron.tensor_parallel",
        ),
        (
            {"transformer": {"moe_layer_recompute": True}},
            "trainer.megatron.transformer.moe_layer_recompute: found a field that is not for this table to set; expected "
            'another field of Megatron\'s TransformerConfig. Set trainer.megatron.recompute to "selective", and '
            "transformer.recompute_modules",
        ),
        (
            {"transformer": {"hidden_size": 2}},
            "trainer.megatron.transformer.hidden_size: found a field that is not for this table to set; expected another field "
            "of Megatron's TransformerConfig. Leave it out: it follows from the model at model.path",
        ),
        (
            {"transformer": {"fp32_residual_connection": True}},
            "trainer.megatron.transformer.fp32_residual_connection: found a field that is not for this table to set; expected "
            "another field of Megatron's TransformerConfig. Leave it out: Megatron rounds every sum to model.dtype again, and "
            "layers in bfloat16 fail over the float32 of the first",
        ),
        (
            {"transformer": {"fused_single_qkv_rope": True}},
            "trainer.megatron.transformer.fused_single_qkv_rope: found a field that is not for this table to set; expected "
            "another field of Megatron's TransformerConfig. Leave it out: its kernel takes no packed sequences, and the first "
            "step would fail",
        ),
        (
            {"transformer": {"use_kitchen": True}},
            "trainer.megatron.transformer.use_kitchen: found a field that is not for this table to set; expected another field "
            "of Megatron's TransformerConfig. Leave it out: Kitchen's layers need a quant_recipe, an object that no recipe can "
            "hold",
        ),
        (
            {"transformer": {"activation_func": "gelu"}},
            "trainer.megatron.transformer.activation_func: found a field that is not for this table to set; expected another "
            "field of Megatron's TransformerConfig. Leave it out: it follows from the model at model.path",
        ),
        (
            {"transformer": {"grad_scale_func": "mine"}},
            "trainer.megatron.transformer.grad_scale_func: found a field for a function or an object; expected a field of "
            "Megatron's TransformerConfig that a recipe can hold. Leave it out: the trainer sets those that it needs",
        ),
        (
            {"optimizer": {"lr": 1e-5}},
            "trainer.megatron.optimizer.lr: found a field that is not for this table to set; expected another field of "
            "Megatron's OptimizerConfig. Set optimizer.learning_rate",
        ),
        (
            {"scheduler": {"max_lr": 1e-5}},
            "trainer.megatron.scheduler.max_lr: found a field that is not for this table to set; expected another field of "
            "Megatron's OptimizerParamScheduler. Set optimizer.learning_rate",
        ),
        (
            {"ddp": {"use_megatron_fsdp": True}},
            "trainer.megatron.ddp.use_megatron_fsdp: found a field that is not for this table to set; expected another field "
            "of Megatron's DistributedDataParallelConfig. Leave it out: it needs use_megatron_fsdp; the trainer fsdp2 divides "
            "weights over data-parallel ranks",
        ),
    ],
)
def test_wrong_keys_and_types(tables: dict[str, dict[str, Any]], problem: str) -> None:
    assert texts(**tables) == [problem]


def test_problems_of_all_tables_come_at_once() -> None:
    found = texts(
        transformer={"bf16": True, "nothing": 1}, optimizer={"lr": 1}, scheduler={"min_lr": "a"}, ddp={"bucket_size": []}
    )
    assert [text.partition(":")[0].removeprefix("trainer.megatron.") for text in found] == [
        "transformer.bf16",
        "transformer.nothing",
        "optimizer.lr",
        "scheduler.min_lr",
        "ddp.bucket_size",
    ]


def wrong(found: list[str]) -> dict[str, str]:
    """Key to what follows it, of problems in the tables."""
    pairs = (text.removeprefix("trainer.megatron.").split(": found ", 1) for text in found)
    return dict(pairs)


@pytest.mark.parametrize(
    ("device", "section", "transformer", "problem"),
    [
        (
            "cuda",
            INTERLEAVED,
            {"batch_p2p_comm": True},
            "True; expected false with virtual_pipeline_parallel above 1. Megatron takes true with virtual stages and computes "
            "wrong gradients, without an error",
        ),
        (
            "cuda",
            INTERLEAVED,
            {"overlap_p2p_comm": False},
            "False; expected true with virtual_pipeline_parallel above 1, where exchange is not batched",
        ),
        (
            "cuda",
            STAGES,
            {"overlap_p2p_comm": True},
            "True; expected false without virtual stages: Megatron overlaps nothing else",
        ),
        (
            "cpu",
            STAGES,
            {"deallocate_pipeline_outputs": True},
            "True; expected false on cpu. Without CUDA's streams an output that is freed while it is sent arrives wrong",
        ),
        (
            "cuda",
            {},
            {"calculate_per_token_loss": False},
            "False; expected true. Losses are divided by the step's global counts already; Megatron would divide them again, "
            "by its own",
        ),
        (
            "cuda",
            STAGES,
            {"variable_seq_lengths": False},
            "False; expected true with several stages: packed microbatches differ in length",
        ),
        (
            "cuda",
            {},
            {"moe_token_dispatcher_type": "allgather"},
            '\'allgather\'; expected "alltoall" with several stages: "allgather" wants one length of microbatches',
        ),
        (
            "cpu",
            {},
            {"moe_token_dispatcher_type": "flex"},
            "'flex'; expected \"alltoall\", unless there are GPUs and DeepEP is installed",
        ),
        ("cuda", {}, {"apply_rope_fusion": True}, "True; expected layers of TransformerEngine, for this. Leave it out"),
        ("cpu", {}, {"moe_grouped_gemm": True}, "True; expected layers of TransformerEngine, for this. Leave it out"),
        (
            "cpu",
            {},
            {"gradient_accumulation_fusion": True},
            "True; expected false without TransformerEngine and apex, whose kernels it needs",
        ),
        (
            "cuda",
            {},
            {"fp8_recipe": "blockwise"},
            "'blockwise'; expected no such field without fp8. Set trainer.megatron.fp8 to true, or leave it out",
        ),
        (
            "cpu",
            {},
            {"first_last_layers_bf16": True},
            "True; expected no such field without fp8. Set trainer.megatron.fp8 to true, or leave it out",
        ),
        (
            "cpu",
            {"recompute": "full"},
            {"recompute_modules": ["mlp"]},
            '[\'mlp\'] with recompute = "full"; expected trainer.megatron.recompute = "selective". Set that, or leave it out',
        ),
        (
            "cpu",
            {"recompute": "selective"},
            {"recompute_num_layers": 2},
            '2 with recompute = "selective"; expected trainer.megatron.recompute = "full". Set that, or leave it out',
        ),
        (
            "cpu",
            {"recompute": "selective"},
            {"recompute_modules": ["mlp", "layernorm"]},
            "['mlp', 'layernorm']; expected none of layernorm, whose recomputation asks TransformerEngine for its "
            "state. Install that, or leave them out",
        ),
        (
            "cpu",
            {},
            {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1},
            "'sinkhorn'; expected among aux_loss, seq_aux_loss, global_aux_loss, none, which leave the routing itself as it "
            "is in generation",
        ),
        (
            "cpu",
            {},
            {"moe_aux_loss_coeff": 0.1},
            "0.1; expected moe_router_load_balancing_type beside it. One without the other balances nothing",
        ),
        (
            "cpu",
            {},
            {"moe_router_load_balancing_type": ["aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
            "['aux_loss', 'aux_loss']; expected each of them once",
        ),
        *(
            (
                "cpu",
                {},
                {"moe_aux_loss_coeff": weights, "moe_router_load_balancing_type": kinds},
                f"{weights}; expected a number for each of moe_router_load_balancing_type: a list where that is one, and as "
                "long",
            )
            for kinds, weights in ((["aux_loss", "none"], [0.1]), (["aux_loss"], 0.1), ("aux_loss", [0.1]))
        ),
        (
            "cpu",
            {},
            {"moe_router_load_balancing_type": "aux_loss"},
            "'aux_loss'; expected moe_aux_loss_coeff beside it. One without the other balances nothing",
        ),
        (
            "cpu",
            {"recompute": "selective", "pipeline_parallel": 2},
            {"recompute_modules": ["moe"], "moe_z_loss_coeff": 0.001},
            "['moe']; expected other modules, with several stages and a loss of routers. A router would take the tokens of a "
            'later microbatch for its own. Or set trainer.megatron.recompute to "full"',
        ),
    ],
)
def test_layers_that_megatron_takes_and_computes_wrongly(device: str, section: dict, transformer: dict, problem: str) -> None:
    key = next(iter(transformer))
    assert wrong(texts(device, EXPERTS, section, transformer=transformer)) == {f"transformer.{key}": problem}


@pytest.mark.parametrize(
    ("device", "section", "transformer"),
    [
        ("cuda", INTERLEAVED, {"batch_p2p_comm": False, "overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}),
        ("cpu", {}, {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}),
        ("cpu", {}, {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}),
        ("cpu", {}, {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}),
        ("cpu", {"recompute": "full"}, {"recompute_method": "block", "recompute_num_layers": 2}),
        ("cpu", {"recompute": "selective"}, {"recompute_modules": ["moe"], "moe_z_loss_coeff": 0.001}),
        ("cpu", {"recompute": "selective", "pipeline_parallel": 2}, {"recompute_modules": ["moe"]}),
        ("cpu", {}, {"apply_rope_fusion": False, "calculate_per_token_loss": True}),
    ],
)
def test_what_goes_well_together_is_right(device: str, section: dict, transformer: dict) -> None:
    assert texts(device, EXPERTS, section, transformer=transformer) == []


@pytest.mark.usefixtures("engine")
def test_with_the_engine_its_fusions_are_right() -> None:
    table = dict.fromkeys(("apply_rope_fusion", "moe_permute_fusion", "moe_grouped_gemm", "gradient_accumulation_fusion"), True)
    assert texts("cuda", EXPERTS, transformer=table | {"attention_backend": "fused"}) == []
    assert len(texts("cpu", EXPERTS, transformer=table)) == 4
    assert texts("cuda", EXPERTS, {"fp8": True}, transformer={"fp8_recipe": "blockwise"}) == []


def test_fields_for_experts_mean_nothing_to_a_dense_model() -> None:
    expected = "'fp32'; expected no such field for a model without experts. Leave it out"
    assert wrong(texts(dims=DENSE, transformer={"moe_router_dtype": "fp32"})) == {"transformer.moe_router_dtype": expected}


@pytest.mark.parametrize(
    ("device", "optimizer", "problem"),
    [
        (
            "cuda",
            {"decoupled_lr": 1e-5},
            "1e-05; expected trainer.megatron.scheduler beside it. [schedule] sets one rate for all parameters; a table "
            "trainer.megatron.scheduler can set two",
        ),
        (
            "cpu",
            {"use_precision_aware_optimizer": True},
            "True; expected false without a GPU and TransformerEngine, whose Adam it is",
        ),
        (
            "cuda",
            {"exp_avg_dtype": "bfloat16"},
            "'bfloat16'; expected use_precision_aware_optimizer = true beside it. Megatron ignores it without, or fails",
        ),
        (
            "cuda",
            {"exp_avg_sq_dtype": "uint8", "use_precision_aware_optimizer": True},
            "'uint8'; expected one of float32, bfloat16, float16",
        ),
        (
            "cuda",
            {"main_params_dtype": "bfloat16", "use_precision_aware_optimizer": True},
            "'bfloat16'; expected one of float32, float16",
        ),
        (
            "cuda",
            {"store_param_remainders": True, "main_params_dtype": "float16", "use_precision_aware_optimizer": True},
            "True; expected false, or left out, unless masters are float32 and on the device",
        ),
        (
            "cuda",
            {"pin_cpu_grads": False, "use_precision_aware_optimizer": True},
            "False; expected optimizer_cpu_offload = true beside it. Megatron ignores it without",
        ),
        (
            "cuda",
            {"optimizer_offload_fraction": 1.5, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True},
            "1.5; expected above 0.0 and at most 1.0 with optimizer_cpu_offload: the share of the parameters. 1.0 keeps "
            "nothing on the device",
        ),
        (
            "cuda",
            {
                "exp_avg_dtype": "bfloat16",
                "use_precision_aware_optimizer": True,
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": 1.0,
            },
            "'bfloat16'; expected no such field with optimizer_cpu_offload. The optimizer of the host is float32 throughout",
        ),
    ],
)
@pytest.mark.usefixtures("engine")
def test_optimizers_that_fail_or_do_nothing(device: str, optimizer: dict, problem: str) -> None:
    assert wrong(texts(device, optimizer=optimizer)) == {f"optimizer.{next(iter(optimizer))}": problem}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16", "store_param_remainders": True},
        {"main_params_dtype": "float16", "store_param_remainders": False},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
    ],
)
def test_optimizers_in_fewer_bits_or_on_the_host_are_right(optimizer: dict) -> None:
    assert texts("cuda", optimizer=optimizer | {"use_precision_aware_optimizer": True}) == []


def test_masters_of_float32_are_the_weights_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough_check, "transformer_engine_version", lambda: Version("2.12.0"))
    config = MegatronConfig(optimizer={"use_precision_aware_optimizer": True})
    (problem,) = passthrough_problems(config, "cuda", "float32")
    assert str(problem).endswith('expected false with model.dtype = "float32". float32 weights are their own masters')


def test_an_offload_without_a_fraction_would_move_nothing() -> None:
    table = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
    assert "optimizer.optimizer_offload_fraction" in wrong(texts("cuda", optimizer=table))


def test_two_learning_rates_go_with_megatrons_scheduler() -> None:
    assert texts(optimizer={"decoupled_lr": 1e-5}, scheduler={"lr_decay_style": "linear"}) == []


@pytest.mark.parametrize(
    ("scheduler", "key", "problem"),
    [
        (
            {"lr_decay_style": "steps"},
            "lr_decay_style",
            "'steps'; expected one of constant, linear, cosine, inverse-square-root, WSD",
        ),
        ({"lr_decay_style": "WSD"}, "lr_decay_style", "'WSD'; expected wsd_decay_steps and lr_wsd_decay_style beside it"),
        ({"wd_incr_style": "steps"}, "wd_incr_style", "'steps'; expected one of constant, linear, cosine"),
        ({"min_lr": -1e-6}, "min_lr", "-1e-06; expected at least 0"),
        ({"lr_decay_steps": 0}, "lr_decay_steps", "0; expected at least 1"),
        ({"lr_warmup_steps": 9, "lr_decay_steps": 9}, "lr_warmup_steps", "9; expected less than lr_decay_steps = 9"),
        ({"end_wd": 0.1}, "end_wd", "0.1; expected start_wd and end_wd together"),
        ({"start_wd": 0.2, "end_wd": 0.1}, "end_wd", "0.1; expected at least start_wd = 0.2"),
        ({"start_wd": 0.1, "end_wd": 0.2}, "end_wd", '0.2; expected wd_incr_style = "linear" or "cosine" beside it'),
    ],
)
def test_schedules_that_megatron_meets_in_the_middle_of_a_run(scheduler: dict, key: str, problem: str) -> None:
    assert wrong(texts(scheduler=scheduler)) == {f"scheduler.{key}": problem}


@pytest.mark.parametrize(
    "scheduler",
    [
        {"lr_decay_style": "WSD", "wsd_decay_steps": 5, "lr_wsd_decay_style": "minus_sqrt"},
        {"start_wd": 0.1, "end_wd": 0.2, "wd_incr_style": "cosine", "wd_incr_steps": 9},
        {"lr_decay_style": "inverse-square-root", "min_lr": 0, "lr_warmup_steps": 5},
    ],
)
def test_schedules_that_are_right(scheduler: dict) -> None:
    assert texts(scheduler=scheduler) == []


@pytest.mark.parametrize(
    ("device", "ddp", "problem"),
    [
        (
            "cuda",
            {"average_in_collective": True},
            "True; expected false. Losses are divided by the step's global counts, so gradients add up over ranks and are no "
            "means",
        ),
        (
            "cuda",
            {"data_parallel_sharding_strategy": "optim_grads"},
            "'optim_grads'; expected \"no_shard\". Others need use_megatron_fsdp; the trainer fsdp2 divides weights over "
            "data-parallel ranks",
        ),
        ("cpu", {"overlap_param_gather": True}, "True; expected overlap_grad_reduce = true beside it"),
        ("cuda", {"align_param_gather": True}, "True; expected overlap_param_gather = true beside it"),
    ],
)
def test_data_parallelism_that_goes_wrong(device: str, ddp: dict, problem: str) -> None:
    (key,) = ddp
    assert wrong(texts(device, ddp=ddp)) == {f"ddp.{key}": problem}


def test_data_parallelism_that_is_right() -> None:
    table = {"grad_reduce_in_fp32": False, "average_in_collective": False, "data_parallel_sharding_strategy": "no_shard"}
    assert texts("cuda", ddp=table | {"overlap_param_gather": True}) == []
    assert texts("cpu", ddp=table | {"overlap_param_gather": True, "overlap_grad_reduce": True}) == []


@pytest.mark.usefixtures("engine")
def test_layers_in_bfloat16_go_with_products_in_4_bits_too() -> None:
    table = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "tp_only_amax_red": True}
    assert texts("cuda", transformer={"fp4": "e2m1", **table}) == []
    assert len(texts("cuda", transformer=table)) == len(table)
    assert len(texts("cuda", transformer={"fp4": "e2m1", "fp8_margin": 1})) == 1


@pytest.mark.usefixtures("engine")
def test_the_fused_rotation_of_multi_latent_attention_is_refused() -> None:
    """Megatron asks its own embedding for the angles then, of one sequence."""
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    table = {"apply_rope_fusion": True}
    (problem,) = texts("cuda", ModelDims.of(MODEL | {"num_experts": 8} | sizes), transformer=table)
    assert problem.startswith("trainer.megatron.transformer.apply_rope_fusion: found True; expected false")
    assert texts("cuda", EXPERTS, transformer=table) == []


MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""All that `recompute_modules` of this Megatron-Core names."""


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str | tuple[float, float]]:
    """A function (family, section options) -> the first problem of the recipe, or loss and gradient norm of a step."""
    makers = {"qwen3": make_model, "glm4_moe": make_model, "deepseek_v3": make_own}
    models = {name: make(tmp_path_factory.mktemp("models") / name, name) for name, make in makers.items()}
    batch = make_batch()

    def step(family: str, **section: Any) -> str | tuple[float, float]:
        config = evolve(MegatronConfig(collective_timeout_s=600.0), **section)
        spec = ModelSpec(path=str(models[family]))
        found = check(CheckContext(model=spec, device="cpu", world_size=1, max_sequence_length=64), config)
        if found:
            return str(found[0])
        trainer = make_backend(models[family], config=config)
        result = trainer.train_step(step_request((batch,), batch.counts(), 0))
        trainer.close(CloseRequest())
        return result.loss, result.grad_norm

    return step


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_modules_are_refused_or_recomputed_without_the_engine(stepped: Callable[..., Any], family: str) -> None:
    plain = stepped(family)
    for module in MODULES:
        found = stepped(family, recompute="selective", transformer={"recompute_modules": [module]})
        is_missing = module in ("layernorm", "moe_act") or (module == "mla_up_proj" and family != "deepseek_v3")
        if is_missing:
            assert isinstance(found, str), module
            assert found.startswith("trainer.megatron.transformer"), found
        else:
            assert found == pytest.approx(plain, rel=1e-6), module
