"""Models are told apart by their configuration and by their weights; what a checkpoint follows is on the disk before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.storage import saver
from rlcore.run.storage.checkpoint import begin_checkpoint
from rlcore.run.storage.saver import SAMPLE_BYTES, SAMPLES_PER_FILE, model_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    return tmp_path


def test_it_depends_on_the_contents_alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_digest(str(copy)) == model_digest(str(model))


@pytest.mark.parametrize("change", ["config", "weights", "size", "name"])
def test_it_changes_with_the_model(model: Path, change: str) -> None:
    before = model_digest(str(model))
    weights = model / "model.safetensors"
    if change == "config":
        (model / "config.json").write_text('{"hidden_size": 16}')
    elif change == "weights":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif change == "size":
        weights.write_bytes(weights.read_bytes() + b"\0")
    else:
        weights.rename(model / "other.safetensors")
    assert model_digest(str(model)) != before


def test_small_files_are_read_whole(model: Path) -> None:
    assert (model / "model.safetensors").stat().st_size < SAMPLES_PER_FILE * SAMPLE_BYTES
    digests = set()
    for position in range(0, 256 * 1024, 40_000):
        content = bytearray(bytes(range(256)) * 1024)
        content[position] ^= 1
        (model / "model.safetensors").write_bytes(content)
        digests.add(model_digest(str(model)))
    assert len(digests) == 7


def test_a_name_on_the_hub_is_itself() -> None:
    assert model_digest("acme/model") == "acme/model"
    assert model_digest("acme/model", "v2") == "acme/model@v2"


def test_a_local_model_has_no_revision(model: Path) -> None:
    assert model_digest(str(model), "v2") == model_digest(str(model))


def test_metrics_are_on_the_disk_before_a_checkpoint_that_follows_them(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def save(*arguments: Any, **options: Any) -> Callable[[], Path]:
        order.append("checkpoint")
        return begin_checkpoint(*arguments, **options)

    monkeypatch.setattr(saver, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(saver, "begin_checkpoint", save)
    run("run.num_steps=2", "checkpoint.every_n_steps=1")
    assert order == ["metrics.jsonl", "checkpoint"] * 2
