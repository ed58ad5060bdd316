"""vLLM's own server as a teacher: its log-probabilities, and a run that equals one with the teacher in the trainer."""

import contextlib

import numpy as np
import pandas
import pytest
import torch
from openai_servers import serving, vllm_serve
from transformers import AutoModelForCausalLM

from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import ModelError, ModelSpec, TokenBatch
from rlcore_distill.config import TeacherConfig
from rlcore_torchkit.rl.endpoint_logprobs import EndpointModel, decoder_of
from rlcore_torchkit.testing.models import make_model

pytest.importorskip("vllm")
ALPHABET = "0123456789+="
RECIPE = """
[run]
num_steps = 2
device = "cpu"
[model]
path = "student"
[algorithm]
name = "distill"
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 9
num_train = 32
num_evaluation = 8
[generator]
name = "transformers"
[trainer]
name = "fsdp2"
[rollout]
samples_per_prompt = 2
max_prompt_tokens = 4
max_response_tokens = 3
[training]
prompts_per_step = 4
[evaluation]
at_start = false
at_end = false
[sinks]
names = []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student, a teacher and another teacher with another tokenizer."""
    folder = tmp_path_factory.mktemp("teachers")
    shape = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "max_length": 256}
    make_model(folder / "student", "qwen3", alphabet=ALPHABET, **shape)
    make_model(folder / "teacher", "qwen3", seed=3, alphabet=ALPHABET, initializer_range=0.1, **shape)
    make_model(folder / "stranger", "qwen3", alphabet="=+9876543210", **shape)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def figures(folder, name, *options):
    """The loss and the divergence of each step."""
    with contextlib.chdir(folder):
        prepared = prepare(folder / "recipe.toml", [f"run.name={name}", *options])
        train(prepared, resume=False, progress=Progress())
    return pandas.read_json(folder / "runs" / name / "metrics.jsonl", lines=True)[["loss", "reverse_kl", "grad_norm"]]


@pytest.mark.wide
def test_a_run_equals_one_with_the_teacher_in_the_trainer(folder, tmp_path):
    command = [*vllm_serve(str(folder / "teacher")), "--gpu-memory-utilization", "0.1"]
    with serving(command, tmp_path / "log.txt", VLLM_CPU_KVCACHE_SPACE="1") as url:
        teacher = EndpointModel("teacher", TeacherConfig(base_url=url), decoder_of(ModelSpec(path=str(folder / "student"))))
        tokens = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 3], [4]]
        batch = TokenBatch(
            tokens=np.concatenate(tokens).astype(np.int32),
            offsets=np.array([0, 4, 10, 11]),
            loss_mask=np.zeros(11, bool),
        )
        found = teacher.logprobs(batch)
        model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
        with torch.no_grad():
            logits = [model(torch.tensor([one])).logits[0, :-1].log_softmax(-1) for one in tokens]
        expected = [
            np.append(0.0, table.gather(1, torch.tensor(one)[1:, None])[:, 0].numpy())
            for table, one in zip(logits, tokens, strict=True)
        ]
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-4)
        stranger = EndpointModel("teacher", TeacherConfig(base_url=url), decoder_of(ModelSpec(path=str(folder / "stranger"))))
        with pytest.raises(ModelError) as raised:
            stranger.logprobs(batch)
        assert "by the tokenizer of model.path" in raised.value.problems[0].found
        remote = figures(folder, "remote", f"algorithm.distill.teachers.only.base_url={url}")
    local = figures(folder, "local", "reference.path=teacher")
    np.testing.assert_allclose(remote.to_numpy(), local.to_numpy(), rtol=2e-3, atol=1e-5)
