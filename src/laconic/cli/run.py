"""`laconic run --nproc 4 --min 2 --max 8 train.py`: training that continues when processes die, join and leave.

This process holds the job's store and decides who is a member; workers that are killed are replaced. If this
process ends, so does the job.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

from laconic.cli.options.run import Arguments
from laconic.cli.terminal import printable
from laconic.errors import CommunicationError, UsageError, one_line
from laconic.membership.limits import BEAT_S
from laconic.units import parse_quantity

_MEETING = timedelta(minutes=5)
"""The hosts of a job need not start at the same time."""
_ANSWER = timedelta(seconds=30)
"""A store that has not said this long after it was reached which job it belongs to is that of another program."""


def run(arguments: Arguments) -> int:
    """Run the job; returns 0 if every worker has completed its script."""
    command = _command(arguments)
    if arguments.nproc < 1:
        raise UsageError(f"run: --nproc must be >= 1, got {arguments.nproc}.")
    if arguments.ranks_per_replica < 1 or arguments.nproc % arguments.ranks_per_replica:
        raise UsageError(
            f"run: --ranks-per-replica must divide --nproc {arguments.nproc}, got {arguments.ranks_per_replica}: the "
            "processes of a replica are on one host."
        )
    if arguments.min < 1 or (arguments.max is not None and arguments.max < arguments.min):
        raise UsageError(f"run: --min must be >= 1 and --max >= --min, got {arguments.min} and {arguments.max}.")
    if arguments.wait_for is not None and arguments.wait_for < 1:
        raise UsageError(f"run: --wait-for must be >= 1, got {arguments.wait_for}.")
    first = arguments.nproc // arguments.ranks_per_replica if arguments.wait_for is None else arguments.wait_for
    if first < arguments.min and arguments.join is None:
        raise UsageError(
            f"run: training begins with {first} and needs --min {arguments.min}, so it would end at once. Give "
            f"--wait-for {arguments.min} to wait for other hosts, or more --nproc."
        )
    if arguments.max_restarts < 0:
        raise UsageError(f"run: --max-restarts must be >= 0, got {arguments.max_restarts}.")
    silent_s = parse_quantity(arguments.silent, "time", "--silent")
    if silent_s < 4 * BEAT_S:
        raise UsageError(
            f"run: --silent must be at least {4 * BEAT_S:g}s, got {arguments.silent}: every host sends a "
            f"heartbeat every {BEAT_S:g} s."
        )
    # One thread for each process, as torchrun does it: else all of them use all cores.
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    from laconic.membership.agent import spawn_command
    from laconic.membership.launcher import Launch, Launcher

    if arguments.join is not None:
        return _join(arguments, command, environment)
    launch = Launch(
        spawn=spawn_command(command),
        num_workers=arguments.nproc,
        ranks_per_replica=arguments.ranks_per_replica,
        first=arguments.wait_for or 0,
        min_ranks=arguments.min,
        max_ranks=arguments.max if arguments.max is not None else 2**31,
        max_restarts=arguments.max_restarts,
        on_error=arguments.on_error,
        silent_s=silent_s,
        environment=environment,
        bind=_address(arguments.listen, "--listen", port=0),
    )
    launcher = Launcher(launch, on_event=_say)
    host, port = launcher.address
    _say(f"the job's store is at {host}:{port}; laconic run --join {host}:{port} adds processes of other hosts")
    _on_sigterm(launcher.leave)
    launcher.run()
    return 0


def _join(arguments: Arguments, command: list[str], environment: dict[str, str]) -> int:
    import torch.distributed as dist

    from laconic.membership.agent import Agent, spawn_command
    from laconic.membership.launcher import ON_ERROR, RANKS_PER_REPLICA, Launch, StateInStore, run_workers

    defaults = Arguments(command=())
    for option in ("min", "max", "wait_for", "listen", "silent", "on_error"):
        if getattr(arguments, option) != getattr(defaults, option):
            raise UsageError(
                f"run: --{option.replace('_', '-')} has no effect together with --join: the host that started the job "
                "has set it. Leave it out."
            )
    address = _address(arguments.join or "", "--join")
    _say(f"looking for the job's store at {arguments.join}")
    try:
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_MEETING)
        store.wait([RANKS_PER_REPLICA, ON_ERROR], _ANSWER)
    except RuntimeError as exc:
        raise CommunicationError(
            f"run: no job was found at {arguments.join}: {one_line(exc, 120)}. Start it first, with --listen on an "
            "address that this host can reach; it prints the address to give here."
        ) from exc
    count, of_job = arguments.ranks_per_replica, int(store.get(RANKS_PER_REPLICA))
    if count != of_job:
        raise UsageError(f"run: --ranks-per-replica is {count}, and this job has {of_job}. Give the same number.")
    name = str(store.add("agents", 1) - 1)
    agent = Agent(address, name, spawn_command(command), environment, _say, ranks_per_replica=count)
    launch = Launch(
        spawn=agent.spawn,
        num_workers=arguments.nproc,
        ranks_per_replica=count,
        max_restarts=arguments.max_restarts,
        on_error="replace" if store.get(ON_ERROR) == b"replace" else "end",
    )
    state = StateInStore(agent, store)
    _on_sigterm(state.leave)
    try:
        for slot in range(launch.num_replicas):
            agent.start(slot)
        run_workers(agent, launch, state)
    finally:
        agent.end_all(grace_s=0.0)
        agent.stop()
    return 0


def _on_sigterm(leave: Callable[[], None]) -> None:
    """Ask workers to end: they finish their step and hand over; then this process ends too."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        leave()

    signal.signal(signal.SIGTERM, pass_on)


def _command(arguments: Arguments) -> list[str]:
    if not arguments.command:
        raise UsageError("run: nothing to run. Name a script, as in: laconic run --nproc 4 train.py")
    first = arguments.command[0]
    return [*([sys.executable] if first.endswith(".py") else []), *arguments.command]


def _address(text: str, option: str, port: int | None = None) -> tuple[str, int]:
    host, colon, digits = text.rpartition(":") if ":" in text else (text, "", "")
    if not host or (colon and not digits.isdecimal()) or (not colon and port is None):
        form = "ADDRESS:PORT" if port is None else "ADDRESS[:PORT]"
        raise UsageError(f'run: {option} must be {form}, got "{one_line(text, 120)}".')
    found = int(digits) if colon else port or 0
    if not (0 if port is not None else 1) <= found <= 65535:
        raise UsageError(f"run: {option}: a port is a number up to 65535, got {one_line(digits, 20)}.")
    try:
        # torch would try for five minutes to find a host that does not exist.
        socket.getaddrinfo(host, found, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise UsageError(
            f'run: {option}: no host "{one_line(host, 120)}" is known here: {one_line(exc, 120)}.'
        ) from exc
    return host, found


def _say(text: str) -> None:
    print(f"laconic run: {printable(text)}", file=sys.stderr, flush=True)
