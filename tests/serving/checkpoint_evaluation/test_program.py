"""One evaluation: what the program is given, what becomes of one that fails, and of a server that does not start."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore_serve.checkpoint_evaluation.program import Evaluation, Outcome, evaluate


@pytest.fixture
def outcome_of(tmp_path: Path) -> Any:
    def measured(*command: str, **changed: Any) -> Outcome:
        wanted: dict[str, Any] = {
            "directory": tmp_path / "step-000010",
            "step": 10,
            "run_directory": tmp_path,
            "command": command,
            "variables": {**os.environ, "COLOUR": "green"},
            "server_variables": {**os.environ},
            "serve": None,
            "result_file": None,
            "result_key": None,
        }
        return evaluate(None, Evaluation(**(wanted | changed)))

    return measured


def test_a_program_gets_its_places_and_variables(outcome_of: Any, tmp_path: Path) -> None:
    script = 'printf "%s\\n" "$@" "$COLOUR" > seen; echo {} oops >&2; echo "{\\"n\\": $#}"'
    (tmp_path / "measure.sh").write_text(script.replace("> seen", f"> {tmp_path}/seen"))
    outcome = outcome_of("sh", f"{tmp_path}/measure.sh", "{model}", "{step}", "{run_directory}", "{output}/x", '{"a": {step}}')
    assert outcome == Outcome(figures={"checkpoint_eval/n": 5.0})
    own = tmp_path / "step-000010"
    expected = [f"{own}/model", "10", str(tmp_path), f"{own}/output/x", '{"a": 10}', "green"]
    assert (tmp_path / "seen").read_text().splitlines() == expected
    assert (own / "stderr.log").read_text() == "{} oops\n"
    assert (own / "output").is_dir()
    assert {file.stat().st_mode & 0o777 for file in own.glob("*.log")} == {0o600}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "{\\"n\\": 1}"; exit 3', "sh ended with exit code 3"),
        ("kill -KILL $$", "sh ended with signal SIGKILL"),
        ("echo done", "it printed no line that is a JSON object; the last is 'done'"),
    ],
)
def test_a_program_that_fails_leaves_no_figures(outcome_of: Any, script: str, message: str) -> None:
    assert outcome_of("sh", "-c", script) == Outcome(failure=message)


@pytest.mark.parametrize("script", ["kill -TERM $$", "kill -HUP $$", "sh -c 'kill -INT $$'; exit $?", "exit 143"])
def test_what_stops_whole_jobs_says_nothing_of_the_model(outcome_of: Any, script: str) -> None:
    """Shells tell of a signal by their exit code."""
    assert outcome_of("sh", "-c", script).was_stopped


def test_files_of_an_earlier_attempt_are_no_figures(outcome_of: Any, tmp_path: Path) -> None:
    output = tmp_path / "step-000010" / "output"
    output.mkdir(parents=True)
    (output / "r.json").write_text('{"n": 1}')
    assert outcome_of("true", result_file="*.json").failure == f"it wrote no file *.json below {output}"
    assert outcome_of("sh", "-c", 'echo "{\\"n\\": 2}" > {output}/r.json', result_file="*.json").figures == {
        "checkpoint_eval/n": 2.0
    }


def test_a_program_that_is_none_is_named(outcome_of: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    os.chmod(tmp_path / "text", 0o644)
    assert "text does not start: " in outcome_of(str(tmp_path / "text")).failure


def test_a_server_that_does_not_start_is_the_failure(outcome_of: Any, tmp_path: Path) -> None:
    outcome = outcome_of("touch", f"{tmp_path}/ran", serve=("--generator", "nobody"))
    assert outcome.failure.startswith("rlcore serve ended with exit code ")
    assert outcome.failure.endswith("before it answered; server.log says more")
    assert "step-000010/model" in (tmp_path / "step-000010" / "server.log").read_text()
    assert not (tmp_path / "ran").exists()


SERVER = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])
with socket.socket() as another:  # which got this port, or looks for any one
    try:
        another.bind(("127.0.0.1", port))
    except OSError:
        pass
    else:
        sys.exit(3)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no port can be kept for another process")
def test_the_servers_port_is_kept_for_it_until_it_listens(outcome_of: Any, tmp_path: Path) -> None:
    """It loads a model first, and another's server at its port would be taken for it."""
    package = tmp_path / "path" / "rlcore"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SERVER)
    variables = {**os.environ, "PYTHONPATH": str(package.parent)}
    outcome = outcome_of("sh", "-c", 'echo "{\\"n\\": {port}}"', serve=(), server_variables=variables)
    assert outcome.failure is None
    assert outcome.figures["checkpoint_eval/n"] > 0


def test_a_key_of_the_server_stands_in_no_list_of_processes(outcome_of: Any, tmp_path: Path) -> None:
    package = tmp_path / "path" / "rlcore"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    seen = "import os, sys; print(sys.argv[1:], os.environ['RLCORE_API_KEY']); sys.exit(5)"
    (package / "__main__.py").write_text(seen)
    variables = {**os.environ, "PYTHONPATH": str(package.parent)}
    for serve in (("--api-key", "one"), ("--api-key=one",)):
        outcome = outcome_of("true", serve=(*serve, "model.dtype=float32"), server_variables=variables)
        assert outcome.failure is not None
        printed = (tmp_path / "step-000010" / "server.log").read_text()
        assert printed.endswith("'model.dtype=float32'] one\n")
        assert "--api-key" not in printed
