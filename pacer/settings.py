"""The one configuration schema. Every verb composes it; a key that is not here is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class SourceSettings:
    """Where a model comes from: a hub id, a local folder, or ``wheel:NAME==VERSION`` (a GGUF inside a PyPI wheel)."""

    id: str = "???"
    revision: str | None = None
    file: str | None = None  # wheel: path of the GGUF inside it
    sha256: str | None = None  # wheel: hash of the wheel file
    trust_remote_code: bool = False


@dataclass
class DraftSettings:
    """The draft model: a second causal LM (``model``), chosen layers of the target that were trained to draft
    (``layers``), or the target as it is with all other layers left out (``skip``)."""

    kind: str = "layers"  # model | layers | skip
    source: str | None = None  # model: hub id or folder; layers: checkpoint folder, or packaged:NAME; null: untrained
    layers: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    head_size: int = 8192  # ids in the reduced head (0: whole vocabulary)
    copying: bool = True  # layers: trained to copy what followed the longest earlier n-gram (models/copying.py)
    dtype: str | None = None  # of the draft alone; null: model.dtype
    quantise: str | None = None  # int4 (on a CPU): the draft's weights alone; null: as they are
    full_head: bool = False  # decode with the whole vocabulary even where a reduced head exists


@dataclass
class ExitSettings:
    """Exit heads: what reads the target out after some of its layers (models/exits.py)."""

    source: str | None = None  # checkpoint folder, or packaged:NAME; null: shared, or trained by these settings
    layers: list[int] = field(default_factory=list)  # exits, by the number of layers below; []: those a method asks for
    kind: str = "shared"  # shared | norm | linear | adapter
    head_size: int = 0  # ids in the heads (0: whole vocabulary)
    attention_only: bool = False  # adapter: attention and norms, no MLP
    weights: list[float] = field(default_factory=list)  # of the exits' losses in training; []: 1 each


@dataclass
class FeatureSettings:
    """A drafter fed by the target's last states (models/feature.py)."""

    source: str | None = None  # checkpoint folder, or packaged:NAME; null: trained by these settings
    head_size: int = 8192  # ids in its head (0: whole vocabulary)
    head: str = "frozen"  # the target's head rows as they are, or a copy that is trained: frozen | trained
    layer: int | None = None  # the target's layer that its layer starts as; null: one that hands its input through


