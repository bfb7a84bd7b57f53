# Sourced by reproduce_*.sh: steps that are run here one after the other, printed (DRY=1) or queued (LAUNCHER=slurm).
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
MINUTES="${MINUTES:-120}"
if ! [[ $MINUTES =~ ^[0-9]*\.?[0-9]+$ && $MINUTES =~ [1-9] ]]; then
    echo "error: MINUTES: $MINUTES; allowed: > 0" >&2
    exit 2
fi
case "${LAUNCHER:-here}" in
    here) QUEUE=() ;;
    slurm) QUEUE=(sbatch --parsable scripts/verb.sbatch) ;;
    *) echo "error: LAUNCHER: $LAUNCHER; allowed: here, slurm" >&2; exit 2 ;;
esac
WORST=0

share() {  # PER MILLE: that share of the minutes
    awk -v all="$MINUTES" -v part="$1" 'BEGIN {printf "%g", all * part / 1000}'
}

step() {  # COMMAND …: where one falls short (code 1) or fails (2) the next still run; a stop (75) ends all
    local command=("${QUEUE[@]}" "$@") code=0 job
    printf '%q ' "${command[@]}" && echo
    if [ -n "${DRY:-}" ]; then return; fi
    if [ "${LAUNCHER:-here}" = slurm ]; then
        job="$("${command[@]}")"
        QUEUE=(sbatch --parsable "--dependency=afterany:${job%%;*}" scripts/verb.sbatch)
        return
    fi
    "${command[@]}" || code=$?
    if [ "$code" = 75 ]; then exit 75; fi
    if [ "$code" -gt "$WORST" ]; then WORST=$code; fi
}

tables() {  # NAME …
    for name in "$@"; do step "$PYTHON" -m pacer.report "+experiment=table/$name"; done
    exit "$WORST"
}
