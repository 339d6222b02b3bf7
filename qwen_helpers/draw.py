"""Pictures in one style. Each function returns a Picture, whose title states the finding.

A colour means one thing in the whole course (Okabe-Ito, safe for colour-blind readers). Pictures are white
cards, so they read on a projector and in a dark theme. Chinese text is drawn with the font kept in `fonts/`.
"""
import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure

matplotlib.use("agg", force=False)
COLOUR = dict(query="#0072B2", key="#E69F00", value="#F0E442", state="#CC79A7", drafted="#56B4E9",
              accepted="#009E73", rejected="#D55E00", plain="#444444", pale="#E8E8E8")
FONT = Path(__file__).with_name("fonts") / "DroidSansFallback-subset.ttf"
if FONT.exists():
    font_manager.fontManager.addfont(FONT)
STYLE = {"font.size": 13, "axes.titlesize": 15, "axes.titlelocation": "left", "lines.linewidth": 2.5,
         "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
         "font.family": ["DejaVu Sans", "Droid Sans Fallback"], "svg.hashsalt": "qwen", "svg.fonttype": "none",
         "axes.unicode_minus": False, "legend.frameon": False}


class Picture:
    """A drawn figure with its alt text; shows as PNG in a notebook, and as that text where nothing is drawn."""

    def __init__(self, fig, alt):
        self.fig, self.alt = fig, alt

    def _bytes(self, **how):
        out = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.fig.savefig(out, bbox_inches="tight", **how)
        return out.getvalue()

    def png(self):
        return self._bytes(format="png", dpi=90, metadata={"Software": None})

    def svg(self):
        return self._bytes(format="svg", metadata={"Date": None}).decode()

    def _repr_mimebundle_(self, **_):
        return {"image/png": self.png(), "text/plain": self.alt}, {"image/png": {"alt": self.alt}}

    def __repr__(self):
        return self.alt


def canvas(title, height=3.2, cols=1, width=7.2):
    """An empty figure in the course's style: (fig, ax), or (fig, axes) with `cols` > 1. The title wraps."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(1, cols)
        fig.suptitle(title, x=0.01, ha="left", fontsize=15, wrap=True)
    return fig, axes


def numbers(x):
    """Any tensor, array or list as a numpy array of floats."""
    return np.asarray(x.detach().float().cpu() if hasattr(x, "detach") else x, dtype=float)


def styled(draw):
    """Draw inside the course's style."""
    def inside(*args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)
    inside.__name__, inside.__doc__, inside.__wrapped__ = draw.__name__, draw.__doc__, draw
    return inside


@styled
def lines(x, series, title, xlabel="", ylabel="", colours=None, log="", marks=None, points=False, height=3.2):
    """One line for each name -> values of `series`; `log` is "x", "y" or "xy"; `marks` name -> x draws a dotted line."""
    fig, ax = canvas(title, height)
    spare = iter([c for name, c in COLOUR.items() if name not in ("value", "pale")] * 2)
    for name, values in series.items():
        colour = (colours or {}).get(name) or COLOUR.get(name) or next(spare)
        ax.plot(numbers(x), numbers(values), label=name, color=colour, marker="o" if points else None)
    for name, at in (marks or {}).items():
        ax.axvline(at, color=COLOUR["plain"], ls=":", lw=1.5)
        ax.annotate(f" {name}", (at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=11)
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if "x" in log else "linear",
           yscale="log" if "y" in log else "linear")
    if len(series) > 1 or next(iter(series)):
        ax.legend(fontsize=12)
    ends = "; ".join(f"{name} {numbers(v)[0]:.3g} to {numbers(v)[-1]:.3g}" for name, v in series.items())
    return Picture(fig, f"{title}. Lines over {xlabel or 'x'}: {ends}")


