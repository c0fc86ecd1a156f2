"""Divides the samples of each step among the current ranks: none is left out, none is used twice.

The order of samples depends only on the seed and the epoch, and the samples of a step only on how many were used
before. The set of ranks decides only which rank computes which samples, so ranks that die or join do not change the
data that training sees. If a rank dies in a step, its samples are missing from that step. At the end of an epoch, a
step with fewer samples than ranks is skipped, and so are the samples that FSDP's ranks cannot divide equally.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from laconic.core.event import Event
from laconic.errors import AttachError
from laconic.runtime.elastic.division import Reader, Split
from laconic.runtime.elastic.settings import Elastic
from laconic.runtime.job import Job
from laconic.runtime.progress import Progress


class Division(Protocol):
    """The ranks among which samples are divided, and the position in the data."""

    elastic: Elastic
    progress: Progress
    weights: dict[str, int] | None
    """The number of samples of each replica in the current step."""

    @property
    def reader(self) -> Reader:
        """The samples of a replica that this rank uses."""
        ...

    @property
    def split(self) -> Split:
        """The replicas among which the samples of the next step are divided, and how."""
        ...

    def before_batch(self) -> None:
        """The loop asks for its next batch; the ranks may change now."""
        ...

    def handed_out(self) -> None:
        """This rank is about to work on a batch."""
        ...

    @property
    def name(self) -> str:
        """The replica of this rank."""
        ...


@dataclass
class FixedDivision:
    """A fixed set of ranks, started by torchrun."""

    elastic: Elastic
    rank: int
    world_size: int
    progress: Progress = field(default_factory=Progress)
    weights: dict[str, int] | None = None
    reader: Reader = Reader()

    @property
    def split(self) -> Split:
        return Split(tuple(map(str, range(self.world_size))))

    def before_batch(self) -> None:
        """Do nothing: the ranks stay."""

    def handed_out(self) -> None:
        """Do nothing: speeds are not used here."""

    @property
    def name(self) -> str:
        return str(self.rank)


class Batches:
    """An iterable over this rank's batches of several epochs, which starts at the position of the other ranks."""

    def __init__(self, job: Job, division: Division, loader: DataLoader[Any], *, epochs: int, seed: int) -> None:
        self._job = job
        self._division = division
        self._loader = loader
        self._epochs = epochs
        self._seed = seed
        self._batch_size = _batch_size(loader)
        self._size = len(loader.dataset)  # pyrefly: ignore[bad-argument-type]
        self._chosen = _Chosen()
        self._own = _loader_of(loader, self._chosen)
        # Never 0, which means that the samples are not known.
        self._number = zlib.crc32(repr(self.about()).encode()) + 1
        if division.elastic.batch == "local":
            return
        self._refuse_more_than(division.elastic.max_ranks or len(division.split.members))
        alike = division.reader.count
        if self._batch_size % alike:
            raise AttachError(
                f"the global batch of {self._batch_size} samples is no multiple of {alike}: the {alike} ranks over "
                "which FSDP averages gradients need equal parts. Give the DataLoader another batch_size."
            )

    def _refuse_more_than(self, replicas: int) -> None:
        """Raise if the samples of a step are fewer than the ranks of so many replicas."""
        most = self._division.reader.count * replicas
        if self._division.elastic.batch == "global" and self._batch_size < most:
            raise AttachError(
                f"the global batch of {self._batch_size} samples is too small for {most} ranks: some would have none. "
                "Give the DataLoader a larger batch_size, allow fewer with Elastic(max_ranks=...), or use "
                'Elastic(batch="local").'
            )

    def about(self) -> dict[str, str]:
        """The properties that must be the same on all ranks."""
        loader = self._loader
        return {
            "the number of samples": str(self._size),
            "batch_size": str(self._batch_size),
            "shuffle": str(isinstance(loader.sampler, RandomSampler)),
            "drop_last": str(loader.drop_last),
            "seed": str(self._seed),
            "epochs": str(self._epochs),
            "elastic.batch": self._division.elastic.batch,
        }

    def __iter__(self) -> Iterator[Any]:
        division, progress = self._division, self._division.progress
        division.before_batch()
        if self._epochs <= min(progress.position[0], progress.asked):
            raise AttachError(
                f"session.batches(epochs={self._epochs}) has no batch left: epochs are counted from the beginning of "
                f"training, and so many are done: {progress.position[0]}. In a loop over epochs, write "
                "session.batches(loader, epochs=epoch + 1)."
            )
        progress.asked = max(progress.asked, self._epochs)
        while progress.position[0] < self._epochs:
            split, loads = division.split, progress.loads
            self._refuse_more_than(len(split.members))  # others may have joined
            epoch, begin = progress.position
            parts = self._parts(epoch, begin, split)
            if not parts:
                progress.position = (epoch + 1, 0)
                continue
            mine = split.members.index(division.name)
            self._chosen.batches = [division.reader.own(part[mine]) for part in parts]
            for part, batch in zip(parts, self._own, strict=True):
                self._note(epoch, split, part)
                at = progress.position
                division.handed_out()
                yield batch
                if progress.loads != loads:
                    break  # the rest is what follows the loaded position
                if progress.position != at:
                    raise AttachError(
                        "two loops over session.batches() take batches in turn, but a job has one position in its "
                        "data, which joining ranks take over. Put both data sets into one DataLoader."
                    )
                division.before_batch()
                if division.split != split:
                    break  # the rest is divided among another set of ranks

    def _note(self, epoch: int, split: Split, part: list[list[int]]) -> None:
        division, job, progress = self._division, self._job, self._division.progress
        progress.data = self._number
        begin = progress.position[1]
        progress.position = (epoch, begin + sum(map(len, part)))
        before = division.weights or {}
        counts = dict(zip(split.members, map(len, part), strict=True))
        division.weights = {name: before.get(name, 0) + count for name, count in counts.items()}
        mine, reader = split.members.index(division.name), division.reader
        sizes = list(counts.values())
        data = {"epoch": epoch, "begin": begin, "samples": reader.share(sizes[mine]), "split": ",".join(counts)}
        data |= {"first": begin + sum(sizes[:mine]) + reader.first(sizes[mine]), "sizes": ",".join(map(str, sizes))}
        job.events.write(Event("batch", job.clock.now(), job.transport.rank, job.step, 0.0, {**data}))

    def _parts(self, epoch: int, begin: int, split: Split) -> list[list[list[int]]]:
        """For each remaining step of the epoch, the samples of each rank."""
        size, loader = self._batch_size, self._loader
        order = order_of(self._size, epoch, seed=self._seed, shuffled=isinstance(loader.sampler, RandomSampler))
        together = size if self._division.elastic.batch == "global" else size * split.least
        steps = [order[first : first + together] for first in range(begin, self._size, together)]
        # A step with fewer samples than ranks is skipped: a rank without a sample could not take part.
        least = together if loader.drop_last else split.least
        return [split.parts(step) for step in steps if len(step) >= least]


