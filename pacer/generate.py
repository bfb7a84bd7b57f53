"""``python -m pacer.generate "prompt" +experiment=…``: continue a prompt, streaming."""

from __future__ import annotations

import sys

from pacer.app import verb
from pacer.errors import ConfigError
from pacer.settings import Settings


@verb(positional="generate.prompt")
def main(settings: Settings) -> None:
    """Continues a prompt with `method` and streams the text; the words before the first override are the prompt.

    `-` reads standard input; color=true shows where each token comes from, with the controller's scores.
    """
    if not settings.generate.prompt:
        raise ConfigError("no prompt", remedy='give one: python -m pacer.generate "Why is the sky blue?" …')
    from pacer.assemble import make_decoder
    from pacer.data.prompts import encode
    from pacer.decoding.request import Request
    from pacer.reporting.streaming import Painter, PlainText, summary
    from pacer.stages import build

    chosen = settings.generate
    models = build(settings, [settings.method])
    decoder = make_decoder(settings.method, models, settings.sampling)
    prompt = str(chosen.prompt)
    ids = encode(prompt, models.tokenizer) if chosen.chat else models.tokenizer(prompt)["input_ids"]
    request = Request("generate", ids, chosen.max_new_tokens, frozenset(models.stop_ids), tuple(chosen.stop))
    writer = Painter(models.tokenizer, sys.stdout) if chosen.color else PlainText(models.tokenizer, sys.stdout)
    result = decoder.generate([request], on_commit=lambda _, line: writer.write(line))[0]
    writer.close()
    print(summary(result, settings.method), file=sys.stderr)


if __name__ == "__main__":
    main()
