"""How many responses are tested at once."""

from rlcore_code.config import CodeConfig, num_processes
from rlcore_code.provider import CODE
from rlcore_workers.pool import default_processes


def test_it_is_the_number_of_cores_unless_stated():
    assert num_processes(CodeConfig()) == default_processes()
    assert CODE.max_concurrent(CodeConfig(num_processes=3)) == 3
