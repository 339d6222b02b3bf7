"""Chapters as web pages that ask for nothing outside: `python -m qwen_helpers.site` builds all of them in build/site.

A page is one file, to read and, by its button Slides, to present. Pictures, formulas, style and script are inside it.
"""
import argparse
import base64
import html
import io
import json
import re
import sys
import time
from pathlib import Path

import nbformat
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from nbconvert.filters import markdown2html
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from . import chapters, refresh, slides
from .draw import COLOUR, ROUNDS

PAGES = Path(__file__).with_name("pages")       # the style and the scripts of all pages
STYLES = {"light": "default", "dark": "github-dark"}        # of code, names known to Pygments
SIZE = 12                                       # points of a formula's letters, drawn; on the page as large as the text
NAME = "Qwen3.5 by hand"
HOME = """<h1>Qwen3.5 by hand</h1>
<p>Interactive notebooks that build a modern language model in PyTorch, part by part, from opening its weight file to
letting it draft its own next words. These pages show every chapter as it was run, and need no network. The button
Slides at the top of a chapter turns it into a talk; in the notebook itself, every slider moves.</p>
{map}
<table><thead><tr><th>chapter</th><th>the question it answers</th><th></th></tr></thead><tbody>
{rows}
</tbody></table>"""


def embedded(kind, content):
    """The address of a picture that is inside the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def formula(found):
    """A formula of a text cell as a picture; code, and what matplotlib cannot set, stays as it is."""
    tex = found["block"] or found["inline"]
    if not tex:
        return found[0]
    out = io.BytesIO()
    try:
        depth = math_to_image(f"${' '.join(tex.split())}$", out, dpi=72, format="svg", prop=FontProperties(size=SIZE))
    except ValueError:
        return found[0]
    width = float(re.search(rb'width="([\d.]+)pt"', out.getvalue())[1])
    image = (f'<img class="formula" alt="{html.escape(tex)}" src="{embedded("svg+xml", out.getvalue())}" '
             f'style="width:{width / SIZE:.2f}em;vertical-align:-{depth / SIZE:.2f}em">')
    return f"<p>{image}</p>" if found["block"] else image


def text(source, folder):
    """The HTML of a text cell: formulas drawn, pictures of `folder` inside, notebooks linked as their pages."""
    source = re.sub(r"```.*?```|`[^`]*`|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", formula, source, flags=re.S)
    body = markdown2html(source)
    body = re.sub(r'(<img\b[^>]*\bsrc=")([^":]+\.svg)"',
                  lambda found: f'{found[1]}{embedded("svg+xml", (folder / found[2]).read_bytes())}"', body)
    body = re.sub(r'<a class="anchor-link".*?</a>', "", body)
    body = re.sub(r'<a href="\.\./([^"]*)">(.*?)</a>', r'<span title="\1 in the repository">\2</span>', body, flags=re.S)
    return re.sub(r'(<a\b[^>]*\bhref="\w+)\.ipynb"', r'\1.html"', body)


def shown(output, folder):
    """The HTML of one output of a code cell."""
    data, alt = output.get("data", {}), html.escape("".join(output.get("data", {}).get("text/plain", "")))
    if "image/png" in data:
        body = f'<img alt="{alt}" src="data:image/png;base64,{"".join(data["image/png"].split())}">'
    elif "text/html" in data:
        body = data["text/html"]
    elif "text/markdown" in data:
        body = text(data["text/markdown"], folder)
    else:
        return f'<pre class="output">{html.escape("".join(output.get("text", ""))) or alt}</pre>'
    if live := output.metadata.get("live"):
        body += f"<figcaption>{html.escape(live)}</figcaption>"
    if ROUNDS in data:
        story = json.dumps(data[ROUNDS], ensure_ascii=False).replace("</", "<\\/")
        body += f'<script type="application/json" class="rounds">{story}</script>'
    return f"<figure>{body}</figure>"


def screens(nb, folder):
    """The cells as HTML, in <section>s: one for each screen of a talk, as the slide marks say."""
    open_ = False
    for cell in nb.cells:
        kind = cell.metadata.get("slideshow", {}).get("slide_type", "-")
        if kind in ("slide", "subslide") or not open_:
            yield ("</section>" if open_ else "") + f'<section class="{kind}">'
            open_ = True
        if cell.cell_type == "markdown":
            body = text(cell.source, folder)
        else:
            source = highlight(cell.source, PythonLexer(), HtmlFormatter(cssclass="highlight"))
            body = source + "".join(shown(output, folder) for output in cell.outputs)
        how = [kind] if kind in ("skip", "fragment") else []
        how += ["long"] if cell.get("outputs") and slides.height(cell) > slides.ROOM else []
        yield f'<div class="{" ".join(["cell", *how])}">{body}</div>'
    yield "</section>"


def style():
    """The style sheet of all pages: code and the palette for both themes."""
    code = {theme: HtmlFormatter(style=name).get_style_defs(".highlight") for theme, name in STYLES.items()}
    colours = "".join(f"--{name}: {colour};" for name, colour in COLOUR.items())
    return (f":root {{{colours}}}\n@media not (prefers-color-scheme: dark) {{{code['light']}}}\n"
            f"@media (prefers-color-scheme: dark) {{{code['dark']}}}\n" + (PAGES / "page.css").read_text("utf-8"))


def frame(title, body, links="", scripts=()):
    """A whole page: `links` in a bar on top, `body` below it, the `scripts` named inside."""
    inside = "".join(f"<script>{(PAGES / name).read_text('utf-8')}</script>" for name in scripts)
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
            f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">\n'
            f'<link rel="icon" href="data:,"><style>{style()}</style></head>\n'
            f"<body><header>{links}</header>\n<main>{body}</main>\n{inside}</body></html>\n")


def page(nb, folder, links=""):
    """The notebook as one page, complete in itself; relative pictures are looked for in `folder`."""
    talk = ('<button id="talk" type="button" title="Or press s. Then: arrow keys, Page Down, Home, End; Esc ends.">'
            "Slides</button>")
    return frame(question(nb) or NAME, "".join(screens(nb, folder)), links + talk, ["talk.js", "player.js"])


def question(nb):
    """The title of a chapter, which is a question."""
    return next(iter(re.findall(r"(?m)^# +(.+?)\s*$", nb.cells[0].source)), "") if nb.cells else ""


def neighbours(paths, titles, path):
    """Links from one chapter to the one before, the index, and the one after."""
    at = paths.index(path)
    around = {"prev": paths[at - 1] if at else None, "next": paths[at + 1] if at + 1 < len(paths) else None}
    before, after = (f'<a rel="{way}" href="{to.stem}.html" title="{html.escape(titles[to])}">{to.stem}</a>' if to else
                     "<span></span>" for way, to in around.items())
    return f'<nav>{before}<a href="index.html">{NAME}</a>{after}</nav>'


def index(titles, folder):
    """The first page: the map, and every chapter with its question."""
    rows = "\n".join(
        f'<tr><td><a href="{path.stem}.html">{path.stem[:2]} {path.stem[3:]}</a></td><td>{html.escape(title)}</td>'
        f'<td><a href="{path.stem}.html#talk">slides</a></td></tr>' for path, title in titles.items())
    map_ = text(next(cell.source for path in titles for cell in nbformat.read(path, as_version=4).cells
                     if "_map.svg)" in cell.source), folder)
    return frame(NAME, HOME.format(map=re.search(r"<img\b[^>]*>", map_)[0], rows=rows))


def build(out):
    """Write the site into the folder `out`; a chapter whose saved outputs are stale is run first, and not saved."""
    paths = sorted(chapters.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    notebooks = {path: nbformat.read(path, as_version=4) for path in paths}
    titles = {path: question(nb) for path, nb in notebooks.items()}
    out.mkdir(parents=True, exist_ok=True)
    for path, nb in notebooks.items():
        if why := refresh.stale(path):
            print(f"{path.stem}: {why}, so it is run ...", flush=True)
            refresh.normalise(refresh.run(nb, path))
        (out / f"{path.stem}.html").write_text(page(nb, path.parent, neighbours(paths, titles, path)), "utf-8")
    (out / "index.html").write_text(index(titles, chapters.NOTEBOOKS), "utf-8")
    return out / "index.html"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m qwen_helpers.site", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=refresh.ROOT / "build" / "site")
    start = time.monotonic()
    try:
        file = build(parser.parse_args(argv).out)
    except (refresh.RefreshError, chapters.ChapterError) as error:
        sys.exit(str(error))
    print(f"{file}: every chapter to read and to present, {time.monotonic() - start:.0f} s. Open it in a browser.")


if __name__ == "__main__":
    main()
