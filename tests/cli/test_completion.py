"""`laconic completion`: scripts that shells can read, and that know every command and option."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.cli.dispatch import COMMANDS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "laconic" in out
    assert all(command.name in out for command in COMMANDS)


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};"
        "function=$(complete -p laconic | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $function laconic;"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "laconic.bash"
    script.write_text(capsys.readouterr().out)
    assert completed(script, "laconic", "co") == {"compare", "completion"}
    assert "--bandwidth" in completed(script, "laconic", "compare", "--b")
    assert completed(script, "laconic", "compare", "--links", "s") == {"shaped"}
    assert "--once" in completed(script, "laconic", "watch", "--o")


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "powershell"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "bash" in err