@dataclass
class ModelSettings:
    name: str = "???"
    target: SourceSettings = field(default_factory=SourceSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
    dtype: str = "bfloat16"  # float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    # the target's layers over all GPUs, as transformers places them: auto | balanced | balanced_low_0 | sequential
    device_map: str | None = None
    attention: str = "sdpa"  # sdpa
    exits: ExitSettings = field(default_factory=ExitSettings)
    feature: FeatureSettings = field(default_factory=FeatureSettings)
    block: int | None = None  # tokens to a block of paged key/value memory; null: contiguous
    prepack: bool = True  # on a CPU: a second copy of the weights, as its kernels read them (models/prepacked.py)


@dataclass
class PreverifierSettings:
    """PACER's pre-verification layer M_B. All choices the paper leaves open are values here (PAPERS §1, [ours])."""

    source: str | None = None  # checkpoint folder; null: the run made from these settings
    depth: int = 1  # decoder layers; with attention none residual blocks, 0: a linear probe
    width: int | None = None  # null: the draft's width
    state: str = "after_norm"  # which draft state is read: before_norm | after_norm
    index_embedding: bool = True  # learned embedding of the index inside the current draft
    # what an entry sees: prefix (and the current draft) | block (the current draft alone) | none (itself)
    attention: str = "prefix"
    token: bool = True  # the token's own embedding is part of its entry
    # of logprob, entropy, margin, match, cumulative; [] is the paper's form
    features: list[str] = field(default_factory=lambda: ["logprob", "entropy", "margin", "match", "cumulative"])
    label: str = "survival"  # survival | conditional | next | certain
    reject_weight: float = 1.0  # of what was rejected, in the loss
    gamma_max: int = 16


def acceptance_head(**values: Any) -> PreverifierSettings:
    """A pre-verifier that reads the state alone; its drafts may be longer than those it was trained on."""
    return PreverifierSettings(
        attention="none", token=False, index_embedding=False, features=[], gamma_max=20, **values
    )


@dataclass
class MethodSettings:
    """One arm: which drafter, which controller, what it guarantees."""

    name: str = "pacer"
    # null | model | model_full (the head over the whole vocabulary) | exit (the first of the exits) | exits (the first
    # that is sure) | feature (fed by the target) | pearl (a model, beside the target) | a module of
    # pacer/decoding/drafters/
    drafter: str | None = "model"
    drafting: dict[str, Any] | None = None  # values of such a module's drafter
    controller: dict[str, Any] | None = None  # {kind: fixed, gamma: 4} …; null: no drafting
    # layers below each exit: what drafts, then what verifies before the target does; null: the first of model.exits
    exits: list[int] | None = None
    stages: int = 0  # exits that verify before the target does, where exits is null
    head: str | None = None  # kind of the exits' heads; null: model.exits.kind
    # when what such an exit accepted goes on: {kind: enough, n: 4}; n may be a list
    buffer: dict[str, Any] | None = None
    bonus: bool = True  # such an exit adds a token of its own after full acceptance too
    share: float = 1.0  # of a batch's drafting rows, how many buffers must be full before these go on; 1: all
    checks: str = "all"  # what of a draft the target checks: all | last (its last token; the others stay: lossy)
    guarantee: str = "exact"  # exact (greedy identity, sampled distribution) | lossy


@dataclass
class SamplingSettings:
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass
class CorpusSettings:
    """The target's own continuations: what drafts and pre-verifiers learn from."""

    prompts: list[str] = field(default_factory=list)  # prompt sets, e.g. gsm8k/train; continued where no file is given
    file: Any = None  # a ready corpus (JSON lines, .gz allowed), or a list of them; null: generate
    extend: list[str] = field(default_factory=list)  # sets continued in addition; what is in the file is not made again
    chunks: int = 1  # prompts of an article: of its first part, its second …
    limit: int | None = None  # prompts per set; of ready files: texts per task
    max_new_tokens: int = 192
    batch_size: int = 16
    shard_size: int = 64  # texts per shard: the unit of resuming
    parts: dict[str, float] = field(
        default_factory=lambda: {"draft": 0.7, "preverifier": 0.22, "tuning": 0.08}
    )  # stable-hash split


@dataclass
class LabelSettings:
    starts: str = "uniform"  # where simulated rounds start: uniform | rounds | all
    starts_per_text: int = 24
    gamma: int = 16  # draft length of a simulated round
    texts: int | None = None  # limit
    tail: int = 6  # tokens past the first rejection that are still trained on
    temperature: float = 0.0  # of draft and target in simulated rounds; 0: greedy, p and q are one-hot
    seed: int = 0


@dataclass
class CostSettings:
    """Costs in units of one single-token target pass, as `pacer.profile` measures them; used to simulate speed."""

    draft: float = 0.1  # one draft pass (of two of thirty layers)
    preverify: float = 0.015  # one pre-verifier call (of width 192)
    token: float = 0.015  # each further token the target verifies
    rest: float = 0.01  # everything else in a round


@dataclass
class TrainerSettings:
    part: str = "preverifier"  # draft | preverifier | exits | layerskip | feature_draft
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    warmup: float = 0.05  # share of all optimiser steps
    clip: float = 1.0
    epochs: int = 3
    max_minutes: float | None = None
    max_steps: int | None = None
    tokens_per_batch: int = 4096
    accumulate: int = 1
    precision: str = "bf16"  # bf16 | fp32
    dropout: float = 0.0
    cache_states: bool = False  # preverifier only: the draft's states on disk, computed once for all epochs and runs
    patience: int = 3  # validations without improvement; 0: off
    val_every: int = 100  # optimiser steps
    checkpoint_every: int = 50  # optimiser steps between resumable states
    monitor: str = "val/sim_speedup"
    prompt_weight: float = 0.15  # all but the preverifier: loss weight of prompt tokens
    prompt_labels: str = "text"  # draft only: the prompt's next token, or the target's choice there: text | teacher
    kl_weight: float = 0.0  # draft, exits, feature_draft: share of the divergence from the target's predictions
    teacher_top_k: int = 8  # draft, exits, feature_draft: ids per position of those predictions
    start_from: str | None = None  # draft only: checkpoint folder or packaged:NAME; null: the target's own layers
    devices: int = 1  # processes per node, each with a device of its own (pacer/training/ranks.py)
    nodes: int = 1
    strategy: str = "auto"  # of several processes: auto (ddp) | ddp | fsdp (layerskip only: the model is split too)
    seed: int = 0


@dataclass
class LayerSkipSettings:
    """LayerSkip's recipe (arXiv 2404.16710), which tunes the model itself."""

    p_max: float = 0.1  # chance of leaving the last layer out, of a row in a step; earlier layers: less
    exit_scale: float = 0.2  # share of the exits' losses beside the last layer's
    rotation: int = 8  # one in so many layers has a loss in a step; they take turns


@dataclass
class FeatureDraftSettings:
    """What a drafter fed by the target learns beside the next token (arXiv 2401.15077, 2408.15766)."""

    steps: int = 2  # tokens of a draft that training makes: the first from the target's features, others from its own
    regression: float = 0.1  # weight of the distance between its features and the target's
    noise: float = 0.0  # bound of the uniform noise on the target's features that it reads


@dataclass
class BenchmarkSettings:
    """What is measured: prompt sets, limits, arms."""

    sets: list[str] = field(default_factory=lambda: ["gsm8k", "humaneval", "cnn_dm", "xsum"])
    limit: int | None = 8  # prompts per set; null: all
    split: str = "report"  # report | tune | all: tuning quarter by stable hash of the id
    max_new_tokens: int = 128
    arms: list[str] = field(default_factory=lambda: ["ar", "sd gamma=4", "pacer"])
    warmup: int = 1  # prompts per arm, outside the measurement
    minutes: float | None = None  # time box
    batch_size: int = 1  # rows decoded at once; a waiting prompt takes the row of one that has ended
    score: bool = True
    sandbox: str = "auto"  # auto | unsafe | off
    bootstrap: int = 2000
    seed: int = 0


@dataclass
class ProfileSettings:
    contexts: list[int] = field(default_factory=lambda: [128, 512])
    batches: list[int] = field(default_factory=lambda: [1, 4, 16])
    gamma_max: int = 16
    repeats: int = 5
    weights: str = "trained"  # trained | random: the models' shapes alone, nothing is fetched or trained
    scale: int = 1  # random: layers, heads, MLP and vocabulary over so much


@dataclass
class ReplaySettings:
    """What is replayed, and at what prices."""

    texts: str = "benchmark"  # continuations of: benchmark (its prompts) | corpus (its tuning part)
    split: str = "tune"  # of benchmark prompts: tune | report | all
    limit: int | None = 16  # prompts per set, or texts of the corpus; null: all
    gamma_max: int = 16  # longest draft in the table
    tail: int | None = 8  # places past the first mismatch whose signals are kept; null: all
    profile: str | None = None  # a profile.json; measure: profile here; null: the costs block
    write: bool = False  # put the best values beside the pre-verifier's weights
    draft_costs: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5])
    token_costs: list[float] = field(default_factory=lambda: [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])


