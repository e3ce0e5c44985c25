"""source=hf: any causal language model, from a checkpoint folder or the hub, safetensors only."""

from __future__ import annotations

import errno
import importlib.util
from pathlib import Path

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specdec.compat import quiet_transformers
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.progress import Progress

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*", "vocab*", "merges*"]
UNWANTED = ["original/*", "consolidated*", "onnx/*", "*.bin", "*.pth"]
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def checkpoint_folder(config: TargetConfig, progress: Progress) -> Path:
    """The local folder of `target.path`: itself, or the hub's snapshot of it (downloaded if needed)."""
    if not config.path:
        raise OptionError("target.path", config.path, "give a checkpoint folder or a hub id, e.g. target.path=Qwen/Qwen3-0.6B.")
    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        folder = _snapshot(config, progress)
    _require_safetensors(config, folder)
    return folder


def _snapshot(config: TargetConfig, progress: Progress) -> Path:
    wanted = [*WANTED, "*.py"] if config.trust_remote_code else WANTED
    progress(f"Fetching {config.path} from the hub")
    try:
        folder = snapshot_download(
            config.path, revision=config.revision, allow_patterns=wanted, ignore_patterns=UNWANTED
        )
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, OSError) as error:
        raise _hub_error(config, error) from error
    return Path(folder)


def _hub_error(config: TargetConfig, error: Exception) -> OptionError:
    """Why the hub gave nothing, how to get the model, and what to do without it."""
    instead = "Without it: target.weights=random (timing only), or target=smollm2-135m."
    if not config.architecture:
        instead = "Without it: target=smollm2-135m."
    by_folder = f"or download it elsewhere and give the folder (target=hf target.path=FOLDER). {instead}"
    page = f"its page on the hub ({config.path})"
    if isinstance(error, hub_errors.GatedRepoError):
        remedy = f"is gated: ask for access on {page} and run `hf auth login`, {by_folder}"
    elif isinstance(error, hub_errors.RevisionNotFoundError):
        return OptionError("target.revision", config.revision, f"no such branch, tag or commit on {page}.")
    elif isinstance(error, (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError)):
        remedy = (
            f"is neither a folder here nor a model on the hub that this login may see: "
            f"check the spelling, run `hf auth login` if it is private, {by_folder}"
        )
    elif getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"no space left in the hub's cache; free some or set HF_HOME to a folder elsewhere. {instead}"
    else:
        remedy = f"the hub cannot be reached and there is no copy in its cache; check the network, {by_folder}"
    return OptionError("target.path", config.path, remedy)


def _require_safetensors(config: TargetConfig, folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        remedy = (
            "holds only pickled weights, which can run code when opened; convert them once where you trust them: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
        raise OptionError("target.path", config.path, remedy)
    raise OptionError("target.path", config.path, f"{folder} holds no *.safetensors; give a checkpoint folder.")


def load_pretrained(config: TargetConfig, folder: Path, device: torch.device, dtype: torch.dtype):
    """(model, tokenizer or None) from a checkpoint folder, on `device` or spread by `target.device_map`."""
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map=_device_map(config, device),
                attn_implementation=config.attention,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
            )
        except (SafetensorError, OSError, ValueError) as error:
            remedy = f"cannot be loaded ({_first_line(error)}); download or copy the folder again, or delete {folder}."
            raise OptionError("target.path", config.path or folder, remedy) from error
        return model, _tokenizer(config, folder)


def _device_map(config: TargetConfig, device: torch.device):
    if not config.device_map:
        return None if device.type == "cpu" else {"": device}
    if config.device_map not in DEVICE_MAPS:
        raise OptionError("target.device_map", config.device_map, f"choose null or one of {', '.join(DEVICE_MAPS)}.")
    if importlib.util.find_spec("accelerate") is None:
        raise OptionError("target.device_map", config.device_map, "needs the package accelerate: pip install accelerate.")
    return config.device_map


def _tokenizer(config: TargetConfig, folder: Path):
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
