"""What a server loads before it listens, so that no request waits for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from laconic.core.frames import new_token
from laconic.errors import LaconicError
from laconic.runtime.servers.preparation import prepare
from laconic.strategy import Strategy
from tests.strategy.generate import bases

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", [method.name for method in bases("compression")])
def test_every_compressor_can_be_prepared(name: str) -> None:
    try:
        strategy = Strategy.parse(f"bsp / parameter_server / {name}")
    except LaconicError:
        pytest.skip("not with servers, or not by itself")
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if dtype in strategy.compression.traits.dtypes]
    state = torch.get_rng_state()
    prepare(strategy, dtypes, holds=False)
    assert torch.equal(torch.get_rng_state(), state), "the random numbers of training stay as they were"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(find_spec("numba") is None, reason="kernels need numba")
def test_a_server_that_listens_has_loaded_its_kernels() -> None:
    strategy = "bsp / parameter_server / topk(0.1)"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "laconic.runtime.servers.process", "127.0.0.1", "server 0", "3"),
            *("sums", strategy, "float32,bfloat16", ""),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(new_token().hex() + "\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) > 0
        assert "llvmlite" in Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.kill()
        process.communicate(timeout=10)
