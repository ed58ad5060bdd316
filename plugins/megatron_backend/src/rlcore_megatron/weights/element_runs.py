"""The elements of a rank's parameter as runs, each of one tensor of the files, with the place of each in that tensor."""

from collections.abc import Iterator, Sequence
from math import prod

from attrs import frozen
from torch import Tensor

from rlcore_megatron.families.weight_source import Blocks, HfTensor, Source, Stack
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.weights.parameter_rows import row_ranges, rows_per_group, tensor_rank_and_size


@frozen(kw_only=True)
class MatrixBlock:
    """A block of a matrix of the files: a tensor with two dimensions, or an expert's part of one that stacks all experts."""

    name: str
    """The tensor's name, and the expert's number where the tensor stacks them."""
    shape: tuple[int, int]
    rows: slice
    columns: slice
    transposed: bool = False
    """True where the parameter holds the matrix transposed; `rows` and `columns` are then those of the transposed matrix."""

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return len(range(self.rows.start, self.rows.stop, self.rows.step or 1)) * (self.columns.stop - self.columns.start)

    def taken(self, matrix: Tensor) -> Tensor:
        """Return the block, a view of `matrix` [shape], in the order of the parameter's elements."""
        return (matrix.T if self.transposed else matrix)[self.rows, self.columns]


@frozen(kw_only=True)
class Run:
    """The elements `first` to `beyond` - 1 of a parameter, which one tensor of the files holds."""

    tensor: HfTensor
    first: int
    beyond: int
    rows: slice
    """The elements' rows of the tensor, [rows, all other dimensions as one]."""
    columns: slice
    """Their columns in it."""
    block: MatrixBlock | None
    """Their place in a matrix of the files; None for a vector, or a tensor of more dimensions."""


def element_runs(source: Source, layout: ParallelLayout, first: int, beyond: int) -> list[Run]:
    """Return the runs of elements `first` to `beyond` - 1 of this rank's part of the source's parameter, in their order."""
    rank, size = tensor_rank_and_size(source, layout)
    return [run for rows in _row_runs(source, rank, size) for run in rows.clipped(first, beyond, rank)]


@frozen(kw_only=True)
class _RowRun:
    """Consecutive rows of a parameter that are consecutive rows of one tensor."""

    tensor: HfTensor
    begin: int
    """The number of the first row in the parameter."""
    row: int
    """The number of the first row in the tensor."""
    num_rows: int
    width: int
    """Elements of a row."""

    def clipped(self, first: int, beyond: int, rank: int) -> Iterator[Run]:
        """Yield what of the rows is among elements `first` to `beyond` - 1 of the parameter, in rectangles."""
        low = max(first - self.begin * self.width, 0)
        high = min(beyond - self.begin * self.width, self.num_rows * self.width)
        position = self.begin * self.width + low
        for top, left, height, width in rectangles(self.width, low, high):
            column = left + (rank * self.width if self.tensor.tp_dim == 1 else 0)
            rows = slice(self.row + top, self.row + top + height)
            columns, beyond = slice(column, column + width), position + height * width
            block = _block(self.tensor, rows, columns)
            yield Run(tensor=self.tensor, first=position, beyond=beyond, rows=rows, columns=columns, block=block)
            position = beyond


def _row_runs(source: Source, rank: int, size: int) -> Iterator[_RowRun]:
    ranges, counts = row_ranges(source, rank, size), rows_per_group(source, rank, size)
    begin = 0
    for group in range(source.local_groups(size)):
        for tensor, rows, count in zip(source.tensors, ranges, counts, strict=True):
            width = prod(tensor.shard_shape(size)[1:])
            for row, num_rows in _within_periods(tensor, rows.start + group * count, count):
                yield _RowRun(tensor=tensor, begin=begin, row=row, num_rows=num_rows, width=width)
                begin += num_rows


def _within_periods(tensor: HfTensor, row: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the number of rows that follow each other in the file, too, of `count` rows from `row` on."""
    size = tensor.place.size if isinstance(tensor.place, Blocks) else max(count, 1)
    offset = row % size if isinstance(tensor.place, Blocks) else 0
    while count:
        taken = min(count, size - offset)
        yield row, taken
        row, count, offset = row + taken, count - taken, 0


def rectangles(width: int, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield top, left, height and width of the rectangles that elements `low` to `high` - 1 of rows of a width make up."""
    while low < high:
        top, left = divmod(low, width)
        whole_rows = (high - low) // width if left == 0 else 0
        height, columns = (whole_rows, width) if whole_rows else (1, min(width - left, high - low))
        yield top, left, height, columns
        low += height * columns


def _block(tensor: HfTensor, rows: slice, columns: slice) -> MatrixBlock | None:
    """Return the place of a rectangle of the tensor in the files' matrix."""
    place = tensor.place
    if len(tensor.shape) != 2:
        return None
    if isinstance(place, Stack):
        strided = slice(rows.start * place.num_parts + place.part, rows.stop * place.num_parts, place.num_parts)
        name, shape = f"{place.name}[{place.expert}]", _pair(place.shape[1:])
        return MatrixBlock(name=name, shape=shape, rows=strided, columns=columns, transposed=True)
    if isinstance(place, Blocks):
        first = rows.start // place.size * place.period + place.first + rows.start % place.size
        rows = slice(first, first + rows.stop - rows.start)
    return MatrixBlock(name=tensor.file_name, shape=_pair(tensor.file_shape), rows=rows, columns=columns)


def _pair(shape: Sequence[int]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns
