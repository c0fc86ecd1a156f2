"""All servers of a job, from the point of view of one rank: started, told about the job, asked for state, ended."""

from __future__ import annotations

import os

import torch

from laconic.architecture import ParameterServer
from laconic.core.connection import Address
from laconic.core.frames import TOKEN_BYTES, new_token
from laconic.core.interface import local_address
from laconic.core.paced import PacedTransport
from laconic.core.stateful import ParameterState
from laconic.errors import AttachError
from laconic.runtime.agreement import gather_addresses, gather_bytes, meet, read_address
from laconic.runtime.job import Job
from laconic.runtime.servers.beside import Beside, ProcessServer, ThreadServer
from laconic.runtime.servers.client import Client, Placement
from laconic.runtime.servers.protocol import OPTIMIZERS, Configuration, group_settings
from laconic.synchronization import Asynchronous

TOKEN_VARIABLE = "LACONIC_TOKEN"
"""The environment variable with the token of servers that run already, in hex."""
_FIELD = "server."
"""What a field of a server's state is called among a rank's own."""


class Fleet:
    """Servers this rank has started, and its connections to all of them."""

    def __init__(self, job: Job, architecture: ParameterServer) -> None:
        self._job = job
        self._rule = job.strategy.synchronization
        transport = job.transport
        buckets = [bucket for plan in job.fixed_plans() for bucket in plan.buckets]
        self._placement = Placement(tuple(buckets), tuple(architecture.owners(buckets, transport.world_size)))
        self._beside: list[Beside] = []
        self.client: Client | None = None
        optimizer = _check_optimizer(job) if isinstance(self._rule, Asynchronous) else ""
        try:
            if architecture.hosts:
                token, addresses = (
                    _token_from_environment(),
                    [read_address(text) for text in architecture.hosts.split("|")],
                )
            else:
                token = gather_bytes(transport, new_token(), "the token of servers")[0]
                addresses = self._start(architecture.num_servers(transport.world_size), token)
            link = transport.link if isinstance(transport, PacedTransport) else None
            self.client = Client(
                addresses, self._placement, transport, token=token, timeout_s=transport.timeout_s, link=link
            )
            if transport.rank == 0:
                self._configure(len(addresses), optimizer)
            meet(transport, "servers being told about the job")
        except BaseException:
            self.abandon()
            raise

    def _start(self, num_servers: int, token: bytes) -> list[Address]:
        transport = self._job.transport
        host = "127.0.0.1" if transport.in_process else local_address(os.environ.get("MASTER_ADDR"))
        kind = ThreadServer if transport.in_process else ProcessServer
        mine = range(transport.rank, num_servers, transport.world_size)
        self._beside = [kind(host, f"server {number}", token) for number in mine]
        return gather_addresses(transport, [server.address for server in self._beside], num_servers)

    def _configure(self, num_servers: int, optimizer: str) -> None:
        job = self._job
        groups = job.optimizer.param_groups
        group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        about = [
            Configuration(
                str(job.strategy),
                job.transport.world_size,
                number,
                self._placement.of(number),
                optimizer,
                tuple(group_settings(group) for group in groups) if optimizer else (),
                tuple((name, group_of.get(id(p), 0)) for name, p in job.parameters.items()) if optimizer else (),
            )
            for number in range(num_servers)
        ]
        assert self.client is not None
        held = range(len(self._placement.buckets)) if optimizer else ()
        self.client.configure(about, {bucket: self._values(bucket) for bucket in held})

    def _values(self, number: int) -> torch.Tensor:
        """The parameters of a bucket as this rank has them."""
        tensors = self._placement.buckets[number].tensors
        return torch.cat([self._job.parameters[tensor.name].detach().reshape(-1) for tensor in tensors])

    def state(self) -> ParameterState:
        """What servers remember, by parameter; on rank 0 only, because it is the same for all."""
        found: ParameterState = {}
        if self._job.transport.rank == 0 and self.client is not None:
            for number in range(len(self._placement.buckets)):
                for key, value in self.client.state(number).items():
                    name, field, dims = key.rsplit("|", 2)
                    found.setdefault(name, {})[f"{_FIELD}{field}|{dims}"] = value
        return found

    def load(self, saved: ParameterState) -> None:
        """Have servers continue from what they remembered and, where they hold parameters, from rank 0's."""
        assert self.client is not None
        if self._job.transport.rank == 0:
            for number, bucket in enumerate(self._placement.buckets):
                state = {
                    f"{tensor.name}|{field.removeprefix(_FIELD)}": value
                    for tensor in bucket.tensors
                    for field, value in saved.get(tensor.name, {}).items()
                    if field.startswith(_FIELD)
                }
                values = self._values(number) if isinstance(self._rule, Asynchronous) else None
                self.client.restore(number, state, values)
        meet(self._job.transport, "servers being given a saved state")
        if isinstance(self._rule, Asynchronous):
            self.pull()

    def meet_and_pull(self) -> None:
        """Take the parameters that servers hold once no rank is in a step; every rank calls it."""
        meet(self._job.transport, "the end of steps")
        self.pull()

    def pull(self) -> None:
        """Overwrite this rank's parameters by those that servers hold."""
        assert self.client is not None
        with torch.no_grad():
            for number, bucket in enumerate(self._placement.buckets):
                values = self.client.pull(number)
                for tensor, place in bucket.segments():
                    self._job.parameters[tensor.name].copy_(values[place].view(tensor.shape))

    def leave(self) -> None:
        """Say goodbye, and end the servers beside this rank once everybody has."""
        try:
            if self.client is not None:
                self.client.leave()
        finally:
            self._end(self._job.transport.timeout_s)

    def abandon(self) -> None:
        """End at once what this rank has started."""
        self._end(0.0)

    def _end(self, timeout_s: float) -> None:
        beside, self._beside = self._beside, []
        try:
            for server in beside:
                server.stop(timeout_s)
        finally:
            if self.client is not None:
                self.client.hang_up()


def _check_optimizer(job: Job) -> str:
    name = type(job.optimizer).__name__
    if OPTIMIZERS.get(name) is not type(job.optimizer):
        raise AttachError(
            f'with "{job.strategy.synchronization}" servers run the optimizer, and a {name} is not among those they '
            f"can run: {', '.join(OPTIMIZERS)}."
        )
    return name


def _token_from_environment() -> bytes:
    text = os.environ.get(TOKEN_VARIABLE, "")
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise AttachError(
            f"servers that run already ask for their token: set {TOKEN_VARIABLE} to the {2 * TOKEN_BYTES} hex digits "
            'that "laconic serve" was started with.'
        )
    return token
