"""Families are found by their entry points, and what keeps one from being found is said."""

from pathlib import Path

import pytest

from rlcore.spi import Problem
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.registry import find_architecture, installed_model_types

OURS = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **families: str) -> None:
    """A distribution with these model_types, each with the source of its ARCHITECTURE."""
    metadata = folder / "acme-1.0.dist-info"
    metadata.mkdir(parents=True)
    lines = ["[rlcore.architectures]"]
    for name, source in families.items():
        (folder / f"acme_{folder.name}_{name}.py").write_text(source)
        lines.append(f"{name} = acme_{folder.name}_{name}:ARCHITECTURE")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(folder)


def test_our_families_are_installed() -> None:
    assert set(installed_model_types()) >= OURS
    for model_type in OURS:
        found = find_architecture({"model_type": model_type}, "config.json")
        assert isinstance(found, Architecture)
        assert found.model_type == model_type
        assert not list(found.problems({"architectures": [found.class_name], "sliding_window": None}, "config.json"))


def test_a_family_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "odd" not in installed_model_types()
    install(tmp_path, monkeypatch, odd="from rlcore_torchkit.architectures.llama import ARCHITECTURE")
    assert "odd" in installed_model_types()


def test_an_unknown_family_is_refused_with_those_known_and_how_to_add_it() -> None:
    problem = find_architecture({"model_type": "bert"}, "somewhere/config.json")
    assert isinstance(problem, Problem)
    assert (problem.path, problem.found) == ("somewhere/config.json", "model_type bert")
    assert all(name in problem.expected for name in OURS)
    assert "rlcore.architectures" in problem.remedy


@pytest.mark.parametrize(
    ("model_type", "source", "found"),
    [
        (
            "llama",
            "from rlcore_torchkit.architectures.llama import ARCHITECTURE",
            "model_type llama, which is a duplicate name: acme_two_llama:ARCHITECTURE of acme 1.0 and rlcore_torchkit",
        ),
        ("odd", "raise RuntimeError('broken')", "of acme 1.0 is not usable: import failed: RuntimeError: broken"),
        ("odd", "raise SystemExit(0)", "of acme 1.0 is not usable: import failed: SystemExit: 0"),
        ("odd", "ARCHITECTURE = None", "of acme 1.0 is not usable: found None; expected an Architecture of model_type odd"),
        ("odd", "from rlcore_torchkit.architectures.llama import ARCHITECTURE", "found Architecture(model_type='llama'"),
    ],
    ids=["two", "broken", "leaving", "another thing", "another family"],
)
def test_a_description_that_cannot_be_used(
    model_type: str, source: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    install(tmp_path / request.node.callspec.id.replace(" ", "_"), monkeypatch, **{model_type: source})
    problem = find_architecture({"model_type": model_type}, "config.json")
    assert isinstance(problem, Problem)
    assert found in problem.found


@pytest.mark.parametrize("source", ["raise RuntimeError('broken')", "ARCHITECTURE = None", "import no_such_library"])
def test_a_description_that_cannot_be_used_takes_no_name_from_ours(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / f"taken_{abs(hash(source))}", monkeypatch, llama=source)
    assert isinstance(find_architecture({"model_type": "llama"}, "config.json"), Architecture)


@pytest.mark.parametrize(
    ("model_type", "config", "found"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = true"),
        ("mistral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layers of sliding_attention"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architecture LlamaForSequenceClassification"),
    ],
)
def test_models_of_a_family_that_are_another(model_type: str, config: dict[str, object], found: str) -> None:
    family = find_architecture({"model_type": model_type}, "config.json")
    assert isinstance(family, Architecture)
    (problem,) = family.problems({"architectures": [family.class_name]} | config, "config.json")
    assert problem.found == found
    for window in (None, False, 0):
        plain = {"architectures": [family.class_name], "use_sliding_window": False, "sliding_window": window}
        assert not list(family.problems(plain, "config.json"))
