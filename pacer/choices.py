"""Values that a setting chooses among, in one table; plain data, so that a verb that only checks its words starts fast.

Keys are those of the settings. Of a list or a mapping, each item is one of the choices.
"""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
FEATURES = ("logprob", "entropy", "margin", "match", "cumulative")  # what a pre-verifier may be told (models/)
SPLITS = ("report", "tune", "all")

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": DTYPES,
    "model.attention": ("sdpa",),
    "model.draft.kind": ("layers", "model", "skip"),
    "model.draft.dtype": DTYPES,
    "model.draft.quantise": ("int4",),
    "model.exits.kind": ("shared", "norm", "linear", "adapter"),
    "preverifier.state": ("before_norm", "after_norm"),
    "preverifier.attention": ("prefix", "block"),
    "preverifier.features": FEATURES,
    "preverifier.label": ("survival", "conditional", "next"),
    "method.drafter": ("model", "model_full", "exit", "exits"),
    "method.head": ("shared", "norm", "linear", "adapter"),
    "method.guarantee": ("exact", "lossy"),
    "corpus.parts": ("draft", "preverifier", "tuning"),
    "labels.starts": ("uniform", "rounds", "all"),
    "trainer.part": ("draft", "preverifier", "exits", "layerskip"),
    "trainer.precision": ("bf16", "fp32"),
    "trainer.prompt_labels": ("text", "teacher"),
    "benchmark.split": SPLITS,
    "benchmark.sandbox": ("auto", "unsafe", "off"),
    "replay.texts": ("benchmark", "corpus"),
    "replay.split": SPLITS,
    "logger.wandb": ("disabled", "offline", "online"),
}

BUFFERS = ("enough", "preverifier")  # kinds of rules for what an intermediate exit has accepted

CONTROLLER_CHOICES: dict[tuple[str, str], tuple[str, ...]] = {  # of a controller's kind and key
    ("preverifier", "rule"): ("mean", "min", "product"),
    ("threshold", "rule"): ("last", "product"),
    ("threshold", "signal"): ("probability", "entropy", "margin", "match"),
}
