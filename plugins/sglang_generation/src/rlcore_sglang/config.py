"""The recipe's section `[generator.sglang]`."""

from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from rlcore.schema.constraints import PathText, Positive, Seconds, above_at_most


@frozen(kw_only=True)
class SglangConfig:
    """`[generator.sglang]`: one SGLang engine."""

    tensor_parallel: Positive = 1
    """Devices (on CPU, processes) that the engine spreads over."""
    mem_fraction_static: Annotated[float, above_at_most(0, 1)] = 0.5
    """Share of a device's memory for weights and KV cache."""
    max_total_tokens: Positive | None = None
    """Most tokens in the KV cache; None takes what `mem_fraction_static` leaves on CUDA, and 65536 on CPU."""
    max_running_requests: Positive = 256
    """Most samples decoded at the same time."""
    attention_backend: str | None = None
    """SGLang's name of the attention to use; None takes "torch_native" on CPU, and on CUDA what SGLang chooses."""
    start_timeout_s: Seconds = 600.0
    """Most seconds for the engine to start."""
    refit_timeout_s: Seconds = 300.0
    """Most seconds for one part of a refit: its beginning, one bucket, its end."""
    generate_timeout_s: Seconds = 3600.0
    """Most seconds that a call may wait for its next sample to end."""
    refit_directory: PathText | None = None
    """Folder through which weights travel by the channel "directory"; None takes a temporary one."""
    engine: Mapping[str, object] = field(factory=dict)
    """Further arguments of SGLang's ServerArgs, by its names."""
