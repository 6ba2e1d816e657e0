#!/usr/bin/env bash
# The first ten minutes of the patches on a GPU, in one command:
#
#   bash benchmarks/gpu/first_run.sh h200-sxm-141gb            name of a GPU of the catalogue, or a profile
#   bash benchmarks/gpu/first_run.sh h200-sxm-141gb --cpu      the same programs with a tiny model, without a GPU
#
# Trains Megatron-core without patches, with each patch alone that one GPU can run (all but stage_grids, which needs
# three) and with all together. Leaves in results/first_run
# (or in $FIRST_RUN_OUT) one JSON line per case - losses, time, peak memory, share of copies beside kernels - and
# report.txt: losses against those without patches, time and memory against `predict`. Needs torch, megatron-core
# and this repository on Python's path; ends by itself before the ten minutes are over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

gpu=${1:?which GPU? e.g. h200-sxm-141gb}
device=cuda steps=5
if [ "${2:-}" = --cpu ]; then device=cpu steps=1; fi
out=${FIRST_RUN_OUT:-results/first_run}
mkdir -p "$out"
export PYTHONPATH=$PWD:$PWD/patches${PYTHONPATH:+:$PYTHONPATH}
touch "$out/offload.jsonl"
# What is needed at the end is missed now, not after minutes of GPU time: the tuner, and the name of the GPU.
python benchmarks/gpu/compare.py "$out/offload.jsonl" --gpu "$gpu" > /dev/null
if [ "$device" = cuda ]; then nvidia-smi | tee "$out/nvidia-smi.txt"; fi

end=$((SECONDS + 540)) status=3
: > "$out/report.txt"
# Status 3: a case broke the GPU for its process; another one goes on behind that case.
while [ "$status" = 3 ] && [ "$SECONDS" -lt $((end - 60)) ]; do
  status=0
  timeout $((end - SECONDS)) python benchmarks/gpu/megatron_offload.py --out "$out/offload.jsonl" \
    --device "$device" --steps "$steps" --budget-s $((end - SECONDS - 60)) | tee -a "$out/report.txt" || status=$?
done
python benchmarks/gpu/compare.py "$out/offload.jsonl" --gpu "$gpu" | tee -a "$out/report.txt"
exit "$status"
