"""The options of `laconic doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show versions, backends, GPUs and what this machine allows; name each problem and its cure.

    The last block is plain text, made to be pasted in an issue.
    """

    json: bool = False
    """Print JSON instead of text."""
