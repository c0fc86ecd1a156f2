"""Loads a model to measure from a function in a user's script.

    def make_model():
        return model, batch, loss          # loss(model, batch) is what backward() is called on

An error in the script becomes one line with the error and the line of the script.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

from torch import nn

from laconic.errors import LaconicError, UsageError, did_you_mean, one_line
from laconic.workload.profiler import Subject

_MODULE = "laconic_profiled_script"
_WANTED = "It must return (model, batch, loss), where loss(model, batch) gives what backward() is called on."


def load_subject(where: str) -> Subject:
    """The result of the function "path/to/script.py:function"."""
    path, function_name = _split(where)
    with explained(where, path), _beside(path):
        module = _imported(path)
    function = getattr(module, function_name, None)
    if not inspect.isfunction(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f'{path} has no function "{function_name}". {did_you_mean(function_name, functions)}')
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(f"{where} needs arguments ({', '.join(needed)}), but is called without any. {_WANTED}")
    with explained(where, path), _beside(path):
        made = function()
    return _subject(made, where)


@contextlib.contextmanager
def explained(where: str, path: Path) -> Generator[None, None, None]:
    """Turns errors of the script into one line with their position in it."""
    try:
        yield
    except LaconicError as exc:
        raise UsageError(f"{where}: {exc}") from exc
    except (Exception, SystemExit) as exc:  # a script may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if Path(frame.filename) == path]
        if isinstance(exc, SyntaxError) and exc.filename == str(path):
            lines = [exc.lineno]
        place = f" in line {lines[-1]}" if lines and lines[-1] is not None else ""
        told = f"{type(exc).__name__}: {one_line(exc)}" if str(exc) else type(exc).__name__
        raise UsageError(f"{where} raised{place} {told}") from exc


def script_path(where: str) -> Path:
    """The script's part of "path/to/script.py:function"."""
    return _split(where)[0]


def _split(where: str) -> tuple[Path, str]:
    file, colon, function = where.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise UsageError(
            f'"{one_line(where, 80)}" does not name a function in a script. Write path/to/script.py:make_model.'
        )
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no script {one_line(file, 200)}.")
    return path.resolve(), function


@contextlib.contextmanager
def _beside(path: Path) -> Generator[None, None, None]:
    """Lets the script import modules from its own folder, as when it is run."""
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the script may have changed the list itself
            sys.path.remove(str(path.parent))


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError("this is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _subject(made: object, where: str) -> Subject:
    if not isinstance(made, tuple) or len(made) != 3:
        kinds = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a value of type {type(made).__name__}"
        raise UsageError(f"{where} returned {kinds}. {_WANTED}")
    model, batch, loss = made
    if not isinstance(model, nn.Module):
        raise UsageError(f"{where} returned {type(model).__name__} as its model, not a torch.nn.Module. {_WANTED}")
    if not callable(loss) or isinstance(loss, nn.Module):
        raise UsageError(
            f"{where} returned {type(loss).__name__} as its loss, not a function of (model, batch). {_WANTED}"
        )
    return Subject(model=model, batch=batch, loss=loss)
