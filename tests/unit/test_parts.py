"""Rules and drafters are found by their names: no list of them is kept anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pacer.command.app import load_settings
from pacer.decoding.controllers.base import Controller, controller_class
from pacer.decoding.drafters.base import ROOM
from pacer.decoding.parts import Part, Range, allows, exists, names, resolved
from pacer.errors import ConfigError, SourceError
from pacer.methods.arms import check_drafter, controllers, defaults, method_settings, methods, overrides
from pacer.resources import configs
from pacer.settings import MethodSettings


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        (Range(0, 1), [0, 1, 0.5], [-0.1, 1.1, float("nan"), True, "0.5", None]),
        (Range(0, 1, open_low=True, open_high=True), [0.5], [0, 1]),
        (Range(1, whole=True), [1, 9], [0, 1.0, True, "1"]),
        (Range(0, open_low=True), [1e-9, 1e9], [0, float("nan")]),
    ],
)
def test_ranges(allowed: Range, good: list[object], bad: list[object]) -> None:
    assert all(allowed.holds(value) for value in good) and not any(allowed.holds(value) for value in bad)


def test_a_range_says_what_it_is() -> None:
    found = [str(r) for r in (Range(0, 1), Range(0, open_low=True), Range(2, whole=True), Range(0, 1, open_high=True))]
    assert found == ["[0, 1]", "> 0", "whole numbers ≥ 2", "[0, 1)"]


@allows(a=Range(0, 1), b=("x", "y"))
class Toy(Part):
    pass


def test_values_are_checked_by_name() -> None:
    Toy.check({"a": 0.5, "b": "x", "other": object()})
    with pytest.raises(ConfigError, match=r"controller\.a out of range: 2; allowed: \[0, 1\]"):
        Toy.check({"a": 2})
    with pytest.raises(ConfigError, match=r"b in here: 'z'; allowed: x, y"):
        Toy.check({"b": "z"}, "here")
    assert Part.values == {}, "the decorator leaves the base alone"


def test_null_is_left_to_the_part() -> None:
    given = {"kind": "k", "a": None, "b": None, "c": 0}
    assert resolved(given, {"a": 1}) == {"a": 1, "c": 0} and resolved(given, None) == {"c": 0}


def test_every_kind_is_a_module_with_one_rule() -> None:
    for kind in controllers():
        if kind != "none":
            assert issubclass(controller_class(kind), Controller)
    for name in methods():
        check_drafter(method_settings(name), name)


def test_what_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no module pacer\.decoding\.controllers\.nowhere"):
        controller_class("nowhere")
    with pytest.raises(ConfigError, match=r"drafter in here.*'nowhere'.*null, model.*exit"):
        check_drafter(MethodSettings("m", "nowhere"), "here")
    two = "from pacer.decoding.controllers.base import Controller\nclass A(Controller): ...\nclass B(Controller): ...\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pair.py").write_text(two)
    (tmp_path / "mine" / "empty.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="defines 2 kinds of Controller"):
        controller_class("mine.pair")
    with pytest.raises(ConfigError, match="defines 0 kinds of Controller"):
        controller_class("mine.empty")
    assert not any(exists(name, ROOM) for name in ("nowhere", "no.such", "..", ""))


def test_a_room_names_its_modules() -> None:
    assert "model" in names(ROOM) and "model" not in names(ROOM, without=("model",))


def test_an_arm_takes_another_rule() -> None:
    """Every rule works with every drafter by one word, wherever it stands in the arm."""
    for arm in ("layerskip exits=[2] controller=svip h=0.5", "layerskip h=0.5 controller=svip exits=[2]"):
        found = method_settings(arm)
        assert found.drafter == "exit" and found.exits == [2]
        assert found.controller == {"kind": "svip", **defaults()["svip"], "h": 0.5}
    assert method_settings("pacer controller=none").controller is None
    with pytest.raises(ConfigError, match=r"controller.*svpi.*did you mean svip"):
        method_settings("sd controller=svpi")
    with pytest.raises(ConfigError, match=r"unknown key.*gamma"):
        method_settings("sd controller=svip gamma=3")
    for arm in ("sd controller=svip h=0.5", "layerskip exits=[2] controller=dynamic", "sd gamma=3", "ar"):
        found = load_settings(overrides(arm)).method
        wanted = method_settings(arm)
        assert (found.drafter, found.controller, found.exits) == (wanted.drafter, wanted.controller, wanted.exits)


def test_words_of_simple_rules_are_checked_without_torch() -> None:
    arms = "['sd gamma=3', 'svip h=0.2', 'adaedl t=0.4', 'heuristic start=2', 'threshold t=0.2', 'pacer', 'marginal']"
    code = f"import sys; from pacer.methods.arms import method_settings as m; [m(a) for a in {arms}]"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_configs_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PACER_CONF: arms and Hydra find the same files; of two of a name pacer's own counts for both."""
    for folder, name in (("method", "mine"), ("method", "sd"), ("controller", "short")):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = "kind: fixed\ngamma: 1\n" if folder == "controller" else (
            "defaults:\n  - /controller@controller: short\n  - _self_\n" f"name: {name}\ndrafter: model\n"
        )  # fmt: skip
        (tmp_path / folder / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("PACER_CONF", str(tmp_path))
    assert configs()[1:] == [tmp_path] and "mine" in methods()
    assert method_settings("mine").controller == {"kind": "fixed", "gamma": 1}
    assert load_settings(["method=mine"]).method.controller == {"kind": "fixed", "gamma": 1}
    for found in (method_settings("sd"), load_settings(["method=sd"]).method):
        assert found.controller == {"kind": "fixed", "gamma": 4}
    with pytest.raises(ConfigError, match="mine, "):
        load_settings(["method=mne"])
    monkeypatch.setenv("PACER_CONF", str(tmp_path / "nowhere"))
    with pytest.raises(SourceError, match="PACER_CONF"):
        methods()
