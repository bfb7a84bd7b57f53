"""PACER's pre-verification layer M_B: from draft states to the probability that the target accepts each token.

One entry per token, made of the draft state that *produced* it, its embedding, its index inside the current draft
(0: verified) and, as an option, the draft's own signals; then decoder layers of the draft's own kind with their own
key/value memory; then one logit. The paper publishes no more than this outline (PAPERS §1), so every choice is a
setting. Without attention, and without all else that an entry is made of, it is an *acceptance head* on the state
alone: SPRINTER's linear probe, SpecDec++'s residual blocks. Those read, in their authors' code, the state after the
token, which is known one draft pass later; here the state that produced it, so the token just drawn is judged too.

Shapes: B rows, n tokens, H draft width, W pre-verifier width, F features.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacer.choices import CHOICES, FEATURES
from pacer.errors import ConfigError, MismatchError, SourceError
from pacer.models.checkpoint import check_identity, identity, load_checkpoint, load_exactly, save_checkpoint
from pacer.models.preverifier_layer import Layers, shape_like
from pacer.models.residual import Residual
from pacer.models.stack import Stack
from pacer.settings import PreverifierSettings

KIND, TUNED = "preverifier", "tuned.json"  # beside config.json, by `pacer.replay`: values and what they rest on
# Up to this width a CPU reads float32 weights in less time than its bfloat16 kernels take to start (measured: 0.6 of
# the time at 192, 1.3 to 3 times as long at 576).
NARROW = 384


def check_settings(settings: PreverifierSettings) -> None:
    """Refuse values that do not exist."""
    for name in ("state", "attention", "label"):
        if (value := getattr(settings, name)) not in (choices := CHOICES[f"preverifier.{name}"]):
            raise ConfigError(f"unknown preverifier.{name}", value=value, allowed=choices)
    unknown = [name for name in settings.features if name not in FEATURES]
    if unknown or len(set(settings.features)) < len(settings.features):
        raise ConfigError(
            "preverifier.features", value=unknown or settings.features, allowed=f"each once: {', '.join(FEATURES)}"
        )
    if settings.attention != "none" and settings.depth < 1:
        allowed = "≥ 1; with attention none, 0 is a linear probe"
        raise ConfigError("preverifier.depth", value=settings.depth, allowed=allowed)


def _logit(logprob: Tensor) -> Tensor:
    """Log-odds of a log-probability, within ±8, over 4."""
    return (logprob - torch.log(-torch.expm1(logprob))).clamp(-8.0, 8.0) / 4


# What the draft says of a token: log-probability and entropy (nats), margin over the runner-up (nats), length of the
# n-gram of the context that it continues, and the log-probability of the whole draft so far. How each enters: on a
# scale of about one, so that no one of them drowns the others.
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "logprob": _logit,
    "cumulative": _logit,
    "entropy": lambda nats: nats / 4,
    "margin": lambda nats: nats.clamp_max(16.0) / 8,
    "match": lambda length: torch.log1p(length) / 2,
}


class Preverifier(nn.Module):
    """M_B for one draft model.

    The logit is the layers' answer plus a linear function of the features. The layers' share starts at 0, so the
    estimates start as what the draft's own signals say (:func:`pacer.training.preverify.calibrate`).

    Args:
        draft: the stack whose states it reads (its final norm is used for ``state: after_norm``).
    """

    def __init__(self, draft: Stack, settings: PreverifierSettings) -> None:
        super().__init__()
        check_settings(settings)
        self.settings = settings
        width = self.width = settings.width or draft.width
        self._draft = [draft]  # in a list: not a child, it stays as it is
        alone = settings.attention == "none"
        layers = Residual(width, settings.depth) if alone else Layers(shape_like(draft.config, width), settings.depth)
        self.stack: Layers | Residual = layers
        as_it_is = alone and not settings.token and settings.width is None
        self.inputs = None if as_it_is else nn.Linear((1 + settings.token) * draft.width, width, bias=False)
        self.index = nn.Embedding(settings.gamma_max + 1, width) if settings.index_embedding else None
        features = len(settings.features)
        self.features = nn.Linear(features, width, bias=False) if features else None
        self.out = nn.Linear(width + features, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if self.index is not None:
            nn.init.normal_(self.index.weight, std=0.1)
        self.to(draft.device)

    @property
    def draft(self) -> Stack:
        return self._draft[0]

    @property
    def attends(self) -> bool:
        """Whether an entry sees anything but itself."""
        return self.settings.attention != "none"

    @property
    def sees_prefix(self) -> bool:
        """Whether an entry sees the verified prefix; else only the current draft."""
        return self.settings.attention == "prefix"

    def entries(self, states: Tensor, ids: Tensor, index: Tensor, features: Tensor) -> Tensor:
        """Inputs of the layers.

        Args:
            states: ``(B, n, H)`` draft states before the norm, of the position that produced each token.
            ids: ``(B, n)`` the tokens. index: ``(B, n)`` place in the draft, 0 for verified tokens.
            features: ``(B, n, F)``, 0 for verified tokens.

        Returns:
            ``(B, n, W)``.
        """
        width = self.draft.width
        x = self.draft.normed(states) if self.settings.state == "after_norm" else F.rms_norm(states, (width,))
        if self.settings.token:
            # embeddings are a tenth as large as states, or less: without a norm of their own nobody sees them
            x = torch.cat([x, F.rms_norm(self.draft.embed(ids), (width,))], -1)
        x = x.to(self.out.weight.dtype)
        if self.inputs is not None:
            x = self.inputs(x)
        if self.index is not None:
            x = x + self.index(index.clamp_max(self.settings.gamma_max))
        if self.features is not None:
            x = x + self.features(features.to(x.dtype))
        return x

    def logits(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Last states ``(B, n, W)`` and features ``(B, n, F)`` → logits of acceptance ``(B, n)``."""
        parts = [self.stack.normed(hidden)]
        if self.features is not None:
            parts.append(features.to(parts[0].dtype))
        return self.out(torch.cat(parts, -1)).squeeze(-1)

    def select(self, signals: Callable[[str], Tensor], index: Tensor) -> Tensor:
        """The features in use ``(B, n, F)``, scaled; zero at verified tokens (index 0).

        Args:
            signals: a signal ``(B, n)`` by its name (FEATURES).
        """
        chosen = [SCALES[name](signals(name).float()) for name in self.settings.features]
        if not chosen:
            return torch.zeros(*index.shape, 0, device=index.device)
        return torch.where((index > 0)[..., None], torch.stack(chosen, -1), 0.0)


