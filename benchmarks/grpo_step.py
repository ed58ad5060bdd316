"""One colocated GRPO step on one GPU: rlcore with `vllm` and `fsdp2`, against TRL's GRPOTrainer with colocated vLLM.

    python benchmarks/grpo_step.py                                    # needs TRL beside vLLM
    python benchmarks/grpo_step.py --contestants trl-8 --steps 3
    python benchmarks/grpo_step.py --contestants rlcore --set trainer.fsdp2.compile_layers=true
    python benchmarks/grpo_step.py --quick --contestants rlcore       # a tiny shape, on whatever device there is

Work of a step: 64 prompts of 128 tokens x 8 samples of exactly 512 tokens, from a 1.5B Qwen2 shape with random weights: one
AdamW update on all 512 samples, on float32 master weights and in bfloat16, with the sampler's probabilities corrected by the
trainer's own. Rewards are random but fixed. Contestants run one after another, each in a process of its own.

TRL's settings are in TRL below: `trl-N` has N sequences a microbatch without gradient checkpointing, `-sleep` frees vLLM's
memory while it trains, `-liger` takes Liger's kernels, `-uncorrected` leaves out the correction and with it a forward pass
over all samples, `-bf16` keeps the master weights in bfloat16 (half the memory, and updates that round away). One that does not
fit is reported as such.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve, frozen
from contestants import QUIET_TRL, train_rlcore
from generator_setup import row_parser, run_row, versions
from model_shapes import require_device, reward, texts, write_model


@frozen(kw_only=True)
class Work:
    """Of a step."""

    shape: str
    num_prompts: int
    group: int
    prompt_length: int
    num_tokens: int
    dtype: str
    device: str
    num_steps: int

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.group


TRL: dict[str, dict[str, Any]] = {
    "trl-8": {"per_device_train_batch_size": 8},
    "trl-8-uncorrected": {"per_device_train_batch_size": 8, "vllm_importance_sampling_correction": False},
    "trl-8-liger": {"per_device_train_batch_size": 8, "use_liger_kernel": True},
    "trl-8-liger-uncorrected": {
        "per_device_train_batch_size": 8,
        "use_liger_kernel": True,
        "vllm_importance_sampling_correction": False,
    },
    "trl-16-sleep": {"per_device_train_batch_size": 16, "vllm_enable_sleep_mode": True},
    "trl-16-liger-sleep": {"per_device_train_batch_size": 16, "use_liger_kernel": True, "vllm_enable_sleep_mode": True},
    "trl-16-checkpointing": {"per_device_train_batch_size": 16, "gradient_checkpointing": True},
    "trl-8-bf16": {"per_device_train_batch_size": 8, "model_init_kwargs": {"dtype": "bfloat16"}},
}
"""The changes of each setting."""
GIB = 2**30


class Steps:
    """When each step ended, its phases, and the device's memory in use."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.used_gib: list[float] = []
        self.peak_gib: list[float] = []

    def end(self, phases: Mapping[str, float]) -> None:
        self.stamps.append(time.time())
        self.phases.append(dict(phases))
        used, peak = _memory_gib()
        self.used_gib.append(used)
        self.peak_gib.append(peak)
        print(f"step {len(self.stamps)}: {used:.2f} GiB of the device in use; {dict(phases)}", file=sys.stderr, flush=True)

    def as_json(self) -> str:
        return json.dumps(vars(self))


def _memory_gib() -> tuple[float, float]:
    """Of the device in use by all processes, and at most in this one's tensors since the last call."""
    import torch

    if not torch.cuda.is_available():
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return (total - free) / GIB, peak / GIB


def run_rlcore(work: Work, model: str, overrides: list[str]) -> Steps:
    from letters_environment import PROVIDER

    from rlcore.run.report.progress import Progress

    steps = Steps()

    class Watch(Progress):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            times = {name[len("time/") : -len("_s")]: value for name, value in metrics.items() if name.startswith("time/")}
            steps.end({name: value for name, value in times.items() if name != "total"})
            left = {name: round(value, 4) for name, value in metrics.items() if name.startswith("memory/")}
            print(f"  {left}, token_mult_prob_error {metrics.get('token_mult_prob_error')}", file=sys.stderr, flush=True)

        def note(self, text: str) -> None:
            print(text, file=sys.stderr, flush=True)

    keys = {
        "run.device": work.device,
        "run.num_steps": work.num_steps,
        "model.path": model,
        "algorithm.name": "grpo",
        "environment.name": "letters",
        "environment.letters.num_prompts": work.num_prompts * work.num_steps,
        "environment.letters.prompt_length": work.prompt_length,
        "generator.name": "vllm",
        "generator.vllm.gpu_memory_utilization": 0.5,
        "trainer.name": "fsdp2",
        "rollout.samples_per_prompt": work.group,
        "rollout.max_prompt_tokens": work.prompt_length,
        "rollout.max_response_tokens": work.num_tokens,
        "rollout.stop_token_ids": [],
        "training.prompts_per_step": work.num_prompts,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
    }
    train_rlcore(keys, Watch(), overrides, PROVIDER)
    return steps


