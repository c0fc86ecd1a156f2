"""Files that the user names: those that a command writes, and lists of strategies."""

from __future__ import annotations

from pathlib import Path

from laconic.errors import LaconicError, UsageError, one_line


def check_writable(path: str | None) -> None:
    """Refuse a path that cannot be that of a file, before minutes of simulation."""
    if path is None:
        return
    shown = one_line(path, 120)
    try:
        no_folder, is_folder = not Path(path).resolve().parent.is_dir(), Path(path).is_dir()
    except (OSError, ValueError, RuntimeError) as exc:
        raise UsageError(f"cannot write {shown}: {one_line(exc, 120)}.") from exc
    if no_folder:
        raise UsageError(f"cannot write {shown}: there is no folder {Path(path).parent}.")
    if is_folder:
        raise UsageError(f'cannot write "{shown}": it is a folder. Give the name of a file.')


def write_text(path: str, text: str) -> None:
    """Write a file, or say in one line why that cannot be done."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise LaconicError(f"cannot write {path}: {exc.strerror}.") from exc


def read_strategies(texts: tuple[str, ...], path: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Strategies from options and from a file."""
    if path is None:
        return texts or default
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the strategies in {path}: {reason}.") from exc
    listed = tuple(text for line in lines if (text := line.partition("#")[0].strip()))
    if not listed:
        raise UsageError(f"{path} lists no strategy; write one per line.")
    return (*texts, *listed)
