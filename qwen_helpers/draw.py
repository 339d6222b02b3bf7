"""Pictures in one style. Each function returns a Picture, whose title states the finding.

A colour means one thing in the whole course (Okabe-Ito, safe for colour-blind readers). Pictures are white
cards, so they read on a projector and in a dark theme. Chinese text is drawn with the font kept in `fonts/`, other
scripts with a font of the system where one has them; a character that no font draws is named, as in ⟨U+1F409⟩.
"""
import functools
import io
import itertools
import textwrap
import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import font_manager, ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from PIL import Image

matplotlib.use("agg", force=False)
COLOUR = dict(query="#0072B2", key="#E69F00", value="#F0E442", state="#CC79A7", drafted="#56B4E9",
              accepted="#009E73", rejected="#D55E00", plain="#444444", pale="#E8E8E8")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FONT = Path(__file__).with_name("fonts") / "DroidSansFallback-subset.ttf"
if FONT.exists():
    font_manager.fontManager.addfont(FONT)
STYLE = {"font.size": 13, "axes.titlesize": 15, "axes.titlelocation": "left", "lines.linewidth": 2.5,
         "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
         "font.family": ["DejaVu Sans", "Droid Sans Fallback"], "axes.unicode_minus": False, "legend.frameon": False,
         "text.parse_math": False,              # a token may be a dollar
         "figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.1}


def font(name):
    """The font that matplotlib takes for a family."""
    wanted = font_manager.FontProperties(family=[name])        # a bare string would be read as a pattern
    return font_manager.get_font(font_manager.findfont(wanted, fallback_to_default=False))


@functools.cache
def codes(name):
    """The code points that a font family has glyphs for; none if its file cannot be read."""
    try:
        return np.fromiter(font(name).get_charmap(), np.uint32)
    except (OSError, RuntimeError, ValueError):
        return np.empty(0, np.uint32)


def draws(name, char):
    """Whether a font family leaves ink for a character, or room for a space."""
    if ord(char) not in codes(name):
        return False
    try:
        left, low, right, high = font(name).load_char(ord(char)).bbox
    except RuntimeError:                                # a font of bitmaps only
        return False
    return char.isspace() or right > left and high > low


@functools.cache
def family(chars):
    """The font family that draws all of `chars`: one of the course's own, else one of the system; None if none does.

    Control, format, private-use and unassigned characters have no form that fonts agree on.
    """
    if any(unicodedata.category(char).startswith("C") for char in chars):
        return None
    upright = {entry.name for entry in font_manager.fontManager.ttflist if entry.style == "normal"
               and entry.weight in (400, "normal", "regular") and "LastResort" not in entry.fname}
    names = dict.fromkeys([*STYLE["font.family"], *sorted(upright)])
    return next((name for name in names if all(draws(name, char) for char in chars)), None)


def is_mark(char):
    """Whether a character is drawn on the one before it, as an accent or the skin tone of an emoji is."""
    return unicodedata.category(char).startswith("M") or "\U0001F3FB" <= char <= "\U0001F3FF"


def letters(text):
    """A text as its characters, each with the marks on it: matplotlib draws these from one font."""
    parts = []
    for char in text:
        if parts and is_mark(char):
            parts[-1] += char
        else:
            parts.append(char)
    return parts


def named(text, hidden):
    """A text in which one `hidden` character is named, and several are boxes, which take less room."""
    text = text.replace("\t", "⇥").replace("\r", "⟨CR⟩")
    one = sum(char in hidden for char in text) == 1
    return "".join(char if char not in hidden else f"⟨U+{ord(char):04X}⟩" if one else "□" for char in text)


def drawable(text):
    """A text of lines without what no font draws."""
    lost = [letter for line in text.split("\n") for letter in letters(line) if family(letter) is None]
    return named(text, {char for letter in lost for char in letter if is_mark(char) or family(char) is None})


class Renderer(RendererAgg):
    """All text passes here to be measured and drawn: it is made drawable, in its own fonts and others that it needs."""

    def draw_text(self, gc, x, y, s, prop, *args, **kwargs):
        super().draw_text(gc, x, y, *self.fitted(s, prop), *args, **kwargs)

    def get_text_width_height_descent(self, s, prop, ismath):
        return super().get_text_width_height_descent(*self.fitted(s, prop), ismath)

    def fitted(self, text, prop):
        text, prop = drawable(text), prop.copy()
        prop.set_family(list(dict.fromkeys([*prop.get_family(), *map(family, letters(text))])))
        return text, prop


class Canvas(FigureCanvasAgg):
    """A canvas with this renderer."""

    def get_renderer(self):
        new = super().get_renderer()
        if not isinstance(new, Renderer):
            self.renderer = Renderer(new.width, new.height, new.dpi)
        return self.renderer


class Picture:
    """A drawn figure with its alt text; shows as PNG in a notebook, and as that text where nothing is drawn.

    `more`, mimetype -> content, is kept beside the PNG in a notebook's output.
    """

    def __init__(self, fig, alt, more=None):
        self.fig, self.alt, self.more = fig, alt, more or {}
        fig.set_canvas(Canvas(fig))

    def png(self, quick=False):
        """A PNG of at most 256 colours: a third of the size, and no colour off by more than a shade. Or a `quick` one."""
        paper, out = self.fig.canvas, io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.fig.set_dpi(106 if quick else 90)              # a demo is shown 760 pixels wide
            paper.draw()
        image = Image.fromarray(np.asarray(paper.buffer_rgba())).convert("RGB")
        if quick:
            image.save(out, "png", compress_level=1)
        else:
            few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(out, "png", optimize=True)
        return out.getvalue()

    def _repr_mimebundle_(self, **_):
        return {"image/png": self.png(), "text/plain": self.alt, **self.more}, {"image/png": {"alt": self.alt}}

    def __repr__(self):
        return self.alt


def canvas(title, height=3.2, cols=1, width=7.2):
    """An empty figure in the course's style: (fig, ax), or (fig, axes) with `cols` > 1. Long titles make it higher."""
    folded = [part for line in drawable(title).split("\n") for part in textwrap.wrap(line, 60)]
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height + 0.26 * max(0, len(folded) - 1)), layout="constrained")
        axes = fig.subplots(1, cols)
        fig.suptitle("\n".join(folded), x=0.01, ha="left", fontsize=15)
    return fig, axes


