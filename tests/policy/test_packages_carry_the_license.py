"""Every package carries the license: neither its wheel nor its source distribution can take in a file above its folder."""


def test_every_package_has_the_repositorys_license(root):
    packages = sorted(
        path.parent
        for path in (root / "core/pyproject.toml", root / "torchkit/pyproject.toml", *root.glob("plugins/*/pyproject.toml"))
    )
    assert len(packages) > 6
    expected = (root / "LICENSE").read_text()
    wrong = [str(path.relative_to(root)) for path in packages if (path / "LICENSE").read_text() != expected]
    assert not wrong, f"copy LICENSE into {wrong}"
