#!/usr/bin/env bash
# HiSpec's tables for one model: every bench, then the tables. The same command goes on where it was stopped.
# Usage: MINUTES=120 scripts/reproduce_hispec.sh [SETTINGS …]
#        PAIR=hub MINUTES=600 LAUNCHER=slurm scripts/reproduce_hispec.sh model=layerskip_llama3_8b
#        DRY=1 scripts/reproduce_hispec.sh     # prints the commands
# MINUTES: of measuring, shared out; what is built first takes its own time.
# LAUNCHER=slurm: a job per step, each after the one before; options by SBATCH_TIMELIMIT, SBATCH_GPUS, SBATCH_PARTITION …
source "$(dirname "$0")/reproduce.sh"
step env MINUTES="$(share 150)" scripts/sweep_layers.sh 6 "$@"
step env MINUTES="$(share 350)" scripts/bench_hispec.sh 12 "$@"
step "$PYTHON" -m pacer.evaluate "+experiment=hispec/$PAIR" 'benchmark.sets=[sharegpt]' \
    'benchmark.arms=[ar,hispec,layerskip,adadecode,kangaroo,hispec_pacer]' "benchmark.minutes=$(share 150)" "$@"
step "$PYTHON" -m pacer.evaluate "+experiment=$EXPERIMENT" 'benchmark.sets=[sharegpt,cnn_dm,humaneval,gsm8k,xsum]' \
    'benchmark.arms=[ar,lookahead,sprinter]' "benchmark.minutes=$(share 150)" "$@"
step env MINUTES="$(share 200)" scripts/bench_batch.sh 32 "$@"
tables hispec_main hispec_batch hispec_sweep verification_wall
