"""A generator in plain torch: all running samples, packed, once through the model for every token; no cache."""

import numpy as np
import torch

from rlcore import spi
from rlcore_torchkit.attention import PackedSequences, packed_forward
from rlcore_torchkit.digest import tensor_digest
from rlcore_torchkit.models import load_model


class NewPlugin:
    def __init__(self, context, config):
        self.max_sequence_length = context.max_sequence_length
        self.device = torch.device(context.rank_info.device)
        self.model = load_model(context.model, dtype=getattr(torch, context.model.dtype), device=self.device)
        self.weights = dict(self.model.named_parameters())

    @spi.hookimpl
    def generate(self, request):
        prompts = [request.prompts.sequence(index // request.num_samples).tolist() for index in range(len(request.seeds))]
        samples = [Sample(*given) for given in zip(prompts, request.seeds, request.max_tokens, strict=True)]
        for sample in samples:
            sample.limit = min(sample.limit, self.max_sequence_length - len(sample.prompt))
        with torch.no_grad():
            while running := [sample for sample in samples if sample.reason is None]:
                for sample, row in zip(running, self.next_logits(running), strict=True):
                    sample.extend(row, request.sampling)
        lengths = [len(sample.tokens) for sample in samples]
        return spi.GenerateResult(
            tokens=np.asarray([token for sample in samples for token in sample.tokens], np.int32),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            logprobs=np.asarray([logprob for sample in samples for logprob in sample.logprobs], np.float32),
            weight_versions=np.full(sum(lengths), request.weight_version, np.int32),
            finish_reasons=np.asarray([sample.reason for sample in samples], np.uint8),
        )

    @spi.hookimpl
    def refit(self, request):
        with torch.no_grad():
            for bucket in request.weights.buckets:
                for named in bucket.tensors:
                    self.weights[named.name].copy_(named.tensor)
        digests = {name: tensor_digest(weight.detach()) for name, weight in self.weights.items()}
        return spi.RefitResult(weight_version=request.weight_version, digests=digests)

    @spi.hookimpl
    def set_residency(self, request):
        return spi.SetResidencyResult(device_bytes=sum(weight.nbytes for weight in self.weights.values()))

    @spi.hookimpl
    def close(self, request):
        self.model, self.weights = None, {}

    def next_logits(self, samples):
        """[number of samples, V] on the host: of the token after each."""
        contexts = spi.RaggedTokens.from_lists([sample.prompt + sample.tokens for sample in samples])
        packed = PackedSequences.from_offsets(contexts.offsets, self.device)
        hidden = packed_forward(self.model, torch.tensor(contexts.tokens, device=self.device), packed)
        return self.model.lm_head(hidden[contexts.offsets[1:] - 1]).float().cpu()


class Sample:
    def __init__(self, prompt, seed, limit):
        self.prompt, self.limit = prompt, int(limit)
        self.random = np.random.default_rng(int(seed))  # of the whole seed: torch's generator on CPU reads 32 of its bits
        self.tokens, self.logprobs, self.reason = [], [], None

    def extend(self, logits, sampling):
        greedy = sampling.temperature == 0.0
        logprobs = (logits if greedy else logits / sampling.temperature).log_softmax(0)
        shares = logprobs.double().exp().numpy()
        token = int(logprobs.argmax() if greedy else self.random.choice(len(shares), p=shares / shares.sum()))
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        if token in sampling.stop_token_ids:
            self.reason = spi.FinishReason.STOP
        elif len(self.tokens) == self.limit:
            self.reason = spi.FinishReason.LENGTH
