"""Documents of each text type from the unpacked packages.

Every function returns a list of `Document(type, key, text)`. The key decides the split
(`held_out`), so texts and questions about the same thing share a key."""
import ast
import gettext
import gzip
import hashlib
import json
import random
import re
import struct
import subprocess
import sysconfig
import zlib
from collections import Counter, namedtuple
from pathlib import Path

from clean import Blocks, chinese_share, join_lines, man_blocks

Document = namedtuple("Document", "type key text")
Poem = namedtuple("Poem", "title author lines")
LONGEST = 2400              # characters of one document; a longer section is cut at a block


def held_out(key):
    """True for the two percent of all keys that training must never see."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 50 == 0


# ---------------------------------------------------------------- poems

def poem_text(poem):
    return "\n".join([f"《{poem.title}》 {poem.author}", *poem.lines])


def poem_key(poem):
    """The Chinese characters of the first line, so that two editions share a key."""
    return "poem " + "".join(re.findall(r"[\u4e00-\u9fff]", poem.lines[0]))


def fortune_poems(folder):
    """The poems of `tang300` and `song100`, without colour codes, dates and prefaces."""
    poems = []
    for name in ("tang300", "song100"):
        raw = (folder / "usr/share/games/fortunes" / name).read_text("utf8")
        for entry in re.sub(r"\x1b\[[\d;]*m", "", raw).split("\n%\n"):
            lines = [l.strip() for l in entry.strip().split("\n") if l.strip()]
            if len(lines) < 4 or len(lines) > 24 or not re.search(r"作者[:：]", lines[1]):
                continue
            title = re.sub(r"题目[:：]|[《》]", "", lines[0])
            author = re.sub(r"作者[:：]|（.*）", "", lines[1]).strip()
            verses = lines[2:]
            if len(title) <= 20 and all(re.search(r"[。？！；，]$", v) for v in verses):
                poems.append(Poem(title, author, verses))
    return poems


def simplifier(folder):
    """Translation table from traditional to simplified characters."""
    table = (folder / "opencc/dictionary/TSCharacters.txt").read_text("utf8")
    pairs = (line.split("\t") for line in table.splitlines() if "\t" in line)
    return {ord(old): new.split()[0] for old, new in pairs if len(old) == 1}


def collected_poems(folder, simplify, tang_count, ci_count):
    """The best known Tang poems and Song lyrics of `chinese-poetry`, best known first."""
    dist, groups = folder / "package/dist", []
    for texts, ranks, name in (("quantangshi/poet.tang", "rank/poet/poet.tang.rank", "title"),
                               ("songci/ci.song", "rank/ci/ci.song.rank", "rhythmic")):
        found = []
        for path in sorted(dist.glob(texts + ".*.json")):
            rank = dist / (ranks + path.name.removeprefix(Path(texts).name))
            if not rank.exists():
                continue
            records = json.loads(path.read_text("utf8"))
            for record, fame in zip(records, json.loads(rank.read_text("utf8"))):
                if record["author"] != fame["author"]:
                    continue
                lines = [l.translate(simplify).strip() for l in record["paragraphs"]]
                poem = Poem(record[name].translate(simplify).strip(),
                            re.sub(r"\d", "", record["author"].translate(simplify)), lines)
                score = fame["baidu"] * fame["so360"] * fame["bing"]
                if readable(poem, regular=name == "title"):
                    found.append((-score, poem))
        groups.append([poem for _, poem in sorted(found)])
    seen = Counter("".join("".join(p.lines) for group in groups for p in group))
    common = [[p for p in group if min(seen[c] for c in "".join(p.lines)) >= 60]
              for group in groups]
    return common[0][:tang_count], common[1][:ci_count]


def readable(poem, regular):
    """Whole, of a sane length, and (for Tang poems) in even lines of 5 or 7 characters."""
    body = "".join(poem.lines)
    if not re.fullmatch(r"[\u4e00-\u9fff，。？！；：、]{16,160}", body):
        return False
    if not re.fullmatch(r"[\u4e00-\u9fff· ]{1,16}", poem.title) or poem.title == "句":
        return False
    if not 2 <= len(poem.author) <= 4 or not 2 <= len(poem.lines) <= 20:
        return False
    if not all(line[-1] in "。？！；，" for line in poem.lines):
        return False
    lengths = {len(half) for half in re.split(r"[，。？！；：、]", body) if half}
    return not regular or lengths in ({5}, {7})


def all_poems(folders):
    """Poems without repeats, and how many of the first are the best known."""
    simplify = simplifier(folders["opencc-python-reimplemented"])
    tang, ci = collected_poems(folders["chinese-poetry"], simplify, 20000, 6000)
    unique = {}
    for poem in [*fortune_poems(folders["fortunes-zh"]), *tang[:3000], *ci[:1000],
                 *tang[3000:], *ci[1000:]]:
        unique.setdefault(poem_key(poem), poem)
    return list(unique.values())


# ---------------------------------------------------------------- technical text

NUMBER = re.compile(r"^((Chapter|Appendix|附录) ?[\dA-Z.]*|第 ?\d+ ?章|\d+(\.\d+)*\.?|"
                    r"[A-Z]\.(\d+\.)*)\s+(?=\S)")
NOISE = re.compile(r"→|See also$|Source code:|Availability:|(New|Changed) in version [\d.]+\.?$|"
                   r"Note$|注意$|Deprecated since version|(表|图|例|Table|Figure|Example) ?[\dA-Z]+\.|"
                   r"This module does not work or is not available on WebAssembly")


def sections(type, blocks, chinese=False):
    """Documents from blocks: a heading opens one, a long one is cut, a short one grows."""
    parts, heading = [[]], ""
    for kind, text in blocks:
        text = text.strip("\n")
        if kind == "heading":
            heading = NUMBER.sub("", text).strip()
            if sum(len(t) for _, t in parts[-1]) > 400:
                parts.append([])
            if parts[-1] and parts[-1][-1][0] == "heading":
                parts[-1].pop()
            parts[-1].append((kind, heading))
            continue
        if NOISE.match(text) or (chinese and kind != "code" and len(text) > 30
                                 and chinese_share(text) < 0.2):
            continue
        if sum(len(t) for _, t in parts[-1]) + len(text) > LONGEST and parts[-1]:
            parts.append([("heading", heading)] if heading else [])
        if len(text) <= LONGEST and not re.search(r"\ufffd|&\w+;", text):
            parts[-1].append((kind, text))
    documents = []
    for part in parts:
        while part and part[-1][0] in ("heading", "title", "term"):
            part.pop()
        body = "".join(t for k, t in part if k in ("text", "item"))
        text = lay_out(part)
        if len(body) < (40 if chinese else 120) or (chinese and chinese_share(text) < 0.3):
            continue
        documents.append(Document(type, text, text))
    return documents


def lay_out(part):
    """Plain text of a list of blocks; list items follow each other, the rest is spaced."""
    text, before = "", None
    for kind, words in part:
        if kind == "item":
            words = "- " + words
        tight = (kind == "item" == before) or (before == "term" and kind in ("text", "term"))
        if before == "term" and kind == "text":
            words = "    " + words
        text += ("\n" if tight else "\n\n") * bool(text) + words
        before = kind
    return text


def html_documents(type, paths, chinese=False):
    documents = []
    for path in sorted(paths):
        blocks = Blocks(path.read_text("utf8")).blocks
        documents += sections(type, blocks, chinese)
    return documents


def tech_en(folders):
    doc = "usr/share/doc"
    python = folders["python3.11-doc"] / doc / "python3.11/html"
    paths = [
        *(folders["debian-handbook"] / doc / "debian-handbook/html/en-US").glob("*.html"),
        *(folders["debian-reference-en"] / "usr/share/debian-reference").glob("ch*.en.html"),
        *(folders["debian-faq"] / doc / "debian/FAQ").glob("*.en.html"),
        *(folders["debian-policy"] / doc / "debian-policy").glob("p*.html/*.html"),
        *(folders["developers-reference"] / "usr/share/developers-reference").glob("*.html"),
        *(p for part in ("tutorial", "howto", "faq", "using", "library")
          for p in (python / part).glob("*.html")
          if part != "library" or hashlib.sha256(p.name.encode()).digest()[0] % 2),
    ]
    unwanted = {"index.html", "genindex.html", "search.html", "index.en.html",
                "conclusion.html", "sect.acknowledgments.html"}
    return html_documents("tech_en", [p for p in paths if p.name not in unwanted])


def tech_zh(folders):
    doc = "usr/share/doc"
    paths = [
        *(folders["debian-handbook"] / doc / "debian-handbook/html/zh-CN").glob("*.html"),
        *(folders["debian-reference-zh-cn"] / "usr/share/debian-reference").glob("ch*.html"),
        *(folders["debian-faq-zh-cn"] / doc / "debian/FAQ/zh-cn").glob("*.html"),
        *(folders["maint-guide-zh-cn"] / doc / "maint-guide-zh-cn/html").glob("*.html"),
    ]
    paths = [p for p in paths if not p.name.startswith("index")]
    documents = html_documents("tech_zh", paths, chinese=True)
    for name, purpose, blocks in manual_pages(folders):
        blocks = [("title", f"{name} - {purpose}"), *blocks]
        documents += sections("tech_zh", blocks, chinese=True)
    return documents


ENGLISH_HEADINGS = {"SYNOPSIS": "概述", "DESCRIPTION": "描述", "OPTIONS": "选项", "USAGE": "用法",
                    "EXAMPLE": "示例", "EXAMPLES": "示例", "PARAMETERS": "参数", "FILES": "文件",
                    "NOTES": "注意", "RETURN VALUE": "返回值", "ERRORS": "错误",
                    "OUTPUTS": "输出", "ENVIRONMENT": "环境变量", "DIAGNOSTICS": "诊断"}
UNWANTED_SECTION = re.compile(
    "中文版|跋|翻译|译者|AUTHOR|作者|COPYRIGHT|版权|REPORTING|报告|COLOPHON|参见|SEE ALSO|"
    "参阅|另见|相关|参看|又见|HISTORY|NAME|名称|名字|维护|更新|许可|致谢|排版|关键字|KEYWORDS")


def manual_pages(folders):
    """(name, purpose, blocks) of each Chinese manual page."""
    root = folders["manpages-zh"] / "usr/share/man/zh_CN"
    for path in sorted(root.glob("man*/*.gz")):
        if path.name.startswith("smb.conf"):      # hundreds of bare parameter names
            continue
        source = gzip.decompress(path.read_bytes()).decode("utf8", "replace")
        blocks, section, kept, title = man_blocks(source), "", [], ""
        for kind, text in blocks:
            if kind == "heading":
                section = text
                text = ENGLISH_HEADINGS.get(text.strip().upper(), text)
                if chinese_share(text):
                    text = re.sub(r"\b[A-Z]{3,}( [A-Z]{3,})*\b", "", text).strip(" ()/")
            elif re.search("NAME|名称|名字", section) and not title:
                title = text
            if "�" not in text and not UNWANTED_SECTION.search(section):
                kept.append((kind, text))
        match = re.match(r"(\S.*?)\s+[-—]+\s+(.+)", title)
        if match and chinese_share(match[2]) > 0.3:
            yield match[1], match[2], kept


# ---------------------------------------------------------------- English prose

def austen_novels(folder):
    """{title: lines} from R's lazy-load database: zlib blocks of XDR character vectors."""
    data = folder / "usr/lib/R/site-library/janeaustenr/data"
    index = gzip.decompress((data / "Rdata.rdx").read_bytes())
    base = (data / "Rdata.rdb").read_bytes()
    novels = {}
    for spot in re.findall(rb"\x00{3}\r\x00{3}\x02(.{8})", index, re.S):
        offset, length = struct.unpack(">II", spot)
        if not length:
            continue
        raw = zlib.decompress(base[offset + 4:offset + length])
        at = 14 + struct.unpack(">I", raw[14:18])[0] + 4
        count = struct.unpack(">I", raw[at + 4:at + 8])[0]
        lines, at = [], at + 8
        for _ in range(count):
            size = struct.unpack(">I", raw[at + 4:at + 8])[0]
            lines.append(raw[at + 8:at + 8 + size].decode("utf8"))
            at += 8 + size
        novels[lines[0].title()] = lines
    return novels


