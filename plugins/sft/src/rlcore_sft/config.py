"""`[algorithm.sft]`"""

from attrs import frozen


@frozen(kw_only=True)
class SftConfig:
    """Supervised fine-tuning on prompt/completion pairs. It has no options of its own."""
