"""One GRPO step on CPU: rlcore, TRL's GRPOTrainer and a bare torch loop at identical work, interleaved.

    .venv/bin/python benchmarks/cpu_step.py                 # makes .venv-trl for TRL the first time
    .venv/bin/python benchmarks/cpu_step.py --cases one --steps 30
    .venv/bin/python benchmarks/cpu_step.py --quick         # a tiny shape and few steps, to try the script

Work of a step: 16 prompts × 8 samples × at most 32 tokens of a Qwen3 shape (hidden 256, 4 layers, 8 heads, 2 KV heads,
vocabulary 512, float32), AdamW. Rewards are random but fixed. `one`: one update on all 128 samples; `four`: four updates on 32
each; `kl`: one, with a KL term against a reference policy. Each contestant is a process with a thread for each core. The
processes take turns step by step, while the others wait, so that a disturbance hits all. Ratios are medians over the turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from contestants import QUIET_TRL, train_rlcore
from model_shapes import reward, texts, write_model

CONTESTANTS = ("rlcore", "trl", "bare")
CASES = {"one": (1, 0.0), "four": (4, 0.0), "kl": (1, 0.04)}
"""Updates per step, and the KL coefficient."""
NUM_PROMPTS, GROUP, NUM_TOKENS = 16, 8, 32
NUM_ROWS, PROMPT_LENGTH = 256, 12
WARM_UP = 2
TRL_REQUIREMENTS = ("trl==1.16.0", "transformers==5.19.0")
STEP_ENDED, PHASES = "step ended", "phases "
"""Lines by which a contestant reports a step, after which it waits for a line; and in the end its phases."""


def wait_for_turn() -> None:
    print(f"\n{STEP_ENDED}", flush=True)
    sys.stdin.readline()


def run_rlcore(model: str, case: str, num_steps: int) -> dict[str, float]:
    from letters_environment import PROVIDER

    updates, kl = CASES[case]

    class Turns:
        def step(self, step: int, metrics: dict[str, float]) -> None:
            wait_for_turn()

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: None

    keys = {
        "run.device": "cpu",
        "run.num_steps": num_steps,
        "model.path": model,
        "algorithm.name": "grpo",
        "algorithm.grpo.kl_coefficient": kl,
        "environment.name": "letters",
        "environment.letters.num_prompts": NUM_ROWS,
        "environment.letters.prompt_length": PROMPT_LENGTH,
        "rollout.samples_per_prompt": GROUP,
        "rollout.max_prompt_tokens": PROMPT_LENGTH,
        "rollout.max_response_tokens": NUM_TOKENS,
        "training.prompts_per_step": NUM_PROMPTS,
        "training.minibatches_per_step": updates,
        "optimizer.learning_rate": 1e-5,
    }
    times: dict[str, float] = train_rlcore(keys, Turns(), environment=PROVIDER)["step_time_median_s"]
    return times


def run_trl(model: str, case: str, num_steps: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    updates, kl = CASES[case]

    class Turns(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, *others: Any, **options: Any) -> None:
            if state.global_step % updates == 0:
                wait_for_turn()

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=NUM_PROMPTS * GROUP // updates,
            steps_per_generation=updates,
            num_generations=GROUP,
            max_completion_length=NUM_TOKENS,
            beta=kl,
            temperature=1.0,
            learning_rate=1e-5,
            max_steps=num_steps * updates,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **QUIET_TRL,
            model_init_kwargs={"dtype": torch.float32},
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts(NUM_ROWS, PROMPT_LENGTH)}),
            processing_class=tokenizer,
            callbacks=[Turns()],
        )
        trainer.train()
    return {}


def run_bare(model: str, case: str, num_steps: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    updates, kl = CASES[case]
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True) if kl else None
    tokenizer = AutoTokenizer.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=0.0)
    prompts, eos = texts(NUM_ROWS, PROMPT_LENGTH), tokenizer.eos_token_id

    def logprobs(network: Any, ids: Any) -> Any:
        logits = network(ids, logits_to_keep=NUM_TOKENS + 1).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, -NUM_TOKENS:, None])[..., 0]

    for step in range(num_steps):
        batch = [prompts[(step * NUM_PROMPTS + index) % NUM_ROWS] for index in range(NUM_PROMPTS) for _ in range(GROUP)]
        prompt_ids = torch.tensor(tokenizer(batch)["input_ids"])
        with torch.no_grad():
            ids = policy.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=NUM_TOKENS,
                pad_token_id=eos,
            )
        ids = torch.nn.functional.pad(ids, (0, PROMPT_LENGTH + NUM_TOKENS - ids.shape[1]), value=eos)
        answers = ids[:, PROMPT_LENGTH:]
        mask = ((answers == eos).cumsum(-1) - (answers == eos).long() == 0).float()
        rewards = torch.tensor([reward(text) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)])
        groups = rewards.view(NUM_PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            previous = logprobs(policy, ids) if updates > 1 else None
            anchored = logprobs(reference, ids) if reference is not None else None
        for rows in torch.arange(len(ids)).chunk(updates):
            current = logprobs(policy, ids[rows])
            ratio = (current - (current.detach() if previous is None else previous[rows])).exp()
            a = advantages[rows]
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            if anchored is not None:
                difference = anchored[rows] - current
                loss = loss + kl * (difference.exp() - 1 - difference)
            ((loss * mask[rows]).sum() / mask[rows].sum()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        wait_for_turn()
    return {}


class Contestant:
    """A process that waits for a line before each step."""

    def __init__(self, name: str, python: str, model: str, case: str, num_steps: int) -> None:
        """Start the process and wait for its first step."""
        threads = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command = [python, __file__, "--contestant", name, "--model", model, "--cases", case, "--steps", str(num_steps)]
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        start = time.perf_counter()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=environment)
        self._read_until(STEP_ENDED)
        self.start_up = time.perf_counter() - start

    def step(self) -> float:
        """Seconds of the next step."""
        start = time.perf_counter()
        self._go_on()
        self._read_until(STEP_ENDED)
        return time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """Let the process end after its last step; return the seconds of its phases."""
        self._go_on()
        phases: dict[str, float] = json.loads(self._read_until(PHASES).removeprefix(PHASES))
        return phases

    def _go_on(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def _read_until(self, beginning: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line
        self.log.seek(0)
        sys.exit(f"{self.name} failed:\n{self.log.read()[-4000:]}")


def trl_python() -> str:
    """The interpreter of TRL's own virtual environment, which is made the first time."""
    root = Path(__file__).resolve().parent.parent / ".venv-trl"
    python = root / "bin" / "python"
    if not (root / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *TRL_REQUIREMENTS], check=True)
        (root / ".installed").touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few steps, and no TRL where it is not installed")
    parser.add_argument("--trl-python", help="an interpreter that has TRL, instead of making .venv-trl")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        run = {"rlcore": run_rlcore, "trl": run_trl, "bare": run_bare}[arguments.contestant]
        print("\n" + PHASES + json.dumps(run(arguments.model, arguments.cases[0], arguments.steps)))
        return

    pythons = interpreters(arguments.trl_python, arguments.quick)
    num_steps = WARM_UP + 1 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", "tiny" if arguments.quick else "3m", "cpu", "float32")
        for case in arguments.cases:
            measure(
                case, [Contestant(name, python, str(model), case, num_steps) for name, python in pythons.items()], num_steps
            )


