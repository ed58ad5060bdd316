"""What log-probabilities to the bit cost: tokens per second of generation and of a train step, with and without the option.

    python benchmarks/batch_invariance.py
    python benchmarks/batch_invariance.py --quick --device cpu        # a train step of a tiny shape, to try the script

Random weights of the shape of Qwen3-0.6B in bfloat16 on one GPU, trainer `fsdp2` and generator `vllm`, a process for each row:
`ordinary`, and `batch invariant` with `batch_invariant = true` on both sides. 256 prompts of 128 tokens are answered by 512
tokens each, after a generation that warms up; then the trainer computes the log-probabilities of these samples, and takes steps
on them, in microbatches of 16,384 tokens. `equal` is the share of the generator's log-probabilities that are the trainer's
bits, `error` token_mult_prob_error. Engines need CUDA: on a CPU samples are random tokens, and the trainer's figures alone are
shown.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from attrs import frozen
from generator_setup import BUCKET_BYTES, finish, make_generator, row_parser, run_row, synchronize, versions
from model_shapes import SHAPES, prompts, require_device, write_model

from rlcore.spi import (
    CloseRequest,
    ExportWeightsRequest,
    GenerateRequest,
    LogprobsRequest,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
)

ROWS = ("ordinary", "batch invariant")
LOSS = LossSpec(path="train_step:negative_loglikelihood", config=None)
MICROBATCH_TOKENS = 16384


@frozen(kw_only=True)
class Work:
    """A row's work: so many samples, each of a prompt and an answer."""

    shape: str
    device: str
    num_samples: int
    prompt_length: int
    num_tokens: int
    steps: int

    @property
    def length(self) -> int:
        return self.prompt_length + self.num_tokens


FULL = {"shape": "0.6b", "num_samples": 256, "prompt_length": 128, "num_tokens": 512, "steps": 3}
QUICK = {"shape": "tiny-qwen3", "num_samples": 4, "prompt_length": 8, "num_tokens": 24, "steps": 1}


