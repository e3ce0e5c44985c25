"""The report's figures: drawn once by matplotlib, as SVG that takes its colours from the page, and as PNG."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.plots import error_bars
from experiments.report.stored import StoredRun, short

logging.getLogger("matplotlib").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Palette:
    """Colours of a figure: text, axes, grid, background, and six series."""

    ink: str
    muted: str
    grid: str
    paper: str
    series: tuple[str, ...]


PRINT = Palette(
    "#1a1f29", "#5b6472", "#e3e7ee", "#ffffff",
    ("#2563eb", "#d9480f", "#0b8a5f", "#9333ea", "#b7791f", "#0e7490"),
)  # fmt: skip
# Stand-ins, each of which becomes a variable of the page's style.
PAGE = Palette("#010203", "#020304", "#030405", "#040506", tuple(f"#0a0b0{i}" for i in range(1, 7)))
VARIABLES = {PAGE.ink: "--ink", PAGE.muted: "--muted", PAGE.grid: "--grid", PAGE.paper: "--card"} | {
    colour: f"--s{i}" for i, colour in enumerate(PAGE.series, start=1)
}
Draw = Callable[[Axes, Palette], None]
MARKERS = "osD^vP"
PHASES = ("prefill", "draft", "target", "rule", "other")


@dataclass
class Chart:
    """A figure of the report.

    Arguments:
        name: of its file. title, alt: said above it, and instead of it. svg: inline, coloured by the page.
        png: the file's content.
    """

    name: str
    title: str
    alt: str
    svg: str
    png: bytes


def all_charts(runs: list[StoredRun], predicted: dict[str, list[tuple[int, float]]]) -> list[Chart]:
    """Every figure that these runs allow.

    Arguments:
        predicted: (γ, speedup) of the speed model by drafter, where γ varies.
    """
    charts = list(_against_options(runs, predicted))
    charts.append(_acceptance_by_position(runs))
    charts += [_domains(runs, "acceptance_rate"), _domains(runs, "speedup")]
    charts += [_histogram(runs), _breakdown(runs)]
    return [chart for chart in charts if chart is not None]


def _against_options(runs: list[StoredRun], predicted) -> Iterator[Chart | None]:
    """Acceptance, tokens per step and speedup against each numeric option that varies."""
    for option in runs[0].options:
        values = [r.options[option] for r in runs]
        if len(set(values)) < 2 or not all(_is_number(v) for v in values):
            continue
        name = short(option).replace("_", " ")
        lines: dict[str, list[StoredRun]] = {}
        for run in sorted(runs, key=lambda r: r.options[option]):
            rest = [f"{short(n)}={v}" for n, v in run.options.items() if n != option]
            lines.setdefault(", ".join(rest), []).append(run)
        for measure, title in (
            ("speedup", "Speedup"),
            ("acceptance_rate", "Acceptance rate α"),
            ("block_efficiency", "Block efficiency τ"),
        ):
            curves = predicted if measure == "speedup" and option == "drafter.gamma" else {}
            yield _curve(option, name, measure, title, lines, curves)


def _curve(option, name, measure, title, lines, predicted) -> Chart | None:
    points = {
        label: [(r.options[option], r.overall[measure]) for r in of_line if r.overall[measure]]
        for label, of_line in lines.items()
    }

    def draw(axes: Axes, c: Palette) -> None:
        for i, (label, of_line) in enumerate(points.items()):
            xs = [x for x, _ in of_line]
            error_bars(axes, xs, [p for _, p in of_line], fmt=f"{MARKERS[i % 6]}-", color=c.series[i % 6],
                       label=label or "measured", ms=4.5, lw=1.4)  # fmt: skip
        for i, (label, of_line) in enumerate(predicted.items()):
            axes.plot(*zip(*of_line, strict=True), "--", color=c.series[i % 6], lw=1.2, alpha=0.75,
                      label=f"predicted {label}".strip())  # fmt: skip
        if measure == "speedup":
            axes.axhline(1.0, color=c.muted, lw=0.9, ls=":")
        if measure == "acceptance_rate":
            axes.set_ylim(0, 1.02)
        axes.set(xlabel={"γ": "γ (draft length)"}.get(name, name), ylabel=title)
        if all(isinstance(x, int) for of_line in points.values() for x, _ in of_line):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(points) + len(predicted) > 1:
            axes.legend()

    if not any(points.values()):
        return None
    said = "; ".join(
        f"{label or 'measured'}: " + ", ".join(f"{p['value']:.2f} at {x}" for x, p in of_line)
        for label, of_line in points.items()
    )
    return _chart(f"{measure}_against_{short_name(option)}", f"{title} against {name}", said, draw)


def _acceptance_by_position(runs: list[StoredRun]) -> Chart | None:
    runs = [r for r in runs if r.overall["positions"]["offered"]]
    if not runs:
        return None
    single = len(runs) == 1

    def draw(axes: Axes, c: Palette) -> None:
        for i, run in enumerate(_few(runs)):
            found = run.overall["positions"]
            x = np.arange(1, len(found["offered"]) + 1)
            style = {"ms": 4.5, "lw": 1.4}
            if single:
                error_bars(axes, x - 0.06, found["alpha_conditional"], fmt="o-", color=c.series[0],
                           label="given the ones before", **style)  # fmt: skip
                error_bars(axes, x + 0.06, found["alpha_unconditional"], fmt="s--", color=c.series[1],
                           label="unconditional", **style)  # fmt: skip
            else:
                shift = 0.08 * (i - (min(len(runs), 6) - 1) / 2)
                error_bars(axes, x + shift, found["alpha_conditional"], fmt=f"{MARKERS[i % 6]}-",
                           color=c.series[i % 6], label=run.label, **style)  # fmt: skip
        axes.set(xlabel="draft position (tree depth)", ylabel="accepted share", ylim=(0, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best" if single else "lower left")

    said = "; ".join(
        f"{r.label}: "
        + ", ".join(f"{p['value']:.2f}" for p in r.overall["positions"]["alpha_conditional"] if _finite(p))
        for r in _few(runs)
    )
    title = "Acceptance by draft position" + ("" if single else ", given the ones before")
    return _chart("acceptance_by_position", title, said, draw)


def _domains(runs: list[StoredRun], measure: str) -> Chart | None:
    runs = [r for r in _few(runs) if r.overall[measure]]
    domains = list(dict.fromkeys(d for r in runs for d in r.summary["domains"]))
    if not runs or len(domains) < 2:
        return None
    title = {"acceptance_rate": "Acceptance rate α", "speedup": "Speedup"}[measure]

    def draw(axes: Axes, c: Palette) -> None:
        names = [*(d for d in domains if d != "all"), "all"]
        for i, run in enumerate(runs):
            shift = 0.6 * ((i + 0.5) / len(runs) - 0.5)
            for row, domain in enumerate(names):
                numbers = run.overall if domain == "all" else run.summary["domains"].get(domain)
                point = numbers and numbers[measure]
                if not point or not _finite(point):
                    continue
                style = {"color": c.series[i % 6], "ms": 4.5, "label": run.label if row == 0 else None}
                axes.plot(point["value"], row + shift, MARKERS[i % 6], **style)
                if point["low"] is not None:
                    axes.plot([point["low"], point["high"]], [row + shift] * 2, color=c.series[i % 6], lw=1.4)
        if measure == "speedup":
            axes.axvline(1.0, color=c.muted, lw=0.9, ls=":")
        else:
            axes.set_xlim(0, 1.02)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(f"{title} (95 % interval)")
        if len(runs) > 1:
            axes.legend(loc="best")

    points = {d: [r.summary["domains"].get(d, {}).get(measure) for r in runs] for d in domains}
    said = "; ".join(
        f"{d}: " + ", ".join(f"{p['value']:.2f}" for p in of_domain if p and _finite(p))
        for d, of_domain in points.items()
    )
    height = 0.75 + len(domains) * (0.14 + 0.075 * len(runs))
    return _chart(f"{measure}_by_domain", f"{title} by domain", said, draw, height)


def _histogram(runs: list[StoredRun]) -> Chart | None:
    runs = [r for r in _few(runs) if r.overall["histogram"]]
    if not runs:
        return None

    def draw(axes: Axes, c: Palette) -> None:
        width = 0.8 / len(runs)
        for i, run in enumerate(runs):
            share = np.array(run.overall["histogram"]) / sum(run.overall["histogram"])
            x = np.arange(len(share)) + width * (i + 0.5) - 0.4
            axes.bar(x, 100 * share, width * 0.92, color=c.series[i % 6], label=run.label)
        axes.set(xlabel="drafted tokens accepted in a step", ylabel="share of steps (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(runs) > 1:
            axes.legend()

    said = "; ".join(f"{r.label}: {r.overall['histogram']}" for r in runs)
    return _chart("accepted_histogram", "Accepted tokens per step", said, draw)


def _breakdown(runs: list[StoredRun]) -> Chart | None:
    bars = [("autoregressive", runs[0], "autoregressive"), *((r.label, r, "speculative") for r in runs)]
    bars = [(label, r, m) for label, r, m in bars if r.overall["new_tokens"].get(m)]
    if len(runs) == 1:
        bars = [(m, r, m) for _, r, m in bars]

    def draw(axes: Axes, c: Palette) -> None:
        for row, (_, run, method) in enumerate(bars):
            left = 0.0
            for i, phase in enumerate(PHASES):
                ms = _milliseconds(run, method, phase)
                axes.barh(row, ms, 0.62, left=left, color=c.series[(2, 1, 0, 3, 4)[i]], edgecolor=c.paper,
                          linewidth=0.6, label=phase if row == 0 else None)  # fmt: skip
                left += ms
        axes.set_yticks(range(len(bars)), [_wrapped(label) for label, _, _ in bars])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per new token")
        axes.figure.legend(loc="outside lower center", ncols=5, columnspacing=1.0, handlelength=1.0)
        axes.grid(False, axis="y")

    said = "; ".join(
        f"{label}: " + ", ".join(f"{phase} {_milliseconds(run, m, phase):.2f} ms" for phase in PHASES)
        for label, run, m in bars
    )
    return _chart("time_breakdown", "Where the time goes", said, draw, height=1.1 + 0.28 * len(bars))


def _milliseconds(run: StoredRun, method: str, phase: str) -> float:
    numbers = run.overall
    return 1000 * numbers["phase_seconds"][method].get(phase, 0.0) / numbers["new_tokens"][method]


def _chart(name: str, title: str, alt: str, draw: Draw, height: float = 2.55) -> Chart:
    svg, png = io.BytesIO(), io.BytesIO()
    for palette, file, form in ((PAGE, svg, "svg"), (PRINT, png, "png")):
        with matplotlib.rc_context(_style(palette, name)):
            figure = Figure(figsize=(3.8, max(height, 2.55)), layout="constrained")
            draw(figure.subplots(), palette)
            metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
            figure.savefig(file, format=form, dpi=200, transparent=form == "svg", metadata=metadata)
    return Chart(name, title, alt, _themed(svg.getvalue().decode(), name), png.getvalue())


def _style(c: Palette, name: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "figure.facecolor": c.paper,
        "axes.facecolor": "none",
        "font.family": "sans-serif",
        "font.size": 8.5,
        "axes.edgecolor": c.muted,
        "axes.labelcolor": c.ink,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": c.grid,
        "grid.linewidth": 0.8,
        "text.color": c.ink,
        "xtick.color": c.muted,
        "ytick.color": c.muted,
        "xtick.labelcolor": c.ink,
        "ytick.labelcolor": c.ink,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "errorbar.capsize": 2,
    }


def _themed(svg: str, name: str) -> str:
    """Inline SVG in the page's colours, its ids its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r"font: [^;\"]*?([\d.]+)px[^;\"]*", r"font: \1px var(--font)", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"\s*\n\s*", "\n", svg).strip()
    return svg.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title {name}-alt" ', 1)


def short_name(option: str) -> str:
    return option.rpartition(".")[2]


def _few(runs: list[StoredRun]) -> list[StoredRun]:
    """As many as can be told apart in one figure, evenly spread."""
    if len(runs) <= 6:
        return runs
    return [runs[i] for i in np.linspace(0, len(runs) - 1, 6).round().astype(int)]


def _wrapped(label: str, width: int = 22) -> str:
    lines = [""]
    for part in label.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(point: dict[str, float | None]) -> bool:
    return point["value"] is not None and np.isfinite(point["value"])
