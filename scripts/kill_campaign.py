"""Does work survive being killed? The whole pipeline on a tiny model, killed at random points and started again.

The verbs run as a user runs them: corpus, draft, labels, pre-verifier, measurement. Once they run undisturbed; then
each is killed (SIGKILL, SIGTERM) a little after a random one of its changes on disk, and the same command goes on.
After every kill all files must be whole; in the end nothing may be done twice, and parameters, labels, trace and table
must be those of the undisturbed run.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pacer.command.app import program
from pacer.errors import EXIT_REQUEUE, ConfigError, PacerError
from pacer.work.stopping import check_stop
from scripts.left_behind import State, doubled, finished, outputs, requests, state, unreadable

KILLS, SEED = 20, 0
POLL, LONGEST_DELAY, LIMIT = 0.005, 0.2, 600.0  # seconds
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
COMMON = (
    "+experiment=pacer/demo", "model.target.file=null", "model.target.sha256=null", "model.draft.source=null",
    "model.draft.layers=[0,1]", "model.draft.head_size=200", "model.dtype=float32", "model.device=cpu", "threads=1",
    "trainer.precision=fp32", "trainer.max_minutes=null", "trainer.max_steps=12", "paths.data_dir=null", "data=samples",
    "corpus.prompts=[gsm8k/train,mbpp/train]", "corpus.limit=24", "corpus.max_new_tokens=24", "corpus.batch_size=2",
    "corpus.shard_size=4", "corpus.parts.draft=0.5", "corpus.parts.preverifier=0.3", "corpus.parts.tuning=0.2",
    "labels.gamma=4", "labels.starts_per_text=6", "preverifier.gamma_max=4", "preverifier.width=16",
    "benchmark.sets=[gsm8k,humaneval]", "benchmark.limit=3", "benchmark.max_new_tokens=16", "benchmark.score=false",
    'benchmark.arms=[ar,"sd gamma=2",pacer]', "benchmark.warmup=0", "benchmark.bootstrap=20", "sandbox=off",
)  # fmt: skip
DRAFT = (*COMMON, "trainer=draft", "trainer.epochs=3", "trainer.val_every=150")  # as it is trained on the way
JUDGE = (
    *COMMON, "trainer.tokens_per_batch=1024", "trainer.epochs=3", "trainer.val_every=4", "trainer.checkpoint_every=2",
    "trainer.patience=2",
)  # fmt: skip
PIPELINE = (("label", DRAFT), ("train", DRAFT), ("label", JUDGE), ("train", JUDGE), ("evaluate", JUDGE))
Step = tuple[str, tuple[str, ...]]  # a verb and its words


@dataclass
class Tally:
    """What happened. ``codes``: exit codes by signal; ``wrong``: one line for each thing that must not be."""

    kills: int = 0
    resumes: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    done_twice: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def tiny_target(folder: Path) -> Path:
    """A random Llama of three layers over single bytes, as a user's model folder."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(pieces), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    wrapped.save_pretrained(folder)
    return folder


def start(step: Step, home: Path, runs: Path) -> subprocess.Popen[bytes]:
    """The verb in a process of its own; what it prints goes to ``home/log``."""
    verb, words = step
    places = [f"model.target.id={home / 'target'}", f"paths.runs={runs}", f"paths.cache={home / 'cache'}"]
    with (home / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"pacer.{verb}", *words, *places], stdout=log, stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def watch(process: subprocess.Popen[bytes], runs: Path, changes: int | None = None) -> int:
    """Wait until the process ends or has changed something on disk so many times; the changes that were seen."""
    seen, before, end = 0, state(runs), time.monotonic() + LIMIT
    while process.poll() is None and (changes is None or seen < changes):
        if time.monotonic() > end:
            raise PacerError(f"a verb did not end within {LIMIT:.0f} s", value=process.args)
        time.sleep(POLL)
        now = state(runs)
        seen, before = seen + (now != before), now
    return seen


def run(step: Step, home: Path, runs: Path, changes: int | None, number: signal.Signals, delay: float) -> int:
    """Start a step, send it the signal so long after so many changes, and return its exit code."""
    process = start(step, home, runs)
    try:
        watch(process, runs, changes)
        if changes is not None:
            time.sleep(delay)
            process.send_signal(number)
        return process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()