@dataclass
class AdviseSettings:
    """How much is spent on advice."""

    texts: int = 4  # tuning prompts per set that predictions are made of
    repeats: int = 3  # of the profile
    measured: int = 3  # methods that are measured beside plain decoding, the best predicted first
    prompts: int = 3  # other prompts per set, with which that is done


@dataclass
class GenerateSettings:
    prompt: str | None = None
    max_new_tokens: int = 256
    stop: list[str] = field(default_factory=list)
    chat: bool = True  # wrap the prompt in the model's chat template
    color: bool = False


@dataclass
class ReportSettings:
    """What `report` shows of finished runs beside `run`: one of the papers' tables."""

    table: str | None = None  # its name; conf/experiment/table has one of each
    kept: list[str] = field(default_factory=lambda: ["data/results"])  # folders of kept results, read with paths.runs


@dataclass
class ExportSettings:
    """A trained part as files that others read (models/export.py)."""

    part: str = "draft"  # draft | feature | exits | preverifier
    to: str | None = None  # a folder that is new or empty


@dataclass
class LoggerSettings:
    csv: bool = True
    wandb: str = "disabled"  # disabled | offline | online
    project: str = "pacer"
    group: str | None = None


@dataclass
class ShardSettings:
    """Which part of the work is this process's, where several share it (pacer/work/shards.py)."""

    index: int | None = None  # from 0; null: SLURM_ARRAY_TASK_ID, else RANK (not in a sweep: its jobs are no shards)
    count: int | None = None  # null: SLURM_ARRAY_TASK_COUNT, else WORLD_SIZE; 1: the whole


@dataclass
class PathSettings:
    runs: str = "runs"  # outputs of verbs
    cache: str = "???"  # models and stages; ${oc.env:PACER_CACHE,…}
    data_dir: str | None = None  # real data; ${oc.env:PACER_DATA,null}

    @property
    def cache_folder(self) -> Path:
        """``cache``, with the user's home in it."""
        return Path(self.cache).expanduser()


@dataclass
class Settings:
    model: ModelSettings = field(default_factory=ModelSettings)
    preverifier: PreverifierSettings = field(default_factory=PreverifierSettings)
    # heads of other methods, each made when one is wanted: SPRINTER's probe, SpecDec++'s residual blocks
    probe: PreverifierSettings = field(default_factory=lambda: acceptance_head(depth=0, label="certain"))
    specdecpp: PreverifierSettings = field(
        default_factory=lambda: acceptance_head(depth=3, label="conditional", reject_weight=6.0)
    )
    method: MethodSettings = field(default_factory=MethodSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    labels: LabelSettings = field(default_factory=LabelSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    layerskip: LayerSkipSettings = field(default_factory=LayerSkipSettings)
    feature_draft: FeatureDraftSettings = field(default_factory=FeatureDraftSettings)
    benchmark: BenchmarkSettings = field(default_factory=BenchmarkSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    advise: AdviseSettings = field(default_factory=AdviseSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    paths: PathSettings = field(default_factory=PathSettings)
    shard: ShardSettings = field(default_factory=ShardSettings)
    name: str = "???"  # the experiment's name: runs/<verb>/<name>/<hash>
    threads: int | None = None  # torch CPU threads
    run: Any = None  # report: folder of a finished run, or a list of them
    dry_run: bool = False  # print what would be done, and the memory it takes; do nothing
    color: bool = False  # short for generate.color
    sandbox: str | None = None  # short for benchmark.sandbox
