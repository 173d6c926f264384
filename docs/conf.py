"""Sphinx configuration, and the page that is made from the configuration's schema."""

from __future__ import annotations

import sys
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "daskinfer"
author = "daskinfer developers"
release = package_version("daskinfer")
version = release
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"daskinfer {release}"
autodoc_typehints = "none"
numpydoc_show_class_members = False
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3


class ConfigurationTable(SphinxDirective):
    """Describe every key of ``daskinfer.yaml``, from its schema and defaults."""

    def run(self) -> list[nodes.Node]:
        """Return one definition for each key."""
        schema_file = ROOT / "daskinfer" / "daskinfer-schema.yaml"
        defaults_file = ROOT / "daskinfer" / "daskinfer.yaml"
        for file in (schema_file, defaults_file):
            self.env.note_dependency(str(file))
        lines: list[str] = []
        describe(
            yaml.safe_load(schema_file.read_text("utf-8"))["properties"],
            yaml.safe_load(defaults_file.read_text("utf-8")),
            "",
            lines,
        )
        return self.parse_text_to_nodes("\n".join(lines))


def describe(
    properties: dict[str, Any], defaults: dict[str, Any], path: str, lines: list[str]
) -> None:
    """Append a Markdown definition for each leaf below `path`."""
    for name, schema in properties.items():
        key = f"{path}.{name}" if path else name
        if "properties" in schema:
            describe(schema["properties"], defaults[name], key, lines)
            continue
        default = "null" if defaults[name] is None else defaults[name]
        # Descriptions are written for readers of the YAML, in reStructuredText.
        text = " ".join(schema["description"].split()).replace("``", "`")
        lines += [f"`{key}` (default `{default}`)", f": {text}", ""]


def setup(app: Sphinx) -> None:
    """Register the directive."""
    app.add_directive("configuration-table", ConfigurationTable)
