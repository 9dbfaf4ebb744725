#!/usr/bin/env bash
# run.sh OUT: trains the small recogniser for TIME_S seconds; OUT/asr gets the checkpoint, files.tar and resume/ (five files).
#   PART=1/2: the first half of the schedule; PART=2/2 goes on from KEEP, where the first left its state and its speech.
#   RESUME=FOLDER goes on from another folder (OUT/asr of an earlier run, with files.tar unpacked there), or from its weights alone.
#   A run that fails goes on from its last state (once a minute), without graphs if it had come to none or fails again.
#   SPEED=1 only says what a step costs. WORKERS: processes that speak.
set -euo pipefail
started=$(date +%s) before=$PWD
here=$(cd "$(dirname "$0")" && pwd)
out=$1/asr
mkdir -p "$out"
out=$(cd "$out" && pwd)
part=${PART:-1/1} keep=${KEEP:-/tmp/aura_asr}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar xJf "$here/data/bundle.tar.xz" -C "$work"
for name in english asked; do gunzip -c "$here/data/$name.txt.gz" > "$work/$name.txt"; done
for name in piper festival recorded heldout; do ln -s "$here/data/$name" "$work/$name"; done
if ! PYTHONPATH="$here/code" python3 -c 'import soundfile, soxr, tokenizers, safetensors' 2>/dev/null; then
  python3 -m pip install -q --no-index --no-deps --target "$work/site" "$here"/whl/*.whl
fi
export PYTHONPATH="$here/code:$work/site" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
cd "$here/code"  # python3 -m looks into the current folder first
left() { echo $((${TIME_S:-550} - $(date +%s) + started)); }
if [ "${SPEED:-0}" -gt 0 ]; then
  timeout -k 5 "$(($(left) + 15))" python3 -u -m training.asr.speed "$out" --data "$work" --time-s "$(left)" \
    ${SIZES_S:+--sizes-s $SIZES_S} 2>&1 | tee "$out/speed.txt" || true
  rm -f "$out"/*.json "$out"/merges.txt
  exit
fi
case $part in
  1/*) rm -rf "$keep"; resume=${RESUME:-} ;;
  *) resume=${RESUME:-$keep} ;;
esac
[ -z "$resume" ] || resume=$(cd "$before" && realpath "$resume")
eager=${EAGER:+--eager} failed=0
while :; do
  status=0
  timeout -k 5 "$(($(left) + 20))" python3 -u -m training.asr.train "$out" --data "$work" --time-s "$(left)" --part "$part" --keep "$keep" \
    --seed "$((${SEED:-${part%%/*}} + 10 * failed))" --workers "${WORKERS:-13}" --batch-s "${BATCH_S:-400}" --clips "${CLIPS:-400000}" \
    --hours "${HOURS:-140}" --heldout-clips "${HELDOUT_CLIPS:-10000}" ${PEAK:+--peak "$PEAK"} $eager ${resume:+--resume "$resume"} 2>&1 &
  task=$!
  wait $task || status=$?
  kill -- -$task 2>/dev/null || true  # the processes that spoke for it, if it could not end them
  [ "$status" -ne 0 ] && [ "$(left)" -gt 60 ] && [ "$failed" -lt 3 ] || break
  failed=$((failed + 1))
  # Before its first state the graphs are to blame; after it, only if it fails again.
  if [ -e "$keep/exact.safetensors" ]; then resume=$keep; [ "$failed" -lt 2 ] || eager=--eager; else eager=--eager; fi
  echo "failed ($status) with $(left) s left; again ${eager:-with graphs}${resume:+ from $resume}"
done
# Few files: the small ones in one.
small=(config.json generation_config.json preprocessor_config.json tokenizer.json tokenizer_config.json vocab.json merges.txt train.json)
cd "$out"
found=(); for name in "${small[@]}"; do [ -e "$name" ] && found+=("$name"); done
tar cf files.tar "${found[@]}"
rm -f "${found[@]}"
exit "$status"
