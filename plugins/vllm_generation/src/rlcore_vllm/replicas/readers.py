"""The readers of a request's samples: they get tokens as the engines sample them, and end samples."""

from concurrent.futures import Future

from rlcore.spi import GenerateRequest
from rlcore_vllm.engines.sampling import SampledTokens, Samples
from rlcore_vllm.replicas.replica import Replica


def hand_to_reader(request: GenerateRequest, sampled: SampledTokens) -> None:
    """Give new tokens of a sample, or the log-probabilities of its prompt, to its reader."""
    reader = None if request.readers is None else request.readers[sampled.number]
    if sampled.is_prompt:
        if reader is not None and reader.on_prompt is not None:
            reader.on_prompt(sampled.logprobs)
    elif reader is not None and reader.on_tokens is not None:
        reader.on_tokens(sampled.first, sampled.tokens, sampled.logprobs)


def cut_when_cancelled(request: GenerateRequest, part: Samples, replica: Replica, call: Future[None]) -> None:
    """End each sample of an engine's part of a request once its reader is cancelled."""
    for number in part.numbers.tolist() if request.readers is not None else ():
        reader = request.readers[number] if request.readers is not None else None
        if reader is not None:
            reader.cancelled.add_done_callback(lambda _, number=number: None if call.done() else replica.cut([call], number))