def paragraphs_to_documents(paragraphs, longest=3000):
    documents, part = [], []
    for paragraph in paragraphs:
        if part and sum(map(len, part)) + len(paragraph) > longest:
            documents.append("\n\n".join(part))
            part = []
        part.append(paragraph)
    return [*documents, "\n\n".join(part)] if part else documents


INSULTS = re.compile(r"\b(negro\w*|nigg\w*|jews?|hebrews?|whore\w*|rape\w*)\b", re.I)


def devil_entries(folder):
    """{word: definition} of The Devil's Dictionary, prose paragraphs only."""
    raw = gzip.decompress((folder / "usr/share/dictd/devil.dict.dz").read_bytes())
    entries, word = {}, None
    for block in re.split(r"\n\s*\n", raw.decode("latin1")):
        match = re.match(r"([A-Z][A-Z' -]+), (?:n|adj|v\.t|v\.i|adv|v|pp|interj|x|n\.pl)\.\s+", block)
        if match:
            word = match[1]
            entries[word] = [join_lines(block)]
        elif word and not block.startswith(" ") and block.strip():
            if re.match(r"[A-Z][A-Z' -]+[,.]", block):
                word = None
            else:
                entries[word].append(join_lines(block))
    found = {word: "\n\n".join(text).replace("_", "") for word, text in entries.items()}
    return {word: text for word, text in found.items() if not INSULTS.search(text)}


