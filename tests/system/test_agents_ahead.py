"""Agents one step ahead of fsdp2, with the generator transformers: each token is of the weights that it names.

What transformers computes in float64 from the weights of each version says so, not rlcore.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from attrs import evolve
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import RefitRequest, RefitResult, WeightBucket, hookimpl
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_grpo.provider import PROVIDER as GRPO
from rlcore_serve.provider import AGENT
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.backend import TransformersBackend
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS

from .test_agents import RECIPE  # type: ignore[import-not-found]

WEIGHTS: dict[int, dict[str, torch.Tensor]] = {}
"""Those that the generator was given, by version."""
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 4, 2, 3

FUNCTION = '''
async def run(task, client):
    """Two turns, and a second answer to the first question: two sequences."""
    async def ask(*texts):
        messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
        create = client.openai.chat.completions.create
        answer = await create(model=client.model, messages=messages, max_tokens=task["length"])
        return answer.choices[0].message.content
    first = await ask(task["prompt"])
    second = await ask(task["prompt"], first, "more")
    await ask(task["prompt"], "mine", "again")
    return float(len(set(first + second)))
'''
PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(*texts):
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": task["length"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, data=json.dumps(body).encode())) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
first = ask(task["prompt"])
second = ask(task["prompt"], first, "more")
ask(task["prompt"], "mine", "again")
print(len(set(first + second)))
"""


class Keeping(TransformersBackend):
    """Keeps the weights of each version."""

    @hookimpl
    def refit(self, request: RefitRequest) -> RefitResult:
        kept = WEIGHTS[request.weight_version] = {}

        def copied(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
            for bucket in buckets:
                kept.update({one.name: one.tensor.detach().double() for one in bucket.tensors})
                yield bucket

        weights = evolve(request.weights, buckets=copied(request.weights.buckets))
        result: RefitResult = super().refit(evolve(request, weights=weights))
        return result


REGISTRY = Registry.from_providers(
    {
        "trainer": [FSDP2],
        "generator": [evolve(TRANSFORMERS, backend=f"{__name__}:Keeping")],
        "algorithm": [GRPO],
        "environment": [AGENT],
    }
)


def policy_of(model: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    policy: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float64)
    assert not policy.load_state_dict(weights, strict=False).unexpected_keys
    return policy.eval()


def logprobs(policy: torch.nn.Module, tokens: torch.Tensor) -> NDArray[np.float64]:
    """float64 [L]: of each token given those before it, and 0.0 for the first."""
    with torch.no_grad():
        found = torch.log_softmax(policy(tokens[None]).logits[0, :-1], -1).gather(-1, tokens[1:, None])
    return np.concatenate([np.zeros(1), found[:, 0].numpy()])


@pytest.mark.wide(keep=["function"])
@pytest.mark.parametrize("kind", ["function", "command"])
def test_each_token_has_the_log_probability_of_the_weights_that_it_names(tmp_path: Path, kind: str) -> None:
    WEIGHTS.clear()
    source = tmp_path / "agent.py"
    source.write_text(FUNCTION if kind == "function" else PROGRAM)
    function, command = json.dumps(f"{source}:run"), json.dumps([sys.executable, "-S", str(source)])
    rows = [{"prompt": f"say {letter}", "length": 24 + 3 * place} for place, letter in enumerate("abcdefgh")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe, model = tmp_path / "recipe.toml", make_model(tmp_path / "model")
    agent = f"function = {function}" if kind == "function" else f"command = {command}"
    recipe.write_text(RECIPE.format(model=model, data=tmp_path / "data.jsonl", agent=agent))
    overrides = {
        "run.directory": tmp_path / "runs",
        "run.num_steps": NUM_STEPS,
        "async.max_staleness": 1,
        "optimizer.learning_rate": 0.02,
        "logging.rollouts_every_n_steps": 1,
        "checkpoint.every_n_steps": 2,
    }
    plan = prepare(recipe, [f"{key}={value}" for key, value in overrides.items()], registry=REGISTRY)
    assert train(plan, resume=False, progress=Progress())["steps"] == NUM_STEPS

    (run,) = tmp_path.glob("runs/*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["async/staleness_max"] for line in lines) == 1.0
    table = pandas.concat([pandas.read_parquet(path) for path in sorted(run.glob("rollouts/step-*.parquet"))])
    assert len(table) == NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES * 2
    assert table.groupby(["step", "group"])["prompt"].first().value_counts().eq(1).all()
    policies = {version: policy_of(model, weights) for version, weights in WEIGHTS.items()}
    apart, num_spanning = [], 0
    for sample in table.itertuples():
        tokens, mask = torch.tensor(sample.tokens), np.asarray(sample.loss_mask)
        versions, recorded = np.asarray(sample.weight_versions), np.asarray(sample.generation_logprobs)
        num_spanning += len(set(versions[mask])) > 1
        by_version = {version: logprobs(policy, tokens) for version, policy in policies.items()}
        for place in np.flatnonzero(mask):
            assert recorded[place] == pytest.approx(by_version[versions[place]][place], abs=1e-4)
            apart.append(abs(recorded[place] - by_version[(versions[place] + 1) % len(WEIGHTS)][place]))
    assert num_spanning > 0 or kind == "command"  # programs start slowly, so that their samples may meet no refit
    assert np.mean(np.array(apart) > 1e-3) > 0.9
