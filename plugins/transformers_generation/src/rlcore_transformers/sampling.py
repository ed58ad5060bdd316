"""Drawing tokens so that a draw depends on its seed, its position and its logits alone.

Shapes: B rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from rlcore.spi import SamplingParams, TokenReader
from rlcore.spi.arrays import Int32Array, Int64Array
from rlcore_torchkit.generation import splitmix64

_MASK = 2**31 - 1


def position_keys(seeds: Int64Array, positions: Int64Array) -> Int32Array:
    """int32 [B], non-negative: a hash of seed and position in the sequence, by two rounds of splitmix64."""
    mixed = splitmix64(splitmix64(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return (mixed >> np.uint64(33)).astype(np.int32)


def sample_tokens(logits: Tensor, keys: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens int64 [B] and their log-probabilities float32 [B], from logits [B, V] and keys int32 [B] of position_keys; and
    bool [B, V] what they were chosen among, None where that is the whole vocabulary. Logits of tokens that a schema forbids are
    -inf.

    An exponential race: token v wins where p_v / E_v is largest, with E_v an exponential variate of (key, v). Logits that
    differ by rounding alone almost never change the winner, whatever V is; a walk along cumulated probabilities would move with
    the error of each token before.
    """
    logits = logits.float()
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, _pick(logits, tokens) - logits.logsumexp(-1), None
    probabilities = (logits if sampling.temperature == 1.0 else logits / sampling.temperature).softmax(-1)
    truncates = 0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1.0
    if truncates:
        probabilities = truncate(probabilities, sampling.top_k, sampling.top_p)
    tokens = (probabilities / exponentials(keys, logits.shape[-1])).argmax(-1)
    is_whole = not truncates and sampling.json_schema is None
    return tokens, _pick(probabilities, tokens).log(), None if is_whole else probabilities > 0


def top_logprobs(logits: Tensor, token: Tensor, sampling: SamplingParams, reader: TokenReader) -> dict[int, float]:
    """Log-probabilities of a token and of the most probable ones under the distribution sampled from, given logits [V]; at
    temperature 0, under the untempered one. Tokens that truncation leaves out are not reported."""
    probabilities = (logits.float() if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature).softmax(
        -1
    )
    if sampling.temperature and (0 < sampling.top_k < len(logits) or sampling.top_p < 1.0):
        probabilities = truncate(probabilities[None], sampling.top_k, sampling.top_p)[0]
    count = min(reader.num_logprobs or 0, int((probabilities > 0).sum()))
    chosen = torch.cat((token[None], probabilities.topk(count).indices))
    return dict(zip(chosen.tolist(), probabilities[chosen].log().tolist(), strict=True))


def token_logprobs(logits: Tensor, tokens: Tensor, num_logprobs: int) -> list[dict[int, float]]:
    """Log-probabilities at temperature 1 of tokens int64 [B] and of the `num_logprobs` most probable ones, given logits
    [B, V]: by token, of each row."""
    logprobs = logits.float().log_softmax(-1)
    chosen = torch.cat((tokens[:, None], logprobs.topk(min(num_logprobs, logprobs.shape[-1])).indices), dim=1)
    values = logprobs.gather(1, chosen).tolist()
    return [dict(zip(row, found, strict=True)) for row, found in zip(chosen.tolist(), values, strict=True)]


def truncate(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """The most probable tokens' share of `probabilities` [B, V], renormalised, 0 elsewhere; top_k = 0 and top_p = 1 keep all.

    Tokens exactly as probable as the last one kept are kept too.
    """
    ordered = _sorted(probabilities)
    last = ordered.shape[-1] - 1
    first = torch.zeros((len(ordered), 1), dtype=torch.int64, device=ordered.device)
    if 0 < top_k <= last:
        first += last + 1 - top_k
        ordered = ordered.clone()
        ordered[:, : last + 1 - top_k] = 0.0
    if top_p < 1.0:
        mass = ordered.cumsum(-1, dtype=torch.float64)
        dropped = (mass <= (1.0 - top_p) * mass[:, -1:]).sum(-1, keepdim=True)
        first = torch.maximum(first, dropped.clamp_(max=last))
    kept = probabilities.where(probabilities >= ordered.gather(1, first), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def exponentials(keys: Tensor, num_tokens: int) -> Tensor:
    """float32 [B, num_tokens]: independent exponential variates of rate 1, determined by (key, token)."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=keys.device).mul_(0x1E3779B1).bitwise_and_(_MASK)
    bits = keys[:, None] ^ tokens
    for factor, shift in ((0x7FEB352D, 15), (0x6C8E9CF5, 16)):
        bits.mul_(factor).bitwise_and_(_MASK)
        bits.bitwise_xor_(bits >> shift)
    # The half keeps 0 out. The largest bits round to probability 1, an infinite variate: such a token never wins.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()


def _sorted(values: Tensor) -> Tensor:
    """Ascending along the last dimension; on the host numpy's vectorised sort is ten times faster than torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), -1))
    return values.sort(-1).values


def _pick(rows: Tensor, columns: Tensor) -> Tensor:
    return rows.gather(1, columns[:, None])[:, 0]
