"""The sides of benchmarks/real_model.py: one run of each, its settings and its figures."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from attrs import asdict, frozen
from contestants import QUIET_TRL, train_rlcore
from generator_setup import versions

SCORING = Path(__file__).resolve().parent.parent / "recipes" / "smollm2" / "scoring.py"


@frozen(kw_only=True)
class Settings:
    """The same for all sides."""

    device: str = "cuda"
    num_steps: int = 300
    num_prompts: int = 16
    group: int = 8
    max_tokens: int = 48
    max_prompt_tokens: int = 160
    temperature: float = 1.0
    learning_rate: float = 1e-5
    evaluate_every: int = 20
    num_held_out: int = 256
    generator: str = "vllm"
    """"vllm" or "transformers"."""
    cache_bytes: int = 2 * 2**30
    """Bytes of one engine's keys and values on a GPU."""
    memory_share: float = 0.05
    """Share of the device's memory that is free where an engine starts."""


NO_BOUND = {"training.max_token_mult_prob_error": 1e6}
"""In 8 bits the metric passes its bound, which would end the run; it is recorded for each step."""
TRAINER_8_BITS = {"trainer.megatron.fp8": True, **NO_BOUND}
GENERATOR_8_BITS = {"generator.vllm.quantization": "fp8", **NO_BOUND}
CACHE_8_BITS = {"generator.vllm.kv_cache_dtype": "fp8"}
EIGHT_BITS = {**TRAINER_8_BITS, **GENERATOR_8_BITS, **CACHE_8_BITS}
ADAPTERS = {"lora.rank": 32, "lora.alpha": 64.0, "optimizer.learning_rate": 2e-4}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {}),
    "megatron": ("megatron", {}),
    "trl": ("", {}),
    "staleness 1": ("fsdp2", {"async.max_staleness": 1}),
    "staleness 4": ("fsdp2", {"async.max_staleness": 4}),
    "8 bits": ("megatron", EIGHT_BITS),
    "8 bits tensorwise": ("megatron", {**EIGHT_BITS, "trainer.megatron.transformer.fp8_recipe": "tensorwise"}),
    "8 bits, trainer": ("megatron", TRAINER_8_BITS),
    "8 bits, generator": ("megatron", {**GENERATOR_8_BITS, **CACHE_8_BITS}),
    "8 bits, products": ("megatron", GENERATOR_8_BITS),
    "adapters": ("fsdp2", ADAPTERS),
    "DAPO": ("fsdp2", {"algorithm.name": "dapo", "rollout.max_refill_ratio": 32.0}),
    "GSPO": ("fsdp2", {"algorithm.name": "gspo"}),
    "RLOO": ("fsdp2", {"algorithm.name": "rloo"}),
    "Dr.GRPO": ("fsdp2", {"algorithm.name": "dr_grpo"}),
}
"""The trainer of each side of rlcore, and its keys of the recipe beside those that all have."""


def run_name(side: str, seed: int) -> str:
    """Name of a run's files."""
    return f"{side.translate(str.maketrans(' ', '-', '.,')).lower()}-{seed}"


class Record:
    """One run's figures, in a file from its first evaluation on."""

    def __init__(self, path: Path, side: str, seed: int, settings: Settings) -> None:
        self.path, self.begin = path, time.time()
        self.values: dict[str, Any] = {"side": side, "seed": seed, "settings": asdict(settings)}
        self.values |= {"versions": versions(settings.device), "start_up_s": 0.0, "step_s": [], "reward": []}
        self.values |= {"token_mult_prob_error": [], "held_out": []}

    def started(self) -> None:
        """Everything is there that the first step needs."""
        self.values["start_up_s"] = time.time() - self.begin

    def step(self, seconds: float, reward: float, error: float | None = None) -> None:
        """A step that is done, without evaluation; `error` is rlcore's metric token_mult_prob_error."""
        self.values["step_s"].append(seconds)
        self.values["reward"].append(reward)
        self.values["token_mult_prob_error"].append(error)

    def evaluated(self, scores: Mapping[str, float]) -> None:
        """The held-out score behind so many steps, by the set of rows."""
        steps, score = self.values["step_s"], mean(scores.values())
        self.values["held_out"].append({"step": len(steps), "seconds": sum(steps), "score": score, "sets": dict(scores)})
        self.path.write_text(json.dumps(self.values))
        print(f"step {len(steps)}, {sum(steps):.1f} s: {score:.3f}", flush=True)


