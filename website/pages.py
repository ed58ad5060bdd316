"""Hooks of MkDocs: the site's pages are the repository's own documents, at the places where they are, so that their links work
here as they do on the repository's web page. What they link to besides is copied."""

import re
from pathlib import Path
from posixpath import join, normpath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "core/README.md", "torchkit/README.md", "plugins/*/README.md")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
_WHOLE_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<target>[^)#\s]+)(?P<anchor>(#[^)]*)?)\)")
_OTHER_PAGES = {"docs/": "Reference", "core/": "Packages", "torchkit/": "Packages", "plugins/": "Packages", "": "Project"}
"""The section of the navigation for pages that mkdocs.yml does not name, by the beginning of their paths."""
_MODULES = {
    "docs/interface.md": ("The interface for plugins", "rlcore.spi", "core/src/rlcore/spi"),
    "docs/python-interface.md": ("The Python interface", "rlcore.api", "core/src/rlcore/api.py"),
}
"""Pages that exist on the site alone: docstrings, by page."""


def on_config(config):
    """Name every page in the navigation: what mkdocs.yml leaves out follows in the section of its folder."""
    named = set(_paths(config["nav"]))
    for page in pages():
        if page not in named:
            section = next(title for beginning, title in _OTHER_PAGES.items() if page.startswith(beginning))
            _section(config["nav"], section).append(page)
    return config


def on_files(files, *, config):
    """The documents, the files that they link to, and the pages of docstrings."""
    documents = pages()
    for path in (*documents, *sorted(_linked(documents) - set(documents))):
        files.append(File(path, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    for path, (title, module, source) in _MODULES.items():
        files.append(File.generated(config, path, content=_module_page(title, module, ROOT / source)))
    return files


def on_page_markdown(markdown, *, page, config, files):
    """Links to a folder lead to its README; where it has none, their text stays."""
    folder = ROOT / Path(page.file.src_uri).parent

    def followed(match):
        path = folder / match["target"]
        if not path.is_dir():
            return match.group()
        readme = f"{match['target'].rstrip('/')}/README.md"
        return f"[{match['text']}]({readme}{match['anchor']})" if (path / "README.md").exists() else match["text"]

    return _WHOLE_LINK.sub(followed, markdown)


def pages():
    """Every document of the site, by its path from the repository's root."""
    return sorted({str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern)})


def _linked(documents):
    """The files, other than pages, that pages link to or show."""
    found = set()
    for document in documents:
        for target in _LINK.findall((ROOT / document).read_text()):
            path = normpath(join(Path(document).parent.as_posix(), target))
            if (ROOT / path).is_file():
                found.add(path)
    return found


def _module_page(title, module, source):
    """A heading and the docstrings of a module, or of each module of a package."""
    names = [f"{module}.{path.stem}" for path in sorted(source.glob("[a-z]*.py"))] if source.is_dir() else [module]
    return f"# {title}\n\n" + "\n".join(f"::: {name}\n" for name in names)


def _paths(nav):
    for item in nav:
        if isinstance(item, str):
            yield item
        else:
            for value in item.values():
                yield from [value] if isinstance(value, str) else _paths(value)


def _section(nav, title):
    for item in nav:
        if isinstance(item, dict) and title in item:
            return item[title]
    nav.append({title: []})
    return nav[-1][title]
