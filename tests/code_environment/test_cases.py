"""How tests of a row are read, and what is said of those that cannot be."""

import json
import pickle

import pytest

from rlcore.spi import DataError
from rlcore_code.cases import AssertCase, StreamCase, ValueCase, read_cases
from rlcore_code.config import CodeConfig


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def read(*tests, **fields):
    return read_cases({"prompt": "?", "tests": list(tests), **fields}, CodeConfig())


def test_the_three_forms():
    cases = read(
        {"input": "1", "output": "2"},
        {"call": "Solution().add", "arguments": [1, [True, None], {"a": 0.5}], "result": [1]} | {"call": "add"},
        "assert add(1, 2) == (3, {4})",
    )
    assert cases.streams == (StreamCase(input="1", output="2"),)
    call, compared = cases.values
    assert call == ValueCase(question="add(1, [True, None], {'a': 0.5})", expected=[1], is_json=True)
    assert compared == ValueCase(question="add(1, 2)", expected=(3, {4}), is_json=False)
    assert len(cases) == 3
    assert pickle.loads(pickle.dumps(cases)) == cases


@pytest.mark.parametrize(
    ("text", "questions", "condition", "modules"),
    [
        ("assert abs(f(1) - 2) < 1e-6", ["f(1)"], "abs(_0 - 2) < 1e-06", ()),
        ("assert math.isclose(f(g(1)), 2.5), 'close'", ["f(g(1))"], "math.isclose(_0, 2.5)", ("math",)),
        ("assert not Solver(3).solve()[0]", ["Solver(3).solve()[0]"], "not _0", ()),
        ("assert Graph([1]).has_path(1, 2)", ["Graph([1]).has_path(1, 2)"], "_0", ()),
        ("assert is_prime(7) and not is_prime(8)", ["is_prime(7)", "is_prime(8)"], "_0 and (not _1)", ()),
        ("assert is_sorted(f([2, 1]))", ["is_sorted(f([2, 1]))"], "_0", ()),
        ("assert f(1) == f(2)", ["f(1)", "f(2)"], "_0 == _1", ()),
        ("assert 3 == sorted(f(1))[0]", ["f(1)"], "3 == sorted(_0)[0]", ()),
        ("assert f(1) == set([1, 2])", ["f(1)"], "_0 == set([1, 2])", ()),
        ("assert f(x=1) is True", ["f(x=1)"], "_0 is True", ()),
        ("assert select(1) > 2", ["select(1)"], "_0 > 2", ()),
        ("assert total > 2", ["total"], "_0 > 2", ()),
        ("assert is_tree(Node(1), 3)", ["is_tree(Node(1), 3)"], "_0", ()),
        ("assert sorted(f(1), key=lambda x: -x) == [2]", ["f(1)"], "sorted(_0, key=lambda x: -x) == [2]", ()),
        ("assert all(x > 0 for x in f(1))", ["f(1)"], "all((x > 0 for x in _0))", ()),
        ("assert {tuple(x) for x in f([y for y in 'a'])}", ["f([y for y in 'a'])"], "{tuple(x) for x in _0}", ()),
        ("assert (x := f(1)) > 2 and x < 4", ["f(1)"], "(x := _0) > 2 and x < 4", ()),
        ("assert distance(Point(1), 3) < 5", ["distance(Point(1), 3)"], "_0 < 5", ()),
        ("assert Solver().solve(1) == Solver().solve(2)", ["Solver().solve(1)", "Solver().solve(2)"], "_0 == _1", ()),
    ],
)
def test_asserts_are_questions_and_a_condition(text, questions, condition, modules):
    [case] = read(text).asserts
    assert case == AssertCase(questions=tuple(questions), condition=condition, modules=modules)


STREAM, CALL = {"input": "1", "output": "2"}, {"call": "add", "arguments": [1], "result": None}


@pytest.mark.parametrize(
    ("tests", "num_streams", "num_values"),
    [
        ([STREAM | dict.fromkeys(CALL), CALL | dict.fromkeys(STREAM)], 1, 1),  # a table's structs
        ([STREAM, {"call": "add", "arguments": [1]}], 1, 1),  # a table without the nulls of its structs
        ([json.dumps(STREAM), json.dumps(CALL), "assert add(1) is None"], 1, 1),
        (json.dumps([STREAM, CALL]), 1, 1),
    ],
)
def test_forms_may_be_mixed_in_a_table(tests, num_streams, num_values):
    cases = read_cases({"prompt": "?", "tests": tests}, CodeConfig())
    assert (len(cases.streams), len(cases.values)) == (num_streams, num_values)
    assert cases.values[0] == ValueCase(question="add(1)", expected=None, is_json=True)


