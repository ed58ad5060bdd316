"""The recipe's section `[trainer.fsdp2]`."""

from typing import Literal

from attrs import frozen

from rlcore.schema.constraints import Positive, Seconds

MOST_HELD = 0.4
"""The most of a device's memory for gradients that wait for their reduction, unless a section says."""


@frozen(kw_only=True)
class Fsdp2Config:
    """`[trainer.fsdp2]`: Hugging Face causal language models under PyTorch FSDP2."""

    tensor_parallel: Positive = 1
    """Ranks that share each layer: its heads, the columns of its MLP, its experts, and the vocabulary."""
    sequence_parallel: bool = True
    """With tensor_parallel, norms and residuals are divided over the same ranks by tokens: less memory at the same traffic."""
    context_parallel: Positive = 1
    """Ranks that share the tokens of a microbatch, for sequences too long for one."""
    expert_parallel: Positive = 1
    """Ranks that share the experts of a mixture-of-experts layer; a divisor of the ranks left by tensor_parallel and
    replicate."""
    replicate: Positive = 1
    """Groups of ranks that each hold all of the weights between them (hybrid sharding): less traffic between the groups, more
    memory. The other ranks, world size / (replicate · context_parallel · tensor_parallel), divide the data and the weights."""
    cpu_offload: bool = False
    """On CUDA, keep weights, gradients and optimizer state on the host and bring over each layer's weights when it computes."""
    freeze: Literal["none", "vision"] = "none"
    """"vision": freeze the vision tower and its projector; only the language model trains. "none": freeze nothing."""
    fp8: bool = False
    """Compute the linear layers of decoders in float8 (needs `rlcore-fsdp2[fp8]` and a GPU with float8; emulated on CPU)."""
    batch_invariant: bool = False
    """Compute with the kernels of an engine with `generator.vllm.batch_invariant`, for bitwise equal log-probabilities; slower.
    Qwen3 without experts in bfloat16, on GPUs of compute capability 9, with vLLM installed beside the trainer
    (docs/train-inference-agreement.md)."""
    batch_invariant_parts: Positive = 1
    """Number of the engine's ranks, `generator.vllm.tensor_parallel`; needs batch_invariant. Products of o_proj and down_proj
    are computed in as many parts, and added in the order of ranks."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again: less memory, a third more work."""
    compile_layers: bool = False
    """Compile the decoder layers with torch.compile: faster steps on CUDA, after a first one that takes a minute."""
    reshard_after_forward: bool = True
    """With several ranks, free a layer's full weights between its forward and backward pass and gather them again."""
    reduce_every_microbatch: bool | None = None
    """With several ranks, reduce the gradients after every microbatch instead of once a step: less memory, more traffic. None:
    on CUDA where a rank's gradients would otherwise take more than 40% of the device until then."""
    collective_timeout_s: Seconds = 1800.0
    """Most seconds that a rank waits for the others in one collective before the run ends."""
