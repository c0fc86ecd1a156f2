"""A server in a process of its own, as a worker starts it:

    python -m laconic.runtime.servers.process HOST NAME MAX_CONNECTIONS holds|sums STRATEGY DTYPES NAMESPACE

NAMESPACE is the file of a network namespace to enter first, or empty. The token comes as the first line of standard
input, in hex, so that no list of processes shows it. The first line of standard output says at which port the server
listens; everything it needs is loaded and compiled by then. It ends when all ranks have said goodbye, or soon after the
worker that started it, which it detects by the end of standard input.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import closing

import torch

from laconic.core.listener import Listener
from laconic.core.paced import link_from_environment
from laconic.core.switch import enter_network
from laconic.errors import LaconicError
from laconic.runtime.servers.preparation import prepare
from laconic.runtime.servers.protocol import GONE
from laconic.runtime.servers.server import Server
from laconic.strategy import Strategy

_LOOK_S = 1.0


def main() -> int:
    """Serve until the job ends."""
    # Ctrl-C reaches the whole group; the workers decide when the job ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = os.getppid()
    host, name, most, work, strategy, dtypes, namespace = sys.argv[1:8]
    token = bytes.fromhex(sys.stdin.readline().strip())
    service = Server(name, host=host)
    try:
        if namespace:
            enter_network(namespace)
        prepare(Strategy.parse(strategy), [getattr(torch, dtype) for dtype in dtypes.split(",")], holds=work == "holds")
        # A switch has no link of its own.
        link = None if namespace else link_from_environment(os.environ)
        listener = Listener(service, address=(host, 0), token=token, name=name, max_connections=int(most), link=link)
    except LaconicError as exc:
        print(exc, file=sys.stderr, flush=True)  # noqa: T201 - read by the worker that started this
        return 2
    with listener, closing(service):
        print(listener.address[1], flush=True)  # noqa: T201 - likewise
        threading.Thread(target=_until_parent_ends, args=(service, parent), daemon=True).start()
        service.finished.wait()
    return 0


def _until_parent_ends(service: Server, parent: int) -> None:
    # Forked children of the parent may hold the pipe open, so the pipe alone is not enough.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        pass
    if service.about is None:
        service.finished.set()
    # Otherwise it stays for a moment, to report the loss to other ranks.
    service.lose(f"{service.name} ends, because that rank has ended, {GONE}")


if __name__ == "__main__":
    sys.exit(main())
