#!/usr/bin/env bash
# One resumable training run on a GPU, and its evaluation through the serving stage.
#   DATA=folder of words/ and photos.npz  TIME_S=560  RESUME=folder  training/aura/run_gpu.sh OUT
#   SPEED=1: only says what a step is made of
set -euo pipefail
out=$1
checkpoint=${CHECKPOINT:-$out/checkpoint}
mkdir -p "$out"
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false PYTHONPATH=.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # no two steps have the same shapes
if [ "${SPEED:-0}" -gt 0 ]; then
  for rows in 10240 20480 40960; do
    echo "$rows rows"
    timeout "${TIME_S:-60}" python3 -m training.aura.speed --words "$DATA/words" --photos "$DATA/photos.npz" --rows "$rows"
  done 2>&1 | tee "$out/speed.txt"
  exit
fi
python3 -m training.aura.train "$out" --words "$DATA/words" --photos "$DATA/photos.npz" --checkpoint "$checkpoint" \
  --time-s "${TIME_S:-300}" --rows "${ROWS:-40960}" --rate "${RATE:-1.5e-3}" --workers "${WORKERS:-10}" \
  --save-every-s "${SAVE_S:-120}" --steps "${STEPS:-1000000}" ${RESUME:+--resume "$RESUME"} ${NEW_POSITIONS:+--new-positions} \
  2>&1 | tail -n 200
if [ "${LOOKS:-0}" -gt 0 ]; then
  timeout "${SERVE_S:-60}" python3 -m training.aura.serve "$checkpoint" --photos "$DATA/photos.npz" --looks "$LOOKS" \
    --sessions "${SESSIONS:-12}" | tee "$out/served.json"
fi
