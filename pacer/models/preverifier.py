"""PACER's pre-verification layer M_B: from draft states to the probability that the target accepts each token.

One entry per token, made of the draft state that *produced* it, its embedding, its index inside the current draft
(0: verified) and, as an option, the draft's own log-probability and entropy; then decoder layers of the draft's own
kind with their own key/value memory; then one logit. The paper publishes no more than this outline (PAPERS §1), so
every choice is a setting.

Shapes: B rows, n tokens, H draft width, W pre-verifier width, F features.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacer.errors import ConfigError, MismatchError
from pacer.models.checkpoint import check_identity, identity, load_checkpoint, load_exactly, save_checkpoint
from pacer.models.stack import Stack
from pacer.settings import PreverifierSettings

KIND = "preverifier"
FEATURES = ("logprob", "entropy")
STATES = ("before_norm", "after_norm")
LABELS = ("survival", "conditional")


def check_settings(settings: PreverifierSettings) -> None:
    """Refuse values that do not exist."""
    if settings.state not in STATES:
        raise ConfigError("unknown preverifier.state", value=settings.state, allowed=STATES)
    if settings.label not in LABELS:
        raise ConfigError("unknown preverifier.label", value=settings.label, allowed=LABELS)
    unknown = [name for name in settings.features if name not in FEATURES]
    if unknown:
        raise ConfigError("unknown preverifier.features", value=unknown, allowed=FEATURES)


def _decoder(draft: Stack, depth: int, width: int) -> Stack:
    """Fresh decoder layers of the draft's architecture; heads keep their size where the width allows."""
    config = copy.deepcopy(draft.config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = width // size
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if width % size or heads == 0:
        raise ConfigError("preverifier.width must be a multiple of the head size", value=width, allowed=f"k × {size}")
    config.num_key_value_heads = max(h for h in range(1, heads // min(groups, heads) + 1) if heads % h == 0)
    config.intermediate_size = round(config.intermediate_size * width / config.hidden_size)
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers = width, heads, depth
    config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 1, None, True  # token ids never enter it
    config.use_cache = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * depth
    return Stack(type(draft.model)(config))


class Preverifier(nn.Module):
    """M_B for one draft model.

    Args:
        draft: the stack whose states it reads (its final norm is used for ``state: after_norm``).
    """

    def __init__(self, draft: Stack, settings: PreverifierSettings) -> None:
        super().__init__()
        check_settings(settings)
        self.settings = settings
        width = settings.width or draft.width
        self._draft, self._stack = [draft], [_decoder(draft, settings.depth, width)]  # lists: not children
        self.layers, self.norm = self.stack.decoder.layers, self.stack.decoder.norm
        self.inputs = nn.Linear(draft.width, width, bias=False) if width != draft.width else nn.Identity()
        self.index = nn.Embedding(settings.gamma_max + 1, width) if settings.index_embedding else None
        features = len(settings.features)
        self.features = nn.Linear(features, width, bias=False) if features else None
        self.out = nn.Linear(width + features, 1)
        for module in (self.index, self.features):
            if module is not None:
                nn.init.normal_(module.weight, std=0.02)
        self.to(draft.device)
        self._stack[0].model.to(device=draft.device)

    @property
    def stack(self) -> Stack:
        return self._stack[0]

    @property
    def draft(self) -> Stack:
        return self._draft[0]

    def entries(self, states: Tensor, ids: Tensor, index: Tensor, features: Tensor) -> Tensor:
        """Inputs of the layers.

        Args:
            states: ``(B, n, H)`` draft states before the norm, of the position that produced each token.
            ids: ``(B, n)`` the tokens. index: ``(B, n)`` place in the draft, 0 for verified tokens.
            features: ``(B, n, F)``, 0 for verified tokens.

        Returns:
            ``(B, n, W)``.
        """
        dtype = self.out.weight.dtype
        if self.settings.state == "after_norm":
            states = self.draft.normed(states)
        x = self.inputs((states + self.draft.embed(ids)).to(dtype))
        if self.index is not None:
            x = x + self.index(index.clamp_max(self.settings.gamma_max))
        if self.features is not None:
            x = x + self.features(features.to(dtype))
        return x

    def logits(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Last states ``(B, n, W)`` and features ``(B, n, F)`` → logits of acceptance ``(B, n)``."""
        parts = [self.stack.normed(hidden)]
        if self.features is not None:
            parts.append(features.to(parts[0].dtype))
        return self.out(torch.cat(parts, -1)).squeeze(-1)

    def select(self, logprob: Tensor, entropy: Tensor, index: Tensor) -> Tensor:
        """The features in use ``(B, n, F)``, zero at verified tokens (index 0)."""
        table = {"logprob": logprob, "entropy": entropy}
        chosen = [table[name] for name in self.settings.features]
        stacked = torch.stack(chosen, -1) if chosen else logprob.new_zeros((*logprob.shape, 0))
        return torch.where((index > 0)[..., None], stacked, 0.0)


def save_preverifier(folder: Path, module: Preverifier, target: Stack, extra: dict[str, Any], card: str) -> Path:
    """Save the trained tensors with the identities of draft and target, the settings and the tuned controller."""
    config = {
        "kind": KIND, "target": identity(target), "draft": identity(module.draft),
        "settings": asdict(module.settings), **extra,
    }  # fmt: skip
    return save_checkpoint(folder, dict(module.named_parameters()), config, card)


def load_preverifier(folder: Path, target: Stack, draft: Stack) -> tuple[Preverifier, dict[str, Any]]:
    """A pre-verifier and its config (tuned controller values, label meaning).

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
    module.to(dtype=draft.dtype).eval().requires_grad_(False)
    module.stack.model.to(dtype=draft.dtype).eval().requires_grad_(False)
    return module, config
