"""The recipe's section `[generator.transformers]`."""

from attrs import frozen

from rlcore.schema.constraints import Positive


@frozen(kw_only=True)
class TransformersConfig:
    """`[generator.transformers]`: batched generation in the process itself."""

    max_batch_size: Positive = 256
    """Samples decoded at the same time; the KV cache has so many places."""
    max_prefill_tokens: Positive = 8192
    """Prompt tokens, padding included, in one forward pass; a longer prompt gets one of its own."""