def _batch_size(loader: DataLoader[Any]) -> int:
    """Its batch size; raises unless its samples can be divided in the order that the seed determines."""
    sampler = loader.sampler
    if loader.batch_size is None or type(sampler) not in (RandomSampler, SequentialSampler):
        raise AttachError(
            "session.batches() needs a DataLoader with batch_size and either shuffle=True or no sampler: it "
            "divides the samples among the ranks itself. Leave DistributedSampler and batch_sampler out."
        )
    if getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset):  # pyrefly: ignore[bad-argument-type]
        raise AttachError(
            "session.batches() uses every sample of the data set once per epoch, and the DataLoader's sampler draws "
            "samples with replacement, or another number of them. Write DataLoader(..., shuffle=True); a part of a "
            "data set is a torch.utils.data.Subset."
        )
    if loader.generator is not None:
        raise AttachError(
            "session.batches() does not use the DataLoader's generator: joining ranks could not continue it. Leave it "
            "out, and write session.batches(loader, seed=...)."
        )
    if not getattr(loader, "in_order", True):
        raise AttachError(
            "session.batches() counts the samples of each batch, so batches must arrive in order. Leave in_order=False "
            "out of the DataLoader."
        )
    return loader.batch_size


class _Chosen:
    """A batch sampler of batches that are set before each iteration."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _loader_of(loader: DataLoader[Any], chosen: _Chosen) -> DataLoader[Any]:
    """A loader with the settings of the user's loader, over the chosen batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=chosen,  # pyrefly: ignore[bad-argument-type]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def order_of(size: int, epoch: int, *, seed: int, shuffled: bool) -> list[int]:
    """The samples of an epoch in the order in which they are used."""
    if not shuffled:
        return list(range(size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
