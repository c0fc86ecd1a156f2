"""What laconic costs beside torch DDP when the network is no limit: step time and memory.

    python -m benchmarks.overhead [--device cuda]

Two processes on this machine train the same GPT of about 5 M parameters. In one run, blocks of DDP steps and blocks
of laconic steps alternate; the ratio compares medians. Peak memory comes from separate runs, alternating too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.experiments.small_gpt import SmallGpt, gpt_shape
from laconic.lab.launch import places_here, run_ranks

STRATEGY = "bsp / all_reduce / none / fusion(25MiB)"
KINDS = {
    "ddp": "torch DistributedDataParallel as it comes",
    "ddp-unused": "the same with find_unused_parameters=True, so that parameters may be unused, as in laconic",
    "laconic": "as it comes",
    "promised": "laconic with find_unused_parameters=False",
}


class Contender:
    """One model with its optimizer, stepped on random tokens."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        shape = gpt_shape(options.size)
        self._device = torch.device(options.device)
        self._model = SmallGpt(shape).to(self._device)
        self._forward: torch.nn.Module = self._model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._tokens = torch.randint(shape.vocabulary, (options.batch, shape.context + 1)).to(self._device)
        self.session: laconic.Session | None = None
        if kind.startswith("ddp"):
            self._forward = DistributedDataParallel(self._model, find_unused_parameters=kind == "ddp-unused")
        else:
            self.session = laconic.attach(
                self._model,
                self._optimizer,
                options.strategy,
                find_unused_parameters=False if kind == "promised" else None,
            )

    def block(self, num_steps: int) -> float:
        """Seconds per step: the median on a CPU; on a GPU wall clock over all of them, so that nothing waits inside."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(num_steps):
                self._step()
            torch.cuda.synchronize()
            return (time.perf_counter() - began_s) / num_steps
        times: list[float] = []
        for _ in range(num_steps):
            began_s = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    def _step(self) -> None:
        logits = self._forward(self._tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.device == "cuda":
        # Several ranks on one GPU: different host ids make NCCL take them for different hosts.
        rank = os.environ["RANK"]
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    kinds = options.role.split(",")
    contenders = {kind: Contender(kind, options) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for contender in contenders.values():
        contender.block(5)
    for block in range(options.blocks):
        # Who goes first alternates too, so that a drift of the machine favours neither.
        for kind in kinds if block % 2 == 0 else reversed(kinds):
            dist.barrier()
            times[kind].append(contenders[kind].block(options.steps))
    if dist.get_rank() == 0:
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if options.device == "cuda":
            peak_kib = torch.cuda.max_memory_allocated() / 1024
        Path(options.out).write_text(json.dumps({"times": times, "peak_kib": peak_kib}))
    for contender in contenders.values():
        if contender.session is not None:
            contender.session.detach()
    dist.destroy_process_group()


def measure(role: str, options: argparse.Namespace, *, blocks: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.overhead", "--role", role, "--out", str(out)]
        command += ["--blocks", str(blocks), "--steps", str(options.steps), "--batch", str(options.batch)]
        command += ["--size", options.size, "--strategy", options.strategy, "--device", options.device]
        run_ranks(command, places_here(options.workers), timeout_s=600, environment={"OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=20, help="alternating blocks of each kind")
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", default="medium")
    parser.add_argument("--strategy", default=STRATEGY)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="what is compared; the first one is what it is compared with"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, which takes runs of its own")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_rank(options)
        return
    model = SmallGpt(gpt_shape(options.size))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    work = f"GPT of {num_parameters / 1e6:.2f} M parameters, batch {options.batch}"
    print(f"{work}, {options.workers} processes, {options.device}")
    print(f"laconic runs {options.strategy}")
    kinds = options.kinds.split(",")
    times = measure(options.kinds, options, blocks=options.blocks)["times"]
    for kind in kinds:
        low, middle, high = statistics.quantiles(times[kind], n=4)
        quartiles = f"quartiles {low * 1e3:.2f} .. {high * 1e3:.2f} ms"
        print(f"{kind:10} median step {middle * 1e3:8.2f} ms   {quartiles}   {KINDS[kind]}")
    first, *others = kinds
    for kind in others:
        ratios = [ours / theirs for ours, theirs in zip(times[kind], times[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(times[kind]) / statistics.median(times[first])
        spread = f"block by block {middle:.3f}, quartiles {low:.3f} .. {high:.3f}"
        print(f"ratio {kind}/{first} of medians {ratio:.3f}   {spread}")
    if options.no_memory:
        return
    peaks = {kind: [measure(kind, options, blocks=1)["peak_kib"] for _ in range(3)] for kind in ("ddp", "laconic")}
    ours, theirs = (statistics.median(peaks[kind]) for kind in ("laconic", "ddp"))
    print(f"peak memory: DDP {theirs / 1024:.1f} MiB, laconic {ours / 1024:.1f} MiB, ratio {ours / theirs:.3f}")


if __name__ == "__main__":
    main()
