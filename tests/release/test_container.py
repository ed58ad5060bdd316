"""The container's statements against the packages' requirements: pins fit, plugins and extras exist, nothing is missing."""

import re
import shlex
import tomllib
from itertools import chain
from pathlib import Path

import packages
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CUDA_OF_TORCH = {"2.11.0": "13.0.2"}
"""The toolkit that torch's wheels for Linux are built with: `cuda-toolkit` in the requirements of its metadata."""
PACKAGES = "$(python /src/release/packages.py image)"
"""The packages, as the container asks for them."""
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}


def statements_of(file):
    """Instruction and rest of each statement, lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / file).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


@pytest.fixture(scope="module")
def statements():
    return statements_of("Containerfile")


@pytest.fixture(scope="module")
def pins():
    lines = (ROOT / "release/gpu-constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(str(requirement.specifier).startswith("==") for requirement in requirements)
    return {canonicalize_name(found.name): str(found.specifier).removeprefix("==") for found in requirements}


@pytest.fixture(scope="module")
def projects():
    paths = (ROOT / "core/pyproject.toml", ROOT / "torchkit/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"))
    found = [tomllib.loads(path.read_text())["project"] for path in paths]
    return {project["name"]: project for project in found}


@pytest.fixture(scope="module")
def installed(statements):
    """What the pip commands of the build name, those of release/packages.py included."""
    found = [Requirement(line) for line in packages.image()]
    for instruction, rest in statements:
        for command in rest.split("&&") if instruction == "RUN" else ():
            words = shlex.split(command.replace(PACKAGES, ""))
            if "pip" in words:
                names = words[words.index("install") + 1 :]
                found += [Requirement(word) for word in names if not word.startswith(("-", "/"))]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_only_known_instructions_in_two_stages(statements):
    assert {instruction for instruction, _ in statements} <= INSTRUCTIONS
    stages = [rest for instruction, rest in statements if instruction == "FROM"]
    assert [("devel" in stage, "runtime" in stage) for stage in stages] == [(True, False), (False, True)]
    [copied] = [rest for instruction, rest in statements if instruction == "COPY" and "--from" in rest]
    assert copied == "--from=build /opt/rlcore /opt/rlcore"


def test_sources_that_are_copied_are_there(statements):
    for instruction, rest in statements:
        if instruction == "COPY" and "--from" not in rest:
            assert (ROOT / rest.split()[0]).exists()
        for path in re.findall(r"/src/(\S+)", rest):
            assert (ROOT / path).exists()


CPU_FILE = "Containerfile.cpu"


def test_the_image_for_cpus_names_files_and_packages_that_are_there(projects):
    found = statements_of(CPU_FILE)
    assert {instruction for instruction, _ in found} <= INSTRUCTIONS
    text = "\n".join(rest for _, rest in found)
    assert all((ROOT / path).exists() for path in re.findall(r"/src/(\S+)", text))
    (core,) = (Requirement(name) for name in re.findall(r"'(rlcore\[.*?\])'", text))
    assert core.extras <= projects["rlcore"]["optional-dependencies"].keys()
    assert [rest for instruction, rest in found if instruction == "COPY"] == [". /src", "--from=build /opt/rlcore /opt/rlcore"]
    stages = [rest for instruction, rest in found if instruction == "FROM"]
    assert [stage.removesuffix(" AS build") for stage in stages] == ["docker.io/library/python:${PYTHON}-slim"] * 2


def test_the_image_for_cpus_has_the_makefiles_versions(projects):
    found = dict(rest.split("=", 1) for instruction, rest in statements_of(CPU_FILE) if instruction == "ARG")
    makefile = (ROOT / "Makefile").read_text()
    torch, _, index = found["TORCH"].strip('"').partition(" --index-url ")
    assert f"TORCH ?= {torch}\n" in makefile
    assert index.endswith("/cpu")
    hatchling = re.findall(r"hatchling==\S+", makefile)
    assert hatchling == re.findall(r"hatchling==\S+", (ROOT / CPU_FILE).read_text())
    assert f"{found['PYTHON']}.0" in SpecifierSet(projects["rlcore"]["requires-python"])


def test_cuda_is_that_of_torch(statements, pins):
    arguments = dict(rest.split("=") for instruction, rest in statements if instruction == "ARG")
    assert arguments["CUDA"] == CUDA_OF_TORCH[pins["torch"]]
    major, minor, _ = arguments["CUDA"].split(".")
    text = " ".join(rest for _, rest in statements)
    assert re.findall(r"cuda-nvcc-(\S+)", text) == [f"{major}-{minor}"]
    assert re.findall(r"core_cu(\d+)", text) == [major]
    assert f"transformer-engine-cu{major}" in pins


def test_pins_fit_every_packages_requirements(pins, projects):
    wrong, met = [], set()
    for name, project in projects.items():
        for line in (*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())):
            requirement = Requirement(line)
            version = pins.get(canonicalize_name(requirement.name))
            met.add(canonicalize_name(requirement.name))
            if version is not None and not requirement.specifier.contains(version):
                wrong.append(f"{name} requires {requirement}; release/gpu-constraints.txt has {version}")
    assert not wrong, "\n".join(wrong)
    assert {"torch", "transformers", "vllm", "megatron-core", "transformer-engine", "ray"} <= met & pins.keys()


def test_every_package_but_those_of_other_devices_is_installed_with_extras_that_exist(statements, installed, projects):
    assert [PACKAGES in rest for instruction, rest in statements if PACKAGES in rest] == [True]
    assert {"rlcore", "rlcore-vllm", "rlcore-megatron"} < installed.keys() & projects.keys()
    assert projects.keys() - installed.keys() == {"rlcore-mlx", "rlcore-sglang"}
    for name in projects.keys() & installed.keys():
        assert installed[name].extras <= projects[name].get("optional-dependencies", {}).keys()


def test_what_is_pinned_is_installed_or_brought(installed, pins):
    brought = {"transformers", *(name for name in pins if name.startswith("transformer-engine-"))}
    assert pins.keys() - brought <= installed.keys()


def test_the_documents_name_the_pinned_versions(pins):
    benchmarks, megatron = ((ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "megatron.md"))
    assert f"vLLM {pins['vllm']}" in benchmarks
    assert f"torch {pins['torch'].removesuffix('.0')}" in benchmarks
    assert f"transformers {pins['transformers'].removesuffix('.0')}" in benchmarks
    assert f"TransformerEngine {pins['transformer-engine'].removesuffix('.0')}" in benchmarks
    assert f"megatron-core {pins['megatron-core'].rpartition('.')[0]}" in megatron
