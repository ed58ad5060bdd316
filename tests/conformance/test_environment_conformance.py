"""The environments that need no model pass the kit; those that bring no rows get one of the data that they are for."""

from importlib.metadata import entry_points

import pytest

from rlcore.testing import EnvironmentConformance

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
    test_states_can_be_sent = None

    @pytest.fixture
    def provider(self):
        return PROVIDERS["math"]

    @pytest.fixture
    def row(self):
        return {"prompt": "How much is 6 times 7?", "answer": "42"}

    @pytest.fixture
    def answers(self):
        return "", "\\boxed{42}"
