"""Files that a command writes where the user says."""

from __future__ import annotations

from pathlib import Path

from laconic.errors import LaconicError, UsageError, one_line


def check_writable(path: str | None) -> None:
    """Refuse a path in a folder that does not exist, before minutes of simulation."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise UsageError(f"cannot write {one_line(path, 120)}: there is no folder {Path(path).parent}.")


def write_text(path: str, text: str) -> None:
    """Write a file, or say in one line why that cannot be done."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise LaconicError(f"cannot write {path}: {exc.strerror}.") from exc
