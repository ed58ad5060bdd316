"""Files that both sides see, and what is left of them."""

import weakref
from pathlib import Path

import pytest
import torch
from attrs import evolve
from channel_support import CPU, OPTIONS, assert_same, begin, specs_of, tensors_of
from safetensors.torch import load_file

from rlcore.spi import RefitError
from rlcore_torchkit.channels import directory


def test_a_files_name_says_that_it_is_complete(tmp_path, monkeypatch):
    sender = directory.Sender(evolve(OPTIONS, directory=str(tmp_path)), CPU)
    begin(sender, tensors_of(0))
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
    sender = directory.Sender(evolve(OPTIONS, directory=str(tmp_path)), CPU)
    folders = []
    for _ in range(2):
        begin(sender, tensors_of(0))
        folders.append(Path(sender.put(0, tensors_of(0))["file"]).parent)
    assert folders[0] != folders[1]
    assert not folders[0].exists()
    sender.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("free", "expected"), [(10**12, Path("/dev/shm")), (100, None)])
def test_shared_memory_is_used_for_files_where_it_holds_them_twice(free, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    monkeypatch.setattr(directory.tempfile, "tempdir", str(tmp_path))
    sender = directory.Sender(OPTIONS, CPU)
    begin(sender, tensors_of(0))
    try:
        assert Path(sender.put(0, tensors_of(0))["file"]).parent.parent == (expected or tmp_path)
    finally:
        sender.close()


@pytest.mark.parametrize("delta", ["device", "host"])
def test_only_what_has_changed_is_written(delta, tmp_path):
    sender, receiver = directory.Sender(evolve(OPTIONS, directory=str(tmp_path)), CPU), directory.Receiver(CPU, 0, {})
    buckets, sent = [tensors_of(0, 9), tensors_of(1, 9)], []
    for version in range(4):
        begin(sender, buckets[0], delta)
        for index, tensors in enumerate(buckets):
            received = receiver.receive(sender.put(index, tensors), specs_of(tensors))
            assert_same(received.tensors, tensors)
        sent.append(sender.sent_bytes)
        buckets[version % 2][version][0] += 1.0
        buckets[0] = tensors_of(7, 9) if version == 2 else buckets[0]
    whole = sum(tensor.nbytes for tensors in buckets for tensor in tensors)
    assert sent[0] == whole
    assert all(bytes_of < 0.2 * whole for bytes_of in sent[1:3])
    assert sent[3] > whole / 2, "all of one bucket, which is another"
    sender.close()


@pytest.mark.parametrize("delta", ["device", "host"])
def test_nan_and_the_sign_of_zero_are_written_by_their_bits(delta, tmp_path):
    sender, receiver = directory.Sender(evolve(OPTIONS, directory=str(tmp_path)), CPU), directory.Receiver(CPU, 0, {})
    tensors, sent = [torch.zeros(4096), torch.full((4096,), float("nan"), dtype=torch.bfloat16)], []
    for version in range(3):
        begin(sender, tensors, delta)
        received = receiver.receive(sender.put(0, tensors), specs_of(tensors))
        for found, expected in zip(received.tensors, tensors, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        sent.append(sender.sent_bytes)
        if version == 1:
            tensors[0][7] = -0.0
            tensors[1].view(torch.int16)[9] += 3  # another NaN
    assert sent == [sum(tensor.nbytes for tensor in tensors), 16, 16 + 8 + 8]
    sender.close()


@pytest.mark.parametrize("delta", ["off", "device"])
def test_copies_of_other_tensors_are_given_up_on_both_sides(delta, tmp_path):
    """As when adapters travel alone after a model that they came with."""
    sender, receiver = directory.Sender(evolve(OPTIONS, directory=str(tmp_path)), CPU), directory.Receiver(CPU, 0, {})
    copies = weakref.WeakSet()
    for how, buckets in (("device", [tensors_of(seed, 9) for seed in range(3)]), (delta, [tensors_of(3, 2)])):
        begin(sender, buckets[0], how)
        before = list(copies)
        for index, tensors in enumerate(buckets):
            received = receiver.receive(sender.put(index, tensors), specs_of(tensors))
            assert_same(received.tensors, tensors)
            copies.add(received.tensors[0].untyped_storage())
    del received
    assert len(before) == 3
    del before
    assert len(copies) == (delta == "device")
    sender.close()


def test_changes_of_what_the_receiver_does_not_keep(tmp_path):
    sender, tensors = directory.Sender(evolve(OPTIONS, directory=str(tmp_path)), CPU), tensors_of(0)
    for _ in range(2):
        begin(sender, tensors, "device")
        where = sender.put(0, tensors)
    with pytest.raises(RefitError, match="changes of bucket 0"):
        directory.Receiver(CPU, 0, {}).receive(where, specs_of(tensors))
    begin(sender, tensors[:3], "device")
    assert directory.Receiver(CPU, 0, {}).receive(sender.put(0, tensors[:3]), specs_of(tensors[:3])).tensors
    sender.close()


def test_a_file_that_the_receiver_does_not_see(tmp_path):
    receiver = directory.Receiver(CPU, 0, {})
    with pytest.raises(RefitError, match="refit_directory"):
        receiver.receive({"file": str(tmp_path / "elsewhere.safetensors")}, [])