BOOKS = dict(zip(
    "Ge Exo Lev Num Deu Josh Jdgs Ruth 1Sm 2Sm 1Ki 2Ki 1Chr 2Chr Ezra Neh Est Job Psa Prv Eccl "
    "SSol Isa Jer Lam Eze Dan Hos Joel Amos Obad Jonah Mic Nahum Hab Zep Hag Zec Mal Mat Mark "
    "Luke John Acts Rom 1Cor 2Cor Gal Eph Phi Col 1Th 2Th 1Tim 2Tim Titus Phmn Heb Jas 1Pet "
    "2Pet 1Jn 2Jn 3Jn Jude Rev".split(),
    "Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|"
    "2 Kings|1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|"
    "Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|"
    "Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|Romans|"
    "1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians|1 Thessalonians|"
    "2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|"
    "2 John|3 John|Jude|Revelation".split("|")))


def bible_chapters(folder):
    """{(book, chapter): verses}; the file is one Unix `compress` stream behind a header."""
    data = (folder / "usr/lib/bible.data").read_bytes()
    raw = subprocess.run(["gzip", "-dc"], input=data[data.index(b"\x1f\x9d"):],
                         capture_output=True, check=True).stdout.decode("latin1")
    chapters = {}
    for book, chapter, verse in re.findall(r"^(\d?[A-Za-z]+)(\d+):\d+ (.+)$", raw, re.M):
        chapters.setdefault((BOOKS.get(book, book), chapter), []).append(verse.strip())
    return chapters


