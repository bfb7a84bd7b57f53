"""The library without a command line: the same output as the loop, by arm, row and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pacer
from pacer.errors import ConfigError, UnsupportedError
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

PROMPTS = ["How many?", "the fox", "Why"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> pacer.Pacer:
    home: Path = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    experiment, *rest = words(home, "pacer/demo", "model.dtype=float32")
    return pacer.load(experiment.partition("=")[2], *rest, arms=["ar", "sd gamma=2", "pacer b=1 t0=0.3"])


def test_exact_arms_write_what_plain_decoding_writes(engine: pacer.Pacer) -> None:
    plain = engine.generate(PROMPTS, max_new_tokens=9)
    assert [len(out.ids) for out in plain] and all(out.finish in ("length", "eos") for out in plain)
    for arm in engine.arms[1:]:
        for rows in (None, 1, 2):
            outs = engine.generate(PROMPTS, arm, max_new_tokens=9, rows=rows)
            assert [out.ids for out in outs] == [out.ids for out in plain]
            assert [out.text for out in outs] == [out.text for out in plain]
            assert all([t for line in out.rounds for t in line["emitted"]] == out.ids for out in outs)
    alone = engine.generate(PROMPTS[0], max_new_tokens=9)
    assert len(alone) == 1 and alone[0].ids == plain[0].ids


def test_tokens_per_verify_counts_passes_after_the_prefill(engine: pacer.Pacer) -> None:
    (out,) = engine.generate("How many?", "ar", max_new_tokens=6)
    assert out.tokens_per_verify == (1.0 if len(out.ids) > 1 else None)
    (short,) = engine.generate("How many?", "ar", max_new_tokens=1)
    assert short.tokens_per_verify is None and len(short.ids) == 1


def test_sampling_is_the_calls_own_and_seeded(engine: pacer.Pacer) -> None:
    def drawn(**values: Any) -> list[list[int]]:
        return [out.ids for out in engine.generate(PROMPTS, "sd gamma=2", max_new_tokens=9, **values)]

    assert drawn(temperature=1.0, seed=1) == drawn(temperature=1.0, seed=1) != drawn(temperature=1.0, seed=2)
    assert drawn() == drawn(seed=5)  # R64: greedy again, whatever the seed
    with pytest.raises(UnsupportedError, match="top_p"):
        drawn(temperature=1.0, top_p=0.0)
    with pytest.raises(TypeError, match="temprature"):
        drawn(temprature=1.0)


def test_what_is_not_loaded_is_refused_with_the_remedy(engine: pacer.Pacer) -> None:
    with pytest.raises(ConfigError, match=r"not loaded: 'hispec'.*load\(…, arms="):
        engine.generate("How many?", "hispec")
    with pytest.raises(ConfigError, match="did you mean"):
        pacer.load("pacer/demmo")
    with pytest.raises(AttributeError, match="lode"):
        pacer.lode  # noqa: B018
