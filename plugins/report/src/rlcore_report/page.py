"""The page: its parts and what it shows, joined into one file."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "dom.js",
    "scale.js",
    "chart.js",
    "time.js",
    "spread.js",
    "samples.js",
    "failures.js",
    "recipes.js",
    "proofs.js",
    "main.js",
)
"""In the order in which they use each other."""

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""A policy under which a page loads and sends nothing."""


def page(data: Mapping[str, Any], title: str) -> str:
    """A whole HTML file. Its policy allows the style and the script that are in it, by their digests, and nothing else: no
    request, and no script in what the runs hold."""
    style = _asset("style.css")
    script = f'(() => {{\n"use strict";\n{"".join(map(_asset, SCRIPTS))}}})();\n'
    parts = {
        "title": escape(_encodable(title)),
        "policy": f"{NOTHING}; style-src {_digest(style)}; script-src {_digest(script)}",
        "style": style,
        "data": as_json({"title": title, **data}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def as_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in an HTML file whatever texts it holds: no element or comment begins or ends in it. ValueError where
    a number is not finite: the page has signs for those."""
    text = _encodable(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _encodable(text: str) -> str:
    """Text without lone surrogates, which UTF-8 has no bytes for and which end some browsers' tools."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
