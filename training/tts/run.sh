#!/bin/bash
# The parts of the speaker, one after another on one GPU that nobody else uses.
# $1: where results go; TIME_S: seconds in all; START: results of an earlier run, to go on from (those parts that are there).
# PARTS: which, with their seconds; the last one gets what is left: "talker:130 wave", "wave:330 encoder".
# A part that fails goes on from its last state (saved once a minute in KEEP), without CUDA graphs if it had come to none or fails again.
# Beside this file: training/, aura_omni/, wheels/, tokenizer.json, corpus.npz, sound.ogg (corpus.py).
set -u
HERE=$(cd "$(dirname "$0")" && pwd); OUT=$(realpath -m "$1"); TIME_S=${TIME_S:-550}; DEVICE=${DEVICE:-cuda}; SMALL=${SMALL:-}
START=${START:+$(realpath -m "$START")}; KEEP=$(realpath -m "${KEEP:-/tmp/aura_tts_state}"); PARTS=${PARTS:-talker:130 wave}
AHEAD_S=${AHEAD_S:-10}  # a part loads its data while the one before it still learns
LAST_S=${LAST_S:-30}    # for what comes after the training
cd "$HERE"; BEGIN=$(date +%s); END=$(( BEGIN + TIME_S ))
mkdir -p "$OUT" "$KEEP"; rm -f "$KEEP"/*; LOG=$OUT/run.log; : > "$LOG"
LIB=$(mktemp -d); export RAYON_NUM_THREADS=4 PYTHONPATH=$HERE:$LIB OMP_NUM_THREADS=${THREADS:-4} PYTHONUNBUFFERED=1
for wheel in wheels/*.whl; do [ -e "$wheel" ] && python3 -m zipfile -e "$HERE/$wheel" "$LIB"; done

# part NAME BEGIN UNTIL: a script by its own clock.
part() {
  local name=$1 begin=$2 until=$3 now eager= failed=0 status peak=5e-4 more=()
  [ "$name" != talker ] && more+=(--sound sound.ogg)
  [ "$name" = talker ] && more+=(--tokenizer tokenizer.json --clips 0) && peak=1e-3
  [ -n "$START" ] && [ -e "$START/$name.pt" ] && more+=(--resume "$START/$name.pt" --peak $peak)
  now=$(date +%s); [ "$begin" -gt "$now" ] && sleep $(( begin - now ))
  while now=$(date +%s); [ $(( until - now )) -gt 25 ]; do
    timeout -k 5 $(( END + 10 - now )) python3 -m "training.tts.train_$name" --corpus corpus.npz --out "$OUT" --device "$DEVICE" \
      --until "$until" --state "$KEEP/$name.state" "${more[@]}" $eager ${SMALL:+--smoke} >> "$OUT/$name.part" 2>&1 && return
    status=$?; failed=$(( failed + 1 ))
    { [ -e "$KEEP/$name.state" ] && [ $failed -lt 2 ]; } || eager=--eager
    echo "$name failed ($status) after $(( $(date +%s) - BEGIN )) s; again ${eager:-from its state}" | tee -a "$LOG" >> "$OUT/$name.part"
    [ $failed -lt 4 ] || return
  done
}
at=$BEGIN names=()
for entry in $PARTS; do
  name=${entry%%:*} until=$(( END - LAST_S )); names+=("$name")
  [[ $entry == *:* ]] && until=$(( at + ${entry##*:} ))
  part "$name" $(( at > BEGIN ? at - AHEAD_S : BEGIN )) $until &
  at=$until
done
wait
for name in "${names[@]}"; do [ -e "$OUT/$name.part" ] && { echo "== $name"; cat "$OUT/$name.part"; } >> "$LOG"; done
rm -rf "$OUT"/*.part "$OUT"/*.draft "$LIB"
grep -E "Error|failed" "$LOG" | head
for name in "${names[@]}"; do sed -n "/^== $name/,/^==/p" "$LOG" | grep -v "^==" | tail -9; done
ls -la "$OUT"; echo "used $(( $(date +%s) - BEGIN )) s"
