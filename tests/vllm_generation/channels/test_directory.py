"""Files that both sides see, and what is left of them."""

from pathlib import Path

import pytest
from attrs import evolve
from safetensors.torch import load_file

from rlcore.spi import RefitError
from rlcore_vllm.channels import directory

from .channel_support import CONFIG, CPU, manifest_of, tensors_of


def test_a_files_name_says_that_it_is_complete(tmp_path, monkeypatch):
    sender = directory.Sender(evolve(CONFIG, refit_directory=str(tmp_path)), CPU)
    sender.begin(manifest_of(tensors_of(0)))
    save = directory.save_file
    written = []

    def watch(tensors, file):
        save(tensors, file)
        written.append((Path(file).name, [path.suffix for path in Path(file).parent.iterdir()]))

    monkeypatch.setattr(directory, "save_file", watch)
    where = sender.put(0, tensors_of(0))
    assert written == [("bucket-00000.part", [".part"])]
    assert len(load_file(where["file"])) == 4
    sender.acknowledged(0)
    assert not Path(where["file"]).exists()
    sender.end()
    assert not list(tmp_path.iterdir())


def test_a_folder_is_fresh_and_removed_with_what_was_not_taken(tmp_path):
    sender = directory.Sender(evolve(CONFIG, refit_directory=str(tmp_path)), CPU)
    folders = []
    for _ in range(2):
        sender.begin(manifest_of(tensors_of(0)))
        folders.append(Path(sender.put(0, tensors_of(0))["file"]).parent)
    assert folders[0] != folders[1]
    assert not folders[0].exists()
    sender.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("free", "expected"), [(10**12, Path("/dev/shm")), (100, None)])
def test_shared_memory_is_used_for_files_where_it_holds_them_twice(free, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    monkeypatch.setattr(directory.tempfile, "tempdir", str(tmp_path))
    sender = directory.Sender(CONFIG, CPU)
    sender.begin(manifest_of(tensors_of(0)))
    try:
        assert Path(sender.put(0, tensors_of(0))["file"]).parent.parent == (expected or tmp_path)
    finally:
        sender.close()


def test_a_file_that_the_receiver_does_not_see(tmp_path):
    receiver = directory.Receiver(CPU, 0, {})
    with pytest.raises(RefitError, match=r"generator\.vllm\.refit_directory"):
        receiver.receive({"file": str(tmp_path / "elsewhere.safetensors")}, [])