def fix_cache(num_bytes: int) -> None:
    """Give each engine so many bytes of keys and values. By itself an engine measures the free memory, and counts what other
    runs allocate meanwhile as its own. Neither side has an option for it."""
    from vllm.v1.worker.gpu_worker import Worker

    measure = Worker.determine_available_memory

    def fixed(self: Any) -> int:
        with suppress(AssertionError):  # of memory that other runs free meanwhile
            measure(self)
        self.available_kv_cache_memory_bytes = num_bytes
        return num_bytes

    Worker.determine_available_memory = fixed


def run_rlcore(side: str, seed: int, settings: Settings, work: Path, model: str, record: Record) -> None:
    """A side of rlcore."""
    from rlcore.run.report.progress import Progress

    trainer, own = SIDES[side]

    sets = [file.stem.removeprefix("held-out-") for file in sorted(work.glob("held-out-*.jsonl"))]

    class Watch(Progress):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            if step > 0:
                record.step(metrics["time/total_s"], metrics["reward_mean"], metrics.get("token_mult_prob_error"))
            if "eval/pass@1" in metrics:
                record.evaluated({name: metrics[f"eval/pass@1/{name}"] for name in sets})
            if step == 0:
                record.started()

        def note(self, text: str) -> None:
            print(text, flush=True)

    keys = {
        "run.name": run_name(side, seed),
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
        "rollout.samples_per_prompt": settings.group,
        "rollout.max_prompt_tokens": settings.max_prompt_tokens,
        "rollout.max_response_tokens": settings.max_tokens,
        "rollout.temperature": settings.temperature,
        "training.prompts_per_step": settings.num_prompts,
        "training.max_tokens_per_microbatch": 8192,
        "optimizer.learning_rate": settings.learning_rate,
        "offload.generator_sleep_mode": False,  # as TRL's default is
        "evaluation.every_n_steps": settings.evaluate_every,
    }
    for name in sets:
        keys |= {f"data.evaluation.mix.{name}.source": "jsonl"}
        keys |= {f"data.evaluation.mix.{name}.path": str(work / f"held-out-{name}.jsonl")}
    if settings.generator == "vllm":
        keys |= {"generator.vllm.max_num_seqs": 256, "refit.channel": "in_process"}  # TRL's engine is in its process, too
        if settings.device == "cuda":
            keys |= {"generator.vllm.gpu_memory_utilization": settings.memory_share}
    train_rlcore(keys | own, Watch())


def run_trl(seed: int, settings: Settings, work: Path, model: str, record: Record) -> None:
    """GRPO by TRL's GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    with socket.socket() as free:  # TRL's own choice is the same port for all runs
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    exact = load_reward()
    on_cuda, by_vllm = settings.device == "cuda", settings.generator == "vllm"
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
                record.evaluated(held_out_scores())

    def held_out_scores() -> dict[str, float]:
        greedy = greedy_by_vllm if by_vllm else greedy_by_transformers
        texts = iter(greedy(trainer, tokenizer, [row["prompt"] for rows in held_out.values() for row in rows], settings))
        return {name: mean(float(exact(next(texts), row["answer"])) for row in rows) for name, rows in held_out.items()}

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    files = sorted(work.glob("held-out-*.jsonl"))
    held_out = {file.stem.removeprefix("held-out-"): read_rows(file) for file in files}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl_config(seed, settings, work),
        train_dataset=Dataset.from_list(read_rows(work / f"train-{seed}.jsonl")),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    if by_vllm and not on_cuda:  # vLLM repacks weights on CPU, where TRL's way to load them raises; the rest can still be tried
        trainer.vllm_generation.sync_weights = lambda: None
    record.evaluated(held_out_scores())
    record.started()
    trainer.train()


def trl_config(seed: int, settings: Settings, work: Path) -> Any:
    """GRPOConfig of the same work."""
    from trl import GRPOConfig

    on_cuda, by_vllm = settings.device == "cuda", settings.generator == "vllm"
    num_samples = settings.num_prompts * settings.group
    batch = min(num_samples, 64)
    return GRPOConfig(
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
        **QUIET_TRL,
    )


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
    from rlcore_workers.functions import load_function

    return load_function(f"{SCORING}:exact", "the reward")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
