"""Sharded models: FSDP2 and tensor parallelism inside a group of ranks, a strategy between such groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import laconic
from laconic.compression import Compressor
from laconic.core.in_process import InProcessTransport
from laconic.core.tensor import TensorSpec
from laconic.lab.launch import free_port
from laconic.scheduling import Fusion
from laconic.strategy import Strategy
from laconic.synchronization import StreamingDiLoCo
from tests.processes import run_processes
from tests.runtime.replicas import mlp, sgd
from tests.strategy.generate import bases, variants, with_partners

pytestmark = pytest.mark.timeout(240)


def test_buckets_end_where_gradients_stop_coming_at_once() -> None:
    tensors = [TensorSpec(name, (100,), ready_with=name[0]) for name in ("b2", "b1", "a2", "a1")]
    names = [[t.name for t in bucket.tensors] for bucket in Fusion(bytes=10_000).plan(tensors, observed=True).buckets]
    assert names == [["b2", "b1"], ["a2", "a1"]]
    names = [[t.name for t in bucket.tensors] for bucket in Fusion(bytes=400).plan(tensors, observed=True).buckets]
    assert names == [["b2"], ["b1"], ["a2"], ["a1"]]
    mixed = [TensorSpec("b2", (1,), torch.float64, ready_with="b"), *tensors[1:3]]
    names = [[t.name for t in bucket.tensors] for bucket in Fusion(bytes=10_000).plan(mixed, observed=True).buckets]
    assert names == [["b2"], ["b1"], ["a2"]]


def test_shards_of_one_tensor_go_in_the_same_part() -> None:
    """However many of its elements a rank has: parts are cut by the bytes of all shards."""
    rule = StreamingDiLoCo(period=4)
    cuts = []
    for rows in (10, 0):
        shards = [TensorSpec(str(n), (rows if n < 3 else 10,), whole_bytes=80) for n in range(8)]
        cuts.append([[tensor.name for tensor in part] for part in rule.parts(shards)])
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) > 1


@pytest.mark.parametrize(("rows", "count", "expected"), [(5, 2, [3, 2]), (1, 2, [1, 0]), (9, 4, [3, 3, 3, 0])])
def test_shards_are_cut_as_fsdp_does(rows: int, count: int, expected: list[int]) -> None:
    whole = TensorSpec("w", (rows, 4))
    shards = [whole.shard(index, count) for index in range(count)]
    assert [shard.shape for shard in shards] == [(length, 4) for length in expected]
    chunks = torch.chunk(torch.zeros(rows, 4), count)  # which leaves out those that are empty
    assert [chunk.shape[0] for chunk in chunks] == [length for length in expected if length]
    assert {shard.whole_bytes for shard in shards} == {whole.nbytes}


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / all_reduce / none",
        "bsp / all_reduce / int4 + error_feedback",
        "bsp / all_reduce / powersgd(rank=1) + error_feedback",
        "diloco(period=2) / all_reduce / int4 + error_feedback",
        "bsp / choco / topk(density=0.3)",
        "slowmo(period=2) / all_reduce / none",
    ],
)
def test_memory_of_what_is_remembered(strategy: str) -> None:
    def one(transport: InProcessTransport) -> tuple[int, int]:
        model = mlp()
        with laconic.attach(model, sgd(model), strategy, transport=transport) as session:
            fields = session.state_dict()["ranks"][str(transport.rank)]
            held = sum(value.nbytes for of in fields.values() for value in of.values())
            specs = [TensorSpec.of(name, parameter) for name, parameter in model.named_parameters()]
            return held, session.strategy.state_bytes(specs)

    for held, predicted in laconic.InProcessCluster(2).run(one):
        assert held == predicted


@pytest.mark.slow
@pytest.mark.dist
def test_equal_to_native_hsdp_in_every_bit() -> None:
    for result in run_processes(
        "tests.runtime.shard_ranks:equal_to_native", world_size=4, arguments={"steps": 50}, timeout_s=220
    ):
        assert len(result.value) > 10
        assert [name for name, right in result.value.items() if not right] == []


_LOCAL = ("local_sgd(period=2)", "diloco(period=2)", "slowmo(period=2)", "streaming_diloco(period=4)")
_OTHERS = (
    *(f"{rule} / all_reduce / int4 + error_feedback / wfbp" for rule in _LOCAL),
    "bsp / gossip",
    "bsp / choco / topk(density=0.3) / wfbp",
    "bsp / all_reduce(algorithm=ring) / none",
    "demo / all_reduce / dct_topk(density=0.2, chunk=4) / fusion",
)


@pytest.mark.slow
@pytest.mark.dist
def test_bytes_on_uneven_and_empty_shards() -> None:
    exact = [
        method for method in variants("compression") if isinstance(method, Compressor) and method.traits.exact_bytes
    ]
    strategies = [f"bsp / all_reduce / {method} / fusion" for method in exact]
    results = run_processes(
        "tests.runtime.shard_ranks:bytes_of",
        world_size=4,
        arguments={"strategies": [*strategies, *_OTHERS], "steps": 4},
        timeout_s=220,
    )
    for result in results:
        for strategy, found in result.value.items():
            assert found.get("equal"), (strategy, found)
            assert found["finite"], strategy
            assert found["left"] == [], strategy
            assert found["sent"] == found["predicted"], (strategy, result.rank)


def _is_for_shards(strategy: Strategy) -> bool:
    """As docs/sharded.md has it."""
    rule, whom = strategy.synchronization, strategy.architecture
    refused = rule.needs_adam or not rule.barrier or whom.has_servers or whom.holds_shards or rule.needs_factors
    return not refused and not strategy.scheduling.defers


@pytest.mark.slow
@pytest.mark.dist
def test_every_rule_and_architecture_works_between_groups_of_shards_or_is_refused() -> None:
    short = [
        kind(period=4) if "period" in kind.declared() else kind()
        for axis in ("synchronization", "architecture")
        for kind in bases(axis)
    ]
    strategies = {str(strategy): strategy for strategy in map(with_partners, short)}
    results = run_processes(
        "tests.runtime.shard_ranks:bytes_of",
        world_size=4,
        arguments={"strategies": list(strategies), "steps": 8},
        timeout_s=220,
    )
    for result in results:
        assert result.value.keys() == strategies.keys()
        for text, strategy in strategies.items():
            found = result.value[text]
            if not _is_for_shards(strategy):
                assert '"first.weight"' in found.get("refused", ""), (text, found)
                continue
            assert found.get("equal"), (text, found)
            assert found["finite"], text
            assert found["left"] == [], text
            if strategy.exact():
                assert found["sent"] == found["predicted"], (text, result.rank)


_SAYS = {
    "default group": "process_group=mesh",
    "shard group": "process_group=mesh",
    "native HSDP": "process_group=mesh",
    "two dimensions": 'give one of them, such as mesh["replicate"]',
    "crossed": "ranks attach different things",
    "crossed, even": "ranks attach different things: shard of",
    "partly": "is in no module that fully_shard() was called on",
    "frozen shards": "process_group=mesh",
    "an adapter beside": "is in no module that fully_shard() was called on",
    "too small": "compresses no parameter of this model",
    "dion": 'this rank has only a shard of "weight"',
    "priority": 'Use "fusion"',
    "dear": 'Use "fusion"',
    "bsp / parameter_server": 'Use "all_reduce" or "gossip"',
    "ssp": 'with "bsp" or "diloco"',
    "asp": 'with "bsp" or "diloco"',
    "asp / gossip": 'with "bsp" or "diloco"',
    "onebit_adam": 'Use "bsp", "demo" or "diloco"',
}


@pytest.mark.slow
@pytest.mark.dist
def test_what_would_corrupt_a_model_is_refused_by_every_rank() -> None:
    for result in run_processes("tests.runtime.shard_ranks:misuse", world_size=4, timeout_s=200):
        assert result.value.keys() == _SAYS.keys()
        for name, found in result.value.items():
            assert _SAYS[name] in found["said"], (name, found["said"])
            assert found["seconds"] < 5.0, name
            assert found["left"] == [], name


@pytest.mark.slow
@pytest.mark.dist
def test_tensor_parallel_replicas_equal_one_process() -> None:
    for result in run_processes(
        "tests.runtime.shard_ranks:tensor_parallel", world_size=4, arguments={"steps": 10}, timeout_s=100
    ):
        assert set(result.value) == {"norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"}
        assert max(result.value.values()) < 1e-6, result.value


@pytest.mark.slow
@pytest.mark.dist
def test_states_are_saved_by_shard_and_loaded_onto_others(tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path)}
    results = run_processes(
        "tests.runtime.shard_checkpoint_ranks:save_and_resume", world_size=4, arguments=folder, timeout_s=200
    )
    for result in results:
        assert [name for name, right in result.value.items() if right is False] == []
    again = run_processes(
        "tests.runtime.shard_checkpoint_ranks:load_onto_other_shards", world_size=2, arguments=folder, timeout_s=100
    )
    for island, result in enumerate(again):
        saved = next(value for name, value in results[2 * island].value.items() if name.endswith("fusion: whole"))
        assert saved
        for key, whole in result.value.items():
            assert torch.equal(whole, saved[key]), key


@pytest.mark.slow
@pytest.mark.dist
def test_a_checkpoint_is_loaded_by_another_number_of_replicas(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path)}
    for result in run_processes(
        "tests.runtime.shard_checkpoint_ranks:load_onto_other_replicas",
        world_size=4,
        arguments=arguments,
        timeout_s=120,
    ):
        assert len(result.value) == 16
        assert [name for name, right in result.value.items() if not right] == []


@pytest.mark.slow
@pytest.mark.dist
def test_a_state_that_one_rank_cannot_load_is_loaded_by_none() -> None:
    results = run_processes(
        "tests.runtime.shard_checkpoint_ranks:load_torn", world_size=4, arguments={"broken": 1}, timeout_s=100
    )
    missing, torn = ([result.value[key] for result in results] for key in ("a field is missing", "of another step"))
    assert "holds nothing for" in missing[1]
    assert missing[3].startswith("rank 0 cannot load its state: ")
    assert (
        missing[0]
        == missing[2]
        == "a rank that holds another piece of the model cannot load its state. The error of that rank says why."
    )
    assert {text.partition(":")[0] for text in torn} == {"the checkpoint is inconsistent"}


@pytest.mark.slow
@pytest.mark.dist
def test_the_example_runs_under_torchrun() -> None:
    example = Path(__file__).parents[2] / "examples" / "sharded.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--master-port",
        str(free_port()),
        str(example),
        "--steps",
        "16",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "step 16: loss" in ran.stdout
