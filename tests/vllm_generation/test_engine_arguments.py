"""The arguments of vLLM's engine, read without importing vLLM."""

from rlcore.spi import GeneratorContext, ModelSpec, RankInfo
from rlcore_vllm.checks.engine_arguments import OWNED, engine_arguments
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import engine_settings


def test_arguments_read_from_the_source_are_those_of_the_class() -> None:
    """And every argument that rlcore gives an engine is either refused in the table or a default that it may change."""
    import dataclasses

    from vllm import EngineArgs

    arguments = engine_arguments()
    assert arguments.keys() == {field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")}
    assert arguments["block_size"].types == (int,)
    assert arguments["enable_chunked_prefill"].types == (bool,)
    assert arguments["kv_cache_dtype"].types is None
    of_some_versions = {"device_ids", "data_parallel_size", "calculate_kv_scales"}
    assert OWNED.keys() <= arguments.keys() | of_some_versions
    given: set[str] = set()
    for device in ("cpu", "cuda"):
        place = RankInfo(device=device)  # type: ignore[arg-type]
        context = GeneratorContext(model=ModelSpec(path="x"), rank_info=place, seed=0, max_sequence_length=8)
        given |= engine_settings(context, VllmConfig()).arguments.keys()
    defaults = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "enable_chunked_prefill", "hf_overrides"}
    assert given - OWNED.keys() <= defaults | {"disable_log_stats"}
