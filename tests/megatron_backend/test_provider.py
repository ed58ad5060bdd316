"""What the provider says of itself, and whether it can run, found out without importing torch or Megatron."""

import subprocess
import sys
from importlib import metadata

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.registry.selection import passed_over, select
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_megatron import requirements
from rlcore_megatron.provider import PROVIDER

REGISTRY = Registry.from_providers({"trainer": [FSDP2, PROVIDER]})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """A function (versions by distribution, None for one that is absent, what torch requires) that makes it so."""
    real_version, real_requires, real_spec = metadata.version, metadata.requires, requirements.importlib.util.find_spec

    def pretend(versions: dict[str, str | None], torch_requires: tuple[str, ...] | None = None) -> None:
        def version(name: str) -> str:
            if name not in versions:
                return real_version(name)
            if versions[name] is None:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        def find_spec(name: str, package: str | None = None) -> object:
            has_engine = any(versions.get(key) for key in requirements._ENGINE_DISTRIBUTIONS)
            return object() if name == "transformer_engine" and has_engine else real_spec(name, package)

        def requires(name: str) -> list[str] | None:
            return list(torch_requires) if name == "torch" and torch_requires is not None else real_requires(name)

        monkeypatch.setattr(requirements.metadata, "version", version)
        monkeypatch.setattr(requirements.metadata, "requires", requires)
        monkeypatch.setattr(requirements.importlib.util, "find_spec", find_spec)

    return pretend


def test_it_can_run_here() -> None:
    assert requirements.missing_requirement() is None


def test_looking_at_it_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'megatron.core'}"
    code = (
        "import sys\nfrom rlcore_megatron.provider import PROVIDER\n"
        f"assert PROVIDER.unavailable() is None\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_auto_prefers_it_on_cuda_alone_and_naming_runs_it_on_a_cpu_too() -> None:
    assert select(REGISTRY, "trainer", "auto", device="cuda", needs={}).name == "megatron"
    assert select(REGISTRY, "trainer", "auto", device="cpu", needs={}).name == "fsdp2"
    assert select(REGISTRY, "trainer", "megatron", device="cpu", needs={}).name == "megatron"


def test_it_can_do_what_fsdp2_can() -> None:
    assert PROVIDER.capabilities == FSDP2.capabilities


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"megatron-core": None}, "megatron-core is not installed: pip install 'megatron-core<0.17,>=0.16.1'"),
        (
            {"megatron-core": "0.15.3"},
            "megatron-core 0.15.3 is installed; expected megatron-core<0.17,>=0.16.1: "
            "pip install 'megatron-core<0.17,>=0.16.1'",
        ),
        (
            {"megatron-core": "0.17.0"},
            "megatron-core 0.17.0 is installed; expected megatron-core<0.17,>=0.16.1: "
            "pip install 'megatron-core<0.17,>=0.16.1'",
        ),
        ({"torch": "2.10.0"}, "torch 2.10.0 is installed; expected >=2.11: pip install 'torch>=2.11'"),
    ],
)
def test_what_is_missing_comes_with_the_command_that_helps(installed, versions: dict, reason: str) -> None:
    installed(versions)
    assert requirements.missing_requirement() == reason


def test_auto_says_that_it_took_fsdp2_and_why(installed) -> None:
    installed({"megatron-core": None})
    taken = select(REGISTRY, "trainer", "auto", device="cuda", needs={})
    assert passed_over(REGISTRY, taken, device="cuda", needs={}) == (
        "trainer 'fsdp2' (priority 50) is taken, as 'megatron' (priority 80) cannot be: "
        "megatron-core is not installed: pip install 'megatron-core<0.17,>=0.16.1'",
    )


def test_metadata_without_the_package_is_said(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed({"megatron-core": "0.16.1"})
    find = requirements.importlib.util.find_spec
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name, *_: None if "megatron" in name else find(name))
    reason = requirements.missing_requirement()
    assert reason is not None
    assert reason.startswith(
        "megatron-core 0.16.1 is installed, but its package megatron.core is not there: pip install --force"
    )


@pytest.mark.parametrize("engine", ["2.13.0", "2.14.1+cu13"])
def test_an_engine_that_breaks_the_import_of_megatron_makes_it_unavailable(installed, engine: str) -> None:
    installed({"transformer-engine": engine, "torch": "2.11.0+cu130"}, ())
    assert requirements.missing_requirement() == (
        f"TransformerEngine {engine} does not go with torch 2.11.0+cu130: it needs a newer cublasLt and breaks the import of "
        "Megatron. pip install --no-build-isolation 'transformer_engine[pytorch]==2.12.0'"
    )


@pytest.mark.parametrize(
    ("engine", "torch"), [("2.12.0", "2.11.0+cu130"), ("2.13.0", "2.12.0+cu130"), ("2.17.0", "2.11.0+cu130"), (None, "2.11.0")]
)
def test_other_engines_do_not(installed, engine: str | None, torch: str) -> None:
    installed({"transformer-engine": engine, "torch": torch}, ())
    assert requirements.missing_requirement() is None


def test_an_upgraded_cublas_goes_with_any_engine(installed) -> None:
    versions = {"transformer-engine": "2.13.0", "torch": "2.11.0+cu130", "nvidia-cublas": "13.1.0.3"}
    installed(versions, ("nvidia-cublas==13.1.0.3; platform_system == 'Linux'", "numpy"))
    assert requirements.missing_requirement() is not None
    installed(versions | {"nvidia-cublas": "13.4.0.1"}, ("nvidia-cublas==13.1.0.3; platform_system == 'Linux'", "numpy"))
    assert requirements.missing_requirement() is None


def test_attention_without_a_backward_pass_is_no_hard_case(installed) -> None:
    installed({"transformer-engine-torch": "2.17.0", "torch": "2.11.0+cu130"}, ())
    reason = requirements.broken_attention()
    assert reason is not None
    assert "TransformerEngine 2.17.0 does not go with torch 2.11.0+cu130: its attention needs a newer cuDNN" in reason
    assert requirements.missing_requirement() is None


def test_layers_are_the_engines_where_the_section_says_or_where_it_is_installed_beside_a_gpu(installed) -> None:
    config = PROVIDER.config()
    installed({"transformer-engine": None, "transformer-engine-torch": None})
    assert not requirements.uses_transformer_engine(config, "cuda", "bfloat16")
    installed({"transformer-engine": "2.12.0"})
    assert requirements.uses_transformer_engine(config, "cuda", "bfloat16")
    assert not requirements.uses_transformer_engine(config, "cuda", "float32")  # it would round to TF32
    assert requirements.uses_transformer_engine(evolve(config, transformer_engine=True), "cuda", "float32")
    assert not requirements.uses_transformer_engine(config, "cpu", "bfloat16")
    assert not requirements.uses_transformer_engine(evolve(config, transformer_engine=False), "cuda", "bfloat16")
