"""`aura-omni`: arguments to one call. The only place that reads the process environment and the machine.

Heavy parts are imported by the command that needs them, so that `--help` and `--print-config` answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from aura_omni import __version__
from aura_omni.bench.flags import add_flags as bench_flags
from aura_omni.compiling import compiled_ahead
from aura_omni.config import Options, load, load_here, platform, to_yaml
from aura_omni.config.config import DEFAULT_HOST, DEFAULT_PORT, Config
from aura_omni.config.deploy_file import packaged_names
from aura_omni.errors import AuraError, ConfigError, meant
from aura_omni.offline_flags import OFFLINE, add_offline_commands, options

if TYPE_CHECKING:
    from aura_omni.flow import Report
    from aura_omni.server.turns import Pipeline

log = logging.getLogger("aura_omni")

INTERRUPTED = 128 + signal.SIGINT  # as shells say it
API_KEY_VARIABLE = "AURA_OMNI_API_KEY"  # a secret on the command line can be read by every user of the machine

# Flags of the upstream command that would change what is served, and why they do not exist here.
_ONE_PROCESS = "the server is one process on one machine; start one server per device"
NOT_SERVED: Mapping[str, str] = {
    "--model": "give MODEL without a flag: aura-omni serve MODEL",
    "--tokenizer": "each stage uses its checkpoint's own tokenizer",
    "--chat-template": "prompts are built from token ids, not from a template",
    "--enable-auto-tool-choice": "AURA has no tool calls",
    "--tool-call-parser": "AURA has no tool calls",
    "--quantization": 'give it to ASR or AURA: --stage-overrides \'{"1": {"quantization": "fp8"}}\'',
    "--kv-cache-dtype": 'give it to ASR or AURA: --stage-overrides \'{"1": {"kv_cache_dtype": "fp8"}}\'',
    "--tensor-parallel-size": "a stage runs on one device",
    "--pipeline-parallel-size": "a stage runs on one device",
    "--data-parallel-size": _ONE_PROCESS,
    "--api-server-count": _ONE_PROCESS,
    "--stage-id": _ONE_PROCESS,
    "--headless": _ONE_PROCESS,
    "--omni-master-address": _ONE_PROCESS,
    "--omni-master-port": _ONE_PROCESS,
    "--omni-replica-address": _ONE_PROCESS,
    "--omni-dp-size-local": _ONE_PROCESS,
    "--omni-lb-policy": _ONE_PROCESS,
    "--omni-heartbeat-timeout": _ONE_PROCESS,
    "--worker-backend": _ONE_PROCESS,
    "--ray-address": _ONE_PROCESS,
    "--shm-threshold-bytes": "stages hand over in one process, without shared memory",
    "--stage-init-timeout": "stages load one after another and report their own errors; there is no timeout to set",
    "--init-timeout": "stages load one after another and report their own errors; there is no timeout to set",
    "--batch-timeout": "batches never wait to fill",
    "--strategy-config": "there is one strategy; stages are set in the deploy file",
    "--async-chunk": "frames always go to the next stage as they are made",
    "--no-async-chunk": "frames always go to the next stage as they are made; ask for the answer without stream",
    "--log-stats": "numbers are always at GET /metrics",
    "--log-file": "logs go to standard error; redirect it",
    "--task-type": "a request names its voice task, and the checkpoint decides the default",
    "--forced-aligner": "word timestamps are not served",
    "--forced-aligner-config": "word timestamps are not served",
    "--forced-aligner-device": "word timestamps are not served",
    "--tts-max-instructions-length": "instructions are limited by the Talker's max_model_len",
    "--enable-orch-monitor": "numbers are always at GET /metrics",
    "--enable-ar-profiler": "there is no built-in profiler",
    "--enable-sleep-mode": "weights stay on the device; stop the server to free it",
    "--enable-expert-parallel": "no stage has experts",
    "--default-sampling-params": "sampling defaults are per stage: default_sampling_params in the deploy file",
}

SERVE_FLAGS = [
    *(f"--{item.name.replace('_', '-')}" for item in fields(Options) if item.name != "model"),
    *("--omni", "--print-config", "--help"),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when it could not be done (the message says why), 2 for wrong arguments, 130 when interrupted."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown(unknown, SERVE_FLAGS if arguments.command == "serve" else ["--help"]))
    level = logging.WARNING if arguments.command in (*OFFLINE, "bench") else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it says what it fetches
    try:
        if arguments.command == "serve":
            return _serve(arguments)
        if arguments.command in OFFLINE:
            return _offline(arguments)
        if arguments.command == "doctor":
            return _doctor()
        if arguments.command == "bench":
            return _bench(arguments)
        return _tiny(arguments)
    except AuraError as error:
        print(f"aura-omni: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aura-omni: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aura-omni",
        description="The online server for AURA, and its answers without a server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the server", allow_abbrev=False, description=_SERVE_DESCRIPTION)
    _serve_flags(serve)
    add_offline_commands(commands)
    commands.add_parser("doctor", help="say what this machine offers to the server", allow_abbrev=False)
    tiny = commands.add_parser(
        "tiny", help="write tiny random checkpoints of all stages, for tests", allow_abbrev=False
    )
    tiny.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    bench = commands.add_parser("bench", help="measure a running server from outside", allow_abbrev=False)
    bench_flags(bench, default_url=f"http://{DEFAULT_HOST}:{DEFAULT_PORT}")
    return parser


_SERVE_DESCRIPTION = (
    "Serve a pipeline over HTTP. A flag beats the deploy file; --stage-overrides beats both. "
    "Without MODEL and --deploy-config the small checkpoints of the package are served."
)


def _serve_flags(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder or hub id; may be left out when the deploy file names its models",
    )
    add("--omni", action="store_true", help="accepted, for command lines of other servers; changes nothing")
    add("--trust-remote-code", action="store_true", help="accepted; code from a checkpoint is never run")
    add("--deploy-config", metavar="FILE", help=f"path, or a packaged file: {', '.join(packaged_names())}")
    add(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="names that requests may use",
    )
    add("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s; all: 0.0.0.0)")
    add("--port", type=int, default=DEFAULT_PORT, help="port to listen on (default: %(default)s)")
    add(
        "--api-key",
        metavar="KEY",
        nargs="+",
        action="extend",
        default=[],
        help=f"requests must send one of these; {API_KEY_VARIABLE} in the environment adds one",
    )
    add(
        "--allowed-origins",
        metavar="ORIGIN",
        nargs="+",
        action="extend",
        default=[],
        help="web pages that may call, as https://example.com or *; default: with an API key all, else this machine's",
    )
    add("--request-timeout", metavar="S", type=float, help="seconds of work on one request (default: 600)")
    add("--custom-voice-dir", metavar="FOLDER", help="where uploaded voices are kept (default: none are taken)")
    add("--allowed-local-media-path", metavar="FOLDER", help="requests may name file:// media below it (default: none)")
    add(
        "--allowed-media-domains",
        metavar="HOST",
        nargs="+",
        action="extend",
        default=[],
        help="requests may name http(s):// media on these hosts and their subdomains (default: none)",
    )
    add("--stage-overrides", metavar="JSON", help='stage keys by stage_id: \'{"1": {"max_num_seqs": 8}}\'')
    add(
        "--gpu-memory-utilization",
        metavar="FRACTION",
        type=float,
        help="of the whole device, for all stages on it together; shared out in the deploy file's proportions",
    )
    add(
        "--max-model-len",
        metavar="ROWS",
        type=int,
        help="longest sequence of AURA (or of the pipeline's one language stage)",
    )
    add("--max-num-seqs", metavar="N", type=int, help="sequences in one step, for every stage")
    add(
        "--load-format",
        metavar="FORMAT",
        help="dummy: weights are made up, for every stage, to measure without reading any",
    )
    add("--enforce-eager", action="store_true", default=None, help="no CUDA graphs, for every stage")
    add(
        "--engine-process",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run the stages in a process of their own, apart from HTTP and media (default: where there is a GPU)",
    )
    add("--print-config", action="store_true", help="print the effective configuration as YAML and stop")


def _unknown(arguments: Sequence[str], known: Sequence[str]) -> str:
    flag = next((item.partition("=")[0] for item in arguments if item.startswith("-")), None)
    if flag is None:
        return f"unexpected arguments: {' '.join(arguments)}"
    if flag in NOT_SERVED:
        return f"{flag} is not an option of this server: {NOT_SERVED[flag]}"
    return f"{flag} is not known; {meant(flag, known)}"


# ---------------------------------------------------------------- commands


def config_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    given = {item.name: getattr(arguments, item.name) for item in fields(Options)}
    if environ.get(API_KEY_VARIABLE):
        given["api_key"] = [*given["api_key"], environ[API_KEY_VARIABLE]]
    return load(Options(**given), environ=environ, platform=platform(environ))


def _serve(arguments: argparse.Namespace) -> int:
    config = config_of(arguments, os.environ)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    for note in config.notes:
        log.warning("%s", note)
    log.info("effective configuration:\n%s", to_yaml(config).rstrip())
    from aura_omni.media.fetch import MediaPolicy
    from aura_omni.server.app import ServerConfig, run
    from aura_omni.server.first import ask_first

    loading = threading.Event()

    def load_pipeline(report: Report) -> Pipeline:
        loading.set()
        try:
            return loaded_pipeline(report)
        finally:
            loading.clear()

    def loaded_pipeline(report: Report) -> Pipeline:
        pipeline: Pipeline
        # Either reads torch here or in its process; the port is open meanwhile.
        with compiled_ahead(config, environ=os.environ):
            if config.engine_process:
                from aura_omni.engine_process.client import PipelineProcess

                pipeline = PipelineProcess.load(config, report)
            else:
                from aura_omni.pipeline import Pipeline as PipelineHere

                pipeline = PipelineHere.load(config, report)
        ask_first(served, pipeline)
        return pipeline

    served = ServerConfig(
        host=config.host,
        port=config.port,
        api_keys=config.api_keys,
        origins=config.allowed_origins,
        timeout_s=config.request_timeout_s,
        voices_dir=config.voices_dir,
        max_body_bytes=config.media.max_body_bytes,
        media=MediaPolicy(**{item.name: getattr(config.media, item.name) for item in fields(MediaPolicy)}),
        media_limits=config.media.limits,
    )
    run(served, load_pipeline)
    if loading.is_set():
        # PyTorch aborts the process when Python ends under a thread that computes, and loading cannot be interrupted.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _offline(arguments: argparse.Namespace) -> int:
    config = load_here(options(arguments))
    from aura_omni import offline

    do = {"say": offline.say, "transcribe": offline.transcribe, "chat": offline.chat}[arguments.command]
    try:
        return do(arguments, config)
    except BrokenPipeError:  # who read the output has seen enough; nothing more may be said to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        raise ConfigError(f"{error.filename or 'the output'}: {error.strerror or error}") from error


def _doctor() -> int:
    from aura_omni.doctor import report

    print(report())
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from aura_omni.bench.command import run

    return run(arguments)


def _tiny(arguments: argparse.Namespace) -> int:
    out_dir: Path = arguments.out_dir
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if any(out_dir.iterdir()):
            raise ConfigError(f"{out_dir} is not empty; name a new or an empty folder")
        from aura_omni.nano.random_family import write_family

        write_family(out_dir)
    except OSError as error:
        raise ConfigError(f"cannot write to {out_dir}: {error.strerror or error}; name another folder") from error
    print(out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
