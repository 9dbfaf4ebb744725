#!/usr/bin/env bash
# Ask an AURA server by voice and camera with nothing but curl (python3 only reads and writes JSON).
#
#   ./run_curl_multimodal_query.sh [PORT]
#
# Environment: HOST (localhost), PORT (8091), MODEL (the first that the server lists), AUDIO and VIDEO (files; the
# shapes beside this script and a question), PROMPT (written question), OUTPUT_DIR (aura_output), OPENAI_API_KEY (none).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
url="http://${HOST:-localhost}:${1:-${PORT:-8091}}"
output_dir="${OUTPUT_DIR:-aura_output}"
audio="${AUDIO:-$here/shapes_question.wav}"
video="${VIDEO:-$here/shapes_clip.mp4}"
authorization="Authorization: Bearer ${OPENAI_API_KEY:-none}"

for file in "$audio" "$video"; do
    [[ -f "$file" ]] || { echo "error: no such file: $file" >&2; exit 1; }
done
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# request OUTPUT CURL_ARGUMENTS...: says why when there is no server or no good answer
request() {
    local output="$1" status
    shift
    status="$(curl --silent --output "$output" --write-out '%{http_code}' --header "$authorization" "$@")" || {
        echo "error: no server answers at $url; start one with \`aura-omni serve\`, or give its port" >&2
        exit 1
    }
    if [[ "$status" != 200 ]]; then
        echo "error: the server refused with status $status: $(cat "$output")" >&2
        exit 1
    fi
}

model="${MODEL:-}"
if [[ -z "$model" ]]; then
    request "$scratch/models.json" "$url/v1/models"
    model="$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["data"][0]["id"])' "$scratch/models.json")"
fi

# Media are too long for a command line, so they travel through files.
base64 < "$audio" | tr -d '\n' > "$scratch/audio"
base64 < "$video" | tr -d '\n' > "$scratch/video"
MODEL="$model" PROMPT="${PROMPT:-}" python3 - "$scratch" > "$scratch/body.json" <<'PYTHON'
import json
import os
import sys
from pathlib import Path

scratch = Path(sys.argv[1])
content = [
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + (scratch / "video").read_text()}},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + (scratch / "audio").read_text()}},
]
if os.environ["PROMPT"]:
    content.append({"type": "text", "text": os.environ["PROMPT"]})
messages = [{"role": "user", "content": content}]
json.dump({"model": os.environ["MODEL"], "messages": messages}, sys.stdout)
PYTHON

request "$scratch/answer.json" --header 'Content-Type: application/json' --data-binary "@$scratch/body.json" \
    "$url/v1/chat/completions"

mkdir -p "$output_dir"
python3 - "$scratch/answer.json" > "$scratch/answer.b64" 3> "$output_dir/answer.txt" <<'PYTHON'
import json
import os
import sys

message = json.load(open(sys.argv[1]))["choices"][0]["message"]
os.write(3, (message["content"] + "\n").encode())
print((message.get("audio") or {}).get("data", ""), end="")
PYTHON
cat "$output_dir/answer.txt"
echo "text: $output_dir/answer.txt"
if [[ -s "$scratch/answer.b64" ]]; then
    base64 -d < "$scratch/answer.b64" > "$output_dir/answer.wav"
    echo "audio: $output_dir/answer.wav"
else
    echo "audio: none, the model chose to stay silent"
fi
