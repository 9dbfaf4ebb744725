"""The arguments of `say`, `transcribe` and `chat`, which answer once without a server. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from aura_omni.config import Options
from aura_omni.config.deploy_file import packaged_names
from aura_omni.flow import TRANSCRIPT_FORMATS

OFFLINE = ("say", "transcribe", "chat")
STDIO = "-"


def add_offline_commands(commands: Any) -> None:
    """commands: what `add_subparsers` returned."""
    say = commands.add_parser(
        "say",
        help="speak a text into a file",
        allow_abbrev=False,
        description="Speak a text. Only Talker and Code2Wav are loaded.",
    )
    say.add_argument("text", metavar="TEXT", help="what to say; - reads it from standard input")
    _output(say, required=True)
    _voice(say)
    _common(say)

    transcribe = commands.add_parser(
        "transcribe",
        help="write down what is said in files",
        allow_abbrev=False,
        description="Write down what is said in recordings. Only ASR is loaded.",
    )
    transcribe.add_argument("files", metavar="FILE", nargs="+", help="audio or video; - reads one from standard input")
    transcribe.add_argument(
        "--format", choices=TRANSCRIPT_FORMATS, default="text", help="as the server's response_format (default: text)"
    )
    transcribe.add_argument(
        "-o", "--output-dir", metavar="FOLDER", help="one file for each recording, named after it (default: print)"
    )
    transcribe.add_argument("--language", help="spoken language, as code or name (default: found out)")
    transcribe.add_argument("--prompt", default="", help="words to expect")
    _common(transcribe)

    chat = commands.add_parser(
        "chat",
        help="one answer to what is heard, seen and written",
        allow_abbrev=False,
        description="Answer once. The text is printed; with -o it is spoken too.",
    )
    chat.add_argument("text", metavar="TEXT", nargs="?", default="", help="written question; - reads standard input")
    for kind, what in (("audio", "a recording"), ("video", "a clip"), ("image", "a picture")):
        chat.add_argument(f"--{kind}", metavar="FILE", action="append", default=[], help=f"{what}; may be repeated")
    chat.add_argument("--system-prompt", metavar="TEXT", help="replaces the instructions for live video")
    _output(chat, required=False)
    _voice(chat)
    _common(chat)


def _output(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=required,
        help="sound file, in the format of its suffix; - writes WAV to standard output",
    )


def _voice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--voice", metavar="NAME", help="a voice of the checkpoint")
    parser.add_argument("--language", help="language to speak, as English or Chinese (default: found out)")
    parser.add_argument("--instruct", metavar="TEXT", help="how to speak")
    parser.add_argument("--ref-audio", metavar="FILE", help="recording of the voice to speak with")
    parser.add_argument("--ref-text", metavar="TEXT", help="what is said in it (default: only its timbre is taken)")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument("--model", metavar="MODEL", help="folder or hub id; default: as the deploy file says")
    parser.add_argument("--deploy-config", metavar="FILE", help=f"path, or one of {', '.join(packaged_names())}")
    parser.add_argument("--stage-overrides", metavar="JSON", help="as for serve")


def options(arguments: argparse.Namespace) -> Options:
    return Options(
        model=arguments.model,
        deploy_config=arguments.deploy_config,
        stage_overrides=arguments.stage_overrides,
    )
