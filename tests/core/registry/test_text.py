"""Which of the installed tokenizers and renderers a run uses, and what it says where there is none."""

from collections.abc import Callable

import pytest

from rlcore.registry.run_parts import text_backend
from rlcore.spi import PluginError

DESCRIPTION = """
from rlcore.spi import SPI_VERSION, TextProvider

def built():
    return "{name}"

def failing():
    raise ValueError("no vocabulary")

TEXT = TextProvider(
    name="{name}", spi={spi}, backend="{name}_text:{function}", priority={priority}, unavailable=lambda: {reason!r}
)
"""


@pytest.fixture
def add(installer) -> Callable[..., None]:
    """Install a package with a tokenizer."""

    def add(name: str = "acme", spi: str = "SPI_VERSION", function: str = "built", priority: int = 0, reason=None) -> None:
        source = DESCRIPTION.format(name=name, spi=spi, function=function, priority=priority, reason=reason)
        installer.add(f"{name}-text", {"rlcore.tokenizers": {name: f"{name}_text:TEXT"}}, **{f"{name}_text": source})

    return add


@pytest.mark.parametrize(("priority", "used"), [(10, "plain"), (90, "acme")])
def test_the_highest_priority_is_used(add, priority: int, used: str) -> None:
    add(priority=priority)
    add("plain", priority=50)
    add("broken", priority=99, reason="no vocabulary is here")
    assert text_backend("tokenizer") == used


def test_two_of_one_priority_are_refused(add) -> None:
    add(priority=90)
    add("plain", priority=90)
    with pytest.raises(PluginError, match=r"priority 90; RLCORE_DISABLE_PLUGINS") as caught:
        text_backend("tokenizer")
    assert "acme" in str(caught.value)
    assert "plain" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reason": "no vocabulary is here"}, "no vocabulary is here"),
        ({"spi": "(1, 0)"}, "of another interface"),
        ({"function": "absent"}, "absent"),
    ],
)
def test_what_is_not_usable_is_listed_with_its_reason(add, options, reason: str) -> None:
    add(**options)
    with pytest.raises(PluginError, match=r"tokenizer.*pip install 'rlcore\[tokenizer\]'") as caught:
        text_backend("tokenizer")
    assert "acme" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("role", ["tokenizer", "renderer"])
def test_without_any_the_error_names_what_installs_one(monkeypatch, role) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-text")
    with pytest.raises(PluginError, match=rf"rlcore\.{role}s.*pip install 'rlcore\[tokenizer\]'"):
        text_backend(role)


def test_a_backend_that_raises_is_named(add) -> None:
    add(function="failing")
    with pytest.raises(ValueError, match="no vocabulary") as caught:
        text_backend("tokenizer")
    assert "raised as it was built: tokenizer 'acme' (acme-text 1.0)" in caught.value.__notes__
