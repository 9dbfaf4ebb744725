#!/usr/bin/env bash
# A folder that holds all of one GPU run: code, corpus, sound and run.sh; START: weights to go on from.
#   training/tts/carry.sh FOLDER CORPUS.npz SOUND.ogg TOKENIZER.json WHEELS [START ..]
set -euo pipefail
folder=$1 corpus=$2 sound=$3 tokenizer=$4 wheels=$5
shift 5
rm -rf "$folder"
mkdir -p "$folder/training" "$folder/wheels" "$folder/start"
[ $# -eq 0 ] || cp "$@" "$folder/start/"
cp "$corpus" "$folder/corpus.npz"
cp "$sound" "$folder/sound.ogg"
cp "$tokenizer" "$folder/tokenizer.json"
cp "$wheels"/*.whl "$folder/wheels/"
cd "$(dirname "$0")/../.."
cp -r aura_omni "$folder/"
rm -rf "$folder/aura_omni/nano/checkpoints"
rm -rf "$folder/aura_omni/server" "$folder/aura_omni/deploy"
cp -r training/__init__.py training/tts "$folder/training/"
cp training/tts/run.sh "$folder/run.sh"
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
du -sm "$folder"