def prose_en(folders):
    texts = []
    for lines in austen_novels(folders["r-cran-janeaustenr"]).values():
        chapters, current = [], []
        for line in lines:
            if re.match(r"(chapter|volume) ([ivxl]+|\d+)\b", line.strip(), re.I):
                chapters.append(current)
                current = []
            else:
                current.append(line)
        for chapter in [*chapters[1:], current]:
            blocks = re.split(r"\n\s*\n", "\n".join(chapter))
            paragraphs = [join_lines(b).replace("_", "").replace("--", "—") for b in blocks]
            wanted = [p for p in paragraphs if len(p) > 25 or re.search(r"[.!?\"]$", p)]
            texts += paragraphs_to_documents(wanted)
    for (book, chapter), verses in bible_chapters(folders["bible-kjv-text"]).items():
        verses = [re.sub(r"[\[\]{}<>]", "", v) for v in verses]
        pieces = paragraphs_to_documents(verses, 2400)
        texts += [f"{book} {chapter}\n\n" + p.replace("\n\n", "\n") for p in pieces]
    entries = [(f"devil {word}", text) for word, text in
               devil_entries(folders["dict-devil"]).items()]
    return [Document("prose_en", key, text)
            for key, text in [*((t, t) for t in texts if len(t) > 200), *entries]]