def undisturbed(steps: Sequence[Step], home: Path, runs: Path) -> list[int]:
    """The changes on disk of each step."""
    found = []
    for step in steps:
        process = start(step, home, runs)
        try:
            found.append(watch(process, runs))
        finally:
            process.kill()
            code = process.wait()
        if code:
            raise PacerError(f"pacer.{step[0]} ended with {code}", value=last_line(home))
        check_stop()
    return found


def last_line(home: Path) -> str:
    lines = (home / "log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def disturbed(
    steps: Sequence[Step],
    changes: Sequence[int],
    kills: int,
    home: Path,
    runs: Path,
    rng: np.random.Generator,
    tally: Tally,
) -> None:
    """Every step, killed as often as falls to it and started again until it ends."""
    kept: State = {}
    measured: dict[Any, Any] = {}
    planned = rng.multinomial(kills, np.asarray(changes) / sum(changes))
    for step, whole, left in zip(steps, changes, planned, strict=True):
        each = max(1, 2 * whole // (left + 1))
        for attempt in itertools.count():
            tally.resumes += attempt > 0
            number = SIGNALS[rng.integers(len(SIGNALS))]
            place, delay = int(rng.integers(1, each + 1)), float(rng.uniform(0, LONGEST_DELAY))
            code = run(step, home, runs, place if attempt < left else None, number, delay)
            if code == 0:
                break
            tally.kills += 1
            tally.codes[f"{number.name} {code}"] += 1
            where = f"{1000 * delay:4.0f} ms after change {place:3}"
            print(f"{step[0]:9} {number.name} {where}: exit code {code}", flush=True)
            if code != (EXIT_REQUEUE if number is signal.SIGTERM else -number):
                tally.wrong.append(f"pacer.{step[0]} ended with {code} at {number.name}: {last_line(home)}")
                return
            tally.unreadable += unreadable(runs)
            kept |= finished(runs)
            measured |= requests(runs)
            check_stop()
    now = state(runs)
    tally.done_twice += [f"{path} was written again" for path, was in kept.items() if now.get(path) != was]
    lines = requests(runs)
    tally.done_twice += [f"{key} was measured again" for key, was in measured.items() if lines.get(key) != was]
    tally.done_twice += doubled(runs)
    tally.unreadable += unreadable(runs)


def campaign(home: Path, kills: int, seed: int, steps: Sequence[Step] = PIPELINE) -> Tally:
    """Kill so often, in as many runs of the steps as it takes, each of which is compared with the undisturbed one."""
    tally, rng = Tally(), np.random.default_rng(seed)
    tiny_target(home / "target")
    changes = undisturbed(steps, home, home / "whole")
    wanted = outputs(home / "whole")
    tally.unreadable += unreadable(home / "whole")
    for number in itertools.count():
        runs = home / f"killed-{number}"
        disturbed(steps, changes, kills - tally.kills, home, runs, rng, tally)
        if not tally.wrong:
            found = outputs(runs)
            tally.differences += sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if tally.kills >= kills or tally.wrong or number > kills:
            return tally


@program
def main(words: list[str]) -> int:
    if len(words) > 2 or not all(word.isdecimal() for word in words):
        raise ConfigError("numbers", value=words, allowed=f"KILLS (default {KILLS}), SEED (default {SEED})")
    numbers = [*map(int, words), *(KILLS, SEED)[len(words) :]]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        tally = campaign(Path(home), *numbers)
    for line in [*tally.wrong, *tally.unreadable, *tally.done_twice, *(f"differs: {d}" for d in tally.differences)]:
        print(line)
    counts = {name: len(getattr(tally, name)) for name in ("wrong", "unreadable", "done_twice", "differences")}
    ok = tally.kills == numbers[0] and not any(counts.values())
    record = {"kills": tally.kills, "resumes": tally.resumes, "codes": dict(sorted(tally.codes.items())), **counts}
    print(f"{tally.kills} kills, {tally.resumes} resumes, {counts['differences']} differences")
    print(json.dumps({**record, "seconds": round(time.perf_counter() - began, 1), "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