@styled
def bars(labels, values, title, xlabel="", colours=None, intervals=None, texts=None, marks=None, height=None):
    """Horizontal bars, the first on top. `intervals` are (low, high) pairs, `texts` stand at the bars' ends."""
    values = numbers(values)
    fig, ax = canvas(title, height or 0.7 + 0.42 * len(values))
    y = np.arange(len(values))
    ax.barh(y, values, color=colours or COLOUR["query"], height=0.7)
    if intervals is not None:
        low, high = numbers(intervals).T
        ax.errorbar(values, y, xerr=[values - low, high - values], fmt="none", color="black", lw=1.5, capsize=3)
    for i, text in enumerate(texts or []):
        end = max(values[i], intervals[i][1] if intervals is not None else 0)
        ax.annotate(f"  {text}", (end, i), va="center", fontsize=11)
    for name, at in (marks or {}).items():
        ax.axvline(at, color=COLOUR["plain"], ls=":", lw=1.5, label=name)
    if marks:
        ax.legend(fontsize=11)
    ax.set_yticks(y, labels)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    facts = "; ".join(f"{label} {value:.3g}" for label, value in zip(labels, values))
    return Picture(fig, f"{title}. Bars: {facts}")


@styled
def heat(matrices, title, x=None, y=None, xlabel="", ylabel="", names=None, limit=None, height=3.2):
    """One or several matrices as colours, side by side: blue below zero, white zero, red above; one scale for all."""
    matrices = [numbers(m) for m in (matrices if isinstance(matrices, (list, tuple)) else [matrices])]
    limit = limit or max(np.abs(m).max() for m in matrices) or 1
    fig, axes = canvas(title, height, len(matrices))
    for i, (ax, matrix) in enumerate(zip(np.atleast_1d(axes), matrices)):
        image = ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        ax.set_title(names[i] if names else "", fontsize=12)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel if i == 0 else "")
        ax.spines[:].set_visible(False)
        if x is not None:
            ax.set_xticks(range(len(x)), x, rotation=60 if max(map(len, map(str, x))) > 3 else 0, fontsize=10)
        if y is not None and i == 0:
            ax.set_yticks(range(len(y)), y, fontsize=10)
        elif i:
            ax.set_yticks([])
    fig.colorbar(image, ax=axes, shrink=0.8)
    sizes = ", ".join(f"{m.shape[0]}×{m.shape[1]}" for m in matrices)
    return Picture(fig, f"{title}. {len(matrices)} map(s) of {sizes}, largest magnitude {limit:.3g}")


@styled
def tokens(texts, title="", colours=None, notes=None, per_row=60, height=None):
    """Texts as boxes in reading order, `colours` a name of the palette for each, a small note under each."""
    rows, width = [[]], 0
    for i, text in enumerate(texts):
        shown = text.replace("\n", "↵").replace(" ", "␣")
        wide = max(sum(1.8 if ord(c) > 0x2E80 else 1 for c in shown), len(str(notes[i])) if notes else 1) + 1.2
        if width + wide > per_row and rows[-1]:
            rows.append([])
            width = 0
        rows[-1].append((i, shown, width, wide))
        width += wide
    fig, ax = canvas(title, height or 0.5 + 0.62 * len(rows))
    for r, row in enumerate(rows):
        for i, shown, left, wide in row:
            name = colours[i] if colours else "pale"
            ax.add_patch(matplotlib.patches.FancyBboxPatch(
                (left, -r), wide - 0.5, 0.55, boxstyle="round,pad=0.02", fc=COLOUR.get(name, name), ec="#888888"))
            dark = name in ("query", "accepted", "rejected", "plain")
            ax.text(left + wide / 2 - 0.25, 0.27 - r, shown, ha="center", va="center", fontsize=12,
                    family=STYLE["font.family"], color="white" if dark else "black")
            if notes:
                ax.text(left + wide / 2 - 0.25, -0.2 - r, notes[i], ha="center", va="center", fontsize=9)
    ax.set(xlim=(-0.5, per_row), ylim=(-len(rows) + 0.6, 0.7))
    ax.axis("off")
    return Picture(fig, f"{title}. Tokens: {' | '.join(texts)}")
