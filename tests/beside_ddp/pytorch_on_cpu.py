"""PyTorch's own tests of DistributedDataParallel on CPU ranks: where they say "cuda", a CPU stands in.

torch.testing._internal.distributed.distributed_test asks for GPUs in most tests, though what they test is not about
GPUs. Here devices become the CPU, the decorators that ask for GPUs ask for nothing, and DistributedDataParallel is
replaced by the look-alike (or, to see what the tests do by themselves, left as it is without its device arguments).
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from laconic.errors import LaconicError
from tests.beside_ddp.look_alike import LookAlike, NotApplicable, follow_optimizers, let_go

MODULE = "torch.testing._internal.distributed.distributed_test"


def is_gpu(device: object) -> bool:
    """Whether a test means a GPU by this."""
    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


class OnCpu(TorchFunctionMode):
    """Every tensor that a test wants on a GPU is made on the CPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function with the CPU in place of a GPU."""
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to and len(args) > 1 and is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)


def _module_to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    args = tuple("cpu" if is_gpu(arg) else arg for arg in args)
    return _to(self, *args, **{key: "cpu" if is_gpu(value) else value for key, value in kwargs.items()})


_to = nn.Module.to


class CpuDdp(DistributedDataParallel):
    """torch's own, for what the tests do by themselves."""

    def __init__(
        self, module: nn.Module, device_ids: object = None, output_device: object = None, **others: Any
    ) -> None:
        super().__init__(module, **others)


@functools.cache
def tests_module() -> ModuleType:
    """The module with PyTorch's tests, its demands for GPUs taken away. Needs WORLD_SIZE."""
    os.environ |= {"BACKEND": "gloo", "INIT_METHOD": "env://", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    if importlib.util.find_spec("expecttest") is None:
        # PyTorch's test base class comes from there; it compares recorded text, which no test here does.
        sys.modules["expecttest"] = stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_distributed

    def demands_nothing(*_: object, **__: object) -> Callable[[Any], Any]:
        return lambda function: function

    common_distributed.skip_if_lt_x_gpu = demands_nothing
    common_distributed.nccl_skip_if_lt_x_gpu = demands_nothing
    common_distributed.skip_if_no_gpu = lambda function: function

    return importlib.import_module(MODULE)


def names() -> list[str]:
    """The tests of DistributedDataParallel: those that make one, themselves or in a method they call."""
    found = importlib.util.find_spec(MODULE)
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    tree = ast.parse(source)
    base = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    lines = source.splitlines()
    texts = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in base.body
        if isinstance(node, ast.FunctionDef)
    }
    uses = {name for name, text in texts.items() if "DistributedDataParallel" in text}
    while more := {
        name
        for name, text in texts.items()
        if name not in uses and any(f"self.{used}{after}" in text for used in uses for after in "(,")
    }:
        uses |= more
    return [name for name in texts if name in uses and name.startswith("test")]


@contextmanager
def _cpu_and(wrapper: type[nn.Module]) -> Iterator[None]:
    tests = tests_module()
    with ExitStack() as stack:
        for function in ("set_device", "synchronize", "manual_seed"):
            # One each, and no Mock: the compiler looks functions up by identity.
            stack.enter_context(mock.patch.object(torch.cuda, function, _doing_nothing()))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        stack.enter_context(mock.patch.object(nn.Module, "cuda", lambda self, device=None: self))
        stack.enter_context(mock.patch.object(nn.Module, "to", _module_to))
        for place in (nn.parallel, tests):
            stack.enter_context(mock.patch.object(place, "DistributedDataParallel", wrapper))
        stack.enter_context(mock.patch.object(tests.Barrier, "sync", _barrier))
        stack.enter_context(mock.patch.object(tests, "_rank_temp_file", _file_of_all(tests._rank_temp_file)))
        # What the compiler's back end generates is not what is tested, and takes 20 s.
        compile_quickly = functools.partial(torch.compile, backend="aot_eager")
        stack.enter_context(mock.patch.object(torch, "compile", compile_quickly))
        stack.enter_context(OnCpu())
        yield


def _doing_nothing() -> Callable[..., None]:
    def nothing(*_: object, **__: object) -> None:
        """Stands where a GPU would be asked for something."""

    return nothing


def _barrier(*_: object, **__: object) -> None:
    dist.barrier()


def _file_of_all(make: Callable[[], Any]) -> Callable[[], Any]:
    """The file of rank 0 that all ranks read; PyTorch's own removes it while others may still be at it."""

    @contextmanager
    def file_of_all() -> Iterator[str]:
        with make() as name:
            yield name
            dist.barrier()

    return file_of_all


@functools.cache
def _test_class() -> type[unittest.TestCase]:
    tests = tests_module()
    follow_optimizers()
    return type("OnTheseRanks", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})


def with_laconic(name: str) -> str:
    """One test with the look-alike in DDP's place: "passed", or how it ended otherwise."""
    return _run(name, LookAlike)


def with_ddp(name: str) -> str:
    """One test with torch's DDP."""
    return _run(name, CpuDdp)


def _run(name: str, wrapper: type[nn.Module]) -> str:
    torch.manual_seed(0)
    test = _test_class()(name)
    test.rank = dist.get_rank()  # type: ignore[attr-defined]
    error: BaseException | None = None
    try:
        with _cpu_and(wrapper):
            getattr(test, name)()
    except unittest.SkipTest as exc:
        return f"skipped: {exc}"
    except SystemExit as exc:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        return "skipped: " + next(skip.message for skip in TEST_SKIPS.values() if skip.exit_code == exc.code)
    except NotApplicable as exc:
        error = exc
        return f"not applicable: {exc}"
    except LaconicError as exc:
        error = exc
        return f"refused: {type(exc).__name__}: {exc}"
    except BaseException as exc:
        error = exc
        raise
    finally:
        let_go(error)
    return "passed"
