"""`laconic serve`: a server on this host for strategies with parameter_server(hosts="a:29600|b:29600"), or an
aggregator for in_network(hosts="a:29600").

Workers and servers prove to each other with a token that they belong together: `laconic serve --new-token` prints one,
which every server and every worker finds in the environment variable LACONIC_TOKEN.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from laconic.cli.options.serve import Arguments
from laconic.cli.terminal import emit, printable
from laconic.errors import UsageError, one_line

LARGEST_POOL = 2**16
"""The largest number of slots of one server: 190 MB."""


def run(arguments: Arguments) -> int:
    """Serve jobs; with --once, returns 1 if the job was lost before its end."""
    from laconic.core.frames import new_token
    from laconic.core.interface import local_address
    from laconic.runtime.servers.preparation import load_libraries

    if arguments.new_token:
        if arguments != Arguments(new_token=True):
            raise UsageError("serve: --new-token starts no server; leave the other options out.")
        emit(f"{new_token().hex()}\n")
        return 0
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"serve: --port must be from 0 to 65535, got {arguments.port}.")
    if not 0 <= arguments.slots <= LARGEST_POOL:
        raise UsageError(f"serve: --slots must be from 0 to {LARGEST_POOL}, got {arguments.slots}.")
    token = _token(arguments)
    load_libraries()
    address = (arguments.host or local_address(), arguments.port)
    while True:
        lost, port = _serve_one(address, token, arguments.slots)
        if arguments.once:
            return 1 if lost else 0
        address = (address[0], port)


def _serve_one(address: tuple[str, int], token: bytes, most_slots: int) -> tuple[bool, int]:
    """Serve one job; returns whether it was lost, and the port."""
    from laconic.core.listener import Listener
    from laconic.core.paced import link_from_environment
    from laconic.runtime.servers.server import Server

    service = Server("server", host=address[0], most_slots=most_slots)
    link = link_from_environment(os.environ)
    listening = Listener(service, address=address, token=token, name="server", max_connections=1024, link=link)
    with closing(service), listening as listener:
        host, port = listener.address
        emit(f"listening on {host}:{port}\n")
        service.configured.wait()
        about = service.about
        assert about is not None
        workers = "1 worker" if about.world_size == 1 else f"{about.world_size} workers"
        emit(f"configured by rank 0 for {workers}: {printable(one_line(about.strategy))}\n")
        service.finished.wait()
        emit(f"job lost: {printable(one_line(service.lost))}\n" if service.lost else "job ended\n")
    return service.lost is not None, port


def _token(arguments: Arguments) -> bytes:
    from laconic.core.frames import TOKEN_BYTES
    from laconic.runtime.servers.server_pool import TOKEN_VARIABLE

    text, where = os.environ.get(TOKEN_VARIABLE, ""), f"the environment variable {TOKEN_VARIABLE}"
    if arguments.token_file is not None:
        where = f"--token-file {arguments.token_file}"
        try:
            text = Path(arguments.token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"serve: {where} cannot be read: {one_line(exc)}.") from exc
    try:
        token = bytes.fromhex(text.strip())
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        # Not what was found: a token that is almost right is a secret too.
        raise UsageError(
            f'serve: {where} must hold {2 * TOKEN_BYTES} hex digits, and does not. "laconic serve --new-token" '
            "prints a new token; give the same token to every server and worker."
        )
    return token
