"""No command crashes on a damaged file of a run directory: it names the file, or does without it."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.installed import is_installed
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import read_timeline
from rlcore.run.storage.checkpoint import LOOP_STATE, MANIFEST, read_loop_state
from rlcore.run.storage.resuming import newest
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saved_run import SavedRun
from rlcore.run.storage.saver import read_rollouts
from rlcore.run.train import train
from rlcore.spi import CheckpointError, RlcoreError
from rlcore.testing.fakes import FakeTokenizer, fake_registry
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.saved_rollouts import loads as load_rollouts
from rlcore_rollout.schedule_file import rewind_schedule
from rlcore_rollout.serialization import dumps

RECIPE = """
model.path = "none"
algorithm = { name = "fake", fake = { generation_ratio = true } }
environment.name = "fake"
run.num_steps = 2
training = { prompts_per_step = 2, minibatches_per_step = 1 }
rollout = { max_prompt_tokens = 16, max_response_tokens = 8 }
logging = { rollouts_every_n_steps = 1, evaluation_answers = true }
sinks.names = []
async.max_staleness = 1
checkpoint.every_n_steps = 1
[data.evaluation]
"""
OF_REPORT = (("show",), ("show", "--evaluation"), ("trace", "-o", "trace"), ("report", "-o", "page"))
"""Commands of rlcore-report."""
COMMANDS = (
    ("status",),
    ("status", "--json"),
    *(OF_REPORT if is_installed("rlcore_report") else ()),
)
PARQUET, LAST = "rollouts/step-000002.parquet", "checkpoints/step-000002"
FILES = (
    *("recipe.toml", "metrics.jsonl", "status.json", "summary.json", "environment.json", "timeline.jsonl", "schedule.jsonl"),
    *(".lock", ".last-saved", PARQUET, "rollouts/_SHA256SUMS", "rollouts/evaluation-000002.parquet"),
    *(f"{LAST}/{name}" for name in (MANIFEST, LOOP_STATE, "rollouts.state")),
)
DEEP = 20_000
MADE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda content: content[: len(content) * 2 // 3],
    "flipped": lambda content: bytes(
        [*content[: len(content) // 2], content[len(content) // 2] ^ 1, *content[len(content) // 2 + 1 :]]
    ),
    "a list": lambda _: b"[1, 2]\n",
    "a text for each number": lambda content: _with_texts(content),
    "deep JSON": lambda _: b'{"step": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "deep TOML": lambda _: b"a = " + b"[" * DEEP + b"]" * DEEP,
    "deep keys": lambda _: b".".join([b"a"] * DEEP) + b" = 1",
    "NUL": lambda content: content[: len(content) // 2] + b"\0" * 9 + content[len(content) // 2 :],
    "no UTF-8": lambda content: b"\xff\xfe" + content,
    "large numbers": lambda _: b'{"step": 1' + b"0" * 400 + b"}\n",
    "a folder": lambda content: content,
}


def _with_texts(content: bytes) -> bytes:
    try:
        found = json.loads(content)
    except ValueError:
        return b'{"step": "one"}\n'
    if not isinstance(found, dict):
        return b"two"
    texts = {name: str(value) if type(value) in (int, float) else value for name, value in found.items()}
    return json.dumps(texts).encode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.toml").write_text(RECIPE)
    plan = prepare(folder / "recipe.toml", [f"run.directory={folder}"], registry=fake_registry())
    train(plan, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    return folder / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    if is_installed("rlcore_report"):
        monkeypatch.setattr("rlcore_report.data.pieces_of", lambda _: (None, ""))  # a tokenizer is no file of the run
    return Path(shutil.copytree(whole, tmp_path / "run"))


def outcomes(run: Path) -> Iterator[tuple[str, int, str]]:
    """Yield each command with its exit code and its message."""
    for command, *options in COMMANDS:
        result = CliRunner().invoke(cli, [command, str(run), *options])
        yield " ".join([command, *options]), result.exit_code, result.stderr
    yield "resume", *_resumed(run)


def _resumed(run: Path) -> tuple[int, str]:
    """Read the files that a resumed run reads first; return the exit code and the message."""
    directory = RunDirectory(path=run)
    try:
        if (checkpoint := newest(directory, lambda note: None)) is not None:
            state = read_loop_state(checkpoint)
            read_rollouts(checkpoint)
            directory.rewind(state.step, last_rollouts=state.step)
        directory.versions  # noqa: B018
    except RlcoreError as error:
        return error.exit_code, str(error)
    return 0, ""


def test_a_run_that_is_whole_is_shown_and_resumed(run: Path) -> None:
    assert {file for file in FILES if not (run / file).is_file()} == set()
    assert [(name, code) for name, code, _ in outcomes(run) if code] == []


def cases() -> Iterator[tuple[str, str]]:
    """Yield each file with each kind of damage that its format can have."""
    of_toml = ("deep TOML", "deep keys")
    of_json = ("deep JSON", "a list", "a text for each number", "large numbers")
    for file in FILES:
        suffix = Path(file).suffix
        for damage in MADE:
            if (damage in of_toml and suffix != ".toml") or (damage in of_json and suffix not in (".json", ".jsonl")):
                continue
            yield file, damage


@pytest.mark.wide(sample=40)
@pytest.mark.parametrize(("file", "damage"), list(cases()))
def test_a_damaged_file_crashes_nothing(run: Path, file: str, damage: str) -> None:
    path = run / file
    content = MADE[damage](path.read_bytes())
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    for name, code, said in outcomes(run):
        assert code in (0, 1, 2, CheckpointError.exit_code), f"{name}: {said}"
        assert code == 0 or path.name in said or run.name in said, f"{name}: {said}"


@pytest.mark.parametrize("file", [PARQUET, "rollouts/evaluation-000002.parquet"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_a_flipped_bit_in_rollouts_is_reported(run: Path, file: str, share: float) -> None:
    content = bytearray((run / file).read_bytes())
    content[int(len(content) * share)] ^= 4
    (run / file).write_bytes(content)
    said = {name: (code, text) for name, code, text in outcomes(run)}
    shown = "show --evaluation" if "evaluation" in file else "show"
    for command in (name for name in said if name == shown or "report" in name):
        assert said[command][0] == CheckpointError.exit_code
        assert f"{file} is damaged: found another content than was written" in said[command][1]


def resume(folder: Path, checkpoint: Path, notes: list[str] | None = None) -> None:
    """`train --resume` from a checkpoint whose manifest has the digests of its files, as where a program wrote both."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    contents = {name: (checkpoint / name).read_bytes() for name in manifest["files"]}
    manifest["files"] = {name: {"bytes": len(one), "sha256": hashlib.sha256(one).hexdigest()} for name, one in contents.items()}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    (folder / "recipe.toml").write_text(RECIPE)
    plan = prepare(folder / "recipe.toml", [f"run.directory={folder}"], registry=fake_registry())
    progress = Progress()
    progress.note = (notes if notes is not None else []).append  # type: ignore[method-assign]
    train(plan, resume=True, progress=progress, tokenizer=FakeTokenizer())


