"""What a provider says of a plugin."""

from rlcore.spi import (
    ENTRY_POINT_GROUPS,
    ROLES,
    Provider,
)


def test_a_providers_names_may_come_in_any_collection():
    provider = Provider(name="x", spi=(2, 0), config=object, backend="m:B", capabilities=["top_k"], devices={"cuda"})
    assert provider.capabilities == frozenset({"top_k"})
    assert provider.devices == frozenset({"cuda"})
    assert provider.unavailable() is None


def test_every_role_has_a_group_named_after_it():
    assert {role: f"rlcore.{role}s" for role in ROLES} == ENTRY_POINT_GROUPS
