"""An elastic job on virtual hosts into which faults are injected.

Run as a script in the network namespace of the lab's switch, where the job's store listens; no shaped link limits it
there. For each host there is an agent, whose messages come from that host's namespace, so none arrive from a host that
is cut off. The script's only argument is an ElasticJob as JSON. Exit codes: 0, or 2 with a reason, as for every
command.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

from laconic.core.child_process import die_with_parent
from laconic.core.clock import WallClock
from laconic.core.event import EVENTS_VARIABLE, Event, EventLog
from laconic.core.switch import enter_network, entrance
from laconic.errors import LaconicError, UsageError, one_line
from laconic.lab.cables import Cables
from laconic.lab.fault_injection import FaultInjector, Strike
from laconic.lab.faults import Fault, replaced_after_s
from laconic.membership.agent import Agent, Process, Spawn, Worker, send_signal
from laconic.membership.launcher import Launch, Launcher, run_workers
from laconic.membership.member import WORKER_VARIABLE

_PORT = 29500
"""Any port does: each lab has a network of its own."""
_LOOK_S = 0.02
_TURN_S = 0.05
"""The period in which a process that is slowed down is stopped and continued once."""
_UNKNOWN = -1
"""The step, or the rank, of an event of the lab that does not know it."""


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """The processes of a job, their hosts, and the faults that are injected."""

    command: tuple[str, ...]
    switch: str
    """The address at which hosts reach the job's store."""
    namespaces: tuple[str, ...]
    """The network namespace of each host."""
    environments: tuple[Mapping[str, str], ...]
    """The environment variables of the processes of each host."""
    ranks_per_host: int
    ranks_per_replica: int
    faults: tuple[Fault, ...]
    seed: int
    events: str
    """The file to which lab and ranks append their events."""

    def to_json(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what to_json wrote."""
        found: dict[str, Any] = json.loads(text)
        found["faults"] = [Fault(**fault) for fault in found["faults"]]
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}
        return cls(**values)


class _Slowed:
    """Stops and continues a process many times a second, so that it runs for one part in `factor` of the time."""

    def __init__(self, process: Process, factor: float) -> None:
        self._process = process
        self._run_s = _TURN_S / factor
        self._over = threading.Event()
        threading.Thread(target=self._take_turns, name="laconic-slow", daemon=True).start()

    def _take_turns(self) -> None:
        while self._process.returncode is None and not self._over.is_set():
            send_signal(self._process, signal.SIGSTOP)
            self._over.wait(_TURN_S - self._run_s)
            send_signal(self._process, signal.SIGCONT)
            self._over.wait(self._run_s)

    def end(self) -> None:
        """Let the process run."""
        self._over.set()


class HostAgents:
    """The agents of all hosts, and what faults do to them; see JobProcesses."""

    def __init__(self, job: ElasticJob, launcher: Launcher, cables: Cables, on_event: Callable[[str], None]) -> None:
        self.num_hosts = len(job.namespaces)
        self._launcher = launcher
        self._cables = cables
        self._slowed: dict[str, _Slowed] = {}
        self.agents = [self._agent(job, host, on_event) for host in range(self.num_hosts)]

    def _agent(self, job: ElasticJob, host: int, on_event: Callable[[str], None]) -> Agent:
        """Made in a thread that has entered the host's network: its connections, and threads it starts, stay there."""
        made: list[Agent] = []
        problems: list[Exception] = []
        namespace = job.namespaces[host]
        environment = {**job.environments[host], EVENTS_VARIABLE: job.events}

        def make() -> None:
            try:
                enter_network(namespace)
                spawn = _spawn(job.command, namespace)
                agent = Agent(
                    self._launcher.address,
                    f"host{host}",
                    spawn,
                    environment,
                    on_event,
                    ranks_per_replica=job.ranks_per_replica,
                    own_address=job.switch,
                )
                made.append(agent)
            except Exception as exc:  # noqa: BLE001 - raised below, in the thread that asked
                problems.append(exc)

        thread = threading.Thread(target=make, name=f"laconic-host-{host}")
        thread.start()
        thread.join()
        if problems:
            raise LaconicError(f"host {host} cannot reach the job's store: {problems[0]}") from problems[0]
        return made[0]

    def members(self) -> Sequence[str]:
        view = self._launcher.view
        return () if view is None else view.members

    def processes(self, host: int | None = None) -> Sequence[str]:
        agents = self.agents if host is None else [self.agents[host]]
        return [name for agent in agents for name in list(agent.workers)]

    def _worker(self, process: str) -> Worker | None:
        return next((one for agent in self.agents if (one := agent.workers.get(process)) is not None), None)

    def _signal(self, process: str, number: signal.Signals) -> None:
        worker = self._worker(process)
        if worker is not None:
            send_signal(worker.process, number)

    def kill(self, process: str) -> None:
        self._signal(process, signal.SIGKILL)

    def stop(self, process: str) -> None:
        self._signal(process, signal.SIGSTOP)

    def wake(self, process: str) -> None:
        self._signal(process, signal.SIGCONT)

    def slow(self, process: str, factor: float) -> None:
        before = self._slowed.pop(process, None)
        if before is not None:
            before.end()
        worker = self._worker(process)
        if worker is not None and factor > 1:
            self._slowed[process] = _Slowed(worker.process, factor)

    def freeze(self, host: int, *, frozen: bool) -> None:
        self.agents[host].frozen = frozen

    def cut(self, host: int, peer: int | None, *, cut: bool) -> None:
        self._cables.cut(host, peer, cut=cut)

    def start(self, host: int) -> str:
        agent = self.agents[host]
        return agent.start(agent.free_slot()).name

    def close(self) -> None:
        """End every process."""
        for agent in self.agents:
            agent.stop()
            agent.end_all(grace_s=0.0)


class _Recorder:
    """Tells what happens, in words and as events."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._clock = WallClock()

    def say(self, text: str) -> None:
        """Print a line."""
        _write(f"laconic lab: {text}")

    def strike(self, strike: Strike, members: Sequence[str]) -> None:
        """A fault was carried out, or undone."""
        fault = strike.fault
        ranks = {name: members.index(name) for name in strike.processes if name in members}
        named = [f"{name} (rank {ranks[name]})" if name in ranks else name for name in strike.processes]
        self.say(f"{fault}{' is over' if strike.over else ''}{': ' if named else ''}{', '.join(named)}")
        data = {
            "fault": str(fault),
            "fault_kind": fault.kind,
            "processes": ",".join(strike.processes),
            "over": strike.over,
        }
        rank = next(iter(ranks.values()), _UNKNOWN)
        self._log.write(Event("fault", self._clock.now(), rank, _UNKNOWN, 0.0, {**data}))


def run(job: ElasticJob) -> None:
    """Return when the job has come to its end; LaconicError if it failed, UsageError if a fault had no effect."""
    num_replicas = len(job.namespaces) * job.ranks_per_host // job.ranks_per_replica
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(job.events))
        cables = Cables(job.namespaces)
        launch = Launch(
            spawn=_nothing,
            num_workers=0,
            ranks_per_replica=job.ranks_per_replica,
            first=num_replicas,
            bind=(job.switch, _PORT),
        )
        recorder = _Recorder(log)
        launcher = Launcher(launch, on_event=recorder.say)
        stack.callback(launcher.close)
        hosts = HostAgents(job, launcher, cables, recorder.say)
        stack.callback(hosts.close)
        injector = FaultInjector(
            job.faults, hosts, seed=job.seed, tell=lambda strike: recorder.strike(strike, hosts.members())
        )
        stack.callback(injector.undo_all)
        on_host = Launch(
            spawn=_nothing,
            num_workers=job.ranks_per_host,
            ranks_per_replica=job.ranks_per_replica,
            replace_after_s=replaced_after_s(job.faults),
        )
        lasted_s = _watch(_HostThreads(hosts, on_host, launcher), launcher, injector)
        num_replaced = sum(agent.num_started for agent in hosts.agents) - num_replicas - injector.num_joined
    idle = injector.without_effect(lasted_s, num_replaced=num_replaced)
    if idle:
        raise UsageError(" ".join(idle))


class _HostThreads:
    """The work of `laconic run --join` for each host, one thread per host."""

    def __init__(self, hosts: HostAgents, launch: Launch, launcher: Launcher) -> None:
        self.problems: list[LaconicError] = []
        self._threads = [
            threading.Thread(
                target=self._run, args=(agent, launch, launcher), name=f"laconic-{agent.name}", daemon=True
            )
            for agent in hosts.agents
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, agent: Agent, launch: Launch, launcher: Launcher) -> None:
        try:
            for slot in range(launch.num_replicas):
                agent.start(slot)
            run_workers(agent, launch, launcher)
        except LaconicError as exc:
            self.problems.append(exc)

    @property
    def is_running(self) -> bool:
        """Whether some host still has processes, or will have."""
        return any(thread.is_alive() for thread in self._threads)


def _watch(threads: _HostThreads, launcher: Launcher, injector: FaultInjector) -> float | None:
    """Carry faults out until the job is over; return how long it trained, None if it never did."""
    began_s: float | None = None
    ended_s = time.monotonic()
    while threads.is_running and not threads.problems:
        now_s = time.monotonic()
        if began_s is None and launcher.view is not None:
            began_s = now_s
        if began_s is not None and not launcher.is_ending():
            injector.look(now_s - began_s)
            ended_s = now_s
        time.sleep(_LOOK_S)
    if threads.problems:
        raise threads.problems[0]
    return None if began_s is None else ended_s - began_s


def _spawn(command: Sequence[str], namespace: str) -> Spawn:
    """Starts `command` on a host; every line of its output begins with its name."""

    def spawn(environment: Mapping[str, str]) -> Process:
        name = environment[WORKER_VARIABLE]
        bind_to_parent, enter_host = die_with_parent(), entrance(namespace)
        assert bind_to_parent is not None, "virtual hosts need Linux"

        def enter() -> None:
            bind_to_parent()
            enter_host()

        try:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=enter,  # noqa: PLW1509 - enters a namespace: a few system calls, no lock
            )
        except OSError as exc:
            raise UsageError(f"cannot start {command[0]}: {exc.strerror}.") from exc

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                _write(f"[{name}] {line.rstrip()}")

        threading.Thread(target=read, name=f"laconic-output-of-{name}", daemon=True).start()
        return process

    return spawn


def _write(line: str) -> None:
    """One whole line, for `laconic lab` to show."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _nothing(environment: Mapping[str, str]) -> Process:
    """On the switch no process of the job runs."""
    raise AssertionError("processes are started by the agents of hosts")


def main() -> int:
    """Run the job that the only argument describes."""
    try:
        run(ElasticJob.from_json(sys.argv[1]))
    except LaconicError as exc:
        _write(f"laconic: error: {one_line(exc, 2000)}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
