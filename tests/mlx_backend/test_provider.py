"""Where MLX is not there, the plugin says so, with the remedy."""

import pytest

from rlcore_mlx import provider


class Spec:
    def __init__(self, folder):
        self.submodule_search_locations = [str(folder)]


def test_where_it_can_be_imported_nothing_is_said():
    assert provider.unavailable() is None


def test_without_mlx_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setattr(provider, "find_spec", lambda name: None)
    assert provider.unavailable() == 'mlx is not installed: pip install mlx on a Mac, pip install "mlx[cpu]" on Linux'


@pytest.mark.parametrize(("platform", "is_refused"), [("linux", True), ("darwin", False)])
def test_on_linux_the_library_comes_by_an_extra(platform, is_refused, monkeypatch, tmp_path):
    monkeypatch.setattr(provider, "find_spec", lambda name: Spec(tmp_path))
    monkeypatch.setattr(provider.sys, "platform", platform)
    assert (provider.unavailable() is not None) == is_refused
