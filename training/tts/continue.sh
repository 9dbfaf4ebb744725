#!/bin/bash
# Goes on from start/{wave,judges,talker}.pt. $1: where results go; TIME_S: seconds in all. Beside this file: training/, aura_omni/,
# wheels/, start/, tokenizer.json; many.npz with many_codes.npz (all coded clips, by encode.py) for the Talker; corpus.npz with
# sound.ogg, codes.npz and predicted.npz (some of those clips, by encode.py, corpus.py and predict.py) for the vocoder.
set -u
HERE=$(cd "$(dirname "$0")" && pwd); OUT=$(realpath -m "$1"); TIME_S=${TIME_S:-570}; DEVICE=${DEVICE:-cuda}; SMALL=${SMALL:-}
cd "$HERE"; BEGIN=$(date +%s); REST=$(( TIME_S - 45 ))
mkdir -p "$OUT"; LOG=$OUT/run.log; : > "$LOG"
export TOKENIZERS_PARALLELISM=false PYTHONPATH=$HERE:/tmp/tts_lib OMP_NUM_THREADS=${THREADS:-4}
for wheel in wheels/*.whl; do [ -e "$wheel" ] && python3 -m zipfile -e "$HERE/$wheel" /tmp/tts_lib; done

python3 -m training.tts.train_talker --corpus many.npz --codes many_codes.npz --tokenizer tokenizer.json --resume start/talker.pt --out "$OUT" --device $DEVICE --time $REST --rows 6000 --share 0.5 --peak 1e-3 --workers ${WORKERS:-6} --clips 100 ${SMALL:+--smoke} > "$OUT/talker.log" 2>&1 &
TALKER=$!
python3 -m training.tts.train_wave --corpus corpus.npz --opus sound.ogg --codec start/wave.pt --judges start/judges.pt --codes codes.npz --predicted predicted.npz --out "$OUT" --device $DEVICE --time $REST --judged 0 --peak 7e-4 ${SMALL:+--smoke} > "$OUT/wave.log" 2>&1 &
WAVE=$!
wait $TALKER; wait $WAVE
cat "$OUT/talker.log" "$OUT/wave.log" >> "$LOG"; rm -f "$OUT"/talker.log "$OUT"/wave.log "$OUT"/*.draft
grep -E "Error|error:" "$LOG" | head; tail -20 "$LOG"; ls -la "$OUT"; echo "used $(( $(date +%s) - BEGIN )) s"
