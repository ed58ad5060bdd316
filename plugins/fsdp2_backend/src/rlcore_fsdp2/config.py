"""The recipe's section `[trainer.fsdp2]`."""

from typing import Literal

from attrs import field, frozen


@frozen(kw_only=True)
class OptimizerConfig:
    """`[trainer.fsdp2.optimizer]`: AdamW."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of weight matrices; biases and norms are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0.0 never."""


@frozen(kw_only=True)
class ScheduleConfig:
    """`[trainer.fsdp2.schedule]`: the learning rate over the run's optimizer steps."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly; the last of them is the first at the peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Its course from the end of the warm-up to the end of the run."""
    min_learning_rate_ratio: float = 0.0
    """Where a decay ends, as a share of the peak."""


@frozen(kw_only=True)
class Fsdp2Config:
    """`[trainer.fsdp2]`: Hugging Face causal language models under PyTorch FSDP2."""

    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    schedule: ScheduleConfig = field(factory=ScheduleConfig)
    tensor_parallel: int = 1
    """Ranks that share each layer: its heads, the columns of its MLP, its experts, and the vocabulary."""
    sequence_parallel: bool = True
    """With tensor_parallel, norms and residuals are divided over the same ranks by tokens: less memory at the same traffic."""
    context_parallel: int = 1
    """Ranks that share the tokens of a microbatch, for sequences too long for one."""
    expert_parallel: int = 1
    """Ranks that share the experts of a mixture-of-experts layer; a divisor of the ranks left by tensor_parallel and
    replicate."""
    replicate: int = 1
    """Groups of ranks that each hold all of the weights between them (hybrid sharding): less traffic between the groups, more
    memory. The other ranks, world size / (replicate · context_parallel · tensor_parallel), divide the data and the weights."""
    cpu_offload: bool = False
    """On CUDA, keep weights, gradients and optimizer state on the host and bring over each layer's weights when it computes."""
    fp8: bool = False
    """Compute the linear layers of decoders in float8 (needs `rlcore-fsdp2[fp8]` and a GPU with float8; emulated on CPU)."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again: less memory, a third more work."""
    compile_layers: bool = False
    """Compile the decoder layers with torch.compile: faster steps on CUDA, after a first one that takes a minute."""
    reshard_after_forward: bool = True
    """With several ranks, free a layer's full weights between its forward and backward pass and gather them again."""
    reduce_every_microbatch: bool = False
    """With several ranks, reduce the gradients after every microbatch instead of once a step: less memory, more traffic."""
    collective_timeout_s: float = 1800.0
    """Most seconds that a rank waits for the others in one collective before the run ends."""
