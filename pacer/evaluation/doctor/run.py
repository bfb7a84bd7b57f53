"""All checks, one after the other, and what they found in order of likely effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from pacer.assemble import attach_preverifier, checkpoint_folder, load_target, make_decoder, needed_ids
from pacer.decoding.request import Request
from pacer.errors import ConfigError, DecodingError, MismatchError
from pacer.evaluation.doctor import gather, identity, layers, limits, numerics, preverifier, training
from pacer.evaluation.doctor.findings import REFUSED, UNMEASURED, Finding, ranked
from pacer.evaluation.doctor.gather import Case
from pacer.evaluation.doctor.measure import agreement, share
from pacer.models.checkpoint import load_checkpoint
from pacer.models.preverifier import KIND
from pacer.models.sources import fetch, load_tokenizer
from pacer.settings import MethodSettings, SamplingSettings, Settings, SourceSettings
from pacer.work.stopping import check_stop

Answer = list[Finding] | str  # findings, or why it was not checked


def examine(settings: Settings) -> dict[str, Any]:
    """Everything that was measured: acceptance, findings by effect, what was checked and what was not, and why."""
    cache = settings.paths.cache_folder
    case = Case(settings, cache, load_target(settings.model, cache), gather.choose_prompts(settings))
    gather.find_draft(case)
    gather.find_corpus(case)
    report: dict[str, Any] = {"draft": gather.name(case), "acceptance": None, "checked": [], "not_checked": {}}
    findings: list[Finding] = []
    try:
        case.texts = gather.write(case, gather.templated(case))
        findings += _tokenizer(case)
        if not findings:
            case.models.draft = gather.load_draft(case)
    except DecodingError as error:
        remedy = "set model.dtype=bfloat16 or float32"
        findings.append(Finding("dtype", f"{error.what} in {settings.model.dtype}", {}, REFUSED, remedy))
    except MismatchError as error:
        what = error.what if error.value is None else f"{error.what}: {error.value!r}"
        findings.append(Finding("stale", what, {}, REFUSED, error.remedy or "train the draft again for this target"))
    own = torch.zeros(0)
    if case.models.draft is not None:
        own = agreement(case.models.draft, case.texts, case.models.target.vocab_size)
        report |= _measured(case, own)
    _run_checks(case, own, report, findings)
    report["findings"] = [asdict(finding) for finding in ranked(findings)]
    return report


def _measured(case: Case, own: Tensor) -> dict[str, Any]:
    parts = own.split([len(text.output_ids) for text in case.texts])
    tasks = {
        text.task: [p for t, p in zip(case.texts, parts, strict=True) if t.task == text.task] for text in case.texts
    }
    return {
        "acceptance": share(own), "tokens": len(own), "prompts": len(case.texts),
        "acceptance_by_task": {task: share(torch.cat(hits)) for task, hits in tasks.items()},
        "acceptance_by_context": limits.by_length(own, limits.lengths(case.texts)),
    }  # fmt: skip


def _run_checks(case: Case, own: Tensor, report: dict[str, Any], findings: list[Finding]) -> None:
    """Runs what can be; a check that needs a draft or texts there are not is named with the reason."""
    for name, check in _checks(case, own).items():
        if name == "tokenizer":
            answer: Answer = []  # it came before the draft was loaded
        elif case.models.draft is None and name not in ("data",):
            answer = "the draft cannot be used with this target"
        else:
            answer = check()
        if isinstance(answer, str):
            report["not_checked"][name] = answer
        else:
            report["checked"].append(name)
            findings += answer
        check_stop()
    if case.models.draft is not None:
        explained = max((finding.effect for finding in findings), default=0.0)
        findings += identity.recorded(case.config, case.texts, own, explained)
        recorded = "val/agreement" in (case.config.get("validation") or {})
        if recorded:
            report["checked"].append("stale")
        else:
            report["not_checked"]["stale"] = "no agreement was recorded when the draft was made"


def _checks(case: Case, own: Tensor) -> Mapping[str, Callable[[], Answer]]:
    return {
        "tokenizer": lambda: [],
        "head": lambda: _head(case),
        "settings": lambda: _declared(case),
        "layers": lambda: _layers(case),
        "readout": lambda: numerics.readout(_draft(case), case.models.target, case.texts),
        "dtype": lambda: _dtype(case),
        "template": lambda: _template(case, own),
        "data": lambda: _data(case),
        "context": lambda: _context(case, own),
        "pre-verifier": lambda: _preverifier(case),
        "costs and window": lambda: _window(case),
        "sampling": lambda: _sampling(case),
    }


def _draft(case: Case) -> Any:
    assert case.models.draft is not None
    return case.models.draft


def _tokenizer(case: Case) -> list[Finding]:
    """Before the draft is loaded, which would refuse the pair without figures."""
    models, draft = case.models, case.settings.model.draft
    if draft.kind != "model":
        size = models.target.vocab_size
        return identity.tokenizer(models.tokenizer, models.tokenizer, (size, size), case.texts)
    if draft.source is None:
        raise ConfigError("model.draft.source is not set", allowed="a hub id or a folder with a causal LM")
    trusted = case.settings.model.target.trust_remote_code
    folder = fetch(SourceSettings(id=draft.source, trust_remote_code=trusted), case.cache)
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(folder, trust_remote_code=trusted).vocab_size
    sizes = (models.target.vocab_size, size)
    return identity.tokenizer(models.tokenizer, load_tokenizer(folder, trusted), sizes, case.texts)


def _head(case: Case) -> Answer:
    draft = _draft(case)
    if draft.head_ids is None:
        return "the draft's head has every id"
    full = gather.load_draft(case, full_head=True)
    return identity.head(draft, full, case.texts, needed_ids(case.models), case.models.target.vocab_size)


def _declared(case: Case) -> Answer:
    if case.draft_folder is None:
        return "the draft is no checkpoint of layers"
    vocab = case.models.target.vocab_size
    head_ids = load_checkpoint(case.draft_folder, case.config["kind"])[0]["head_ids"]
    return identity.declared(case.config, len(head_ids), case.settings.model.draft, vocab)


def _layers(case: Case) -> Answer:
    chosen, target = case.settings.model.draft, case.models.target
    if case.untrained:
        found = layers.choice(target, chosen.layers, case.texts)
        what = "the draft is untrained: layers of the target as they are"
        return [*found, Finding("layers", what, {}, UNMEASURED, "train it: python -m pacer.train trainer=draft …")]
    if chosen.kind == "skip":
        return layers.choice(target, chosen.layers, case.texts)
    if chosen.kind != "layers":
        return "the draft is a model of its own"
    return layers.order(_draft(case), target, case.config["layers"], case.texts)


def _dtype(case: Case) -> Answer:
    chosen, vocab = case.settings.model.draft, case.models.target.vocab_size
    if (chosen.dtype or case.settings.model.dtype) == "float32" and chosen.quantise is None:
        return "the draft is in float32"
    key = "model.draft.dtype" if chosen.dtype else "model.dtype"
    return numerics.dtype(_draft(case), gather.load_draft(case, exact=True), case.texts, vocab, chosen.quantise, key)


def _template(case: Case, own: Tensor) -> Answer:
    draft, vocab, tokenizer = _draft(case), case.models.target.vocab_size, case.models.tokenizer
    if not tokenizer.chat_template:
        return "the tokenizer has no chat template"
    found = training.plain_text(own, agreement(draft, gather.write(case, gather.without_template(case)), vocab))
    inside = [text for text in case.corpus if max(text.prompt_ids + text.output_ids) < vocab]
    if inside:
        found += training.corpus_template(tokenizer, inside, own, agreement(draft, inside, vocab))
    return found


def _data(case: Case) -> Answer:
    if not case.corpus:
        return "no corpus yet: it is made by the first training"
    return training.own_text(case.models.target, case.corpus, case.settings.sampling.temperature == 0)


def _context(case: Case, own: Tensor) -> Answer:
    return limits.context(own, limits.lengths(case.texts), _draft(case).context, case.longest)


def _preverifier(case: Case) -> Answer:
    settings, models = case.settings, case.models
    if (settings.method.controller or {}).get("kind") != "preverifier":
        return "method has no pre-verifier"
    source = settings.preverifier.source
    stages = gather.latest(settings, "preverifier", {"preverifier": asdict(settings.preverifier)})
    folders = [checkpoint_folder(source)] if source else [stage / "preverifier" for stage in stages]
    for folder in folders:
        try:
            attach_preverifier(models, folder)
            break
        except MismatchError as error:
            if source:
                remedy = error.remedy or "train it again"
                return [Finding("pre-verifier", f"{error.what}: {error.value!r}", {}, REFUSED, remedy)]
    if models.preverifier is None:
        return "no pre-verifier of these settings and this draft yet"
    own = models.preverifier.settings
    pairs = [(t, r) for t, r in gather.rounds(case, own.gamma_max) if bool(r.labels(own.label)[1].any())]
    if not pairs:
        return "no rounds to judge"
    config = load_checkpoint(folder, KIND)[1]
    return preverifier.judgement(models.preverifier, config, pairs)[1]


def _window(case: Case) -> Answer:
    controller = case.settings.method.controller or {}
    gamma = controller.get("gamma") if controller.get("kind") == "fixed" else None
    most = max(gamma or 0, case.settings.labels.gamma)
    rounds = [rounds for _, rounds in gather.rounds(case, most)]
    if not rounds:
        return "the target's texts are too short for rounds"
    return limits.window(rounds, gamma, case.settings.costs, most)


def _sampling(case: Case) -> Answer:
    chosen = case.settings.sampling
    if replace(chosen, seed=0) == SamplingSettings():
        return "decoding is greedy, without a penalty"
    method = MethodSettings("sd", controller={"kind": "fixed", "gamma": 1})
    stops = frozenset(case.models.stop_ids)
    requests = [Request(t.id, t.prompt_ids, gather.budget(case.settings), stops) for t in case.texts]

    def accept(sampling: SamplingSettings) -> Tensor:
        decoder = make_decoder(method, case.models, sampling)
        rounds: list[Any] = [line for request in requests for line in decoder.generate([request])[0].rounds]
        return torch.tensor([line["accepted"][-1] > 0 for line in rounds if line["drafted"]])

    return limits.sampling(chosen, accept)
