"""The channel "spool": each bucket is one safetensors file in a folder that both sides see."""

import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlcore.spi import ChannelReceiver, ChannelSender, ReceivedBucket


class Sender(ChannelSender):
    """Writes the buckets."""

    folder = None

    def connect(self, ranks):
        self.folder = tempfile.TemporaryDirectory(prefix="spool-", dir=self.options.directory)
        return [{} for _ in {rank.replica for rank in ranks}]

    def put(self, index, tensors):
        file = Path(self.folder.name) / f"{index}.safetensors"
        save_file({str(number): tensor.contiguous() for number, tensor in enumerate(tensors)}, file)
        return {"file": str(file)}

    def acknowledged(self, index):
        (Path(self.folder.name) / f"{index}.safetensors").unlink()

    def close(self):
        if self.folder is not None:
            self.folder.cleanup()


class Receiver(ChannelReceiver):
    """Reads them."""

    def receive(self, where, specs):
        tensors = load_file(where["file"], device=str(self.device))
        return ReceivedBucket(tensors=[tensors[str(number)] for number in range(len(specs))], stable=True)
