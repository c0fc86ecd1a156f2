"""What .ci/run does with tests that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / ".ci" / "failed.py"


def _ran(report: Path, at_most: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_SCRIPT), str(report), "--at-most", str(at_most)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def _report(folder: Path, *failed: tuple[str, str, str]) -> Path:
    cases = "".join(f'<testcase classname="{where}" name="{name}"><{how}/></testcase>' for where, name, how in failed)
    report = folder / "report.xml"
    report.write_text(f'<testsuites><testsuite><testcase classname="a" name="b"/>{cases}</testsuite></testsuites>')
    return report


def test_failed_tests_are_named_as_pytest_names_them(tmp_path: Path) -> None:
    """With and without the group of pytest-xdist, which is no part of the id."""
    report = _report(
        tmp_path,
        ("tests.cli.test_run", "test_one@processes", "failure"),
        ("tests.cli.test_run", "test_two[a / b-x@y]", "failure"),
        ("tests.test_ci", "test_three[a@b]@lab", "error"),
        ("tests.compression.test_x", "test_four@compare bits", "error"),
    )
    assert _ran(report, at_most=4).stdout.splitlines() == [
        "tests/cli/test_run.py::test_one",
        "tests/cli/test_run.py::test_two[a / b-x@y]",
        "tests/test_ci.py::test_three[a@b]",
        "tests/compression/test_x.py::test_four",
    ]


@pytest.mark.parametrize("failures", [0, 3])
def test_none_or_too_many_failures_are_not_run_again(tmp_path: Path, failures: int) -> None:
    report = _report(tmp_path, *[("tests.test_ci", f"test_{number}", "failure") for number in range(failures)])
    ran = _ran(report, at_most=2)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "none is run once more" in ran.stderr if failures else "nothing to run once more" in ran.stderr
