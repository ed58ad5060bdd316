"""Checkpoints through the client: listed, published, given a time to live, deleted, downloaded."""

import errno
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_server import KEY, RANK, Address

from rlcore_session import CallError
from rlcore_tinker.checkpoints import Checkpoint, Checkpoints, now
from rlcore_tinker.errors import RequestError

tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")

TOKENS = [3, 4, 74, 5, 2, 82, 6, 4]
Make = Callable[..., Any]


@pytest.fixture
def trained(training: Any, datum: Make) -> Any:
    """A model after an update."""
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return training


@pytest.fixture
def rest(server: Address) -> Any:
    """The client of checkpoints."""
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def test_checkpoints_are_listed_changed_and_deleted(trained: Any, rest: Any) -> None:
    state = trained.save_state("state", user_metadata={"step": "1"}).result().path
    sampler = trained.save_weights_for_sampler("sampler", ttl_seconds=7200).result().path
    found = {one.tinker_path: one for one in rest.list_checkpoints(trained.model_id).result().checkpoints}
    assert {path: one.checkpoint_type for path, one in found.items()} == {state: "training", sampler: "sampler"}
    assert found[state].user_metadata == {"step": "1"}
    assert found[state].expires_at is None
    assert timedelta(hours=1) < found[sampler].expires_at - datetime.now(UTC) < timedelta(hours=2)
    assert found[state].size_bytes > 1000
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    mine = next(one for one in rest.list_user_checkpoints().result().checkpoints if one.tinker_path == state)
    assert (mine.public, mine.expires_at is not None) == (True, True)
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    run = rest.get_training_run(trained.model_id).result()
    assert (run.lora_rank, run.last_checkpoint.public, run.last_checkpoint.expires_at) == (RANK, False, None)
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.is_lora, info.lora_rank) == (True, RANK)
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    assert [one.tinker_path for one in rest.list_checkpoints(trained.model_id).result().checkpoints] == [state]
    with pytest.raises(tinker.NotFoundError, match="has no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(sampler).result()


@pytest.mark.parametrize("rank", [RANK, 1])
def test_a_download_is_an_adapter_that_peft_reads(
    service: Any, server: Address, rest: Any, datum: Make, model: Path, tmp_path: Path, rank: int
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained = service.create_lora_training_client(base_model=server.model, rank=rank).result()
    trained.forward_backward([datum(TOKENS)], "cross_entropy")
    trained.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    path = trained.save_weights_external("final").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
    for name, url in urls.items():
        (tmp_path / name).write_bytes(urllib.request.urlopen(url).read())  # no key: the address is signed
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path)
    table = torch.log_softmax(with_adapter(torch.tensor([TOKENS])).logits[0, :-1].double(), -1)
    expected = table.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].detach().numpy()
    found = trained.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == rank
    address = urls["adapter_config.json"]
    for wrong in (
        address[:-1] + ("0" if address[-1] != "0" else "1"),
        address.replace("until=", "until=9"),
        address.split("?")[0],
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(wrong)
        assert error.value.code in (401, 403)


def test_samplers_may_be_of_saved_states_too(trained: Any, service: Any) -> None:
    state = trained.save_state("sampled").result().path
    client = service.create_sampling_client(model_path=state).result()
    newest = trained.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(TOKENS)
    assert client.compute_logprobs(prompt).result() == newest.compute_logprobs(prompt).result()


def test_a_sampler_of_an_overwritten_checkpoint_is_refused(trained: Any, service: Any, datum: Make) -> None:
    """It would answer with the newer weights."""
    path = trained.save_state("replaced").result().path
    older = service.create_sampling_client(model_path=path).result()
    prompt = tinker.ModelInput.from_ints(TOKENS)
    before = older.compute_logprobs(prompt).result()
    trained.forward_backward([datum(TOKENS)], "cross_entropy")
    trained.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    trained.save_state("replaced", overwrite=True).result()
    trained.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="weights are gone"):
        older.compute_logprobs(prompt).result()
    newer = service.create_sampling_client(model_path=path).result()
    assert newer.compute_logprobs(prompt).result() != before


