"""The runner of many trials: one that goes wrong is named, and those after it are not disturbed."""

from __future__ import annotations

import pytest

from tests.beside_ddp.trials import run_trials

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]


@pytest.mark.slow
def test_trials_that_go_wrong_are_named_and_the_others_run() -> None:
    names = ["before", "raise", "between", "exit", "then", "hang", "after", "deadlock", "at last", "way out"]
    outcomes = run_trials("tests.beside_ddp.misbehaviour:trial", names, world_size=2, limit_s=4)
    assert list(outcomes) == names
    for name in ("before", "between", "then", "after", "at last"):
        assert outcomes[name].ranks == ["sum 2", "sum 2"]
    assert outcomes["raise"].ranks[1].startswith("raised ValueError: rank 1 broke")
    assert outcomes["exit"].ranks[1].startswith("crashed: the process ended with exit code 7")
    for name in ("hang", "deadlock"):
        assert outcomes[name].ranks[1].startswith("hung.\n")
        assert "misbehaviour.py" in outcomes[name].ranks[1]
    assert outcomes["way out"].ranks == ["sum 2", outcomes["way out"].ranks[1]]
    assert outcomes["way out"].ranks[1].startswith("hung on the way out, after: sum 2\n")
