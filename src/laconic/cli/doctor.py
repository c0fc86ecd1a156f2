"""`laconic doctor`: what this machine has and lacks, how to fix it, and a block to paste in an issue.

With --json, one stable document:

    {"versions": {PACKAGE: str | null},
     "backends": {"gloo": bool, "nccl": bool, "mpi": bool, "ucc": bool},
     "cuda": {"built_for": str | null, "devices": [{"name": str, "memory_bytes": int}]},
     "machine": {"os": str, "kernel": str, "architecture": str, "cores": int, "usable_cores": int,
                 "memory_bytes": int | null},
     "virtual_hosts": {"privilege": "root" | "user_namespace" | "none", "veth": bool, "bridge": bool, "tbf": bool,
                       "htb": bool, "netem": bool, "nftables": bool, "reason": str},
     "problems": [{"what": str, "do": str}],
     "issue_block": str}

Nothing here names the host, the user or a path, so the block can be pasted in public. The exit code is 0 even when
problems are found.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Group
from rich.text import Text

from laconic.cli.options.doctor import Arguments
from laconic.cli.terminal import emit, emit_json, emit_sections, plain_table
from laconic.errors import LaconicError, one_line
from laconic.lab.capabilities import Capabilities, detect_capabilities
from laconic.lab.machine import Cuda, Device, Machine, backends, gpus, machine, versions
from laconic.strategy import AXES
from laconic.units import human_bytes

_PACKAGES = {
    "torch": "laconic cannot run",
    "numpy": "laconic cannot run",
    "rich": "this command cannot run; the library can",
    "tyro": "this command cannot run; the library can",
    "pyroute2": "no virtual hosts on this machine",
    "numba": "compression on a CPU runs in plain torch, which is several times slower",
    "jinja2": "no HTML reports",
    "triton": "compression on a GPU runs in plain torch, which is several times slower",
}
"""package -> what its absence means"""

_OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong or missing, and the cure."""

    what: str
    do: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All findings of the doctor."""

    versions: dict[str, str | None]
    backends: dict[str, bool]
    cuda: Cuda
    machine: Machine
    virtual_hosts: Capabilities
    problems: tuple[Problem, ...]

    def issue_block(self) -> str:
        """Plain lines for an issue."""
        packages = [f"{name} {version}" for name, version in self.versions.items() if version]
        absent = [name for name, version in self.versions.items() if not version]
        hosts = self.virtual_hosts
        lines = [
            f"versions: {', '.join(packages)}",
            f"absent: {', '.join(absent) or 'nothing'}",
            f"backends: {', '.join(name for name, present in self.backends.items() if present) or 'none'}",
            f"cuda: built for {self.cuda.built_for or 'CPU only'}; "
            + (", ".join(_device_text(device) for device in self.cuda.devices) or "no device"),
            f"machine: {_machine_text(self.machine)}",
            f"virtual hosts: {hosts.privilege}; "
            + ", ".join(f"{part} {'yes' if works else 'no'}" for part, works in _parts(hosts).items())
            + (f"; {hosts.reason}" if hosts.reason else ""),
            f"problems: {' | '.join(problem.what for problem in self.problems) or 'none'}",
        ]
        return "\n".join(lines) + "\n"


def run(arguments: Arguments) -> int:
    """Check everything and print it."""
    findings = examine()
    if arguments.json:
        emit_json(dataclasses.asdict(findings) | {"issue_block": findings.issue_block()})
        return 0
    emit_sections(
        _versions_section(findings),
        _machine_section(findings),
        _virtual_hosts_section(findings.virtual_hosts),
        _problems_section(findings.problems),
        Text("To paste in an issue", style="bold"),
    )
    # Not through rich: the block must come out unwrapped, whatever the width.
    emit(f"```\n{findings.issue_block()}```\n")
    return 0


def examine() -> Findings:
    """Check everything; a missing or broken part becomes a finding, never an exception."""
    problems: list[Problem] = []
    found_versions = versions(_PACKAGES)
    found_backends = backends()
    cuda, trouble = gpus()
    if trouble:
        problems.append(Problem(f"torch cannot read the GPUs: {trouble}", "run nvidia-smi; repair the driver"))
    virtual_hosts = detect_capabilities()
    problems += _package_problems(found_versions)
    problems += _backend_problems(found_backends, cuda)
    problems += _plugin_problems()
    problems += _virtual_host_problems(virtual_hosts, pyroute2=found_versions["pyroute2"] is not None)
    return Findings(
        versions=found_versions,
        backends=found_backends,
        cuda=cuda,
        machine=machine(),
        virtual_hosts=virtual_hosts,
        problems=tuple(problems),
    )


def _package_problems(versions: dict[str, str | None]) -> list[Problem]:
    problems = [
        Problem(f"{package} is not installed: {_PACKAGES[package]}", f"pip install {package}")
        for package in ("numpy", "pyroute2")
        if versions[package] is None and (package == "numpy" or sys.platform.startswith("linux"))
    ]
    number = tuple(int(part) for part in torch.__version__.split(".")[:2] if part.isdigit())
    if number < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        problems.append(Problem(f"torch {torch.__version__} is older than {oldest}", f'pip install "torch>={oldest}"'))
    return problems


def _backend_problems(backends: dict[str, bool], cuda: Cuda) -> list[Problem]:
    problems: list[Problem] = []
    if not torch.distributed.is_available():
        problems.append(
            Problem("this torch has no torch.distributed: nothing can be exchanged", "install an official torch build")
        )
    elif not backends["gloo"]:
        problems.append(
            Problem("this torch has no gloo: no training across CPU processes", "install an official torch build")
        )
    if cuda.built_for and not cuda.devices:
        problems.append(
            Problem(
                f"torch is built for {cuda.built_for} but sees no GPU",
                "run nvidia-smi and look at CUDA_VISIBLE_DEVICES; without a GPU, training runs on the CPU with gloo",
            )
        )
    if cuda.devices and not backends["nccl"]:
        problems.append(Problem("there is a GPU but this torch has no nccl", "install a CUDA build of torch"))
    if not cuda.built_for and Path("/proc/driver/nvidia/version").exists():
        problems.append(
            Problem(
                "there is an NVIDIA driver but torch is a CPU build", "install a CUDA build of torch to use the GPU"
            )
        )
    return problems


def _plugin_problems() -> list[Problem]:
    problems: list[Problem] = []
    for registry in AXES.values():
        try:
            registry.names()
        except LaconicError as exc:
            problems.append(Problem(one_line(exc), "repair or uninstall the package that registers it"))
    return problems


def _virtual_host_problems(found: Capabilities, *, pyroute2: bool) -> list[Problem]:
    if found.privilege == "none":
        cure = (
            "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), --privileged (containers)"
        )
        return [Problem(f"no virtual hosts: {found.reason}", cure)]
    if not pyroute2:
        return []  # named among the packages already
    problems: list[Problem] = []
    absent = [part for part in ("veth", "bridge") if not _parts(found)[part]]
    if not (found.tbf or found.htb):
        absent += ["tbf", "htb"]
    if absent:
        modules = " ".join({"tbf": "sch_tbf", "htb": "sch_htb"}.get(part, part) for part in absent)
        problems.append(
            Problem(f"no virtual hosts, the kernel refuses {', '.join(absent)}: {found.reason}", f"modprobe {modules}")
        )
    if not found.netem:
        missing = "delay" if found.nftables else "delay or loss"
        problems.append(
            Problem(
                f"no netem: virtual links have a bandwidth but no added {missing}",
                f"modprobe sch_netem, or use a kernel built with CONFIG_NET_SCH_NETEM, if you need {missing}",
            )
        )
    return problems


def _parts(found: Capabilities) -> dict[str, bool]:
    return {
        "veth": found.veth,
        "bridge": found.bridge,
        "tbf": found.tbf,
        "htb": found.htb,
        "netem": found.netem,
        "nftables": found.nftables,
    }


def _device_text(device: Device) -> str:
    return f"{device.name} ({human_bytes(device.memory_bytes)})"


def _machine_text(machine: Machine) -> str:
    memory = human_bytes(machine.memory_bytes) if machine.memory_bytes else "memory unknown"
    cores = f"{machine.usable_cores} of {machine.cores} cores"
    return f"{machine.os}, {machine.kernel} {machine.architecture}, {cores}, {memory}"


def _versions_section(findings: Findings) -> Group:
    table = plain_table()
    for name, version in findings.versions.items():
        about = "" if version else _PACKAGES.get(name, "")
        table.add_row(Text(f"  {name}", style="cyan"), Text(version or "absent"), Text(about, style="dim"))
    return Group(Text("Versions", style="bold"), table)


def _machine_section(findings: Findings) -> Group:
    machine, cuda = findings.machine, findings.cuda
    table = plain_table()
    rows = {
        "system": f"{machine.os}, {machine.kernel}, {machine.architecture}",
        "cores": f"{machine.usable_cores} usable of {machine.cores}",
        "memory": human_bytes(machine.memory_bytes) if machine.memory_bytes else "unknown",
        "torch built for": cuda.built_for or "CPU only",
        "GPUs": "\n".join(map(_device_text, cuda.devices)) or "none",
        "backends": ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in findings.backends.items()),
    }
    for name, value in rows.items():
        table.add_row(Text(f"  {name}", style="cyan"), Text(value))
    return Group(Text("Machine", style="bold"), table)


def _virtual_hosts_section(found: Capabilities) -> Group:
    table = plain_table()
    ways = {
        "root": "yes, as root",
        "user_namespace": "yes, in a user namespace (no root needed)",
        "none": "no",
    }
    table.add_row(Text("  network namespace", style="cyan"), Text(ways[found.privilege]))
    uses = {
        "veth": "cables between hosts",
        "bridge": "a switch",
        "tbf": "bandwidth of a link",
        "htb": "several bandwidths on a link",
        "netem": "delay and loss",
        "nftables": "loss without netem",
    }
    for part, works in _parts(found).items():
        table.add_row(Text(f"  {part}", style="cyan"), Text(f"{'yes' if works else 'no '}  ({uses[part]})"))
    if found.reason:
        table.add_row(Text("  reason", style="cyan"), Text(found.reason))
    return Group(Text("Virtual hosts", style="bold"), table)


def _problems_section(problems: tuple[Problem, ...]) -> Group:
    if not problems:
        return Group(Text("Problems", style="bold"), Text("  none found"))
    table = plain_table()
    for problem in problems:
        table.add_row(Text("  found", style="yellow"), Text(problem.what))
        table.add_row(Text("  do", style="green"), Text(problem.do))
    return Group(Text("Problems", style="bold"), table)
