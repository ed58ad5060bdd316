"""Numbering of ranks that share tokens and weights, in every trainer alike; imports no torch."""

from attrs import frozen


@frozen(kw_only=True)
class RankGrid:
    """A rank among those that share tokens and weights: `tensor` varies fastest as ranks count up, then `context`."""

    rank: int = 0
    context: int = 1
    """Ranks that share the tokens of each sequence."""
    tensor: int = 1
    """Ranks that share each layer's heads, columns and the vocabulary."""
    sequence_parallel: bool = True
    """True where tensor ranks divide the tokens between the products that they share; without effect where `tensor` is 1."""

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def context_rank(self) -> int:
        return self.rank // self.tensor % self.context
