"""The rows of the listing: what is usable, and which plugin "auto" takes."""

from attrs import evolve

from rlcore.registry.discovery import Registry, discover
from rlcore.testing.fakes.providers import FAKE_TRAINER
from rlcore_doctor.auto_choice import auto_error, explain


def test_explain_says_usable_or_why_not_and_what_auto_takes():
    best = evolve(FAKE_TRAINER, name="best", priority=9)
    gpu = evolve(FAKE_TRAINER, name="gpu", priority=80, devices=frozenset({"cuda"}))
    off = evolve(FAKE_TRAINER, name="off", unavailable=lambda: "no")
    registry = Registry.from_providers({"trainer": [best, gpu, off]})
    rows = {row.entry.name: (row.is_usable, row.reason, row.auto) for row in explain(registry, "trainer", "cpu")}
    assert rows["best"] == (True, None, True)
    assert rows["off"] == (False, "no", False)
    assert rows["gpu"][0] is True
    assert "meant for cuda" in rows["gpu"][1]
    assert auto_error(registry, "trainer", "cpu") is None


def test_explain_marks_duplicates_and_auto_error_says_why_nothing_is_taken(installer):
    installer.trainer("twin", "acme-one", priority=10)
    installer.trainer("twin", "acme-two", priority=20)
    installer.trainer("other", priority=5)
    rows = explain(discover(), "trainer", "cpu")
    assert [(row.entry.name, row.is_usable, row.auto) for row in rows] == [
        ("other", True, False),
        ("twin", False, False),
        ("twin", False, False),
    ]
    assert "duplicate name" in auto_error(discover(), "trainer", "cpu")