RIGHT = 987654
NEVER_SHOWN = [
    "assert f(1).__eq__(987654)",
    "assert f(1).startswith('987654')",
    "assert not f(1).isdisjoint({987654})",
    "assert f(1).issuperset([987654]) and f(2)",
    "assert f(1).count(987654) == 1",
    "assert f(1)[0].count(987654) == 1",
    "assert f(1).index(987654) >= 0",
    "assert Solution().f(1).__contains__(987654)",
    "assert f(1)['987654']",
    "assert {987654}.issubset(f(1))",
    "assert 987654 in f(1)",
    "assert (f(1) == 987654) is True",
    "assert sorted(f(1)) == [987654]",
    "assert math.isclose(f(1), 987654)",
    "assert f(1) == 987654 if f(2) else f(3) == 987654",
    "assert [f(1), 987654] == [987654, f(1)]",
    "assert f'{f(1)}' == '987654'",
    "assert near(f(1), 987654)",
    "assert near(f(1), LIMIT)",
    "assert Checker(987654).accepts(f(1))",
    "assert not near(f(1), 987654 + 1) and helper(f(2))",
]
SETUP = """
import math
LIMIT = 987654
def near(found, right): return abs(found - right) < 1
def _right(): return 987654
def helper(found): return found == _right()
class Checker:
    known = 987654
    def __init__(self, right): self.right = right
    def accepts(self, found): return found == self.right
class Node: pass
def shown(node): return node
"""


@pytest.mark.parametrize("text", NEVER_SHOWN)
def test_what_is_right_is_in_no_question(text):
    cases = read("assert helper(f(0)) and near(f(1), LIMIT) and Checker(LIMIT)", text, setup=SETUP)
    for case in [*cases.values, *cases.asserts]:
        assert not any(str(RIGHT) in question for question in case.questions), case
    assert str(RIGHT) not in cases.given_setup
    assert {"class Node", "def shown", "import math"} <= {
        line.partition(":")[0].partition("(")[0] for line in cases.given_setup.split("\n")
    }


@pytest.mark.parametrize(
    "text",
    [
        "assert check(f(1), 987654)",
        "assert not differs(f(1), 987654)",
        "assert check(f(1), 987654) == True",
        "assert check(f(1), 987654) is not False",
        "assert f(2) and check(right=987654, found=f(1))",
        "assert bool(check(f(1), 987654))",
        "assert np.allclose(f(1), [987654])",
        "assert np.abs(f(1) - 987654) < 1e-6",
        "assert Tester().equal(f(1), 987654)",
        "assert Tester(987654).accepts(f(1))",
        "assert True == check(f(1), 987654)",
        "assert [check(f(1), 987654)] == [True]",
        "assert all([check(f(1), 987654), check(f(2), 987654)])",
        "assert any(check(f(1), 987654) for _ in 'a')",
        "assert check(f(1), 987654) & check(f(2), 987654)",
        "assert check(f(1), 987654) if f(2) else False",
        "assert (passed := check(f(1), 987654))",
        "assert check(*[f(1), 987654])",
        "assert check(f, [(1, 987654)])",
        "assert f(1).equals(987654)",
        "assert f(1).isEqual(987654)",
        "assert f(1).eq(987654)",
        "assert f(1).should_be(987654)",
        "assert expect(f(1)).toBe(987654)",
        "assert all_equal([f(1), 987654])",
        "assert check({f(1): 987654})",
        "assert check(**{'found': f(1), 'right': 987654})",
        "assert near(f(1) - 987654)",
        "assert is_true(f(1) == 987654)",
        "assert eq(f(1), [])",
        "assert check(f(1), 987654) == 1",
        "assert sum([check(f(1), 987654), check(f(2), 987654)]) == 2",
        "assert assert_equal(f(1), 987654) is None",
        "assert np.testing.assert_allclose(f(1), 987654) is None",
        "assert np.linalg.norm(f(1) - 987654) < 1",
        "assert abs(distance(f(1), 987654)) < 1",
        "assert len(difference(f(1), [987654])) == 0",
        "assert similarity(f(1), 987654) > 0.99",
        "assert f(1) == Counter([987654])",
        "assert Counter(f(1)) == Counter([987654])",
        "assert deque([987654]) == f(1)",
        "assert f(1) == Point.of(987654)",
        "assert (f(1) == np.array([987654])).all()",
        "assert f(1) == pytest.approx(987654)",
        "assert Node(1) == Node(1)",
        "assert Vector(1) + Vector(2) == Vector(3)",
        "assert Point(1) in {Point(1)}",
        "assert Version(1) < Version(2)",
        "assert f(1) == Color.RED",
        "assert f(1) is f(1)",
        "assert f is g",
        "assert id(f(1)) != id(f(2))",
        "assert issubclass(B, A)",
        "assert asyncio.run(f(1)) == 2",
        "assert inspect.isgenerator(f(1))",
        "assert dataclasses.asdict(Point(1)) == {'x': 1}",
    ],
)
def test_a_helper_that_nobody_defines_is_refused(text):
    with pytest.raises(DataError, match="helper"):
        read(text)


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("assert list(map(f, [1])) == [2]", ""),
        ("assert sorted([2, 1], key=f) == [1, 2]", ""),
        ("assert max([2, 1], key=f) == 2", ""),
        ("assert callable(f)", ""),
        ("assert functools.reduce(f, [1, 2]) == 3", ""),
        ("assert check(f)", "def check(candidate):\n    assert candidate(1) == 2\n    return True"),
        ("assert check(1, function=f)", "def check(number, function):\n    return function(number) == 2"),
        ("assert check(f)", "def check(given):\n    return run(given)"),
        ("assert check(f)", "def check(given):\n    call = given\n    return call(1) == 2"),
        ("assert check(1, f)", "def check(*given):\n    return given[1](1) == 2"),
        ("assert check(given=f)", "def check(*, given):\n    return [given][0](1) == 2"),
        ("assert check(f)", "def check(given):\n    return list(map(given, [1])) == [2]"),
        ("assert list(itertools.takewhile(f, [1])) == [1]", ""),
        ("assert len(list(itertools.groupby([1], f))) == 1", ""),
        ("assert re.sub('a', f, 'b') == 'b'", ""),
        ("assert sorted([2, 1], key=functools.cmp_to_key(f)) == [1, 2]", ""),
        ("assert f and f(1) == 2", ""),
        ("assert f is not None and f(1) == 2", ""),
        ("assert [f][0](1) == 2 and f(1) == 2", ""),
        ("assert inspect.isfunction(f) and f(1) == 2", ""),
        ("assert f", ""),
        ("assert f is not None", ""),
        ("assert hasattr(f, '__call__')", ""),
        ("assert [g(1) for g in [f]] == [2]", ""),
        ("assert {'f': f}['f'](1) == 2", ""),
        ("assert (f or g)(1) == 2", ""),
        ("assert (lambda g: g(1))(f) == 2", ""),
        ("assert check(given=f)", "def check(**given):\n    return given['given'](1) == 2"),
        ("assert isinstance(f(1), Stack)", ""),
    ],
)
def test_a_function_that_is_handed_over_is_refused(text, setup):
    with pytest.raises(DataError, match="(f|Stack) stands"):
        read(text, setup=setup)


