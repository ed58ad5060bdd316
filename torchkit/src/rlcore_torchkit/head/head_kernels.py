"""A head's product with hidden states, in float32 from factors in half precision, as a Triton kernel for CUDA.

Each logit is summed by the same instructions in the same order whatever rows are computed beside it, which libraries do not
promise: they choose tiles, and whether to split the sum, by the number of rows.

Shapes: C rows, V vocabulary, H hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def _product_kernel(
    states,
    head,
    logits,
    num_rows,
    num_columns,
    size,
    states_stride,
    head_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < num_rows, columns < num_columns
    row_places = states + tl.where(has_row, rows, 0)[:, None] * states_stride
    column_places = head + tl.where(has_column, columns, 0)[None, :] * head_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, size, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < size
        part = tl.load(row_places + depth[None, :], mask=inside[None, :], other=0.0)
        weights = tl.load(column_places + depth[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(part, weights, total)
    places = logits + rows[:, None] * num_columns + columns[None, :]
    tl.store(places, total, mask=has_row[:, None] & has_column[None, :])


def product(states: Tensor, head: Tensor) -> Tensor:
    """float32 [C, V] from states [C, H] and head [V, H], both in the same half precision."""
    states = states.contiguous()
    (num_rows, size), num_columns = states.shape, head.shape[0]
    logits = torch.empty(num_rows, num_columns, device=states.device)
    if num_rows:
        # Tiles of the same columns run beside each other, so that the head is read from memory once.
        grid = (triton.cdiv(num_rows, TILE["ROWS"]), triton.cdiv(num_columns, TILE["COLUMNS"]))
        _product_kernel[grid](states, head, logits, num_rows, num_columns, size, states.stride(0), head.stride(0), **TILE)
    return logits
