"""Every error a user can meet, as one tree.

    LaconicError
      StrategyError          a strategy cannot be built
        SyntaxProblem        its text or TOML is malformed
        UnknownName          a method, setting or preset that does not exist
        InvalidSetting       a setting has the wrong type or is out of range
        IllegalCombination   the parts are valid but cannot be used together
      AttachError            a strategy cannot be attached to this model, optimizer or process group
      UnsupportedGradient    a gradient of a kind no exchange here can carry
      CheckpointError        a saved state does not fit this session
      CommunicationError     an exchange failed or did not finish in time
        PeerLost             ... because a named rank died, raised or stopped answering
        FrameRefused         ... because bytes on a socket are not a frame this job allows
      MethodError            a method, most likely of another package, does not do what its contract says
      ConfigurationError     a model, a parallel plan or a row of a published table that cannot be simulated
      UsageError             a command was given something it cannot use

    LaconicWarning           what was asked for is done, but is probably not what was wanted

A message says where, what was found, what is allowed and what to do, in one line.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence


class LaconicError(Exception):
    """Base of every error laconic raises on purpose."""


class StrategyError(LaconicError):
    """A strategy cannot be built."""


class SyntaxProblem(StrategyError):
    """Strategy text or TOML that cannot be read."""


class UnknownName(StrategyError):
    """A method, setting or preset that does not exist."""


class InvalidSetting(StrategyError):
    """A setting with the wrong type, unit or range."""


class IllegalCombination(StrategyError):
    """Valid parts that cannot be used together."""


class AttachError(LaconicError):
    """A strategy cannot be attached to this model, optimizer or process group."""


class UnsupportedGradient(LaconicError):
    """A gradient of a kind that cannot be exchanged."""


class CheckpointError(LaconicError):
    """A saved state that does not fit this session."""


class CommunicationError(LaconicError):
    """An exchange failed or did not finish in time."""


class PeerLost(CommunicationError):
    """A rank died, raised or stopped answering while others waited for it."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that was lost, where that is known."""


class FrameRefused(CommunicationError):
    """Bytes on a socket that are not a frame this job allows."""


class MethodError(LaconicError):
    """A method that does not do what its contract says."""


class ConfigurationError(LaconicError):
    """A model, a parallel plan or a row of a published table that cannot be simulated."""


class UsageError(LaconicError):
    """A command or function is used in a way that it does not support."""


class LaconicWarning(UserWarning):
    """A request was carried out but is probably a mistake."""


def warn_user(text: str) -> None:
    """Give a LaconicWarning at the line of the user's code that called laconic, however deep that call went."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "laconic":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, LaconicWarning, stacklevel=level)


def one_line(text: object, limit: int = 200) -> str:
    """`text` on one line, shortened in the middle when it is longer than `limit`."""
    flat = " ".join(str(text).split())
    if len(flat) <= limit:
        return flat
    head = limit * 2 // 3
    return f"{flat[:head]} ... {flat[-(limit - head) :]}"


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the nearest name, then everything allowed."""
    names = list(known)
    return f"{_nearest(found, names)}Known: {', '.join(names) if names else 'none'}."


def _nearest(found: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(found.lower(), names, n=3, cutoff=0.6)
    # Of names that are as near, the one that is as long: "bps" is rather bsp than bsp-ps.
    nearest = sorted(near, key=lambda name: (-_likeness(found, name), abs(len(name) - len(found))))
    return f'Did you mean "{nearest[0]}"? ' if nearest else ""


def _likeness(found: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, found.lower()).ratio()


def unknown_method(axis: str, name: str, known: Iterable[str]) -> UnknownName:
    """A name that is no method of its axis."""
    return UnknownName(f'{axis}: there is no method "{one_line(name, 40)}". {did_you_mean(name, known)}')


def unknown_strategy(name: str, presets: Iterable[str], synchronizations: Iterable[str]) -> UnknownName:
    """A name by itself that is no strategy, and no method of any axis."""
    rules = list(synchronizations)
    if name.strip().partition("(")[0] == "auto":
        return UnknownName(
            'strategy: "auto" measures the first steps of a training and then chooses; only laconic.attach() takes it. '
            "Ask `laconic plan` which strategy suits a model and its links, or name one that `laconic list` shows."
        )
    return UnknownName(
        f'strategy: "{one_line(name, 40)}" is neither a preset nor a synchronization. '
        f"{_nearest(name, [*presets, *rules])}Known: {', '.join(rules)}, and the presets that `laconic list` shows."
    )


def unknown_setting(axis: str, method: str, key: str, known: Iterable[str]) -> UnknownName:
    """A setting that its method does not have."""
    return UnknownName(f"{axis}.{method}.{one_line(key, 40)}: {method} has no such setting. {did_you_mean(key, known)}")