def save_preverifier(folder: Path, module: Preverifier, target: Stack, extra: dict[str, Any], card: str) -> Path:
    """Save the trained tensors with the identities of draft and target, the settings and the tuned controller."""
    config = {
        "kind": KIND, "target": identity(target), "draft": identity(module.draft, layers=True),
        "settings": asdict(module.settings), **extra,
    }  # fmt: skip
    return save_checkpoint(folder, dict(module.named_parameters()), config, card)


def tuned_values(folder: Path) -> dict[str, Any] | None:
    """The controller's values that go with a pre-verifier: those of a replay, else those of its training.

    Raises:
        SourceError: the file of a replay is damaged.
    """
    file = folder / TUNED
    if not file.is_file():
        found: dict[str, Any] | None = json.loads((folder / "config.json").read_text()).get("tuned")
        return found
    try:
        return dict(json.loads(file.read_text())["tuned"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = "delete it, or run pacer.replay with replay.write=true"
        what = f"no tuned values can be read ({type(error).__name__})"
        raise SourceError(what, value=str(file), remedy=remedy) from error


def load_preverifier(folder: Path, target: Stack, draft: Stack) -> tuple[Preverifier, dict[str, Any]]:
    """A pre-verifier and its config (controller values tuned in training, label meaning).

    Raises:
        MismatchError: made for another draft or target, or tensors that do not fit.
    """
    tensors, config = load_checkpoint(folder, KIND)
    check_identity(config["target"], target, f"pre-verifier {folder.name} (target)")
    check_identity(config["draft"], draft, f"pre-verifier {folder.name} (draft)")
    try:
        settings = PreverifierSettings(**config["settings"])
    except TypeError as error:
        raise MismatchError(f"pre-verifier settings of another version ({error})", remedy="train it again") from error
    module = Preverifier(draft, settings)
    load_exactly(module, tensors, f"pre-verifier {folder.name}")
    on_cpu = draft.device.type == "cpu" and module.width <= NARROW
    module.to(dtype=torch.float32 if on_cpu else draft.dtype).eval().requires_grad_(False)
    return module, config
