"""A receiver in a process of its own, without an engine, for the channels between GPUs."""

import torch

from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_vllm.channels import make_receiver


def serve(connection, channel, device_index):
    """Answer (method, arguments) until the connection closes; a bucket is answered with its digests."""
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    receiver = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "connect":
                receiver = make_receiver(channel, device, 0, *arguments)
                connection.send(None)
            elif method == "receive":
                received = receiver.receive(*arguments)
                connection.send((tensor_digests(received.tensors), received.stable))
                receiver.loaded()
                del received
            else:
                connection.send(getattr(receiver, method)(*arguments))
        except Exception as error:
            connection.send(error)
