#!/bin/bash
# Codec, then vocoder and Talker side by side. $1: where results go; TIME_S: seconds in all.
set -u
HERE=$(cd "$(dirname "$0")" && pwd); OUT=$(realpath -m "$1"); TIME_S=${TIME_S:-420}; DEVICE=${DEVICE:-cuda}; SMALL=${SMALL:-}
cd "$HERE"; BEGIN=$(date +%s)
mkdir -p "$OUT"; LOG=$OUT/run.log; : > "$LOG"
export TOKENIZERS_PARALLELISM=false PYTHONPATH=$HERE:/tmp/tts_lib OMP_NUM_THREADS=${THREADS:-4}
for wheel in wheels/*.whl; do python3 -m zipfile -e "$HERE/$wheel" /tmp/tts_lib; done
left() { echo $(( TIME_S - ($(date +%s) - BEGIN) )); }

python3 -m training.tts.train_codec --corpus corpus.npz --opus sound.ogg --out "$OUT" --device $DEVICE --time $(( TIME_S * 19 / 100 )) ${SMALL:+--smoke} >> "$LOG" 2>&1 || { tail -30 "$LOG"; exit 1; }
REST=$(( $(left) - TIME_S * 9 / 100 ))
echo "codec done, $REST s for the rest" >> "$LOG"
python3 -m training.tts.train_talker --corpus corpus.npz --tokenizer tokenizer.json --codes "$OUT/codes.npz" --out "$OUT" --device $DEVICE --time $REST --rows 6000 --workers ${WORKERS:-4} --clips 100 ${SMALL:+--smoke} > "$OUT/talker.log" 2>&1 &
TALKER=$!
python3 -m training.tts.train_wave --corpus corpus.npz --opus sound.ogg --codec "$OUT/codec.pt" --codes "$OUT/codes.npz" --out "$OUT" --device $DEVICE --time $REST ${SMALL:+--smoke} > "$OUT/wave.log" 2>&1 &
WAVE=$!
wait $TALKER; wait $WAVE
cat "$OUT/talker.log" "$OUT/wave.log" >> "$LOG"; rm -f "$OUT"/talker.log "$OUT"/wave.log "$OUT"/*.draft "$OUT"/codec.json
grep -E "Error|error:" "$LOG" | head; tail -24 "$LOG"; ls -la "$OUT"; echo "used $(( $(date +%s) - BEGIN )) s"