# ---------------------------------------------------------------- code

def stdlib_files():
    root = Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages",
                "ensurepip", "turtledemo", "__pycache__", "pydoc_data", "msilib", "idle_test"}
    return [p for p in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix())
            if not unwanted & set(p.relative_to(root).parts)
            and not re.match(r"_sysconfigdata|_pydecimal|stringprep|nturl|token|html/ent",
                             p.relative_to(root).as_posix())]


def code(folders):
    """Top-level functions and classes, whole; a long class is cut between its methods."""
    documents = []
    for path in stdlib_files():
        source = path.read_bytes().decode("utf8", "replace").expandtabs(4)
        lines = source.split("\n")
        for node in ast.parse(source).body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            last = node.end_lineno
            for child in node.body if isinstance(node, ast.ClassDef) else []:
                if child.end_lineno - first > 90 and child is not node.body[0]:
                    last = max(first + 1, child.lineno - 1)
                    for decorator in getattr(child, "decorator_list", []):
                        last = min(last, decorator.lineno - 1)
                    break
            text = "\n".join(l.rstrip() for l in lines[first:last]).rstrip()
            text = re.sub(r"(\n\s*#[^\n]*)+$", "", text)
            if 120 <= len(text) <= 6000 and "\\x" not in text and "�" not in text:
                documents.append(Document("code", text, text))
    return documents


# ---------------------------------------------------------------- records

TABLES = ("3166-1", "3166-2", "4217", "639-2", "639-3", "639-5", "15924", "3166-3")


def iso_tables(folder):
    """{table: records}; flags are left out, they are no text to read aloud."""
    tables = {}
    for name in TABLES:
        path = folder / f"usr/share/iso-codes/json/iso_{name}.json"
        records = json.loads(path.read_text("utf8"))[name]
        tables[name] = [{k: v for k, v in r.items() if k != "flag"} for r in records]
    return tables


def record_key(table, record):
    code = record.get("code") or record.get("alpha_3") or record.get("alpha_4")
    return f"iso {table} {code}"


def chinese_names(folder, table):
    """A function from an English name to its Chinese translation, or None."""
    path = folder / f"usr/share/locale/zh_CN/LC_MESSAGES/iso_{table}.mo"
    with open(path, "rb") as file:
        catalogue = gettext.GNUTranslations(file)

    def translate(name):
        found = catalogue.gettext(name)
        return None if found == name else found
    return translate


def json_records(folders, rounds=2):
    """Small JSON documents, in several layouts, of 1 to 6 neighbouring records each."""
    random_ = random.Random(17)
    documents = []
    for table, records in iso_tables(folders["iso-codes"]).items():
        for split in (True, False):
            mine = [r for r in records if held_out(record_key(table, r)) == split]
            for _ in range(rounds if len(mine) > 1000 else 2 * rounds):
                at = 0
                while at < len(mine):
                    some = mine[at:at + random_.randint(1, 6)]
                    at += len(some)
                    documents.append((split, json_text(table, some, random_)))
    return [(Document("json", text, text), split) for split, text in documents]


def json_text(table, records, random_):
    key = next(k for k in ("code", "alpha_3", "alpha_4") if k in records[0])
    value = random_.choice((
        records,
        records,
        {table: records},
        {r[key]: {k: v for k, v in r.items() if k != key} for r in records if key in r},
        {"table": f"ISO {table}", "count": len(records), "records": records},
        {r[key]: r["name"] for r in records if key in r}))
    if len(records) == 1 and random_.random() < 0.7:
        value = records[0]
    layout = random_.choice(({"indent": 2}, {"indent": 2}, {"separators": (",", ":")},
                             {"separators": (", ", ": ")}))
    return json.dumps(value, ensure_ascii=False, **layout)
