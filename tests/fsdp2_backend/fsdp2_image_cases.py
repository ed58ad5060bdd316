"""What each rank does in the tests of test_images_context_parallel: context ranks against transformers on one process."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve
from comparing import Comparing
from fsdp2_layout_cases import FLOAT32, OPTIMIZER, GradientsSeen, assert_gradients, assert_weights
from fsdp2_support import TEMPERATURE, exported, make_backend, make_config, split, step_request
from gradient_norm_cases import assert_norms, norms_in_files
from image_support import ImageReference, image_batch
from rank_launch import run_rows

from rlcore.spi import CloseRequest, LogprobsRequest
from rlcore_conformance.trainers.pieces import step_in_pieces

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NUM_STEPS = 2
READS = ((2,), (), (1, 0), (), (1,), (0, 2, 1))
"""The images of each sequence: one larger than half of its sequence, several, and none."""
GROUPS = ([0, 5], [3, 2], [1], [4])
"""Sequences of each microbatch: images that ranks share, that one rank alone has, and none."""
OPTIONS = {
    "cp": {"context_parallel": 2},
    "cp+checkpointing": {"context_parallel": 2, "activation_checkpointing": True},
    "cp+frozen": {"context_parallel": 2, "freeze": "vision"},
}
CASES = tuple(f"{options}/{family}" for family in FAMILIES for options in OPTIONS if options == "cp" or family == "qwen3_vl")


def check(rank: int, num_ranks: int, models: Path, scratch: Path, name: str) -> str:
    """Log-probabilities of policy and reference, and steps, are those of transformers."""
    options, _, family = name.partition("/")
    directory = models / family
    config = make_config(**OPTIONS[options])
    reference = ImageReference(directory, OPTIMIZER, frozen="visual" if config.freeze == "vision" else None)
    place: dict[str, Any] = {"rank": rank, "world_size": num_ranks, "local_rank": rank, "rendezvous": "env://"}
    trainer = make_backend(directory, config=config, optimizer=OPTIMIZER, needs_reference=True, **place)
    results, seen = Comparing(), GradientsSeen(trainer)
    groups = GROUPS[trainer.layout.data_parallel_rank :: trainer.layout.data_parallel_size]
    for version in range(NUM_STEPS):
        batch = image_batch(directory, version, READS)
        with torch.no_grad():
            expected = np.split(reference.logprobs(batch)[0].numpy(), batch.offsets[1:-1])
        for model in ("policy", "reference") if version == 0 else ("policy",):
            request = LogprobsRequest(
                microbatches=split(batch, groups),
                model=model,
                temperature=TEMPERATURE,
                entropy=False,
                weight_version=version,
            )
            found = trainer.get_logprobs(request).logprobs
            with results.comparing():
                for group, row in zip(groups, found, strict=True):
                    np.testing.assert_allclose(row, np.concatenate([expected[n] for n in group]), rtol=0.0, atol=2e-5)
        request = evolve(step_request(split(batch, groups), batch.counts(), version), gradient_norms=True)
        result = step_in_pieces(trainer, request) if version == 1 else trainer.train_step(request)
        reference.backward(batch)
        trained = {name: p.grad.clone() for name, p in reference.model.named_parameters() if p.grad is not None}
        reference.optimizer.zero_grad()
        loss, norm = reference.step(batch)
        with results.comparing():
            assert_norms(result, norms_in_files(reference.model, trained), 1e-4)
        with results.comparing():
            assert abs(result.loss - loss) < 1e-4
        with results.comparing():
            assert abs(result.grad_norm - norm) < 1e-4 * norm
        with results.comparing():
            assert_gradients({name: seen.tensors[name] for name in trained}, trained, FLOAT32)
    weights = exported(trainer, NUM_STEPS)
    if rank == 0:  # save_pretrained writes on no other
        with results.comparing():
            assert_weights(weights, reference.saved(scratch / name.replace("/", "-")))
    trainer.close(CloseRequest())
    return "\n".join(results.wrong)


def run_all(rank: int, num_ranks: int, models: Path, scratch: Path, names: Collection[str]) -> None:
    """Run the cases of these names."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=num_ranks)
    cases = {name: partial(check, rank, num_ranks, models, scratch, name) for name in CASES if name in names}
    run_rows(cases, scratch / f"results-{rank}.json")
    dist.destroy_process_group()
