"""How soon a host or process that does not respond is given up: by default the others go on within 2.5 s.

    a host that is frozen or unplugged   SILENT_S since it was last heard, noticed BEAT_S later at most
    a process that stands still          seen after BEAT_S, killed STOPPED_S later, at the next look

The rest of the 2.5 s is for the survivors, which form a new process group and repeat the exchange.
"""

from __future__ import annotations

BEAT_S = 0.25
"""How often an agent sends a heartbeat and checks its processes."""
SILENT_S = 1.5
"""A host that sends no heartbeat for this long counts as dead: six beats in a row are missing."""
STOPPED_S = 1.0
"""How long a process may stand still before it is killed."""
