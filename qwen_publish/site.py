"""Chapters as web pages that ask for nothing outside: `python -m qwen_publish.site` builds all of them in build/site.

A page is one file, to read and, by its button Slides, to present. nbconvert renders it with the template in `pages/`;
pictures, formulas, style and scripts are inside it.
"""
import argparse
import base64
import html
import mimetypes
import re
import sys
import time
from functools import partial
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

import chapters
from qwen_helpers.draw import COLOUR, ROUNDS
from . import ROOT, refresh

PAGES = Path(__file__).with_name("pages")       # the template, the style and the scripts of all pages
NAME = "Qwen3.5 by hand"
HOME = """# Qwen3.5 by hand

Interactive notebooks that build a modern language model in PyTorch, part by part, from opening its weight file to
letting it draft its own next words. These pages show every chapter as it was run, and need no network. The button
Slides at the top of a chapter turns it into a talk; in the notebook itself, every slider moves.

{map}

| chapter | the question it answers | |
|---|---|---|
{rows}"""


def formula(tex, mark="$"):
    """A formula as MathML, each word of it in one piece; what latex2mathml does not know stays as it is."""
    words = re.sub(r"\\mathrm(?={[A-Za-z]{2,}})", r"\\text", tex)
    try:
        found = convert(words, display="block" if mark == "$$" else "inline")
    except Exception:                           # it has a dozen kinds of error, and no common one
        found = "\\"
    found = re.sub(r"(<mi>[a-z]{2,}</mi>)(?=<m(?:i|sub|sup)>)", r'\1<mspace width="0.17em"/>', found)      # ln p
    return f"{mark}{html.escape(tex)}{mark}" if re.search(r"\\|>&<", found) else found


class Text(IPythonRenderer):
    """The HTML of a text cell, with its formulas as MathML, in HTML blocks too."""

    def block_math(self, body):
        return formula(body, "$$")

    def inline_math(self, body):
        return formula(body)

    def block_html(self, html):
        return re.sub(r"(?s)<(code|pre)\b.*?</\1>|(\$\$?)([^$]+)\2",
                      lambda found: formula(found[3], found[2]) if found[2] else found[0], super().block_html(html))


def text(source, folder):
    """The HTML of a text cell: pictures of `folder` inside, notebooks linked as their pages."""
    def embedded(found):
        try:
            content = base64.b64encode((folder / found[2]).read_bytes()).decode()
        except OSError as error:
            raise chapters.ChapterError(f"a text shows the picture {folder / found[2]}, which cannot be read "
                                        f"({error.strerror}); restore it with git checkout notebooks/") from None
        return f'{found[1]}data:{mimetypes.guess_type(found[2])[0]};base64,{content}"'

    body = MarkdownWithMath(Text(escape=False)).render(source)
    body = re.sub(r'(<img\b[^>]*\bsrc=")([^":]+)"', embedded, body)     # nbconvert's embed_images closes each open tag
    body = re.sub(r'<a class="anchor-link".*?</a>', "", body)
    body = re.sub(r'(?s)<a href="\.\./([^"]*)">(.*?)</a>', r'<span title="\1 in the repository">\2</span>', body)
    return re.sub(r'(<a\b[^>]*\bhref="\w+)\.ipynb(?=["#])', r"\1.html", body)


def page(nb, folder, **more):
    """The notebook as one page, complete in itself; relative pictures are looked for in `folder`.

    `more` goes to the template: `titles` of all chapters by their names; `prev` and `next`, the names of neighbours.
    """
    filters = {"markdown2html": partial(text, folder=folder),
               "code_style": lambda name: HtmlFormatter(style=name).get_style_defs(".highlight")}
    exporter = HTMLExporter(extra_template_basedirs=[str(PAGES.parent)], template_name=PAGES.name, filters=filters)
    about = {"metadata": {"name": question(nb) or NAME}, "home": NAME, "colours": COLOUR, "rounds": ROUNDS}
    return exporter.from_notebook_node(nb, about | more)[0]


def question(nb):
    """The title of a chapter, which is a question."""
    return next(iter(re.findall(r"(?m)^# +(.+?)\s*$", nb.cells[0].source)), "") if nb.cells else ""


def index(notebooks, titles):
    """The first page as a notebook: the map, and every chapter with its question."""
    rows = "\n".join(f"| [{name[:2]} {name[3:]}]({name}.html) | {title} | [slides]({name}.html#talk) |"
                     for name, title in titles.items())
    maps = (re.search(r"!\[[^]]*\]\([^)]*_map\.svg\)", cell.source) for nb in notebooks for cell in nb.cells)
    cell = nbformat.v4.new_markdown_cell(HOME.format(map=next(filter(None, maps))[0], rows=rows))
    return nbformat.v4.new_notebook(cells=[cell])


def build(out, saved=False):
    """Write the site into the folder `out`; unless `saved`, a chapter whose saved outputs are stale is run first."""
    notebooks = {path: nbformat.read(path, as_version=4)
                 for path in sorted(chapters.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}
    titles = {path.stem: question(nb) for path, nb in notebooks.items()}
    names = [None, *titles, None]
    out.mkdir(parents=True, exist_ok=True)
    for (path, nb), before, after in zip(notebooks.items(), names, names[2:]):
        if not saved and (why := refresh.stale(path)):
            print(f"{path.stem}: {why}, so it is run ...", flush=True)
            refresh.normalise(refresh.run(nb, path))
        (out / f"{path.stem}.html").write_text(page(nb, path.parent, titles=titles, prev=before, next=after), "utf-8")
    (out / "index.html").write_text(page(index(notebooks.values(), titles), chapters.NOTEBOOKS, is_index=True), "utf-8")
    return out / "index.html"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m qwen_publish.site", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--saved", action="store_true", help="show outputs as they are saved, stale or not")
    start = time.monotonic()
    try:
        file = build(**vars(parser.parse_args(argv)))
    except (refresh.RefreshError, chapters.ChapterError) as error:
        sys.exit(str(error))
    print(f"{file}: every chapter to read and to present, {time.monotonic() - start:.0f} s. Open it in a browser.")


if __name__ == "__main__":
    main()
