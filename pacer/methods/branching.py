"""Methods whose drafts are made whole and may branch: n-grams of the text, of the target's passes, of the draft's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacer.choices import DRAFTERS
from pacer.decoding.clock import Clock
from pacer.decoding.controllers.buffer import BufferRule, Enough
from pacer.decoding.controllers.preverified import Preverified
from pacer.decoding.draft_verifier import DraftVerifier
from pacer.decoding.drafters.base import drafter_class
from pacer.decoding.drafters.branching import Branching
from pacer.decoding.drafters.lookahead import Lookahead
from pacer.decoding.drafters.ouroboros import Ouroboros
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.decoding.parts import resolved
from pacer.decoding.staged import Staged
from pacer.errors import ConfigError, UnsupportedError
from pacer.methods.rules import Judge, preverifier_rule
from pacer.settings import MethodSettings, SamplingSettings

if TYPE_CHECKING:
    from pacer.assemble import Models


def is_branching(method: MethodSettings) -> bool:
    """Whether its drafter makes whole drafts."""
    name = method.drafter
    return name is not None and name not in DRAFTERS and issubclass(drafter_class(name), Branching)


def branching_decoder(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Decoder:
    """A decoder for such a method over shared models; its caches are its own.

    Raises:
        ConfigError: a length rule that it does not work with. UnsupportedError: a part is needed and there is none.
    """
    target, found = models.target, drafter_class(str(method.drafter))
    assert issubclass(found, Branching)
    rule = dict(method.controller or {})
    kind = str(rule.pop("kind", "none"))
    if kind not in (*found.rules, "none"):
        raise ConfigError(f"controller of method {method.name}", value=kind, allowed=("none", *found.rules))
    is_off = rule.get("gamma") == 0 or kind not in found.rules
    clock, reader = Clock(target.device), Lane(target, block=models.block)
    proposer: Branching | None = None
    if not is_off and found is Ouroboros:
        proposer = ouroboros(method, models, sampling, clock)
    elif not is_off:
        values = resolved(method.drafting or {}, None)
        proposer = found(target.context, target.device, clock, **rule, **values)
    return Decoder(target, proposer, sampling, models.text, reader, clock, models.block is not None)


def ouroboros(method: MethodSettings, models: Models, sampling: SamplingSettings, clock: Clock) -> Ouroboros:
    """The draft model by lookahead, and phrases behind what it writes; arguments and errors as above."""
    target, draft = models.target, models.draft
    if draft is None:
        raise UnsupportedError(f"method {method.name} needs a draft model", remedy="set model.draft")
    if sampling.temperature != 0:
        raise UnsupportedError(
            f"method {method.name} decodes greedily only", value=f"temperature={sampling.temperature}",
            allowed="sampling.temperature=0", remedy="sample with another method, such as pacer",
        )  # fmt: skip
    values = resolved(method.drafting or {}, None)
    phrases, context = values.pop("phrases"), min(target.context, draft.context)
    lookahead = Lookahead(context - 1, target.device, clock, **values)
    check = DraftVerifier(draft, target.vocab_size, sampling, models.block)
    staged = Staged(lookahead, check, _buffer_rule(method, models, check), context, clock)
    return Ouroboros(staged, lookahead, target.context, draft.context, phrases)


def _buffer_rule(method: MethodSettings, models: Models, check: DraftVerifier) -> BufferRule:
    """When the draft is long enough."""
    values = {key: value for key, value in (method.controller or {}).items() if key != "kind"}
    if "gamma" in values:
        return Enough(values["gamma"])
    judge: Judge | None = None if models.preverifier is None else (models.preverifier, models.tuned)
    rule = preverifier_rule(method.name, values, judge)
    return Preverified(check.stack, check.reader, rule, least=rule.b, whole=True)
