"""GRPO on a pretrained model, by rlcore with two trainers and by TRL: held-out scores over steps and time, three seeds each.

    python recipes/smollm2/make_model.py runs/smollm2/model && python recipes/smollm2/make_rows.py runs/smollm2
    python benchmarks/real_model.py runs/real-model                       # needs a GPU, vLLM and, for `trl`, TRL
    python benchmarks/real_model.py runs/real-model --sides trl           # one side; what was run before stays
    python benchmarks/real_model.py runs/real-model --sides --figure docs/real-model.svg        # the table and figure alone
    python benchmarks/real_model.py /tmp/results --quick --device cpu     # a tiny random model, to try the script

All sides have the same prompts in the same order for a seed, the same reward (the last number is right), and the same Settings:
one AdamW update a step on all samples, float32 master weights and bfloat16 arithmetic, no KL term, token-level loss, the
sampler's probabilities corrected by the trainer's, truncated at 2. Each generates by a vLLM of its own, and is measured by
greedy answers to the same held-out prompts.

The seeds of a side run at the same time on one GPU (`--together`), those of another side after them, so that all have an equal
part of it. Starts come one after another, since an engine that starts takes what others allocate for its own, and no run takes
its first step before all have started. Seconds are those of steps alone, without starts and evaluations.
"""

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from attrs import asdict, evolve, frozen
from generator_setup import ENVIRONMENT, QUICK_ENVIRONMENT, last_lines, versions
from model_shapes import require_device
from real_model_curves import draw, read_records

ROOT = Path(__file__).resolve().parent.parent
SCORING = ROOT / "recipes" / "smollm2" / "scoring.py"
SIDES = ("fsdp2", "megatron", "trl")


@frozen(kw_only=True)
class Settings:
    """The same for all sides."""

    device: str = "cuda"
    num_steps: int = 60
    num_prompts: int = 32
    group: int = 8
    max_tokens: int = 48
    max_prompt_tokens: int = 128
    temperature: float = 1.0
    learning_rate: float = 1e-5
    evaluate_every: int = 10
    num_held_out: int = 256
    generator: str = "vllm"
    """"vllm" or "transformers"."""
    memory_share: float = 0.12
    """Of the device for one run's engine."""


QUICK = Settings(num_steps=2, num_prompts=2, group=2, max_tokens=4, evaluate_every=1, num_held_out=2, generator="transformers")


class Record:
    """One run's figures, in a file from its first evaluation on."""

    def __init__(self, path: Path, side: str, seed: int, settings: Settings) -> None:
        self.path, self.begin = path, time.time()
        self.values: dict[str, Any] = {"side": side, "seed": seed, "settings": asdict(settings)}
        self.values |= {"versions": versions("cpu"), "start_up_s": 0.0, "step_s": [], "reward": [], "held_out": []}

    def started(self) -> None:
        """Everything is there that the first step needs."""
        self.values["start_up_s"] = time.time() - self.begin

    def step(self, seconds: float, reward: float) -> None:
        """A step that is done, without evaluation."""
        self.values["step_s"].append(seconds)
        self.values["reward"].append(reward)

    def evaluated(self, score: float) -> None:
        """The held-out score behind so many steps."""
        steps = self.values["step_s"]
        self.values["held_out"].append({"step": len(steps), "seconds": sum(steps), "score": score})
        self.path.write_text(json.dumps(self.values))
        print(f"step {len(steps)}, {sum(steps):.1f} s: {score:.3f}", flush=True)


