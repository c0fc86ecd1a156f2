"""All servers of a job, as seen by one rank: starting, configuring, saving and ending them."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from laconic.architecture import ServerLayout
from laconic.core.connection import Address
from laconic.core.exchange import one_round
from laconic.core.frames import TOKEN_BYTES, new_token
from laconic.core.interface import local_address
from laconic.core.plan import Bucket
from laconic.core.stateful import ParameterState
from laconic.core.switch import switch_of_lab
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, CheckpointError, CommunicationError
from laconic.runtime.agreement import gather_addresses, gather_bytes, read_address
from laconic.runtime.job import Job
from laconic.runtime.servers.child_process import Assignment, LocalServer, ProcessServer, ThreadServer
from laconic.runtime.servers.client import Client, Placement, ServerAnswer
from laconic.runtime.servers.protocol import OPTIMIZERS, Configuration, group_settings
from laconic.runtime.servers.saved_state import NAMES, PREFIX, check_optimizer_state, check_sum_state, names_of

TOKEN_VARIABLE = "LACONIC_TOKEN"
"""The environment variable with the token of external servers, in hex."""
_LOG = logging.getLogger("laconic")
_POLL_S = 0.2
"""Poll interval for whether all ranks have said goodbye."""
_START_POLL_S = 1.0
_SPARE_CONNECTIONS = 8
"""Extra connections, for ranks that reconnect before the end of their last connection is noticed."""
_RESTORES_IN_FLIGHT = 4
"""Buckets in flight to servers: enough to hide the latency, few enough to fit in memory."""
_PROBLEM_BYTES = 1024


class ServerPool:
    """The servers that this rank has started, and its connections to all servers."""

    def __init__(self, job: Job, architecture: ServerLayout) -> None:
        self._job = job
        self._rule = job.strategy.synchronization
        transport = job.transport
        self._architecture = architecture
        self._placement = self._place([bucket for plan in job.fixed_plans() for bucket in plan.buckets])
        self._started: list[LocalServer] = []
        self._mine = range(0)
        self.client: Client | None = None
        self._left = False
        self.take = self._overwrite
        """Called with the pulled parameters of one tensor; hooks may replace this function."""
        optimizer = _check_optimizer(job) if self._rule.optimizer_on_servers else ""
        try:
            name = gather_bytes(transport, secrets.token_bytes(TOKEN_BYTES), "the name of the job")[0].hex()
            if architecture.hosts:
                token = _token_from_environment()
                addresses = [read_address(text) for text in architecture.hosts.split("|")]
            else:
                token = gather_bytes(transport, new_token(), "the token of servers")[0]
                addresses = self._start(architecture.num_servers(transport.world_size), token)
            self.client = Client(
                addresses,
                self._placement,
                transport,
                job=name,
                token=token,
                timeout_s=transport.timeout_s,
                started_by_ranks=not architecture.hosts,
                link=transport.link,
            )
            self._meet("ranks joining servers")
            if transport.rank == 0:
                self._configure(len(addresses), optimizer)
            self._meet("configuration of servers")
            if architecture.slots:
                self._open_slots(self.client, architecture.slots)
        except BaseException:
            self.abandon()
            raise

    def _open_slots(self, client: Client, wanted: int) -> None:
        client.open_slots()
        found = client.num_slots
        if found < wanted and self._job.transport.rank == 0:
            instead = f"sums are formed in {found}" if found else "it forms sums of whole tensors instead"
            _LOG.warning("the aggregator has %d of the %d slots that were asked for: %s.", found, wanted, instead)

    def _start(self, num_servers: int, token: bytes) -> list[Address]:
        transport = self._job.transport
        host = "127.0.0.1" if transport.in_process else local_address(os.environ.get("MASTER_ADDR"))
        namespace = ""
        if self._architecture.slots and not transport.in_process and (switch := switch_of_lab(os.environ)) is not None:
            host, namespace = switch.address, switch.namespace
        kind = ThreadServer if transport.in_process else ProcessServer
        self._mine = range(transport.rank, num_servers, transport.world_size)
        dtypes = sorted({bucket.dtype for bucket in self._placement.buckets}, key=str)
        work = Assignment(str(self._job.strategy), dtypes, holds=not self._rule.barrier)
        for number in self._mine:
            name = f"server {number} of rank {transport.rank}"
            most = transport.world_size + _SPARE_CONNECTIONS
            self._started.append(kind(host, name, token, max_connections=most, work=work, namespace=namespace))
        # A process may take longer to start than the timeout of ranks, so ranks meet repeatedly.
        poll_s = min(_START_POLL_S, transport.timeout_s / 4)
        while True:
            ready = all(server.listens(poll_s) for server in self._started)
            if all(row == b"y" for row in gather_bytes(transport, b"y" if ready else b"n", "servers that start")):
                break
        return gather_addresses(transport, [server.address for server in self._started], num_servers)

    def _configure(self, num_servers: int, optimizer: str) -> None:
        job = self._job
        groups = job.param_groups
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
        self.client.configure(about)
        if not self._rule.barrier:
            numbers = range(len(self._placement.buckets))
            known = self._remembered if optimizer else lambda number: {}
            self._send_to_servers((number, known(number), self._values(number)) for number in numbers)

    def _place(self, buckets: Sequence[Bucket]) -> Placement:
        world_size = self._job.transport.world_size
        return Placement(tuple(buckets), tuple(self._architecture.owners(list(buckets), world_size)))

    def _send_to_servers(self, buckets: Iterable[tuple[int, Mapping[str, torch.Tensor], torch.Tensor | None]]) -> None:
        """Send servers the state and, where they hold them, the parameters of buckets."""
        assert self.client is not None
        in_flight: deque[ServerAnswer] = deque()
        for bucket in buckets:
            in_flight.append(self.client.restore(*bucket))
            if len(in_flight) == _RESTORES_IN_FLIGHT:
                in_flight.popleft().wait()
        for answer in in_flight:
            answer.wait()

    def replan(self, buckets: Sequence[Bucket]) -> None:
        """Change the buckets that servers form sums of; every rank calls it between two steps."""
        if tuple(buckets) == self._placement.buckets:
            return
        assert self.client is not None
        state = self.state()
        self._meet("the old buckets of servers")
        self._placement = self.client.placement = self._place(buckets)
        if self._job.transport.rank == 0:
            self._configure(self._architecture.num_servers(self._job.transport.world_size), "")
        self._restore(state)

    def _values(self, number: int) -> torch.Tensor:
        """This rank's parameters of a bucket."""
        tensors = self._placement.buckets[number].tensors
        return torch.cat([self._job.parameters[tensor.name].detach().reshape(-1) for tensor in tensors])

    def _remembered(self, number: int) -> dict[str, torch.Tensor]:
        """This rank's optimizer state of a bucket, under the servers' names."""
        optimizer, parameters = self._job.optimizer, self._job.parameters
        return {
            f"{tensor.name}|{field}|{torch.as_tensor(value).dim()}": torch.as_tensor(value).detach().reshape(-1)
            for tensor in self._placement.buckets[number].tensors
            for field, value in optimizer.state.get(parameters[tensor.name], {}).items()
            if isinstance(value, torch.Tensor | float | int)
        }

    def _hand_back(self, client: Client) -> None:
        """Copy the state of the servers' optimizer into this rank's."""
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
        """The state of servers, by parameter; on rank 0 only, because it is the same for all."""
        found: ParameterState = {}
        if self._job.transport.rank == 0 and self.client is not None:
            for number, bucket in enumerate(self._placement.buckets):
                tensors = {tensor.name: tensor for tensor in bucket.tensors}
                for key, value in self.client.state(number).items():
                    name, field, dims = key.rsplit("|", 2)
                    self._put_together(found, tensors[name], f"{PREFIX}{field}|{dims}", value)
            if not self._rule.barrier:
                for name in self._job.parameters:
                    fields = found.setdefault(name, {})
                    fields[NAMES] = names_of(field.removeprefix(PREFIX) for field in fields)
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
        """Restore the saved state of servers and, where they hold parameters, rank 0's parameters.

        Raises CheckpointError on every rank, with nothing changed, if rank 0's part of the servers' state is unfit.
        """
        assert self.client is not None
        if not self._rule.barrier:
            self.client.rest()
            self._meet("the end of steps")
        self._raise_everywhere(self._problem(saved) if self._job.transport.rank == 0 else "")
        self._restore(saved)

    def _problem(self, saved: ParameterState) -> str:
        """The problem with the servers' part of a saved state; empty if there is none."""
        now = self.state() if self._rule.barrier else {}
        try:
            for name, parameter in self._job.parameters.items():
                if not self._rule.barrier:
                    check_optimizer_state(name, saved.get(name, {}), parameter)
                else:
                    check_sum_state(name, saved.get(name, {}), now.get(name, {}))
        except CheckpointError as exc:
            return str(exc)
        return ""

    def _raise_everywhere(self, problem: str) -> None:
        """Raise CheckpointError on all ranks if rank 0 has found a problem."""
        transport, what = self._job.transport, "the check of a saved state of servers"
        text = torch.frombuffer(bytearray(problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES)), dtype=torch.uint8)
        said = text.to(transport.control_device)
        self._job.engine.call(
            what,
            lambda: one_round(transport.broadcast(said, source=0, purpose="control", what=what)),
            step=self._job.step,
            device=said.device,
        )
        found = bytes(said.tolist()).decode(errors="replace").strip()
        if found:
            raise CheckpointError(found)

    def _restore(self, saved: ParameterState) -> None:
        if self._job.transport.rank == 0:
            self._send_to_servers(self._saved_buckets(saved))
        self._meet("the restoring of servers")
        if not self._rule.barrier:
            self._pull_all()

    def _saved_buckets(
        self, saved: ParameterState
    ) -> Iterable[tuple[int, Mapping[str, torch.Tensor], torch.Tensor | None]]:
        for number, bucket in enumerate(self._placement.buckets):
            state = {
                f"{tensor.name}|{field.removeprefix(PREFIX)}": (
                    value.reshape(-1)[tensor.start : tensor.start + tensor.numel] if tensor.part_of else value
                )
                for tensor in bucket.tensors
                for field, value in saved.get(tensor.owner, {}).items()
                if field.startswith(PREFIX) and field != NAMES
            }
            yield number, state, None if self._rule.barrier else self._values_at_save(number, saved)

    def _values_at_save(self, number: int, saved: ParameterState) -> torch.Tensor:
        """The parameters that servers held when a state was saved."""
        if self._rule.optimizer_on_servers:
            return self._values(number)
        tensors = self._placement.buckets[number].tensors
        return torch.cat([saved[tensor.name][self._rule.anchor].reshape(-1) for tensor in tensors])

    def _meet(self, what: str) -> None:
        """Return when every rank has called this; queued after exchanges that may still be in flight."""
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
        # Otherwise a rank that is ahead and waits at a server would wait for one that waits for it here.
        self.client.rest()
        self._meet("the end of steps")
        self._pull_all()

    def _pull_all(self) -> None:
        self.pull()
        # No rank may push before all have pulled.
        self._meet("the pull of parameters by all ranks")

    def pull(self) -> None:
        """Take the parameters on the servers, by default in place of this rank's."""
        assert self.client is not None
        with torch.no_grad():
            for number, bucket in enumerate(self._placement.buckets):
                values = self.client.pull(number)
                for tensor, place in bucket.segments():
                    self.take(tensor.name, values[place].view(tensor.shape))

    def _overwrite(self, name: str, values: torch.Tensor) -> None:
        self._job.parameters[name].copy_(values)

    def leave(self, at_most_s: float = math.inf) -> None:
        """Say goodbye; when every rank has said goodbye, end the servers that this rank has started.

        at_most_s: then end them nevertheless.
        After a failure that is known here it says no goodbye and waits for nothing: see abandon().
        """
        try:
            if self.client is not None and self.client.failure is None and not self._job.engine.failed():
                self._say_goodbye(self.client, time.monotonic() + at_most_s)
                self._left = True
                self._end(at_once=False)
        finally:
            self.abandon()

    def _say_goodbye(self, client: Client, until_s: float) -> None:
        if self._rule.optimizer_on_servers:
            self._hand_back(client)
        client.leave()
        for number in self._mine:
            self._wait_for_goodbyes(client, number, until_s)
        client.hang_up()

    def _wait_for_goodbyes(self, client: Client, number: int, until_s: float) -> None:
        """Wait while other ranks still make steps, which need this rank's servers."""
        transport = self._job.transport
        while True:
            ranks, quiet_s = client.missing(number)
            if not ranks or time.monotonic() >= until_s:
                return
            known = transport.known_failure()
            if known is not None:
                raise known
            if quiet_s > transport.timeout_s:
                raise CommunicationError(
                    f"detaching on rank {transport.rank}: no rank has sent server {number} a request for "
                    f"{transport.timeout_s:g} s, and rank {', '.join(map(str, ranks))} has not detached."
                )
            time.sleep(_POLL_S)

    def abandon(self) -> None:
        """End this rank's servers at once and close its connections; open requests fail."""
        if self.client is not None and not self._left and self._rule.optimizer_on_servers:
            self._left = True
            _LOG.warning(
                "rank %d detaches after a failure, so its optimizer does not get back the state that servers hold.",
                self._job.transport.rank,
            )
        with ExitStack() as stack:
            if self.client is not None:
                stack.callback(self.client.hang_up)
            stack.callback(self._end, at_once=True)

    def _end(self, *, at_once: bool) -> None:
        started, self._started = self._started, []
        with ExitStack() as stack:
            for server in started:
                stack.callback(server.stop, at_once=at_once)


def _check_optimizer(job: Job) -> str:
    if len(job.optimizers) > 1:
        raise AttachError(
            f'with "{job.strategy.synchronization}" servers run the optimizer, and can run only one; '
            f"{len(job.optimizers)} were given. Use one optimizer with several parameter groups, or another "
            "synchronization."
        )
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
            f"external servers require a token: set the environment variable {TOKEN_VARIABLE} to the "
            f'{2 * TOKEN_BYTES} hex digits that "laconic serve" was started with.'
        )
    return token
