"""One GRPO step on CPU: rlcore, TRL's GRPOTrainer and a bare torch loop at identical work, interleaved.

    .venv/bin/python benchmarks/cpu_step.py                 # makes .venv-trl for TRL the first time
    .venv/bin/python benchmarks/cpu_step.py --cases one --rounds 5
    .venv/bin/python benchmarks/cpu_step.py --quick         # a tiny shape and few steps, to try the script

Work of a step: 16 prompts × 8 samples × at most 32 tokens of a Qwen3 shape (hidden 256, 4 layers, 8 heads, 2 KV heads,
vocabulary 512, float32), AdamW. Rewards are random but fixed. `one`: one update on all 128 samples; `four`: four updates on 32
each; `kl`: one, with a KL term against a reference policy. Each contestant runs in a process of its own, in turns, so that a
disturbance hits all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
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


def run_rlcore(model: str, case: str, num_steps: int) -> dict[str, Any]:
    from letters_environment import PROVIDER

    updates, kl = CASES[case]
    stamps: list[float] = []

    class Stamps:
        def step(self, step: int, metrics: dict[str, float]) -> None:
            stamps.append(time.time())

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
    summary = train_rlcore(keys, Stamps(), environment=PROVIDER)
    return {"stamps": stamps, "phases": summary["step_time_median_s"]}


def run_trl(model: str, case: str, num_steps: int) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    updates, kl = CASES[case]
    stamps: list[float] = []

    class Stamps(TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            stamps.append(time.time())

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
            callbacks=[Stamps()],
        )
        trainer.train()
    return {"stamps": stamps[updates - 1 :: updates], "phases": {}}


def run_bare(model: str, case: str, num_steps: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    updates, kl = CASES[case]
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True) if kl else None
    tokenizer = AutoTokenizer.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=0.0)
    prompts, stamps, eos = texts(NUM_ROWS, PROMPT_LENGTH), [], tokenizer.eos_token_id

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
        stamps.append(time.time())
    return {"stamps": stamps, "phases": {}}


def measure(contestant: str, python: str, model: str, case: str, num_steps: int) -> dict[str, Any]:
    """Step times and start-up of one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    start = time.time()
    command = [python, __file__, "--contestant", contestant, "--model", model, "--cases", case, "--steps", str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{contestant} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    stamps = result["stamps"]
    steps = [after - before for before, after in pairwise(stamps)]
    return {"start_up": stamps[0] - start, "steps": steps[WARM_UP - 1 :], "phases": result["phases"]}


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few steps, and no TRL where it is not installed")
    parser.add_argument("--trl-python", help="an interpreter that has TRL, instead of making .venv-trl")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        run = {"rlcore": run_rlcore, "trl": run_trl, "bare": run_bare}[arguments.contestant]
        print(json.dumps(run(arguments.model, arguments.cases[0], arguments.steps)))
        return

    pythons = interpreters(arguments.trl_python, arguments.quick)
    num_rounds, num_steps = (1, WARM_UP + 1) if arguments.quick else (arguments.rounds, arguments.steps)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", "tiny" if arguments.quick else "3m", "cpu", "float32")
        for case in arguments.cases:
            found: dict[str, list[dict[str, Any]]] = {contestant: [] for contestant in pythons}
            for _ in range(num_rounds):
                for contestant, python in pythons.items():
                    found[contestant].append(measure(contestant, python, str(model), case, num_steps))
            report(case, found)


def interpreters(given: str | None, quick: bool) -> dict[str, str]:
    """Each contestant's."""
    pythons = dict.fromkeys(CONTESTANTS, sys.executable)
    if given is not None or not quick:
        pythons["trl"] = given or trl_python()
    elif find_spec("trl") is None:
        print("TRL is not installed here, so it is left out; --trl-python names an interpreter that has it")
        del pythons["trl"]
    return pythons


def report(case: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """A table of one case."""
    steps = {name: median(step for run in runs for step in run["steps"]) for name, runs in found.items()}
    starts = {name: median(run["start_up"] for run in runs) for name, runs in found.items()}
    print(f"\n{case}: {CASES[case][0]} update(s), KL coefficient {CASES[case][1]}")
    print(f"{'':10}{'median step s':>15}{'× TRL':>8}{'× bare':>8}{'start to first step s':>23}")
    for name in found:
        ratios = "".join(f"{steps[name] / steps[other]:>8.2f}" if other in steps else f"{'-':>8}" for other in ("trl", "bare"))
        print(f"{name:10}{steps[name]:>15.3f}{ratios}{starts[name]:>23.1f}")
    phases = [run["phases"] for run in found["rlcore"]]
    print("rlcore by phase: " + ", ".join(f"{name} {median(run[name] for run in phases):.3f}" for name in phases[0]))


if __name__ == "__main__":
    main()
