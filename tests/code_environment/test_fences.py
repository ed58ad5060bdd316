"""Which program of a response counts."""

import pytest

from rlcore_code.fences import last_program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first\n```\na\n```\nthen\n```py\nb\n```\nend", "b\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("~~~\ny\n~~~", "y\n"),
        ("````\n```\nin it\n```\n````", "```\nin it\n```\n"),
        ("```python\ns = '''\n    a ``` b'''\n```", "s = '''\n    a ``` b'''\n"),
        ("```python\n```", ""),
        ("```python\nwhole\n```\n```python\ncut off", "whole\n"),
        ("```python\ncut off", None),
        ("print(1)", None),
        ("<think>\n```\na\n```\n", None),
        ("<think>\n```\na\n```\n</think>\n```\nb\n```", "b\n"),
        ("", None),
    ],
)
def test_the_last_closed_block_is_the_program(response, program):
    assert last_program(response) == program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```\na\n```\n", None),
        ("```\na\n```\n</think>\n```\nb\n```", "b\n"),
        ("<think>\n```\na\n```\n", None),
        ("</think>\n```\nb\n```\n<think>\n```\na\n```\n", "b\n"),
    ],
)
def test_a_program_counts_behind_the_thought_that_the_prompt_began(response, program):
    assert last_program(response, is_thinking=True) == program
