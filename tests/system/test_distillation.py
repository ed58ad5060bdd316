"""A student and its teacher, with real backends: how far they are apart, transformers says for itself."""

import contextlib
import shutil
from pathlib import Path

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, Workplace, expect_failure, read_metrics, write_jsonl  # type: ignore[import-not-found]

DISTILL = """
[run]
name = "distill"
num_steps = 110
[model]
path = "student"
[reference]
path = "teacher"
[algorithm]
name = "distill"
[environment]
name = "unrewarded"
[data.train]
source = "jsonl"
path = "prompts.jsonl"
[rollout]
samples_per_prompt = 128
max_prompt_tokens = 8
max_response_tokens = 2
[training]
prompts_per_step = 2
[optimizer]
learning_rate = 5e-3
betas = [0.9, 0.95]
[schedule]
decay = "cosine"
min_learning_rate_ratio = 0.0
[evaluation]
at_start = false
at_end = false
[checkpoint]
export = "hf"
[logging]
rollouts_every_n_steps = 0
[sinks]
names = []
"""
PROMPTS = ("0+0=", "0+1=")
TEMPERATURE = 0.8
ONE_STEP = (
    "run.num_steps=1",
    "rollout.samples_per_prompt=16",
    f"rollout.temperature={TEMPERATURE}",
    "logging.rollouts_every_n_steps=1",
    "checkpoint.at_end=false",
)


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, prompts, and two models of different families and sizes with one vocabulary."""
    folder = tmp_path_factory.mktemp("school")
    shape = {"alphabet": DIGITS, "max_length": 64}
    make_model(folder / "teacher", "llama", seed=3, hidden_size=48, num_layers=3, initializer_range=0.15, **shape)
    make_model(folder / "student", "qwen3", hidden_size=64, **shape)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    (folder / "distill.toml").write_text(DISTILL)
    return folder


def loaded(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def divergence(student: Path, teacher: Path) -> float:
    """KL(student ‖ teacher) in nats per token of answers to PROMPTS of at most two tokens, over all of them."""
    end = AutoTokenizer.from_pretrained(student).eos_token_id
    prompts = torch.tensor([AutoTokenizer.from_pretrained(student)(prompt)["input_ids"] for prompt in PROMPTS])
    policy, other = loaded(student), loaded(teacher)

    @torch.no_grad()
    def of(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine, theirs = (model(tokens).logits[:, -1].log_softmax(-1) for model in (policy, other))
        return mine.exp(), (mine.exp() * (mine - theirs)).sum(-1)

    first, apart = of(prompts)
    total, num_tokens = apart.sum(), float(len(prompts))
    for token in range(first.shape[1]):
        if token != end:
            _, then = of(torch.cat([prompts, torch.full_like(prompts[:, :1], token)], 1))
            total, num_tokens = total + (first[:, token] * then).sum(), num_tokens + float(first[:, token].sum())
    return float(total) / num_tokens


@pytest.mark.wide
def test_a_student_reaches_its_teacher(school: Path) -> None:
    with contextlib.chdir(school):
        run = Workplace(school).train("distill.toml")
    records = read_metrics(run)
    before = divergence(school / "student", school / "teacher")
    assert records[0]["reverse_kl"] == pytest.approx(before, rel=0.25), "an estimate from 256 samples"
    assert divergence(run / "model", school / "teacher") < 0.01 < 0.5 < before


@pytest.mark.parametrize(
    ("algorithm", "found"), [("distill", "algorithm 'distill', which reads no"), ("dapo", "environment 'unrewarded'")]
)
def test_groups_are_not_replaced_by_rewards_that_nobody_gives(school: Path, algorithm: str, found: str) -> None:
    with contextlib.chdir(school):
        options = (f"algorithm.name={algorithm}", "rollout.dynamic_sampling=true")
        refused = Workplace(school).rlcore("check", "distill.toml", *options)
    assert refused.exit_code == 2, refused.output
    told = " ".join(refused.output.split())
    assert "rollout.dynamic_sampling: found true" in told
    assert found in told


DIVIDED_TEACHER = ("cluster.gpus_per_node=3", "cluster.reference_gpus_per_node=2", "reference.trainer={tensor_parallel=2}")
DIVIDED_STUDENT = (
    "cluster.gpus_per_node=3",
    "cluster.reference_gpus_per_node=1",
    "trainer.megatron.tensor_parallel=2",
    "reference.trainer={tensor_parallel=1}",
)


@pytest.mark.wide(keep=["fsdp2-inside"])
@pytest.mark.parametrize(
    ("trainer", "place"),
    [("fsdp2", ()), ("fsdp2", DIVIDED_TEACHER), ("megatron", ()), ("megatron", DIVIDED_STUDENT)],
    ids=["fsdp2-inside", "fsdp2-apart", "megatron-inside", "megatron-apart"],
)
def test_the_loss_sees_the_teachers_log_probabilities(school: Path, trainer: str, place: tuple[str, ...]) -> None:
    """The loss and the norm of its gradient are those that transformers' models have in float64, with the teacher beside the
    student or in processes of its own, divided otherwise than the student is."""
    name = f"run.name={trainer}-{len(place)}"
    with contextlib.chdir(school):
        run = Workplace(school).train("distill.toml", *ONE_STEP, name, f"trainer.name={trainer}", *place)
    (record,) = read_metrics(run)
    samples = pandas.read_parquet(run / "rollouts" / "step-000001.parquet")
    student, teacher, gaps, weighted = loaded(school / "student"), loaded(school / "teacher"), [], []
    for sample in samples.itertuples():
        tokens, said = torch.tensor([sample.tokens.tolist()]), torch.from_numpy(sample.loss_mask[1:])
        mine, theirs = (
            (model(tokens).logits / TEMPERATURE).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[said, 0]
            for model in (student, teacher)
        )
        gaps.append((mine - theirs).detach())
        weighted.append(gaps[-1] * mine)
    expected = float(torch.cat(gaps).mean())
    assert record["reverse_kl"] == pytest.approx(expected, abs=1e-5)
    assert record["loss"] == pytest.approx(expected, abs=1e-5)
    torch.cat(weighted).mean().backward()
    norm = float(torch.cat([weight.grad.flatten() for weight in student.parameters()]).norm())
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_texts_of_the_teacher_teach_too(school: Path, tmp_path: Path) -> None:
    tokenizer, teacher = AutoTokenizer.from_pretrained(school / "teacher"), loaded(school / "teacher")
    torch.manual_seed(0)
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]] * 64)
        with torch.no_grad():
            tokens = torch.multinomial(teacher(ids).logits[:, -1].softmax(-1), 1)
        rows += [
            {"prompt": prompt, "completion": tokenizer.decode(token)} for token in tokens if token != tokenizer.eos_token_id
        ]
    texts = write_jsonl(tmp_path / "texts.jsonl", rows)
    options = ("algorithm.distill.samples=teacher", f"data.train.path={texts}", f"training.prompts_per_step={len(rows)}")
    with contextlib.chdir(school):
        options = (*options, "run.name=texts", "checkpoint.export=none")
        run = Workplace(school).train("distill.toml", *options, "run.num_steps=10")
        found = [record["forward_kl"] for record in read_metrics(run)]
        assert found[-1] < 0.5 * found[0]
        # What was kept of the teacher's log-probabilities is not taken for another's.
        make_model(tmp_path / "stranger", "llama", seed=5, alphabet=DIGITS, max_length=64, initializer_range=0.3)
        result = Workplace(school).rlcore(
            "train",
            "distill.toml",
            *options,
            "run.num_steps=11",
            "--resume",
            "--allow-changes",
            f"reference.path={tmp_path / 'stranger'}",
        )
        assert result.exit_code == 0, result.stderr
    apart = likelihood(tmp_path / "stranger", rows) - likelihood(school / "teacher", rows)
    assert abs(apart) > 0.4
    assert read_metrics(run)[-1]["forward_kl"] == pytest.approx(found[-1] + apart, abs=0.2)


def likelihood(model: Path, rows: list[dict[str, str]]) -> float:
    """The mean log-probability of a token of the completions, each of one token and the end."""
    tokenizer, policy, total = AutoTokenizer.from_pretrained(model), loaded(model), 0.0
    for row in rows:
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
        total += float(logprobs[-3, ids[-2]] + logprobs[-2, ids[-1]])
    return total / (2 * len(rows))


def test_what_cannot_teach_is_refused(school: Path, tmp_path: Path) -> None:
    """Another vocabulary, or one with the same tokens by other numbers; no teacher at all; one that nothing compares with."""
    make_model(tmp_path / "letters", "qwen3", alphabet="abcdefghijklmn")
    make_model(tmp_path / "reordered", "qwen3", alphabet=DIGITS[::-1])
    make_model(tmp_path / "small", "qwen3", alphabet="01")
    (school / "alone.toml").write_text(DISTILL.replace('[reference]\npath = "teacher"\n', ""))
    workplace, other = Workplace(school), "run.name=refused"
    with contextlib.chdir(school):
        for name in ("letters", "reordered"):
            expect_failure(
                workplace.rlcore("train", "distill.toml", other, f"reference.path={tmp_path / name}"),
                2,
                "reference.path",
                "tokens",
                "the same vocabulary",
            )
        found = workplace.rlcore("train", "distill.toml", other, f"reference.path={tmp_path / 'small'}")
        expect_failure(found, 2, "reference.path", "vocab_size")
        expect_failure(workplace.rlcore("train", "alone.toml", other), 2, "reference: found no such section", "its teacher")
        expect_failure(
            workplace.rlcore("train", "distill.toml", other, "algorithm.name=grpo"), 2, "reference: found the section"
        )
        missing = workplace.rlcore("train", "distill.toml", other, "reference.path=runs/nowhere")
        expect_failure(missing, 2, "runs/nowhere", "no such directory")
        unknown = workplace.rlcore("train", "distill.toml", other, "reference.path=nobody/nothing")
        expect_failure(unknown, 5, "reference.path: found 'nobody/nothing'")


def test_another_teacher_makes_another_run(school: Path, tmp_path: Path) -> None:
    shutil.copytree(school / "teacher", tmp_path / "moved")
    make_model(tmp_path / "other", "llama", seed=4, alphabet=DIGITS)
    workplace = Workplace(school)
    with contextlib.chdir(school):
        workplace.train("distill.toml", "run.name=again", "run.num_steps=1", "rollout.samples_per_prompt=4")
        again = ("--resume", "run.name=again", "run.num_steps=2", "rollout.samples_per_prompt=4")
        other = workplace.rlcore("train", "distill.toml", *again, f"reference.path={tmp_path / 'other'}")
        expect_failure(other, 6, "reference.path", "another model")
        moved = workplace.rlcore("train", "distill.toml", *again, f"reference.path={tmp_path / 'moved'}")
        assert moved.exit_code == 0, moved.stderr
