"""Documentation that can be run is run; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import laconic
from laconic.compression import ErrorFeedback
from laconic.core.in_process import InProcessTransport
from laconic.strategy import AXES
from tests.runtime.replicas import assert_equal, mlp, mlp_loss, sgd, snapshot

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_example_of_a_method_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "writing-a-method.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "scaled_sign.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import scaled_sign  # pyrefly: ignore

    method = scaled_sign.ScaledSign(floor=1e-9)
    assert method.setting_help()["floor"] == "Scales below this are sent as zero."
    strategy = laconic.Strategy(compression=ErrorFeedback(method))

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for step in range(4):
                before = session.traffic.sent_bytes("payload")
                mlp_loss(model, step, transport.rank).backward()
                assert session.traffic.sent_bytes("payload") - before == session.predicted_bytes_per_step()
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model)

    states = laconic.InProcessCluster(3).run(one_rank)
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_spellings_of_a_strategy_in_the_readme_are_equal() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from laconic import .*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    head, *spellings, load = code.strip().splitlines()
    exec(head, names)
    parsed, built = (eval(spelling, names) for spelling in spellings if spelling)
    assert parsed == built
    assert load == 'Strategy.load("strategy.toml")'


def test_the_strategies_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r'"(bsp[^"]*)"', text)
    assert found
    for strategy in found:
        laconic.Strategy.parse(strategy)


def test_the_readme_names_every_method() -> None:
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)[`(]", row)}
    assert [method.name for methods in AXES.values() for method in methods if method.name not in named] == []
