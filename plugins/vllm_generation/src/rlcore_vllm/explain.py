"""vLLM's own errors, in the recipe's terms."""

import re
from collections.abc import Callable

Match = re.Match[str]

SHORTER = "lower rollout.max_prompt_tokens or rollout.max_response_tokens"
_GIB = r"([\d.]+)\s*GiB"
_DISTURBED = rf"Error in memory profiling\. Initial free memory {_GIB}, current free memory {_GIB}"


def explain(error_text: str) -> str | None:
    """What a known error of an engine means and which key of the recipe changes it; None for any other error."""
    for pattern, describe in _KNOWN:
        match = re.search(pattern, error_text, re.DOTALL)
        if match is not None:
            return describe(match)
    return None


def is_passing(error_text: str) -> bool:
    """Whether the cause of a known error has gone by the time that it is seen."""
    return re.search(_DISTURBED, error_text) is not None


def _disturbed(match: Match) -> str:
    before, after = match.groups()
    return (
        f"another process freed memory of the device while the engine measured what it may use ({before} GiB were free, then "
        f"{after} GiB). Start again once nothing else changes what it uses there"
    )


def _no_cache(match: Match) -> str:
    del match
    return (
        "the model's weights and activations leave no memory for the KV cache. Raise generator.vllm.gpu_memory_utilization "
        "(on CPU generator.vllm.cpu_kv_cache_gib), lower generator.vllm.max_num_batched_tokens or generator.vllm.max_num_seqs, "
        "or spread the model with generator.vllm.tensor_parallel"
    )


def _small_cache(match: Match) -> str:
    longest, needed, given = match.groups()
    return (
        f"one sequence of {longest} tokens needs {needed} GiB of KV cache; {given} GiB are left for it. Raise "
        "generator.vllm.gpu_memory_utilization (on CPU generator.vllm.cpu_kv_cache_gib; in `rlcore serve` with "
        f"KEY=VALUE), or {SHORTER}"
    )


def _device_in_use(match: Match) -> str:
    device, free, total, share, wanted = match.groups()
    return (
        f"{free} of {total} GiB are free on {device}; generator.vllm.gpu_memory_utilization = {share} asks for {wanted} GiB. "
        "Lower it, set residency.offload_trainer where the trainer is on that device, or end what else uses it"
    )


def _host_in_use(match: Match) -> str:
    free, total, wanted = match.groups()
    return (
        f"{free} of {total} GiB of the machine's memory are free, and the engine asks for {wanted} GiB. Lower "
        "generator.vllm.cpu_kv_cache_gib or generator.vllm.replicas, or end what else uses the memory"
    )


def _host_share(match: Match) -> str:
    free, total, share, wanted = match.groups()
    return (
        f"{free} of {total} GiB of the machine's memory are free, and the engine asks for a share of {share}, {wanted} GiB. "
        "End what else uses the memory"
    )


def _out_of_memory(match: Match) -> str:
    del match
    return (
        "the device's memory ran out. Lower generator.vllm.gpu_memory_utilization where something else needs the device too, "
        "set residency.offload_trainer where that is the trainer, lower generator.vllm.max_num_seqs or "
        "generator.vllm.max_num_batched_tokens, or spread the model with generator.vllm.tensor_parallel"
    )


def _too_long(match: Match) -> str:
    wanted, limit = match.groups()
    return f"sequences of {wanted} tokens are longer than the model takes ({limit}): {SHORTER}"


def _undivided_heads(match: Match) -> str:
    heads, width = match.groups()
    return f"generator.vllm.tensor_parallel = {width} does not divide the model's {heads} attention heads"


def _unsupported(match: Match) -> str:
    return f"this version of vLLM does not support the architecture {match[1]}: choose another generator or model"


def _port(match: Match) -> str:
    del match
    return "a port is taken that the engine's processes need to find each other: start again, or end what holds it"


_KNOWN: tuple[tuple[str, Callable[[Match], str]], ...] = (
    (_DISTURBED, _disturbed),
    (r"No available memory for the cache blocks", _no_cache),
    (rf"max seq len \((\d+)\), \({_GIB} KV\s+cache is needed.{{0,80}}?memory \({_GIB}\)", _small_cache),
    (
        rf"Free memory on device (\S+) \(([\d.]+)/{_GIB}\) on startup is less than desired GPU memory utilization "
        rf"\(([\d.]+), {_GIB}\)",
        _device_in_use,
    ),
    (
        rf"Available memory on node \d+ \(([\d.]+)/{_GIB}\) on startup is less than desired CPU memory utilization "
        rf"\(([\d.]+), {_GIB}\)",
        _host_share,
    ),
    (
        rf"Available memory on node \d+ \(([\d.]+)/{_GIB}\) on kv cache allocation is less than requested memory for kv "
        rf"\(([\d.]+)[ /]",
        _host_in_use,
    ),
    (r"OutOfMemoryError|CUDA out of memory|CUDA Error: out of memory", _out_of_memory),
    (
        r"max_model_len \((\d+)\) is greater than the derived max_model_len \((\w+=[\d.]+)",
        _too_long,
    ),
    (
        r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        _undivided_heads,
    ),
    (r"Model architectures \['(\w+)'.*? (?:are|is) not supported", _unsupported),
    (r"Address already in use|EADDRINUSE", _port),
)
"""Pattern to explanation, the more telling first."""
