"""Which branch of a drafted tree survives, and the token after it. Pure functions, as :mod:`pacer.decoding.verify`.

At a node the children are tried in order. A child was drawn from its q, given its elder siblings; it is accepted with
``min(1, p/q)``, else p becomes ``norm((p − q)+)`` for the next: whatever comes out is distributed as p. The three kinds
of siblings differ in their q alone. *Certain* ones (n-grams, phrases, top-k): q is one-hot, so that a rejected token
is removed from p and cannot be accepted from a sibling that repeats it. *Independent* ones: the same q each time.
*Without replacement*: q without the elder siblings, renormalised.

Sources: SpecInfer, arXiv 2305.09781 algorithm 2; recursive rejection sampling, arXiv 2402.14160.
Shapes: B rows, g nodes (of the longest row), V vocabulary. Parents as :mod:`pacer.decoding.tree` has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pacer.decoding.distributions import draw
from pacer.decoding.verify import residual


def verify_tree_greedy(choice: Tensor, tokens: Tensor, parents: Tensor, lineage: Tensor, alive: Tensor) -> Tensor:
    """The deepest node whose branch is the target's own argmax token for token; of equals the first.

    Args:
        choice: ``(B, g + 1)`` argmax ids after the prefix and after each node. tokens, parents: ``(B, g)``.
        lineage: ``(B, g, g)``, of `pacer.decoding.tree.lineages`. alive: ``(B, g)`` nodes that may be accepted.

    Returns:
        The last accepted node ``(B,)``; −1: none.
    """
    return _deepest(alive & (tokens == choice.gather(1, parents + 1)), lineage)


def verify_tree(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    lineage: Tensor,
    alive: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling down a tree: the committed tokens are distributed as p, whatever q is.

    Args:
        p: ``(B, g + 1, V)`` target distributions after the prefix and after each node.
        q: ``(B, g, V)`` what each node was really drawn from, given its elder siblings; None: all are certain.
        tokens, parents, lineage, alive: as :func:`verify_tree_greedy`.
        accept_uniforms: ``(B, g)``; next_uniforms: ``(B,)``, in [0, 1).

    Returns:
        The last accepted node ``(B,)`` (−1: none) and the next token ``(B,)``: from what is left of p there.
    """
    if q is None:
        last, left = _certain(p, tokens, parents, lineage, alive, accept_uniforms)
    else:
        last, left = _drawn(p, q, tokens, parents, alive, accept_uniforms)
    return last, draw(left, next_uniforms)


def _drawn(p: Tensor, q: Tensor, tokens: Tensor, parents: Tensor, alive: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The last accepted node ``(B,)`` and what is left of p there ``(B, V)``, node by node."""
    row = torch.arange(len(tokens), device=tokens.device)
    at, left = torch.full_like(row, -1), p[:, 0]
    for j in range(tokens.shape[1]):  # parents come before children: one pass is the whole descent
        tried, token = alive[:, j] & (parents[:, j] == at), tokens[:, j]
        share, chance = (d.gather(1, token[:, None]).squeeze(1).double() for d in (q[:, j], left))
        taken = tried & (u[:, j] * share < chance)  # strict: p = 0 is never accepted
        refused = torch.where((tried & ~taken)[:, None], residual(left, q[:, j], token), left)
        at, left = torch.where(taken, j, at), torch.where(taken[:, None], p[row, j + 1], refused)
    return at, left


def _certain(
    p: Tensor, tokens: Tensor, parents: Tensor, lineage: Tensor, alive: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`_drawn` where every q is one-hot: what is left at a child is known without walking there."""
    row, g = torch.arange(len(tokens), device=tokens.device), tokens.shape[1]
    here = torch.arange(g, device=tokens.device)
    elder = (parents[:, :, None] == parents[:, None]) & (here < here[:, None]) & alive[:, None]  # [j, i]: i before j
    repeats = (elder & (tokens[:, :, None] == tokens[:, None])).any(-1)
    chance = p[row[:, None], parents + 1, tokens].double().masked_fill(repeats | ~alive, 0.0)
    left = (1.0 - (elder.double() @ chance[..., None]).squeeze(-1)).clamp_min(0.0)  # of p, once elder ones are refused
    taken = alive & (u * left < chance)  # strict: p = 0 is never accepted
    last = _deepest(taken & ~(elder & taken[:, None]).any(-1), lineage)
    p_last, vocab = p[row, last + 1], p.shape[2]
    refused = torch.where(alive & (parents == last[:, None]), tokens, vocab)
    rest = torch.nn.functional.pad(p_last, (0, 1)).scatter(1, refused, 0.0)[:, :vocab]
    total = rest.sum(-1, keepdim=True)
    return last, torch.where(total > 0, rest / total, p_last)


def _deepest(right: Tensor, lineage: Tensor) -> Tensor:
    """The deepest node ``(B,)`` that is right ``(B, g)``, as are all its ancestors; of equals the first; −1: none."""
    whole = (right[:, None] | ~lineage).all(-1)
    depth = torch.where(whole, lineage.sum(-1), 0)
    return torch.where(whole.any(1), depth.argmax(1), -1)
