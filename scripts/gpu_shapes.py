"""What drafting, verifying and pre-verifying cost at the papers' shapes, beside the published figures.

Time and memory do not depend on what weights say, so models get random ones in their true shapes. Measured are passes;
a share of a round is computed from them, for a draft of a stated length: random drafts are hardly ever accepted. On a
CPU the shapes are divided by a stated factor, and what comes out is a test of the script, no figure of the papers'.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from pacer.assemble import Models, make_decoder
from pacer.command.app import load_settings, program
from pacer.decoding.ladder import Rung
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.evaluation.cascade.profile import profile_rungs
from pacer.evaluation.profiler import profile
from pacer.methods.arms import method_settings
from pacer.models.shapes import config_of
from pacer.models.sizes import skeleton, tensors
from pacer.models.sources import pick_device
from pacer.provenance import provenance
from pacer.random_models import random_models
from pacer.reporting.paper.published import published
from pacer.reporting.tables import markdown
from pacer.settings import SamplingSettings, Settings, SourceSettings
from pacer.work.stopping import check_stop

SHARED = "deepseek_1b_33b"  # the pair whose pre-verifier's share is published
PAIRS = ("deepseek_1b_7b", SHARED, "qwen25_05b_7b", "qwen25_05b_14b", "llama31_1b_8b")
EXITS = ("layerskip_llama3_8b", "layerskip_llama2_7b", "layerskip_codellama_34b")
DRAFTED, BLOCK = 8, 2  # the round that a share is computed for: tokens drafted, in blocks of
CONTEXT, NEW = 512, 16  # tokens in the caches; decoded by HiSpec
SPARE = 1.15  # keys, values and activations come on top of the weights
Line = tuple[str, str, str, str]  # what, of which models, published, here


def settings_of(model: str, experiment: str, scale: int, dtype: str, words: Sequence[str]) -> Settings:
    return load_settings([
        f"+experiment={experiment}/hub", f"model={model}", f"model.dtype={dtype}", "profile.weights=random",
        f"profile.scale={scale}", f"profile.contexts=[{CONTEXT}]", "profile.batches=[1]", *words,
    ])  # fmt: skip


def pair(settings: Settings) -> dict[str, Any]:
    """c, v by tokens, and the pre-verifier's share of a round, from passes at batch 1."""
    models = random_models(settings)
    times = {(p.part, p.n): p.median_ms for p in profile(models, settings.profile)}
    calls = math.ceil(DRAFTED / BLOCK)
    drafting, judging = DRAFTED * times["draft", 1], calls * times["preverifier", BLOCK]
    verifying = times["target", DRAFTED + 1]
    return {
        "c": times["draft", 1] / times["target", 1],
        "v": {n: times["target", n] / times["target", 1] for n in (2, 5, 9, 17) if ("target", n) in times},
        "preverify_share": judging / (drafting + judging + verifying), "drafted": DRAFTED, "block": BLOCK,
        "target_ms": times["target", 1], "draft_ms": times["draft", 1], "preverify_ms": times["preverifier", BLOCK],
    }  # fmt: skip


def exits(settings: Settings) -> dict[str, Any]:
    """A pass of the whole model over a draft step at its first exit, and the states that HiSpec keeps for a request."""
    models = random_models(settings, drafts=False)
    layers = list(models.exit_layers)
    heads = {layer: models.exits["shared", layer] for layer in layers}
    points = profile_rungs(
        models.target, layers, heads, context=CONTEXT, widths=(1,), repeats=settings.profile.repeats
    )  # fmt: skip
    times = {(point.part, point.b): point.median_ms for point in points}
    whole, draft = times["whole", models.target.n_layers], times["draft", layers[0]]
    return {"exits": layers, "wall": whole / draft, "whole_ms": whole, "draft_ms": draft, **states(models)}


