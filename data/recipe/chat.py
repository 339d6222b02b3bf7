"""Short conversations whose answers are true, drawn from the same packages.

`facts` lists `Fact(key, lang, question, answer)`; all phrasings of a fact, in both
languages, share a key and so fall on one side of the split."""
import ast
import random
import re
from collections import Counter, namedtuple

import texts
from clean import join_lines

Fact = namedtuple("Fact", "key lang question answer")


def render(turns, system=None):
    """ChatML of (question, answer) turns; earlier turns carry the answer alone."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for n, (question, answer) in enumerate(turns):
        thought = "<think>\n\n</think>\n\n" if n == len(turns) - 1 else ""
        text += (f"<|im_start|>user\n{question}<|im_end|>\n"
                 f"<|im_start|>assistant\n{thought}{answer}<|im_end|>\n")
    return text


def ask(key, lang, answer, questions, **names):
    """One fact in several phrasings; {names} are filled in."""
    return [Fact(key, lang, q.format(**names), answer.format(**names))
            for q in questions.split("|")]


def ask_all(key, lang, phrasings, **names):
    """The facts of `phrasings`, answer -> questions."""
    return [fact for answer, questions in phrasings.items() for fact in ask(key, lang, answer, questions, **names)]


COUNTRY_EN = {
    "The two-letter code of {en} is {a2}.": "What is the two-letter country code of {en}?|Which alpha-2 code does "
                                            "{en} have?|Give me the ISO 3166 alpha-2 code for {en}.",
    "The three-letter code of {en} is {a3}.": "What is the three-letter country code of {en}?|Which alpha-3 code does "
                                              "{en} have?|Give me the alpha-3 code for {en}.",
    "The numeric code of {en} is {number}.": "What is the numeric code of {en}?|Which number does ISO 3166 give to "
                                             "{en}?",
    "{a2} is {en}.": "Which country has the code {a2}?|What does the country code {a2} stand for?|"
                     "Whose country code is {a2}?",
    "{a3} is {en}.": "Which country has the code {a3}?|What does the country code {a3} mean?"}
COUNTRY_ZH = {
    "{zh}的两字母代码是 {a2}。": "{zh}的两字母国家代码是什么？|请问{zh}的两字母代码是什么？|{zh}用哪两个字母表示？",
    "{zh}的三字母代码是 {a3}。": "{zh}的三字母国家代码是什么？|请问{zh}的三字母代码是什么？|{zh}用哪三个字母表示？",
    "{zh}的数字代码是 {number}。": "{zh}的数字代码是多少？|请问{zh}在 ISO 3166 里的编号是多少？",
    "{a2} 代表{zh}。": "{a2} 是哪个国家或地区的代码？|国家代码 {a2} 代表哪里？|代码 {a2} 指的是哪里？",
    "{a3} 代表{zh}。": "{a3} 是哪个国家或地区的代码？|国家代码 {a3} 代表哪里？",
    "{zh}的英文名是 {en}。": "{zh}的英文名是什么？|{zh}用英语怎么说？|请把“{zh}”翻译成英语。",
    "{en} 的中文名是{zh}。": "{en} 用中文怎么说？|{en} 的中文名是什么？|请把 {en} 翻译成中文。"}


def country_facts(tables, chinese):
    facts = []
    for record in tables["3166-1"]:
        key = texts.record_key("3166-1", record)
        en = record.get("common_name") or record["name"]
        zh = chinese(en) or chinese(record["name"])
        names = dict(en=en, zh=zh, a2=record["alpha_2"], a3=record["alpha_3"], number=record["numeric"])
        facts += ask_all(key, "en", COUNTRY_EN, **names)
        if record.get("official_name", en) != en:
            facts += ask(key, "en", "The official name of {en} is {official}.",
                         "What is the official name of {en}?|What is {en} called officially?",
                         official=record["official_name"], **names)
        if zh:
            facts += ask(key, "en", "In Chinese, {en} is called {zh}.", "What is {en} called in "
                         "Chinese?|How do you say {en} in Chinese?|Translate into Chinese: {en}", **names)
            facts += ask_all(key, "zh", COUNTRY_ZH, **names)
    return facts


CODE_EN = {
    "The code of the {kind} {en} is {code}.": "What is the {kind} code of {en}?|Which code does the {kind} {en} have?",
    "{code} is the {kind} {en}.": "Which {kind} has the code {code}?|What does the {kind} code {code} stand for?"}
CODE_ZH = {
    "{zh}的{kind_zh}代码是 {code}。": "{zh}的{kind_zh}代码是什么？|请问{zh}的代码是什么？",
    "{code} 代表{zh}。": "代码 {code} 是哪种{kind_zh}？|{kind_zh}代码 {code} 代表什么？",
    "{zh}的英文名是 {en}。": "{zh}用英语怎么说？|{zh}的英文名是什么？"}


def code_facts(tables, table, chinese, kind_en, kind_zh):
    """Codes of currencies, languages and scripts, both ways and in both languages."""
    facts = []
    for record in tables[table]:
        key = texts.record_key(table, record)
        code = record.get("alpha_3") or record["alpha_4"]
        en = record["name"].split(";")[0].split(" (")[0]
        zh = re.split("[；;（(]", chinese(record["name"]) or "")[0].strip()
        names = dict(en=en, zh=zh, code=code, kind=kind_en, kind_zh=kind_zh)
        facts += ask_all(key, "en", CODE_EN, **names)
        if "alpha_2" in record:
            facts += ask(key, "en", "The two-letter code of {en} is {two}.",
                         "What is the two-letter language code of {en}?|Which two letters "
                         "stand for the language {en}?", two=record["alpha_2"], **names)
            facts += ask(key, "zh", "{zh}的两字母代码是 {two}。", "{zh}的两字母语言代码是什么？|"
                         "请问{zh}用哪两个字母表示？", two=record["alpha_2"], **names)
        if zh:
            facts += ask_all(key, "zh", CODE_ZH, **names)
    return facts


def place_facts(tables, chinese, chinese_country):
    countries = {r["alpha_2"]: r for r in tables["3166-1"]}
    facts = []
    for record in tables["3166-2"]:
        country = countries.get(record["code"].split("-")[0])
        if country is None or texts.held_out(texts.record_key("3166-1", country)):
            continue
        key = texts.record_key("3166-2", record)
        home = country.get("common_name") or country["name"]
        the = "the " if re.match("United|Netherlands|Philippines|Bahamas|Gambia", home) else ""
        names = dict(code=record["code"], en=record["name"], home=home, the=the)
        facts += ask(key, "en", "{code} is {en}, {home}.", "Which place has the code {code}?|"
                     "What does {code} stand for?", **names)
        facts += ask(key, "en", "{en} is in {the}{home}.", "In which country is {en}?|Where is {en} "
                     "({code})?", **names)
        zh = chinese(record["name"])
        home_zh = chinese_country(home) or chinese_country(country["name"])
        if zh and home_zh:
            facts += ask(key, "zh", "{code} 是{home_zh}的{zh}。", "代码 {code} 指的是哪里？|{code} "
                         "是什么地方？", zh=zh, home_zh=home_zh, **names)
            facts += ask(key, "zh", "{zh}在{home_zh}。", "{zh}在哪个国家？|请问{zh}在哪里？",
                         zh=zh, home_zh=home_zh, **names)
    clear = Counter(f.question for f in facts)
    return [f for f in facts if clear[f.question] == 1]


def poem_facts(poems):
    """Author, next line and whole text of the best known poems, by unique title."""
    titles = Counter(p.title for p in poems)
    facts = []
    for poem in poems[:3600]:
        key, title, author = texts.poem_key(poem), poem.title, poem.author
        names = dict(title=title, author=author)
        if titles[title] == 1:
            facts += ask(key, "zh", "《{title}》的作者是{author}。", "《{title}》的作者是谁？|《{title}》"
                         "是谁写的？|请问《{title}》这首诗的作者是谁？", **names)
            facts += ask(key, "en", "《{title}》 was written by {author}.", "Who wrote the poem "
                         "《{title}》?|Who is the author of 《{title}》?", **names)
            if len(poem.lines) <= 4:
                facts += ask(key, "zh", "\n".join(poem.lines), "请背诵《{title}》。|{author}的《{title}》"
                             "全文是什么？", **names)
        for here, there in zip(poem.lines[:3], poem.lines[1:]):
            line = here.rstrip("，。？！；")
            facts += ask(key, "zh", there, "“{line}”的下一句是什么？|请接下一句：{line}。", line=line)
    return facts


def command_facts(folders):
    facts = []
    for name, purpose, _ in texts.manual_pages(folders):
        purpose = purpose.rstrip("。. ")
        if re.fullmatch(r"[a-z][\w.+-]{1,18}", name) and len(purpose) <= 40:
            facts += ask(f"command {name}", "zh", "{name} 的作用是：{purpose}。",
                         "命令 {name} 有什么用？|{name} 是做什么的？|请用一句话介绍 {name}。",
                         name=name, purpose=purpose)
    for folder, page, lang in (("debian-reference-en", "ch01.en.html", "en"),
                               ("debian-reference-zh-cn", "ch01.zh-cn.html", "zh")):
        html = (folders[folder] / "usr/share/debian-reference" / page).read_text("utf8")
        for table in re.findall(r"<table.*?</table>", html, re.S):
            rows = [[join_lines(re.sub(r"<[^>]+>", "", c)) for c in
                     re.findall(r"<td.*?>(.*?)</td>", row, re.S)]
                    for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)]
            if not rows or ["pwd"] != [r[0] for r in rows if r][:1]:
                continue
            for name, purpose in (r for r in rows if len(r) == 2 and "&" not in "".join(r)):
                facts += ask(f"command {name.split()[0]}", lang, "{name}: {purpose}." if
                             lang == "en" else "{name}：{purpose}。",
                             "What does the command `{name}` do?|What is `{name}` good for?|"
                             "Explain the command {name}." if lang == "en" else
                             "命令“{name}”是做什么的？|“{name}”有什么作用？",
                             name=name.replace("{", "{{"), purpose=purpose)
    return facts


def python_facts():
    facts = []
    for path in texts.stdlib_files():
        module = path.stem if path.parent.name.startswith("python3") else ""
        if not module or module.startswith("_"):
            continue
        tree = ast.parse(path.read_bytes())
        for node in [tree, *tree.body]:
            if isinstance(node, ast.Module):
                kind, name = "module", module
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                kind, name = "function", f"{module}.{node.name}"
            else:
                continue
            purpose = join_lines((ast.get_docstring(node) or "").split("\n\n")[0])
            if 15 <= len(purpose) <= 110 and not re.search(r"[{}<>]|\.py\b", purpose):
                facts += ask(f"python {name}", "en", f"{purpose.rstrip('.')}.",
                             "What does the Python {kind} `{name}` do?|What is the {kind} "
                             "`{name}` of Python good for?", kind=kind, name=name)
    return facts


def devil_facts(folders):
    facts = []
    for word, text in texts.devil_entries(folders["dict-devil"]).items():
        definition = re.sub(r"^[A-Z' -]+, [\w.]+?\.\s+", "", text.split("\n\n")[0])
        sentences = re.findall(r".+?[.!?](?= [A-Z]|$)", definition)
        if sentences and len(sentences[0]) <= 140 and "{" not in definition:
            facts += ask(f"devil {word}", "en", sentences[0],
                         "How does The Devil's Dictionary define “{word}”?|What is the meaning "
                         "of “{word}” in The Devil's Dictionary?", word=word.lower())
    return facts


DIGITS = "零一二三四五六七八九"


def chinese_number(n):
    """0 to 99 in Chinese."""
    tens, ones = divmod(n, 10)
    if not tens:
        return DIGITS[ones]
    return (DIGITS[tens] if tens > 1 else "") + "十" + (DIGITS[ones] if ones else "")


def number_facts():
    facts = []
    for a in range(100):
        facts += ask(f"number {a}", "zh", "{word}", "请把 {a} 写成中文数字。|{a} 的中文写法是什么？",
                     a=a, word=chinese_number(a))
        facts += ask(f"number {a}", "zh", "{a}", "中文数字{word}是多少？", a=a,
                     word=chinese_number(a))
        for b in range(100):
            names = dict(a=a, b=b, sum=a + b, less=a - b)
            key = f"sum {min(a, b)} {max(a, b)}"
            facts += ask(key, "en", "{a} + {b} = {sum}", "What is {a} plus {b}?|What is {a} + "
                         "{b}?|Add {a} and {b}.", **names)
            facts += ask(key, "zh", "{a} + {b} = {sum}", "{a} 加 {b} 等于多少？|请计算 {a} + {b}。|"
                         "{a} 加上 {b} 是多少？", **names)
            if a > b:
                facts += ask(f"less {a} {b}", "en", "{a} - {b} = {less}", "What is {a} minus "
                             "{b}?|What is {a} - {b}?|Take {b} away from {a}.", **names)
                facts += ask(f"less {a} {b}", "zh", "{a} - {b} = {less}", "{a} 减 {b} 等于多少？|"
                             "请计算 {a} - {b}。|{a} 减去 {b} 是多少？", **names)
                facts += ask(f"larger {a} {b}", "en", "{a} is larger than {b}.",
                             "Which is larger, {a} or {b}?|Which is larger, {b} or {a}?", **names)
                facts += ask(f"larger {a} {b}", "zh", "{a} 比 {b} 大。", "{a} 和 {b} 哪个大？|{b} 和 "
                             "{a} 哪个大？", **names)
    return facts


GREETINGS = [Fact("greeting", *f) for f in (
    ("zh", "你好！", "你好！有什么可以帮你？"),
    ("zh", "你是谁？", "我是一个很小的语言模型，为一门课程从零训练。"),
    ("zh", "谢谢！", "不客气！"),
    ("zh", "再见。", "再见！"),
    ("zh", "你会做什么？", "我会回答简短的问题，也会续写诗、文章和代码。"),
    ("en", "Hello!", "Hello! What would you like to know?"),
    ("en", "Who are you?", "I am a very small language model, trained from scratch for a course."),
    ("en", "Thank you!", "You are welcome."),
    ("en", "Goodbye.", "Goodbye!"),
    ("en", "What can you do?", "I answer short questions and continue poems, prose and code."))]

# kind -> how many of its questions are asked, over both languages
SHARES = {"country": 6000, "currency": 1400, "language": 3600, "script": 800, "place": 5000,
          "poem": 7000, "command": 1600, "python": 1400, "devil": 900, "number": 9000}


def facts_by_kind(folders, poems):
    """{kind: facts}: everything that is asked about, before anything is drawn."""
    iso = folders["iso-codes"]
    tables = texts.iso_tables(iso)
    country = texts.chinese_names(iso, "3166-1")
    return {
        "country": country_facts(tables, country),
        "currency": code_facts(tables, "4217", texts.chinese_names(iso, "4217"),
                               "currency", "货币"),
        "language": code_facts(tables, "639-2", texts.chinese_names(iso, "639-2"),
                               "language", "语言"),
        "script": code_facts(tables, "15924", texts.chinese_names(iso, "15924"),
                             "script", "文字"),
        "place": place_facts(tables, texts.chinese_names(iso, "3166-2"), country),
        "poem": poem_facts(poems),
        "command": command_facts(folders),
        "python": python_facts(),
        "devil": devil_facts(folders),
        "number": number_facts()}


def conversations(folders, poems):
    """[(text, is held out)]: one or two turns, both from the same side of the split."""
    random_ = random.Random(23)
    drawn = [f for f in GREETINGS for _ in range(12)]
    for kind, facts in facts_by_kind(folders, poems).items():
        random_.shuffle(facts)
        drawn += facts[:SHARES[kind]]
    random_.shuffle(drawn)
    found = []
    for held in (True, False):
        for lang in ("zh", "en"):
            mine = [f for f in drawn if f.lang == lang and texts.held_out(f.key) == held]
            while mine:
                count = 2 if random_.random() < 0.2 and len(mine) > 1 else 1
                turns = [(f.question, f.answer) for f in (mine.pop() for _ in range(count))]
                system = None
                if random_.random() < 0.04:
                    system = "你是一个乐于助人的助手。" if lang == "zh" else \
                        "You are a helpful assistant."
                found.append((render(turns, system), held))
    return found
