"""Values that a setting chooses among, in one table; plain data, so that a verb that only checks its words starts fast.

Keys are those of the settings. Of a list or a mapping, each item is one of the choices.
"""

from __future__ import annotations

DTYPES = ("float32", "bfloat16", "float16")
FEATURES = ("logprob", "entropy", "margin", "match", "cumulative")  # what a pre-verifier may be told (models/)
SPLITS = ("report", "tune", "all")
# Acceptance heads, each a controller, a section of the settings and a trainer.part of that name.
HEADS = ("probe", "specdecpp")
# How a pre-verifier's estimates of several tokens become one number, by what it has learnt; the first is the default.
# Chances that all went well up to a token are averaged, chances given that all went well before are multiplied.
BLOCK_RULES = {
    "survival": ("mean", "min"), "conditional": ("product", "min"), "next": ("mean", "min"), "certain": ("mean", "min"),
}  # fmt: skip
TABLES = (  # of the papers, each an experiment table/NAME
    "pacer_main", "pacer_ablation", "pacer_ouroboros", "draft_lengths", "hispec_main", "hispec_batch", "hispec_sweep",
    "verification_wall",
)  # fmt: skip

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": DTYPES,
    "model.attention": ("sdpa",),
    "model.device_map": ("auto", "balanced", "balanced_low_0", "sequential"),
    "model.draft.kind": ("layers", "model", "skip"),
    "model.draft.dtype": DTYPES,
    "model.draft.quantise": ("int4",),
    "model.exits.kind": ("shared", "norm", "linear", "adapter"),
    "model.feature.head": ("frozen", "trained"),
    **{
        f"{part}.{key}": choices
        for part in ("preverifier", *HEADS)
        for key, choices in {
            "state": ("before_norm", "after_norm"),
            "attention": ("prefix", "block", "none"),
            "features": FEATURES,
            "label": ("survival", "conditional", "next", "certain"),
        }.items()
    },
    "method.head": ("shared", "norm", "linear", "adapter"),
    "method.checks": ("all", "last"),
    "method.guarantee": ("exact", "lossy"),
    "corpus.parts": ("draft", "preverifier", "tuning"),
    "labels.starts": ("uniform", "rounds", "all"),
    "trainer.part": ("draft", "preverifier", "exits", "layerskip", "feature_draft", *HEADS),
    "trainer.precision": ("bf16", "fp32"),
    "trainer.prompt_labels": ("text", "teacher"),
    "trainer.strategy": ("auto", "ddp", "fsdp"),
    "benchmark.split": SPLITS,
    "benchmark.sandbox": ("auto", "unsafe", "off"),
    "profile.weights": ("trained", "random"),
    "export.part": ("draft", "feature", "exits", "preverifier"),
    "replay.texts": ("benchmark", "corpus"),
    "replay.split": SPLITS,
    "report.table": TABLES,
    "logger.wandb": ("disabled", "offline", "online"),
}

BUFFERS = ("enough", "preverifier")  # kinds of rules for what an intermediate exit has accepted
# Drafters made of what is loaded for a run; any other name is a module of pacer/decoding/drafters/.
DRAFTERS = ("model", "model_full", "exit", "exits", "feature", "pearl")
GREEDY_DRAFTERS = ("pearl", "ouroboros")  # refuse a temperature