@pytest.mark.parametrize(
    "text",
    [
        *("assert near(total, 3)", "assert near(f(1), 3)", "assert sorted(f(1)) == [1]", "assert len(total) > 2"),
        *(
            "assert f(g)(1) == 2 and g(1) == 2",
            "assert f(sorted([1], key=g)) == 2",
            "assert f(g, map(g, [1])) == 2 and g(1) == 3",
        ),
        *("assert f.__name__ == 'f' and f(1) == 2", "assert math.isclose(total, 2.5)", "assert sum(total) == 3"),
        *("assert MOD == 7", "assert ' '.join(names) == 'a b'", "assert (total, f(1)) == (7, 2)", "assert Stack().size == 1"),
    ],
)
def test_a_value_that_is_handed_over_is_asked_for(text):
    assert len(read(text, setup="def near(value, other): return abs(value - other) < 1")) == 1


def test_what_questions_name_is_given_to_the_program():
    setup = "LIMIT = 3\ndef make(n): return LIMIT * n\ndef right(n): return make(n) == 3"
    cases = read("assert right(f(make(1)))", setup=setup)
    assert cases.given_setup == "LIMIT = 3\ndef make(n):\n    return LIMIT * n"
    assert cases.setup == setup


@pytest.mark.parametrize(
    ("setup", "given"),
    [
        ("data, right = [1], 987654", "data = [1]"),
        ("right = {}\nright['a'] = 987654\ndata = 1", "data = 1"),
        ("right = []\nfor n in range(3):\n    right.append(n)\ndata = 1", "data = 1"),
        ("right = 987654\nshifted = right + 1\ndata = 1", "data = 1"),
        ("def right(): return 987654\ndef shown(): return right()\ndata = 1", "data = 1"),
        ("data = {}\ndata[1] = helper = 2\nright = 987654", "data = {}\ndata[1] = helper = 2"),
        ("import sys\nsys.setrecursionlimit(5000)\nright = 987654", "import sys\nsys.setrecursionlimit(5000)"),
        ("def right(n):\n    data = n\n    return data\ndata = 1", "data = 1"),
    ],
)
def test_the_given_setup_runs_without_what_is_right(setup, given):
    cases = read("assert f(data) == right", setup=setup)
    assert cases.given_setup == given
    exec(cases.given_setup, {})


