#!/bin/bash
# Vocoder and Talker side by side, and from the second run on the encoders of references too.
# $1: where results go; TIME_S: seconds in all; START: results of an earlier run, to go on from (with encoders).
# Beside this file: training/, aura_omni/, wheels/, tokenizer.json, corpus.npz, sound.ogg (corpus.py).
set -u
HERE=$(cd "$(dirname "$0")" && pwd); OUT=$(realpath -m "$1"); TIME_S=${TIME_S:-550}; DEVICE=${DEVICE:-cuda}; SMALL=${SMALL:-}; START=${START:+$(realpath -m "$START")}
cd "$HERE"; BEGIN=$(date +%s); END=$(( BEGIN + TIME_S ))
mkdir -p "$OUT"; LOG=$OUT/run.log; : > "$LOG"
LIB=$(mktemp -d); export RAYON_NUM_THREADS=4 PYTHONPATH=$HERE:$LIB OMP_NUM_THREADS=${THREADS:-2} PYTHONUNBUFFERED=1
for wheel in wheels/*.whl; do [ -e "$wheel" ] && python3 -m zipfile -e "$HERE/$wheel" "$LIB"; done

# part NAME SECONDS_BEFORE_THE_END ARGUMENTS: a script by its own clock. If its CUDA graphs fail it starts again without them.
part() {
  local name=$1 until=$(( END - $2 )); shift 2
  local run=(python3 -m "training.tts.train_$name" --corpus corpus.npz --out "$OUT" --device "$DEVICE" --until $until "$@" ${SMALL:+--smoke})
  timeout $(( END + 10 - $(date +%s) )) "${run[@]}" > "$OUT/$name.part" 2>&1 && return
  { grep -E "Error|error" "$OUT/$name.part" | tail -5; echo "$name failed after $(( $(date +%s) - BEGIN )) s; again without graphs"; } >> "$LOG"
  [ $(( until - $(date +%s) )) -gt 40 ] && timeout $(( END + 10 - $(date +%s) )) "${run[@]}" --eager >> "$OUT/$name.part" 2>&1
}
part wave ${WAVE_END:-30} --sound sound.ogg ${START:+--resume "$START/wave.pt" --peak 5e-4} &
WAVE=$!
part talker ${TALKER_END:-75} --tokenizer tokenizer.json ${START:+--resume "$START/talker.pt" --peak 1e-3} &
TALKER=$!
ENCODER=
if [ -n "${START:-}" ]; then
  EARLIER=; [ -e "$START/encoder.pt" ] && EARLIER=$START/encoder.pt
  part encoder ${WAVE_END:-30} --sound sound.ogg ${EARLIER:+--resume "$EARLIER"} &
  ENCODER=$!
fi
wait $WAVE $TALKER $ENCODER
for name in talker wave encoder; do [ -e "$OUT/$name.part" ] && { echo "== $name"; cat "$OUT/$name.part"; } >> "$LOG"; done
rm -rf "$OUT"/*.part "$OUT"/*.draft "$LIB"
grep -E "Error|failed" "$LOG" | head; for name in talker wave encoder; do sed -n "/^== $name/,/^==/p" "$LOG" | grep -v "^==" | tail -9; done; ls -la "$OUT"; echo "used $(( $(date +%s) - BEGIN )) s"
