"""What each rank does to compare a head of values in a layout with plain transformers, whatever the trainer."""

import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve
from comparing import Comparing
from fsdp2_support import exported, split
from gradient_norm_cases import assert_norms, norms_in_files
from lora_cases import Layout, selected
from transformers import AutoModelForSequenceClassification
from value_support import BATCHES, NUM_SEQUENCES, NUM_STEPS, VALUE, WEIGHT, ValueReference, value_context, value_request

from rlcore.spi import CloseRequest, SaveStateRequest, TokenBatch, TrainerContext, ValuesRequest
from rlcore_torchkit.testing.models import make_model

MODELS = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "from_tokens": "llama"}
"""Names to architectures; `from_tokens` begins with a language model, the others with heads that their directories hold."""
SAVE_AFTER = 2
MakeBackend = Callable[[TrainerContext, Mapping[str, Any]], Any]
loaded = cache(torch.load)


def prepare(root: Path) -> None:
    """Models, and what plain transformers makes of them."""
    for name, architecture in MODELS.items():
        head = "tokens" if name == "from_tokens" else "value"
        layers = 4 if name == "qwen2" else 2
        model = make_model(root / "models" / name, architecture, tied=head == "value", head=head, num_layers=layers)
        reference = ValueReference(model)
        with torch.no_grad():
            values = reference.values(BATCHES[0])
        reference.backward(BATCHES[0])
        norms = norms_in_files(reference.model, {name: p.grad for name, p in reference.model.named_parameters()})
        reference.optimizer.zero_grad()
        steps = [reference.step(batch) for batch in BATCHES]
        found = {"values": values, "steps": steps, "tensor_norms": norms, "weights": reference.saved(root / f"{name}-saved")}
        torch.save(found, root / f"{name}.pt")


def run_layouts(
    rank: int, num_ranks: int, root: Path, names: Collection[str], layouts: Sequence[Layout], make: MakeBackend
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    results = {}
    for layout, name in selected(layouts, num_ranks, names):
        try:
            place = {"rank": rank, "world_size": num_ranks, "local_rank": rank, "rendezvous": "env://"}
            check_parity(
                root, f"{layout.name}-{name}", name, lambda context, layout=layout: make(context, layout.options), place
            )
            results[f"{layout.name}/{name}"] = ""
        except Exception:
            results[f"{layout.name}/{name}"] = traceback.format_exc()
        dist.barrier()
    (root / f"results-{num_ranks}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def check_parity(root: Path, label: str, name: str, make: Callable[[TrainerContext], Any], place: Mapping[str, Any]) -> None:
    """Values before, three steps, weights after them, and on the way a checkpoint and at the end a directory for transformers.
    Nothing is asserted before the last collective."""
    expected, place_of = loaded(root / f"{name}.pt"), Comparing()
    backend = make(value_context(root / "models" / name, **place))
    directory, batch = root / label, BATCHES[0]
    found = backend.get_values(ValuesRequest(microbatches=share_of(batch, backend), weight_version=0))
    with place_of.comparing():
        np.testing.assert_allclose(np.concatenate(found.values), expected["values"].numpy()[own_places(backend)], atol=VALUE)
    for version, step in enumerate(BATCHES):
        if version == SAVE_AFTER:
            save(backend, directory / "resume", "resume")
        request = value_request(share_of(step, backend), step.counts(), version)
        result = backend.train_step(evolve(request, gradient_norms=version == 0))
        if version == 0:
            with place_of.comparing():
                assert_norms(result, expected["tensor_norms"])
        with place_of.comparing():
            np.testing.assert_allclose((result.loss, result.grad_norm), expected["steps"][version], rtol=1e-4)
    weights = exported(backend, NUM_STEPS)
    save(backend, directory / "hf", "hf")
    with place_of.comparing():
        assert_weights(weights, expected["weights"])
    if place.get("rank", 0) == 0:
        with place_of.comparing():
            assert_loads(directory / "hf", root / f"{name}-saved")
    backend.close(CloseRequest())
    assert place_of.wrong == [], "\n".join(place_of.wrong)


def assert_weights(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    errors = {name: float((found[name].cpu().double() - tensor).abs().max()) for name, tensor in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= WEIGHT} == {}


def assert_loads(directory: Path, expected: Path) -> None:
    """transformers finds a sequence classifier with one label there, whose values are the expected one's."""
    outputs = []
    for path in (directory, expected):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values())
        assert model.config.num_labels == 1
        with torch.no_grad():
            outputs.append(model(input_ids=torch.tensor([[5, 7, 11, 2]])).logits)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-3)


def save(backend: Any, directory: Path, kind: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(SaveStateRequest(directory=directory, kind=kind))


def sequences_of(backend: Any) -> list[int]:
    return list(range(backend.layout.data_parallel_rank, NUM_SEQUENCES, backend.layout.data_parallel_size))


def share_of(batch: TokenBatch, backend: Any) -> tuple[TokenBatch, ...]:
    mine = sequences_of(backend)
    return split(batch, [mine[:1], mine[1:]])


def own_places(backend: Any) -> np.ndarray:
    """Which of the tokens of the first batch are a data-parallel rank's."""
    offsets = BATCHES[0].offsets
    return np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in sequences_of(backend)])
