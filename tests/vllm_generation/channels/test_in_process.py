"""Tensors that stay where they are."""

from rlcore_vllm.channels import in_process

from .channel_support import CONFIG, CPU, specs_of, tensors_of


def test_in_process_hands_over_the_tensors_themselves():
    sender, receiver = in_process.Sender(CONFIG, CPU), in_process.Receiver(CPU, 0, {})
    tensors = tensors_of(0)
    for persistent in (True, False):
        receiver.begin(persistent)
        received = receiver.receive(sender.put(0, tensors), specs_of(tensors))
        assert [found is sent for found, sent in zip(received.tensors, tensors, strict=True)] == [True] * 4
        assert received.stable is persistent
