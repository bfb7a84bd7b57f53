"""``python -m pacer.generate "prompt" +experiment=…``: continue a prompt, streaming."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pacer.command.app import verb
from pacer.errors import ConfigError
from pacer.settings import GenerateSettings, Settings

if TYPE_CHECKING:
    from pacer.assemble import Models
    from pacer.decoding.request import Request


@verb(positional="generate.prompt")
def main(settings: Settings) -> None:
    """Continues a prompt with `method` and streams the text; the words before the first override are the prompt.

    `-` reads standard input; color=true shows where each token comes from, with the controller's scores.
    """
    if not settings.generate.prompt:
        raise ConfigError("no prompt", remedy='give one: python -m pacer.generate "Why is the sky blue?" …')
    from pacer.assemble import make_decoder
    from pacer.reporting.streaming import Painter, PlainText, summary
    from pacer.stages.build import build

    chosen = settings.generate
    models = build(settings, [settings.method])
    decoder = make_decoder(settings.method, models, settings.sampling)
    request = request_of("generate", str(chosen.prompt), models, chosen)
    writer = Painter(models.tokenizer, sys.stdout) if chosen.color else PlainText(models.tokenizer, sys.stdout)
    result = decoder.generate([request], on_commit=lambda _, line: writer.write(line))[0]
    writer.close()
    print(summary(result, settings.method), file=sys.stderr)


def request_of(name: str, prompt: str, models: Models, asked: GenerateSettings) -> Request:
    """What a user asks for, as a request of this name."""
    from pacer.data.prompts import encode
    from pacer.decoding.request import Request

    ids = encode(prompt, models.tokenizer) if asked.chat else list(models.tokenizer(prompt)["input_ids"])
    return Request(name, ids, asked.max_new_tokens, frozenset(models.stop_ids), tuple(asked.stop))


if __name__ == "__main__":
    main()
