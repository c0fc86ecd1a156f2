"""The blocks of code in the documentation."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str

    @property
    def where(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The name in a first line such as `# train.py`: the block is a file of that name."""
        found = re.match(r"# ([\w]+\.py)\n", self.code)
        return found[1] if found else None


def blocks(*languages: str) -> list[Block]:
    """Every block in one of these languages, page by page; without languages all blocks."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        page = path.relative_to(ROOT).as_posix()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            block = Block(page, line, match[2], textwrap.dedent(match[3]))
            if not languages or block.language in languages:
                found.append(block)
    return found
