"""Fixtures of the parts of the kit for tokenizers and renderers."""

from importlib import import_module
from typing import Any, ClassVar, Literal

import pytest

from rlcore.registry.run_parts import TextEntry
from rlcore.spi import TextProvider


class TextFixtures:
    """The provider under test, and what it builds."""

    role: ClassVar[Literal["tokenizer", "renderer"]]

    @pytest.fixture
    def provider(self) -> TextProvider:
        """The provider under test: override it."""
        pytest.fail("override the fixture `provider` to return the TextProvider under test", pytrace=False)

    @pytest.fixture
    def entry(self, provider: TextProvider) -> TextEntry:
        """The provider as an installed one."""
        return TextEntry(role=self.role, name=provider.name, distribution="kit", version="1").holding(provider)

    @staticmethod
    def built(provider: TextProvider) -> Any:
        """Return what the backend returns."""
        module, _, name = provider.backend.partition(":")
        return getattr(import_module(module), name)()
