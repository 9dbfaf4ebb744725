#!/usr/bin/env bash
# A folder that holds all of one GPU run: code, synthesizers, data and a run.sh.
#   training/asr/carry.sh FOLDER DATA WHEELS [START]             # START: a folder of an earlier run, of which the weights go on
#   SPEED=1 TIME_S=40 FOLDER/run.sh OUT                          # what a step costs
#   RESUME=FOLDER/start PEAK=1.2e-3 TIME_S=550 FOLDER/run.sh OUT
#   PART=2/2 KEEP=/tmp/aura_asr TIME_S=550 FOLDER/run.sh OUT     # goes on from KEEP, where a PART=1/2 left its state
set -euo pipefail
folder=$1 data=$2 wheels=$3 start=${4:+$(realpath "${4:-}")}
cd "$(dirname "$0")/../.."
rm -rf "$folder"
mkdir -p "$folder/code/training" "$folder/data" "$folder/whl"
cp -r aura_omni "$folder/code/"
rm -rf "$folder/code/aura_omni/nano/checkpoints"
cp -r training/__init__.py training/asr training/text "$folder/code/training/"
find "$folder/code" -name __pycache__ -prune -exec rm -rf {} +
tar cJf "$folder/data/bundle.tar.xz" --exclude=__pycache__ -C "$data" bundle
gzip -9c "$data/english.txt" > "$folder/data/english.txt.gz"
gzip -9c "$data/asked.txt" > "$folder/data/asked.txt.gz"
for part in piper festival recorded heldout; do cp -r "$data/$part" "$folder/data/"; done
if [ -n "$start" ]; then
  mkdir -p "$folder/start/resume"
  cp "$start"/*.json "$folder/start/"
  cp "$start/resume/weights.safetensors" "$folder/start/resume/"
  rm -f "$folder/start/train.json"
fi
cp "$wheels"/*.whl "$folder/whl/"
cp training/asr/run_gpu.sh "$folder/run.sh"
du -sm "$folder"
