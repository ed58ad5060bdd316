"""The launch files: Slurm options that exist, a script that parses and requeues, a manifest with a RayJob's fields, commands
that rlcore accepts."""

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import click
import pytest
import yaml
from markdown_blocks import ROOT, blocks

from rlcore.cli.main import cli
from rlcore.config.load import read_raw
from rlcore.run.plan.sections import convert_recipe

LAUNCH = ROOT / "docs" / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
RAYJOB = LAUNCH / "rayjob.yaml"
README = LAUNCH / "README.md"
SBATCH_OPTIONS = {
    *("account", "array", "begin", "chdir", "comment", "constraint", "container", "cpus-per-gpu", "cpus-per-task"),
    *("dependency", "distribution", "error", "exclude", "exclusive", "export", "gpu-bind", "gpus", "gpus-per-node"),
    *("gpus-per-task", "gres", "hint", "hold", "input", "job-name", "licenses", "mail-type", "mail-user", "mem"),
    *("mem-per-cpu", "mem-per-gpu", "nice", "no-requeue", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-gpu"),
    *("ntasks-per-node", "open-mode", "output", "partition", "priority", "qos", "requeue", "reservation", "signal"),
    *("switches", "time", "time-min", "tmp", "wait-all-nodes", "wckey"),
}
"""Of sbatch's manual: those that such a script may need."""
SBATCH_FLAGS = {"exclusive", "hold", "no-requeue", "requeue"}
"""Those that are written without a value."""


def directives(script: str) -> dict[str, str | None]:
    """`#SBATCH` options, which sbatch reads until the first command."""
    head = re.split(r"^(?![#\n])", script, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^#SBATCH +--([\w-]+)(?:=(\S+))?$", head, re.MULTILINE)
    assert len(found) == script.count("\n#SBATCH"), "an #SBATCH line is malformed, or stands below the first command"
    return {name: value or None for name, value in found}


def accepts(arguments: list[str], directory: Path) -> None:
    """Check an `rlcore …` command against the command line, and the keys that it sets against the recipe's."""
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None, f"rlcore has no command {arguments[0]}"
    overrides = command.make_context(arguments[0], list(arguments[1:])).params["overrides"]
    recipe = directory / "base.toml"
    recipe.write_text('model.path = "model"\nalgorithm.name = "grpo"\nenvironment.name = "arithmetic"\n')
    convert_recipe(read_raw(recipe, overrides))


def rlcore_commands(script: str) -> list[list[str]]:
    """The words after `rlcore` of every such command of a shell script, line continuations joined."""
    lines = script.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"\s*(exec )?rlcore ", line)]
    return [[word for word in line if word != "&"][line.index("rlcore") + 1 :] for line in words]


def filled_in(words: list[str], values: dict[str, str]) -> list[str]:
    """Shell variables replaced; those that hold options or nothing at all left out."""
    plain = [re.sub(r"\$\{?(\w+)[^}]*\}?", lambda match: values[match[1]], word) for word in words]
    return [word for word in plain if word]


# Slurm


def test_slurm_options_exist() -> None:
    found = directives(SBATCH.read_text())
    assert found.keys() <= SBATCH_OPTIONS
    assert {"nodes", "gpus-per-node", "time", "signal"} <= found.keys()
    assert {name for name, value in found.items() if value is None} <= SBATCH_FLAGS
    assert re.fullmatch(r"\d+(:\d\d){2}", found["time"] or "")
    assert found["signal"] == "B:USR1@600"
    assert found["ntasks-per-node"] == "1"


@pytest.mark.parametrize("line", ["#SBATCH --gpu-per-node=8", "#SBATCH --nodes 2", "#SBATCH -N"])
def test_a_wrong_slurm_option_would_be_noticed(line: str) -> None:
    script = SBATCH.read_text().replace("#SBATCH --nodes=2", line)
    with pytest.raises(AssertionError):
        assert directives(script).keys() <= SBATCH_OPTIONS


def test_slurm_script_parses() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    text = SBATCH.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in text


def test_slurm_script_trains_with_keys_that_exist(tmp_path: Path) -> None:
    (words,) = rlcore_commands(SBATCH.read_text())
    values = {
        "recipe": "recipe.toml",
        "SLURM_JOB_NUM_NODES": "4",
        "devices": "cluster.gpus_per_node=8",
        "name": "x",
        "resume": "--resume",
    }
    accepts(filled_in(words, {**values, "overrides": "run.num_steps=2"}), tmp_path)


FAKES = {
    "scontrol": """#!/bin/bash
if [[ $1 == requeue ]]; then echo "requeue $2"; else printf 'localhost\\nother\\n'; fi
""",
    "srun": '#!/bin/bash\nshift\nexport SLURM_NODEID=0\nexec "$@"\n',
    "ray": """#!/usr/bin/env python3
import socket, sys
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
server = socket.create_server(("localhost", port))
while True:
    server.accept()[0].close()
""",
    "rlcore": """#!/bin/bash
trap 'echo saved; exit 130' TERM
echo "rlcore $*"
while [[ $WAITS == true ]]; do sleep 0.05; done
exit "$STATUS"
""",
}


