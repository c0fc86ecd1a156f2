"""From the words typed after `laconic` to one command, and from any error to one line and an exit code.

    0    done
    1    done, and what was checked does not hold (`laconic verify`)
    2    a LaconicError or a wrong option: one line on stderr, "laconic: error: ..."
    130  interrupted from the keyboard
    141  the reader of our output went away (`laconic list | head -1`)
    143  ended by SIGTERM, in the same order as from the keyboard: what a run has measured is kept, and nothing is left

To add a command, write two files and add a line to COMMANDS:

    laconic/cli/options/NAME.py   Arguments: a frozen, keyword-only dataclass; its docstrings are the help texts
    laconic/cli/NAME.py           run(arguments: Arguments) -> int, the exit code

The second is imported only when its command is carried out. A help text and a typo are answered by the first, which
imports nothing but tyro: importing torch would take seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol, cast

from laconic.cli.terminal import emit, printable, silence_stdout
from laconic.errors import LaconicError, UsageError, did_you_mean, one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Command:
    """One line of the table of commands."""

    name: str
    help: str
    takes_script: bool = False
    """Whether its options end at the first word that is not one: a script, which has options of its own."""

    @property
    def options_module(self) -> str:
        """The module with its Arguments."""
        return f"laconic.cli.options.{self.name}"

    @property
    def module(self) -> str:
        """The module with its run()."""
        return f"laconic.cli.{self.name}"


COMMANDS: tuple[Command, ...] = (
    Command("list", "every method and preset, with its settings"),
    Command("explain", "what a strategy does, and the bytes it sends per step"),
    Command("verify", "train a small model and check what a strategy promises"),
    Command("compare", "torch DDP and strategies side by side, training behind slow links"),
    Command("plan", "which strategy to use for a model on a cluster, and what it gains"),
    Command("simulate", "predict the time of a step on any cluster, and what it waits for"),
    Command("schedule", "many jobs on one cluster: completion times under several policies"),
    Command("probe", "measure a cluster's links and collectives into a file"),
    Command("profile", "measure a model's layers and a compressor's costs into a file"),
    Command("watch", "the progress of a run, from its event log, while the log grows"),
    Command("report", "one offline HTML page from the folders of one or more runs"),
    Command("replay", "a known workload: real communication, sleeps instead of compute"),
    Command("run", "run a script whose ranks may die, join and leave", takes_script=True),
    Command("lab", "run a script on virtual hosts behind real, shaped links"),
    Command("serve", "a parameter server on this host, for workers elsewhere"),
    Command("doctor", "what this machine has and lacks, and how to mend it"),
    Command("completion", "a script for the shell that completes commands and options"),
)
"""Every command, in the order in which `laconic` shows them."""

_OF_AN_OPTION = re.compile(r"Error parsing (--[\w-]+): ")
_NO_NUMBER = re.compile(
    r"(?:(?P<float>could not convert string to float)|invalid literal for int\(\) with base 10): '(.*?)'(?= |$)"
)
"""As Python says that a text is no number."""

_EXAMPLES = (
    "laconic compare",
    "laconic list",
    "laconic explain ddp-bf16 --workers 8 --params 125M",
    'laconic explain "bsp / all_reduce / fp16 + error_feedback / wfbp"',
)


class OptionsModule(Protocol):
    """The module with a command's options."""

    # `Arguments` is a class inside the module, so it keeps a class's name.
    Arguments: type[DataclassInstance]


