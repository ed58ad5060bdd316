"""The export of a checkpoint, while other servers begin and the run goes on."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import CheckpointError, SaveStateRequest, SaveStateResult, hookimpl
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FakeTokenizer
from rlcore_serve.serving import Serving, find_target, prepare_serving, served_model

from .exporting_trainer import RECIPE, TRAINER, ExportingTrainer


@pytest.fixture
def registry() -> Registry:
    return Registry.from_providers(
        {
            "trainer": [TRAINER],
            "generator": [FAKE_GENERATOR],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


@pytest.fixture
def run(tmp_path: Path, registry: Registry) -> Path:
    """A run with checkpoints."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    plan = prepare(tmp_path / "recipe.toml", [f"run.directory={tmp_path / 'runs'}"], registry=registry)
    train(plan, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    return tmp_path / "runs" / "run"


def prepared(run: Path, registry: Registry) -> Serving:
    return prepare_serving(find_target(str(run), None, lambda _: None), (), None, registry=registry)


def test_of_two_servers_that_begin_together_one_exports(run: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    save, exported, found, notes = ExportingTrainer.save_state, list[Path](), list[str](), list[str]()
    both_export = threading.Event()
    other = threading.Thread(target=lambda: found.append(served_model(prepared(run, registry), notes.append)))

    def slowly(self: ExportingTrainer, request: SaveStateRequest) -> SaveStateResult:
        result: SaveStateResult = save(self, request)
        if request.kind == "hf":
            exported.append(request.directory)
            if len(exported) == 1:
                other.start()
                both_export.wait(1.0)
            else:
                both_export.set()
        return result

    monkeypatch.setattr(ExportingTrainer, "save_state", hookimpl(slowly))
    found.append(served_model(prepared(run, registry), notes.append))
    other.join()
    export = run / "exports" / "step-000002"
    assert found == [str(export)] * 2
    assert json.loads((export / "config.json").read_text())["version"] == 2
    assert len(exported) == 1
    assert notes[-1] == "waiting for another server, which exports a checkpoint of this run"


def test_a_checkpoint_that_its_run_has_dropped_meanwhile_is_no_defect(run: Path, registry: Registry) -> None:
    serving = prepared(run, registry)
    shutil.rmtree(run / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError, match=r"step-000002 is gone .*checkpoint\.keep"):
        served_model(serving, lambda _: None)
