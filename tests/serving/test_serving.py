"""`rlcore serve`: what a name stands for, which plugin serves it, and what is said when nothing can."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen
from click.testing import CliRunner, Result
from huggingface_hub import constants

import rlcore.run.plan.sections
import rlcore_serve.generator_server
import rlcore_serve.serving
from rlcore.cli.main import cli
from rlcore.config.model import ModelConfig
from rlcore.registry.discovery import Entry, Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import ModelSpec, Provider, capabilities
from rlcore.testing.fakes import (
    FAKE_ALGORITHM,
    FAKE_ENVIRONMENT,
    FAKE_GENERATOR,
    FakeTokenizer,
)
from rlcore_serve.generator_server import Address, Note, serve_generator

from .exporting_trainer import RECIPE, TRAINER


@frozen(kw_only=True)
class Request:
    """What reached the server."""

    entry: Entry
    config: object
    model: ModelSpec
    chat: ModelConfig
    device: str
    address: Address
    tool_parser: str
    max_sequence_length: int | None


SERVED: list[Request] = []


def record(entry: Entry, config: object, *, note: Note, **options: Any) -> None:
    """A server that ends at once, as by Ctrl-C."""
    SERVED.append(Request(entry=entry, config=config, **options))
    note("ready")
    raise KeyboardInterrupt


def generator(name: str, priority: int, **options: Any) -> Provider:
    """A generator of this name."""
    return evolve(FAKE_GENERATOR, name=name, priority=priority, **options)


def registry(*generators: Provider) -> Registry:
    return Registry.from_providers(
        {
            "trainer": [TRAINER],
            "generator": [FAKE_GENERATOR, *generators],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "recipe.toml").write_text(RECIPE)
    overrides = [f"run.directory={folder / 'runs'}", "run.name=first"]
    train(
        prepare(folder / "recipe.toml", overrides, registry=registry()),
        resume=False,
        progress=Progress(),
        tokenizer=FakeTokenizer(),
    )
    return folder / "runs" / "first"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(finished_run, tmp_path / "first"))


@pytest.fixture
def port() -> int:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Serve = Callable[..., Result]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, port: int) -> Serve:
    """Runs `rlcore serve` with the fakes and these generators besides."""
    SERVED.clear()
    monkeypatch.setattr(rlcore_serve.serving, "serve_generator", record)
    both = (generator("little", 1), generator("large", 2))

    def invoke(*arguments: str | Path, generators: tuple[Provider, ...] = both) -> Result:
        monkeypatch.setattr(rlcore.run.plan.sections, "discover", lambda disabled: registry(*generators))
        return CliRunner().invoke(cli, ["serve", *map(str, arguments), "--port", str(port)])

    return invoke


def test_a_runs_newest_checkpoint_is_exported_once_and_served(serve: Serve, run: Path) -> None:
    result = serve(run)
    assert result.exit_code == 0, result.stderr
    request = SERVED[0]
    exported = run / "exports" / "step-000002"
    assert request.model.path == str(exported)
    assert (request.address.host, request.address.name, request.address.api_key) == ("127.0.0.1", "first", None)
    assert request.max_sequence_length is None
    assert request.chat.chat_template == "{{ messages }}"
    assert isinstance(request.config, FAKE_GENERATOR.config)
    content = json.loads((exported / "config.json").read_text())
    assert content["version"] == 2
    assert "exporting" in result.stderr
    assert "with fake 0 of in-process" in result.stderr
    assert result.stderr.endswith("ready\n")
    again = serve(run, "--name", "mine", "--max-length", "20", "--api-key", "secret")
    assert "exporting" not in again.stderr
    assert (SERVED[1].address.name, SERVED[1].address.api_key, SERVED[1].max_sequence_length) == ("mine", "secret", 20)


def test_a_checkpoint_can_be_named_in_two_ways(serve: Serve, run: Path) -> None:
    assert serve(run, "--checkpoint", "step-1").exit_code == 0
    assert serve(run / "checkpoints" / "step-000001").exit_code == 0
    assert [request.model.path for request in SERVED] == [str(run / "exports" / "step-000001")] * 2
    first, second = (json.loads((run / "exports" / "step-000001" / "config.json").read_text()) for _ in range(2))
    assert first == second
    assert first["version"] == 1


def test_an_export_of_a_checkpoint_that_was_written_anew_is_made_anew(serve: Serve, run: Path) -> None:
    serve(run)
    manifest = run / "checkpoints" / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    assert "exporting" in serve(run).stderr


def test_a_runs_exported_model_comes_first(serve: Serve, run: Path) -> None:
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert serve(run).exit_code == 0
    assert SERVED[0].model.path == str(run / "model")
    assert not (run / "exports").exists()


def test_damaged_checkpoints_are_passed_over_and_named_ones_refused(serve: Serve, run: Path) -> None:
    next((run / "checkpoints" / "step-000002" / "trainer").iterdir()).write_text("{}")
    result = serve(run)
    assert "step-000002 is damaged and passed over" in result.stderr
    assert SERVED[0].model.path.endswith("step-000001")
    named = serve(run, "--checkpoint", "step-2")
    assert named.exit_code == 6
    assert "is no intact checkpoint" in named.stderr
    shutil.rmtree(run / "checkpoints")
    assert "holds neither an exported model nor a checkpoint" in serve(run).stderr


def test_a_model_directory_and_a_hub_name_are_served_as_they_are(serve: Serve, tmp_path: Path) -> None:
    model = tmp_path / "little-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert serve(model, "run.device=cpu", "model.dtype=float32", "model.trust_remote_code=true").exit_code == 0
    assert serve("someone/model", "model.revision=main").exit_code == 0
    local, remote = SERVED
    assert (local.model.path, local.address.name) == (str(model), "little-model")
    assert (local.model.dtype, local.device) == ("float32", "cpu")
    assert local.model.trust_remote_code
    assert (remote.model.path, remote.address.name, remote.model.revision) == ("someone/model", "someone/model", "main")


def test_the_generator_is_the_one_named_or_the_recipes(serve: Serve, run: Path) -> None:
    assert "with little" in serve(run, "--generator", "little").stderr
    assert "with little" in serve(run, "generator.name=little").stderr
    assert "with large" in serve(run, "generator.name=auto").stderr
    assert "with fake" in serve(run).stderr


def test_a_generator_that_reads_no_weights_serves_nothing(serve: Serve, run: Path) -> None:
    lacking = FAKE_GENERATOR.capabilities - {capabilities.OWN_WEIGHTS}
    result = serve(run, "--generator", "empty", generators=(generator("empty", 9, capabilities=lacking),))
    assert result.exit_code == 3
    assert "lacks the capability 'own_weights'" in result.stderr
    assert "with fake" in serve(run, generators=(generator("empty", 9, capabilities=lacking),)).stderr


def test_a_generator_of_another_model_serves_nothing(serve: Serve, run: Path) -> None:
    """Its clients would be answered by a model that the command does not name; nothing is exported for it either."""
    able = {name for name in FAKE_GENERATOR.capabilities if not name.startswith("refit.")}
    result = serve(run, "--generator", "remote", generators=(generator("remote", 9, capabilities=able),))
    assert result.exit_code == 3
    assert "step-000002" in result.stderr
    assert not SERVED
    assert not (run / "exports").exists()
    reading = generator("local", 9, capabilities=able, reads_model=True)
    assert serve("some/model", "--generator", "local", generators=(reading,)).exit_code == 0


def test_without_a_usable_generator_the_installed_ones_are_listed(serve: Serve, run: Path) -> None:
    broken = generator("broken", 9, unavailable=lambda: "its library is missing: pip install library")
    result = serve(run, "generator.name=broken", generators=(broken,))
    assert result.exit_code == 3
    assert "broken" in result.stderr
    assert "its library is missing" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{run}", "--checkpoint", "step-7"), 6, "found no step-7 in"),
        (("{run}", "generator.large.speed=9"), 2, "generator.large.speed: found an unknown key"),
        (("{run}/checkpoints",), 2, "a directory that is neither; expected a run directory"),
        (("{run}/recipe.toml",), 2, "a file that is neither"),
        (("{run}/../frist",), 2, "/frist, which does not exist; expected a run directory"),
        (("{run}/../frist",), 2, "/../first?"),
        (("./some/model",), 2, "./some/model, which does not exist"),
        (("tests/frist",), 2, "tests/frist, which does not exist"),
        (("runs/frist",), 2, "runs/frist, which does not exist"),
        (("",), 2, "nothing, which does not exist"),
        (("some/model", "--checkpoint", "step-1"), 2, "--checkpoint: found step-1, with some/model"),
        (("some/model", "--host", "no.such.host.invalid"), 2, "--host: found no.such.host.invalid"),
        (("some/model", "model.pth=3"), 2, "Did you mean"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(
    serve: Serve, run: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = serve(*(argument.format(run=run) for argument in arguments))
    assert result.exit_code == code, result.stderr
    assert message in result.stderr
    assert not SERVED


def test_a_port_that_is_taken_is_one_clear_message(serve: Serve, run: Path, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        result = serve(run)
    assert result.exit_code == 2
    assert f"--port: found {port} on 127.0.0.1: address already in use; expected a port that is free" in result.stderr
    assert not (run / "exports").exists()


def test_a_checkpoint_of_another_model_is_refused(serve: Serve, run: Path) -> None:
    result = serve(run, "model.path=another")
    assert result.exit_code == 6
    assert "belongs to another model" in result.stderr
    assert not (run / "exports").exists()


def test_a_hub_out_of_reach_is_told_before_anything_is_asked_of_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as refusing:  # nothing else can take its port meanwhile
        refusing.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{refusing.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(rlcore_serve.serving, "serve_generator", serve_generator)
        asked: list[str] = []
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path, **_: asked.append("tokenizer"))
        result = serve("no-such/model", generators=(evolve(generator("large", 2), reads_model=True),))
    assert asked == []
    assert result.exit_code == 5, result.stderr
    assert "RUN_OR_MODEL: found 'no-such/model', which is no directory here, while the Hub cannot be reached" in result.stderr
    assert "HF_ENDPOINT" in result.stderr


def test_a_model_that_is_nowhere_is_named_and_not_its_length(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name without a slash may be one on the Hub: that it is none is seen when its files are fetched."""
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlcore_serve.serving, "serve_generator", serve_generator)
    monkeypatch.setattr(rlcore_serve.generator_server, "model_file", lambda model, name: None)
    result = serve("frist", generators=(evolve(generator("large", 2), reads_model=True),))
    assert result.exit_code == 5, result.stderr
    assert "RUN_OR_MODEL: found 'frist', which is no directory here and did not load from the Hub" in result.stderr
    assert "Did you mean first?" in result.stderr
    assert "--max-length" not in result.stderr


@contextmanager
def hub_without_models(monkeypatch: pytest.MonkeyPatch, status: int) -> Iterator[None]:
    """A Hub that answers each request as one for a repository that it does not show."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("status", [401, 404])
def test_a_name_that_the_hub_does_not_know_is_no_defect(serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """As the Hub answers who is not logged in and who is: it does not tell a private model from none."""
    monkeypatch.setattr(rlcore_serve.serving, "serve_generator", serve_generator)
    with hub_without_models(monkeypatch, status):
        result = serve("no-such/model", generators=(evolve(generator("large", 2), reads_model=True),))
    assert result.exit_code == 5, result.stderr
    assert "RUN_OR_MODEL: found 'no-such/model', which is no directory here and did not load from the Hub" in result.stderr
    assert "HF_TOKEN" in result.stderr
    assert "defect" not in result.stderr
