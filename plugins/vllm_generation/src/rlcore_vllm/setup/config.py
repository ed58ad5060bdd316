"""The recipe's section `[generator.vllm]`."""

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Count, PathText, Positive, Seconds, above, above_at_most, between


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and parts.port != 0 and bool(parts.hostname)
    except ValueError:  # a port that is no number
        return False


_ADDRESS = Constraint("such as http://127.0.0.1:8000", _is_address)


ROUNDING_ARGUMENTS = (
    "hf_overrides",
    "model_class_overrides",
    "logits_processors",
    "lora_dtype",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "mm_encoder_attn_dtype",
)
"""Arguments of EngineArgs that may have it compute something else than the trainer's model in model.dtype."""


@frozen(kw_only=True)
class VllmConfig:
    """`[generator.vllm]`: one or several vLLM engines."""

    replicas: Positive = 1
    """Engines; the samples of a step are dealt out among them. They may share a device, where one is faster than two."""
    tensor_parallel: Positive = 1
    """Devices (on CPU, processes) that one engine spreads over."""
    devices: tuple[Count, ...] | None = None
    """CUDA devices of the engines; each engine takes the next `tensor_parallel` of them. None takes the devices that the
    cluster's layout gives to generation or to the engine's ranks. Without a cluster it is the trainer's device, which the two
    share."""
    gpu_memory_utilization: Annotated[float, above_at_most(0, 1)] | Literal["auto"] = "auto"
    """Share of a device's memory for all of its engines together: weights, activations and KV cache. "auto" is what the trainer
    leaves, by the estimate of `rlcore plan`; 0.92 for engines with their own devices; 0.5 if the trainer's share is unknown."""
    cpu_kv_cache_gib: Annotated[float, above(0)] = 1.0
    """KV cache of one engine on CPU."""
    max_num_seqs: Positive = 1024
    """Most sequences that one engine decodes at a time."""
    max_num_batched_tokens: Positive = 8192
    """Most tokens that one engine computes in a step, at least `max_num_seqs`. They are tokens of prompts, incl. recomputation
    of sequences after a refit. More tokens make steps longer and use more memory beside the KV cache."""
    enforce_eager: bool | None = None
    """True: run the model without compilation and CUDA graphs. None: true on CPU, false on CUDA."""
    batch_invariant: bool = False
    """vLLM's batch-invariant mode: each token is computed by the same instructions in any batch, without torch.compile;
    slower. With the same option of `fsdp2` or `megatron` log-probabilities equal the trainer's bitwise. Qwen3 without experts
    in bfloat16, on GPUs of compute capability 9 (docs/train-inference-agreement.md)."""
    prefix_caching: bool = True
    """Share the KV cache of equal prompt beginnings, such as the samples of one prompt."""
    quantization: Literal["none", "fp8", "fp8_per_block"] = "none"
    """Hold the weights of linear layers and experts in 8 bits, and quantise them again at each refit. "fp8": one scale a
    tensor. "fp8_per_block": one scale for each block of 128 x 128. Activations are quantised dynamically. Only on GPUs with
    8-bit matrix multiplication."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """"fp8" holds keys and values in 8 bits, with scales of 1; only on GPUs with 8-bit products."""
    speculative_ngram: Annotated[int, between(0, 128)] = 0
    """Number of draft tokens by n-gram lookup: the tokens that followed the same last tokens earlier in the sequence. One step
    verifies them all; the distribution of samples stays the same. It pays where few sequences leave the device idle and texts
    repeat. 0 drafts none."""
    speculative_model: PathText | None = None
    """Directory of a model that drafts the next tokens. The policy verifies them all in one step; the distribution of samples
    stays the same. Refits change only the policy, not the draft model."""
    speculative_method: Literal["draft_model", "eagle", "eagle3", "mtp"] = "draft_model"
    """The kind of draft model. "draft_model": a language model with the policy's vocabulary. "eagle", "eagle3": a head that
    reads the policy's hidden states, trained by EAGLE (arXiv:2401.15077) or EAGLE-3 (arXiv:2503.01840). "mtp": the multi-token
    head (arXiv:2412.19437) in the files of `speculative_model` or, without that key, of the policy itself."""
    speculative_tokens: Annotated[int, between(1, 32)] = 4
    """Tokens that the drafter guesses at a time."""
    speculative_most_sequences: Positive | None = None
    """Draft only in steps with at most so many sequences, such as the last ones of a step's generation; None in every step."""
    metrics: bool = False
    """Keep vLLM's own metrics, such as `vllm:num_requests_running`, in a file `logs/vllm-0.prom` of the run directory. The sink
    `prometheus` and `rlcore serve` show them at /metrics."""
    start_timeout_s: Seconds = 600.0
    """Most seconds for an engine to start. Like the next two, of an engine in a process of its own, which is then ended; one in
    the trainer's process is waited for."""
    refit_timeout_s: Seconds = 120.0
    """Timeout in seconds of a refit's wait for an engine, of a request's wait for an engine to accept it, and of a stream's
    wait for a sign of its process."""
    generate_timeout_s: Seconds = 3600.0
    """Most seconds for the samples of one step."""
    followers: tuple[Annotated[str, _ADDRESS], ...] = ()
    """vLLM's own servers that take over every refit too, such as http://127.0.0.1:8000 (docs/serving.md)."""
    followers_required: bool = False
    """True: a follower that does not take a refit fails the refit. False: the run logs a warning and goes on."""
    refit_directory: PathText | None = None
    """Folder through which weights travel to followers, and to engines by the channel "directory". Every side has to see it.
    None takes one in shared memory where there is room, else a temporary one."""
    engine: Mapping[str, object] = field(factory=dict)
    """Further arguments of vLLM's EngineArgs, by its names."""

    @property
    def has_drafter(self) -> bool:
        """Return whether a model guesses tokens: another one, or a head of the policy's own."""
        return self.speculative_model is not None or self.speculative_method == "mtp"

    @property
    def is_quantized(self) -> bool:
        """Return whether tokens are sampled from less than the model's own dtype computes."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"
