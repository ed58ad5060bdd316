"""The real trainer and generators in workers on Ray: the figures of a run in one process, also when processes are killed."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, STEPS_ALONE, Workplace, close, read_metrics, write_jsonl  # type: ignore[import-not-found]

pytestmark = pytest.mark.usefixtures("ray")
SHORT = ("run.num_steps=2", "training.prompts_per_step=8", "rollout.samples_per_prompt=8", "checkpoint.every_n_steps=1")
TWO = ("cluster.gpus_per_node=2", *SHORT)


class Listeners(threading.Thread):
    """Looks again and again for sockets that this process, and those below it, listen on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: set[str] = set()
        """Their addresses."""
        self._ended = threading.Event()

    def run(self) -> None:
        # A look takes tens of milliseconds of the interpreter from the run; what listens does so for as long as the run.
        while not self._ended.wait(2.0):
            with contextlib.suppress(psutil.Error, OSError):
                listening = [each for each in psutil.net_connections(kind="inet") if each.status == psutil.CONN_LISTEN]
                own = {process.pid for process in [psutil.Process(), *psutil.Process().children(recursive=True)]}
                self.found |= {each.laddr.ip for each in listening if each.pid in own}

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture(autouse=True)
def nothing_listens_for_other_machines() -> Iterator[None]:
    """Of all processes of a run: Ray's, the ranks and what brings them together, engines."""
    listeners = Listeners()
    listeners.start()
    yield
    listeners.end()
    addresses = {ip_address(address.removeprefix("::ffff:")) for address in listeners.found}
    assert addresses
    assert [address for address in addresses if not address.is_loopback] == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same training in one process."""
    workplace = Workplace.make(tmp_path_factory.mktemp("alone"), model)
    return workplace.train(str(workplace.folder / "grpo.toml"), *SHORT, f"run.directory={workplace.folder}")


def assert_close(run: Path, expected: Path) -> None:
    found = read_metrics(run)
    assert sum(record["updates"] for record in found[1:]) > 0
    for one, other in zip(found, read_metrics(expected), strict=True):
        assert one == {name: close(value) for name, value in other.items()}


@pytest.mark.wide  # tests/oracle has two ranks, tests/ray_execution/test_pool_groups.py resumes in another layout
def test_two_ranks_train_as_one_and_their_checkpoint_resumes_on_one(workplace: Workplace, alone: Path) -> None:
    run = workplace.train("grpo.toml", *TWO)
    assert_close(run, alone)
    workplace.train("grpo.toml", *SHORT, "run.num_steps=3", "--resume")


MATH = """
[run]
num_steps = 4
[model]
path = "{model}"
[algorithm]
name = "grpo"
[generator]
name = "vllm"
[generator.vllm]
cpu_kv_cache_gib = 0.1
[environment]
name = "math"
[environment.math]
prompt_format = "text"
instruction = "{{problem}}"
num_processes = 1
[data.train]
source = "jsonl"
path = "{data}"
prompt_field = "question"
[data.evaluation]
source = "jsonl"
path = "{data}"
prompt_field = "question"
limit = 4
[rollout]
samples_per_prompt = 8
max_prompt_tokens = 8
max_response_tokens = 4
[training]
prompts_per_step = 4
[optimizer]
learning_rate = 1e-2
[checkpoint]
every_n_steps = 1
[logging]
rollouts_every_n_steps = 0
[sinks]
names = []
"""


ENGINE = "rlcore_vllm.replicas.host"


class Killer(threading.Thread):
    """Kills, each once, a process of the generator, one that judges answers, and a rank: while they are in the midst of it.

    Before the rank it stops all engines: none can notice that its rank is gone, and no sample ends before that is noticed
    elsewhere, also where the rank's own engine has not come back yet.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_directory, self.killed = run, list[str]()
        self.outlived: list[psutil.Process] | None = None
        """Engines of the killed rank and of those beside it that were there when the first new one was."""

    def run(self) -> None:
        for number, (kind, mark) in enumerate((("judge", "rlcore_workers.process"), ("generator", ENGINE), ("rank", ""))):
            while self.num_steps() < number + 1 or not (victims := self.victims(mark)):
                time.sleep(0.02)
            engines = self.suspended() if kind == "rank" else []
            known = set(self.victims(ENGINE))
            os.kill(victims[-1], signal.SIGKILL)
            self.killed.append(kind)
        while not {*self.victims(ENGINE)} - known:
            time.sleep(0.1)
        self.outlived = [engine for engine in engines if engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE]

    def suspended(self) -> list[psutil.Process]:
        """The engines, stopped; those that are being started come and go."""
        engines = []
        for process in self.victims(ENGINE):
            with contextlib.suppress(psutil.NoSuchProcess):
                engine = psutil.Process(process)
                engine.suspend()
                engines.append(engine)
        return engines

    def num_steps(self) -> int:
        file = self.run_directory / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def victims(self, mark: str) -> list[int]:
        """Processes below this one whose command line has `mark`, or the rank 1 of its log."""
        if not mark:
            log = (self.run_directory / "logs" / "rank-1.log").read_text()
            return [int(log.rpartition("process ")[2].partition(")")[0])]
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if mark in " ".join(process.cmdline()):
                    found.append(process.pid)
        return sorted(found)


