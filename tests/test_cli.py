"""The command line: what it takes, what it says, and what it does not import."""

import subprocess
import sys
import types

import pytest
import yaml

from aura_omni import __version__, cli
from aura_omni.config.deploy_file import packaged_names

HEAVY = ("torch", "transformers", "fastapi", "pydantic", "uvicorn", "huggingface_hub", "av", "httpx", "PIL", "tqdm")

# The upstream command with only the program's name changed
REFERENCE = [
    "serve", "aurateam/AURA", "--omni", "--deploy-config", "vllm_omni/deploy/aura_omni.yaml", "--served-model-name", "AURA",
    "--trust-remote-code", "--host", "0.0.0.0", "--port", "8091", "--api-key", "k1", "k2",
    "--allowed-local-media-path", "/", "--allowed-media-domains", "example.com", "localhost",
    "--stage-overrides", '{"1": {"max_model_len": 32768}}', "--gpu-memory-utilization", "0.9", "--max-num-seqs", "2",
    "--enforce-eager",
]  # fmt: skip


@pytest.fixture
def printed(capsys, monkeypatch):
    monkeypatch.delenv(cli.API_KEY_VARIABLE, raising=False)

    def run(*arguments):
        assert cli.main([*arguments, "--print-config"]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    "arguments", [["serve", "--print-config"], ["serve", "--help"], ["say", "--help"], ["--version"]]
)
def test_quick_commands_import_nothing_heavy(arguments):
    code = (
        "import sys, contextlib, aura_omni.cli as cli\n"
        f"with contextlib.suppress(SystemExit): cli.main({arguments!r})\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_reference_command_line_works_unchanged(printed):
    content = printed(*REFERENCE)
    assert content["pipeline"] == "aura_omni"
    assert content["served_model_name"] == ["AURA"]
    assert (content["host"], content["port"], content["api_keys"]) == ("0.0.0.0", 8091, 2)
    assert content["media"]["allowed_local_path"] == "/"
    assert content["media"]["allowed_domains"] == ["example.com", "localhost"]
    assert [stage["gpu_memory_utilization"] for stage in content["stages"]] == [0.1, 0.4, 0.2, 0.2]
    assert [stage["max_num_seqs"] for stage in content["stages"]] == [2, 2, 2, 2]
    assert content["stages"][1]["max_model_len"] == 32768
    assert all(stage["enforce_eager"] for stage in content["stages"])


def test_port_is_8091_and_only_this_machine_is_served_unless_told(printed):
    content = printed("serve")
    assert (content["host"], content["port"], content["api_keys"]) == ("127.0.0.1", 8091, 0)
    assert content["served_model_name"] == ["aura-nano"]


def test_api_key_of_the_environment_is_added_and_hidden(printed, monkeypatch, capsys):
    monkeypatch.setenv(cli.API_KEY_VARIABLE, "sesame")
    assert cli.main(["serve", "--api-key", "other", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["api_keys"] == 2
    assert "sesame" not in out
    assert "other" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--prot", "1"], "--prot is not known; did you mean --port?"),
        (["serve", "--init-timeout", "600"], "--init-timeout is not an option of this server: stages load"),
        (["serve", "--data-parallel-size=2"], "--data-parallel-size is not an option of this server"),
        (["serve", "m/x", "n/y"], "unexpected arguments: n/y"),
        (["serve", "--port", "x"], "invalid int value"),
        (["serve", "--serve", "x"], "--serve is not known"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_configuration_ends_with_one_line_and_status_1(capsys):
    assert cli.main(["serve", "--deploy-config", "no/such.yaml"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("aura-omni: deploy file not found: no/such.yaml")
    assert error.count("\n") == 1


def test_serve_hands_the_configuration_to_the_server(monkeypatch, tmp_path):
    served = []
    monkeypatch.setattr("aura_omni.server.app.run", lambda config, load: served.append(config))
    assert cli.main(["serve", "--port", "0", "--api-key", "k", "--allowed-local-media-path", str(tmp_path)]) == 0
    (config,) = served
    assert (config.port, config.api_keys, config.media.allowed_local_path) == (0, ("k",), tmp_path)


def test_tiny_hands_the_folder_to_its_writer(monkeypatch, tmp_path, capsys):
    written = []
    monkeypatch.setitem(sys.modules, "aura_omni.nano.random_family", types.SimpleNamespace(write_family=written.append))
    assert cli.main(["tiny", str(tmp_path / "family")]) == 0
    assert written == [tmp_path / "family"]
    assert capsys.readouterr().out == f"{tmp_path / 'family'}\n"


def test_tiny_refuses_a_folder_that_is_not_empty_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "precious").write_text("x")
    assert cli.main(["tiny", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error == f"aura-omni: {tmp_path} is not empty; name a new or an empty folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/nowhere/family"])
def test_tiny_says_in_one_line_where_it_cannot_write(name, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert cli.main(["tiny", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"aura-omni: cannot write to {tmp_path / name}: ")
    assert error.count("\n") == 1


def test_doctor_says_what_is_here(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("aura-omni: ", "Python: ", "torch: ", "memory: ", "PyAV: ", "device: "):
        assert name in out
    assert ", ".join(packaged_names()) in out


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == __version__
