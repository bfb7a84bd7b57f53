"""Rules of a replay, what a search finds among them, and values that it writes beside a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacer.artifacts import Stage
from pacer.errors import ConfigError, MismatchError, SourceError, UnsupportedError
from pacer.evaluation.replay import choice, costs, results, rules, search
from pacer.evaluation.replay.table import join
from pacer.evaluation.replay.walk import usage
from pacer.models.preverifier import TUNED, tuned_values
from pacer.settings import CostSettings
from tests.replays import planted, table


def test_a_preverifier_of_longer_drafts_than_the_table() -> None:
    """An arm that may draft past the table is refused, as fixed windows and thresholds are."""
    score = [[0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.1], [0.9, 0.1, 0.9, 0.9]]
    text = replace(table([4, 3, 1], score=score, budget=40), score_width=8)
    for arm in ("pacer b=1 t0=0.5", "pacer b=1 t0=0.5 gamma_max=6"):
        with pytest.raises(ConfigError, match=r"drafts past the table: .*replay\.gamma_max="):
            rules.rule_of(arm)(text)
    plan = rules.rule_of("pacer b=1 t0=0.5 gamma_max=4")(text)
    assert plan.drawn.tolist() == [4, 4, 2] and not plan.open.any()
    short = replace(text, score_width=3)  # never longer than it was trained on, whatever is asked for
    for arm in ("pacer b=1 t0=0.5", "pacer b=1 t0=0.5 gamma_max=16"):
        plan = rules.rule_of(arm)(short)
        assert plan.drawn.tolist() == [3, 3, 2] and not plan.open.any()
    tried = search.families(text, costs.from_settings(CostSettings()))["pacer"].settings
    assert max(setting.values["gamma_max"] for setting in tried) == 4


def test_thresholds_by_hand() -> None:
    probability = [[0.9, 0.5, 0.9, 0.9], [0.3, 0.9, 0.9, 0.9], [0.9, 0.8, 0.7, 0.1]]
    text = table([0, 0, 0], probability=probability, budget=20)
    assert rules.threshold(text, "probability", 0.5).drawn.tolist() == [4, 1, 4]
    assert rules.threshold(text, "probability", 0.6).drawn.tolist() == [2, 1, 4]
    assert rules.threshold(text, "probability", 0.44, "product").drawn.tolist() == [3, 1, 4]
    assert rules.threshold(text, "probability", 0.6, "product").drawn.tolist() == [2, 1, 3]
    assert rules.threshold(text, "probability", 0.0, gamma_max=2).drawn.tolist() == [2, 2, 2]
    text.signals["entropy"][:] = [[1, 2, 3, 4], [4, 1, 1, 1], [2, 2, 2, 2]]
    assert rules.threshold(text, "entropy", 2.0).drawn.tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("arm", "reason"),
    [("hf_assisted", "transformers"), ("hf_generate", "transformers"), ("sd_full gamma=2", "model_full")],
)
def test_arms_that_cannot_be_replayed(arm: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        rules.rule_of(arm)


def test_what_the_table_lacks() -> None:
    text = table([0, 0])
    with pytest.raises(ConfigError, match=r"replay\.gamma_max=9"):
        rules.rule_of("sd gamma=9")(text)
    with pytest.raises(UnsupportedError, match="pre-verifier"):
        rules.rule_of("pacer b=1 t0=0.5")(text)
    with pytest.raises(ConfigError, match="b or t0"):
        rules.rule_of("pacer")
    with pytest.raises(ConfigError, match="joined"):
        join([text, table([0, 0], width=3)])


def test_the_search_finds_what_was_planted() -> None:
    of = planted()
    prices = costs.from_settings(CostSettings(draft=0.3, preverify=0.01, token=0.0, rest=0.0))
    found = search.families(of, prices)
    at = found["probability"].best(prices)
    best = found["probability"].settings[at].values
    assert 0.35 < best["t"] <= 0.9 and best["gamma_max"] >= 4  # stops after the second token, else goes on to the end
    exact = rules.threshold(of, "probability", best["t"], "last", 4)
    assert (exact.drawn == of.run).all()
    speeds = {family: float(prices.ratio(pool.usage).max()) for family, pool in found.items()}
    assert speeds["probability"] == pytest.approx(speeds["oracle"]) and speeds["fixed"] < speeds["probability"]
    assert speeds["fixed"] == max(
        float(prices.ratio(usage(of, rules.fixed(of, gamma)))) for gamma in range(of.width + 1)
    )
    pacer = found["pacer"].settings[found["pacer"].best(prices)].values
    assert (rules.preverified(of, **pacer).drawn == of.run).all()
    assert speeds["pacer_lazy"] >= speeds["pacer"] > speeds["fixed"]  # a lazy rule may skip calls
    assert found["pacer_lazy"].usage.passes.shape[1:3] == (1, 4)


@pytest.mark.parametrize(("label", "read"), [("survival", {"mean", "min"}), ("conditional", {"product", "min"})])
def test_a_search_tries_the_rules_that_read_the_labels(label: str, read: set[str]) -> None:
    of = replace(planted(1, 40), label=label)
    found = search.families(of, costs.from_settings(CostSettings()))
    tried = [s.values for family in ("pacer", "pacer_lazy") for s in found[family].settings]
    assert {values["rule"] for values in tried} == read
    other = ({"mean", "product"} - read).pop()
    with pytest.raises(MismatchError, match=f"of {label} labels: '{other}'"):
        rules.rule_of(f"pacer b=2 t0=0.5 rule={other} gamma_max=4")(of)


def test_every_setting_of_a_search_is_the_arm_it_is_called() -> None:
    of = planted(1, 60)
    prices = costs.from_settings(CostSettings())
    rng = np.random.default_rng(0)
    for family, pool in search.families(of, prices).items():
        for i in rng.choice(len(pool.settings), min(5, len(pool.settings)), replace=False):
            named = rules.rule_of(pool.settings[i].arm)(of)
            assert (named.drawn == pool.settings[i].rule(of).drawn).all(), (family, pool.settings[i].arm)


def test_a_draft_that_costs_too_much_is_not_used() -> None:
    """A46: γ = 0 is among the windows, and plain decoding is what it gives."""
    of = planted()
    prices = costs.from_settings(CostSettings(draft=9.0))
    found = search.families(of, prices)
    assert found["fixed"].settings[found["fixed"].best(prices)].arm == "sd gamma=0"
    rows = results.rows(found, prices, ["t"])
    assert {r["family"]: r["ratio_to_ar"] for r in rows}["fixed"] == 1.0


def test_rows_by_benchmark() -> None:
    easy = table([4] * 40, budget=10_000, ended=True, name="a", task="easy")
    hard = table([0] * 40, budget=10_000, ended=True, name="b", task="hard")
    of = join([easy, hard])
    prices = costs.from_settings(CostSettings(draft=0.1, token=0.0, rest=0.0))
    rows = {
        (r["benchmark"], r["family"]): r for r in results.rows(search.families(of, prices), prices, ["easy", "hard"])
    }
    assert rows["hard", "fixed_here"]["arm"] == "sd gamma=0" and rows["easy", "fixed_here"]["arm"] == "sd gamma=4"
    assert rows["all", "oracle"]["gap_share"] == 1.0 and rows["all", "fixed"]["gap_share"] == 0.0
    assert rows["easy", "oracle"]["tokens_per_verify"] == 5.0 and rows["hard", "oracle"]["ratio_to_ar"] == 1.0
    total = 80 / (8 * 1.4 + 40)  # eight rounds of 4 drafts, forty without
    assert rows["all", "oracle"]["ratio_to_ar"] == pytest.approx(total)


def test_each_half_is_judged_by_what_was_best_on_the_other() -> None:
    """Texts where everything holds, and texts where nothing does: chosen on the other half, each gets the wrong γ."""
    names = [f"text{i}" for i in range(12)]
    of = join([table([4] * 10, budget=10_000, ended=True, name=name) for name in names])
    sides = [group.partition(choice.MARK)[2] for group in choice.halved(of)]
    assert set(sides) == {"0", "1"}
    runs = [[4 if side == "0" else 0] * 10 for side in sides]
    of = join([table(run, budget=10_000, ended=True, name=name) for run, name in zip(runs, names, strict=True)])
    prices = costs.from_settings(CostSettings(draft=0.1, token=0.0, rest=0.0))
    groups = choice.halved(of)
    pool = search.pool(of, search.fixed_windows(of), groups)
    unique = list(dict.fromkeys(groups))
    for side, right, wrong in (("0", 4, 0), ("1", 0, 4)):
        mask = np.array([group.endswith(side) for group in unique])
        assert pool.settings[int(prices.ratio(pool.usage.of(mask)).argmax())].arm == f"sd gamma={right}"
        used = choice.judged(pool, prices, unique, mask)
        alone = search.pool(of, [pool.settings[wrong]], groups).usage.of(mask)
        assert prices.ratio(used) == pytest.approx(float(prices.ratio(alone)[0]))
        in_sample = choice.judged(pool, prices, unique, mask, mask)  # no other half to choose on
        assert prices.ratio(in_sample) == pytest.approx(float(prices.ratio(pool.usage.of(mask)).max()))


def checkpoint(root: Path) -> Path:
    folder = root / "preverifier"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"kind": "preverifier", "tuned": {"b": 1}, "label": "survival"}))
    return folder


def test_tuned_values_are_written_beside_what_was_there(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    search.write_tuned(folder, {"b": 3, "t0": 0.4}, {"texts": 2})
    assert json.loads((folder / TUNED).read_text()) == {"tuned": {"b": 3, "t0": 0.4}, "evidence": {"texts": 2}}
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", TUNED]
    with pytest.raises(SourceError, match="no pre-verifier"):
        search.write_tuned(tmp_path, {}, {})


def test_a_replays_values_come_before_those_of_training(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert tuned_values(folder) == {"b": 1}
    search.write_tuned(folder, {"b": 3, "t0": 0.4}, {})
    assert tuned_values(folder) == {"b": 3, "t0": 0.4}
    for damage in ("{", "[]", '{"tuned": 3}'):
        (folder / TUNED).write_text(damage)
        with pytest.raises(SourceError, match=r"no tuned values can be read .*tuned\.json.*; delete it"):
            tuned_values(folder)


def test_a_stage_stays_whole_when_its_checkpoint_is_tuned(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "preverifier", {"a": 1})
    folder = checkpoint(stage.folder)
    stage.finish()
    before = {file: file.read_bytes() for file in stage.folder.rglob("*") if file.is_file()}
    search.write_tuned(folder, {"b": 3, "t0": 0.4, "rule": "product"}, {"texts": 2})
    again = Stage(tmp_path, "preverifier", {"a": 1})
    assert again.complete and again.manifest(verify=True)["files"]
    assert {file: file.read_bytes() for file in before} == before  # so a kill between two writes can damage nothing
