"""The arguments that an engine is started with."""

from attrs import evolve

from rlcore.spi import GeneratorContext, ModelSpec, RankInfo
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.scheduler import LOADER
from rlcore_sglang.settings import OWN_ARGUMENTS, SLACK, engine_arguments

CONTEXT = GeneratorContext(
    model=ModelSpec(path="a-model", dtype="float32"),
    rank_info=RankInfo(),
    seed=2**40 + 3,
    max_sequence_length=96,
    channel="shared_memory",
)


def test_weights_that_a_refit_brings_are_not_read() -> None:
    assert engine_arguments(CONTEXT, SglangConfig())["load_format"] == "dummy"
    assert engine_arguments(evolve(CONTEXT, channel=None), SglangConfig())["load_format"] == "auto"


def test_the_context_decides_what_the_section_does_not() -> None:
    found = engine_arguments(CONTEXT, SglangConfig(engine={"chunked_prefill_size": 64}))
    assert found["model_path"] == "a-model"
    assert found["dtype"] == "float32"
    assert found["context_length"] == 96 + SLACK
    assert found["random_seed"] == 3
    assert found["attention_backend"] == "torch_native"
    assert found["custom_weight_loader"] == [LOADER]
    assert found["chunked_prefill_size"] == 64
    assert found["enable_memory_saver"] is False


def test_a_gpu_gets_sglangs_own_attention_and_cache() -> None:
    context = evolve(CONTEXT, rank_info=RankInfo(device="cuda"), devices=(3,))
    found = engine_arguments(context, SglangConfig(mem_fraction_static=0.25))
    assert found["base_gpu_id"] == 3
    assert found["mem_fraction_static"] == 0.25
    assert found["enable_memory_saver"] is True
    assert found["enable_weights_cpu_backup"] is True
    assert not found.keys() & {"attention_backend", "max_total_tokens"}


def test_what_is_set_cannot_be_set_otherwise() -> None:
    context = evolve(CONTEXT, model=evolve(CONTEXT.model, revision="main"))
    given = engine_arguments(context, SglangConfig()).keys() - {"log_level"}
    assert given <= OWN_ARGUMENTS
