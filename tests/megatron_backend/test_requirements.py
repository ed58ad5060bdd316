"""Whether a Megatron-Core is here that can run, by the versions of what is installed."""

import pytest
from attrs import evolve

from rlcore_megatron.setup import requirements
from rlcore_megatron.setup.config import MegatronConfig


def test_it_can_run_here() -> None:
    assert requirements.missing_requirement() is None


WANTED = "megatron-core<0.20,>=0.16.1"


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"megatron-core": None}, f"megatron-core is not installed: pip install '{WANTED}'"),
        ({"megatron-core": "0.15.3"}, f"megatron-core 0.15.3 is installed; expected {WANTED}: pip install '{WANTED}'"),
        ({"megatron-core": "0.20.0"}, f"megatron-core 0.20.0 is installed; expected {WANTED}: pip install '{WANTED}'"),
        ({"torch": "2.10.0"}, "torch 2.10.0 is installed; expected torch<2.16,>=2.11: pip install 'torch<2.16,>=2.11'"),
    ],
)
def test_what_is_missing_comes_with_the_command_that_helps(installed, versions: dict, reason: str) -> None:
    installed(versions)
    assert (requirements.missing_requirement() or "").startswith(reason)


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2", "0.19.2"])
def test_versions_in_range_serve(installed, version: str) -> None:
    installed({"megatron-core": version})
    assert requirements.missing_requirement() is None


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
    config = MegatronConfig()
    installed({"transformer-engine": None, "transformer-engine-torch": None})
    assert not requirements.uses_transformer_engine(config, "cuda", "bfloat16")
    installed({"transformer-engine": "2.12.0"})
    assert requirements.uses_transformer_engine(config, "cuda", "bfloat16")
    assert not requirements.uses_transformer_engine(config, "cuda", "float32")  # it would round to TF32
    assert requirements.uses_transformer_engine(evolve(config, transformer_engine=True), "cuda", "float32")
    assert not requirements.uses_transformer_engine(config, "cpu", "bfloat16")
    assert not requirements.uses_transformer_engine(evolve(config, transformer_engine=False), "cuda", "bfloat16")