def _damage(directory: Path, path: str) -> None:
    """Cut off the last bytes of a checkpoint's weights."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    folder = directory / model_id.replace(":", "_") / kind / name
    (weights,) = folder.rglob("trainer-00000.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4])


@pytest.mark.parametrize("kind", ["server", "whole_server"])
def test_a_damaged_checkpoint_is_refused_and_the_weights_stay(request: Any, datum: Make, kind: str) -> None:
    server = request.getfixturevalue(kind)
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    training = service.create_lora_training_client(base_model=server.model, rank=RANK).result()
    path = training.save_state("damaged").result().path
    _damage(server.directory / "checkpoints", path)
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    before = training.forward([datum(TOKENS)], "cross_entropy").result().metrics
    with pytest.raises(tinker.RequestFailedError, match="no intact checkpoint"):
        training.load_state(path).result()
    assert training.forward([datum(TOKENS)], "cross_entropy").result().metrics == before
    service.close("success").result()


def test_models_of_a_damaged_checkpoint_leave_no_adapter(trained: Any, service: Any, server: Address) -> None:
    path = trained.save_state("damaged").result().path
    _damage(server.directory / "checkpoints", path)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="no intact checkpoint"):
            service.create_training_client_from_state(path).result()
    for number in (1, 2):
        with pytest.raises(CallError, match="never begun"):
            server.session.use_adapter(trained.model_id.rpartition(":")[0] + f":{number}")


def _described(**fields: Any) -> Checkpoint:
    given = {"model_id": "a-b:train:0", "kind": "weights", "name": "x", "created": now(), "weights": "w", "base_model": "m"}
    return Checkpoint(**(given | fields))


def test_a_checkpoint_whose_time_is_over_is_deleted(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    written = kept.write(_described(expires=past), lambda folder: folder.mkdir())
    assert kept.all() == []
    assert not written.folder.exists()


def test_a_write_that_fails_leaves_nothing_and_the_older_one_stays(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("half")
        raise RequestError("no")

    kept = Checkpoints(tmp_path)
    with pytest.raises(RequestError):
        kept.write(_described(), fail)
    assert kept.all() == []
    kept.write(_described(), lambda folder: folder.mkdir())
    with pytest.raises(RequestError):
        kept.write(_described(created="2000-01-01T00:00:00+00:00"), fail)
    (found,) = kept.all("a-b:train:0")
    assert not found.created.startswith("2000")


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("place", range(4))
def test_a_server_that_is_killed_while_it_overwrites_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    def content(text: str) -> Callable[[Path], object]:
        return lambda folder: (folder.mkdir(), (folder / "content").write_text(text))

    kept = Checkpoints(tmp_path)
    kept.write(_described(weights="old"), content("old"))
    calls = 0

    def killed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == place:
                raise Killed
            calls += 1
            return function(*args, **options)

        return call

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("rlcore_tinker.checkpoints.shutil.rmtree", killed(shutil.rmtree))
        patched.setattr(Path, "rename", killed(Path.rename))
        kept.write(_described(weights="new"), content("new"))
    again = Checkpoints(tmp_path)
    again.clean()
    (found,) = again.all()
    assert (found.files / "content").read_text() == found.weights == ("old" if place < 2 else "new")
    assert [path.name for path in found.folder.parent.iterdir()] == ["x"]


def test_a_disk_that_is_full_is_the_servers_error_and_the_next_save_works(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rlcore_tinker.checkpoints.write_atomically", full)
        with pytest.raises(tinker.RequestFailedError, match="No space left") as error:
            trained.save_state("full").result()
    assert error.value.category == "server"
    assert trained.save_state("full").result().path


@pytest.mark.parametrize(
    "path", ["tinker://../weights/x", "tinker://a-b:train:0/weights/..", "tinker://a-b:train:0/more/x", "x", ""]
)
def test_paths_that_are_none_find_nothing(tmp_path: Path, path: str) -> None:
    with pytest.raises(RequestError, match="has no checkpoint"):
        Checkpoints(tmp_path / "checkpoints").find(path)