def measure(case: str, contestants: list[Contestant], num_steps: int) -> None:
    """Take turns, and print a table of one case."""
    turns = [{one.name: one.step() for one in contestants} for _ in range(1, num_steps)][WARM_UP - 1 :]
    phases = {one.name: one.finish() for one in contestants}
    print(f"\n{case}: {CASES[case][0]} update(s), KL coefficient {CASES[case][1]}, {len(turns)} turns")
    print(f"{'':10}{'median step s':>15}{'× TRL':>8}{'× bare':>8}{'start to first step s':>23}")
    for one in contestants:
        ratios = [
            f"{median(turn[one.name] / turn[other] for turn in turns):>8.2f}" if other in turns[0] else f"{'-':>8}"
            for other in ("trl", "bare")
        ]
        print(f"{one.name:10}{median(turn[one.name] for turn in turns):>15.3f}{''.join(ratios)}{one.start_up:>23.1f}")
    print("rlcore by phase: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases["rlcore"].items()))


def interpreters(given: str | None, quick: bool) -> dict[str, str]:
    """Each contestant's."""
    pythons = dict.fromkeys(CONTESTANTS, sys.executable)
    if given is not None or not quick:
        pythons["trl"] = given or trl_python()
    elif find_spec("trl") is None:
        print("TRL is not installed here, so it is left out; --trl-python names an interpreter that has it")
        del pythons["trl"]
    return pythons


if __name__ == "__main__":
    main()
