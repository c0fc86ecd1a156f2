"""The state of servers as part of rank 0's saved state, and its check before it is sent back to them.

    {"<parameter>": {"server.<field>|<number of dimensions>": tensor}}

Optimizers create their state when a parameter gets its first gradient, so a missing field may never have existed, or
may have been lost. For servers that run an optimizer, the names of all fields are therefore saved as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch

from laconic.errors import CheckpointError, one_line

PREFIX = "server."
"""Prefix of the fields of a server's state."""
NAMES = f"{PREFIX}fields|1"
"""The names of a parameter's other fields, as the bytes of a JSON list."""
_NAMES_BYTES = 256
"""Names are padded with spaces to a multiple of this: tools that load into tensors need equal sizes."""
_MOST_STEPS = 2**53


def names_of(fields: Iterable[str]) -> torch.Tensor:
    """The names of fields as a tensor."""
    text = json.dumps(sorted(fields)).encode()
    padded = text.ljust(-(-len(text) // _NAMES_BYTES) * _NAMES_BYTES)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def check_optimizer_state(parameter: str, saved: Mapping[str, object], like: torch.Tensor) -> None:
    """Raise CheckpointError unless `saved` is the whole state of a server's optimizer for the parameter `like`."""
    fields = {name: value for name, value in saved.items() if name.startswith(PREFIX) and name != NAMES}
    _check_names(parameter, fields, _saved_names(parameter, saved.get(NAMES)))
    for name, value in fields.items():
        field, dims = _field_and_dims(parameter, name)
        scalar = dims == 0
        values = _values(parameter, name, value, numel=1 if scalar else like.numel())
        if not scalar and values.dtype != like.dtype:
            raise _unfit(parameter, name, f"values of {_word(values.dtype)}", f"{_word(like.dtype)}")
        if field == "step":
            steps = float(values.reshape(-1)[0])
            if steps != int(steps) or not 0 <= steps <= _MOST_STEPS:
                raise _unfit(parameter, name, f"{steps:g}", "a whole number of steps >= 0")


def check_sum_state(parameter: str, saved: Mapping[str, object], like: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless `saved` has the fields of `like`, the current state of servers that form sums."""
    fields = {name: value for name, value in saved.items() if name.startswith(PREFIX)}
    _check_names(parameter, fields, list(like))
    for name, now in like.items():
        values = _values(parameter, name, fields[name], numel=now.numel())
        if values.dtype != now.dtype:
            raise _unfit(parameter, name, f"values of {_word(values.dtype)}", f"{_word(now.dtype)}")


def _saved_names(parameter: str, names: object) -> list[str]:
    if names is None:
        raise CheckpointError(
            f"the checkpoint does not say what servers remember of parameter {parameter}: {NAMES} is missing. Load the "
            "whole session state that rank 0 has saved."
        )
    try:
        assert isinstance(names, torch.Tensor)
        found = json.loads(bytes(names.reshape(-1).tolist()))
        assert isinstance(found, list)
        assert all(isinstance(name, str) for name in found)
    except (AssertionError, ValueError, TypeError, RuntimeError, NotImplementedError) as exc:
        raise CheckpointError(f"the checkpoint has a {NAMES} of parameter {parameter} that cannot be read.") from exc
    return [PREFIX + name for name in found]


def _check_names(parameter: str, fields: Mapping[str, object], expected: list[str]) -> None:
    missing = [name for name in expected if name not in fields]
    unknown = [name for name in fields if name not in expected]
    if missing:
        instead = f", but has {one_line(', '.join(unknown), 80)}" if unknown else ""
        raise CheckpointError(
            f"the checkpoint lacks {', '.join(missing)} of parameter {parameter}, which servers remembered{instead}. "
            "Load the whole session state that rank 0 has saved."
        )
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {one_line(unknown[0], 80)} of parameter {parameter}, which servers do not remember."
        )


def _field_and_dims(parameter: str, name: str) -> tuple[str, int]:
    field, _, dims = name.removeprefix(PREFIX).rpartition("|")
    if not field or not dims.isascii() or not dims.isdigit():
        raise CheckpointError(
            f"the checkpoint has a field {one_line(name, 80)} of parameter {parameter} without a number of dimensions."
        )
    return field, int(dims)


def _values(parameter: str, name: str, value: object, *, numel: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta or value.is_complex():
        found = f"{_word(value.dtype)} ({value.layout})" if isinstance(value, torch.Tensor) else type(value).__name__
        raise _unfit(parameter, name, found, "a dense tensor of real numbers")
    if value.numel() != numel:
        raise _unfit(parameter, name, f"{value.numel()} values", f"{numel}")
    if not bool(torch.isfinite(value).all()):
        raise _unfit(parameter, name, "NaN or infinite values", "finite ones")
    return value


def _unfit(parameter: str, name: str, found: str, needed: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {found} for {one_line(name, 80)} of parameter {parameter}; servers need {needed}. Load "
        "a checkpoint of the same model."
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