@pytest.fixture(scope="module")
def math(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe with real engines, and what it comes to in one process."""
    folder = tmp_path_factory.mktemp("math")
    # The engine's attention on CPU takes heads of at least 32.
    model = make_model(folder / "model", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)
    sums = [{"question": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(4) for b in range(3)]
    data = write_jsonl(folder / "sums.jsonl", sums)
    (folder / "math.toml").write_text(MATH.format(model=model, data=data))
    workplace = Workplace.make(folder, model)
    return folder / "math.toml", workplace.train(str(folder / "math.toml"), f"run.directory={folder}")


@pytest.mark.wide
def test_engines_in_processes_and_every_kind_killed_once(workplace: Workplace, math: tuple[Path, Path]) -> None:
    """Trained by two ranks, generated by two engines, with the metrics of an undisturbed run in one process."""
    recipe, alone = math
    killer = Killer(workplace.run("killed"))
    killer.start()
    result = workplace.rlcore("train", recipe, "run.name=killed", "cluster.gpus_per_node=2", "refit.channel=shared_memory")
    assert result.exit_code == 0, result.output
    killer.join(300)
    assert killer.killed == ["judge", "generator", "rank"]
    assert killer.outlived == []
    assert "restart 1 of 3, from the newest checkpoint" in result.stdout
    assert "the engine of rank " in result.stdout
    assert_close(workplace.run("killed"), alone)


def test_engines_in_the_ranks_own_processes(workplace: Workplace, math: tuple[Path, Path]) -> None:
    """The way of weights that is cheapest there: they change no figure, and leave the ranks' process group alone."""
    recipe, alone = math
    run = workplace.train(str(recipe), "run.name=beside", "cluster.gpus_per_node=2")
    assert not list((run / "logs").glob("**/vllm-*"))
    assert_close(run, alone)


@pytest.mark.wide
def test_one_engine_of_both_ranks(workplace: Workplace, math: tuple[Path, Path]) -> None:
    recipe, alone = math
    run = workplace.train(str(recipe), "run.name=shared", "cluster.gpus_per_node=2", "generator.vllm.tensor_parallel=2")
    assert [log.parent.name for log in (run / "logs").glob("**/vllm-*")] == ["rank-0"]
    assert_close(run, alone)


class EngineKiller(threading.Thread):
    """Kills the engine once, after so many steps."""

    def __init__(self, run: Path, num_steps: int) -> None:
        super().__init__(daemon=True)
        self.killer, self.num_steps, self.has_killed = Killer(run), num_steps, False

    def run(self) -> None:
        while self.killer.num_steps() < self.num_steps or not (victims := self.killer.victims(ENGINE)):
            time.sleep(0.02)
        os.kill(victims[-1], signal.SIGKILL)
        self.has_killed = True


APART = ("cluster.gpus_per_node=3", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")


@pytest.mark.wide  # tests/torchkit and tests/vllm_generation/channels send and take parts, on two ranks too
@pytest.mark.parametrize("trainer", [(), ("trainer.name=megatron", "trainer.megatron.tensor_parallel=2")])
def test_parts_of_two_ranks_to_an_engine_apart(workplace: Workplace, math: tuple[Path, Path], trainer: tuple[str, ...]) -> None:
    """No figure changes, those by which the engine's log-probabilities are compared with the ranks' among them."""
    recipe, alone = math
    run = workplace.train(str(recipe), "run.name=parts", *APART, "refit.channel=shards", *trainer)
    assert [log.parent.name for log in (run / "logs").glob("**/vllm-*")] == ["rank-0"]
    assert_close(run, alone)


@pytest.mark.wide
def test_parts_are_sent_once_to_two_engines_apart(workplace: Workplace, math: tuple[Path, Path]) -> None:
    """From one rank: the engines pass on to each other what they get."""
    recipe, alone = math
    places = ("cluster.gpus_per_node=3", "cluster.placement=separate", "cluster.generator_gpus_per_node=2")
    run = workplace.train(str(recipe), "run.name=passed-on", *places, "generator.vllm.replicas=2", "refit.channel=shards")
    assert {log.name for log in (run / "logs").glob("**/vllm-*")} == {"vllm-0.log", "vllm-1.log"}
    assert_close(run, alone)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [file] = (recipe.parent / "model").glob("*.safetensors")
    once = min(record["refit/sent_mib"] for record in records if "refit/sent_mib" in record)
    assert 0.9 < once * 2**20 / file.stat().st_size < 1.1


@pytest.mark.wide
def test_changes_alone_travel_and_all_after_an_engine_has_died(workplace: Workplace, math: tuple[Path, Path]) -> None:
    """In bfloat16 and at a small learning rate; by its log-probabilities the engine has the ranks' weights in each step."""
    killer = EngineKiller(workplace.run("delta"), 2)
    killer.start()
    engine = ("generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1", f"model.path={math[0].parent / 'model'}")
    options = ("model.dtype=bfloat16", "optimizer.learning_rate=1e-5", "run.name=delta", "refit.delta=device", *STEPS_ALONE)
    sizes = ("training.prompts_per_step=8", "rollout.samples_per_prompt=8")
    sums = (f"environment.arithmetic.{name}" for name in ("max_operand=2", "num_train=8", "num_evaluation=1"))
    result = workplace.rlcore("train", "grpo.toml", *APART, *engine, *options, *sizes, *sums)
    assert result.exit_code == 0, result.output
    assert killer.has_killed
    records = [json.loads(line) for line in (workplace.run("delta") / "metrics.jsonl").read_text().splitlines()]
    assert all(record["updates"] == 1 and record["token_mult_prob_error"] < 1.02 for record in records)
    whole, changes, *later = [record["refit/sent_mib"] for record in records]
    assert changes < 0.2 * whole
    assert 0.8 * whole < sum(later) < 1.5 * whole