def measure(row: str, work: Work, directory: Path) -> dict[str, Any]:
    """All figures of a row; those of generation on CUDA alone."""
    from rlcore_fsdp2.backend import Fsdp2Backend
    from rlcore_fsdp2.config import Fsdp2Config

    options = {"batch_invariant": row == "batch invariant"}
    write_model(directory, work.shape, work.device, "bfloat16")
    context = TrainerContext(
        model=ModelSpec(path=str(directory), dtype="bfloat16"),
        rank_info=RankInfo(device=work.device),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=work.length,
        max_microbatch_tokens=MICROBATCH_TOKENS,
        optimizer=OptimizerSpec(learning_rate=1e-6),
    )
    trainer = Fsdp2Backend(context, Fsdp2Config(**options))
    texts = prompts(work.num_samples, work.prompt_length, SHAPES[work.shape]["vocab_size"])
    found: dict[str, Any] = {}
    if work.device == "cuda":
        answers, recorded, found["generation"] = generated(trainer, work, directory, texts, options)
    else:
        answers, recorded = prompts(work.num_samples, work.num_tokens, SHAPES[work.shape]["vocab_size"], seed=1), None
    sequences = np.concatenate([np.array(texts, np.int32), np.array(answers, np.int32)], axis=1)
    batches = [packed(part, work) for part in np.array_split(sequences, -(-sequences.size // MICROBATCH_TOKENS))]
    logprobs, found["logprobs"] = timed(work, lambda: own_logprobs(trainer, batches, work), sequences.size)
    if recorded is not None:
        own = np.concatenate([values.reshape(-1, work.length)[:, work.prompt_length :].ravel() for values in logprobs])
        found |= {"equal": float((own == recorded).mean()), "error": float(np.exp(np.abs(own - recorded)).mean())}
    counts = packed(sequences, work).counts()
    rates = []
    for version in range(work.steps + 1):
        request = TrainStepRequest(
            microbatches=tuple(batches), counts=counts, loss=LOSS, temperature=1.0, weight_version=version
        )
        rates.append(timed(work, lambda request=request: trainer.train_step(request), sequences.size)[1])
    found["step"] = median(rates[1:])
    trainer.close(CloseRequest())
    return found


def generated(
    trainer: Any, work: Work, directory: Path, texts: list[list[int]], options: dict[str, bool]
) -> tuple[list[list[int]], Any, float]:
    """Answers, their log-probabilities, and tokens per second, by an engine with the trainer's weights."""
    settings = {"gpu_memory_utilization": 0.4, "max_num_seqs": work.num_samples, **options}
    generator = make_generator("vllm", directory, work.device, "bfloat16", "cuda_ipc", work.length, settings)
    export = trainer.export_weights(ExportWeightsRequest(weight_version=0, dtype="bfloat16", max_bucket_bytes=BUCKET_BYTES))
    generator.refit(RefitRequest(weight_version=0, channel="cuda_ipc", weights=export, may_alias=True))
    other = prompts(work.num_samples, work.prompt_length, SHAPES[work.shape]["vocab_size"], seed=2)
    generator.generate(asked(other, work))
    start = time.perf_counter()
    result = generator.generate(asked(texts, work))
    rate = len(result.tokens) / (time.perf_counter() - start)
    generator.close(CloseRequest())
    return result.tokens.reshape(work.num_samples, work.num_tokens).tolist(), result.logprobs, rate


def asked(texts: list[list[int]], work: Work) -> GenerateRequest:
    return GenerateRequest(
        prompts=RaggedTokens.from_lists(texts),
        num_samples=1,
        seeds=np.arange(len(texts)),
        max_tokens=np.full(len(texts), work.num_tokens, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )


def packed(sequences: "np.ndarray[Any, np.dtype[np.int32]]", work: Work) -> TokenBatch:
    """int32 [sequences, length] as one microbatch, whose answers count."""
    mask = np.zeros(sequences.shape, np.bool_)
    mask[:, work.prompt_length :] = True
    offsets = np.arange(len(sequences) + 1, dtype=np.int64) * work.length
    return TokenBatch(tokens=sequences.ravel(), offsets=offsets, loss_mask=mask.ravel())


def own_logprobs(trainer: Any, batches: list[TokenBatch], work: Work) -> Any:
    request = LogprobsRequest(microbatches=tuple(batches), model="policy", temperature=1.0, entropy=False, weight_version=0)
    return trainer.get_logprobs(request).logprobs


def timed(work: Work, run: Any, num_tokens: int) -> tuple[Any, float]:
    """What it returns, and tokens per second."""
    synchronize(work.device)
    start = time.perf_counter()
    result = run()
    synchronize(work.device)
    return result, num_tokens / (time.perf_counter() - start)


def report(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'':18}{'generation tok/s':>18}{'log-probs tok/s':>18}{'train step tok/s':>18}{'equal':>10}{'error':>12}")
    for row, result in found.items():
        if "failed" in result:
            print(f"{row:18}{result['failed']}")
            continue
        rate, equal, error = (result.get(name, float("nan")) for name in ("generation", "equal", "error"))
        print(f"{row:18}{rate:18,.0f}{result['logprobs']:18,.0f}{result['step']:18,.0f}{equal:10.2%}{error:12.7f}")


def main() -> None:
    parser = row_parser(__doc__, 300.0)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    work = Work(device=arguments.device, **(QUICK if arguments.quick else FULL))
    require_device(arguments.device)
    if arguments.row:
        with tempfile.TemporaryDirectory() as scratch:
            finish(measure(arguments.row, work, Path(scratch)))
    found = {}
    for row in arguments.rows:
        if arguments.device == "cuda":
            found[row] = run_row(__file__, row, arguments.limit)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            found[row] = measure(row, work, Path(scratch))
    size = f"{work.num_samples} samples of {work.num_tokens} tokens after {work.prompt_length}"
    print(f"{versions(arguments.device)}; {work.shape}, {size}")
    report(found)


if __name__ == "__main__":
    main()
