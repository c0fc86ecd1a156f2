"""Binary heaps in arrays that many of them may share: what happens next, and who is first in a queue.

Imported only when a graph runs.
"""

from __future__ import annotations

from laconic.simulator.engine.compilation import compiled


@compiled
def push(keys, items, base, size, key, item):
    """Put (key, item) into the heap of `size` entries from `base` on. The smallest key is first, then the smallest item."""
    place = size
    while place > 0:
        above = (place - 1) >> 1
        other = keys[base + above]
        if other < key or (other == key and items[base + above] < item):
            break
        keys[base + place] = other
        items[base + place] = items[base + above]
        place = above
    keys[base + place] = key
    items[base + place] = item


@compiled
def pop(keys, items, base, size):
    """Take out the first of `size` entries and give its item."""
    first = items[base]
    left = size - 1
    key = keys[base + left]
    item = items[base + left]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= left:
            break
        if below + 1 < left:
            one, two = keys[base + below], keys[base + below + 1]
            if two < one or (two == one and items[base + below + 1] < items[base + below]):
                below += 1
        other = keys[base + below]
        if key < other or (key == other and item < items[base + below]):
            break
        keys[base + place] = other
        items[base + place] = items[base + below]
        place = below
    keys[base + place] = key
    items[base + place] = item
    return first
