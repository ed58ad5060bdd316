"""vLLM's own errors, in the recipe's terms."""

import re

SHORTER = "lower rollout.max_prompt_tokens or rollout.max_response_tokens, or pass --max-length to `rlcore serve`"
_GIB = r"([\d.]+)\s*GiB"
_PORT = r"Address already in use|EADDRINUSE"
_PORT_IS_TAKEN = "a port is taken that the engine's processes need to find each other"
_DISTURBED = rf"Error in memory profiling\. Initial free memory {_GIB}, current free memory {_GIB}"
_KNOWN = {
    _DISTURBED: (
        "another process freed memory of the device while the engine measured what it may use ({0} GiB were free, then "
        "{1} GiB). Start again once nothing else changes what it uses there"
    ),
    r"No available memory for the cache blocks": (
        "the model's weights and activations leave no memory for the KV cache. Raise generator.vllm.gpu_memory_utilization "
        "(on CPU generator.vllm.cpu_kv_cache_gib), lower generator.vllm.max_num_batched_tokens or generator.vllm.max_num_seqs, "
        "or spread the model with generator.vllm.tensor_parallel"
    ),
    rf"max seq len \((\d+)\), \({_GIB} KV\s+cache is needed.{{0,80}}?memory \({_GIB}\)": (
        "one sequence of {0} tokens needs {1} GiB of KV cache; {2} GiB are left for it. Raise "
        "generator.vllm.gpu_memory_utilization (on CPU generator.vllm.cpu_kv_cache_gib; in `rlcore serve` with "
        f"KEY=VALUE), or {SHORTER}"
    ),
    rf"Free memory on device (\S+) \(([\d.]+)/{_GIB}\) on startup is less than desired GPU memory utilization "
    rf"\(([\d.]+), {_GIB}\)": (
        "{1} of {2} GiB are free on {0}; generator.vllm.gpu_memory_utilization = {3} asks for {4} GiB. "
        "Lower it, set offload.trainer where the trainer is on that device, or end what else uses it"
    ),
    rf"Available memory on node \d+ \(([\d.]+)/{_GIB}\) on startup is less than desired CPU memory utilization "
    rf"\(([\d.]+), {_GIB}\)": (
        "{0} of {1} GiB of the machine's memory are free, and the engine asks for a share of {2}, {3} GiB. "
        "End what else uses the memory"
    ),
    rf"Available memory on node \d+ \(([\d.]+)/{_GIB}\) on kv cache allocation is less than requested memory for kv "
    rf"\(([\d.]+)[ /]": (
        "{0} of {1} GiB of the machine's memory are free, and the engine asks for {2} GiB. Lower "
        "generator.vllm.cpu_kv_cache_gib or generator.vllm.replicas, or end what else uses the memory"
    ),
    r"OutOfMemoryError|CUDA out of memory|CUDA Error: out of memory": (
        "the device's memory ran out. Lower generator.vllm.gpu_memory_utilization where something else needs the device too, "
        "set offload.trainer where that is the trainer, lower generator.vllm.max_num_seqs or "
        "generator.vllm.max_num_batched_tokens, or spread the model with generator.vllm.tensor_parallel"
    ),
    r"max_model_len \((\d+)\) is greater than the derived max_model_len \((\w+=[\d.]+)": (
        f"sequences of {{0}} tokens are longer than the model takes ({{1}}): {SHORTER}"
    ),
    r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)": (
        "generator.vllm.tensor_parallel = {1} does not divide the model's {0} attention heads"
    ),
    r"Model architectures \['(\w+)'.*? (?:are|is) not supported": (
        "this version of vLLM does not support the architecture {0}: choose another generator or model"
    ),
    _PORT: f"{_PORT_IS_TAKEN}: start again, or end what holds it",
}
"""Pattern to explanation, with the pattern's groups by their numbers from 0; the more telling first."""


def explain(error_text: str) -> str | None:
    """Explain a known error of an engine, with the key of the recipe that changes it; None for any other error."""
    for pattern, explanation in _KNOWN.items():
        match = re.search(pattern, error_text, re.DOTALL)
        if match is not None:
            return explanation.format(*match.groups())
    return None


def is_passing(error_text: str) -> bool:
    """Return whether another start may succeed: memory is measured anew, and vLLM takes another free port."""
    return re.search(f"{_DISTURBED}|{_PORT}|{re.escape(_PORT_IS_TAKEN)}", error_text) is not None
