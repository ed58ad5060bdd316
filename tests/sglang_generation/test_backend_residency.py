"""An engine on a GPU that dies while memory moves: the refit that starts it anew brings it where it was asked to be."""

from types import SimpleNamespace

import pytest

from rlcore.spi import CloseRequest, GeneratorContext, ModelSpec, RankInfo, RefitRequest, SetResidencyRequest, WorkerError
from rlcore_conformance.references.tensors import make_export
from rlcore_sglang import backend as module
from rlcore_sglang.backend import SglangBackend
from rlcore_sglang.config import SglangConfig
from rlcore_torchkit.testing.models import make_model

made = []
"""The engines, as they were started."""


class Engine:
    """Stands for the process."""

    def __init__(self, arguments, log_directory, start_timeout_s):
        self.is_usable = True
        self.away = set()
        made.append(self)

    def ask(self, method, *arguments, timeout_s, key):
        if not self.is_usable:
            raise WorkerError("SGLang ended")
        if method == "move":
            self.away = set(*arguments)
        return 64

    def end(self):
        self.is_usable = False


class Refit:
    """Stands for the way of the weights."""

    def __init__(self, *arguments):
        """It needs none."""

    def run(self, engine, weights):
        assert engine.away == {"kv_cache"}
        return SimpleNamespace(num_bytes=8, digests={})

    def close(self):
        """There is nothing to free."""


@pytest.fixture
def backend(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Engine", Engine)
    monkeypatch.setattr(module, "Refit", Refit)
    monkeypatch.setattr(module, "engine_arguments", lambda context, config: {})
    model = ModelSpec(path=str(make_model(tmp_path)), dtype="float32")
    context = GeneratorContext(
        model=model, rank_info=RankInfo(device="cuda"), seed=0, max_sequence_length=96, channel="directory"
    )
    one = SglangBackend(context, SglangConfig())
    yield one
    one.close(CloseRequest())


def test_one_that_starts_in_a_refit_is_where_it_is_to_be(backend):
    asleep = SetResidencyRequest(weights="host", state="host")
    stirring = SetResidencyRequest(weights="device", state="host")
    backend.set_residency(asleep)
    (first,) = made
    assert first.away == {"weights", "kv_cache"}
    first.is_usable = False
    for request in (asleep, stirring):
        with pytest.raises(WorkerError, match="ended"):
            backend.set_residency(request)
    weights = make_export({}, 0)
    backend.refit(RefitRequest(weight_version=0, channel="directory", weights=weights, may_alias=False))
    _, second = made
    backend.set_residency(SetResidencyRequest(weights="device", state="device"))
    assert second.away == set()
