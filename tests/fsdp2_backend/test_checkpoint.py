"""Saving and resuming on one rank; other layouts are in test_backend_two_ranks."""

import json
import resource

import pytest
from fsdp2_support import assert_same, exported, make_batch, split, step_request
from safetensors import safe_open

from rlcore.spi import CheckpointError, LoadStateRequest, SaveStateRequest, ScheduleSpec, StorageError


def step(trainer, version):
    batch = make_batch(seed=version)
    return trainer.train_step(step_request(split(batch, [[0, 1, 2], [3, 4, 5]]), batch.counts(), version))


def save(trainer, directory):
    directory.mkdir()
    return trainer.save_state(SaveStateRequest(directory=directory, kind="resume")).files


@pytest.fixture
def trained(backend):
    """A trainer after two steps."""
    trainer = backend()
    for version in range(2):
        step(trainer, version)
    return trainer


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_continues_exactly(num_steps, dtype, backend, tmp_path):
    schedule = ScheduleSpec(warmup_steps=3, decay="cosine")
    first, resumed = backend(dtype=dtype, schedule=schedule), backend(dtype=dtype, schedule=schedule)
    for version in range(num_steps):
        step(first, version)
    step(resumed, 0)  # what it held before must leave no trace
    files = save(first, tmp_path / "saved")
    assert sorted(files) == sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert resumed.load_state(LoadStateRequest(directory=tmp_path / "saved")).weight_version == num_steps
    for version in range(num_steps, num_steps + 2):
        assert step(resumed, version) == step(first, version)
    assert_same(exported(resumed, num_steps + 2), exported(first, num_steps + 2), tolerance=0.0)


def test_files_are_safetensors_and_json(trained, tmp_path):
    assert save(trained, tmp_path / "saved") == ("trainer-00000.safetensors", "trainer-00000.json")
    index = json.loads((tmp_path / "saved" / "trainer-00000.json").read_text())
    assert index["weight_version"] == 2
    assert index["parts"]["model.norm.weight"] == {"global_shape": [32], "offset": [0], "shape": [32]}
    with safe_open(tmp_path / "saved" / "trainer-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {
            f"{kind}/{name}" for kind in ("parameter", "exp_avg", "exp_avg_sq") for name in index["parts"]
        }


def refused(trainer, directory, message):
    """The load is refused and the trainer goes on as if it had not been tried."""
    before = exported(trainer, 2)
    with pytest.raises(CheckpointError, match=message):
        trainer.load_state(LoadStateRequest(directory=directory))
    assert_same(exported(trainer, 2), before, tolerance=0.0)


def test_checkpoint_of_another_model_is_refused(trained, model_directory, backend, tmp_path):
    save(backend(model_directory("llama", False)), tmp_path / "saved")
    refused(trained, tmp_path / "saved", r"another model.*q_norm.weight: absent there, \[8\] here")
    save(backend(model_directory("qwen2")), tmp_path / "many")
    refused(trained, tmp_path / "many", r"another model.*q_proj.bias: \[32\] there, absent here.* and \d+ more")


def test_incomplete_and_damaged_checkpoints_are_refused(trained, tmp_path):
    refused(trained, tmp_path, r"found 0 trainer-\*.json; expected 1")
    saved = tmp_path / "saved"
    save(trained, saved)
    tensors, index = saved / "trainer-00000.safetensors", saved / "trainer-00000.json"
    content = tensors.read_bytes()
    tensors.write_bytes(content[: len(content) // 2])
    refused(trained, saved, "tensor file cannot be read")
    tensors.unlink()
    refused(trained, saved, "tensor file cannot be read")
    tensors.write_bytes(content)
    parsed = json.loads(index.read_text())
    index.write_text(json.dumps(parsed | {"world_size": 2}))
    refused(trained, saved, r"found 1 trainer-\*.json; expected 2")
    index.write_text(json.dumps(parsed | {"format": 99}))
    refused(trained, saved, r"found formats \[99\]")
    parsed["parts"]["model.norm.weight"]["shape"] = [31]
    index.write_text(json.dumps(parsed))
    refused(trained, saved, r"found \(32,\) for parameter/model.norm.weight; expected \[31\]")
    parsed["parts"]["model.norm.weight"]["shape"] = [32]
    for damaged in ("{", "[" * 10**5):
        index.write_text(damaged)
        refused(trained, saved, "index cannot be read")
    others = (
        [],
        {},
        {"world_size": 1},
        parsed | {"parts": []},
        parsed | {"optimizer_steps": None},
        parsed | {"weight_version": "a"},
    )
    for other in others:
        index.write_text(json.dumps(other))
        refused(trained, saved, "an index is damaged|found formats")


def test_full_disk_is_a_storage_error(trained, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="saved"):
            save(trained, tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert step(trained, 2).weight_version == 3
