#!/usr/bin/env bash
# One resumable training run on a GPU, and its evaluation through the serving stage.
#   DATA=folder of words/ and photos.npz  TIME_S=500  RESUME=folder  EXACT=folder  training/aura/run_gpu.sh OUT
#   SPEED=1: only says what a step is made of, TIME_S at most for each number of rows
set -euo pipefail
out=$1
checkpoint=${CHECKPOINT:-$out/checkpoint}
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=. PYTHONUNBUFFERED=1
workers=${WORKERS:-4}
if [ "${SPEED:-0}" -gt 0 ]; then
  speed() {
    echo "== $*"
    timeout -k 5 "$1" python3 -m training.aura.speed --words "$DATA/words" --photos "$DATA/photos.npz" --workers "$workers" "${@:2}" \
      || echo "== ended with $? (124: out of time)"
  }
  {
    for rows in 10240 20480 40960; do speed "${TIME_S:-60}" --rows "$rows" --run-s 6 --kernels $((rows == 20480 ? 18 : 0)); done
    speed "${COMPILE_S:-180}" --rows 20480 --run-s 8 --kernels 18 --compile
  } 2>&1 | tee "$out/speed.txt"
  exit
fi
python3 -m training.aura.train "$out" --words "$DATA/words" --photos "$DATA/photos.npz" --checkpoint "$checkpoint" \
  --time-s "${TIME_S:-300}" --rows "${ROWS:-20480}" --rate "${RATE:-1.5e-3}" --workers "$workers" --save-every-s "${SAVE_S:-60}" \
  --steps "${STEPS:-1000000}" ${RESUME:+--resume "$RESUME"} ${EXACT:+--exact "$EXACT"} ${COMPILE:+--compile} ${ALL_PAIRS:+--all-pairs} \
  ${NEW_POSITIONS:+--new-positions} 2>&1 | tee "$out/console.txt"
if [ "${LOOKS:-0}" -gt 0 ]; then
  timeout "${SERVE_S:-60}" python3 -m training.aura.serve "$checkpoint" --photos "$DATA/photos.npz" --looks "$LOOKS" \
    --sessions "${SESSIONS:-12}" | tee "$out/served.json"
fi
