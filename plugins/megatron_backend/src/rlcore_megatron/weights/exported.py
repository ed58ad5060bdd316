"""A tensor of the export, and who has it."""

from attrs import frozen

from rlcore.spi import DtypeName
from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.weights.parameter_rows import largest_share


@frozen(kw_only=True, eq=False)
class Exported:
    """One tensor of the export and who has it."""

    tensor: HfTensor
    source: Source
    index: int
    """The index of the tensor among the source's."""
    stage: int
    """The pipeline rank that sends it where it is gathered."""
    expert_rank: int | None
    """The expert-parallel rank that sends it then; None for what is no expert's."""
    parameter: tuple[int, str] | None
    """The number of the model chunk and the name of the parameter, on ranks that hold a share of it."""

    def sent_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape that each of `size` tensor ranks sends: the same of all, whose end may mean nothing."""
        return largest_share(self.source, self.index, size)

    @property
    def sender(self) -> tuple[int, int | None, DtypeName | None]:
        """The sender, and the dtype of the tensor's own: tensors that are alike in these travel together."""
        return self.stage, self.expert_rank, self.tensor.dtype
