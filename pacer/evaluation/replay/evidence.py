"""What the draft's runs look like, and what each signal knows of them: PACER's motivation, on a table.

A signal is judged as an estimate of acceptance at the decision it is read for, that after token k was drawn.
*Survival*: tokens 1 … k are all accepted, over every place up to a stop id whose fate and signals are known.
*Conditional*: token k is accepted, given that 1 … k − 1 are; over the places up to the first rejection. *Next*: tokens
1 … k + 1 are all accepted, which is what the draw decided about would bring. A signal that
is a probability also has an expected calibration error (15 bins of equal width); entropy and index fall as acceptance
rises, so their sign is turned for the AUC.

Shapes: N starts, g places, M judged places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from pacer.choices import CHOICES
from pacer.evaluation.replay import rules
from pacer.evaluation.replay.table import Bools, Table
from pacer.evaluation.replay.walk import walk

LABELS = tuple(label for label in CHOICES["preverifier.label"] if label != "certain")  # greedily it is conditional
PROBABILITIES = ("probability", "product", "score")
FALLING = ("entropy", "index")
BINS, LAGS = 15, 10


def names(table: Table) -> list[str]:
    """The signals of a table, the pre-verifier's last."""
    return ["probability", "product", "entropy", "margin", "index", "match", *(["score"] if table.score_width else [])]


def judged(table: Table, kind: str) -> tuple[Bools, Bools]:
    """Labels and the places where they count, ``(N, g)`` each."""
    place = np.arange(table.width) + (kind == "next")
    label = place < table.run[:, None]
    used = place < np.minimum(np.minimum(table.counts, table.known), table.reach)[:, None]
    if kind == "conditional":
        used = used & (place <= table.run[:, None])
    return label, used


def quality(table: Table, name: str, kind: str) -> dict[str, Any]:
    """AUC, expected calibration error (None: not a probability), mean value and mean label; over ``places`` of them."""
    label, used = judged(table, kind)
    values = rules.signal(table, name)
    used = used & np.isfinite(values)
    score, truth = torch.tensor(np.asarray(values[used], np.float64)), torch.tensor(label[used]).long()
    if len(score) == 0 or truth.min() == truth.max():
        return {"signal": name, "label": kind, "places": len(score), "auc": None, "ece": None, "mean": None,
                "accepted": float(truth.float().mean()) if len(score) else None, "curve": []}  # fmt: skip
    ranks = torch.tensor(np.unique(-score if name in FALLING else score, return_inverse=True)[1])
    auc = float(binary_auroc(ranks / max(1, int(ranks.max())), truth))
    ece = None
    if name in PROBABILITIES:
        ece = float(binary_calibration_error(score.float().clamp(1e-6, 1 - 1e-6), truth, n_bins=BINS))
    return {
        "signal": name, "label": kind, "places": len(score), "auc": auc, "ece": ece, "mean": float(score.mean()),
        "accepted": float(truth.float().mean()), "curve": _curve(score.numpy(), truth.numpy()),
    }  # fmt: skip


def _curve(score: Any, truth: Any, bins: int = 10) -> list[dict[str, float]]:
    """Mean value, share accepted and count of bins that hold about the same number of places."""
    edges = np.unique(np.quantile(score, np.linspace(0, 1, bins + 1)))
    which = np.clip(np.searchsorted(edges, score, side="right") - 1, 0, max(len(edges) - 2, 0))
    points = [(score[which == i], truth[which == i]) for i in np.unique(which)]
    return [{"value": float(s.mean()), "accepted": float(t.mean()), "count": len(s)} for s, t in points]


def runs(table: Table) -> dict[str, Any]:
    """Accepted lengths of a decoder that always drafts as far as the table goes: distribution and autocorrelation.

    Rounds whose length the text's end or the budget decides are left out. ``autocorrelation``: lag 1 … of the lengths
    of successive rounds inside a text, around the mean over all texts (``value``: texts that are easy throughout count)
    and around each text's own (``within``).
    """
    plan = rules.fixed(table, table.width)
    done = walk(table, plan)
    room = np.minimum(table.known, table.room)[done.row]
    free = (done.accepted < np.minimum(room, table.counts[done.row])) | (done.accepted == table.width)
    lengths = done.accepted[free].astype(float)
    text, order = done.text[free], np.arange(len(done.row))[free]
    counts = np.bincount(lengths.astype(int), minlength=table.width + 1)
    mean, variance = (float(lengths.mean()), float(lengths.var())) if len(lengths) else (0.0, 0.0)
    own = np.bincount(text, lengths, len(table.ids)) / np.maximum(1, np.bincount(text, minlength=len(table.ids)))
    around, within = lengths - mean, lengths - own[text]
    correlations = []
    for lag in range(1, LAGS + 1):
        ahead = np.minimum(np.searchsorted(order, order + lag), max(len(order) - 1, 0))
        pair = (order[ahead] == order + lag) & (text[ahead] == text)
        found = {
            name: float((x[pair] * x[ahead[pair]]).mean() / x.var()) if pair.any() and x.var() else None
            for name, x in (("value", around), ("within", within))
        }
        correlations.append({"lag": lag, **found, "pairs": int(pair.sum())})
    return {
        "counts": counts.tolist(), "mean": mean, "variance": variance, "rounds": len(lengths),
        "ended_by_text": int((~free).sum()), "autocorrelation": correlations,
    }  # fmt: skip


def gap_share(speed: float, fixed: float, oracle: float) -> float | None:
    """Share of the way from the best fixed window to the oracle; None where there is no way."""
    return (speed - fixed) / (oracle - fixed) if oracle > fixed else None


def censored(table: Table) -> dict[str, Any]:
    """How much the texts and the table leave unknown: shares of the starts."""
    limit = np.minimum(table.counts, table.room)
    return {
        "starts": len(table.start), "cut_by_text": float((table.known < limit).mean()),
        "signals_end": float((table.reach < limit).mean()),
    }  # fmt: skip