@pytest.mark.parametrize("file", [LOOP_STATE, "rollouts.state"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "a list", "deep JSON", "NUL"])
def test_no_run_goes_on_from_damaged_files_of_a_checkpoint(run: Path, file: str, damage: str) -> None:
    path = run / LAST / file
    path.write_bytes(MADE[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=file):
        resume(run.parent, run / LAST)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"position": 3},
            {"position": None},
            {"groups": 1.5},
            {"spared": 1.5},
            {"version_of_step": "1"},
            {"distribution": ()},
        ),
        *({"group": 5}, {"group": ("a", {})}, {"group": (1, 2, 3)}, {"group": (EpisodeGroup(number=0, episodes=["a"]), {})}),
    ],
    ids=str,
)
def test_no_run_goes_on_from_groups_of_other_classes(run: Path, change: dict[str, Any]) -> None:
    """Right bytes of wrong objects: the episodes that a run goes on with are episodes."""
    shutil.rmtree(run / LAST)  # groups are open behind the first step
    file = run / "checkpoints/step-000001/rollouts.state"
    saved = load_rollouts(file.read_bytes())
    assert saved.groups
    if "group" in change:
        change = {"groups": {number: dumps(change["group"]) for number in saved.groups}}
    file.write_bytes(dumps(evolve(saved, **change)))
    if change.get("groups") == {number: dumps(5) for number in saved.groups} or "distribution" in change:
        notes: list[str] = []
        resume(run.parent, file.parent, notes)
        assert "begin again" in str(notes)
        return
    with pytest.raises(CheckpointError, match=r"rollouts\.state.*damaged"):
        resume(run.parent, file.parent)


