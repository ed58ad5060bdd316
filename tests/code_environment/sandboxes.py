"""Sandboxes and programs for the tests of this folder."""

import asyncio
import textwrap

import pytest
from attrs import evolve

from rlcore_code.checks import check_code
from rlcore_code.config import CodeConfig
from rlcore_code.sandbox import Sandbox

CONFIG = CodeConfig(cpu_time_s=2, wall_time_s=60.0, max_memory_mib=128, max_disk_mib=2, max_output_kib=64)


def run(program, *, wall_time_s=60.0, stdin="", **options):
    """How a program ends that is run by itself."""
    files = {"main.py": textwrap.dedent(program), "stdin": stdin}
    return asyncio.run(Sandbox(evolve(CONFIG, **options)).run(files, wall_time_s=wall_time_s))


def needs_namespaces():
    """Skip where the kernel refuses them, as in many containers."""
    if problems := check_code(None, CONFIG):
        pytest.skip(str(problems[0]))
