"""Ask an AURA server something by voice and camera, with the official `openai` client.

    python openai_chat_completion_client.py                                  # the shapes beside this file
    python openai_chat_completion_client.py --audio-path sample_question.wav --video-path sample_clip.mp4
    python openai_chat_completion_client.py --audio-path q.wav --video-path https://example.com/clip.mp4
    python openai_chat_completion_client.py --prompt "What do you see?" --video-path clip.mp4 --stream

Prints the answer and writes it to --output-dir: answer.txt, and answer.wav when the server spoke.
A server behind an API key: set OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import os
import sys
import wave
from pathlib import Path
from typing import Any

import openai

HERE = Path(__file__).parent
VOICE_RATE = 24_000  # Hz, of streamed samples


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ask an AURA server by voice and camera.",
        epilog="Without --prompt, --audio-path and --video-path the shapes beside this file and a question are sent.",
    )
    parser.add_argument("--audio-path", help="spoken question: a file or a URL")
    parser.add_argument("--video-path", help="what the camera sees: a file or a URL")
    parser.add_argument("--prompt", help="written question")
    parser.add_argument(
        "--modalities", help='what to answer with, "text" or "text,audio" (default: whatever the server can)'
    )
    parser.add_argument("--output-dir", type=Path, default=Path("aura_output"), help="default: %(default)s")
    parser.add_argument("--aura-system-prompt", help="replaces the server's instructions for live video")
    parser.add_argument("--tts-task-type", choices=["Base", "CustomVoice", "VoiceDesign"])
    parser.add_argument("--tts-language", help="for example English, or Auto")
    parser.add_argument("--tts-speaker", help="a voice of the checkpoint (CustomVoice)")
    parser.add_argument("--tts-instruct", help="how to speak")
    parser.add_argument("--tts-ref-audio", help="voice to speak with (Base): a file or a URL")
    parser.add_argument("--tts-ref-text", help="what is said in --tts-ref-audio")
    parser.add_argument("--tts-x-vector-only-mode", action="store_true", help="take only the timbre of the reference")
    parser.add_argument("--tts-pass-token-ids", action="store_true", help="speak token ids instead of text")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="print and receive the answer while it is made")
    return parser.parse_args()


def as_url(source: str) -> str:
    """A URL as it is; a file as a data URL."""
    if source.startswith(("http://", "https://", "data:")):
        return source
    path = Path(source)
    if not path.is_file():
        sys.exit(f"error: no such file: {path}")
    media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def content(options: argparse.Namespace) -> list[dict[str, Any]]:
    audio, video = options.audio_path, options.video_path
    if audio is None and video is None and options.prompt is None:
        audio, video = str(HERE / "shapes_question.wav"), str(HERE / "shapes_clip.mp4")
    parts: list[dict[str, Any]] = []
    if video is not None:
        parts.append({"type": "video_url", "video_url": {"url": as_url(video)}})
    if audio is not None:
        parts.append({"type": "audio_url", "audio_url": {"url": as_url(audio)}})
    if options.prompt is not None:
        parts.append({"type": "text", "text": options.prompt})
    return parts


def additional_information(options: argparse.Namespace) -> dict[str, Any]:
    given = {
        "aura_system_prompt": options.aura_system_prompt,
        "tts_task_type": options.tts_task_type,
        "tts_language": options.tts_language,
        "tts_speaker": options.tts_speaker,
        "tts_instruct": options.tts_instruct,
        "tts_ref_audio": as_url(options.tts_ref_audio) if options.tts_ref_audio else None,
        "tts_ref_text": options.tts_ref_text,
        "tts_x_vector_only_mode": options.tts_x_vector_only_mode or None,
        "tts_pass_token_ids": options.tts_pass_token_ids or None,
    }
    return {key: value for key, value in given.items() if value is not None}


def ask(client: openai.OpenAI, options: argparse.Namespace) -> tuple[str, bool]:
    """Returns the text and whether answer.wav was written."""
    request: dict[str, Any] = {
        "model": options.model or client.models.list().data[0].id,
        "messages": [{"role": "user", "content": content(options)}],
        "extra_body": {"additional_information": additional_information(options)},
    }
    if options.modalities:
        request["modalities"] = [name.strip() for name in options.modalities.split(",")]
    return (
        streamed(client, request, options.output_dir) if options.stream else whole(client, request, options.output_dir)
    )


def whole(client: openai.OpenAI, request: dict[str, Any], output_dir: Path) -> tuple[str, bool]:
    text, spoken = "", False
    for choice in client.chat.completions.create(**request).choices:  # some servers send audio as a second choice
        text = text or choice.message.content or ""
        if choice.message.audio is not None:
            text = text or choice.message.audio.transcript
            (output_dir / "answer.wav").write_bytes(base64.b64decode(choice.message.audio.data))
            spoken = True
    print(text)
    return text, spoken


def streamed(client: openai.OpenAI, request: dict[str, Any], output_dir: Path) -> tuple[str, bool]:
    request["extra_body"]["audio"] = {"format": "pcm16", "voice": ""}  # OpenAI's object; the voice is chosen elsewhere
    text, samples = "", bytearray()
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            audio = delta.get("audio") or {}
            piece = delta.get("content") or audio.get("transcript") or ""
            print(piece, end="", flush=True)
            text += piece
            samples += base64.b64decode(audio.get("data") or "")
    print()
    if samples:
        with wave.open(str(output_dir / "answer.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(VOICE_RATE)
            file.writeframes(samples)
    return text, bool(samples)


def reason(error: openai.APIError) -> str:
    """The server's own words; the client's begin with the status and have all of the answer's JSON."""
    return str(error.body["message"]) if isinstance(error.body, dict) and "message" in error.body else error.message


def main() -> None:
    options = arguments()
    url = f"http://{options.host}:{options.port}/v1"
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=options.timeout)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        text, spoken = ask(client, options)
    except openai.APITimeoutError:
        sys.exit(f"error: {url} did not answer within {options.timeout:g} s; raise --timeout")
    except openai.APIConnectionError:
        sys.exit(f"error: no server answers at {url}; start one with `aura-omni serve`, or give --host and --port")
    except openai.APIStatusError as error:
        sys.exit(f"error: the server refused with status {error.status_code}: {reason(error)}")
    except openai.APIError as error:  # of a stream that had begun
        sys.exit(f"error: the answer is not whole: {reason(error)}")
    (options.output_dir / "answer.txt").write_text(text + "\n", encoding="utf-8")
    print(f"text: {options.output_dir / 'answer.txt'}")
    if spoken:
        print(f"audio: {options.output_dir / 'answer.wav'}")
    elif text == "<|silent|>":
        print("audio: none, the model chose to stay silent")


if __name__ == "__main__":
    main()
