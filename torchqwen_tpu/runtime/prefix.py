"""KV pages of one data-parallel rank: free, owned by a request, or shared by requests with the same prefix.

A full page of a prompt belongs to a tree in which the path from the root spells the tokens, so that later requests find
the longest prefix that was computed before. Attention can go on from any page; a recurrent layer only from where its
window and state were kept: a checkpoint, at the end of some of the pages. What no request uses stays until its place is
needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Node:
    """A page whose tokens, and all tokens before them, are known.

    Attributes:
        page: where its keys and values lie.
        users: requests whose page tables hold it.
        checkpoint: where the recurrent states after its last token lie; None where they were not kept.
    """

    parent: Node | None
    key: bytes
    page: int
    users: int = 0
    checkpoint: int | None = None
    children: dict[bytes, Node] = field(default_factory=dict)


@dataclass
class Match:
    """What a rank knows of a prompt.

    Attributes:
        nodes: pages that a request can start with: up to the last one with a checkpoint.
        known: pages whose keys and values are there, checkpoint or not.
    """

    nodes: list[Node]
    known: int


class PagePool:
    """Pages of one rank.

    Args:
        pages: how many there are.
        page_size: tokens a page.
        checkpoints: prefixes whose recurrent states are kept; 0 shares nothing.
    """

    def __init__(self, pages: int, page_size: int, checkpoints: int):
        self.total, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))
        self._free_checkpoints = list(range(checkpoints - 1, -1, -1))
        self.shares = checkpoints > 0
        self._root = Node(None, b"", -1)
        self._idle: OrderedDict[Node, None] = OrderedDict()  # without users; a node always before its parent
        self._checkpointed: OrderedDict[Node, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that no request uses."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return self.total - self.available

    @property
    def is_clean(self) -> bool:
        """Whether every page is free, and every checkpoint, once prefixes are forgotten."""
        return len(self._free) == self.total and not self._checkpointed and not self._root.children

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Pages of a request's own; the caller made sure that so many are available."""
        while len(self._free) < count:
            self._evict()
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Give a request's own pages back."""
        self._free.extend(pages)

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest known prefix of a prompt, given the keys of its full pages (`page_keys`)."""
        path, node = [], self._root
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        last = max((i + 1 for i, node in enumerate(path) if node.checkpoint is not None), default=0)
        return Match(path[:last], len(path))

    def idle_in(self, nodes: Sequence[Node]) -> int:
        """How many of these pages no request uses yet."""
        return sum(not node.users for node in nodes)

    def acquire(self, nodes: Sequence[Node]) -> None:
        """A request starts with these pages."""
        for node in nodes:
            if not node.users:
                del self._idle[node]
            node.users += 1
            if node.checkpoint is not None:
                self._checkpointed.move_to_end(node)

    def release(self, nodes: Sequence[Node]) -> None:
        """A request that used these pages, a path from the root, is gone."""
        for node in reversed(nodes):
            node.users -= 1
            if not node.users:
                self._idle[node] = None

    def share(self, parent: Node | None, key: bytes, page: int) -> Node:
        """Put a request's own page, complete now, into the tree; where these tokens are there already their page takes its
        place, and the request's is freed. The request is one of the node's users."""
        parent = parent or self._root
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, page, users=1)
        else:
            self.acquire([node])
            self._free.append(page)
        return node

    def keep(self, node: Node) -> int | None:
        """A checkpoint's place for the states after this page, taken from the least recently used one if none is free;
        None if they are kept already."""
        if node.checkpoint is not None or not self.shares:
            return None
        if not self._free_checkpoints:
            self._drop_checkpoint(next(iter(self._checkpointed)))
        node.checkpoint = self._free_checkpoints.pop()
        self._checkpointed[node] = None
        return node.checkpoint

    def forget(self) -> None:
        """Free everything that no request uses."""
        while self._idle:
            self._evict()

    def _evict(self) -> None:
        node, _ = self._idle.popitem(last=False)
        if node.checkpoint is not None:
            self._drop_checkpoint(node)
        del node.parent.children[node.key]
        self._free.append(node.page)

    def _drop_checkpoint(self, node: Node) -> None:
        del self._checkpointed[node]
        self._free_checkpoints.append(node.checkpoint)
        node.checkpoint = None


def page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """What each full page of a prompt is looked up by: its tokens."""
    full = len(tokens) // page_size * page_size
    return [row.tobytes() for row in np.asarray(tokens[:full], np.int32).reshape(-1, page_size)]
