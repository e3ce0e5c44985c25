"""source=hf: any causal language model, from a checkpoint folder or the hub; safetensors only."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.compat import quiet_transformers
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.progress import Progress, spoken_bar

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["original/*", "consolidated*", "onnx/*"]


def checkpoint_folder(config: TargetConfig, progress: Progress) -> Path:
    """The folder that `target.path` is, or the hub's snapshot of it (downloaded once)."""
    path = config.path
    if not path:
        raise OptionError("target.path", "null", "give a checkpoint folder or a hub id (Qwen/Qwen3-0.6B).")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        fetching = f"Fetching {path} from the hub"
        progress(fetching)
        wanted = [*WANTED, "*.py"] if config.trust_remote_code else WANTED
        try:
            snapshot = snapshot_download(
                path,
                revision=config.revision,
                allow_patterns=wanted,
                ignore_patterns=UNWANTED,
                tqdm_class=spoken_bar(progress, fetching),
            )
        except Exception as error:  # the hub's own errors, and those of whichever HTTP library it uses
            raise _hub_error(config, error) from error
        folder = Path(snapshot)
    if not any(folder.glob("*.safetensors")):
        raise _no_safetensors(config, folder)
    return folder


def _hub_error(config: TargetConfig, error: Exception) -> OptionError:
    """Why the hub gave nothing, how to get the model, and what to do without it."""
    timing = "target.weights=random (timing only) or " if config.architecture else ""
    get = "or download it elsewhere and use target=hf target.path=FOLDER."
    if isinstance(error, hub_errors.RevisionNotFoundError):
        remedy = f"{config.path} has no such branch, tag or commit."
        return OptionError("target.revision", config.revision, remedy)
    if isinstance(error, hub_errors.GatedRepoError):
        why, get = "is gated", f"ask for access on its page on the hub, then `hf auth login`; {get}"
    elif isinstance(error, hub_errors.RepositoryNotFoundError | hub_errors.HFValidationError):
        why = "is no folder here and no model on the hub that you may see"
        get = f"check the spelling; `hf auth login` if it is private or gated; {get}"
    elif getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        why, get = "does not fit into the hub's cache", f"make room, set HF_HOME to a folder elsewhere, {get}"
    else:
        why = f"is no folder here, not in the hub's cache, and the hub did not give it ({_first_line(error)})"
        get = f"check the network and HF_HUB_OFFLINE; `hf auth login` if it is gated; {get}"
    return OptionError("target.path", config.path, f"{why}; {get} Without it: {timing}target=smollm2-135m.")


def _no_safetensors(config: TargetConfig, folder: Path) -> OptionError:
    if not (folder / "config.json").is_file():
        return OptionError("target.path", config.path, "holds no checkpoint (config.json and *.safetensors).")
    convert = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; p = {config.path!r}; "
        f"M.from_pretrained(p, use_safetensors=False).save_pretrained('FOLDER'); "
        f"T.from_pretrained(p).save_pretrained('FOLDER')"
    )
    remedy = (
        f"has no *.safetensors, and pickled weights are not opened. If you trust them, convert them once "
        f'with python -c "{convert}" and use target=hf target.path=FOLDER.'
    )
    return OptionError("target.path", config.path, remedy)


def load_pretrained(config: TargetConfig, folder: Path, device: torch.device, dtype: torch.dtype):
    """(model, tokenizer or None) from a checkpoint folder, on `device` or spread by `target.device_map`.

    Raises OptionError for files that are damaged or incomplete: transformers would fill missing weights with
    random numbers and only log it.
    """
    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map=config.device_map or {"": device},
                attn_implementation=config.attention,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
        except torch.OutOfMemoryError:
            raise
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
            raise _load_error(config, folder, error) from error
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            names = f"{', '.join(missing[:3])}; {len(missing)} in all"
            remedy = f"lacks weights that the model needs ({names}); get the whole checkpoint."
            raise OptionError("target.path", config.path, remedy)
        return model, _tokenizer(config, folder)


def _load_error(config: TargetConfig, folder: Path, error: Exception) -> OptionError:
    if "trust_remote_code" in str(error):
        remedy = "this model brings its own Python code; read it, then set target.trust_remote_code=true."
        return OptionError("target.trust_remote_code", config.trust_remote_code, remedy)
    remedy = f"{folder} cannot be loaded ({_first_line(error)}); if damaged, delete it and fetch it again."
    return OptionError("target.path", config.path, remedy)


def _tokenizer(config: TargetConfig, folder: Path):
    if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        remedy = (
            f"its tokenizer cannot be loaded ({_first_line(error)}); "
            f"a tokenizer.model without tokenizer.json needs `pip install sentencepiece protobuf`."
        )
        raise OptionError("target.path", config.path, remedy) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
