"""The library without a command line: the same experiments, settings and parts as the verbs.

import pacer

d = pacer.load("pacer/smollm2", arms=["ar", "pacer", "sd gamma=2"])
for out in d.generate(["Why is the sky blue?"], arm="pacer", max_new_tokens=64):
    print(out.text, out.tokens_per_verify)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pacer.assemble import Models, make_decoder
from pacer.command.app import load_settings
from pacer.decoding.loop import Decoder
from pacer.errors import ConfigError
from pacer.generate import request_of
from pacer.methods.arms import method_settings
from pacer.settings import MethodSettings, SamplingSettings, Settings
from pacer.stages.build import build


@dataclass(frozen=True)
class Generation:
    """What became of a prompt.

    Attributes:
        text, ids: new tokens alone; special tokens are not in the text.
        finish: eos | length | stop_string | context.
        seconds: its share of the wall time of the call; latency: the wall time until it ended.
        rounds: the trace, a line per target pass (schema: `pacer.decoding.trace`); the first is the prefill.
    """

    text: str
    ids: list[int]
    finish: str
    seconds: float
    latency: float
    rounds: list[dict[str, Any]] = field(repr=False)

    @property
    def tokens_per_verify(self) -> float | None:
        """Tokens emitted per target pass after the prefill (τ); None where there was no such pass."""
        passes = len(self.rounds) - 1
        return (len(self.ids) - len(self.rounds[0]["emitted"])) / passes if passes > 0 else None


class Pacer:
    """Loaded models and the methods that decode with them; made by :func:`load`.

    Models are shared between methods, caches never. Greedy output of an exact method is the target's own.
    """

    def __init__(self, settings: Settings, methods: dict[str, MethodSettings], models: Models) -> None:
        self.settings, self.methods, self.models = settings, methods, models
        self._decoders: dict[tuple[str, str], Decoder] = {}

    @property
    def arms(self) -> list[str]:
        """Names that :meth:`generate` takes, the default first."""
        return list(self.methods)

    def generate(
        self,
        prompts: str | Sequence[str],
        arm: str | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        chat: bool | None = None,
        rows: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> list[Generation]:
        """Continue prompts.

        Args:
            prompts: texts of a user; one is as good as a list of one.
            arm: one of :attr:`arms`; None: the first.
            max_new_tokens, chat: None: as the settings' ``generate`` block says. chat: in the model's chat template.
            rows: prompts decoded at once; the others wait. None: all.
            temperature, top_k, top_p, repetition_penalty, seed: None: as the settings' ``sampling`` block says. A
                prompt's random numbers follow from the seed and its place in the list.

        Returns:
            One generation per prompt, in order.

        Raises:
            ConfigError: an arm that was not loaded, a value out of its range. UnsupportedError: sampling that a method
                cannot do.
        """
        name = self.arms[0] if arm is None else arm
        if name not in self.methods:
            raise ConfigError("arm is not loaded", value=name, allowed=self.arms, remedy=f"load(…, arms=[…, {name!r}])")
        given: dict[str, Any] = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty,
            "seed": seed,
        }  # fmt: skip
        chosen = replace(self.settings.sampling, **{key: value for key, value in given.items() if value is not None})
        own = self.settings.generate
        asked = replace(
            own, max_new_tokens=max_new_tokens or own.max_new_tokens, stop=list(stop) or own.stop,
            chat=own.chat if chat is None else chat,
        )  # fmt: skip
        texts = [prompts] if isinstance(prompts, str) else prompts
        requests = [request_of(f"generate-{i}", text, self.models, asked) for i, text in enumerate(texts)]
        results = self._decoder(name, chosen).generate(requests, slots=rows)
        return [Generation(self.models.text(r.ids), r.ids, r.finish, r.seconds, r.latency, r.rounds) for r in results]

    def _decoder(self, name: str, sampling: SamplingSettings) -> Decoder:
        key = (name, repr(sampling))
        if key not in self._decoders:
            self._decoders[key] = make_decoder(self.methods[name], self.models, sampling)
        return self._decoders[key]


def load(experiment: str, *overrides: str, arms: Sequence[str] = ()) -> Pacer:
    """Models and methods of an experiment, ready to generate; what a method lacks is fetched and trained first.

    Args:
        experiment: a name of conf/experiment, such as ``pacer/smollm2``.
        overrides: words of a verb's command line, such as ``threads=2`` or ``model.dtype=float32``.
        arms: methods as `benchmark.arms` names them; (): the experiment's own method, and plain decoding.

    Raises:
        PacerError: a name, key or value that does not fit, or a source that cannot be read.
    """
    settings = load_settings([f"+experiment={experiment}", *overrides])
    own = {settings.method.name: settings.method, "ar": method_settings("ar")}
    methods = {arm: method_settings(arm) for arm in arms} or own
    return Pacer(settings, methods, build(settings, list(methods.values())))
