"""Heaps in arrays: the next event, the first task in a queue, the first flow of a route to finish.

    push, pop              a binary heap of (key, item) pairs, in arrays that many heaps may share
    put, take_out          a binary heap that stores each item's position, so that keys may change
    meld, without_root     pairing heaps, any number of them over the same nodes

Imported only when a graph runs.
"""

from __future__ import annotations

from laconic.simulator.engine.compilation import compiled_part


@compiled_part
def push(keys, items, base, size, key, item):
    """Put (key, item) into the heap of `size` entries from `base` on; of equal keys the smallest item is first."""
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


@compiled_part
def pop(keys, items, base, size):
    """Remove the first of `size` entries and return its item."""
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


@compiled_part
def put(heap, places, keys, size, item, key):
    """Set the key of `item`, which is in a heap of `size`, and restore the heap order."""
    place = places[item]
    keys[item] = key
    while place > 0:
        above = (place - 1) >> 1
        other = heap[above]
        if keys[other] <= key:
            break
        heap[place] = other
        places[other] = place
        place = above
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and keys[heap[below + 1]] < keys[heap[below]]:
            below += 1
        other = heap[below]
        if key <= keys[other]:
            break
        heap[place] = other
        places[other] = place
        place = below
    heap[place] = item
    places[item] = place


@compiled_part
def take_out(heap, places, keys, size, item):
    """Remove `item`, which leaves a heap of `size`: the last entry takes its place."""
    last = heap[size]
    if last != item:
        places[last] = places[item]
        put(heap, places, keys, size, last, keys[last])
    places[item] = -1


@compiled_part
def meld(keys, child, sibling, one, two):
    """Merge two heaps, given by their roots, -1 if empty; returns the root, which has the smallest key."""
    if one < 0:
        return two
    if two < 0:
        return one
    if keys[two] < keys[one]:
        one, two = two, one
    sibling[two] = child[one]
    child[one] = two
    return one


@compiled_part
def without_root(keys, child, sibling, root):
    """A heap without its root: children are merged in pairs from the left, then all from the right."""
    pairs = -1
    node = child[root]
    while node >= 0:
        partner = sibling[node]
        following = sibling[partner] if partner >= 0 else -1
        pair = meld(keys, child, sibling, node, partner)
        sibling[pair] = pairs
        pairs = pair
        node = following
    heap = -1
    while pairs >= 0:
        following = sibling[pairs]
        sibling[pairs] = -1
        heap = meld(keys, child, sibling, heap, pairs)
        pairs = following
    return heap
