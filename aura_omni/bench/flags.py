"""The arguments of `aura-omni bench`. Imports nothing heavy, as every command line is built with it."""

from __future__ import annotations

import argparse
from pathlib import Path

SENTENCE = "The kettle on the left has just begun to boil, and the window behind it is still open."


def add_flags(parser: argparse.ArgumentParser, *, default_url: str) -> None:
    add = parser.add_argument
    add(
        "work",
        choices=("turn", "speech", "transcript", "draw"),
        help="what each request asks for; or draw: no request, only a --picture of what is in a JSON --from before",
    )
    add("--url", default=default_url, help="the server (default: %(default)s)")
    add("--model", help="the model's name (default: the first that the server lists)")
    add("--api-key", help="sent as a bearer token")
    add(
        "--clients",
        type=int,
        nargs="+",
        metavar="N",
        help="closed loop: so many clients, one load after another (default: 1)",
    )
    add("--each", type=int, default=6, help="requests of each client (default: %(default)s)")
    add("--rate", type=float, nargs="+", metavar="R", help="open loop: so many requests a second, at random times")
    add("--requests", type=int, default=100, help="requests of an open loop (default: %(default)s)")
    add(
        "--warm-up",
        type=int,
        default=1,
        help="requests of each client before a load is measured (default: %(default)s)",
    )
    add("--audio-s", type=float, default=5.0, help="seconds of sound in each turn or transcript (default: %(default)s)")
    add("--frames", type=int, default=2, help="frames of 640x360 in each turn (default: %(default)s)")
    add("--text-only", action="store_true", help="turns ask for no sound")
    add("--text", default=SENTENCE, help="what speech says")
    add(
        "--body",
        default="{}",
        metavar="JSON",
        help="fields laid over every request, as max_tokens or sampling_params_list",
    )
    add(
        "--seed",
        type=int,
        help="of all media and arrival times (default: a new one, so that no cache of the server knows them)",
    )
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="of the client, for loads that one cannot make (default: %(default)s)",
    )
    add("--gpu", action="store_true", help="also how busy this machine's GPUs are (needs nvidia-ml-py)")
    add("--timeout-s", type=float, default=300.0, help="of one request (default: %(default)s)")
    add("--out", type=Path, help="where to write the figures as JSON; they are printed in any case")
    add("--from", type=Path, dest="source", metavar="JSON", help="what --out has written, for draw")
    add("--picture", type=Path, help="where to draw them (PNG or SVG; needs matplotlib)")
