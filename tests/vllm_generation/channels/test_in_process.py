"""Tensors that stay where they are."""

from channel_support import CPU, OPTIONS, specs_of, tensors_of

from rlcore_vllm.channels import in_process


def test_in_process_hands_over_the_tensors_themselves():
    sender, receiver = in_process.Sender(OPTIONS, CPU), in_process.Receiver(CPU, 0, {})
    tensors = tensors_of(0)
    for persistent in (True, False):
        receiver.begin(persistent)
        received = receiver.receive(sender.put(0, tensors), specs_of(tensors))
        assert [found is sent for found, sent in zip(received.tensors, tensors, strict=True)] == [True] * 4
        assert received.stable is persistent
