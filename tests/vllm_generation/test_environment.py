"""The cores of the ranks of an engine, and what its process finds in its environment."""

from attrs import evolve

from rlcore_vllm.engines.environment import child_environment, omp_threads_bind
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import engine_settings


def test_ranks_share_the_cores_out(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5, 8, 9})
    assert omp_threads_bind(2) == "2,3|5,8"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {7})
    assert omp_threads_bind(2) == "7|7"


def test_children_see_their_own_devices(two_models, monkeypatch):
    settings = evolve(engine_settings(two_models.context("shared_memory"), VllmConfig()), device="cuda", eager=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    environment = child_environment(settings, (2, 0))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "TORCHDYNAMO_DISABLE" not in environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    assert child_environment(settings, (2, 0))["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-a"


def test_batch_invariance_is_vllms_own_mode_and_the_runner_whose_samples_are_recorded(two_models, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")  # left over in a shell
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    settings = evolve(engine_settings(two_models.context("shared_memory"), VllmConfig()), device="cuda")
    environment = child_environment(settings, (0,))
    assert (environment["VLLM_BATCH_INVARIANT"], environment.get("VLLM_USE_V2_MODEL_RUNNER")) == ("0", None)
    environment = child_environment(evolve(settings, batch_invariant=True), (0,))
    assert (environment["VLLM_BATCH_INVARIANT"], environment["VLLM_USE_V2_MODEL_RUNNER"]) == ("1", "1")
