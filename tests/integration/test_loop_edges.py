"""The loop at its edges: broken numbers, unequal vocabularies, parts that do not fit, and what the host reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pacer.decoding.build import speculative
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.request import Request
from pacer.errors import ConfigError, DecodingError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import (
    VOCAB,
    make_decoder,
    make_preverifier,
    near,
    plain_greedy,
    prompts,
    proposer,
    random_table,
    table_model,
    tiny_model,
    tiny_stack,
)

LAYERS = 2
PROMPTS = prompts([5, 14, 8, 1])
TARGET, DRAFT = tiny_stack(layers=LAYERS), Stack(near(tiny_model(layers=LAYERS)))
MODULE = make_preverifier(DRAFT)


def _requests(new: int) -> list[Request]:
    return [Request(f"r{i}", prompt, new) for i, prompt in enumerate(PROMPTS)]


def test_no_requests_no_results() -> None:
    assert make_decoder(TARGET, DRAFT, Fixed(2)).generate([]) == []


@contextmanager
def _poisoned(stack: Stack, token: int) -> Iterator[None]:
    """After ``token`` the model's logits are NaN."""
    row = stack.embedding.weight[token].clone()
    stack.embedding.weight[token] = float("nan")
    try:
        yield
    finally:
        stack.embedding.weight[token] = row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ar", "sd"])
def test_nan_logits_name_request_and_position_and_leave_nothing_behind(name: str, temperature: float) -> None:
    """L7: an error, never a token; the decoder and its caches are good for the next batch.

    In plain decoding the position is exact. NaN of a drafted token reaches the whole pass, even through a mask, so with
    drafts it is a position of the round that met it.
    """
    sampling = SamplingSettings(temperature=temperature, top_k=1)
    target = tiny_stack(layers=LAYERS)
    decoder = make_decoder(target, DRAFT, Fixed(3) if name == "sd" else None, sampling)
    output = plain_greedy(target.model, PROMPTS[0], 12)
    bad = next(t for i, t in enumerate(output) if t not in PROMPTS[0] + PROMPTS[2] + output[:i] and i >= 3)
    at = len(PROMPTS[0]) + output.index(bad) + 1
    with _poisoned(target, bad), pytest.raises(DecodingError, match="not finite for request r0: 'position") as error:
        decoder.generate([Request("r0", PROMPTS[0], 12), Request("r2", PROMPTS[2], 3)])
    named = int(re.findall(r"position (\d+)", str(error.value))[0])
    assert named == at if name == "ar" else at - 3 <= named <= at
    again = decoder.generate([Request("x", PROMPTS[3], 3), Request("y", PROMPTS[1], 9)])
    assert again[0].ids == plain_greedy(target.model, PROMPTS[3], 3), "a row shorter than the one that failed"
    assert again[1].ids == plain_greedy(target.model, PROMPTS[1], 9)


def test_nan_logits_of_the_prompt_name_the_first_position() -> None:
    target = tiny_stack()
    with _poisoned(target, PROMPTS[0][0]), pytest.raises(DecodingError, match=f"'position {len(PROMPTS[0])}'"):
        make_decoder(target).generate([Request("r0", PROMPTS[0], 12)])


