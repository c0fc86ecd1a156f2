"""A server in a process of its own, started by a worker: `python -m laconic.runtime.servers.process HOST NAME`.

The token comes as the first line of standard input, in hex, so that no list of processes shows it. The first line of
standard output says at which port the server listens. It ends when all ranks have said goodbye, or when standard input
does: with the worker that started it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

from laconic.core.listener import Listener
from laconic.core.paced import link_from_environment
from laconic.errors import LaconicError
from laconic.runtime.servers.service import Service


def main() -> int:
    """Serve until the job ends."""
    # Ctrl-C reaches the whole group; the workers decide when the job ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    host, name = sys.argv[1:3]
    token = bytes.fromhex(sys.stdin.readline().strip())
    service = Service(name)
    try:
        link = link_from_environment(os.environ)
        listener = Listener(service, address=(host, 0), token=token, name=name, link=link)
    except LaconicError as exc:
        print(exc, file=sys.stderr, flush=True)  # noqa: T201 - read by the worker that started this
        return 2
    with listener:
        print(listener.address[1], flush=True)  # noqa: T201 - likewise
        threading.Thread(target=_until_parent_ends, args=(service,), daemon=True).start()
        service.finished.wait()
    return 0


def _until_parent_ends(service: Service) -> None:
    sys.stdin.read()
    service.finished.set()


if __name__ == "__main__":
    sys.exit(main())
