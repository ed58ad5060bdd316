"""The web site builds without a warning, has every page, and asks no other host for anything."""

import logging
import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from markdown_blocks import DOCUMENTS, ROOT

pytestmark = pytest.mark.wide  # continuous integration builds the site in a job of its own


class Requests(HTMLParser):
    """What a browser fetches of its own accord to show a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in {"script", "img", "iframe", "source", "video"} and given.get("src"):
            self.found.append(given["src"])
        if tag == "link" and given.get("rel") in {
            "stylesheet",
            "icon",
            "preload",
            "modulepreload",
            "preconnect",
            "dns-prefetch",
        }:
            self.found.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and its warnings."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    folder = tmp_path_factory.mktemp("site")
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    return folder, warnings


def page(folder, document):
    """Where a document is on the site."""
    path = document.relative_to(ROOT)
    return folder / (path.parent if path.name == "README.md" else path.with_suffix("")) / "index.html"


def test_nothing_warns(site):
    assert site[1] == []


def test_every_document_is_a_page_that_the_navigation_leads_to(site):
    folder, _ = site
    home = (folder / "index.html").read_text()
    for document in DOCUMENTS:
        path = page(folder, document)
        assert path.is_file(), f"{document.relative_to(ROOT)} is no page of the site"
        address = f"{path.parent.relative_to(folder)}/" if path.parent != folder else "."
        assert f'href="{address}"' in home, f"the navigation does not lead to {address}"


def test_every_page_shows_without_a_request_to_another_host(site):
    folder, _ = site
    pages = list(folder.rglob("*.html"))
    assert len(pages) > 40
    for path in pages:
        requests = Requests()
        requests.feed(path.read_text())
        assert requests.found
        outside = [address for address in requests.found if urlsplit(address).netloc]
        assert not outside, f"{path.relative_to(folder)} fetches {outside}"
    styles = list(folder.rglob("*.css"))
    assert styles
    assert not [path.name for path in styles if re.search(r"url\(['\"]?(https?:)?//", path.read_text())]


def test_no_diagram_needs_a_script_from_elsewhere(site):
    """Material fetches the library for `mermaid` blocks from another host."""
    folder, _ = site
    assert not [path for path in folder.rglob("*.html") if 'class="mermaid"' in path.read_text()]


def test_the_interfaces_reference_has_every_public_name(site):
    import rlcore.spi

    text = (site[0] / "docs/interface/index.html").read_text()
    missing = [
        name
        for name in rlcore.spi.__all__
        if isinstance(value := getattr(rlcore.spi, name), type)
        and value.__module__.startswith("rlcore.spi.")
        and f'id="{value.__module__}.{name}"' not in text
    ]
    assert not missing