@pytest.mark.parametrize(("kept", "lacks"), [(0, "2 of the steps 1 to 2"), (2, "step 2"), (3, "")])
def test_lost_figures_are_told_when_a_run_goes_on(run: Path, kept: int, lacks: str) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:kept]))
    notes: list[str] = []
    resume(run.parent, run / LAST, notes)
    assert (f"metrics.jsonl lacks {lacks}," in str(notes)) == bool(lacks)
    assert bool(lacks) or "metrics.jsonl" not in str(notes)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"step": "two"}, "loop.json.step"),
        ({"step": -1}, "loop.json.step"),
        ({"step": None}, "loop.json.step"),
        ({"weight_version": 1.5}, "loop.json.weight_version"),
        ({"model": 3}, "loop.json.model"),
        ({"odd": 1}, "loop.json.odd"),
        ({"unlogged": {"loss": "low"}}, "loss"),
        ({"unlogged": [1]}, "loop.json.unlogged"),
    ],
    ids=str,
)
def test_a_loop_state_of_other_types_names_them(run: Path, state: dict[str, object], named: str) -> None:
    """The manifest has its digest, as where a program wrote both."""
    file = run / LAST / LOOP_STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | state))
    manifest = json.loads((run / LAST / MANIFEST).read_text())
    content = file.read_bytes()
    manifest["files"][LOOP_STATE] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (run / LAST / MANIFEST).write_text(json.dumps(manifest))
    code, said = _resumed(run)
    assert code == CheckpointError.exit_code
    assert named in said


def test_a_manifest_that_names_no_possible_file_is_damage(run: Path) -> None:
    manifest = json.loads((run / LAST / MANIFEST).read_text())
    manifest["files"]["a\0b"] = {"bytes": 1, "sha256": ""}
    (run / LAST / MANIFEST).write_text(json.dumps(manifest))
    notes: list[str] = []
    checkpoint = newest(RunDirectory(path=run), notes.append)
    assert checkpoint is not None
    assert checkpoint.name == "step-000001"
    assert "is damaged and passed over" in notes[0]


def _changed(value: Any) -> Iterator[Any]:
    """Yield a JSON value without each of its parts, and with each replaced by values of other types, at every depth."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 2))
        for key in keys:
            copy: Any = value.copy()
            del copy[key]
            yield copy
            for other in (None, True, -1, 1.5, 10**30, "x", "", [], {"a": 1}, *_changed(value[key])):
                copy = value.copy()
                copy[key] = other
                yield copy


def _damaged(content: bytes, *, is_json: bool) -> Iterator[bytes]:
    """Yield a file's content cut off, flipped and shortened at many places, and with each part of its JSON changed."""
    size = len(content)
    for place in sorted({size * share // 12 for share in range(12)}):
        yield content[:place]
        yield content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        yield content[:place] + content[place + 5 :]
    yield content + content
    yield b"null\n" + content
    lines = content.splitlines() if is_json else []
    for number in {0, len(lines) - 1} if is_json else ():
        for changed in _changed(json.loads(lines[number])):
            yield b"\n".join([*lines[:number], json.dumps(changed).encode(), *lines[number + 1 :], b""])


READERS: dict[str, Callable[[Path], object]] = {
    "status.json .lock": lambda run: pytest.importorskip("rlcore_report.run_state").run_state(RunDirectory(path=run)),
    "recipe.toml summary.json metrics.jsonl": lambda run: [
        getattr(SavedRun.find(run), name) for name in ("recipe", "summary", "metrics")
    ],
    ".parquet _SHA256SUMS": lambda run: (SavedRun.find(run).samples(), SavedRun.find(run).answers()),
    "timeline.jsonl": lambda run: read_timeline(run / "timeline.jsonl"),
    "schedule.jsonl": lambda run: rewind_schedule(run / "schedule.jsonl", 1),
    "environment.json": lambda run: RunDirectory(path=run).versions,
    "checkpoints .last-saved": lambda run: newest(RunDirectory(path=run), lambda note: None),
    LOOP_STATE: lambda run: read_loop_state(run / LAST),
}
"""The readers of files, by parts of their names."""
MOST = 60


def error_of(read: Callable[[Path], object], run: Path) -> str:
    """Return the message of the RlcoreError that a reader raises; "" where it raises none."""
    try:
        read(run)
    except RlcoreError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", FILES)
def test_every_reader_of_a_damaged_file_returns_or_names_it(run: Path, file: str) -> None:
    path = run / file
    whole, is_json = path.read_bytes(), Path(file).suffix in (".json", ".jsonl")
    if file.endswith(".json"):
        whole = json.dumps(json.loads(whole)).encode()
    readers = [read for names, read in READERS.items() if any(part in file for part in names.split())]
    contents = [*_damaged(whole, is_json=is_json)]
    for content in contents[:: len(contents) // MOST + 1]:
        path.write_bytes(content)
        for said in [error_of(read, run) for read in readers]:
            assert path.name in (said or path.name), f"{content!r:.300}: {said}"
    assert readers
