"""Sampling, engines and asynchrony of NeMo-RL's recipes."""

from pathlib import Path

import pytest

from rlcore.spi import ConfigError

from .nemo_recipes import grpo, reported

CORRECTS = "loss_fn.use_importance_sampling_correction=true"
GEN = "policy.generation"


@pytest.mark.parametrize(
    ("overrides", "staleness"),
    [
        (["grpo.async_grpo={enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}", CORRECTS], 2),
        (["grpo.async_grpo={enabled: false, max_trajectory_age_steps: 2}", CORRECTS], 0),
        (["grpo.async_grpo=null", "async_rl={sampler: {name: in_order, max_lookahead_versions: 3}}", CORRECTS], 3),
        (["grpo.async_grpo=null", "async_rl={sampler: {name: windowed, max_staleness_versions: 4}}", CORRECTS], 4),
        (["grpo.async_grpo=null", "async_rl={max_inflight_prompts: 8}", CORRECTS], 1),
        (["grpo.async_grpo={enabled: true}"], 0),
    ],
)
def test_samples_are_as_old_as_there_where_their_age_is_corrected(tmp_path: Path, overrides: list[str], staleness: int) -> None:
    assert grpo(tmp_path, *overrides).values["async.max_staleness"] == staleness


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["grpo.async_grpo={enabled: true}"], "grpo.async_grpo.enabled"),
        (["grpo.async_grpo={enabled: true}", CORRECTS], "grpo.async_grpo.in_flight_weight_updates"),
        (["async_rl={sampler: {name: windowed}}", CORRECTS], "async_rl.sampler.name"),
        (["async_rl={sampler: {name: in_order}}"], "async_rl.sampler.name"),
        ([f"{GEN}.top_p=0.9"], f"{GEN}.top_p"),
        ([f"{GEN}.top_k=50"], f"{GEN}.top_k"),
        ([f"{GEN}.bad_words=[x]"], f"{GEN}.bad_words"),
        ([f"{GEN}.backend=sglang", f"{GEN}.sglang_cfg={{allow_auto_truncate: true}}"], f"{GEN}.sglang_cfg.allow_auto_truncate"),
        ([f"{GEN}.vllm_cfg.logprobs_mode=raw_logprobs"], f"{GEN}.vllm_cfg.logprobs_mode"),
        ([f"{GEN}.vllm_cfg.is_mx=true"], f"{GEN}.vllm_cfg.is_mx"),
        ([f"{GEN}.vllm_kwargs={{repetition_penalty: 1.1}}"], f"{GEN}.vllm_kwargs.repetition_penalty"),
        ([f"{GEN}.repetition_penalty=1.1"], f"{GEN}.repetition_penalty"),
        ([f"{GEN}.vllm_cfg.min_p=0.1"], f"{GEN}.vllm_cfg.min_p"),
    ],
)
def test_what_differs_is_reported(tmp_path: Path, overrides: list[str], key: str) -> None:
    assert key in reported(grpo(tmp_path, *overrides))


def test_options_of_an_engine_that_is_not_the_recipes_are_not_read(tmp_path: Path) -> None:
    found = grpo(tmp_path, f"{GEN}.sglang_cfg={{allow_auto_truncate: true}}")
    assert f"{GEN}.sglang_cfg.allow_auto_truncate" not in reported(found) | reported(found, changing=False)


@pytest.mark.parametrize(
    ("override", "ours", "expected"),
    [
        ("temperature=0.7", "rollout.temperature", 0.7),
        ("top_k=-1", "rollout.top_k", 0),
        ("val_temperature=0", "evaluation.temperature", 0.0),
        ("stop_strings=[x]", "rollout.stop_strings", ["x"]),
        ("stop_token_ids=[3]", "rollout.stop_token_ids", [3]),
        ("vllm_cfg.precision=fp8", "generator.vllm.quantization", "fp8_per_block"),
        ("vllm_cfg.kv_cache_dtype=fp8_e4m3", "generator.vllm.kv_cache_dtype", "fp8"),
        ("vllm_cfg.enforce_eager=true", "generator.vllm.enforce_eager", True),
        ("vllm_cfg.enable_prefix_caching=false", "generator.vllm.prefix_caching", False),
        ("vllm_kwargs={max_num_seqs: 9}", "generator.vllm.max_num_seqs", 9),
        ("vllm_cfg.max_model_len=512", "rollout.max_response_tokens", 256),
    ],
)
def test_options_have_their_counterparts(tmp_path: Path, valid, override: str, ours: str, expected: object) -> None:
    found = grpo(tmp_path, f"{GEN}.{override}")
    assert found.values[ours] == expected
    valid(found)


@pytest.mark.parametrize(
    ("key", "value", "is_reported"),
    [
        *(("precision", value, value not in ("bfloat16", "fp8")) for value in ("bfloat16", "fp8", "float16", "float32")),
        *(("kv_cache_dtype", value, value == "float16") for value in ("auto", "bfloat16", "fp8", "fp8_e5m2", "float16")),
    ],
)
def test_a_precision_that_the_generator_does_not_take_is_reported(
    tmp_path: Path, key: str, value: str, is_reported: bool
) -> None:
    found = grpo(tmp_path, f"{GEN}.vllm_cfg.{key}={value}")
    assert (f"{GEN}.vllm_cfg.{key}" in reported(found)) is is_reported


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("val_top_p", "2"),
        ("stop_strings", "x"),
        ("stop_token_ids", "7"),
        ("vllm_cfg.gpu_memory_utilization", "0"),
    ],
)
def test_values_that_sampling_cannot_have_are_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{GEN}.{key}"):
        grpo(tmp_path, f"{GEN}.{key}={value}")
