"""Installed descriptions that name functions, which are called with one argument."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from attrs import frozen

from rlcore.registry.discovery import load_object
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import SLOW, attributed, in_time
from rlcore.schema.problem import Note, Problem
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import group_of


@frozen(kw_only=True, eq=False)
class CalledEntry(DescribedEntry):
    """One installed description of functions."""

    def call(self, name: str, argument: object) -> Any:
        """Import the function of one of `paths` and call it; None without such a path. PluginError where it is not there."""
        path = self.paths().get(name)
        if path is None:
            return None
        function, problem = load_object(EntryPoint(self.name, path, group_of(self.role)), self.label, SLOW)
        if problem is not None:
            raise PluginError(f"{self.label} cannot be used: {problem}")
        what = "raised by" if name == self.role else f"raised by the {name} of"
        with attributed(what, self.label), in_time(f"the {name} of {self.label}", SLOW):
            return function(argument)

    def check(self, argument: object) -> tuple[Problem | Note, ...]:
        """Return what the plugin's own check finds wrong with a run. PluginError for anything but problems and notes."""
        found = self.call("check", argument)
        with attributed("raised by the check of", self.label):
            listed = () if found is None else tuple(found) if isinstance(found, Iterable) else (found,)
        if not all(isinstance(one, Problem | Note) for one in listed):
            raise PluginError(f"{self.label}: its check returned {found!r:.200}; expected problems and notes of rlcore.spi")
        return listed