def run_trl(work: Work, model: str, setting: str) -> Steps:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps, phases = Steps(), Phases()

    class Stamps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            steps.end(phases.take())

    on_cuda = work.device == "cuda"
    options = {**TRL[setting]}
    options["per_device_train_batch_size"] = min(options["per_device_train_batch_size"], work.num_samples)
    num_microbatches = work.num_samples // options["per_device_train_batch_size"]
    options.setdefault("gradient_checkpointing", False)
    options.setdefault("model_init_kwargs", {"dtype": "float32"})
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            gradient_accumulation_steps=num_microbatches,
            steps_per_generation=num_microbatches,
            num_generations=work.group,
            max_completion_length=work.num_tokens,
            beta=0.0,
            loss_type="dapo",
            temperature=1.0,
            learning_rate=1e-6,
            max_steps=work.num_steps,
            use_cpu=not on_cuda,
            bf16=on_cuda,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25 if on_cuda else 0.9,
            vllm_max_model_length=work.prompt_length + work.num_tokens,
            generation_kwargs={"ignore_eos": True},
            **QUIET_TRL,
            **options,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts(work.num_prompts * work.num_steps, work.prompt_length)}),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Stamps()],
        )
        if not on_cuda:  # vLLM repacks weights on CPU, where TRL's way to load them raises; the rest can still be tried
            trainer.vllm_generation.sync_weights = lambda: None
        phases.watch(trainer.vllm_generation, "sync_weights", "refit")
        phases.watch(trainer.vllm_generation, "generate", "generation")
        phases.watch(trainer, "_calculate_rewards", "rewards")
        phases.watch(trainer, "_get_per_token_logps_and_entropies", "logprobs", only_if=lambda: not torch.is_grad_enabled())
        trainer.train()
    return steps


class Phases:
    """Seconds in methods of TRL's trainer; what remains of a step is training."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.begin = time.perf_counter()

    def watch(self, owner: Any, method: str, phase: str, only_if: Callable[[], bool] = lambda: True) -> None:
        import torch

        original = getattr(owner, method)
        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

        def timed(*arguments: Any, **options: Any) -> Any:
            if not only_if():
                return original(*arguments, **options)
            wait()
            start = time.perf_counter()
            result = original(*arguments, **options)
            wait()
            self.seconds[phase] += time.perf_counter() - start
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        now = time.perf_counter()
        found = dict(self.seconds)
        found["train"] = now - self.begin - sum(found.values())
        self.seconds.clear()
        self.begin = now
        return found


def report(found: Mapping[str, Mapping[str, Any]], work: Work) -> None:
    """Steps but for the first, which warms up."""
    ratio_to = {name: _step_s(result) for name, result in found.items() if name.startswith("trl") and "failed" not in result}
    fastest = min(ratio_to.values(), default=float("nan"))
    size = f"{work.num_prompts} prompts of {work.prompt_length} tokens x {work.group} samples of {work.num_tokens}"
    print(f"\n{versions(work.device)}; {work.shape}, {size}, {work.num_steps} steps")
    print("medians of the steps after the first; ratios to the fastest TRL setting of this run")
    phases = ("generation", "rewards", "logprobs", "train", "refit", "offload", "other")
    heads = "".join(f"{name:>11}" for name in phases)
    print(f"{'':22}{'step s':>8}{'× TRL':>7}{heads}{'first s':>9}{'used GiB at step ends':>36}{'peak GiB':>10}")
    for name, result in found.items():
        if "failed" in result:
            print(f"{name:22}{result['failed']}")
            continue
        seconds = _step_s(result)
        columns = "".join(f"{median(step.get(phase, 0.0) for step in result['phases'][1:]):11.2f}" for phase in phases)
        used = " ".join(f"{gib:.2f}" for gib in result["used_gib"])
        first, peak = result["stamps"][0] - result["begin"], max(result["peak_gib"])
        print(f"{name:22}{seconds:8.2f}{seconds / fastest:7.2f}{columns}{first:9.1f}{used:>36}{peak:10.1f}", flush=True)


def _step_s(result: Mapping[str, Any]) -> float:
    return median(after - before for before, after in pairwise(result["stamps"]))


def parse() -> argparse.Namespace:
    parser = row_parser(__doc__, 590.0)
    parser.add_argument("--contestants", nargs="+", choices=("rlcore", *TRL), default=["rlcore", "trl-8", "trl-8-liger"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes rlcore's recipe")
    parser.add_argument("--model-directory", type=Path, help="where the model is made, or found; a temporary one otherwise")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    work = Work(
        shape="1.5b",
        num_prompts=64,
        group=8,
        prompt_length=128,
        num_tokens=512,
        dtype="bfloat16" if arguments.device == "cuda" else "float32",
        device=arguments.device,
        num_steps=arguments.steps,
    )
    if arguments.quick:
        work = evolve(work, shape="tiny", num_prompts=4, group=4, prompt_length=16, num_tokens=16)
    model = arguments.model_directory
    if arguments.row == "model":
        write_model(model, work.shape, work.device, work.dtype)
        return
    if arguments.row:
        own = arguments.row == "rlcore"
        run = run_rlcore(work, str(model), arguments.set) if own else run_trl(work, str(model), arguments.row)
        print(run.as_json(), flush=True)
        os._exit(0)  # engines that are shut down by their destructors can hang

    require_device(work.device)
    with tempfile.TemporaryDirectory() as scratch:
        model = model or Path(scratch)
        place = ("--model-directory", str(model))
        if not (model / "model.safetensors").exists():
            subprocess.run([sys.executable, *sys.argv, *place, "--row", "model"], check=True)
        found: dict[str, dict[str, Any]] = {}
        for name in arguments.contestants:
            begin = time.time()
            found[name] = {**run_row(__file__, name, arguments.limit, *place), "begin": begin}
            # Anew each time: what is measured is not lost if the next one is cut off.
            report(found, work)


if __name__ == "__main__":
    main()
