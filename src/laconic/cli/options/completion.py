"""The options of `laconic completion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a script that completes laconic's commands and options with the Tab key.

    bash: laconic completion bash > ~/.local/share/bash-completion/completions/laconic

    zsh: laconic completion zsh > DIRECTORY_OF_FPATH/_laconic

    fish: laconic completion fish > ~/.config/fish/completions/laconic.fish
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell to write the script for."""