def states(models: Models) -> dict[str, float]:
    """Memory of the states that wait between layers while a request is decoded by HiSpec, beside model and caches."""
    exits = ",".join(map(str, models.exit_layers))
    decoder = make_decoder(method_settings(f"hispec exits=[{exits}]"), models, SamplingSettings())
    ids = torch.randint(0, models.target.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder.generate([Request("0", ids, NEW)])
    assert isinstance(decoder.reader, Rung)
    ladder = decoder.reader.ladder
    weights = sum(weight.nbytes for weight in models.target.model.parameters())
    held = weights + sum(lane.cache.nbytes() for lane in ladder.lanes)
    return {"state_bytes": ladder.state_bytes(), "held_bytes": held, "state_share": ladder.state_bytes() / held}


def too_large(settings: Settings, device: torch.device) -> str | None:
    """Why a device does not hold the weights of a run; None: it does."""
    if device.type != "cuda":
        return None
    model, cache = settings.model, settings.paths.cache_folder
    sources = [model.target, *([SourceSettings(id=model.draft.source)] if model.draft.source else [])]
    stacks = [skeleton(config_of(source, cache, settings.profile.scale), model.dtype) for source in sources]
    needed = SPARE * sum(weight.nbytes for stack in stacks for weight in tensors([stack.model]))
    room = torch.cuda.get_device_properties(device).total_memory
    return f"needs {needed / 1e9:.0f} GB of {room / 1e9:.0f}" if needed > room else None


def lines_of(found: dict[str, dict[str, Any]]) -> list[Line]:
    """The table's rows, by model."""
    wall, memory, share = (
        str(published(*name))
        for name in (("hispec", "verification_over_draft"), ("hispec", "memory"), ("pacer", "preverify_share"))
    )
    rows: list[Line] = []
    for name, one in found.items():
        if why := one.get("skipped"):
            rows.append(("not measured", name, "–", why))
        elif name in EXITS:
            at = f"{name}, exits {one['exits']}"
            held = f"{100 * one['state_share']:.4f}"
            rows.append(("wall: whole pass over a draft step, ×", at, wall, f"{one['wall']:.1f}"))
            rows.append(("HiSpec's waiting states, % of model and caches", at, memory, held))
        else:
            rows.append(("c: draft pass over target pass", name, "–", f"{one['c']:.3f}"))
            rows += [(f"v({n}): target pass over {n} tokens", name, "–", f"{v:.2f}") for n, v in one["v"].items()]
            what = f"pre-verifier's share of a round of {one['drafted']} drafted in blocks of {one['block']}, %"
            rows.append((what, name, share if name == SHARED else "–", f"{100 * one['preverify_share']:.1f}"))
            rows.append(("wall: target pass over draft pass, ×", name, wall, f"{1 / one['c']:.1f}"))
    return rows


def table(rows: Sequence[Line], head: Line) -> str:
    return markdown([head, ("---",) * 4, *rows])


@program
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="no model is begun after so many")
    parser.add_argument("--scale", type=int, help="shapes over so much; default: 1 on a GPU, 16 on a CPU")
    parser.add_argument("--models", nargs="+", default=[*PAIRS, *EXITS], help="of conf/model")
    arguments, words = parser.parse_known_args(argv)
    if unknown := sorted({*arguments.models} - {*PAIRS, *EXITS}):
        raise ConfigError("--models", value=unknown, allowed=(*PAIRS, *EXITS))
    device = pick_device("auto")
    gpu = device.type == "cuda"
    scale, dtype = arguments.scale or (1 if gpu else 16), "bfloat16" if gpu else "float32"
    deadline, found = time.monotonic() + 60 * arguments.minutes, {}
    for name in arguments.models:
        check_stop()
        settings = settings_of(name, "pacer" if name in PAIRS else "hispec", scale, dtype, words)
        why = "no time left" if time.monotonic() > deadline else too_large(settings, device)
        if why is None:
            found[name] = (pair if name in PAIRS else exits)(settings)
        else:
            found[name] = {"skipped": why}
        gc.collect()
        torch.cuda.empty_cache()
    machine = provenance()["machine"]
    place = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} CPU threads"
    shapes = "true shapes" if scale == 1 else f"shapes over {scale}"
    print(table(lines_of(found), ("what", "models", "published", f"measured here: {place}, {dtype}, {shapes}")))
    ok = not any("skipped" in one for one in found.values())
    print(json.dumps({"models": found, "scale": scale, "dtype": dtype, "device": place, "context": CONTEXT,
                      "machine": machine, "ok": ok}))  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
