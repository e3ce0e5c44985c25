"""The same model with another key/value cache: what each of the known savings would make of it."""

from __future__ import annotations

from dataclasses import replace

from specdec.roofline.architecture import Architecture, Latent


def with_kv_heads(arch: Architecture, kv_heads: int) -> Architecture:
    """Grouped-query attention (Ainslie et al. 2305.13245) with K heads; K = N is multi-head, K = 1
    multi-query.
    """
    return replace(arch, kv_heads=kv_heads, latent=None)


def with_latent(arch: Architecture, rank: int = 512, rope: int = 64) -> Architecture:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434 §2.1) caching `rank` + `rope` numbers per
    token.
    """
    return replace(arch, latent=Latent(rank, rope, nope=arch.head_dim, value=arch.head_dim))


def with_sharing(arch: Architecture, layers: int = 2) -> Architecture:
    """Cross-layer attention (Brandon et al. 2405.12981): `layers` neighbours share one cache."""
    return replace(arch, owns_cache=tuple(i % layers == 0 for i in range(arch.layers)))


def with_windows(arch: Architecture, window: int = 1024, global_every: int = 6) -> Architecture:
    """Sliding windows, every `global_every`-th layer looking at everything (Gemma 3, 2503.19786 §2)."""
    windows = tuple(None if (i + 1) % global_every == 0 else window for i in range(arch.layers))
    return replace(arch, windows=windows)


def variants(arch: Architecture) -> dict[str, Architecture]:
    """Label → architecture, the model's own first."""
    found = {"as it is": arch, "MHA": with_kv_heads(arch, arch.heads)}
    for kv_heads in (8, 4):
        if arch.heads > kv_heads and arch.heads % kv_heads == 0:
            found[f"GQA, {kv_heads} heads"] = with_kv_heads(arch, kv_heads)
    return found | {
        "MQA": with_kv_heads(arch, 1),
        "MLA, 512 + 64": with_latent(arch),
        "own, 2 layers share": with_sharing(arch),
        "own, window 1024, 1 global in 6": with_windows(arch),
    }
