"""Turn HTML, manual pages and wrapped lines into plain paragraphs."""
import re
import textwrap
from html.parser import HTMLParser

CJK = r"\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”‘’—…"
SPACE_IN_CHINESE = re.compile(rf"(?<=[{CJK}])[ \t]*\n[ \t]*(?=[{CJK}])")


def join_lines(text):
    """One paragraph from wrapped lines; no space is put between two Chinese characters."""
    text = SPACE_IN_CHINESE.sub("", text.replace("\u00a0", " ").strip())
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" (?=[，。；：！？、）》”])|(?<=[，。；：！？、（《“]) |"
                  r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])", "", text)


def chinese_share(text):
    """Share of Chinese characters among all that is not white space."""
    solid = re.sub(r"\s", "", text)
    return len(re.findall(r"[\u4e00-\u9fff]", solid)) / max(1, len(solid))


BLOCKS = {"p", "div", "li", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "pre",
          "section", "ul", "ol", "dl", "blockquote", "body", "main", "figure"}
VOID = {"br", "img", "hr", "meta", "link", "input", "col", "wbr", "area", "base"}
SKIP_TAGS = {"script", "style", "head", "table", "nav", "sup", "footer", "button"}
SKIP_CLASSES = {
    "navheader", "navfooter", "toc", "docnav", "list-of-tables", "list-of-figures",
    "list-of-examples", "sphinxsidebar", "related", "footer", "headerlink", "indexterm",
    "footnotes", "legalnotice", "revhistory", "authorgroup", "toctree-wrapper", "contents",
    "mediaobject", "copyright", "section-number", "inline-footer", "documentationlist",
    "productionlist", "deprecated-removed", "footnote", "footnote-reference", "imageblock"}