class Turns:
    """Runs that start one after another and go on together."""

    def __init__(self, directory: Path, side: str, seeds: Sequence[int], own: int) -> None:
        self.marks = [directory / f"ready-{side}-{seed}" for seed in seeds]
        self.own = directory / f"ready-{side}-{own}"
        self.lock = (directory / "starting.lock").open("w")

    def begin(self) -> None:
        """Wait for this run's turn."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def end(self) -> None:
        """Let the next one start."""
        self.own.touch()
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def together(self, seconds: float = 400.0) -> None:
        """Wait until all have started, or have failed."""
        self.end()
        limit = time.monotonic() + seconds
        while not all(mark.exists() for mark in self.marks) and time.monotonic() < limit:
            time.sleep(0.2)


def run_rlcore(trainer: str, seed: int, settings: Settings, work: Path, model: str, record: Record, turns: Turns) -> None:
    """GRPO by rlcore with the trainer of that name."""
    from rlcore.run.plan.prepare import prepare
    from rlcore.run.report.progress import Progress
    from rlcore.run.train import train

    class Watch(Progress):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            if step > 0:
                record.step(metrics["time/total_s"], metrics["reward_mean"])
            if "evaluation/pass@1" in metrics:
                record.evaluated(metrics["evaluation/pass@1"])
            if step == 0:
                record.started()
                turns.together()

        def note(self, text: str) -> None:
            print(text, flush=True)

    keys = {
        "run.name": f"{trainer}-{seed}",
        "run.directory": str(work / "runs"),
        "run.seed": seed,
        "run.device": settings.device,
        "run.num_steps": settings.num_steps,
        "model.path": model,
        "trainer.name": trainer,
        "generator.name": settings.generator,
        "algorithm.name": "grpo",
        "environment.name": "function",
        "environment.function.path": f"{SCORING}:exact",
        "environment.function.prompt_format": "chat",
        "data.train.source": "jsonl",
        "data.train.path": str(work / f"train-{seed}.jsonl"),
        "data.train.shuffle": False,
        "data.evaluation.source": "jsonl",
        "data.evaluation.path": str(work / "held-out.jsonl"),
        "rollout.samples_per_prompt": settings.group,
        "rollout.max_prompt_tokens": settings.max_prompt_tokens,
        "rollout.max_response_tokens": settings.max_tokens,
        "rollout.temperature": settings.temperature,
        "training.prompts_per_step": settings.num_prompts,
        "training.max_tokens_per_microbatch": 16384,
        "optimizer.learning_rate": settings.learning_rate,
        "residency.generator_sleeps": False,  # as TRL's default is
        "evaluation.every_n_steps": settings.evaluate_every,
        "checkpoint.at_end": False,
        "logging.rollouts_every_n_steps": 0,
        "sinks.names": [],
    }
    if settings.generator == "vllm":
        keys |= {"generator.vllm.gpu_memory_utilization": settings.memory_share, "generator.vllm.max_num_seqs": 256}
    recipe = work / f"{trainer}-{seed}.toml"
    recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    train(prepare(recipe), resume=False, progress=Watch())


def run_trl(seed: int, settings: Settings, work: Path, model: str, record: Record, turns: Turns) -> None:
    """GRPO by TRL's GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    exact = load_reward()
    on_cuda, by_vllm = settings.device == "cuda", settings.generator == "vllm"
    num_samples = settings.num_prompts * settings.group
    batch = min(num_samples, 64)
    rewards: list[float] = []

    def reward(completions: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **_: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        rewards.extend(float(exact(text, right)) for text, right in zip(texts, answer, strict=True))
        return rewards[-len(texts) :]

    class Watch(TrainerCallback):  # type: ignore[misc]
        begin = 0.0

        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *arguments: Any, **options: Any) -> None:
            if on_cuda:
                torch.cuda.synchronize()
            record.step(time.perf_counter() - self.begin, mean(rewards))
            rewards.clear()
            if state.global_step % settings.evaluate_every == 0 or state.global_step == settings.num_steps:
                record.evaluated(held_out_score())

    def held_out_score() -> float:
        greedy = greedy_by_vllm if by_vllm else greedy_by_transformers
        texts = greedy(trainer, tokenizer, [row["prompt"] for row in held_out], settings)
        return mean(float(exact(text, row["answer"])) for text, row in zip(texts, held_out, strict=True))

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    held_out = read_rows(work / "held-out.jsonl")
    config = GRPOConfig(
        output_dir=str(work / "runs" / f"trl-{seed}"),
        seed=seed,
        max_steps=settings.num_steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=num_samples // batch,
        steps_per_generation=num_samples // batch,
        num_generations=settings.group,
        max_completion_length=settings.max_tokens,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        shuffle_dataset=False,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        use_vllm=by_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=settings.memory_share if on_cuda else 0.9,
        vllm_max_model_length=settings.max_prompt_tokens + settings.max_tokens,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        bf16=on_cuda,
        use_cpu=not on_cuda,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(read_rows(work / f"train-{seed}.jsonl")),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    if by_vllm and not on_cuda:  # vLLM repacks weights on CPU, where TRL's way to load them raises; the rest can still be tried
        trainer.vllm_generation.sync_weights = lambda: None
    record.evaluated(held_out_score())
    record.started()
    turns.together()
    trainer.train()


def greedy_by_vllm(trainer: Any, tokenizer: Any, prompts: Sequence[Any], settings: Settings) -> list[str]:
    """The engine's answers, with the trainer's present weights."""
    from vllm import SamplingParams

    trainer.vllm_generation.sync_weights()
    texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
    ids = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    limits = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    return [output.outputs[0].text for output in trainer.vllm_generation.llm.generate(ids, limits, use_tqdm=False)]


def greedy_by_transformers(trainer: Any, tokenizer: Any, prompts: Sequence[Any], settings: Settings) -> list[str]:
    """The answers of the trainer's own model."""
    import torch

    texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
    tokens = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        ids = trainer.model.generate(
            **tokens.to(trainer.model.device), do_sample=False, max_new_tokens=settings.max_tokens, pad_token_id=0
        )
    answers: list[str] = tokenizer.batch_decode(ids[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def load_reward() -> Callable[[str, str], bool]:
    """The function that rlcore's recipes name."""
    from rlcore.functions import load_function

    return load_function(f"{SCORING}:exact", "the reward")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sums() -> list[dict[str, Any]]:
    """Rows to try the script with."""
    pairs = [(first, second) for first in range(10) for second in range(10)]
    return [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in pairs]


def write_rows(directory: Path, rows: Path | None, seeds: Sequence[int], settings: Settings) -> None:
    """The held-out rows, and for each seed those of its steps in their order."""
    names = ("train.jsonl", "held-out.jsonl")
    train, held_out = (sums() if rows is None else read_rows(rows / name) for name in names)

    def write(name: str, chosen: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for row in chosen]
        (directory / name).write_text("".join(lines))

    write("held-out.jsonl", held_out[: settings.num_held_out])
    for seed in seeds:
        source, number, order = random.Random(seed), settings.num_steps * settings.num_prompts, list[Any]()
        while len(order) < number:  # whole passes, each in an order of its own
            order += source.sample(train, len(train))
        write(f"train-{seed}.jsonl", order[:number])


def start(directory: Path, side: str, seeds: Sequence[int], model: Path, settings: Settings, limit: float) -> None:
    """The runs of a side that are to go on together, each in a process of its own."""
    for seed in seeds:
        (directory / f"ready-{side}-{seed}").unlink(missing_ok=True)

    def run(seed: int) -> None:
        log = directory / f"{side}-{seed}.log"
        own = json.dumps({"side": side, "seed": seed, "seeds": seeds, "settings": asdict(settings)})
        command = [sys.executable, __file__, str(directory), "--model", str(model), "--run", own]
        quick = QUICK_ENVIRONMENT if settings.device == "cpu" else {}
        with log.open("w") as file:
            try:
                environment = {**os.environ, **ENVIRONMENT, **quick}
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=limit)
                state = f"exit code {done.returncode}" if done.returncode else None
            except subprocess.TimeoutExpired:
                state = f"over {limit:.0f} s"
        if state is not None:
            print(f"{side}, seed {seed}: {state}; the end of {log}:\n{last_lines(log)}", flush=True)

    if len(seeds) == 1:
        run(seeds[0])
        return
    with ThreadPoolExecutor(len(seeds)) as pool:
        list(pool.map(run, seeds))


def run_one(directory: Path, model: str, side: str, seed: int, seeds: Sequence[int], settings: Settings) -> None:
    """In its own process."""
    turns = Turns(directory, side, seeds, seed)
    try:
        turns.begin()
        record = Record(directory / f"{side}-{seed}.json", side, seed, settings)
        if side == "trl":
            run_trl(seed, settings, directory, model, record, turns)
        else:
            run_rlcore(side, seed, settings, directory, model, record, turns)
    finally:
        turns.end()
        sys.stdout.flush()


def report(directory: Path) -> None:
    """A line a side; what single runs came to behind it."""
    records = read_records(directory)
    print(f"\n{'':12}{'runs':>5}{'at the start':>14}{'at the end':>12}{'each':>26}{'step s':>9}{'steps s':>9}{'start s':>9}")
    for side, runs in records.items():
        first, last = ([run["held_out"][place]["score"] for run in runs] for place in (0, -1))
        each = " ".join(f"{score:.3f}" for score in last)
        steps = [median(run["step_s"][1:] or run["step_s"] or [0.0]) for run in runs]
        whole, starts = (mean(values) for values in ([sum(run["step_s"]) for run in runs], [run["start_up_s"] for run in runs]))
        print(
            f"{side:12}{len(runs):>5}{mean(first):>14.3f}{mean(last):>12.3f}{each:>26}{mean(steps):>9.2f}{whole:>9.1f}{starts:>9.1f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where figures are kept, a file a run")
    parser.add_argument("--model", type=Path, help="by default runs/smollm2/model; with --quick, one that is made")
    parser.add_argument(
        "--rows",
        type=Path,
        help="the folder of train.jsonl and held-out.jsonl, by default runs/smollm2; with --quick, some sums",
    )
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--together", type=int, default=3, help="runs of a side at the same time")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--generator", choices=("vllm", "transformers"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny random model and two steps, to try the script")
    parser.add_argument("--limit", type=float, default=590.0, help="seconds for runs that go on together")
    parser.add_argument("--figure", type=Path, help="draw the curves into this .svg or .png file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    directory = arguments.directory.resolve()
    if arguments.run:
        own = json.loads(arguments.run)
        run_one(directory, str(arguments.model), own["side"], own["seed"], own["seeds"], Settings(**own["settings"]))
        if own["settings"]["generator"] == "vllm":
            os._exit(0)  # engines that are shut down by their destructors can hang
        return
    names = {"num_steps": arguments.steps, "learning_rate": arguments.learning_rate, "generator": arguments.generator}
    given: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    settings = evolve(QUICK if arguments.quick else Settings(), device=arguments.device, **given)
    sides = list(arguments.sides)
    if "trl" in sides and find_spec("trl") is None:
        print("TRL is not installed here, so it is left out")
        sides.remove("trl")
    if sides:
        require_device(settings.device)
        directory.mkdir(parents=True, exist_ok=True)
        model, rows = arguments.model, arguments.rows
        if arguments.quick:
            from rlcore.testing.models import make_model

            model = model or make_model(directory / "model", head_dim=64)
        else:
            model, rows = model or Path("runs/smollm2/model"), rows or Path("runs/smollm2")
        write_rows(directory, rows, arguments.seeds, settings)
    for side in sides:
        for place in range(0, len(arguments.seeds), arguments.together):
            seeds = arguments.seeds[place : place + arguments.together]
            start(directory, side, seeds, model, settings, arguments.limit)
    report(directory)
    if arguments.figure:
        draw(read_records(directory), arguments.figure)


if __name__ == "__main__":
    main()
