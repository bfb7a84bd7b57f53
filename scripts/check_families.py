"""Does every model of conf/model work, on tiny random likenesses? Family × load, parity, exact, exits, HiSpec, PACER.

For each: a pair of the same classes and tokenizer kind is saved to folders and given to its config as a user's folders
would be. Labels are made, what PACER and the exits need is trained for three steps, and every method decodes exactly.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from transformers import PreTrainedModel

from pacer.assemble import Models, make_decoder
from pacer.command.app import load_settings, program
from pacer.data.prompts import encode
from pacer.decoding.lane import Lane
from pacer.decoding.request import Request
from pacer.errors import ConfigError, PacerError
from pacer.methods.arms import method_settings
from pacer.models.sources import load_model
from pacer.models.stack import Stack, causal_mask
from pacer.resources import resource
from pacer.settings import SamplingSettings, Settings
from pacer.stages.build import build
from pacer.work.progress import progress
from pacer.work.stopping import check_stop
from tests.twins import OTHERS, TWINS, Twin, save_pair, twin_of

STEPS, NEW, CLOSE = 3, 16, 1e-4
TEXTS = ("Why is the sky blue?", "def add(a, b):", "x", "Once upon a time, a naïve fox 🙂")
COLUMNS = ("load", "parity", "exact", "exits", "hispec", "pacer")
ARMS = {
    "exact": ("ar", "sd gamma=3"),
    "exits": ("layerskip exits=[1]", "layerskip exits=[2] head=norm"),
    "hispec": ("hispec exits=[1,2]", "hispec exits=[1,2] head=shared n=2"),
    "pacer": ("pacer", "pacer b=2 t0=0.3 rho=1.1 gamma_max=6"),
}


def configs() -> list[str]:
    """Every hub model of conf/model, then the families that none of them has."""
    files = sorted(path.stem for path in (resource("conf") / "model").glob("*.yaml"))
    return [*(name for name in files if twin_of(name) in TWINS), *OTHERS]


def settings_of(home: Path, config: str, target: Path, draft: Path, *more: str) -> Settings:
    """A config's own settings, with folders in place of hub ids and everything small."""
    known = config not in OTHERS
    words = [
        f"+experiment=pacer/{'hub' if known else 'demo'}", "+debug=one_step", f"model={config if known else 'local'}",
        f"model.target.id={target}", "model.target.revision=null", "model.dtype=float32", "model.device=cpu",
        "model.exits.layers=[1,2]", "trainer.precision=fp32", f"trainer.max_steps={STEPS}", "trainer.epochs=3",
        f"trainer.val_every={STEPS}",
        "corpus.limit=6", "corpus.prompts=[gsm8k/train,mbpp/train]", "data=samples", "benchmark=quick",
        "corpus.parts.draft=0.4", "corpus.parts.preverifier=0.4",
        "corpus.parts.tuning=0.2", "sandbox=off", "logger.csv=false", f"paths.runs={home / 'runs'}",
        f"paths.cache={home / 'cache'}", "paths.data_dir=null", "preverifier.width=16", "model.draft.layers=[0,1]",
        "model.draft.head_size=200", *more,
    ]  # fmt: skip
    found = load_settings([*words, *([] if known else [f"model.draft.source={draft}"])])
    if found.model.draft.kind == "model":
        found.model.draft.source = str(draft)
    return found


@torch.inference_mode()
def parity(target: Stack, reference: PreTrainedModel, ids: torch.Tensor, block: int | None) -> float:
    """Largest difference of logits between transformers' model and ours: whole texts in slices, then token by token
    from memory in slices."""
    wanted = reference(input_ids=ids, use_cache=False).logits
    places = torch.arange(ids.shape[1]).expand(len(ids), -1)
    mask, x, cut = causal_mask(places, ids.shape[1]), target.embed(ids), target.n_layers // 2
    for a, b in ((0, 1), (1, cut), (cut, target.n_layers)):
        x = target.run(x, a, b, places, mask)
    whole = target.readout(x)
    lanes = [Lane(target, a, b, block) for a, b in ((0, cut), (cut, target.n_layers))]
    for lane in lanes:
        lane.reset(len(ids), ids.shape[1])
    found = []
    for part in ids.split([5, *[1] * (ids.shape[1] - 5)], 1):
        x, counts = target.embed(part), [part.shape[1]] * len(ids)
        for lane in lanes:
            x = lane.feed(x, counts)
        found.append(target.readout(x))
    return max(float((own - wanted).abs().max()) for own in (whole, torch.cat(found, 1)))


