"""Checkpoint folders and the hub (never reached from here), devices and precisions."""

import errno
import json

import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from specdec.checkpoints import devices, load, pretrained, resolve_device, resolve_dtype, save_tiny
from specdec.config import TargetConfig
from specdec.errors import OptionError
from specdec.progress import silent, spoken_bar

TINY = TargetConfig(name="tiny", source="tiny", device="cpu")


@pytest.fixture
def folder(tmp_path):
    return save_tiny(TINY, tmp_path / "checkpoint")


def hf(path, **fields):
    return TargetConfig(**{"name": "hf", "path": str(path), "device": "cpu", "dtype": "float32", **fields})


def test_a_folder_gives_back_what_was_saved(folder):
    loaded, saved = load(hf(folder), silent), load(TINY, silent)
    ids = torch.arange(10)[None]
    assert torch.equal(loaded.model(ids).logits, saved.model(ids).logits)
    assert loaded.tokenizer.get_vocab() == saved.tokenizer.get_vocab()
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.provenance["weights"] == "pretrained" and loaded.provenance["parameters"] == 35232


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_precisions(folder, dtype):
    loaded = load(hf(folder, dtype=dtype), silent)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)} == {loaded.dtype}


def test_device_map_goes_through_accelerate(folder):
    loaded = load(hf(folder, device="auto", device_map="auto"), silent)
    assert loaded.provenance["device"] == "auto"
    assert loaded.model(torch.arange(4)[None].to(loaded.device)).logits.isfinite().all()


def test_a_folder_without_tokenizer(tmp_path):
    config = TargetConfig(name="tiny", source="tiny", vocab_size=5)
    assert load(hf(save_tiny(config, tmp_path)), silent).tokenizer is None


def test_nothing_is_printed(folder, capfd):
    load(hf(folder), silent)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("keep", [0.2, 0.999])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(OptionError, match="cannot be loaded") as caught:
        load(hf(folder), silent)
    assert caught.value.option == "target.path" and str(folder) in caught.value.remedy


def test_missing_weights_are_not_replaced_by_random_ones(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OptionError, match="model.layers.1.mlp.down_proj.weight; 1 in all"):
        load(hf(folder), silent)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OptionError, match="no ..safetensors") as caught:
        load(hf(folder), silent)
    assert "save_pretrained('FOLDER')" in caught.value.remedy


def test_an_empty_folder(tmp_path):
    with pytest.raises(OptionError, match="holds no checkpoint"):
        load(hf(tmp_path), silent)


def test_no_path():
    with pytest.raises(OptionError, match="hub id") as caught:
        load(TargetConfig(name="hf", device="cpu"), silent)
    assert caught.value.option == "target.path"


def test_a_model_with_its_own_code_needs_consent(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(OptionError) as caught:
        load(hf(folder), silent)
    assert caught.value.option == "target.trust_remote_code"


def http_error(kind):
    """As the hub raises it, without the HTTP response that its constructor wants."""
    return kind.__new__(kind, "refused")


GATED = TargetConfig(name="llama3-8b", path="meta-llama/Meta-Llama-3-8B-Instruct", architecture="llama3-8b")


@pytest.mark.parametrize(
    "error, says",
    [
        (http_error(hub_errors.GatedRepoError), ["gated", "ask for access", "hf auth login"]),
        (http_error(hub_errors.RepositoryNotFoundError), ["no model on the hub", "spelling"]),
        (hub_errors.LocalEntryNotFoundError("no connection"), ["did not give it (no connection)", "network"]),
        (Exception("timed out"), ["did not give it (timed out)"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["does not fit", "HF_HOME"]),
    ],
)
def test_a_model_that_the_hub_does_not_give(monkeypatch, error, says):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(pretrained, "snapshot_download", refuse)
    with pytest.raises(OptionError) as caught:
        load(GATED, silent)
    assert (caught.value.option, caught.value.value) == ("target.path", GATED.path)
    for words in [*says, "target=hf target.path=FOLDER", "target.weights=random", "target=smollm2-135m"]:
        assert words in caught.value.remedy


def test_an_unknown_revision(monkeypatch):
    def refuse(*_, **__):
        raise http_error(hub_errors.RevisionNotFoundError)

    monkeypatch.setattr(pretrained, "snapshot_download", refuse)
    with pytest.raises(OptionError) as caught:
        load(TargetConfig(name="hf", path="a/b", revision="nope", device="cpu"), silent)
    assert (caught.value.option, caught.value.value) == ("target.revision", "nope")


def test_a_snapshot_is_loaded_and_its_commit_recorded(monkeypatch, tmp_path):
    snapshot = save_tiny(TINY, tmp_path / "snapshots" / "0123abc")
    asked = {}

    def download(hub_id, **options):
        asked.update(options, id=hub_id)
        return str(snapshot)

    monkeypatch.setattr(pretrained, "snapshot_download", download)
    loaded = load(hf("owner/model", revision="main"), silent)
    assert isinstance(loaded.model, LlamaForCausalLM)
    assert (loaded.provenance["source"], loaded.provenance["commit"]) == ("owner/model", "0123abc")
    assert (asked["id"], asked["revision"]) == ("owner/model", "main")
    assert "*.safetensors" in asked["allow_patterns"] and not {"*.bin", "*.py"} & set(asked["allow_patterns"])


def test_a_download_is_reported_in_words(capfd):
    said = []
    bar_class = spoken_bar(said.append, "Fetching a/b", seconds=0)
    with bar_class(desc="files", total=3) as files, bar_class(total=0, unit="B", unit_scale=True) as transfer:
        files.update(1)
        transfer.total += 16 * 10**9
        transfer.refresh()
        transfer.n = 4 * 10**9
        transfer.refresh()
    assert said[:2] == ["Fetching a/b: 0.00 of 16.00 GB", "Fetching a/b: 4.00 of 16.00 GB"]
    assert capfd.readouterr() == ("", "")


def test_devices(monkeypatch):
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(OptionError, match="no usable CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(OptionError, match="2 CUDA devices: 0 to 1") as caught:
        resolve_device("cuda:2")
    assert (caught.value.option, caught.value.value) == ("target.device", "cuda:2")


def test_dtype_auto(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for capability, expected in (
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx2": True, "amx_bf16": False}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capability: found, raising=False)
        assert resolve_dtype("auto", cpu) is expected
    assert resolve_dtype("auto", cuda) is torch.bfloat16
    assert resolve_dtype("float16", cpu) is torch.float16


def test_dtype_auto_reads_the_processor_flags_where_torch_cannot_tell(monkeypatch, tmp_path):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "CPUINFO", cpuinfo)
    assert not devices.cpu_multiplies_bfloat16()
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse4_2 avx512_bf16 amx_int8\n")
    assert devices.cpu_multiplies_bfloat16()


def test_unknown_attention_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(pretrained, "snapshot_download", lambda *a, **k: pytest.fail("download started"))
    with pytest.raises(OptionError, match="choices: .*sdpa") as caught:
        load(TargetConfig(name="hf", path="a/b", attention="sdpaa", device="cpu"), silent)
    assert caught.value.option == "target.attention"


def test_out_of_memory(folder, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(OptionError, match="target.device_map=auto") as caught:
        load(hf(folder), silent)
    assert caught.value.option == "target.device"
