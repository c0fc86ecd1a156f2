"""How soon a host or process that says nothing is given up: by default the others go on within 2.5 s.

    a host that is frozen or unplugged   SILENT_S since it was last heard, noticed BEAT_S later at most
    a process that stands still          seen after BEAT_S, killed STOPPED_S later, at the next look

What is left of 2.5 s is for the survivors: a new process group and the exchange once more.
"""

from __future__ import annotations

BEAT_S = 0.25
"""How often an agent says that it is there and looks at its processes."""
SILENT_S = 1.5
"""A host that says nothing for so long counts as dead: six beats in a row are missing."""
STOPPED_S = 1.0
"""How long a process may stand still before it is killed."""