class Blocks(HTMLParser):
    """Collects `blocks`: (kind, text) with kind in heading, text, item, term, code."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.blocks, self.stack, self.buffer = [], [], []
        self.skip_from, self.fresh_item = None, False
        self.feed(html)
        self.flush()

    def kind(self):
        for tag in reversed(self.stack):
            if tag[0] == "h" and tag[1:].isdigit():
                return "heading"
            if tag == "pre":
                return "code"
            if tag == "dt":
                return "term"
            if tag == "li" and self.fresh_item:
                return "item"
            if tag in ("li", "dd"):
                return "text"
        return "text"

    def flush(self):
        raw, self.buffer = "".join(self.buffer), []
        if not raw.strip():
            return
        kind = self.kind()
        if kind == "code":
            lines = [l.rstrip() for l in raw.replace("\u21b5", "").expandtabs(4).split("\n")]
            text = textwrap.dedent("\n".join(lines)).strip("\n")
            text = re.sub(r"\n{3,}", "\n\n", text)
            if text.count("\n") > 25 or max(map(len, text.split("\n"))) > 96:
                return
            text = textwrap.indent(text, "    ")
        else:
            text = join_lines(raw)
        self.fresh_item = self.fresh_item and kind != "item"
        self.blocks.append((kind, text))

    def handle_starttag(self, tag, attrs):
        if tag in VOID:
            return
        if tag in BLOCKS:
            self.flush()
        if tag == "li":
            self.fresh_item = True
        self.stack.append(tag)
        classes = set((dict(attrs).get("class") or "").split())
        if self.skip_from is None and (tag in SKIP_TAGS or classes & SKIP_CLASSES):
            self.skip_from = len(self.stack)

    def handle_endtag(self, tag):
        if tag not in self.stack:
            return
        if tag in BLOCKS:
            self.flush()
        while self.stack and self.stack.pop() != tag:
            pass
        if self.skip_from is not None and len(self.stack) < self.skip_from:
            self.skip_from = None

    def handle_data(self, data):
        if self.skip_from is None:
            self.buffer.append(data)


ESCAPES = {"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "bu": "•",
           "em": "—", "en": "–", "co": "©", "ti": "~", "ha": "^", "bv": "|", "rs": "\\",
           "ga": "`", "->": "→", "mu": "×", "+-": "±", "L\"": "“", "R\"": "”", "Tm": "™",
           "C`": "", "C'": "", "hy": "-", "<=": "≤", ">=": "≥", "sl": "/", "at": "@",
           "lB": "[", "rB": "]", "aa": "'", "#s": "", "sd": "sed", "Sd": "Sed"}


def unescape_roff(line):
    """Plain text of one roff line: fonts, sizes and named characters resolved."""
    line = re.sub(r'\\".*', "", line)
    line = re.sub(r"\\f(\[[^\]]*\]|\(..|.)", "", line)
    line = re.sub(r"\\s[+-]?\d+|\\[hvwo]'[^']*'", "", line)
    line = re.sub(r"\\\*?\((..)", lambda m: ESCAPES.get(m[1], ""), line)
    line = re.sub(r"\\\*?\[([^\]]*)\]", lambda m: ESCAPES.get(m[1], ""), line)
    line = re.sub(r"\\[,/&|^%:{}c!]", "", line)
    line = re.sub(r"\\[~0 ]", " ", line)
    return line.replace("\\-", "-").replace("\\e", "\\").replace("\\\\", "\\")


def roff_arguments(text):
    return [unescape_roff(a or b) for a, b in re.findall(r'"([^"]*)"|(\S+)', text)]


FONTS = {"B", "I", "SM", "SB", "BR", "IR", "RB", "RI", "BI", "IB", "UR", "URL", "MT"}


def man_blocks(source):
    """Blocks of one manual page in the `man` macros, in the kinds of `Blocks`.

    Returns [] for `mdoc` pages, whose macros are another language."""
    if re.search(r"^\.(Dd|Nm|Fl)\b", source, re.M):
        return []
    source = re.sub(r"^\.(de|ig)\b.*?^\.\.$", "", source, flags=re.M | re.S)
    source = re.sub(r"^\.TS.*?^\.TE", "", source, flags=re.M | re.S)
    blocks, words, kind, code = [], [], "text", None

    def flush(next_kind="text"):
        nonlocal words, kind
        if words:
            blocks.append((kind, join_lines("\n".join(words))))
        words, kind = [], next_kind

    for line in source.replace("\\\n", "").split("\n"):
        macro = re.match(r"[.']\s*(\S*)\s*(.*)", line)
        name, rest = macro.groups() if macro else ("", "")
        if name in ("nf", "EX", "Vb"):
            flush()
            code = []
        elif name in ("fi", "EE", "Ve") and code is not None:
            text = textwrap.dedent("\n".join(code)).strip("\n")
            if text and text.count("\n") <= 25 and max(map(len, text.split("\n"))) <= 96:
                blocks.append(("code", textwrap.indent(text, "    ")))
            code = None
        elif code is not None:
            if not macro:
                code.append(unescape_roff(line).rstrip().expandtabs(4))
            elif name in FONTS:
                code.append(" ".join(roff_arguments(rest)))
        elif name in ("SH", "SS", "Sh"):
            flush()
            if rest:
                blocks.append(("heading", " ".join(roff_arguments(rest))))
        elif name in ("TP", "HP"):
            flush("term")
        elif name == "IP":
            flush()
            tag = roff_arguments(rest)[:1]
            if tag and tag[0].strip(" •*o-"):
                blocks.append(("term", tag[0]))
        elif name in ("PP", "P", "LP", "sp", "RS", "RE", "br"):
            flush()
        elif name in FONTS or not macro:
            arguments = roff_arguments(rest)
            glue = "" if len(name) == 2 and set(name) <= set("BIR") else " "
            text = glue.join(arguments) if macro else unescape_roff(line)
            if text.strip():
                words.append(text)
                if kind == "term":
                    flush()
            elif not macro:
                flush()
    flush()
    return blocks