def test_nan_behind_a_rejected_draft_is_an_error_or_nothing() -> None:
    """Plain decoding would never have read that token; one must not go on from its row as if it were a number."""
    target, table = Stack(table_model(random_table(6, 0))), random_table(6, 0)
    best = table.argmax(-1).tolist()
    output = [best[0]]
    for _ in range(7):
        output.append(best[output[-1]])
    wrong = next(t for t in range(6) if t not in [0, *output])
    stubborn = torch.full((6, 6), -9.0)
    stubborn[:, wrong] = 9.0
    decoder = make_decoder(target, Stack(table_model(stubborn)), Fixed(2))
    with _poisoned(target, wrong):
        try:
            assert decoder.generate([Request("t", [0], 8)])[0].ids == output
        except DecodingError as error:
            assert "not finite for request t" in str(error)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_answers_nan_changes_no_output(temperature: float) -> None:
    """Or it is an error that names it; never a wrong token."""
    draft = Stack(near(tiny_model(layers=LAYERS)))
    draft.head.weight[5] = float("nan")
    try:
        results = make_decoder(TARGET, draft, Fixed(3), SamplingSettings(temperature, top_k=1)).generate(_requests(10))
    except DecodingError as error:
        assert "draft" in str(error)
        return
    assert [r.ids for r in results] == [plain_greedy(TARGET.model, prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [VOCAB + 7, VOCAB - 7])
def test_a_draft_with_a_padded_or_shorter_vocabulary(vocab: int, temperature: float, penalty: float) -> None:
    """V57: ids that only one of the models has are padding to the other; the output stays the target's own."""
    sampling = SamplingSettings(temperature, top_k=1, repetition_penalty=penalty)
    draft = tiny_stack(layers=1, seed=5, vocab=vocab)
    rule = PreverifierRule(make_preverifier(draft), b=2, t0=0.0, gamma_max=4)
    plain = make_decoder(TARGET, sampling=sampling).generate(_requests(16))
    assert any(t >= VOCAB - 7 for r in plain for t in r.ids), "ids that the smaller draft lacks do occur"
    for controller in (Fixed(3), rule):
        results = make_decoder(TARGET, draft, controller, sampling).generate(_requests(16))
        assert [r.ids for r in results] == [r.ids for r in plain]


def test_parts_that_do_not_fit_are_refused_when_the_decoder_is_built() -> None:
    """S39."""
    drafter = proposer(make_decoder(TARGET, DRAFT, Fixed(4))).drafter
    with pytest.raises(ConfigError, match="samples otherwise"):
        speculative(TARGET, drafter, Fixed(2), SamplingSettings(temperature=1.0))
    with pytest.raises(ConfigError, match="record"):
        speculative(TARGET, drafter, PreverifierRule(MODULE, gamma_max=4))
    with pytest.raises(ConfigError, match="share"):
        speculative(TARGET, drafter, Fixed(2), share=0.0)
    with pytest.raises(ConfigError, match="gamma out of range"):
        Fixed(-1)


class HostReads(TorchDispatchMode):
    """Counts what would make a GPU wait: device values read on the host, and shapes that depend on values."""

    SYNC = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool
            for arg in args[1:2] if isinstance(arg, list | tuple) for i in arg
        )  # fmt: skip
        if name.startswith(self.SYNC) or by_mask:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_two_host_reads_per_round_at_most(batch: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever γ and batch; a rule that asks per block reads once more for each block."""
    reads, sampling = HostReads(), SamplingSettings(temperature, top_k=20, top_p=0.9, repetition_penalty=1.2)

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if args[0].device.type != "cpu" or args[0].numel():
                reads.count += 1
            return plain(*args, **kwargs)

        return read

    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, counting(getattr(Tensor, name)))
    requests = _requests(14)[:batch]
    for gamma in (1, 6):
        decoder = make_decoder(TARGET, DRAFT, Fixed(gamma), sampling)
        per_round: list[int] = []
        one_round = decoder._round

        def counted(rows: Any, on_commit: Any, one_round: Any = one_round, per_round: list[int] = per_round) -> None:
            before = reads.count
            one_round(rows, on_commit)
            per_round.append(reads.count - before)

        decoder._round = counted  # type: ignore[method-assign]  # a spy
        with reads:
            decoder.generate(requests)
        assert per_round and 1 <= max(per_round) <= 2, per_round
    rule = PreverifierRule(MODULE, b=2, t0=0.0, gamma_max=6)
    decoder = make_decoder(TARGET, DRAFT, rule, sampling)
    with reads:
        reads.count = 0
        results = decoder.generate(requests)
    rounds = max(len(r.rounds) for r in results)
    assert reads.count <= rounds * (2 + rule.gamma_max // rule.b)
