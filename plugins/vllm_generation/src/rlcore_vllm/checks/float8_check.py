"""Checks of weights, products and caches in 8 bits: devices that multiply them, and what samples of such an engine mean."""

from collections.abc import Iterator
from typing import Literal

from rlcore.gpu import compute_capabilities
from rlcore.spi import CheckContext, Note, Problem
from rlcore_vllm.checks.share_check import SECTION, section_problem
from rlcore_vllm.setup.config import VllmConfig

FLOAT8_CAPABILITY = (8, 9)
"""The lowest compute capability of CUDA devices that multiply float8."""


def float8_notes(context: CheckContext, config: VllmConfig) -> Iterator[Note]:
    """Tell what samples of a rounded policy mean to the algorithm and to the run's bound."""
    if not config.is_quantized:
        return
    path = f"{SECTION}.{'quantization' if config.quantization != 'none' else 'kv_cache_dtype'}"
    if not context.corrects_staleness:
        text = (
            "samples come from a policy in 8 bits, and the algorithm takes them for the trainer's own: no ratio of the two "
            'probabilities corrects for the rounding. Set the algorithm\'s importance_correction to "token"'
        )
        yield Note(path=path, text=text)
    text = (
        "rounding to 8 bits can change a single token's log-probability by 10 and more, and token_mult_prob_error then passes "
        "training.max_token_mult_prob_error, which ends the run. inf turns the bound off "
        "(docs/train-inference-agreement.md#in-8-bits)"
    )
    yield Note(path=path, text=text)


def float8_problems(config: VllmConfig, device: Literal["cpu", "cuda"]) -> Iterator[Problem]:
    """Refuse 8 bits where nothing multiplies them."""
    options = {"quantization": (config.quantization, "none"), "kv_cache_dtype": (config.kv_cache_dtype, "auto")}
    chosen = {key: values for key, values in options.items() if values[0] != values[1]}
    capabilities = (compute_capabilities() or []) if chosen and device == "cuda" else []
    named = [capabilities[index] for index in config.devices or (0,) if 0 <= index < len(capabilities)]
    lowest = min(named, default=FLOAT8_CAPABILITY)
    if device == "cuda" and lowest >= FLOAT8_CAPABILITY:
        return
    where = "CPU" if device == "cpu" else "a GPU of compute capability " + ".".join(map(str, lowest))
    needed = ".".join(map(str, FLOAT8_CAPABILITY))
    for key, (found, plain) in chosen.items():
        remedy = f"8 bits need a GPU of compute capability {needed} or more: Ada, Hopper or later."
        yield section_problem(key, f'"{found}" on {where}', f'"{plain}"', remedy)