def numbers(x):
    """Any tensor, in any dtype, array or list of such as a numpy array of floats."""
    if isinstance(x, (list, tuple)):
        return np.array([numbers(part) for part in x], dtype=float)
    return np.asarray(x.detach().float().cpu() if hasattr(x, "detach") else x, dtype=float)


def styled(draw):
    """Draw inside the course's style."""
    def inside(*args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)
    inside.__name__, inside.__doc__, inside.__wrapped__ = draw.__name__, draw.__doc__, draw
    return inside


def number(x, _=None):
    """A tick of a log axis: a power of ten, where the number itself has many digits."""
    if 1e-3 <= x < 1e6:
        return f"{x:,g}"
    digit, power = f"{x:.0e}".split("e")
    return digit.replace("1", "", 1) + "·10"[digit == "1":] + str(int(power)).translate(RAISED)


def plain_ticks(axis, values):
    """Ticks as people write numbers: no half tokens along whole numbers, no powers of ten for everyday ones."""
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
        axis.set_minor_formatter(ticker.NullFormatter())
        axis.set_major_formatter(number)
    elif (values == values.round()).all():
        axis.set_major_locator(ticker.MaxNLocator("auto", integer=True))


@styled
def lines(x, series, title, xlabel="", ylabel="", colours=None, log="", marks=None, points=False, limits=None, height=3.2,
          beside=False):
    """One line for each name -> values of `series`; `log` is "x", "y" or "xy"; `marks` name -> x draws a dotted line.

    The legend of many lines stands `beside` them.
    """
    fig, ax = canvas(title, height)
    free = [name for name in dict.fromkeys(["plain", *COLOUR]) if name not in ("value", "pale", *series)]
    spare = itertools.cycle([COLOUR[name] for name in free] or [COLOUR["plain"]])
    for name, values in series.items():
        colour = (colours or {}).get(name) or COLOUR.get(name) or next(spare)
        ax.plot(numbers(x), numbers(values), label=name, color=colour, marker="o" if points else None)
    for name, at in (marks or {}).items():
        ax.axvline(at, color=COLOUR["plain"], ls=":", lw=1.5)
        ax.annotate(f" {name}", (at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=11)
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if "x" in log else "linear",
           yscale="log" if "y" in log else "linear", ylim=limits)
    for axis, values in (ax.xaxis, [x]), (ax.yaxis, series.values()):
        plain_ticks(axis, np.concatenate([numbers(some) for some in values]))
    if len(series) > 1 or next(iter(series)):
        place = dict(loc="upper left", bbox_to_anchor=(1, 1)) if beside or len(series) > 5 else {}
        ax.legend(fontsize=12, ncols=1 + (len(series) - 1) // 12, **place)
    ends = "; ".join(f"{name} {numbers(v)[0]:.3g} to {numbers(v)[-1]:.3g}" for name, v in series.items())
    return Picture(fig, f"{title}. Lines over {xlabel or 'x'}: {ends}")


@styled
def dials(hands, names, title, colours=None):
    """A row of clocks: `hands` name -> one angle a clock, in radians from the right, counter-clockwise."""
    fig, ax = canvas(title, 0.75 + 0.3 * any(hands) + 0.95 * ((len(names) + 7) // 8))
    for i, label in enumerate(names):
        x, y = 2.5 * (i % 8), -3.0 * (i // 8)
        ax.add_patch(matplotlib.patches.Circle((x, y), 1, fc="white", ec="#888888", lw=1.5))
        ax.annotate(label, (x, y - 1.15), ha="center", va="top", fontsize=10)
        for j, (name, angles) in enumerate(hands.items()):
            turn, colour = numbers(angles)[i], (colours or {}).get(name) or COLOUR.get(name, list(COLOUR.values())[j])
            ax.plot([x, x + 0.9 * np.cos(turn)], [y, y + 0.9 * np.sin(turn)], color=colour, lw=3.5,
                    solid_capstyle="round", label=name if name and i == 0 else None)
    ax.set(xlim=(-1.3, 18.8), ylim=(-2.2 - 3 * ((len(names) - 1) // 8), 1.2 + any(hands)), aspect="equal")
    ax.axis("off")
    if any(hands):
        fig.legend(loc="upper right", ncols=len(hands), fontsize=11, bbox_to_anchor=(1, 0.9))
    return Picture(fig, f"{title}. Clocks: {', '.join(names)}")


@styled
def bars(labels, values, title, xlabel="", colours=None, intervals=None, texts=None, marks=None, limit=None, height=None):
    """Horizontal bars, the first on top. `intervals` are (low, high) pairs, `texts` stand at the bars' ends."""
    values = numbers(values)
    fig, ax = canvas(title, height or 0.7 + 0.42 * max(len(values), 2 if xlabel else 1))
    y = np.arange(len(values))
    ax.barh(y, values, color=colours or COLOUR["plain"], height=0.7)
    if intervals is not None:
        intervals = numbers(intervals)
        low, high = intervals.T
        xerr = np.maximum([values - low, high - values], 0)             # the last bit of a 1.0 may be rounded away
        ax.errorbar(values, y, xerr=xerr, fmt="none", color="black", lw=1.5, capsize=3)
    for i, text in enumerate(texts or []):
        end = max(values[i], intervals[i][1] if intervals is not None else 0)
        ax.annotate(text, (end, i), (8, 0), textcoords="offset points", va="center", fontsize=11,
                    bbox=dict(fc="white", ec="none", pad=0.5))
    for name, at in (marks or {}).items():
        ax.axvline(at, color=COLOUR["plain"], ls=":", lw=1.5, label=name)
    if marks:
        ax.legend(fontsize=11)
    ax.set_yticks(y, labels)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    ax.set_xlim(right=limit)
    facts = "; ".join(f"{label} {value:.3g}" for label, value in zip(labels, values))
    return Picture(fig, f"{title}. Bars: {facts}")


@styled
def stacks(labels, rows, title, xlabel="", colours=None, limit=None, height=None):
    """For each label one bar a row, stacked from that row's name -> values; the row's name and the sum at its end."""
    thick, spare, inks, facts = 0.84 / len(rows), iter(COLOUR.values()), {}, []
    fig, ax = canvas(title, height or 1.0 + (0.24 * len(rows) + 0.18) * len(labels))
    for j, (row, parts) in enumerate(rows.items()):
        y, end = np.arange(len(labels)) + (j - (len(rows) - 1) / 2) * thick, np.zeros(len(labels))
        for name, values in parts.items():
            seen = name in inks
            inks[name] = inks.get(name) or (colours or {}).get(name) or COLOUR.get(name) or next(spare)
            ax.barh(y, numbers(values), 0.88 * thick, end, color=inks[name], label=None if seen else name)
            end = end + numbers(values)
        for label, place, x in zip(labels, y, end):
            ax.annotate(f"  {x:.3g}  {row}", (x, place), va="center", fontsize=10)
            facts.append(f"{label}, {row} {x:.3g}")
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    ax.set_xlim(0, limit or 1.3 * ax.get_xlim()[1])         # room for the text at the longest bar
    ax.legend(fontsize=11, loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, f"{title}. Stacked bars: {'; '.join(facts)}")


@styled
def heat(matrices, title, x=None, y=None, xlabel="", ylabel="", names=None, limit=None, height=3.2, digits=None):
    """One or several matrices as colours, side by side: blue below zero, white zero, red above; one scale for all.

    `digits` writes each number into its cell, with so many digits after the point.
    """
    matrices = [numbers(m) for m in (matrices if isinstance(matrices, (list, tuple)) else [matrices])]
    limit = limit or max(np.abs(m).max() for m in matrices) or 1
    fig, axes = canvas(title, height, len(matrices))
    for i, (ax, matrix) in enumerate(zip(np.atleast_1d(axes), matrices)):
        image = ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        ax.set_title(names[i] if names else "", fontsize=12)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel if i == 0 else "")
        ax.spines[:].set_visible(False)
        for (row, column), value in np.ndenumerate(matrix) if digits is not None else ():
            ax.text(column, row, f"{round(value, digits) + 0:.{digits}f}", ha="center", va="center", fontsize=11,
                    color="white" if abs(value) > 0.6 * limit else "black")
        if x is not None:
            x = [drawable(str(label)) for label in x]
            turn = dict(rotation=60, ha="right", rotation_mode="anchor") if max(map(len, x)) > 3 else {}
            ax.set_xticks(range(len(x)), x, fontsize=10, **turn)
        if y is not None and i == 0:
            ax.set_yticks(range(len(y)), y, fontsize=min(10, 50 * height / len(y)))
        elif i:
            ax.set_yticks([])
    low = -limit if min(m.min() for m in matrices) < 0 else 0
    fig.colorbar(image, ax=axes, shrink=0.8).ax.set_ylim(low, limit)
    sizes = ", ".join(f"{m.shape[0]}×{m.shape[1]}" for m in matrices)
    return Picture(fig, f"{title}. {len(matrices)} map(s) of {sizes}, largest magnitude {limit:.3g}")


def visible(text):
    """A text in which spaces, line ends and all that leaves no ink can be seen, and a mark without its letter."""
    text = text.replace("\n", "↵").replace(" ", "␣")
    bare = "◌" if text and is_mark(text[0]) else ""
    return bare + named(text, {char for char in text if not char.isprintable()})


def wrapped(texts, notes=None, per_row=60):
    """Rows of boxes: for each text its index, what is shown, where its box begins and how wide it is."""
    rows, width = [[]], 0
    for i, text in enumerate(texts):
        shown = drawable(visible(text))
        wide = max(sum(1.8 if ord(c) > 0x2E80 or c == "□" else 1 for c in shown),
                   len(drawable(str(notes[i]))) if notes else 1) + 1.2
        if width + wide > per_row and rows[-1]:
            rows.append([])
            width = 0
        rows[-1].append((i, shown, width, wide))
        width += wide
    return rows


def boxes(ax, texts, colours=None, notes=None, per_row=60):
    """Texts as boxes on `ax` in reading order, wrapped; returns the number of rows."""
    rows = wrapped(texts, notes, per_row)
    for r, row in enumerate(rows):
        for i, shown, left, wide in row:
            name = colours[i] if colours else "pale"
            ax.add_patch(matplotlib.patches.FancyBboxPatch(
                (left, -r), wide - 0.5, 0.55, boxstyle="round,pad=0.02", fc=COLOUR.get(name, name), ec="#888888"))
            ink = "white" if name in ("query", "accepted", "rejected", "plain") else "black"
            ax.text(left + wide / 2 - 0.25, 0.27 - r, shown, ha="center", va="center", fontsize=12, color=ink)
            if notes:
                ax.text(left + wide / 2 - 0.25, -0.2 - r, notes[i], ha="center", va="center", fontsize=10)
    ax.set(xlim=(-0.5, per_row), ylim=(-len(rows) + 0.6, 0.7))
    ax.axis("off")
    return len(rows)


@styled
def tokens(texts, title="", colours=None, notes=None, per_row=60, height=None):
    """Texts as boxes in reading order, `colours` a name of the palette for each, a small note under each."""
    fig, ax = canvas(title, 0.6)
    room = max(boxes(ax, texts, colours, notes, per_row), ((height or 0) - 0.6) / 0.62)
    ax.set_ylim(0.6 - room, 0.7)
    fig.set_figheight(fig.get_figheight() + 0.62 * room)
    return Picture(fig, f"{title}. Tokens: {' | '.join(texts)}")


ROUNDS = "application/vnd.qwen-rounds+json"      # the rounds of a player, in the output of its still


def round_story(rounds, pieces):
    """What a player of rounds shows, as data: the text of each emitted token, and of each round its words and counts."""
    told, drafts, hits, emitted, forwards = [], 0, 0, 0, 0
    for i, r in enumerate(rounds):
        drafts, hits, emitted = drafts + len(r.drafted), hits + r.accepted, emitted + len(r.kept)
        forwards += 1 + r.rolled_back
        if not r.drafted:
            title = f"the prompt of {r.pos} tokens is read" if i == 0 else "no room for a draft"
        elif r.rolled_back:
            title = f"{r.accepted} of {len(r.drafted)} drafted tokens right, the state is taken back"
        else:
            title = f"drafted right, {len(r.kept)} tokens from one forward"
        verdict = "✗  cut K/V, restore S, read again" if r.rolled_back else "✓  nothing to take back"
        came = f"the snapshot, then {len(r.kept)} read again" if r.rolled_back else "as the forward left it"
        rate = f" ({hits / drafts:.0%})" if drafts else ""
        told.append(dict(
            title=f"Round {i}: {title}", verdict=verdict if r.drafted else "", origin=f"S: {came}\n{r.pos} tokens in it",
            tally=f"accepted {hits} of {drafts}{rate}    {emitted} tokens from {forwards} forwards",
            draft=[visible(pieces([t])[0]) or "half a character" for t in [r.confirmed, *r.drafted]] if i else [],
            model=[visible(pieces([t])[0]) or "half a character" for t in r.verified],
            accepted=r.accepted, kept=len(r.kept), rolled_back=r.rolled_back, pos=r.pos, head=r.draft_pos))
    return {"texts": pieces([token for r in rounds for token in r.kept]), "rounds": told}


@styled
def round_frame(rounds, i, pieces):
    """Round i of a draft run: the text, what was drafted and verified, the caches, and the tally so far.

    `pieces` turns token ids into a list of texts. Drafted tokens stand above what the model itself says there.
    """
    story = round_story(rounds, pieces)
    now, done = story["rounds"][i], story["rounds"][:i + 1]
    fig = Figure(figsize=(7.2, 4.2))
    text, work, caches = (fig.add_axes(box) for box in ([0.01, 0.56, 0.98, 0.34], [0.01, 0.26, 0.98, 0.3],
                                                        [0.15, 0.07, 0.84, 0.16]))
    fig.suptitle(now["title"], x=0.01, y=0.98, ha="left", fontsize=15)

    colours = [("accepted" if r is now else "#BFE5D8") if n < r["accepted"] else "plain" if r is now else "pale"
               for r in done for n in range(r["kept"])]
    past = story["texts"][:len(colours)]
    tails = ((["…"] if n else []) + past[n:] for n in range(max(0, len(past) - 200), len(past) + 1))
    tail = next(tail for tail in tails if len(wrapped(tail, per_row=66)) <= 3)      # what fits
    boxes(text, tail, (["pale"] + colours)[-len(tail):], per_row=66)
    text.set_ylim(-2.6, 0.7)

    right, wrong, accepted = COLOUR["accepted"], COLOUR["rejected"], now["accepted"]
    cells = [(column, 1, drawable(shown), "#888888" if column == 0 else right if column <= accepted else wrong)
             for column, shown in enumerate(now["draft"])]
    cells += [(n + 1, 0, drawable(shown), right if n < accepted else "#444444" if n < now["kept"] else "#CCCCCC")
              for n, shown in enumerate(now["model"])]
    step = max(10, *(len(shown) for _, _, shown, _ in cells)) + 1.5
    wide = max(66, 13 + step * (max(column for column, *_ in cells) + 0.6))     # many or long tokens are drawn smaller
    for column, row, shown, edge in cells:
        work.text(13 + step * column, row, shown, ha="center", va="center", fontsize=13 * 66 / wide,
                  color="#AAAAAA" if edge == "#CCCCCC" else "black",
                  bbox=dict(boxstyle="round,pad=0.35", fc="white", ec=edge, lw=2.5))
    work.text(0, 1, "draft" if i else "", va="center", fontsize=12)
    work.text(0, 0, "the model", va="center", fontsize=12)
    work.text(wide - 1, 1.85, now["verdict"], ha="right", va="center", fontsize=12,
              color=wrong if now["rolled_back"] else right)
    work.text(wide - 1, -0.95, now["tally"], ha="right", va="center", fontsize=12)
    work.set(xlim=(-0.5, wide), ylim=(-1.3, 2.2))
    work.axis("off")

    cut = max(0, len(now["draft"]) - now["kept"])
    caches.barh([1, 0], [now["pos"], now["head"]], color=COLOUR["key"], height=0.65)
    caches.barh([1], [cut], left=[now["pos"]], color="white", edgecolor=wrong, hatch="////", height=0.65, lw=0)
    caches.set_yticks([1, 0], ["K/V, model", "K/V, head"], fontsize=12)
    caches.set_xlim(0, 1.95 * rounds[-1].pos)            # the right part belongs to S
    caches.tick_params(axis="x", labelsize=11)
    caches.text(0.995, 0.5, now["origin"], transform=caches.transAxes, ha="right", va="center",
                fontsize=11, bbox=dict(boxstyle="round", fc="#F6E3EE", ec=COLOUR["state"], lw=1.5))
    return Picture(fig, f"{now['title']}. {now['tally']}. Text: {''.join(past)}", {ROUNDS: {"start": i, **story}})
