"""An engine of two devices keeps log-probabilities on one of them: of more samples than it has slots, preempted, and in two
generations with a sleep between."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from vllm_refit_support import (
    CONFIG,
    PROMPTS,
    begin_samples,
    checkpoint,
    context_of,
    errors,
    export_of,
    finished_samples,
    policy,
    refit,
    sample,
    texts_of,
)

from rlcore.spi import SamplingParams
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.setup.settings import engine_settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

DEVICE = torch.device("cuda", 0)
TWO_DEVICES = evolve(
    CONFIG,
    tensor_parallel=2,
    devices=(0, 1),
    gpu_memory_utilization=0.1,
    enforce_eager=True,
    # Room for four of the longest samples at most, so that the eight in the making preempt each other.
    engine={"num_gpu_blocks_override": 14},
)
SIZE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.05}
NUM_SAMPLES = 16
"""Of each prompt: six times as many in all as there are slots."""
LENGTHS = [1 + (7 * index) % 41 for index in range(PROMPTS.num_sequences * NUM_SAMPLES)]
MOST_ERROR = 0.2
"""Of a token in bfloat16, where its neighbour's log-probability is off by 0.9 on average; emulated it is 0.03."""


class Refitted:
    """The engine, and the weights that it is given."""

    def __init__(self, directory, replica):
        self.directory, self.replica = directory, replica

    def model(self, version):
        return policy(self.directory, version).to(DEVICE, torch.bfloat16)

    def refit(self, version):
        weights = checkpoint(policy(self.directory, version), DEVICE, torch.bfloat16)
        context = context_of(self.directory, "cuda_ipc", device="cuda", dtype="bfloat16")
        transfer = Transfer(channel="cuda_ipc", replicas=[self.replica], context=context, config=TWO_DEVICES)
        with contextlib.closing(transfer):
            refit([self.replica], transfer, export_of(weights, version, persistent=True))

    def assert_recorded(self, version, samples):
        found = errors(self.model(version), samples)
        assert len(found) == sum(len(response) for _, response, _ in samples)
        assert found.max() < MOST_ERROR

    def held(self):
        """Bytes of the table and of rows that are kept, by rank; of a rank that records nothing, None."""
        answers = []
        for rank in range(2):
            order = {"rank": rank, "orders": [("logprobs", "device_bytes", ())]}
            answers.append(self.replica.call_workers("rlcore_record", order).result()[rank])
        return [answer.get("answer") for answer in answers]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    directory = make_model(folder / "model", "qwen2", tied=True, dtype="bfloat16", **SIZE)
    settings = engine_settings(context_of(directory, "cuda_ipc", device="cuda", dtype="bfloat16"), TWO_DEVICES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")  # by multicast, which not every machine has
        with contextlib.closing(ProcessReplica("vllm-0", settings, (0, 1), TWO_DEVICES, folder)) as replica:
            replica.start()
            made = Refitted(directory, replica)
            made.refit(0)
            yield made


@pytest.mark.timeout(300)
def test_log_probabilities_are_those_of_the_model_in_two_generations_with_a_sleep_between(engine):
    table, nothing = engine.held()
    assert table > 0
    assert nothing is None
    for version in (1, 2):
        engine.refit(version)
        samples = sample(engine.replica, version, num_samples=NUM_SAMPLES, max_tokens=LENGTHS)
        assert len(samples) == len(LENGTHS)
        engine.assert_recorded(version, samples)
        assert engine.held() == [table, None], "rows that were fetched are kept"
        engine.replica.set_residency(weights=False, cache=False, discard_weights=True).result()
        assert engine.held() == [0, None]
        engine.replica.set_residency(weights=True, cache=True, discard_weights=True).result()
        assert engine.held() == [table, None]


@pytest.mark.timeout(300)
def test_pauses_take_samples_off_the_device_and_some_are_dropped(engine):
    engine.refit(3)
    table, _ = engine.held()
    options = {"num_samples": NUM_SAMPLES, "max_tokens": LENGTHS}
    dropped, _ = begin_samples(engine.replica, 3, **options)
    kept, finished = begin_samples(engine.replica, 3, **options)
    for _ in range(4):
        engine.replica.begin_update().result()
        engine.replica.end_update({0: 3}).result()
    dropped.cancel()
    kept.result()
    assert len(finished) == len(LENGTHS)
    engine.assert_recorded(3, texts_of(finished, NUM_SAMPLES))
    engine.assert_recorded(3, sample(engine.replica, 3))
    assert engine.held() == [table, None], "rows of samples that were dropped are kept"


@pytest.mark.timeout(300)
def test_masks_come_beside_log_probabilities(engine):
    engine.refit(4)
    finished = finished_samples(
        engine.replica, 4, num_samples=NUM_SAMPLES, max_tokens=LENGTHS, sampling=SamplingParams(top_k=3), masked=True
    )
    model = engine.model(4)
    for each in finished:
        each.sampling_mask.check(each.tokens)
        assert each.sampling_mask.lengths.min() >= 3  # more where logits are equal
        prompt = PROMPTS.sequence(each.number // NUM_SAMPLES).tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + each.tokens.tolist()], device=DEVICE)).logits[0].float().cpu()
        for place, (token, logprob) in enumerate(zip(each.tokens.tolist(), each.logprobs, strict=True)):
            start, end = each.sampling_mask.offsets[place : place + 2]
            among = torch.from_numpy(each.sampling_mask.tokens[start:end].astype(np.int64))
            row = logits[len(prompt) - 1 + place]
            assert abs(float(row[token] - row[among].logsumexp(0)) - logprob) < MOST_ERROR
