"""The page for a terminal."""

import click
import pytest

from rlcore_doctor.page import lines_of

PAGE = {
    "python": {"version": "3.11.7", "implementation": "CPython", "prefix": "~/env", "is_virtual": True},
    "system": {"platform": "Linux", "machine": "x86_64", "processors": 2, "memory_gib": 24.0},
    "gpus": [],
    "variables": {"OMP_NUM_THREADS": "1"},
    "libraries": [
        {"name": "torch", "version": "2.13.0", "build": "cu130", "import": {"seconds": 2.5}},
        {"name": "ray", "version": "2.60.0", "build": "", "import": {"error": "ImportError: x"}},
        {"name": "vllm", "version": "0.33.0", "build": "cpu", "import": {"late": True}},
    ],
    "not_installed": ["megatron-core"],
    "interface": [2, 0],
    "packages": [{"name": "rlcore", "version": "0.1.0", "source": "editable"}],
    "plugins": [
        {
            "role": "sink",
            "name": "anvil",
            "distribution": "acme",
            "version": "2.0",
            "spi": None,
            "state": "usable",
            "reason": None,
        }
    ],
    "others": [{"name": "acme", "version": "2.0", "source": ""}],
    "problems": [{"found": "ray 2.60.0 cannot be imported: a\x1b[31m", "remedy": "pip install ray"}],
    "notes": ["a run lacks a trainer"],
    "fits": False,
}
EXPECTED = """\
Machine
  Python           3.11.7 (CPython) in ~/env
  System           Linux, 2 processors, 24.0 GiB
  GPU              none
  OMP_NUM_THREADS  1
Libraries
  torch          2.13.0, build for cu130, imported in 2.5 s
  ray            2.60.0, cannot be imported
  vllm           0.33.0, build for CPUs, not imported in time
  megatron-core  not installed
Packages of rlcore (interface 2.0)
  rlcore  0.1.0 editable
Plugins of others
  acme  2.0; sink anvil (interface unknown, usable)
note: a run lacks a trainer
1 problem
- ray 2.60.0 cannot be imported: a\\x1b[31m
    pip install ray"""


def test_the_page() -> None:
    assert click.unstyle("\n".join(lines_of(PAGE, 240))) == EXPECTED


@pytest.mark.parametrize("width", [20, 60])
def test_commands_stay_on_one_line_whatever_the_width(width: int) -> None:
    problems = [{"found": "many words " * 20, "remedy": "pip install 'something>=1.0' --with-an-option"}]
    lines = list(lines_of(PAGE | {"problems": problems}, width))
    assert any(problems[0]["remedy"] in line for line in lines)
    assert max(len(line) for line in lines if line.startswith("  many")) <= width


def test_where_all_fits_the_last_line_says_so() -> None:
    *_, last = lines_of(PAGE | {"problems": [], "others": [], "plugins": [], "fits": True}, 80)
    assert click.unstyle(last) == "Everything fits together."
