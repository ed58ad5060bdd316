"""Which programs pass, and that no program gets more than it has earned."""

import asyncio
import json
import time

import pytest
from attrs import evolve

from rlcore_code.cases import read_cases
from rlcore_code.judge import Judge, is_same_output
from rlcore_code.sandbox import Execution, Sandbox

from .sandboxes import CONFIG, needs_namespaces

ADDING = [
    "assert add(1, 2) == 3",
    {"call": "add", "arguments": [2, 2], "result": 4},
    "assert math.isclose(add(0.1, 0.2), 0.3) and add([1], []) == [1]",
]


@pytest.fixture(autouse=True, scope="module")
def _namespaces():
    needs_namespaces()


def judge(program, *tests, to_the_end=True, wall_time_s=60.0, setup="", **options):
    """The verdict on a program."""
    config = evolve(CONFIG, **options)
    cases = read_cases({"tests": list(tests), "setup": setup}, config)
    return asyncio.run(Judge(Sandbox(config), wall_time_s, to_the_end=to_the_end).judge(program, cases))


def num_passed(program, *tests, **options):
    return judge(program, *tests, **options).num_passed


def test_functions_pass_each_form_of_test():
    assert num_passed("def add(a, b): return a + b", *ADDING) == 3
    assert num_passed("def add(a, b): return 3", *ADDING) == 1
    assert num_passed("def add(a, b): return a.nothing", *ADDING) == 0


def test_streams_are_compared_and_have_to_end_well():
    tests = [{"input": f"{n} 1\n", "output": f"{n + 1}\n"} for n in (1, 2)]
    assert num_passed("print(sum(map(int, input().split())), '\\n')", *tests) == 2
    assert num_passed("print(2)", *tests) == 1
    assert num_passed("print(2); 1 / 0", *tests) == 0


def test_without_partial_credit_tests_end_at_the_first_failure():
    tests = [{"input": "", "output": "1"}, {"input": "", "output": "2"}, "assert f() == 1"]
    assert num_passed("def f(): return 1\nprint(2)", *tests) == 2
    assert num_passed("def f(): return 1\nprint(2)", *tests, to_the_end=False) == 0


def test_the_setup_runs_before_the_program():
    setup = "class Node:\n    def __init__(self, value): self.value = value"
    program = "def value(node): return node.value if isinstance(node, Node) else None"
    assert num_passed(program, "assert value(Node(3)) == 3", setup=setup) == 1


@pytest.mark.parametrize(
    "program",
    [
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(77)",
        "print('passed')\nimport os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import builtins\nbuiltins.bool = lambda value: True\ndef add(a, b): return 77",
        "import os\nfor fd in range(32):\n    try: os.write(fd, b'{\"value\": true}\\n' * 5)\n"
        "    except OSError: pass\nos._exit(0)",
        "import json\njson.dumps = lambda value: '{\"value\": true}'\ndef add(a, b): return 77",
    ],
    ids=["equal to all", "a number equal to all", "exit", "sys.exit", "builtins", "own answers", "own json"],
)
def test_no_program_fakes_a_verdict(program):
    assert num_passed(program, *ADDING) == 0


def test_what_is_right_is_never_beside_the_program():
    shown = []

    class Recorded(Sandbox):
        async def run(self, files, *, wall_time_s, stdin=""):
            shown.append("".join([*files.values(), stdin]))
            return await super().run(files, wall_time_s=wall_time_s, stdin=stdin)

    program = "def f(n): return n"
    tests = [
        {"call": "f", "arguments": [1], "result": 987654},
        "assert f(1) == 987654",
        "assert abs(f(1) - 987654) < 1e9",
        {"input": "", "output": "987654"},
    ]
    judged = Judge(Recorded(CONFIG), 60.0, to_the_end=True).judge(program, read_cases({"tests": tests}, CONFIG))
    assert asyncio.run(judged).num_passed == 1
    with_program = [text for text in shown if "def f(n)" in text]
    assert len(with_program) == 2
    assert not any("987654" in text for text in with_program)


FORGED = {
    # Keys that collide are compared with each other, which takes quadratic time.
    "colliding keys": json.dumps({"value": {"dict": [[{"int": hex(n * (2**61 - 1))}, 0] for n in range(30000)]}}),
    "colliding members": json.dumps({"value": {"set": [{"int": hex(n * (2**61 - 1))} for n in range(30000)]}}),
    "deep": '{"value": ' + '{"list": [' * 50000 + "]}" * 50000 + "}",
    "long": '{"value": ' + "9" * 500000 + "}",
    "large": '{"value": {"list": [' + ",".join(['{"list": []}'] * 80000) + "]}}",
}


@pytest.mark.parametrize("answer", FORGED)
def test_no_answer_costs_the_trainers_loop_more_than_its_length(answer):
    class Answering(Sandbox):
        async def run(self, files, *, wall_time_s, stdin=""):
            if "request.json" in files:
                return Execution(output=f"{FORGED[answer]}\n".encode() * 2, exit_code=0, timed_out=False)
            return await super().run(files, wall_time_s=wall_time_s, stdin=stdin)

    async def check():
        config = evolve(CONFIG, max_output_kib=2048, cpu_time_s=1)
        cases = read_cases({"tests": [{"call": "f", "arguments": [], "result": {"a": 1}}, "assert len(f()) == 3"]}, config)
        judging = asyncio.create_task(Judge(Answering(config), 60.0, to_the_end=True).judge("", cases))
        longest_s = 0.0
        while not judging.done():
            used_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - used_s)
        return await judging, longest_s

    verdict, longest_s = asyncio.run(check())
    assert verdict.num_passed == 0
    assert longest_s < 0.5


def test_time_is_for_all_tests_together():
    verdict = judge("import time; time.sleep(600)", *[{"input": "", "output": "1"}] * 3, wall_time_s=1.0)
    assert verdict.timed_out
    assert verdict.num_passed == 0


def test_answers_before_a_program_hangs_count():
    program = "def f(n):\n    while n > 1: pass\n    return n"
    verdict = judge(program, "assert f(1) == 1", "assert f(2) == 2", cpu_time_s=1)
    assert verdict.timed_out
    assert verdict.num_passed == 1


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (b"1\n2\n", "1\n2", True),
        (b"1  \r\n2\n\n", "1\n2", True),
        (b" 1", "1", False),
        (b"1 2", "1\n2", False),
        (b"", "", True),
        (b"\xff", "\ufffd", True),
        ("é".encode(), "é", True),
    ],
)
def test_outputs_are_compared_by_lines(found, expected, same):
    assert is_same_output(found, expected) is same
