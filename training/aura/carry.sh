#!/usr/bin/env bash
# A folder that holds all of one GPU run: the code as committed or not, the data and a run.sh.
#   training/aura/carry.sh FOLDER DATA [STATE]        # DATA: of words/ and photos.npz; STATE: of an earlier run to go on from
#   SPEED=1 TIME_S=60 FOLDER/run.sh OUT                # first, what a step is made of
#   TIME_S=560 FOLDER/run.sh OUT
set -euo pipefail
folder=$1 data=$2 state=${3:-}
cd "$(dirname "$0")/../.."
rm -rf "$folder/aura_omni" "$folder/training" "$folder/data" "$folder/state" "$folder/checkpoint"
mkdir -p "$folder/data/words" "$folder/training"
cp -r aura_omni "$folder/"
rm -rf "$folder/aura_omni/nano/checkpoints"
cp -r training/aura "$folder/training/"
cp training/__init__.py "$folder/training/"
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
cp "$data/photos.npz" "$folder/data/"
cp "$data/words/tokenizer.json" "$data/words/tokenizer_config.json" "$folder/data/words/"
if [ -n "$state" ]; then
  mkdir -p "$folder/state"
  cp "$state/state_weights.safetensors" "$state/state.json" "$folder/state/" # a quarter of the bytes: moments start anew
fi
cat > "$folder/run.sh" <<'END'
#!/usr/bin/env bash
# OUT is $1; leaves four state files, state.json and log.jsonl there.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")"
if [ "${RESUME:-}" = "" ] && [ -d state ]; then export RESUME=$PWD/state; fi
CHECKPOINT=$PWD/checkpoint DATA=$PWD/data training/aura/run_gpu.sh "$out"
END
chmod +x "$folder/run.sh"
du -sh "$folder"
