"""A generator that lies about its log-probabilities: what is refused, said and kept; the documented way finds it out."""

import re
from pathlib import Path

import numpy as np
import pandas
import pytest

from .system_support import (  # type: ignore[import-not-found]
    Site,
    Workplace,
    checkpoints,
    expect_failure,
    read_metrics,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "train-inference-agreement.md"
LIAR = '''
import numpy as np
from attrs import evolve
from rlcore.spi import hookimpl

class Liar:
    """Of every other token that weight version 2 samples, reports a log-probability that is too high by 1."""

    @hookimpl(wrapper=True)
    def stream(self, request):
        deliver = request.feed.deliver

        def lie(samples, result):
            wrong = (np.arange(len(result.tokens)) % 2 == 0) & (result.weight_versions == 2) & (result.logprobs < -1)
            deliver(samples, evolve(result, logprobs=result.logprobs + wrong.astype(np.float32)))

        request.feed.deliver = lie
        return (yield)

OBSERVER = Liar()
'''
OPTIONS = (
    "generator.name=transformers",
    "run.num_steps=6",
    "run.seed=1",
    "rollout.samples_per_prompt=8",
    "checkpoint.every_n_steps=0",
    "evaluation.at_start=false",
    "training.max_token_mult_prob_error=1.3",
)


def test_a_generator_that_lies_is_found_out(
    workplace: Workplace, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = workplace.train("grpo.toml", *OPTIONS, "run.name=whole")
    honest = read_metrics(whole)
    assert all(abs(record["token_mult_prob_error"] - 1) < 5e-4 for record in honest if record["updates"])
    step = next(int(record["step"]) for record in honest if record["weight_version"] == 3)
    assert not (whole / "logprob_mismatch").exists()

    site.install("acme-liar", LIAR, {"rlcore.observers": {"liar": "OBSERVER"}})
    result = workplace.rlcore("train", "grpo.toml", *OPTIONS, "run.name=lied", 'observers.names=["liar"]')
    run = workplace.run("lied")
    expect_failure(
        result,
        13,
        f"step {step}: generator and trainer disagree on the sampled tokens: token_mult_prob_error is 1.",
        "expected at most 1.3 (training.max_token_mult_prob_error)",
        f"runs/lied/logprob_mismatch/step-{step:06d}.parquet",
        "docs/train-inference-agreement.md",
        f"The state after step {step - 1} is in",
    )
    assert checkpoints(run) == [f"step-{step - 1:06d}"]
    samples = pandas.read_parquet(run / "logprob_mismatch" / f"step-{step:06d}.parquet")
    for _, sample in samples.iterrows():
        lied = sample["differences"][sample["loss_mask"]]
        np.testing.assert_allclose(lied, np.where(lied < -0.5, -1.0, 0.0), atol=1e-4, err_msg="of the unchanged weights")
    assert "position  version" in (run / "logprob_mismatch" / f"step-{step:06d}.txt").read_text()

    # As the document says, from here on without the liar, which is installed but not named.
    workplace.train("grpo.toml", *OPTIONS, "run.name=lied", "--resume", f"run.num_steps={step - 1}", "checkpoint.export=hf")
    printed = run_examples(run, step, monkeypatch, capsys)
    assert re.search(r"generation_logprobs: off by (1\.00|0\.99)", printed), printed
    assert re.search(r"trainer_logprobs: off by 0\.000", printed), printed
    assert "share above 0 of those: 0.0\n" in printed

    workplace.train("grpo.toml", *OPTIONS, "run.name=lied", "--resume")
    assert read_metrics(run) == honest


@pytest.mark.wide(keep=["fsdp2"])
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_dropout_neither_makes_a_lie_nor_hides_one(workplace: Workplace, site: Site, trainer: str) -> None:
    """What adapters drop in a train step is no part of the policy that samples are compared with, or weighed by."""
    options = (
        *OPTIONS,
        f"trainer.name={trainer}",
        "lora.dropout=0.3",
        "optimizer.learning_rate=3e-2",
        "algorithm.grpo.previous_logprobs=trainer",
    )
    honest = [record for record in read_metrics(workplace.train("grpo.toml", *options)) if record["updates"]]
    for record in honest:
        assert abs(record["token_mult_prob_error"] - 1) < 5e-4
        assert record["importance_weight"] == pytest.approx(1.0, abs=5e-4)
    assert max(record["ratio_max"] for record in honest) > 1.05, "nothing was dropped"

    site.install("acme-liar", LIAR, {"rlcore.observers": {"liar": "OBSERVER"}})
    result = workplace.rlcore("train", "grpo.toml", *options, "run.name=lied", 'observers.names=["liar"]')
    expect_failure(result, 13, "token_mult_prob_error is 1.", "The update was refused and changed nothing")


def run_examples(run: Path, step: int, monkeypatch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str]) -> str:
    """What the document's Python blocks print in a run directory."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    output.readouterr()
    with monkeypatch.context() as patch:
        patch.chdir(run)
        for block in blocks:
            assert "step-000003" in block
            exec(compile(block.replace("step-000003", f"step-{step:06d}"), DOCUMENT.name, "exec"), {})
    return output.readouterr().out
