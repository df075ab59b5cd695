#!/bin/bash
# A Slurm TaskProlog: tells every job, before it starts, whether its training fits the GPU it got.
#
#   slurm.conf:  TaskProlog=/etc/slurm/task_prolog.sh
#   a job says what it trains:
#     sbatch --export=ALL,MEMEST_FITS="gpt2 --batch 8 --bf16" train.sbatch
#   and, if it would rather not start than run out of memory:
#     MEMEST_CANCEL=1
#
# Slurm runs it as the job's user; lines that begin with "print " go to the job's output. It always
# ends with 0: a prolog that fails would drain the node, and a wrong prediction must not do that.

say() { printf 'print memest: %s\n' "$*"; }

[ -n "${MEMEST_FITS:-}" ] || exit 0
[ "${SLURM_PROCID:-0}" = 0 ] || exit 0  # once a job is enough
if ! command -v memest > /dev/null; then
    say "not installed on $(hostname)"
    exit 0
fi

# words as the job wrote them, quotes respected, nothing expanded or run
words=()
while IFS= read -r word; do words+=("$word"); done < <(xargs -n 1 printf '%s\n' <<< "$MEMEST_FITS")

# the GPU: named by the job, else asked of the driver
case " $MEMEST_FITS " in
    *" --gpu "* | *" --gpu="* | *" --gpu-memory"* | *" --fail-over"*) ;;
    *)
        name="${MEMEST_GPU:-}"
        if [ -z "$name" ] && command -v nvidia-smi > /dev/null; then
            name="$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)"
        fi
        if [ -z "$name" ]; then
            say "no GPU named, and no NVIDIA driver to ask"
            exit 0
        fi
        words+=(--gpu "$name")
        ;;
esac

answer="$(memest fits "${words[@]}" 2>&1)"
code=$?
while IFS= read -r line; do say "$line"; done <<< "$answer"
if [ "$code" = 4 ] && [ "${MEMEST_CANCEL:-0}" = 1 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    say "cancelled: it would run out of memory"
    scancel "$SLURM_JOB_ID"
fi
exit 0
