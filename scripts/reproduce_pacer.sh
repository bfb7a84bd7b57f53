#!/usr/bin/env bash
# PACER's tables for one pair of models: every bench, then the tables. The same command goes on where it was stopped.
# Usage: MINUTES=120 scripts/reproduce_pacer.sh [SETTINGS …]
#        PAIR=hub MINUTES=600 LAUNCHER=slurm scripts/reproduce_pacer.sh model=llama31_1b_8b
#        DRY=1 scripts/reproduce_pacer.sh     # prints the commands
# MINUTES: of measuring and of small trainings, shared out; what is built first takes its own time.
# LAUNCHER=slurm: a job per step, each after the one before; options by SBATCH_TIMELIMIT, SBATCH_GPUS, SBATCH_PARTITION …
source "$(dirname "$0")/reproduce.sh"
step env MINUTES="$(share 400)" scripts/bench_pacer.sh 20 "$PAIR" "$@"
step "$PYTHON" -m pacer.evaluate "+experiment=$EXPERIMENT" 'benchmark.sets=[humaneval,mbpp,gsm8k,cnn_dm]' \
    'benchmark.arms=[ar,pacer,ouroboros,ouroboros_pacer]' "benchmark.minutes=$(share 200)" "$@"
step env MINUTES="$(share 200)" scripts/bench_ablation.sh 8 "$@"
step env MINUTES="$(share 9)" scripts/ablate_preverifier.sh "$@"  # minutes of each of 22 variants
tables pacer_main pacer_ablation pacer_ouroboros draft_lengths