def free_job_number() -> int:
    """A job whose port, which the script makes of its number, nobody else has taken; another one for each test run."""
    for number in range(os.getpid() % 9000, 10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 20_000 + number)) != 0:
                return number
    raise AssertionError("every port is taken")


@pytest.fixture
def slurm_job(tmp_path: Path):
    """Starts the script in a job of Slurm's variables, with stand-ins for the programs that it calls."""
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    for name, text in FAKES.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = free_job_number()
    started: list[subprocess.Popen[str]] = []

    def start(**settings: str) -> subprocess.Popen[str]:
        environment = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NAME": "rlcore",
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_PER_NODE": "h200:8",
            "WAITS": "false",
            "STATUS": "0",
            **settings,
        }
        started.append(
            subprocess.Popen(
                ["bash", SBATCH, tmp_path / "environment", "recipe.toml", "run.num_steps=2"],
                env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start, job
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_slurm_script_hands_the_job_to_the_driver(slurm_job, tmp_path: Path) -> None:
    start, job = slurm_job
    output, _ = start().communicate(timeout=300)
    keys = "cluster.nodes=2 cluster.address=auto cluster.wait_s=300 cluster.gpus_per_node=8 run.device=cuda run.num_steps=2"
    assert output == f"rlcore train recipe.toml {keys} --directory runs --name rlcore-{job}\n"
    (tmp_path / "runs" / f"rlcore-{job}").mkdir(parents=True)
    process = start()
    output, _ = process.communicate(timeout=300)
    assert output.endswith(f"--name rlcore-{job} --resume\n")
    assert process.returncode == 0


def test_slurm_script_trains_on_cpus_where_a_node_has_no_gpu(slurm_job) -> None:
    start, _ = slurm_job
    output, _ = start(SLURM_GPUS_PER_NODE="0").communicate(timeout=300)
    assert " cluster.gpus_per_node=1 run.device=cpu run.num_steps=2 " in output


def test_slurm_script_fails_where_the_run_does(slurm_job) -> None:
    start, _ = slurm_job
    process = start(STATUS="12")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 12
    assert "requeue" not in output


def test_slurm_script_saves_and_queues_again_before_the_time_limit(slurm_job) -> None:
    start, job = slurm_job
    process = start(WAITS="true")
    assert process.stdout.readline().startswith("rlcore train")
    while not catches(process.pid, signal.SIGUSR1):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=300)
    assert output.splitlines() == ["saved", f"requeue {job}"]
    assert process.returncode == 130


# Kubernetes


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict]:
    """The documents of the manifest by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(RAYJOB.read_text())}


def pods(manifest: dict[str, dict]) -> list[dict]:
    cluster = manifest["RayJob"]["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_manifest_is_a_ray_job(manifest) -> None:
    job, cluster = manifest["RayJob"], manifest["RayJob"]["spec"]["rayClusterSpec"]
    assert job["apiVersion"] == "ray.io/v1"
    assert job["spec"]["entrypoint"]
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert cluster["rayVersion"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert isinstance(group["rayStartParams"], dict)
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "IMAGE"  # no registry is anyone's but the user's
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]


def test_manifest_mounts_volumes_that_it_defines(manifest) -> None:
    for pod in pods(manifest):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes.keys()
        assert volumes["launch"]["configMap"]["name"] == manifest["ConfigMap"]["metadata"]["name"]
        assert volumes["memory"]["emptyDir"]["medium"] == "Memory"


def test_manifest_starts_a_script_that_trains_on_every_node(manifest, tmp_path: Path) -> None:
    files = manifest["ConfigMap"]["data"]
    entrypoint = manifest["RayJob"]["spec"]["entrypoint"].split()
    script = files[Path(entrypoint[-1]).name]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    (words,) = rlcore_commands(script)
    accepts(filled_in(words, {"resume": "--resume"}), tmp_path)
    workers = manifest["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert f"cluster.nodes={1 + sum(group['replicas'] for group in workers)}" in words
    assert f"cluster.gpus_per_node={pods(manifest)[0]['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in words


def test_manifest_holds_a_recipe_that_is_accepted(manifest, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(manifest["ConfigMap"]["data"]["recipe.toml"])
    converted, _ = convert_recipe(read_raw(recipe, ()))
    run = f"{converted.run.directory}/{converted.run.name}"
    assert f"[ -d {run} ]" in manifest["ConfigMap"]["data"]["train.sh"]  # where the script looks for a run to resume


# Their document


def test_readme_has_commands_that_exist(tmp_path: Path) -> None:
    consoles = [block.text for block in blocks(README) if block.language == "console"]
    lines = [line[2:] for text in consoles for line in text.splitlines()]
    trains = [line.partition("-- rlcore ")[2] for line in lines if "-- rlcore " in line]
    assert len(trains) == 1
    accepts(shlex.split(trains[0]), tmp_path)
    for name in re.findall(r"docs/launch/([\w.]+)", "\n".join(lines)):
        assert (LAUNCH / name).is_file()
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text()):
        assert (LAUNCH / target).exists()
