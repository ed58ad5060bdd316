"""`rlcore doctor`: its exit codes and forms."""

import json

import pytest
from click.testing import CliRunner

from rlcore_doctor.command import doctor_command

PAGE = {
    "python": {"version": "3.11.7", "implementation": "CPython", "prefix": "~/env"},
    "system": {"platform": "Linux", "processors": 2, "memory_gib": None},
    **{name: [] for name in ("gpus", "libraries", "not_installed", "packages", "plugins", "others", "problems", "notes")},
    "variables": {},
    "interface": None,
}


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("arguments", [[], ["--json"], ["recipe.toml", "--no-import", "--timeout", "5"]])
def test_the_exit_code_says_whether_all_fits(monkeypatch, fits: bool, code: int, arguments: list[str]) -> None:
    asked = []

    def report(recipe, seconds, *, imports):
        asked.append((recipe, seconds, imports))
        return PAGE | {"fits": fits}

    monkeypatch.setattr("rlcore_doctor.report.report", report)
    ended = CliRunner().invoke(doctor_command, arguments)
    assert ended.exit_code == code
    assert asked == [("recipe.toml", 5.0, False) if len(arguments) > 1 else (None, 120.0, True)]
    assert ended.output.startswith("{" if arguments == ["--json"] else "Machine")
    if arguments == ["--json"]:
        assert json.loads(ended.output) == PAGE | {"fits": fits}


def test_a_time_limit_that_is_none_is_refused() -> None:
    assert CliRunner().invoke(doctor_command, ["--timeout", "0"]).exit_code == 2


@pytest.mark.parametrize(("value", "is_coloured"), [("", True), ("1", False)])
def test_no_color_is_heeded(monkeypatch, value: str, is_coloured: bool) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    monkeypatch.setattr("rlcore_doctor.report.report", lambda *_, **__: PAGE | {"fits": True})
    assert ("\x1b[" in CliRunner().invoke(doctor_command, [], color=True).output) is is_coloured
