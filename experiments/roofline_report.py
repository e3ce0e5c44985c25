"""Tables, notes and the plot of `task=roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import plots
from specdec.roofline import Accelerator

COLORS = {"prefill": "tab:blue", "decode": "tab:red", "verify": "tab:green"}


def tables(results: dict[str, Any], task: Any) -> list[Table]:
    """Decode speed, intensities, cache variants, and what was measured."""
    found = [_decode(results, task), _phases(results, task), _variants(results, task)]
    return [*found, _timed(results)] if results["timed"] else found


def notes(results: dict[str, Any], task: Any) -> list[str]:
    """What the tables mean."""
    exact = f", exactly {results['parameters']:,}" if results["parameters"] else ""
    lines = [
        f"{results['architecture']}: {results['num_params']:,} parameters = 2VD + 3DFL + (2DNH + 2DKH)L"
        f"{exact}; {gb(results['weight_bytes'])} of weights in {task.weights}.",
        f"Keys and values of one sequence of {task.context} tokens: {gb(results['kv_bytes_per_sequence'])}.",
        "Memory, latency, throughput: everything is read once per step, B·KV + weights, at full bandwidth; "
        "what does not fit into the accelerator's memory is marked.",
        "Free width: so many tokens may a verify forward hold within 10 % of a decode forward's time.",
    ]
    decode = next((t for t in results["timed"] if t["phase"] == "decode"), None)
    own = next((a for a in results["accelerators"] if a["measured"]), None)
    if decode and own:
        share = decode["bytes_per_second"] / own["bandwidth"]
        lines.append(
            f"The target decodes at {1 / decode['seconds']:.1f} tok/s at context {decode['context']}, "
            f"moving {gb(decode['bytes_per_second'])}/s: {share:.0%} of this machine's measured bandwidth."
        )
    return lines


def _decode(results: dict[str, Any], task: Any) -> Table:
    table = Table(title=f"a decode step at context {task.context}", box=SIMPLE_HEAD)
    for column in ("accelerator", "bandwidth", "ridge", "free width", "batch", "memory", "latency", "tok/s"):
        table.add_column(column, justify="left" if column == "accelerator" else "right")
    about = {a["name"]: a for a in results["accelerators"]}
    for step in results["decode_steps"]:
        a = about[step["accelerator"]]
        name = f"{a['name']} (measured)" if a["measured"] else a["name"]
        first = step["batch"] == task.batches[0]
        table.add_row(
            *(
                (name, f"{a['bandwidth'] / 1e9:,.0f} GB/s", f"{a['ridge']:.0f}", str(a["free_width"]))
                if first
                else ("", "", "", "")
            ),
            str(step["batch"]),
            gb(step["memory"]) + ("" if step["fits"] is not False else " !"),
            f"{1000 * step['latency']:,.1f} ms",
            f"{step['throughput']:,.0f}" if step["throughput"] >= 100 else f"{step['throughput']:.1f}",
        )
    return table


def _phases(results: dict[str, Any], task: Any) -> Table:
    table = Table(title="FLOPs, bytes and arithmetic intensity of a forward", box=SIMPLE_HEAD)
    for column in ("phase", "batch", "tokens", "GFLOPs", "memory moved", "FLOPs per byte"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for p in results["phases"]:
        cells = (str(p["batch"]), str(p["tokens"]), f"{p['flops'] / 1e9:,.1f}", gb(p["bytes"]))
        table.add_row(p["phase"], *cells, f"{p['intensity']:,.1f}")
    return table


def _variants(results: dict[str, Any], task: Any) -> Table:
    table = Table(title=f"keys and values per sequence of {task.context} tokens", box=SIMPLE_HEAD)
    table.add_column("variant")
    table.add_column("size", justify="right")
    table.add_column("of its own", justify="right")
    own = results["kv_bytes_per_sequence"]
    for name, size in results["variants"].items():
        table.add_row(name, gb(size), f"{size / own:.2f} ×")
    return table


def _timed(results: dict[str, Any]) -> Table:
    table = Table(title="this machine, the target timed at batch 1", box=SIMPLE_HEAD)
    for column in ("phase", "tokens", "context", "dtype", "ms", "GFLOP/s", "GB/s"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for t in results["timed"]:
        cells = (str(t["tokens"]), str(t["context"]), t["dtype"], f"{1000 * t['seconds']:.1f}")
        table.add_row(
            t["phase"], *cells, f"{t['flops_per_second'] / 1e9:,.1f}", f"{t['bytes_per_second'] / 1e9:,.1f}"
        )
    return table


def plot(results: dict[str, Any], processors: list[Accelerator], stem: Path) -> list[Path]:
    """The rooflines, the model's intensities on them, and the points that were measured."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    intensity = np.logspace(-1.5, 4.5, 400)
    for p in processors:
        for dtype in p.flops if p.measured else ["bfloat16"]:
            label = f"{p.name}, {dtype}, measured" if p.measured else p.name
            roof = np.minimum(intensity * p.bandwidth, p.peak(dtype))
            axes.loglog(intensity, roof, lw=2.2 if p.measured else 1, label=label)
    batches = sorted({p["batch"] for p in results["phases"]})
    for p in results["phases"]:
        first = p["batch"] == batches[0]
        style = "-" if first else "--"
        axes.axvline(p["intensity"], color=COLORS[p["phase"]], ls=style, lw=0.8)
        axes.annotate(
            f"{p['phase']}, batch {p['batch']}",
            (p["intensity"], 0.0 if first else 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-9, 6) if first else (3, -6),
            textcoords="offset points",
            rotation=90,
            va="bottom" if first else "top",
            fontsize=7,
            color=COLORS[p["phase"]],
        )
    for t in results["timed"]:
        point = (t["intensity"], t["flops_per_second"])
        axes.plot(*point, "o", color=COLORS[t["phase"]], ms=8, label=f"{t['phase']}, measured here")
    axes.set(xlabel="arithmetic intensity, FLOPs per byte", ylabel="FLOPs per second")
    axes.set_title(f"Roofline of {results['architecture']}")
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize=7, loc="outside lower center", ncols=3)
    return plots.save(figure, stem)


def gb(size: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}" if size < 100 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} B"
