"""Text for a terminal or a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from laconic.cli.terminal import plain_table


def test_a_table_continues_long_words_instead_of_cutting_them_off() -> None:
    name = "streaming_diloco(period=100,fragments=4)"
    table = plain_table("strategy", "step", numbers=("step",))
    table.add_row(name, "17.4 s")
    page = io.StringIO()
    Console(file=page, width=30).print(table)
    lines = page.getvalue().splitlines()
    assert "".join(line[:22].strip() for line in lines[1:]) == name
    assert "17.4 s" in lines[1]
