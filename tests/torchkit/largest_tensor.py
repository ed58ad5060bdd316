"""How large the largest tensor is that some code makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Counts the elements of every tensor that is made within it, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (tensor.numel() for tensor in tree_leaves(result) if isinstance(tensor, Tensor))
        self.numel = max(self.numel, *sizes, 0)
        return result
