"""A tag is released only where version, links and changelog are those of the tag."""

import pytest
from packaging.version import Version

REPOSITORY = "https://host.example/owner/rlcore"


@pytest.fixture
def problems(versions, check_tag, checkout):
    """The problems of a checkout that is the release 7.3.1."""
    versions.set_version(Version("7.3.1"), checkout, REPOSITORY)
    return lambda tag="v7.3.1", repository=REPOSITORY: list(check_tag.problems(tag, repository, checkout))


def test_a_release_is_fine(problems):
    assert problems() == []


def change(checkout, file, old, new):
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("plugins/grpo/pyproject.toml", '"7.3.1"', '"7.3.0"', "plugins/grpo/pyproject.toml has the version 7.3.0"),
        ("core/pyproject.toml", f'"{REPOSITORY}"', '"https://x"', "core/pyproject.toml names the repository https://x"),
        (
            "plugins/grpo/pyproject.toml",
            "rlcore>=7.3,<7.4",
            "rlcore>=7.2,<7.3",
            "plugins/grpo/pyproject.toml requires rlcore>=7.2",
        ),
        ("CHANGELOG.md", "[7.3.1] -", "[7.3.0] -", "CHANGELOG.md begins with [7.3.0]"),
        ("CHANGELOG.md", "## [", "# [", "CHANGELOG.md begins with no heading"),
    ],
)
def test_what_is_not_that_of_the_tag_is_named(problems, checkout, file, old, new, expected):
    change(checkout, file, old, new)
    (problem,) = problems()
    assert problem.startswith(expected)


@pytest.mark.parametrize("arguments", [{"tag": "v7.3"}, {"tag": "7.3.1"}, {"repository": f"{REPOSITORY}2"}])
def test_every_package_is_asked(problems, builder, arguments):
    assert len(problems(**arguments)) >= len(builder.packages())


def test_packages_without_links_are_named(versions, check_tag, checkout):
    versions.set_version(Version("7.3.1"), checkout)
    assert "names the repository None" in next(check_tag.problems("v7.3.1", REPOSITORY, checkout))