def test_names_of_the_setup_are_no_questions():
    setup = ["from math import isclose as near", "import numpy as np\nLEAST = 3\ndef twice(x): return 2 * x"]
    [case] = read("assert near(twice(f(1)), np.pi) and f(2) > LEAST", setup=setup).asserts
    assert case.questions == ("f(1)", "f(2)")
    assert case.condition == "near(twice(_0), np.pi) and _1 > LEAST"


@pytest.mark.parametrize(
    "question",
    [
        "f(1)[-1:]",
        "solve(1)[0].value",
        "LRUCache(2).get(1)",
        "Stack().push(3).pop()",
        "add(mul(2, 3), 4)",
        "decode(encode('ab'), 3)",
        "table[3]",
        "len(Stack())",
        "str(Vector(1, 2))",
        "list(LinkedList([1, 2]))",
        "getattr(Stack(), 'size')",
        "type(Stack()).__name__",
        "(Vector(1, 2) + Vector(3, 4)).x",
        "-Vector(1)",
    ],
)
def test_what_only_the_program_can_work_out_is_one_question(question):
    [case] = read(f"assert {question} == 4").values
    assert case.question == question


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({}, "found only the fields 'prompt'; expected in the row's field 'tests'"),
        ({"tests": []}, r"found \[\]; expected"),
        ({"tests": "assert f() == 1"}, "found 'assert f"),
        ({"tests": [3]}, r"tests\[0\]: found 3; expected"),
        ({"tests": [{"input": "1", "answer": "2"}]}, r"tests\[0\]: found .*'answer'.*; expected"),
        ({"tests": [{"input": 1, "output": "2"}]}, "expected texts as input and output"),
        ({"tests": [{"call": "f(", "arguments": [], "result": 1}]}, r"found the call 'f\('; expected the name"),
        ({"tests": [{"call": "f", "arguments": "ab", "result": 1}]}, "found the arguments 'ab'; expected a list"),
        ({"tests": [{"call": "f", "arguments": [float("nan")], "result": 1}]}, "is no JSON"),
        ({"tests": [{"call": "f", "arguments": [], "result": {1}}]}, "is no JSON"),
        ({"tests": ["assert f( == 1"]}, "expected one statement of Python"),
        ({"tests": ["assert f() == 1; assert f() == 2"]}, "expected one statement of Python"),
        ({"tests": ["f() == 1"]}, "expected assert CONDITION"),
        ({"tests": ["assert f() == " + "(" * 5000 + ")" * 5000]}, "expected one statement of Python"),
        ({"tests": ["assert 1 + 1 == 2"]}, "expected calls of the program's functions"),
        ({"tests": ["assert all(f(x) == x for x in [1, 2])"]}, "outside comprehensions and lambdas"),
        ({"tests": ["assert raises(ValueError, lambda: f(0))"], "setup": "def raises(*a): pass"}, "comprehensions and lambdas"),
        ({"tests": ["assert await f(1) == 2"]}, "outside of functions"),
        ({"tests": ["assert f() == 1"], "setup": 3}, "setup: found 3; expected Python code"),
        ({"tests": ["assert f() == 1"], "setup": "import"}, "setup: found 'import', which is no Python"),
    ],
)
def test_bad_rows_say_what_was_found_and_expected(row, found):
    with pytest.raises(DataError, match=found):
        read_cases({"prompt": "?", **row}, CodeConfig())


def test_all_problems_are_told_at_once():
    with pytest.raises(DataError, match=r"tests\[0\](?s:.*)tests\[2\]"):
        read(1, "assert f() == 1", None)


def test_fields_have_the_names_of_the_recipe():
    config = CodeConfig(tests_field="asserts", setup_field="imports")
    cases = read_cases({"asserts": ["assert f(1) == 2"], "imports": "import re"}, config)
    assert len(cases) == 1
    assert cases.setup == "import re"


@pytest.mark.parametrize(
    ("tests", "named"),
    [
        ("[" * 20_000, "tests_field"),
        (['{"input":' + '{"a":' * 20_000], "tests[0]"),
        *(([{"call": "f", "arguments": [nested(depth)], "result": 1}], "tests[0]") for depth in (101, 300, 900, 20_000)),
        ([{"call": "f", "arguments": [], "result": nested(300)}], "tests[0]"),
        ([nested(20_000)], "tests[0]"),
    ],
)
def test_values_that_are_nested_too_deeply_are_named(tests, named):
    with pytest.raises(DataError) as caught:
        read_cases({"prompt": "?", "tests": tests}, CodeConfig())
    assert named in str(caught.value)
