"""Voices on disk."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aura_omni.errors import BadRequest, ConfigError, Conflict, NotFound
from aura_omni.server import voice_store
from aura_omni.server.voice_store import UploadedVoice, VoiceStore


def add(store: VoiceStore, name: str = "Ada", recording: bytes = b"sound", **fields: Any) -> UploadedVoice:
    given = {"mime_type": "audio/wav", "duration_s": 2.0, "consent": "yes, Ada", "ref_text": None} | fields
    return store.add(name=name, recording=recording, speaker_description=None, **given)


def files(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


def test_a_voice_is_found_by_its_name_in_any_case_also_by_the_next_process(tmp_path: Path) -> None:
    voice = add(VoiceStore(tmp_path), ref_text="Hello.")
    again = VoiceStore(tmp_path)
    assert again.get("ADA") == voice
    assert again.recording(voice) == b"sound"
    assert again.all() == [voice]
    assert again.get("Bob") is None


def test_the_same_recording_is_kept_once_until_its_last_name_goes(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path)
    for name in ("Ada", "Bob"):
        add(store, name)
    assert len(list(tmp_path.glob("*.audio"))) == 1
    store.delete("ada")
    assert store.recording(store.all()[0]) == b"sound"
    store.delete("Bob")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFound, match="Voice 'Bob' not found"):
        store.delete("Bob")


def test_a_name_is_given_once_and_the_same_upload_changes_nothing(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path)
    voice = add(store)
    assert add(store, "ADA") == voice
    for other in ({"recording": b"another"}, {"ref_text": "Hello."}):
        with pytest.raises(Conflict, match="exists"):
            add(store, **other)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "nul\0", "con", "." * 3, "名" * 60])
def test_no_name_reaches_the_file_system(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "voices"
    store = VoiceStore(folder)
    add(store, name)
    assert [path.name for path in tmp_path.iterdir()] == ["voices"]
    assert all(path.stem.isalnum() and path.stem.isascii() for path in folder.iterdir())
    assert VoiceStore(folder).get(name) is not None


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    add(VoiceStore(folder))
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = VoiceStore(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        add(store)
    assert store.all() == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    add(VoiceStore(tmp_path))
    (tmp_path / "x.partial").write_bytes(b"half")
    assert len(VoiceStore(tmp_path).all()) == 1
    assert files(tmp_path) == {".json", ".audio"}


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"name": "Eve"}'])
def test_a_file_that_is_no_voice_is_named_at_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "eve.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"eve\.json is not a voice"):
        VoiceStore(tmp_path)


def test_a_voice_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    add(VoiceStore(tmp_path))
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"content": "../../secret"}))
    with pytest.raises(ConfigError, match="is not a voice"):
        VoiceStore(tmp_path)


def test_a_recording_that_is_gone_is_named_at_start(tmp_path: Path) -> None:
    add(VoiceStore(tmp_path))
    (path,) = tmp_path.glob("*.audio")
    path.unlink()
    with pytest.raises(ConfigError, match="recording of voice 'Ada' is missing"):
        VoiceStore(tmp_path)


def test_a_folder_that_cannot_be_used_is_named_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="another folder"):
        VoiceStore(tmp_path / "file")


def test_there_is_a_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_store, "MOST_VOICES", 1)
    store = VoiceStore(tmp_path)
    add(store)
    with pytest.raises(BadRequest, match="delete one"):
        add(store, "Bob")


def test_threads_that_upload_the_same_name_keep_one_voice(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path)
    refused: list[Exception] = []

    def upload(number: int) -> None:
        try:
            add(store, recording=b"%d" % number)
        except Conflict as conflict:
            refused.append(conflict)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert VoiceStore(tmp_path).all() == store.all()
    assert len(list(tmp_path.iterdir())) == 2
