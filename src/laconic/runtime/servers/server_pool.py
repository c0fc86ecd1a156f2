"""All servers of a job, from the point of view of one rank: started, told about the job, asked for state, ended."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence

import torch

from laconic.architecture import ServerLayout
from laconic.core.connection import Address
from laconic.core.exchange import one_round
from laconic.core.frames import TOKEN_BYTES, new_token
from laconic.core.interface import local_address
from laconic.core.plan import Bucket
from laconic.core.stateful import ParameterState
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, CommunicationError
from laconic.runtime.agreement import gather_addresses, gather_bytes, read_address
from laconic.runtime.job import Job
from laconic.runtime.servers.child_process import LocalServer, ProcessServer, ThreadServer
from laconic.runtime.servers.client import Client, Placement
from laconic.runtime.servers.protocol import OPTIMIZERS, Configuration, group_settings

TOKEN_VARIABLE = "LACONIC_TOKEN"
"""The environment variable with the token of servers that run already, in hex."""
_LOOK_S = 0.2
"""How long to wait before the next look whether all ranks have said goodbye."""
_START_LOOK_S = 1.0
_SPARE_CONNECTIONS = 64
"""More than there are ranks: some may come from elsewhere, and are refused one by one."""
_FIELD = "server."
"""What a field of a server's state is called among a rank's own."""


class ServerPool:
    """Servers this rank has started, and its connections to all of them."""

    def __init__(self, job: Job, architecture: ServerLayout) -> None:
        self._job = job
        self._rule = job.strategy.synchronization
        transport = job.transport
        self._architecture = architecture
        self._placement = self._place([bucket for plan in job.fixed_plans() for bucket in plan.buckets])
        self._beside: list[LocalServer] = []
        self._mine = range(0)
        self.client: Client | None = None
        optimizer = "" if self._rule.barrier else _check_optimizer(job)
        try:
            name = gather_bytes(transport, secrets.token_bytes(TOKEN_BYTES), "the name of the job")[0].hex()
            if architecture.hosts:
                token = _token_from_environment()
                addresses = [read_address(text) for text in architecture.hosts.split("|")]
            else:
                token = gather_bytes(transport, new_token(), "the token of servers")[0]
                addresses = self._start(architecture.num_servers(transport.world_size), token, bool(optimizer))
            self.client = Client(
                addresses,
                self._placement,
                transport,
                job=name,
                token=token,
                timeout_s=transport.timeout_s,
                beside=not architecture.hosts,
                link=transport.link,
            )
            self._meet("ranks joining servers")
            if transport.rank == 0:
                self._configure(len(addresses), optimizer)
            self._meet("servers being told about the job")
        except BaseException:
            self.abandon()
            raise

    def _start(self, num_servers: int, token: bytes, holds: bool) -> list[Address]:
        transport = self._job.transport
        host = "127.0.0.1" if transport.in_process else local_address(os.environ.get("MASTER_ADDR"))
        kind = ThreadServer if transport.in_process else ProcessServer
        self._mine = range(transport.rank, num_servers, transport.world_size)
        for number in self._mine:
            name = f"server {number} of rank {transport.rank}"
            most = transport.world_size + _SPARE_CONNECTIONS
            self._beside.append(kind(host, name, token, max_connections=most, holds=holds))
        # Processes take seconds to start, maybe more than ranks may wait for each other: so they meet again and again.
        look_s = min(_START_LOOK_S, transport.timeout_s / 4)
        while True:
            ready = all(server.listens(look_s) for server in self._beside)
            if all(row == b"y" for row in gather_bytes(transport, b"y" if ready else b"n", "servers that start")):
                break
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
                tuple((name, group_of.get(id(p), -1)) for name, p in job.parameters.items()) if optimizer else (),
                job.transport.timeout_s,
            )
            for number in range(num_servers)
        ]
        assert self.client is not None
        held = range(len(self._placement.buckets)) if optimizer else ()
        self.client.configure(about, {bucket: self._values(bucket) for bucket in held})
        for bucket in held:
            remembered = self._remembered(bucket)
            if remembered:
                self.client.restore(bucket, remembered, self._values(bucket))

    def _place(self, buckets: Sequence[Bucket]) -> Placement:
        world_size = self._job.transport.world_size
        return Placement(tuple(buckets), tuple(self._architecture.owners(list(buckets), world_size)))

    def replan(self, buckets: Sequence[Bucket]) -> None:
        """Have servers form sums of other buckets from now on; every rank calls it between two steps."""
        if tuple(buckets) == self._placement.buckets:
            return
        assert self.client is not None
        state = self.state()
        self._meet("the old buckets of servers")
        self._placement = self.client.placement = self._place(buckets)
        if self._job.transport.rank == 0:
            self._configure(self._architecture.num_servers(self._job.transport.world_size), "")
        self.load(state)

    def _values(self, number: int) -> torch.Tensor:
        """The parameters of a bucket as this rank has them."""
        tensors = self._placement.buckets[number].tensors
        return torch.cat([self._job.parameters[tensor.name].detach().reshape(-1) for tensor in tensors])

    def _remembered(self, number: int) -> dict[str, torch.Tensor]:
        """What this rank's optimizer remembers about a bucket, as servers call it."""
        optimizer, parameters = self._job.optimizer, self._job.parameters
        return {
            f"{tensor.name}|{field}|{torch.as_tensor(value).dim()}": torch.as_tensor(value).detach().reshape(-1)
            for tensor in self._placement.buckets[number].tensors
            for field, value in optimizer.state.get(parameters[tensor.name], {}).items()
            if isinstance(value, torch.Tensor | float | int)
        }

    def _hand_back(self, client: Client) -> None:
        """Have this rank's optimizer remember what the one on the servers does."""
        for number, bucket in enumerate(self._placement.buckets):
            for tensor in bucket.tensors:
                self._job.optimizer.state.pop(self._job.parameters[tensor.name], None)
            for key, value in client.state(number).items():
                name, field, dims = key.rsplit("|", 2)
                parameter = self._job.parameters[name]
                # A count of steps stays on the CPU, where optimizers keep it unless told otherwise.
                like = value.view(()) if dims == "0" else value.view(parameter.shape).to(parameter.device)
                self._job.optimizer.state[parameter][field] = like

    def state(self) -> ParameterState:
        """What servers remember, by parameter; on rank 0 only, because it is the same for all."""
        found: ParameterState = {}
        if self._job.transport.rank == 0 and self.client is not None:
            for number, bucket in enumerate(self._placement.buckets):
                tensors = {tensor.name: tensor for tensor in bucket.tensors}
                for key, value in self.client.state(number).items():
                    name, field, dims = key.rsplit("|", 2)
                    self._put_together(found, tensors[name], f"{_FIELD}{field}|{dims}", value)
        return found

    def _put_together(self, found: ParameterState, tensor: TensorSpec, field: str, value: torch.Tensor) -> None:
        """Add a field of a tensor, or of a piece of one, to the state of the parameter."""
        fields = found.setdefault(tensor.owner, {})
        if tensor.part_of and value.numel() == tensor.numel:
            whole = fields.setdefault(field, value.new_zeros(self._job.parameters[tensor.owner].numel()))
            whole[tensor.start : tensor.start + tensor.numel] = value
        else:
            fields[field] = value

    def load(self, saved: ParameterState) -> None:
        """Have servers continue from what they remembered and, where they hold parameters, from rank 0's."""
        assert self.client is not None
        if not self._rule.barrier:
            self.client.rest()
            self._meet("the end of steps")
        if self._job.transport.rank == 0:
            for number, bucket in enumerate(self._placement.buckets):
                state = {
                    f"{tensor.name}|{field.removeprefix(_FIELD)}": (
                        value[tensor.start : tensor.start + tensor.numel] if tensor.part_of else value
                    )
                    for tensor in bucket.tensors
                    for field, value in saved.get(tensor.owner, {}).items()
                    if field.startswith(_FIELD)
                }
                values = None if self._rule.barrier else self._values(number)
                self.client.restore(number, state, values)
        self._meet("servers being given a saved state")
        if not self._rule.barrier:
            self.pull()

    def _meet(self, what: str) -> None:
        """Return when every rank has come here; in turn with exchanges, of which some may still be under way."""
        transport = self._job.transport
        here = torch.ones(1, device=transport.control_device)
        self._job.engine.call(
            what,
            lambda: one_round(transport.all_reduce(here, purpose="control", what=what)),
            step=self._job.step,
            device=here.device,
        )

    def meet_and_pull(self) -> None:
        """Take the parameters that servers hold once no rank is in a step; every rank calls it."""
        assert self.client is not None
        # Or a rank that is ahead, and waits at a server, would wait for one that waits for it here.
        self.client.rest()
        self._meet("the end of steps")
        self.pull()
        # Nobody changes what others have not pulled yet.
        self._meet("all ranks having the servers' parameters")

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
                if not self._rule.barrier:
                    self._hand_back(self.client)
                self.client.leave()
                for number in self._mine:
                    self._wait_for_goodbyes(self.client, number)
                self.client.hang_up()
            self._end(at_once=False)
        finally:
            self.abandon()

    def _wait_for_goodbyes(self, client: Client, number: int) -> None:
        """Others may have steps to make yet: as long as they make them, this rank's servers stay."""
        limit_s = self._job.transport.timeout_s
        while True:
            ranks, quiet_s = client.missing(number)
            if not ranks:
                return
            if quiet_s > limit_s:
                raise CommunicationError(
                    f"detaching on rank {self._job.transport.rank}: server {number} has heard nothing for {limit_s:g} "
                    f"s, and rank {', '.join(map(str, ranks))} has not detached."
                )
            time.sleep(_LOOK_S)

    def abandon(self) -> None:
        """End at once what this rank has started."""
        try:
            self._end(at_once=True)
        finally:
            if self.client is not None:
                self.client.hang_up()

    def _end(self, *, at_once: bool) -> None:
        beside, self._beside = self._beside, []
        for server in beside:
            server.stop(at_once=at_once)


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
