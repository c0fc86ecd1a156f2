"""Every schedule with every way to form a sum trains as torch DDP does, on real processes over Gloo.

Sums of floating-point numbers depend on the order in which they are formed. Between two ranks there is only one, so
everything equals DDP bit for bit. Among more, a ring adds up an element in an order that depends on its place in the
bucket, so only a schedule with DDP's buckets does; halving_doubling and a server add up every element in one order, so
all schedules agree there bit for bit, whatever their buckets are.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.scheduling import SCHEDULES
from tests.processes import gloo_group, run_processes
from tests.runtime.replicas import snapshot
from tests.runtime.servers.ranks import servers_in_threads

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(120)]

STEPS = 30
"""All schedules have found their plan by then: dear, which tries several, after 25."""
ARCHITECTURES = {
    "native": "all_reduce",
    "ring": "all_reduce(algorithm=ring)",
    "halving_doubling": "all_reduce(algorithm=halving_doubling)",
    "server": "parameter_server",
}
ONE_ORDER = ("halving_doubling", "server")
"""Where the order of a sum does not depend on the place in the bucket."""
SETTINGS = {
    "priority": "priority(partition_bytes=1024, credit_bytes=2048)",
    "dear": "dear(bytes=1024)",
}
"""So that a small model makes several buckets."""
ONE_BUCKET = ("sequential", "fusion", "mg_wfbp")
"""These may make one of it; sequential and fusion make DDP's."""
AS_DDP = [("sequential", "native"), ("fusion", "native")]
"""Whose sums are DDP's own, place by place."""
ROUNDING = 1e-6
"""Some units in the last place of parameters, which are about 1."""
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4),
}


class Awkward(nn.Module):
    """A tied weight, a layer used twice, and layers larger than a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.wide = nn.Linear(12, 40)
        self.narrow = nn.Linear(40, 12, bias=False)
        self.twice = nn.Linear(12, 12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.embedding(tokens).tanh())
        hidden = self.narrow(self.wide(hidden).tanh())
        return self.head(self.twice(hidden))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 17, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def combinations(schedules: list[str]) -> list[tuple[str, str, str]]:
    """(schedule, architecture, optimizer); each schedule and each architecture meets both optimizers."""
    pairs = product(enumerate(schedules), enumerate(ARCHITECTURES))
    return [(schedule, how, ("sgd", "adam")[(i + j) % 2]) for (i, schedule), (j, how) in pairs]


def train_all(schedules: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """What each rank does: torch DDP with each optimizer, then every combination, from the same weights."""
    torch.manual_seed(0)
    original = Awkward()
    found = {"at first": snapshot(original)}
    with gloo_group(), servers_in_threads():
        for optimizer, make in OPTIMIZERS.items():
            model = copy.deepcopy(original)
            _train(model, DistributedDataParallel(model), make(model))
            found[f"ddp {optimizer}"] = snapshot(model)
        for schedule, how, optimizer in combinations(schedules):
            model = copy.deepcopy(original)
            updates = OPTIMIZERS[optimizer](model)
            strategy = f"bsp / {ARCHITECTURES[how]} / none / {SETTINGS.get(schedule, schedule)}"
            with laconic.attach(model, updates, strategy, timeout_s=20) as session:
                _train(model, model, updates)
                num_buckets = len(session.plan.buckets)
            assert num_buckets > 1 or schedule in ONE_BUCKET, f"{schedule} has nothing to schedule"
            found[f"{schedule} {how} {optimizer}"] = snapshot(model)
    return found


def _train(model: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        loss_of(forward, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


# Between two ranks those suffice whose buckets are not DDP's.
@pytest.mark.parametrize(
    ("world_size", "schedules"), [(2, ["wfbp", "priority", "dear"]), (3, SCHEDULES.names())], ids=["2", "3"]
)
def test_every_schedule_with_every_way_to_form_a_sum_trains_as_ddp_does(world_size: int, schedules: list[str]) -> None:
    results = run_processes(
        "tests.runtime.test_lossless:train_all",
        world_size=world_size,
        arguments={"schedules": schedules},
        timeout_s=110,
    )
    first = results[0].value
    for optimizer in OPTIMIZERS:
        assert largest_difference(first[f"ddp {optimizer}"], first["at first"]) > 0.01, "DDP has not trained"
    differences = {
        names: largest_difference(first[" ".join(names)], first[f"ddp {names[2]}"]) for names in combinations(schedules)
    }
    table = "".join(
        f"\n  {' '.join(names):33} {f'{value:.1e} from DDP' if value else 'bit for bit'}"
        for names, value in differences.items()
    )
    for names, result in product(differences, results[1:]):
        apart = largest_difference(result.value[" ".join(names)], first[" ".join(names)])
        assert apart == 0, f"{names}: replicas 0 and {result.rank} differ by {apart:.1e}{table}"

    too_far = [names for names, value in differences.items() if value > ROUNDING]
    assert not too_far, f"further from DDP than rounding: {too_far}{table}"
    same_order = [names for names in differences if world_size == 2 or names[:2] in AS_DDP]
    unequal = [names for names in same_order if differences[names]]
    assert same_order
    assert not unequal, f"these add up in DDP's order and yet differ from it: {unequal}{table}"
    for how, optimizer in product(ONE_ORDER, OPTIMIZERS):
        first_one, *others = (first[" ".join(names)] for names in differences if names[1:] == (how, optimizer))
        apart = max((largest_difference(first_one, other) for other in others), default=0.0)
        assert apart == 0, f"{how} adds up in one order, but schedules differ by {apart:.1e} with {optimizer}{table}"