@torch.inference_mode()
def generated(reference: PreTrainedModel, request: Request) -> list[int]:
    """Transformers' own greedy text."""
    ids, stop = torch.tensor([list(request.prompt_ids)]), sorted(request.stop_ids)
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens,
        eos_token_id=stop or None, pad_token_id=stop[0] if stop else 0,
    )  # fmt: skip
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new


def same(arm: str, models: Models, requests: Sequence[Request], wanted: Sequence[list[int]]) -> tuple[bool, int, int]:
    """Whether an arm writes the reference's texts, two rows at once; tokens accepted and drafted."""
    decoder = make_decoder(method_settings(arm), models, SamplingSettings())
    results = decoder.generate(requests, slots=2)
    rounds: list[Any] = [line for result in results for line in result.rounds]
    accepted = sum(line["accepted"][-1] for line in rounds if line["accepted"])
    return [r.ids for r in results] == list(wanted), accepted, sum(len(line["drafted"]) for line in rounds)


def steps_trained(models: Models) -> int:
    folder = models.preverifier_folder
    assert folder is not None
    return int(json.loads((folder / "config.json").read_text())["steps"])


def check(config: str, twin: Twin, home: Path) -> dict[str, Any]:
    """The row of a config."""
    target, draft = save_pair(home, twin, seed=crc32(config.encode()) % 1000)
    settings = settings_of(home, config, target, draft)
    row: dict[str, Any] = {"config": config, "family": twin.family, "tokenizer": twin.tokenizer}
    try:
        models = build(settings, [method_settings(arm) for arms in ARMS.values() for arm in arms])
    except PacerError as error:
        return {**row, **dict.fromkeys(COLUMNS, False), "reason": str(error)}
    reference = load_model(target, "float32", "cpu")
    ids = torch.tensor([encode(TEXTS[0], models.tokenizer)[-12:], encode(TEXTS[3], models.tokenizer)[-12:]])
    gap = max(parity(models.target, reference, ids, block) for block in (None, 4))
    requests = [
        Request(str(i), encode(text, models.tokenizer), NEW, frozenset(models.stop_ids)) for i, text in enumerate(TEXTS)
    ]
    wanted = [generated(reference, request) for request in requests]
    row |= {"load": models.target.vocab_size == reference.config.vocab_size, "parity": gap < CLOSE, "difference": gap}
    for column, arms in ARMS.items():
        found = [same(arm, models, requests, wanted) for arm in arms]
        row[column] = all(equal for equal, _, _ in found)
        row[f"{column}_accepted"] = sum(a for _, a, _ in found) / max(1, sum(d for _, _, d in found))
        check_stop()
    row["pacer"] &= steps_trained(models) == STEPS
    return row


def _line(row: dict[str, Any], seconds: float) -> str:
    marks = "".join(f"{'yes' if row[name] else 'NO':>8}" for name in COLUMNS)
    return f"{row['config']:26}{row['family']:12}{row['tokenizer']:12}{marks}{seconds:8.1f} s{_reason(row)}"


def _reason(row: dict[str, Any]) -> str:
    return f"  {row['reason']}" if "reason" in row else ""


@program
def main(words: list[str]) -> int:
    names = configs()
    if unknown := sorted(set(words) - set(names)):
        raise ConfigError("no such model", value=unknown, allowed=names)
    rows, lines = [], [f"{'model':26}{'family':12}{'tokenizer':12}{''.join(f'{name:>8}' for name in COLUMNS)}"]
    for name in progress(words or names, "families", "model"):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as home:
            rows.append(check(name, TWINS[twin_of(name)], Path(home)))
        lines.append(_line(rows[-1], time.perf_counter() - start))
        check_stop()
    print("\n".join(lines))
    ok = all(bool(row[name]) for row in rows for name in COLUMNS)
    print(json.dumps({"models": len(rows), "rows": rows, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
