"""The lifecycle hooks, which both handles share."""

import pytest

from rlcore.registry.plugin_errors import register_fatal_error
from rlcore.spi import (
    CloseRequest,
    ContractError,
    ExportWeightsRequest,
    LoadStateRequest,
    LoadStateResult,
    PluginError,
    RefitRequest,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    StorageError,
    WeightExport,
)

ON_HOST = SetResidencyRequest(weights="host", state="host")


@pytest.fixture(params=["trainer", "generator"])
def make(request, make_trainer, make_generator):
    """Makes a handle of either role."""
    return {"trainer": make_trainer, "generator": make_generator}[request.param]


def test_close_reaches_the_backend_once(make):
    closed = []

    def close(self, request):
        closed.append(request)

    handle = make(close=close)
    handle.close(CloseRequest())
    handle.close()
    assert closed == [CloseRequest()]


def test_nothing_is_legal_after_close(make, tmp_path):
    handle = make()
    handle.close()
    calls = [
        lambda: handle.set_residency(ON_HOST),
        lambda: handle.save_state(SaveStateRequest(directory=tmp_path, kind="resume")),
        lambda: handle.load_state(LoadStateRequest(directory=tmp_path)),
    ]
    for call in calls:
        with pytest.raises(ContractError, match="after close"):
            call()


@pytest.mark.parametrize(
    "returned",
    [
        None,
        SetResidencyResult(device_bytes=-1),
        SetResidencyResult(device_bytes=1.5),
        SetResidencyResult(device_bytes=1, reserved_bytes=-1),
    ],
)
def test_a_wrong_residency_result_fails_the_backend(make, returned):
    handle = make(set_residency=lambda self, request: returned)
    with pytest.raises(ContractError, match="set_residency returned"):
        handle.set_residency(ON_HOST)
    with pytest.raises(ContractError, match=r"'fake' \(in-process 0\): .* failed in set_residency"):
        handle.set_residency(ON_HOST)


def test_residency_needs_its_capability_for_all_but_the_resident_state(make):
    handle = make(declared={"refit.in_process"})
    with pytest.raises(ContractError, match="'residency'"):
        handle.set_residency(SetResidencyRequest(weights="device", state="host"))
    assert handle.set_residency(SetResidencyRequest(weights="device", state="device")).device_bytes == 0


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["state.json"], "expected a tuple of paths"),
        (("missing.bin",), "'missing.bin' is not in"),
        (("/etc/passwd",), "expected a path below the directory"),
        (("../state.json",), "expected a path below the directory"),
    ],
)
def test_files_that_are_named_must_be_there(make, tmp_path, files, text):
    handle = make(save_state=lambda self, request: SaveStateResult(files=files))
    with pytest.raises(ContractError) as raised:
        handle.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    assert text in str(raised.value)


def test_a_failed_save_leaves_the_backend_usable(make, tmp_path):
    def save_state(self, request):
        raise StorageError("no space left")

    handle = make(save_state=save_state)
    with pytest.raises(StorageError) as raised:
        handle.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    assert "raised in save_state of" in raised.value.__notes__[0]
    assert handle.set_residency(ON_HOST).device_bytes == 0


def test_saving_a_model_directory_needs_its_capability(make, tmp_path):
    with pytest.raises(ContractError, match="'save_hf'"):
        make(declared=()).save_state(SaveStateRequest(directory=tmp_path, kind="hf"))
    with pytest.raises(ContractError, match="'lora'"):
        make(declared=()).save_state(SaveStateRequest(directory=tmp_path, kind="peft"))


def test_adapters_apart_need_their_capability(make_trainer):
    with pytest.raises(ContractError, match="'adapter_refit'"):
        make_trainer(declared=()).export_weights(
            ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=1, adapters="alone")
        )


def test_changes_alone_need_their_capability(make_trainer, make_generator):
    with pytest.raises(ContractError, match="'delta_refit'"):
        make_trainer(declared=()).export_weights(
            ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=1, delta="host")
        )
    export = WeightExport(weight_version=1, specs=(), buckets=iter(()), persistent=False)
    with pytest.raises(ContractError, match="'delta_refit'"):
        make_generator(declared=("refit.directory",)).refit(
            RefitRequest(weight_version=1, channel="directory", weights=export, may_alias=False, delta="host")
        )


def test_a_good_save_returns_what_was_written(make_trainer, tmp_path):
    result = make_trainer().save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    assert result.files == ("state.json",)


def test_loading_sets_the_trainers_version(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.load_state(LoadStateRequest(directory=tmp_path))
    assert trainer.weight_version == 7


@pytest.mark.parametrize("version", [-1, None, True])
def test_a_trainer_that_loads_no_version_has_failed(make_trainer, tmp_path, version):
    trainer = make_trainer(load_state=lambda self, request: LoadStateResult(weight_version=version))
    with pytest.raises(ContractError, match="weight_version"):
        trainer.load_state(LoadStateRequest(directory=tmp_path))
    with pytest.raises(ContractError, match="after it failed in load_state"):
        trainer.load_state(LoadStateRequest(directory=tmp_path))


def test_a_failed_backend_can_be_closed(make, tmp_path):
    def load_state(self, request):
        raise OSError("unreadable")

    handle = make(load_state=load_state)
    with pytest.raises(OSError, match="unreadable"):
        handle.load_state(LoadStateRequest(directory=tmp_path))
    handle.close()


def test_what_close_raises_is_seen_and_close_is_not_repeated(make):
    def close(self, request):
        raise RuntimeError("stuck")

    handle = make(close=close)
    with pytest.raises(RuntimeError, match="stuck"):
        handle.close()
    handle.close()


class Ordered(SystemExit):
    """With which an execution ends its worker."""


def is_end(error):
    return isinstance(error, Ordered)


def test_an_execution_may_end_a_worker_in_the_midst_of_a_hook(make):
    register_fatal_error(is_end)

    def ends(self, request):
        raise Ordered

    with pytest.raises(Ordered):
        make(set_residency=ends).set_residency(ON_HOST)


def test_a_hook_that_ends_the_process_is_an_error(make):
    def leaves(self, request):
        raise SystemExit(0)

    handle = make(set_residency=leaves)
    with pytest.raises(
        PluginError, match=r"'fake' \(in-process 0\): set_residency: found SystemExit\(0\) in .*, line \d+, which"
    ):
        handle.set_residency(ON_HOST)
    assert not handle.is_usable
