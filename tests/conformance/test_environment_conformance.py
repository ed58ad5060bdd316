"""The environments that need no model pass the kit; those that bring no rows get one of the data that they are for."""

from importlib.metadata import entry_points

import pytest

from rlcore.schema.structure import structure
from rlcore_code.checks import check_code
from rlcore_code.config import CodeConfig
from rlcore_conformance import EnvironmentConformance

PROVIDERS = {entry.name: entry.load() for entry in entry_points(group="rlcore.environments")}


class TestEnvironmentsWithRows(EnvironmentConformance):
    @pytest.fixture(params=["arithmetic", "calculator", "drawn_shapes", "textarena"])
    def provider(self, request):
        return PROVIDERS[request.param]


class EnvironmentOfData(EnvironmentConformance):
    test_splits_share_no_row = None
    test_rows_follow_the_seed = None


class TestUnrewarded(EnvironmentOfData):
    @pytest.fixture
    def provider(self):
        return PROVIDERS["unrewarded"]

    @pytest.fixture
    def row(self):
        return {"prompt": "Once upon a time"}


class TestMath(EnvironmentOfData):
    """Its answers are checked in other processes, which takes a second to start: few checks."""

    test_it_works_on_any_event_loop = None
    test_episodes_do_not_disturb_each_other = None
    test_states_can_be_saved = None

    @pytest.fixture
    def provider(self):
        return PROVIDERS["math"]

    @pytest.fixture
    def row(self):
        return {"prompt": "How much is 6 times 7?", "answer": "42"}

    @pytest.fixture
    def answers(self):
        return "", "\\boxed{42}"


class TestReasoningGym(EnvironmentConformance):
    """Its answers are scored in other processes, which takes seconds to start: few checks."""

    test_an_episode_depends_on_row_and_seed = None
    test_states_stay_as_they_are = None
    test_it_works_on_any_event_loop = None
    test_episodes_do_not_disturb_each_other = None
    test_states_can_be_saved = None
    test_it_goes_on_after_close = None
    test_a_call_can_be_cancelled = None

    @pytest.fixture
    def provider(self):
        return PROVIDERS["reasoning_gym"]

    @pytest.fixture
    def config(self, provider):
        value = {"families": {"chain_sum": {"levels": [0]}, "gcd": {}}, "num_processes": 1}
        made, problems = structure(value, provider.config, "environment.reasoning_gym")
        assert not problems
        return made

    @pytest.fixture
    def answers(self):
        return "", "<answer>42</answer>"


class TestCode(EnvironmentOfData):
    """Each answer starts processes: few checks."""

    test_it_works_on_any_event_loop = None
    test_episodes_do_not_disturb_each_other = None
    test_states_can_be_saved = None

    @pytest.fixture
    def provider(self):
        if problems := check_code(None, CodeConfig()):
            pytest.skip(str(problems[0]))
        return PROVIDERS["code"]

    @pytest.fixture
    def row(self):
        return {"prompt": "Write twice(n).", "tests": ["assert twice(2) == 4"]}

    @pytest.fixture
    def answers(self):
        return "", "```python\ndef twice(n): return 2 * n\n```"
