"""Links paced in software, for machines that cannot make virtual hosts.

Ranks run on this machine, over its loopback interface, and each gets the rate of its link in LACONIC_PACE, which
attach() reads (core/paced.py). Nothing else that a script sends is paced.
"""

from __future__ import annotations

from typing import Literal

from laconic.cluster import Cluster
from laconic.core.child_process import die_with_parent
from laconic.core.paced import PACE_VARIABLE
from laconic.errors import UsageError
from laconic.lab.capabilities import Capabilities
from laconic.lab.launch import Place, free_port, torchrun_environment
from laconic.lab.virtual_hosts import check_imitable, gpu_environment
from laconic.units import format_rate

LinksChoice = Literal["auto", "shaped", "paced"]
"""The choices of a user; auto: shaped where this machine allows it, else paced."""

PACED_MEANS = "only laconic's own transport is paced; a script's own traffic through torch.distributed is not"


def choose_links(wanted: LinksChoice, capabilities: Capabilities) -> Literal["shaped", "paced"]:
    """The links of a run on this machine; raises if shaped ones are requested and cannot be made."""
    if wanted == "paced":
        return "paced"
    if capabilities.virtual_hosts:
        return "shaped"
    if wanted == "auto":
        return "paced"
    raise UsageError(
        f"shaped links need virtual hosts, which are not possible here: {capabilities.reason or 'no privilege'}. Run "
        "as root, allow unprivileged user namespaces, or use --links paced."
    )


def places_paced(cluster: Cluster, *, ranks_per_host: int = 1, gpu: bool = False) -> list[Place]:
    """Ranks on this machine, each with its share of its host's link.

    gpu: as in places_on.
    """
    if ranks_per_host < 1:
        raise UsageError(f"ranks per host must be >= 1, got {ranks_per_host}.")
    _check_possible(cluster)
    world_size = cluster.num_hosts * ranks_per_host
    master = ("127.0.0.1", free_port())
    places: list[Place] = []
    for rank in range(world_size):
        host = rank // ranks_per_host
        environment = torchrun_environment(rank, world_size, host=host, ranks_per_host=ranks_per_host, master=master)
        environment[PACE_VARIABLE] = format_rate(cluster.links[host].bandwidth_bps / ranks_per_host)
        if gpu:
            environment |= gpu_environment(rank, "lo")
        places.append(Place(environment, die_with_parent()))
    return places


def _check_possible(cluster: Cluster) -> None:
    """Raise for clusters that pacing cannot imitate, because a rank knows only its own link."""
    check_imitable(cluster)
    if cluster.uplinks:
        raise UsageError(
            "paced links cannot share an uplink, so racks are not possible. Leave out the racks, or use --links shaped."
        )
    for host, link in enumerate(cluster.links):
        if link.delay_s or link.loss_ratio:
            raise UsageError(
                f"paced links have a bandwidth but no delay or loss; host {host} has {link}. Leave out --delay and "
                "--loss, or use --links shaped."
            )
