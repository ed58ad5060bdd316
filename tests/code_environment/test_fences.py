"""Which program of a response counts."""

import time

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


@pytest.mark.parametrize(
    "response",
    [
        "```a\n" * 50_000,
        "".join(f"```{number}\n" for number in range(50_000)),
        "```\n" * 50_001,
        "~" * 200_000,
        "~" * 200_000 + "`",
        "\n".join("~" * number for number in range(3, 600)),
        " " * 200_000,
        ("```" + " " * 1000 + "x\n") * 200,
    ],
    ids=["open", "numbered", "closed", "one", "mixed", "growing", "spaces", "info"],
)
def test_a_response_takes_time_in_proportion_to_its_length(response):
    began = time.thread_time()
    last_program(response)
    assert time.thread_time() - began < 1.0
