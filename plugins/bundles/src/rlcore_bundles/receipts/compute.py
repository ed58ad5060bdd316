"""Computes a receipt: log-probabilities of a job's sequences by transformers in float32 on CPU, and digests of its weights."""

import importlib
import inspect
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlcore.spi import GENERATION_LOGPROBS, WEIGHT_VERSIONS, TokenBatch
from rlcore_bundles.receipts.findings import Difference, Independent, difference, finding
from rlcore_bundles.receipts.job import MODEL, TRAINER_LOGPROBS, Job, read_job
from rlcore_bundles.receipts.record import described_refit
from rlcore_bundles.rows import place_of

ROWS = 256
"""Rows of logits that are widened to float64 at once."""
IMPORTED = ("rlcore_torchkit.refit.digest", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
TIED = "lm_head.weight"
"""A tensor that a directory may hold besides the one that it is tied to."""


def prepare() -> None:
    """Import what takes seconds, once for all receipts of a run."""
    for module in IMPORTED:
        importlib.import_module(module)


def receipt(argument: None, folder: Path) -> dict[str, Any]:  # noqa: ARG001 - the form of a pool's task
    """The receipt of a job's folder, or {"failure": reason}. Any failure belongs to the receipt, and not to the run."""
    start = time.monotonic()
    try:
        found = _receipt(read_job(folder), folder / MODEL)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return {"failure": lines[0][:500]}
    return found | {"seconds": time.monotonic() - start}


def _receipt(job: Job, model: Path) -> dict[str, Any]:
    tensors, digest = compared_tensors(model, job.dtype, job.digests)
    independent = independent_logprobs(
        model,
        job.batch,
        temperature=job.temperature,
        max_tokens=job.max_tokens,
        num_threads=job.num_threads,
        trust_remote_code=job.trust_remote_code,
    )
    columns = job.batch.token_columns
    trainer = difference(columns[TRAINER_LOGPROBS], independent, job.batch.loss_mask, job.bound)
    generation = None
    if job.compares_generator:
        own = job.batch.loss_mask & (columns[WEIGHT_VERSIONS] == job.weight_version)
        generation = difference(columns[GENERATION_LOGPROBS], independent, own, job.bound)
    return {
        "step": job.step,
        "weight_version": job.weight_version,
        "num_sequences": job.batch.num_sequences,
        "trainer": _described(trainer, job),
        "generation": _described(generation, job),
        "tensors": tensors,
        "weights_sha256": digest,
        "bound": job.bound,
        "finding": finding(trainer, generation, tensors, job.temperature),
    }


def independent_logprobs(
    model: Path, batch: TokenBatch, *, temperature: float, max_tokens: int, num_threads: int, trust_remote_code: bool
) -> Independent:
    """The log-probability of each loss token among the first `max_tokens` of its sequence, one sequence after another, without
    packing or padding."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    loaded.eval()
    keeps = "logits_to_keep" in inspect.signature(loaded.forward).parameters
    logprobs, slopes = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
    computed = np.zeros(batch.num_tokens, np.bool_)
    for begin, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        tokens = batch.tokens[begin : min(end, begin + max_tokens)]
        wanted = np.flatnonzero(batch.loss_mask[begin : begin + len(tokens)])
        if not len(wanted):
            continue
        before = torch.as_tensor(wanted - 1)  # the logits of token t stand at token t - 1
        with torch.inference_mode():
            ids = torch.as_tensor(tokens.astype(np.int64))[None]
            logits = loaded(ids, use_cache=False, **({"logits_to_keep": before} if keeps else {})).logits[0]
            logits = logits if keeps else logits[before]
            for first in range(0, len(wanted), ROWS):
                rows = wanted[first : first + ROWS]
                scaled = logits[first : first + ROWS].double() / temperature
                _leave_out(scaled, batch, begin, rows)
                chosen = torch.as_tensor(tokens[rows].astype(np.int64))[:, None]
                own = scaled.gather(1, chosen)[:, 0]
                probabilities = scaled.softmax(-1)
                mean = torch.where(probabilities > 0, probabilities * scaled, 0.0).sum(-1)
                logprobs[begin + rows] = (own - scaled.logsumexp(-1)).numpy()
                slopes[begin + rows] = (own - mean).numpy()
        computed[begin + wanted] = True
    return Independent(logprobs=logprobs, slopes=slopes, computed=computed)


def _leave_out(logits: Any, batch: TokenBatch, begin: int, rows: Any) -> None:
    """Set the logits [R, vocabulary] of tokens that truncated sampling left out to -inf, in place."""
    if batch.sampling_mask is None:
        return
    mask = batch.sampling_mask
    for number, token in enumerate((begin + rows).tolist()):
        kept = mask.tokens[mask.offsets[token] : mask.offsets[token + 1]]
        if len(kept):
            row = logits[number]
            values = row[kept.tolist()].clone()
            row.fill_(-float("inf"))
            row[kept.tolist()] = values


def compared_tensors(model: Path, dtype: str, digests: Mapping[str, int]) -> tuple[dict[str, Any] | None, str]:
    """The tensors of a directory that a refit left out or changed, and a SHA-256 over the names and digests of all.

    The first is None where the refit's digests are not known, or are those of adapters."""
    import torch
    from safetensors import safe_open

    from rlcore_torchkit.refit.digest import tensor_digest

    own: dict[str, set[int]] = {}
    stored: dict[str, int] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor = opened.get_tensor(name)
                stored[name] = tensor_digest(tensor)
                own[name] = {stored[name]}
                if tensor.is_floating_point():
                    own[name].add(tensor_digest(tensor.to(getattr(torch, dtype))))
    whole = described_refit(0, stored)["sha256"]
    if not own.keys() & digests.keys():
        return None, whole
    return {
        "compared": len(own.keys() & digests.keys()),
        "missing": [name for name in own if name not in digests and name != TIED],
        "changed": [name for name in own if name in digests and digests[name] not in own[name]],
    }, whole


def _described(found: Difference | None, job: Job) -> dict[str, Any] | None:
    if found is None:
        return None
    sequence, token = place_of(job.batch.offsets, found.token)
    place = {"sequence": job.numbers[sequence], "token": token}
    figures = {name: value for name, value in attrs.asdict(found).items() if name != "token"}
    return figures | place | {"temperature": found.temperature * job.temperature}
