"""all_reduce with every algorithm, in real training of replicas in threads."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import laconic
from laconic.architecture import AllReduce
from laconic.architecture.contract import NothingMeasured
from laconic.collectives.choice import Costs
from laconic.compression import Compressor
from laconic.core.exchange import Exchange, Wire
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, IllegalCombination, InvalidSetting
from laconic.runtime import collective_costs
from laconic.scheduling import SCHEDULES
from laconic.strategy import Strategy
from tests.runtime.replicas import assert_equal, mlp_loss, reference, sgd, snapshot

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::laconic.errors.LaconicWarning")]
NAMES = ("ring", "tree", "double_tree", "halving_doubling", "torus2d", "hierarchical")
TWO_HOSTS = ((0, 1), (2, 3))
UNEQUAL = ((0, 1, 2), (3,), (4, 5))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12)
    )


def train(
    strategy: str,
    cluster: InProcessCluster,
    *,
    steps: int = 4,
    look: Callable[[laconic.Session], None] = lambda session: None,
) -> list[dict[str, torch.Tensor]]:
    """The state of every replica, each step's bytes having been compared with what was predicted."""

    def one_rank(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = copy.deepcopy(start)
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, strategy, transport=transport) as session:
            look(session)
            for step in range(steps):
                predicted = session.predicted_bytes_per_step()
                before = session.traffic.sent_bytes("payload")
                mlp_loss(replica, step, transport.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                session.wait()
                if step:  # the first step does not know the order yet, so its buckets may differ
                    counted = session.traffic.sent_bytes("payload") - before
                    assert counted == predicted or (counted < predicted and not session.strategy.exact())
                    assert counted > 0
        return snapshot(replica)

    start = model()
    return cluster.run(one_rank)


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("schedule", ["wfbp", "fusion"])
def test_training_equals_the_average_computed_by_hand(algorithm: str, schedule: str) -> None:
    cluster = InProcessCluster(4, hosts=TWO_HOSTS)
    states = train(f"bsp / all_reduce({algorithm}) / none / {schedule}", cluster, steps=8)
    for state in states[1:]:
        assert_equal(state, states[0])
    for name, expected in reference(model(), world_size=4, steps=8).items():
        torch.testing.assert_close(states[0][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", [method.name for method in SCHEDULES])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_schedule(algorithm: str, schedule: str, world_size: int) -> None:
    states = train(f"bsp / all_reduce({algorithm}) / none / {schedule}", InProcessCluster(world_size), steps=3)
    for state in states[1:]:
        assert_equal(state, states[0])
    for name, expected in reference(model(), world_size=world_size, steps=3).items():
        torch.testing.assert_close(states[0][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compression", ["fp16 + error_feedback", "powersgd", "topk + per_layer", "topk + warmup"])
def test_compressors_that_sum(compression: str) -> None:
    """The same as with the backend's own, but for the order of additions."""
    cluster = InProcessCluster(5)
    states = train(f"bsp / all_reduce(ring) / {compression} / wfbp", cluster)
    native = train(f"bsp / all_reduce / {compression} / wfbp", cluster)
    for state in states[1:]:
        assert_equal(state, states[0])
    for name, expected in native[0].items():
        torch.testing.assert_close(states[0][name], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("hosts", [TWO_HOSTS, UNEQUAL], ids=str)
@pytest.mark.parametrize(
    "compression", ["int8", "topk + error_feedback", "powersgd", "gtopk", "oktopk", "bf16", "topk + per_layer"]
)
def test_compression_between_hosts(compression: str, hosts: tuple[tuple[int, ...], ...]) -> None:
    """Bytes are as predicted on every rank, leaders or not, and replicas stay identical."""
    cluster = InProcessCluster(sum(map(len, hosts)), hosts=hosts)
    states = train(f"bsp / all_reduce(hierarchical, compress=between_hosts) / {compression} / wfbp", cluster)
    for state in states[1:]:
        assert_equal(state, states[0])


def test_what_is_compressed_between_hosts_is_the_sum_of_each() -> None:
    """With topk the result holds the largest entries of each host's sum; inside a host nothing is lost."""
    values = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    strategy = Strategy.parse("bsp / all_reduce(hierarchical, compress=between_hosts) / topk(density=0.1)")
    bucket = Bucket((TensorSpec("a", (100,)),))

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = values[transport.rank].clone()
        run_exchange(strategy.architecture, strategy.compression, flat, bucket, transport)
        return flat

    expected = torch.zeros(100)
    for host in TWO_HOSTS:
        total = values[list(host)].sum(0)
        places = total.abs().topk(10).indices
        expected[places] += total[places]
    for flat in InProcessCluster(4, hosts=TWO_HOSTS).run(rank):
        torch.testing.assert_close(flat, expected)


def run_exchange(
    architecture: AllReduce, compression: Compressor, flat: torch.Tensor, bucket: Bucket, transport: InProcessTransport
) -> int:
    """Carry out one exchange; how often it yields."""
    state = compression.init(bucket)
    state.moment = Moment(5, transport.rank, transport.world_size, 5)
    exchange: Exchange = architecture.exchange(flat, state, compression, Wire(transport, "a bucket"))
    return len([work.wait() for work in exchange])


@pytest.mark.parametrize(
    "compression", ["none", "powersgd", "topk + per_layer", "powersgd + per_layer", "gtopk", "oktopk", "int8"]
)
@pytest.mark.parametrize("settings", ["ring", "tree", "hierarchical, compress=between_hosts"])
def test_waits_are_as_declared_on_every_rank(compression: str, settings: str) -> None:
    try:
        strategy = Strategy.parse(f"bsp / all_reduce({settings}) / {compression}")
    except IllegalCombination:
        return
    bucket = Bucket((TensorSpec("a", (30, 40)), TensorSpec("b", (30,))))

    def rank(transport: InProcessTransport) -> tuple[int, int]:
        architecture = strategy.architecture
        assert isinstance(architecture, AllReduce)
        flat = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(transport.rank))
        found = run_exchange(architecture, strategy.compression, flat, bucket, transport)
        settled = architecture.settled(lambda: transport.hosts, NothingMeasured())
        moment = Moment(5, transport.rank, transport.world_size, 5)
        counted, predicted = (
            transport.traffic.sent_bytes("payload"),
            settled.sent_bytes(bucket, strategy.compression, moment),
        )
        assert counted == predicted or (counted < predicted and not strategy.exact())
        return found, settled.num_waits(bucket, strategy.compression, moment)

    for hosts in (TWO_HOSTS, UNEQUAL):
        results = InProcessCluster(sum(map(len, hosts)), hosts=hosts).run(rank)
        assert len(set(results)) == 1, "the same on every rank"
        assert results[0][0] == results[0][1]


@pytest.mark.parametrize("settings", [*NAMES, "auto", "hierarchical, compress=between_hosts"])
def test_ranks_are_placed_by_what_was_measured(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 are in one rack, 1 and 3 in another; bytes as predicted, sums as ever."""
    rates = tuple(tuple(100.0 if (one - other) % 2 == 0 else 30.0 for other in range(4)) for one in range(4))
    monkeypatch.setattr(collective_costs._Trials, "pairs", lambda trials: rates)
    groups: list[str] = []
    compression = "int8" if "compress" in settings else "none"
    states = train(
        f"bsp / all_reduce({settings}, placement=measured) / {compression} / fusion",
        InProcessCluster(4, hosts=((0,), (1,), (2,), (3,))),
        look=lambda session: groups.append(session.strategy.architecture.facts()["groups"]),
    )
    assert groups == ["0 2 | 1 3"] * 4
    for state in states[1:]:
        assert_equal(state, states[0])
    for name, expected in reference(model(), world_size=4, steps=4).items():
        rough = 0.02 if compression == "int8" else 1e-5
        torch.testing.assert_close(states[0][name], expected, rtol=rough, atol=rough)


def test_a_setting_without_effect_is_refused_when_attaching() -> None:
    for strategy, hosts, reason in [
        ("bsp / all_reduce(hierarchical)", ((0, 1, 2, 3),), "all 4 ranks are on one host"),
        ("bsp / all_reduce(hierarchical)", ((0,), (1,)), "each of the 2 ranks has a host to itself"),
        ("bsp / all_reduce(torus2d)", ((0, 1, 2),), "3 is a prime"),
    ]:
        with pytest.raises(AttachError, match=reason):
            train(strategy, InProcessCluster(sum(map(len, hosts)), hosts=hosts, timeout_s=5))


def test_a_setting_without_effect_is_refused_when_building() -> None:
    with pytest.raises(InvalidSetting, match="compress=between_hosts has no effect with algorithm=ring"):
        AllReduce(algorithm="ring", compress="between_hosts")
    with pytest.raises(InvalidSetting, match="placement=measured has no effect with algorithm=native"):
        AllReduce(placement="measured")
    for text, reason in [
        ("bsp / all_reduce(ring) / topk", "never added up on the way"),
        ("bsp / all_reduce(hierarchical, compress=between_hosts)", "compresses nothing"),
        (
            "demo / all_reduce(hierarchical, compress=between_hosts) / dct_topk",
            "keeps on each rank what that rank has not sent",
        ),
    ]:
        with pytest.raises(IllegalCombination, match=reason) as refusal:
            Strategy.parse(text)
        nearest = str(refusal.value).split('Nearest that works: "')[1].removesuffix('".')
        assert str(Strategy.parse(nearest)) == nearest


def test_one_rank_needs_no_algorithm() -> None:
    def one(transport: InProcessTransport) -> dict[str, torch.Tensor]:
        replica = model()
        optimizer = sgd(replica)
        with laconic.attach(replica, optimizer, "bsp / all_reduce(hierarchical)", transport=transport) as session:
            mlp_loss(replica, 0, 0).backward()
            optimizer.step()
            assert session.predicted_bytes_per_step() == 0
        return snapshot(replica)

    assert_equal(InProcessCluster(1).run(one)[0], reference(model(), world_size=1, steps=1))


def test_prices_before_attaching() -> None:
    bucket = [TensorSpec("a", (1600,))]
    for algorithm, expected in [
        ("native", 9600),
        ("auto", 9600),
        ("hierarchical", 9600),
        ("ring", 9600),
        ("tree", 12800),
    ]:
        strategy = Strategy(architecture=AllReduce(algorithm=algorithm))
        assert strategy.wire_bytes_per_step(bucket, 4) == expected, "tree: the root, which sends most"


def test_auto_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buckets by tree, large ones by ring; bytes and text follow."""
    costs = Costs((100, 10_000), (("native", (1.0, 1.0)), ("tree", (0.1, 2.0)), ("ring", (2.0, 0.1))))
    monkeypatch.setattr(collective_costs, "measure", lambda *given, **named: costs)
    seen: list[tuple[str, Costs | None]] = []

    def look(session: laconic.Session) -> None:
        architecture = session.strategy.architecture
        assert isinstance(architecture, AllReduce)
        seen.append((str(session.strategy), architecture.costs))

    events = laconic.EventList()
    states = train("bsp / all_reduce(auto) / none / wfbp", InProcessCluster(4), look=look)
    for state in states[1:]:
        assert_equal(state, states[0])
    assert seen == [("bsp / all_reduce(algorithm=auto) / none / wfbp", costs)] * 4
    replica = model()
    cluster = InProcessCluster(2)

    def attached(transport: InProcessTransport) -> None:
        mine = copy.deepcopy(replica)
        sink = events if transport.rank == 0 else None
        laconic.attach(mine, sgd(mine), "bsp / all_reduce(auto)", transport=transport, events=sink).detach()

    cluster.run(attached)
    told = next(event.data["algorithms"] for event in events.events if event.kind == "attach")
    assert isinstance(told, str)
    assert told.startswith("tree from 0 B")


@pytest.mark.slow
def test_auto_measures_and_trains() -> None:
    states = train("bsp / all_reduce(auto) / none / fusion", InProcessCluster(3), steps=3)
    for name, expected in reference(model(), world_size=3, steps=3).items():
        torch.testing.assert_close(states[0][name], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(states[1][name], states[0][name])


def test_hosts_of_a_cluster() -> None:
    assert InProcessCluster(3).transport(1).hosts == ((0, 1, 2),)
    assert InProcessCluster(4, hosts=((3, 1), (2, 0))).transport(0).hosts == ((0, 2), (1, 3))
    for hosts in [((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2), ()), ()]:
        with pytest.raises(laconic.LaconicError, match="each of the ranks 0 to 2 once"):
            InProcessCluster(3, hosts=hosts)
