"""Print the ids of the tests that failed, one a line, or exit with 1 where running them again would prove nothing.

Usage: python .ci/failed.py report.xml --at-most 5
"""

import argparse
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
parser.add_argument("--at-most", type=int, required=True, help="more failures than this are no accident")
options = parser.parse_args()


def node_id(test: ElementTree.Element) -> str:
    """The id by which pytest runs this test, without the group that pytest-xdist adds to it."""
    *folders, module = str(test.get("classname")).split(".")
    name = re.sub(r"@[^@\]]+$", "", str(test.get("name")))
    return f"{'/'.join([*folders, module])}.py::{name}"


if not options.report.read_bytes():
    sys.exit("the tests ended without a report: nothing to run once more")
failed = [
    node_id(test)
    for test in ElementTree.parse(options.report).getroot().iter("testcase")
    if test.find("failure") is not None or test.find("error") is not None
]
if not failed:
    sys.exit("no test failed, yet the tests did not succeed: nothing to run once more")
if len(failed) > options.at_most:
    sys.exit(f"{len(failed)} tests failed, more than {options.at_most}: none is run once more")
sys.stdout.write("\n".join(failed) + "\n")
