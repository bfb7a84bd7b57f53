"""Drafts that branch: tokens with parents, kept as tries, read in one forward through the mask.

A node's parent is the index of an earlier node, or −1: the committed prefix. Nodes lie in memory one after another
behind the prefix, whatever their depth; a node's position is that of its depth, and it sees the prefix, its ancestors
and itself.

Shapes: B rows, g nodes (of the longest row), n tokens read (some of the prefix, then the nodes), S extent read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = -1  # the parent of a first token: the committed prefix


@dataclass
class Tree:
    """The last tokens of a feed as nodes of a tree.

    Args:
        parents: ``(B, g)``, of padding anything that comes before it. sizes: tokens of each row before its nodes.
    """

    parents: Tensor
    sizes: Sequence[int]


def lineages(parents: Tensor) -> Tensor:
    """Who descends from whom: ``(B, g)`` → ``(B, g, g)`` bool, [j, i]: node i is node j or one of its ancestors."""
    g = parents.shape[1]
    reach = torch.nn.functional.one_hot(parents + 1, g + 1)[..., 1:].float() + torch.eye(g, device=parents.device)
    for _ in range(max(g - 1, 0).bit_length()):  # each squaring doubles the generations
        reach = (reach @ reach).clamp_max(1.0)
    return reach > 0


def placed(tree: Tree, slots: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions ``(B, n)`` and mask ``(B, 1, n, S)`` of a feed that ends in a tree.

    Args:
        slots: ``(B, n)`` places in memory, consecutive. mask: ``(B, 1, n, S)`` as if the feed were a chain.
    """
    (_, n), g, extent = slots.shape, tree.parents.shape[1], mask.shape[-1]
    lineage = lineages(tree.parents)
    sizes = torch.tensor(list(tree.sizes), device=slots.device)[:, None]
    node = torch.arange(n, device=slots.device) - sizes  # (B, n): which node a token is; < 0: of the prefix
    at, is_node = node.clamp(0, g - 1), node >= 0
    depth = lineage.sum(-1).gather(1, at)  # a child of the prefix has depth 1
    first = slots[:, :1] + sizes
    positions = torch.where(is_node, first + depth - 1, slots)
    seen = lineage.gather(1, at[..., None].expand(-1, -1, g)) & is_node[..., None]
    wide = torch.nn.functional.pad(mask[:, 0], (0, g))  # the nodes of a row need not all be inside the extent
    columns = (first + torch.arange(g, device=slots.device)).clamp_max(extent + g - 1)
    return positions, wide.scatter(2, columns[:, None].expand(-1, n, -1), seen)[:, None, :, :extent]


@dataclass
class Trie:
    """Branches that share their beginnings; a token is a parent's child once.

    Args:
        limit: longest branch; what lies deeper is left out.
    """

    limit: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) → node

    def add(self, parent: int | None, token: int) -> int | None:
        """The node of a token behind ``parent``; None: too deep, as is what follows something too deep."""
        depth = 1 if parent == ROOT else 0 if parent is None else self.depths[parent] + 1
        if parent is None or depth > self.limit:
            return None
        node = self.children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
        return node

    def branch(self, parent: int | None, tokens: Sequence[int]) -> list[int]:
        """The nodes of a branch behind ``parent``, as far as the limit allows."""
        nodes: list[int] = []
        for token in tokens:
            parent = self.add(parent, token)
            if parent is None:
                break
            nodes.append(parent)
        return nodes


def packed(tries: Sequence[Trie], device: torch.device) -> tuple[Tensor, Tensor | None, list[int]]:
    """Tokens and parents ``(B, g)`` each, and nodes per row; without parents where no row branches."""
    counts = [len(trie.tokens) for trie in tries]
    g = max(counts)
    tokens = [trie.tokens + [0] * (g - n) for trie, n in zip(tries, counts, strict=True)]
    if all(trie.parents == list(range(-1, n - 1)) for trie, n in zip(tries, counts, strict=True)):
        return torch.tensor(tokens, dtype=torch.long, device=device), None, counts
    parents = [trie.parents + [ROOT] * (g - n) for trie, n in zip(tries, counts, strict=True)]
    both = torch.tensor([tokens, parents], device=device)  # one copy to the device
    return both[0], both[1], counts
