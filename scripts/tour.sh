#!/usr/bin/env bash
# What a newcomer does, in a fresh clone and by the README's commands; says what each step took, ends at the first that
# fails. Usage: scripts/tour.sh [FOLDER, default a temporary one]
#               TINY=1 scripts/tour.sh [FOLDER]     # in this checkout, a tiny random model in the place of SmolLM2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FOLDER="$(realpath -m "${1:-$(mktemp -d)}")"
mkdir -p "$FOLDER/logs"
PYTHON="${PACER_PYTHON:-.venv/bin/python}"
SMALL=() TINY_MODEL=()
if [ -n "${TINY:-}" ]; then
    SMALL=(+debug=one_step benchmark.score=false "paths.runs=$FOLDER/runs" "paths.cache=$FOLDER/cache")
    TINY_MODEL=(
        "model.target.id=$FOLDER/big" model.target.file=null model.target.sha256=null model.dtype=float32
        model.draft.source=null 'model.draft.layers=[0,1]' model.draft.head_size=300 trainer.precision=fp32
        corpus.parts.draft=0.6 corpus.parts.preverifier=0.25 corpus.parts.tuning=0.15
    )
fi

step() {  # NAME COMMAND …
    local began=$SECONDS code=0 log="$FOLDER/logs/$1.log"
    "${@:2}" >"$log" 2>&1 || code=$?
    printf '%-12s %5d s  %s\n' "$1" $((SECONDS - began)) "$([ $code = 0 ] && echo ok || echo "FAILED, exit code $code: $log")"
    if [ $code != 0 ]; then
        tail -n 5 "$log" >&2
        exit "$code"
    fi
}

verb() {  # NAME VERB WORDS …: with the demo's model
    step "$1" "$PYTHON" -m "pacer.$2" "${@:3}" "${TINY_MODEL[@]}" "${SMALL[@]}"
}

own() {  # two untrained models that share a tokenizer, and prompts of one's own
    "$PYTHON" - "$FOLDER" <<'MODELS'
import json, sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder, prompts = Path(sys.argv[1]), ["How many eggs are in a dozen?", "Why is the sky blue?", "Name three rivers."]
letters = Tokenizer(models.BPE())
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
letters.train_from_iterator(prompts, trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>")
for seed, (name, layers) in enumerate((("big", 3), ("small", 1))):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
(folder / "mine.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
MODELS
}

if [ -n "${TINY:-}" ]; then
    step models own
    verb demo evaluate +experiment=pacer/demo
else
    step clone git clone --quiet "file://$PWD" "$FOLDER/pacer"
    cd "$FOLDER/pacer"
    step demo make demo
    step models own
fi
verb prompt generate "Why is the sky blue?" +experiment=pacer/demo color=true
step own-model "$PYTHON" -m pacer.evaluate +experiment=pacer/demo model=local "model.target.id=$FOLDER/big" \
    "model.draft.source=$FOLDER/small" 'benchmark.arms=[ar,"sd gamma=4"]' "${SMALL[@]}"
verb own-data evaluate +experiment=pacer/demo "benchmark.sets=[$FOLDER/mine.jsonl]"
verb sweep evaluate -m +experiment=pacer/demo sampling.temperature=0,0.7 'benchmark.sets=[gsm8k]' 'benchmark.arms=[ar,pacer]'
RUN="$(grep -o '[^ ]*/trace\.jsonl' "$FOLDER/logs/demo.log" | tail -n 1)"
step table "$PYTHON" -m pacer.report +experiment=table/pacer_main "${SMALL[@]:2:1}"
step report "$PYTHON" -m pacer.report "run=${RUN%/*}" "${SMALL[@]:2:1}"
verb export export +experiment=pacer/demo export.part=draft "export.to=$FOLDER/exported"
echo "all of it: $SECONDS s, in $FOLDER"
