"""Hooks of MkDocs: pages from outside docs/, generated pages, and links that work on GitHub and on the site alike."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # MkDocs runs this file by its path

from mkdocs.structure.files import File, Files

from website import reference
from website.gallery import write_reports

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages in the root of the repository that the site shows too."""
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
_REPORT = re.compile(r"(!\[[^\]]+\]\(pictures/report-(\w+)\.png\))")
"""The picture of a report, which links to the report itself on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ROOT_PAGES}
    pages["decisions/index.md"] = decisions_page()
    pages |= reference.pages()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site, and names of the public surface at their reference."""
    source = page.file.src_uri
    if source == "api.md":
        markdown = reference.link_names(markdown)
    return site_links(source, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the reports of the gallery next to its page."""
    write_reports(Path(config.site_dir) / "gallery")


def site_links(source: str, markdown: str) -> str:
    """The text of page `source` with links to files of the repository turned into links to pages of the site."""
    folder = "" if source in ROOT_PAGES else "docs"

    def renamed(match: re.Match[str]) -> str:
        target = match[1]
        if ":" in target:
            return target
        path = posixpath.normpath(posixpath.join(folder, posixpath.dirname(source), target))
        if path == "README.md":
            path = "docs/index.md"
        if path in ROOT_PAGES:
            path = f"docs/{path}"
        if not path.startswith("docs/"):
            return target
        if target.endswith("/"):
            path += "/index.md"
        return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(source) or ".")

    return _REPORT.sub(r'<a href="gallery/\2.html">\1</a>', _LINK.sub(renamed, markdown))


def decisions_page() -> str:
    """A list of all decisions, by their titles."""
    lines = ["# Decisions", "", "Each page gives a decision about the inside of laconic and its reasons.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- {path.name.partition('-')[0]} [{title}]({path.name})")
    return "\n".join(lines) + os.linesep
