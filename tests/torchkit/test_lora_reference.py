"""Adapters that a run began with, in its checkpoints."""

import pytest
import torch

from rlcore.spi import CheckpointError, StorageError
from rlcore_torchkit.adapters.peft_directory import FILE, load_reference, save_reference


def test_what_is_saved_is_loaded(tmp_path):
    adapters = {"a.lora_A.weight": torch.arange(6.0).view(2, 3), "a.lora_B.weight": torch.arange(8.0).view(2, 4).T}
    assert load_reference(tmp_path) is None
    assert save_reference(tmp_path, adapters) == (FILE,)
    found = load_reference(tmp_path)
    assert found is not None
    assert {name: torch.equal(tensor, adapters[name]) for name, tensor in found.items()} == dict.fromkeys(adapters, True)


def test_files_that_cannot_be_written_or_read_are_told(tmp_path):
    with pytest.raises(StorageError):
        save_reference(tmp_path / "nowhere", {"a": torch.ones(1)})
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CheckpointError, match=FILE):
        load_reference(tmp_path)
