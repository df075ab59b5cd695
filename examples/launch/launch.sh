#!/bin/bash
# Ask before a launch: memest reads the very command that is launched, and runs nothing of it.
#
#   bash launch.sh axolotl train axolotl.yaml
#   GPU=a100-80gb bash launch.sh accelerate launch --config_file fsdp2.yaml train.py --bf16
#   GPU=rtx-4090 NUM_GPUS=1 bash launch.sh axolotl train axolotl.yaml
#
# Without GPU the card of this machine is asked for. axolotl, and accelerate without a file, take all
# GPUs that there are: those of this machine are counted. Where it has none, as on the machine that
# only submits, NUM_GPUS says how many. Ends with 4, and launches nothing, where the run would not
# fit; else with what the launch ends with.
set -uo pipefail
[ $# -gt 0 ] || { echo "usage: GPU=t4 bash launch.sh COMMAND ..." >&2; exit 2; }

visible="${CUDA_VISIBLE_DEVICES:-}"
if [ -z "$visible" ] && command -v nvidia-smi > /dev/null; then
    visible="$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -sd, -)" || visible=""
fi
memest fits --gpu "${GPU:-local}" ${NUM_GPUS:+--num-gpus "$NUM_GPUS"} \
    -- ${visible:+"CUDA_VISIBLE_DEVICES=$visible"} "$@"
case $? in
    0) ;;
    3) echo "tight: launched, but watch it" >&2 ;;
    4) echo "does not fit: not launched" >&2; exit 4 ;;
    *) echo "memest cannot say: launched" >&2 ;;
esac
exec "$@"