class CommandModule(Protocol):
    """The module that runs a command."""

    def run(self, arguments: object) -> int:
        """Run the command and return the exit code."""
        ...


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are the words after `laconic`."""
    try:
        with _sigterm_interrupts():
            return _run(sys.argv[1:] if arguments is None else arguments)
    except LaconicError as exc:
        print(f"laconic: error: {printable(one_line(exc, 2000))}", file=sys.stderr)
        return 2
    except _EndedBySigterm:
        return 143
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        silence_stdout()
        return 141


class _EndedBySigterm(KeyboardInterrupt):
    """SIGTERM, as `timeout` and schedulers send it; code that ends in order on Ctrl-C does so on this, too."""


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Raise on the first SIGTERM; a second one ends the process at once."""
    here = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != here:  # a fork, which has nothing of ours to end in order
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise _EndedBySigterm("ended by SIGTERM")

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # another program that calls main() handles the signal itself
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        emit(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        from laconic import __version__

        emit(f"laconic {__version__}\n")
        return 0
    command = _lookup(words[0])
    try:
        options = cast(OptionsModule, importlib.import_module(command.options_module))
        arguments = _parse(options, command, words[1:])
        if arguments is None:
            return 0
        _check_strategies(arguments)
        module = cast(CommandModule, importlib.import_module(command.module))
    except ModuleNotFoundError as exc:
        # The library itself runs with torch and numpy alone, so an installation without these two is legal.
        if (exc.name or "").partition(".")[0] not in ("rich", "tyro"):
            raise
        raise UsageError(f'the laconic command needs {exc.name}. Install it with "pip install rich tyro".') from exc
    return module.run(arguments)


def _check_strategies(arguments: object) -> None:
    """Find a typo in a strategy's name before the command imports torch."""
    given: str | tuple[str, ...] | None = getattr(arguments, "strategy", None)
    for text in (given,) if isinstance(given, str) else given or ():
        from laconic.cli.strategy_names import check_names

        check_names(text)


def _lookup(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    found = one_line(name, 40)
    if name.startswith("-"):
        raise UsageError(
            f'there is no option "{found}" before a command, only --help and --version. '
            'Options of a command follow its name, as in "laconic list --json".'
        )
    raise UsageError(f'there is no command "{found}". {did_you_mean(name, [command.name for command in COMMANDS])}')


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    commands = "".join(f"  {command.name:<{width}}  {command.help}\n" for command in COMMANDS)
    examples = "".join(f"  {example}\n" for example in _EXAMPLES)
    return (
        "laconic: PyTorch training where the network is the bottleneck.\n"
        "\n"
        f"Commands (laconic COMMAND --help says more):\n{commands}"
        "\n"
        f"Try next:\n{examples}"
    )


def _parse(module: OptionsModule, command: Command, words: Sequence[str]) -> object | None:
    """The command's Arguments, or None when only help was asked for."""
    import tyro

    from laconic.cli.help_texts import prepare

    options = list(words)
    if command.takes_script:
        options = _before_script(options)
    before_separator = options[: options.index("--")] if "--" in options else options
    if "-h" in before_separator or "--help" in before_separator:
        # Alone, because tyro leaves positional arguments it has already read out of its help.
        options = ["--help"]
        prepare(module.Arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            arguments, unknown = tyro.cli(
                module.Arguments,
                args=options,
                prog=f"laconic {command.name}",
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as exc:
        if not exc.code:
            emit("")  # flushes what tyro printed
            return None
        raise UsageError(
            f'{command.name}: {_in_one_line(complaint.getvalue(), command)} See "laconic {command.name} --help".'
        ) from exc
    if unknown:
        raise _unknown(module, command, unknown[0])
    return arguments


def _before_script(words: Sequence[str]) -> list[str]:
    """The words with -- before the script, so that what follows it is not read as options of this command.

    Every option of such a command has a value.
    """
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("--", "-h", "--help"):
        place += 1 if "=" in words[place] else 2
    has_script = place < len(words) and not words[place].startswith("-")
    return [*words[:place], *(["--"] if has_script else []), *words[place:]]


def _in_one_line(complaint: str, command: Command) -> str:
    """The message of tyro without its box, its title and its pointer to the help text."""
    frame = " │╭╮╰╯─"
    lines = [line.strip(frame) for line in complaint.splitlines()]
    told = [line for line in lines if line.strip("-")][1:]
    end = next((index for index, line in enumerate(told) if line.startswith("For full helptext")), len(told))
    sentence = " ".join(told[:end]).replace(f"Missing from laconic {command.name}:", "missing")
    return one_line(_about_a_number(sentence) or sentence or "these arguments cannot be read.", 400)


def _about_a_number(sentence: str) -> str | None:
    """What is wrong with an option that must be a number; None where tyro complains about another thing."""
    option = _OF_AN_OPTION.match(sentence)
    wrong = _NO_NUMBER.search(sentence)
    if option is None or wrong is None:
        return None
    wanted = "a number" if wrong["float"] else "a whole number such as 4"
    return f'{option[1]} must be {wanted}, got "{wrong[2]}".'


def _unknown(module: OptionsModule, command: Command, word: str) -> UsageError:
    fields = dataclasses.fields(module.Arguments)
    if not word.startswith("-"):
        takes_strategy = any(field.name == "strategy" for field in fields)
        advice = " Put a strategy that contains spaces in quotes." if takes_strategy else ""
        return UsageError(f'{command.name}: "{one_line(word, 40)}" is one argument too many.{advice}')
    name = word.partition("=")[0]
    if any(name == f"--{field.name}" and "Positional" in str(field.type) for field in fields):
        return UsageError(
            f'{command.name}: there is no option "{name}". Leave the option out: "laconic {command.name} '
            f'{name.removeprefix("--").upper()} ...".'
        )
    known = [f"--{field.name.replace('_', '-')}" for field in fields if field.default is not dataclasses.MISSING]
    return UsageError(f'{command.name}: there is no option "{one_line(name, 40)}". {did_you_mean(name, known)}')
