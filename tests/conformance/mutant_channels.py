"""Channels one of whose ends is wrong in one known way, made from one that writes each bucket to a file of its own."""

import multiprocessing
import shutil
import tempfile
from pathlib import Path

import torch
from mutants import killed_by

from rlcore.spi import SPI_VERSION, ChannelProvider, ChannelReceiver, ChannelSender, ReceivedBucket


class Files(ChannelSender):
    """A right sender."""

    folder = None

    def connect(self, ranks):
        return [{"replica": replica} for replica in dict.fromkeys(rank.replica for rank in ranks)]

    def begin(self, specs, *, persistent, delta="off"):
        self.folder = Path(tempfile.mkdtemp(dir=self.options.directory))

    def put(self, index, tensors):
        file = self.folder / f"{index}.pt"
        torch.save([tensor.contiguous() for tensor in tensors], file)
        return {"file": str(file), "index": index}

    def end(self):
        if self.folder is not None:
            shutil.rmtree(self.folder)
            self.folder = None

    def close(self):
        self.end()


class FilesRead(ChannelReceiver):
    """A right receiver."""

    def receive(self, where, specs):
        return ReceivedBucket(tensors=torch.load(where["file"]), stable=True)


PROVIDER = ChannelProvider(
    name="files",
    spi=SPI_VERSION,
    cost=90,
    devices={"cpu"},
    reach="anywhere",
    sender=f"{__name__}:Files",
    receiver=f"{__name__}:FilesRead",
)


@killed_by("test_buckets_arrive")
class RoundsToHalf(Files):
    def put(self, index, tensors):
        return super().put(index, [tensor.to(torch.float16).to(tensor.dtype) for tensor in tensors])


@killed_by("test_buckets_arrive")
class IgnoresLayout(Files):
    def put(self, index, tensors):
        stored = [torch.tensor(tensor.untyped_storage().tolist(), dtype=torch.uint8) for tensor in tensors]
        return super().put(
            index, [one.view(tensor.dtype).view(tensor.shape) for one, tensor in zip(stored, tensors, strict=True)]
        )


@killed_by("test_buckets_arrive")
class DropsEmptyTensors(FilesRead):
    def receive(self, where, specs):
        return ReceivedBucket(tensors=[one for one in torch.load(where["file"]) if one.numel()], stable=True)


@killed_by("test_buckets_arrive")
class RemembersTheFirstRefit(FilesRead):
    def receive(self, where, specs):
        self.known = getattr(self, "known", {})
        return ReceivedBucket(tensors=self.known.setdefault(where["index"], torch.load(where["file"])), stable=True)


@killed_by("test_the_trainers_tensors_stay_as_they_are")
class ScalesInPlace(Files):
    def put(self, index, tensors):
        where = super().put(index, tensors)
        for tensor in tensors:
            tensor.mul_(2)
        return where


@killed_by("test_the_trainer_overwrites_what_is_acknowledged")
class ReusesOneBuffer(FilesRead):
    buffer = None

    def receive(self, where, specs):
        tensors = torch.load(where["file"])
        if self.buffer is None:
            self.buffer = tensors
        for own, tensor in zip(self.buffer, tensors, strict=True):
            own.copy_(tensor)
        return ReceivedBucket(tensors=self.buffer, stable=True)


@killed_by("test_each_replica_has_its_options")
class OptionsOfEachRank(Files):
    def connect(self, ranks):
        return [{"rank": rank.rank} for rank in ranks] if len(ranks) > 2 else super().connect(ranks)


@killed_by("test_each_replica_has_its_options")
class OptionsWithATensor(Files):
    def connect(self, ranks):
        return [one | {"device": torch.zeros(1)} for one in super().connect(ranks)]


@killed_by("test_places_of_buckets_are_plain")
class PlacesWithTensors(Files):
    def put(self, index, tensors):
        return super().put(index, tensors) | {"tensors": list(tensors)}


@killed_by("test_another_process_receives")
class ReadsInTheFirstProcess(FilesRead):
    def receive(self, where, specs):
        bucket = super().receive(where, specs)
        if multiprocessing.parent_process() is not None:
            bucket.tensors[0].zero_()
        return bucket


@killed_by("test_a_refit_that_fails_is_over")
class KeepsWhatNobodyTook(Files):
    def put(self, index, tensors):
        file = Path(self.options.directory) / f"kept-{index}.pt"
        if not file.exists():
            torch.save(list(tensors), file)
        return {"file": str(file), "index": index}

    def acknowledged(self, index):
        (Path(self.options.directory) / f"kept-{index}.pt").unlink()


@killed_by("test_ends_that_were_never_used_close")
class ClosesAFolderOnce(Files):
    def close(self):
        assert self.folder is None or self.folder.exists()
        assert not getattr(self, "is_closed", False), "closed twice"
        self.is_closed = True
