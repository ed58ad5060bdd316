"""Saving and resuming: on one rank, and from any layout into any other; the table is in megatron_checkpoint_cases."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_checkpoint_cases import (
    DENSE,
    LAYOUTS,
    MOE,
    ONE,
    SAVE_AFTER,
    SPEC,
    Place,
    assert_equal,
    case_of,
    cases,
    load,
    prepare,
    run_all,
    save,
    state_of,
    step,
    with_sources,
)
from megatron_support import exported, make_backend, saved
from rank_launch import collected, launch_rows, once
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rlcore.run.storage.checkpoint import LoopState, begin_checkpoint, find_damage
from rlcore.spi import CheckpointError, CloseRequest, LoadStateRequest, ScheduleSpec, StorageError
from rlcore_megatron.backend import MegatronBackend
from rlcore_torchkit.testing.models import make_model

Results = list[dict[str, str]]
MakeBackend = Callable[..., MegatronBackend]
WORLD_SIZES = tuple(sorted({layout.num_ranks for layout in LAYOUTS}))
OTHER_FAMILIES = [case_of(layout) for layout in LAYOUTS if layout.architecture not in (DENSE, MOE)]
"""They are saved by the same code as these two."""


def saved_in(num_ranks: int, one: Any) -> list[Any]:
    """The layouts of so many ranks that save the model of a layout of one process."""
    return [
        layout
        for layout in LAYOUTS
        if (layout.num_ranks, layout.architecture, layout.dtype) == (num_ranks, one.architecture, one.dtype)
    ]


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-checkpoints")
    names = {case["name"] for case in collected(request, "test_any_layout_resumes_any_other")}
    resumed = {case["one"].architecture for case in collected(request, "test_one_process_resumes_any_layout")}
    prepare(root, {DENSE, MOE, *resumed, *(layout.architecture for layout in LAYOUTS if case_of(layout) in names)})
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_any_layout_resumes_any_other")}
    for case in collected(request, "test_one_process_resumes_any_layout"):
        names |= {case_of(layout) for layout in saved_in(case["num_ranks"], case["one"])}
    names = with_sources(names)

    @once
    def get(num_ranks: int) -> Results:
        for fewer in WORLD_SIZES[: WORLD_SIZES.index(num_ranks)]:
            get(fewer)  # their checkpoints are resumed
        files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
        return launch_rows(run_all, (num_ranks, root, names), files)

    return get


@pytest.mark.wide(keep=[f"2-{name}" for name in cases(2) if name not in OTHER_FAMILIES])
@pytest.mark.parametrize(("num_ranks", "name"), [(size, name) for size in WORLD_SIZES for name in cases(size)])
def test_any_layout_resumes_any_other(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


@pytest.mark.wide(keep=["2-one-qwen2-float32"])
@pytest.mark.parametrize("one", ONE, ids=lambda one: one.saved)
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_one_process_resumes_any_layout(num_ranks: int, one: Any, root: Path, results: Callable[[int], Results]) -> None:
    results(num_ranks)
    place = Place(rank=0, num_ranks=1, root=root)
    backend = place.backend(one)
    load(backend, place.directory(one))
    expected = state_of(backend)
    for layout in saved_in(num_ranks, one):
        step(backend, SAVE_AFTER)
        load(backend, place.directory(layout))
        assert_equal(state_of(backend), expected)
    after = torch.load(place.directory(one) / "expected.pt", weights_only=False)
    assert step(backend, SAVE_AFTER) == after["result"]
    assert_equal(saved(backend, SAVE_AFTER + 1), after["weights"])
    backend.close(CloseRequest())


@pytest.fixture
def backend(root: Path) -> Iterator[MakeBackend]:
    """A function (**options of make_backend) -> MegatronBackend of one process; all are closed at the end."""
    made = []

    def make(directory: Path | None = None, **options: Any) -> MegatronBackend:
        options.setdefault("config", ONE[0].config())
        made.append(make_backend(directory or root / "models" / "qwen2", optimizer=SPEC, **options))
        return made[-1]

    yield make
    for one in made:
        one.close(CloseRequest())


@pytest.fixture
def trained(backend: MakeBackend) -> MegatronBackend:
    """A trainer after two steps."""
    trainer = backend()
    for version in range(SAVE_AFTER):
        step(trainer, version)
    return trainer


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_continues_exactly(num_steps: int, dtype: str, backend: MakeBackend, tmp_path: Path) -> None:
    schedule = ScheduleSpec(warmup_steps=3, decay="cosine")
    first, resumed = backend(dtype=dtype, schedule=schedule), backend(dtype=dtype, schedule=schedule)
    for version in range(num_steps):
        step(first, version)
    step(resumed, 0)  # what it held before must leave no trace
    files = save(first, tmp_path / "saved")
    assert sorted(files) == sorted(
        str(path.relative_to(tmp_path / "saved")) for path in (tmp_path / "saved").rglob("*") if path.is_file()
    )
    assert resumed.load_state(LoadStateRequest(directory=tmp_path / "saved")).weight_version == num_steps
    assert_equal(state_of(resumed), state_of(first))
    assert step(resumed, num_steps) == step(first, num_steps)
    assert_equal(state_of(resumed), state_of(first))
    assert_equal(exported(resumed, num_steps + 1), exported(first, num_steps + 1))


def test_weights_and_moments_go_by_megatrons_names(trained: MegatronBackend, tmp_path: Path) -> None:
    """Whatever the layout, under names that any reader of the format finds them by; the weights as they are exported."""
    save(trained, tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "trainer.json").read_text())
    kind = {"name": "adamw", "moments": "float32", "outside_muon": []}
    assert index == {
        "format": 1,
        "weight_version": 2,
        "optimizer_steps": 2,
        "world_size": 1,
        "optimizer": kind,
        "lora_rank": None,
    }
    stored = _load_state_dict_from_keys(checkpoint_id=tmp_path / "saved" / "state")
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    assert {f"{prefix}{name}{half}" for prefix in PREFIXES for half in ("_w", "_v")} <= stored.keys()
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    weights = exported(trained, 2)
    assert torch.equal(stored[f"{name}_w"], weights["model.layers.3.mlp.gate_proj.weight"])
    assert torch.equal(stored["embedding.word_embeddings.weight"], weights["model.embed_tokens.weight"])


PREFIXES = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")


def test_runs_notice_damage_to_any_of_the_files(trained: MegatronBackend, tmp_path: Path) -> None:
    """Those in the subdirectory and the hidden one have their digests in a run's manifest too."""
    state = LoopState(step=2, weight_version=2, model="x", trainer="megatron")

    def write(partial: Path) -> None:
        save(trained, partial / "trainer")

    saved = begin_checkpoint(tmp_path, state, write, keep=1)()
    assert find_damage(saved) is None
    load(trained, saved / "trainer")
    files = [path for path in (saved / "trainer").rglob("*") if path.is_file()]
    assert {".metadata", "common.pt", "__0_0.distcp", "trainer.json"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert f"{path.relative_to(saved)} has another content" in (find_damage(saved) or "")
        path.write_bytes(content)


def refused(trainer: MegatronBackend, directory: Path, message: str) -> None:
    """The load is refused and the trainer goes on as if it had not been tried."""
    before = state_of(trainer)
    with pytest.raises(CheckpointError, match=message):
        trainer.load_state(LoadStateRequest(directory=directory))
    assert_equal(state_of(trainer), before)


def test_checkpoint_of_another_model_is_refused(trained: MegatronBackend, backend: MakeBackend, tmp_path: Path) -> None:
    wider = make_model(tmp_path / "wider", "qwen2", tied=True, num_layers=4, hidden_size=64)
    save(backend(wider), tmp_path / "saved")
    refused(trained, tmp_path / "saved", r"another model.*final_layernorm.weight: \[64\] there, \[32\] here.* and \d+ more")
    save(backend(make_model(tmp_path / "llama", "llama", tied=True, num_layers=4)), tmp_path / "other")
    refused(trained, tmp_path / "other", r"another model.*linear_qkv.bias: absent there, \[\d+\] here")


def test_incomplete_and_damaged_checkpoints_are_refused(trained: MegatronBackend, tmp_path: Path) -> None:
    refused(trained, tmp_path, r"trainer.json cannot be read")
    saved = tmp_path / "saved"
    save(trained, saved)
    tensors, metadata, index = saved / "state" / "__0_0.distcp", saved / "state" / ".metadata", saved / "trainer.json"
    content, described = tensors.read_bytes(), metadata.read_bytes()
    tensors.write_bytes(content[: len(content) // 2])
    refused(trained, saved, r"__0_0.distcp: found \d+ bytes; expected at least \d+")
    tensors.unlink()
    refused(trained, saved, "__0_0.distcp: found no such file")
    tensors.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        trained.load_state(LoadStateRequest(directory=saved))
    tensors.write_bytes(content)
    (saved / "state" / "metadata.json").unlink()
    refused(trained, saved, "metadata.json: found no such file")
    metadata.write_bytes(described[: len(described) // 2])
    refused(trained, saved, ".metadata cannot be read")
    parsed = json.loads(index.read_text())
    index.write_text(json.dumps(parsed | {"format": 99}))
    refused(trained, saved, "found format 99; expected 1")
    index.write_text("{")
    refused(trained, saved, "trainer.json cannot be read")


def test_moments_that_are_missing_are_noticed(trained: MegatronBackend, backend: MakeBackend, tmp_path: Path) -> None:
    """A checkpoint from before the first step has none, and says so."""
    saved = tmp_path / "saved"
    save(backend(), saved)
    index = json.loads((saved / "trainer.json").read_text())
    assert index["optimizer_steps"] == 0
    (saved / "trainer.json").write_text(json.dumps(index | {"optimizer_steps": 3}))
    refused(trained, saved, "found nothing for optimizer.state.exp_avg.")


def test_full_disk_is_a_storage_error(trained: MegatronBackend, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for num_bytes in (16, 512, 4096, 200_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                save(trained, tmp_path / str(num_bytes))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert step(trained, 2).weight_version == 3
