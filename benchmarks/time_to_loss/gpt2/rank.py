"""One rank of one training, started as `python -m benchmarks.time_to_loss.gpt2.rank JOB.json TOKENS.npz OUT.json`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.convergence.recipe import Recipe
from benchmarks.time_to_loss.contender import Contender
from benchmarks.time_to_loss.gpt2.job import AUTO, DILOCO_BY_HAND, HOOKS, WITHOUT_LACONIC, Job, Outcome, read_job, write
from benchmarks.time_to_loss.gpt2.text import Tokens, load
from laconic.core.event import EventList
from laconic.experiments.small_gpt import SmallGpt, gpt_shape

_POINTS = 15
"""How often the loss is looked at in a run."""
_HELD_OUT_WINDOWS = 160
_DILOCO_PERIOD = 16
_TIMEOUT_S = 300.0


class Training:
    """A model, its optimizer, and who averages what."""

    def __init__(self, job: Job, tokens: Tokens) -> None:
        self.job = job
        self.device = torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # Over sockets, beside the exchanges of a strategy that may be in flight: two NCCL communicators at once would
        # depend on the order in which each rank's GPU starts their kernels.
        self._among: dist.ProcessGroup | None = None
        if dist.is_initialized():
            among = dist.new_group(backend="gloo")
            assert isinstance(among, dist.ProcessGroup)  # an int on ranks that are not in it: here all are
            self._among = among
        self._tokens = tokens
        torch.manual_seed(job.seed)
        shape = replace(gpt_shape(job.size), context=job.context, vocabulary=vocabulary(job.size))
        self.model = SmallGpt(shape).to(self.device)
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self.model
        contender = Contender.parse(job.contender)
        auto = contender.name.startswith(AUTO)
        strategy = None if auto or contender.name in WITHOUT_LACONIC else contender.strategy()
        self._events = EventList()
        self._recipe = Recipe(
            optimizer=contender.optimizer_for(strategy),
            learning_rate=job.rate,
            betas=(0.9, 0.95),  # as language models are trained
            warmup=job.warmup,
        )
        self._optimizers = self._recipe.make(self.model)
        self._rates = self._recipe.rates(job.steps)
        self._after_step: Callable[[int], None] = lambda step: None
        self.session: laconic.Session | None = None
        if contender.name == DILOCO_BY_HAND:
            self._after_step = diloco_by_hand(self.model, _DILOCO_PERIOD)
        elif auto or strategy is not None:
            self.session = laconic.attach(
                self.model,
                self._optimizers,
                strategy or contender.name,
                total_steps=job.steps,
                timeout_s=_TIMEOUT_S,
                events=self._events if auto else None,
            )
        elif job.link:
            self._forward = _torch_ddp(self.model, contender.name)
        self._cross_entropy: Callable[..., torch.Tensor] = functional.cross_entropy
        if job.compiled == "model":
            self._forward = torch.compile(self._forward)
        elif job.compiled == "blocks":
            for block in self.model.blocks:
                block.compile()
            self._cross_entropy = torch.compile(functional.cross_entropy)

    def step(self, number: int) -> None:
        """One optimizer step on this rank's windows; alone, on those of all ranks."""
        mine = range(self.job.ranks) if not self.job.link else (self.rank,)
        for rank in mine:
            windows = self._windows(self._tokens.train, (self.job.seed * 100_003 + number) * 101 + rank, self.job.batch)
            (self._loss(windows) / len(mine)).backward()
        self._recipe.step(self._optimizers, next(self._rates))
        self._after_step(number)

    def held_out(self) -> float:
        """The loss on files never trained on; every rank looks at a share of the windows with its own replica."""
        if self.session is not None:
            self.session.settle()
        share = _HELD_OUT_WINDOWS // (self.job.ranks if self.job.link else 1)
        first = self.rank * share
        windows = self._windows(self._tokens.held_out, 1, _HELD_OUT_WINDOWS)[first : first + share]
        with torch.no_grad():
            losses = [self._loss(part) for part in windows.split(self.job.batch)]
        mean = torch.stack(losses).float().mean().cpu()
        if self._among is not None:
            dist.all_reduce(mean, group=self._among)
            mean /= self._among.size()
        return float(mean)

    def decisions(self) -> Iterator[tuple[int, str, str]]:
        """The step, strategy and reason of each decision of auto."""
        for event in self._events.events:
            if event.kind == "auto":
                yield event.step, str(event.data["strategy"]), str(event.data["reason"])

    def now_s(self) -> float:
        """The time when the GPU of every rank has done all that was launched so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self._among is not None:
            dist.barrier(self._among)
        return time.perf_counter()

    def finish(self) -> None:
        """Take hooks off; replicas that differ are averaged."""
        if self.session is not None:
            if not self.session.strategy.exchanges_gradients():
                self.session.average()
            self.session.detach()

    def _windows(self, tokens: torch.Tensor, seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(tokens) - self.job.context - 1, (count, 1), generator=generator)
        places = starts + torch.arange(self.job.context + 1)
        return tokens[places.to(self.device)].long()

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            logits = self._forward(windows[:, :-1])
            return self._cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def vocabulary(size: str) -> int:
    """Tokens that are told apart: as GPT-2 has, and few for models that only try the code."""
    return gpt_shape(size).vocabulary if size == "gpt2" else 1024


def diloco_by_hand(model: nn.Module, period: int) -> Callable[[int], None]:
    """DiLoCo as published, without laconic: what to call after every step."""
    anchors = [parameter.detach().clone() for parameter in model.parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def after_step(step: int) -> None:
        if (step + 1) % period:
            return
        for anchor, parameter in zip(anchors, model.parameters(), strict=True):
            anchor.grad = anchor - parameter
            dist.all_reduce(anchor.grad)
            anchor.grad /= dist.get_world_size()
        outer.step()
        for anchor, parameter in zip(anchors, model.parameters(), strict=True):
            parameter.copy_(anchor)

    return after_step


def _torch_ddp(model: nn.Module, contender: str) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model)
    hook = HOOKS.get(contender)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook is not None:
        compress = default_hooks.bf16_compress_hook if hook == "bf16" else default_hooks.fp16_compress_hook
        wrapped.register_comm_hook(None, compress)
    return wrapped


def train(job: Job, tokens: Tokens) -> Outcome:
    """Make all steps; the clock stands still while the loss is looked at."""
    training = Training(job, tokens)
    every = max(1, job.steps // _POINTS)
    steps: list[int] = []
    losses: list[float] = []
    seconds: list[float] = []
    spent_s = later_s = 0.0
    began_s = training.now_s()
    sent, payload = _sent_bytes(), 0
    for number in range(job.made):
        training.step(number)
        if number == 0 or number + 1 == job.made or (job.evaluates and (number + 1) % every == 0):
            took_s = training.now_s() - began_s
            spent_s += took_s
            later_s += took_s if number else 0.0
            if number + 1 == job.made:
                sent = _sent_bytes() - sent
                payload = training.session.traffic.sent_bytes("payload") if training.session else 0
                training.finish()
            if job.evaluates and number:
                looked = _sent_bytes()
                steps.append(number + 1)
                losses.append(training.held_out())
                seconds.append(spent_s)
                if number + 1 < job.made:
                    sent += _sent_bytes() - looked
            began_s = training.now_s()
    return Outcome(
        job=job,
        steps=tuple(steps),
        losses=tuple(losses),
        seconds=tuple(seconds),
        step_s=later_s / (job.made - 1) if job.made > 1 else spent_s,
        sent_bytes=sent // job.made,
        payload_bytes=payload // job.made,
        memory_bytes=torch.cuda.max_memory_allocated() if job.device == "cuda" else 0,
        decisions=tuple(training.decisions()),
    )


def _sent_bytes() -> int:
    """Through this rank's own interface; 0 if it has none."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def main() -> None:
    """Train as one rank of `sys.argv[1]`; rank 0 writes what came of it."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    logging.getLogger("laconic").setLevel(logging.INFO)  # the decisions of auto, as it makes them
    job_path, tokens_path, out_path = map(Path, sys.argv[1:])
    job = read_job(job_path)
    torch.set_float32_matmul_precision("high")
    if job.device == "cpu":
        torch.set_num_threads(1)
    if job.link:
        dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    device = torch.device(job.device)
    outcome = train(job, load(tokens_path, device))
    if not dist.is_initialized() or dist.get_rank() == 0:
        write(out_path, outcome)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
