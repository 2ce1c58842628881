"""What these pages take from elsewhere, so that nothing is written twice.

* ``.. from-markdown:: FILE`` shows a section or a paragraph of README or CHANGELOG,
  ``.. command-help:: COMMAND`` what the command line says of itself.
* Docstrings are made reStructuredText, and references to where a class is defined lead
  to where it is documented.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

ROOT = Path(__file__).resolve().parents[2]

# Of a page's title, its sections, and theirs.
_UNDERLINES = {1: "=", 2: "-", 3: "~"}
_HEADING = re.compile(r"^(#+) (.+)$")
_CODE = re.compile(r"(`[^`]+`)")
_IMAGE = re.compile(r"!\[([^]]+)\]\(([^)]+)\)")
_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


def part_of(text: str, section: str | None, paragraph: str | None) -> str:
    """Return a section of a Markdown text, without its heading, or a paragraph.

    Raises ValueError if there is no such part.
    """
    if paragraph is not None:
        for found in text.split("\n\n"):
            if found.startswith(paragraph):
                return found
        raise ValueError(f"no paragraph begins with {paragraph!r}")
    inside, level = [], 0
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading and level and len(heading[1]) <= level:
            break
        if level:
            inside.append(line)
        elif heading and heading[2] == section:
            level = len(heading[1])
    if not level:
        raise ValueError(f"there is no section {section!r}")
    return "\n".join(inside)


def as_rst(text: str, folder: str) -> str:
    """Return reStructuredText for as much Markdown as README and CHANGELOG have.

    Args:
        folder: the way from the page's folder to where the Markdown file lies.
    """
    lines, rest = [], text.splitlines()
    while rest:
        line = rest.pop(0)
        if heading := _HEADING.match(line):
            title = _inline(heading[2], folder)
            lines += [title, _UNDERLINES[len(heading[1])] * len(title)]
        elif image := _IMAGE.fullmatch(line):
            lines += [f".. image:: {folder}/{image[2]}", f"   :alt: {image[1]}"]
        elif line.startswith("|"):
            rows = [line]
            while rest and rest[0].startswith("|"):
                rows.append(rest.pop(0))
            lines += ["", *_table(rows, folder), ""]
        elif line.startswith("```"):
            raise ValueError("a block of code: the pages have their own, which are run")
        else:
            lines.append(_inline(line, folder))
    return "\n".join(lines)


def _inline(text: str, folder: str) -> str:
    parts = _CODE.split(text)
    parts[1::2] = [f"`{code}`" for code in parts[1::2]]
    parts[::2] = [_LINK.sub(lambda m: _link(m, folder), part) for part in parts[::2]]
    return "".join(parts)


def _link(link: re.Match[str], folder: str) -> str:
    if "//" in link[2]:
        return f"`{link[1]} <{link[2]}>`__"
    return f":download:`{link[1]} <{folder}/{link[2]}>`"


def _table(rows: list[str], folder: str) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [rows[0], *rows[2:]]:  # without the rule
        cells = [_inline(cell.strip(), folder) for cell in row.strip("|").split("|")]
        lines += [f"   {'- ' if k else '* - '}{cell}" for k, cell in enumerate(cells)]
    # The dashes stand in one column.
    return [re.sub(r"^   - ", "     - ", line) for line in lines]


class FromMarkdown(SphinxDirective):
    """``.. from-markdown:: FILE`` with ``:section: TITLE`` or ``:paragraph: WORDS``."""

    required_arguments = 1
    option_spec = {
        "section": directives.unchanged_required,
        "paragraph": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        path = ROOT / self.arguments[0]
        self.env.note_dependency(str(path))
        page = Path(self.env.doc2path(self.env.docname))
        try:
            part = part_of(
                path.read_text(encoding="utf-8"),
                self.options.get("section"),
                self.options.get("paragraph"),
            )
            text = as_rst(part, os.path.relpath(path.parent, page.parent))
        except ValueError as error:
            raise self.error(f"{path.name}: {error}") from None
        container = nodes.Element()
        content = StringList(text.splitlines(), source=str(path))
        nested_parse_with_titles(self.state, content, container)
        return container.children


class CommandHelp(SphinxDirective):
    """``.. command-help:: COMMAND``: what ``brainstorm-dbuf COMMAND --help`` prints."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from brainstorm_dbuf.__main__ import main

        said = io.StringIO()
        # argparse fits its text to the terminal, and on new Pythons colours it.
        plain = mock.patch.dict(os.environ, COLUMNS="88", NO_COLOR="1")
        with plain, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([self.arguments[0], "--help"])
        block = nodes.literal_block(said.getvalue(), said.getvalue())
        block["language"] = "text"
        return [block]


# ------------------------------------------------------------------- the reference

# What in a docstring stays as it is, code in single backticks, and what is no markup.
_IN_DOCSTRING = re.compile(
    r"(?P<kept>``.+?``|:\w+:`[^`]+`|^ *(?:>>>|\.\.|:)[^\n]*|^ *\* )"
    r"|`(?P<code>[^`]+)`|(?P<special>\*|_(?=\W|$))",
    re.DOTALL | re.MULTILINE,
)


_COLON = "\0"


def make_rst(app: Sphinx, what: str, name: str, obj: Any, _: Any, lines: list[str]):
    """Make a docstring's lines reStructuredText, in place."""

    def replaced(found: re.Match[str]) -> str:
        if found["kept"]:
            return found["kept"]
        return f"``{found['code']}``" if found["code"] else f"\\{found['special']}"

    lines[:] = _IN_DOCSTRING.sub(replaced, "\n".join(lines)).split("\n")
    if what in ("attribute", "property"):
        # Else napoleon takes what stands before a colon for a type.
        lines[0] = lines[0].replace(":", _COLON)


def put_colons_back(
    app: Sphinx, what: str, name: str, obj: Any, _: Any, lines: list[str]
):
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def find_documented(
    app: Sphinx, env: Any, node: Any, content: nodes.Node
) -> nodes.Node | None:
    """Resolve a name of a submodule, or a bare one, to the public name it is under."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    objects = env.get_domain("py").objects
    for full in (f"brainstorm_dbuf.{name}", f"brainstorm_dbuf.hooks.{name}"):
        if full in objects:
            entry = objects[full]
            target = app.builder.get_relative_uri(node["refdoc"], entry.docname)
            reference = nodes.reference("", "", content, internal=True)
            reference["refuri"] = f"{target}#{entry.node_id}"
            return reference
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("from-markdown", FromMarkdown)
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", make_rst, priority=400)
    app.connect("autodoc-process-docstring", put_colons_back, priority=600)
    app.connect("missing-reference", find_documented)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
