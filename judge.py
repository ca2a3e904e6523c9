"""judge.py: the outputs of all runs in, one verdict per distinct output out, blind to who wrote it.

Protocol
  1. Every run's outputs are joined with the evaluation sets its config.json names. A judged item is the question as the
     model read it (options included), the reference answer, and the whole output, never an extracted answer.
  2. There the run's name ends: the queue holds no arm, seed, set or row id. Identical items are one item, so equal
     outputs get equal verdicts, and an arm that says nothing new costs nothing.
  3. The queue is shuffled with a seed, which stands in every verdict's line.
  4. A verdict is true or false, appended as one line {key, verdict, judge, seed} the moment it is known. Whenever the
     judge is killed, the next call judges only what is missing.
  5. A verdicts file holds one judge. Accuracies by different judges are not comparable.

Judges
  rule   the training reward's grader, not the paper's LLM judge. It reads answers by their form, and form differs
         between arms: for the toy and for CI, never a number to set beside the paper's.

  python judge.py runs/* --judge rule
  python analyze.py
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import sys
import unicodedata
from fractions import Fraction
from pathlib import Path


def need(*packages):
    """Stop with a sentence on a Python that is not supported or a package that is not there."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SystemExit(f"Python {sys.version.split()[0]} is not supported: use 3.11, 3.12 or 3.13.")
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"The package {package} is missing: run `pip install -r requirements.txt`.")


need("tqdm")

from tqdm import tqdm

LABEL = {"rule": "rule judge, not the paper's LLM judge"}
VERDICTS = Path("runs/verdicts.jsonl")


# --- rows -------------------------------------------------------------------------------------------------------------


def read_jsonl(path):
    """All rows of a JSONL file; a broken line is an error that names it."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path}, line {number} is not JSON ({error.msg}): repair or remove it.") from None
    return rows


def letters(choices):
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]


def prompt_text(problem, instruction=""):
    """The question as the model reads it, options and instruction included."""
    options = [
        f"({letter}) {text}" for letter, text in zip(letters(problem["choices"]), problem["choices"], strict=True)
    ]
    return "\n".join([problem["question"], *options, instruction]).rstrip("\n")


# --- the grader behind the rule judge and the training reward ---------------------------------------------------------

READ = 4000  # characters of an output that are read: the answer comes last, and hostile text stays cheap
WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
WORDS = {word: n for n, word in enumerate(WORDS.split())} | {"sqrt": "√", "pi": "π"}
POWERS = {"hundred": 2, "thousand": 3, "万": 4, "million": 6, "亿": 8, "billion": 9}
DATES = (
    " january february march april may june july august september october november december"
    " monday tuesday wednesday thursday friday saturday sunday"
)
UNITS = {"mm", "cm", "m", "km", "in", "ft", "g", "kg", "s", "min", "h", "°", "rad", "%"}
SIGNS = (  # LaTeX and Unicode, each followed by the sign that stands for it from here on
    r"\dfrac frac \tfrac frac \times * × * \cdot * · * ⋅ * \div / ÷ / ** ^ \infty ∞ \in = ∈ = \approx = ≈ = "
    r"\left( ( \left[ [ \left\{ \{ <= ≤ \leq ≤ \le ≤ >= ≥ \geq ≥ \ge ≥ != ≠ \neq ≠ \ne ≠ "
    r"\% % percent % ^\circ ° ^{\circ} ° \circ ° \degree ° degrees ° degree ° 度 °"
).split()
SPELLING = [
    (r"\\(?:text\w*|math\w+|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:right|displaystyle|q?quad)(?![a-z])|\\[,;:!()\[\] ]|\{,\}|\\?[$€£¥~]|(?<!\\)\\++(?=[a-z])", ""),
    (r"(?<![a-zA-Z])[a-zA-Z]+(?![a-zA-Z])", lambda m: str(WORDS.get(m[0].lower(), m[0]))),
    (rf"(?<=\d)\s*({'|'.join(POWERS)})", lambda m: f"e{POWERS[m[1]]}"),
    (r"(?<=\d)\s*x\s*(?=\d)", "*"),
    (r"(?<=\d)\s*\*\s*10\s*\^\s*[({]?\s*([+-]?\d+)\s*[)}]?", r"e\1"),
    (r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1 frac(\2)(\3)"),  # a mixed number
    (r"frac\s*(\d)\s*(\d)", r"frac(\1)(\2)"),
    (r"\b(?:(c)enti|(m)illi|(k)ilo)?met(?:er|re)s?\b", r"\1\2\3m"),
    (r"\b0+(?=\d:)|(?<=\d:)0+(?=\d)", ""),  # 8:05 and 8:5 are one time
    (r"(?<![\d.,({[])\d{1,3}(?:,\d{3})+(?!\d|\s*[)}\]])", lambda m: m[0].replace(",", "")),
]
RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3, ")": 0, "]": 0, "}": 0}  # how tightly a sign binds; side by side is 2
NUMBER = r"(?:[\d.+*/^()\[\]{}√π\s-]|[eE](?=[+-]?\d)|frac)*"
UNIT = (
    r"(?!.*(?:\b(?:not|wrong|incorrect|least|most|than)\b|√|π|frac))"
    r"(?:\s*(?:[°%]|[^\W\d_]{2}|[mgsh]\b)|\s+[A-Z]\b)(?:[^\d=+*<>]|\^\s*-?\d|(?<=m)[23])*"
)

# What stands around a value in a sentence, in the order in which it is taken away.
HEDGE = r"about|around|approximately|roughly|nearly|exactly|only|just|either|the|an?|so|thus|hence|therefore"
BOUND = r"between|from|at (?:least|most)|(?:more|less|fewer|greater|larger|smaller) than|over|under"
VALUE = (
    rf"(?=(?:(?:{HEDGE}|{BOUND})\s+)*(?:[-+]?(?:\.?\d|\\?[(\[{{√π]|(?:frac|sin|cos|tan|log|ln)(?![a-z]))"
    r"|[m∠]*[a-z]\w{0,2}(?:\(\w+\))?\s*=))"
)
GIVES = (
    r"(?:\b(?:is|are|was|were|be|equals?|gives?|makes?|gets?|have|has|by|so|thus)\b(?: an? \w+ of\b)?"
    r"|(?<!\d)(?<!\d ):|[是为得有]|等于)"
)
REASON = r"(?<=\w)[,;]?\s+(?:because|since)\b.*"
ONWARD = r"(?!\b(?:or|not|never)\b|n't)"  # no step over an alternative or a denial
AROUND = [
    (REASON, ""),
    (rf"^(?:{ONWARD}.)*{GIVES}\s*{VALUE}|^(?:(?:{ONWARD}[^\d=+*/^<>≤≥≠±|\\-])*?\s)??{VALUE}", ""),
    (r"^(\D*+\d.*?),?\s+(?:\((?=[a-z]{2})|(?:in|with|for|of|on|at|which|where)\s)(?!.*\b(?:and|or)\b).*", r"\1"),
    (r"^(yes|no|true|false)\b(?:,.*|\W*$)", r"\1"),
    (r"^\D*\b(?:is|are|was|were|be)\s+(?=\D+$)", ""),
    (rf"^(?:(?:{HEDGE}|in|on|at|by|it)\s+)+(?=\S)", ""),
]

# Where an output states its answer, and where it doesn't.
SENTENCE = r"(?<=[.!?])(?<!\b[A-H]\.)\s+|(?<=。)|\n+"
FOREIGN = r"\b(?:grader|judge|reference|expected answer|ground truth)\b|\?$|^\s*(?:hint|question|choices|options)\s*:"
NAMED = r"(?=\s*(?:option )?\(?[A-H](?![A-Za-z]))"
PHRASE = (
    r"(?i:\b(?:answer|final result|option|choice)(?: (?:to|for|of) [^:=]{1,40}?)?"
    r"(?:\s+(?:is|are|was|would be|must be|should be)\b\s*:?|\s*[:=]|$))"
    rf"|\b(?:must be|choose|select|pick)\b{NAMED}|答案应?该?[是为选]?\s*:?|选[择项]?[是为]?\s*:?{NAMED}"
)
BROKEN = r"(?:\b(?:the|an?|is|are|and|or|of|to|by|so|then|than|that|we|get|equals|from|with)|[-=+*/×÷,:;(])$"
NOTHING = (  # a refusal, an option ruled out, a line of working that goes on from the line before
    r"(?i:\b(?:cannot|can't|can not|could not|unable|impossible|(?:don't|do not) know|not sure|wrong|incorrect)\b)"
    r"|无法|不知道|^[-+*/x×÷]\s*[\d.]+\s*="
)
WITHDRAWN = (
    r"(?i:\b(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not right|a mistake)|\bI made an? (?:mistake|error)"
    r"|scratch that|(?:^|[.!?\n]) ?(?:wait|actually|hold on|oops|correction|等等)\b)|不对"
)
LETTER = r"(?<![A-Za-z0-9°∠])(?:(?<!\d )|(?=.[.:)]))(?!A (?!is|are|and|or|because|since)[a-z])([A-H])(?![\w']|\s*=)"
RULED_OUT = r"\b(?:not|isn't|rather than|instead of)\s+\S+"


def tidy(text):
    """The last READ characters; full-width signs, superscripts and one-sign fractions spelled out, no bold marks."""
    text = re.sub("[⁻⁰¹²³⁴-⁹]+", r"^\g<0>", text[-READ:])  # else the exponent of cm² would become a digit
    text = unicodedata.normalize("NFKC", re.sub("[¼-¾⅐-⅞]", r" \g<0>", text))[-READ:]
    text = text.translate(str.maketrans("−–‐‑⁄“”‘’", "----/\"\"''"))
    return re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(-])|`|(?m:^#+)", "", text).strip()


def plain(text):
    """`\\frac{1}{2}\\text{ cm}.` -> `frac{1}{2}  cm`: few signs, no LaTeX, no number words, no commas in numbers."""
    text = tidy(text)
    for old, new in zip(SIGNS[::2], SIGNS[1::2], strict=True):
        text = text.replace(old, new)
    for pattern, new in SPELLING:
        text = re.sub(pattern, new, text)
    return text.strip(" \"'").rstrip(".,;:!。 \"'")


def stated(text):
    """`So the ladder is about 5 m long (see above).` -> `5 m long`."""
    text = plain(text)
    for pattern, new in AROUND if len(text) < 300 else []:  # nothing longer states a value
        text = re.sub(pattern, new, text, count=1, flags=re.I | re.S)
    return text


def combine(sign, x, y):
    """x sign y; nan if undefined or huge, and for a sum or product of plain numbers: `30 + 15` is work left undone."""
    exact = isinstance(x, Fraction) and isinstance(y, Fraction)
    if sign == "^":
        size = abs(float(x))
        if not (size > 0 and abs(y) < 100 and abs(y * math.log10(size)) < 99) or (x < 0 and y % 1):
            return math.nan
        return x**y if x % 1 == 0 else float(x) ** float(y)
    if sign == "/":
        value = x / y if float(y) else math.nan
    elif exact:
        value = x + y if sign == "frac" else math.nan  # side by side: 2 1/2 is a sum, but 2 sqrt(3) a product
    else:
        value = x + y if sign == "+" else x - y if sign == "-" else x * y
    return value if abs(value) < 1e99 else math.nan


def calculate(tokens, floor=0):
    """Reads a value off a reversed list of tokens, by precedence climbing -> Fraction where rational, float, or nan."""
    token = tokens.pop() if tokens else " "
    if token in "+-":
        value = calculate(tokens, max(floor, 1)) * (-1 if token == "-" else 1)
    elif token in "([{":
        value = calculate(tokens)
        value = value if tokens and tokens.pop() in ")]}" else math.nan
    elif token == "frac":
        value = combine("/", calculate(tokens, 3), calculate(tokens, 3))
    elif token == "√":
        degree = calculate(tokens, 3) if tokens[-1:] == ["["] else 2
        value = combine("^", calculate(tokens, 3), combine("/", 1, degree))
    elif token == "π":
        value = math.pi
    else:
        value = Fraction(token) if token[-1] in "0123456789" else math.nan
    while tokens and (rank := RANK.get(tokens[-1], 2)) > floor:
        sign = tokens.pop() if tokens[-1] in RANK else tokens[-1]
        value = combine(sign, value, calculate(tokens, rank - (sign == "^")))
    return value


def quantity(text):
    """`12 cm^2`, `25%`, `3 apples` -> (value, unit); the value is nan where the text is not one number."""
    found = len(text) < 100 and re.fullmatch(rf"({NUMBER})({UNIT})?", text, re.S)
    if not found:
        return math.nan, ""
    tokens = re.findall(r"\d*\.?\d+(?:e[+-]?\d\d?(?!\d))?|frac|\S", found[1].lower().rstrip("- ("), re.A)[::-1]
    value = calculate(tokens)
    return math.nan if tokens else value, re.sub(r"[\s^]", "", found[2] or "")


def parts(text):
    """`x = 2 or x = -3`, `{2, -3}`, `(0, 6)`, `x = 0, y = 6` -> (brackets, [(name, value as text), ...])."""
    text = stated(text)
    pair = re.fullmatch(r"(?:[^=]*=)?\s*(\(|\[|\\?\{)([^()\[\]\\]*)(\)|\]|\\?\})", text)
    brackets, body = (pair[1][-1] + pair[3][-1], pair[2]) if pair and "," in pair[2] else ("", text)
    items = [item.rpartition("=") for item in re.split(r"[,;、]\s*(?:or\b|and\b)?|\bor\b|\band\b|或|和", body)]
    return brackets, [(name.split("=")[0].replace(" ", "").lower(), value.strip()) for name, _, value in items]


def words(text):
    """Lower case without punctuation; months and days by three letters; an edge of a graph in alphabetical order."""
    if re.fullmatch("[A-HJ-UWYZ]{2}", text):  # but for Roman numerals
        return "".join(sorted(text))
    found = re.findall(r"\w+|[^\w\s{}]", text.lower().strip(" .!?()[]{}"))
    return "".join(w[:3] if len(w) > 2 and f" {w}" in DATES else w for w in found)


def close(value, gold):
    """An integer gold is met exactly; another is a rounded one: +-0.001, times its size below 1; +-0.01 % above 10."""
    if gold % 1 == 0:
        return value == gold or isinstance(value, float) and math.isclose(value, gold, rel_tol=1e-9)
    return abs(value - gold) <= max(1e-3 * min(1, abs(gold)), 1e-4 * abs(gold))


def same_part(part, gold_part):
    (name, text), (gold_name, gold_text) = part, gold_part
    (value, unit), (gold, gold_unit) = quantity(text), quantity(gold_text)
    if name and gold_name and name != gold_name:
        return False
    if math.isnan(gold):
        return "" != words(text) == words(gold_text)
    if unit != gold_unit and unit.rstrip("23") in UNITS and gold_unit.rstrip("23") in UNITS:
        return False
    share = (unit[:1] == "%") - (gold_unit[:1] == "%")  # 25% is 25 and also 0.25
    return close(value, gold) or share != 0 and close(value / 100 if share > 0 else value * 100, gold)


def same_answer(a, b):
    """Whether `a` gives the reference `b` -> bool. Numbers in any usual spelling, pairs, sets, equations, dates, text.

    An integer must be met exactly, a decimal within 0.001 (DynaMath's rule; see `close`). A sum or product left to do
    is no number, and a unit counts only where both sides name one.
    """
    (ours, left), (theirs, right) = parts(a), parts(b)
    if len(left) != len(right) or (ours and theirs and ours != theirs):
        return False
    named = [len({name for name, _ in side if name}) > 1 for side in (left, right)]
    if set(ours + theirs) & {"(", "["} or named[0] != named[1]:  # the order counts
        return all(map(same_part, left, right))
    for gold in right:
        hit = next((part for part in left if same_part(part, gold)), None)
        if hit is None:
            return False
        left.remove(hit)
    return True


def pick(text, choices):
    """The index of the one option that a text names, by letter, by text or by both; else -1 or None."""
    text, names, texts = plain(text), letters(choices), [plain(choice).lower() for choice in choices]
    alike = lambda part: {i for i, choice in enumerate(choices) if same_answer(part, choice)}
    lone = re.fullmatch(r"\(?([A-Za-z])[).]?", text)
    if lone and lone[1].upper() in names:
        return names.index(lone[1].upper())
    if text.lower() in texts:
        return texts.index(text.lower())
    led = re.match(r"\(?([A-Z])(?:[).:,]+\s*|\s+)(.+)", text, re.S)
    if led and (same := alike(led[2])):
        return names.find(led[1]) if names.find(led[1]) in same else None
    if same := alike(text):
        return same.pop() if len(same) == 1 else None
    text = re.sub(f"{RULED_OUT}|{REASON}", "", text)
    if named := set(re.findall(LETTER, text)):
        return names.find(named.pop()) if len(named) == 1 else None
    found = [t for t in texts if math.isnan(quantity(t)[0]) and re.search(rf"(?<!\w){re.escape(t)}(?!\w)", text, re.I)]
    found = [t for t in found if not any(t != other and t in other for other in found)]
    return texts.index(found[0]) if len(found) == 1 else None


def boxed(text):
    """The content of the last \\boxed{...}; empty if it never closes."""
    text, depth = text[text.rfind("\\boxed") :], 0
    for i, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if sign == "}" and depth == 0:
            return text[text.index("{") + 1 : i]
    return ""


def extract(text, choices):
    """The final answer as an output states it -> str, or None where it states none.

    The last complete <answer> tag, else the last \\boxed, else a JSON "short answer", else what follows the last answer
    phrase, else the last sentence. Answers taken back, delimiters never closed and working cut off hold none.
    """
    text, held, texts = tidy(text), False, [choice.lower() for choice in choices]
    broken = lambda span: re.search(BROKEN, span) and span.lower() not in texts
    if re.search("<answer>", text, re.I):
        tags = re.findall("<answer>((?:(?!<answer>).)*?)</answer>", text, re.I | re.S)
        text, held = (tags or [""])[-1], True
    else:
        text = re.split(WITHDRAWN, text)[-1]
    if "\\boxed" in text:
        text, held = boxed(text), True
    if field := re.search(r'"short[ _]answer"\s*:(.*)', text, re.S):
        value = re.match(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",}]+)\s*[,}])', field[1])
        text, held = value[1] or value[2] or "" if value else "", True
    sentences = [s.strip() for s in re.split(SENTENCE, text) if s.strip() and not re.search(FOREIGN, s, re.I)]
    for i, sentence in reversed([*enumerate(sentences)]):
        *_, phrase = [None, *re.finditer(PHRASE, sentence)]
        span = (sentence[phrase.end() :].strip() or "".join(sentences[i + 1 : i + 2])) if phrase else ""
        if span.strip(" .:") and not broken(span):
            return span
    if held:
        return text.strip() if text.strip(" .:\n") else None
    last = sentences[-1] if sentences else ":"
    unended = (len(sentences) > 1 or ";" in last) and last[-1] not in ".!。)"
    if unended or broken(last) or re.search(NOTHING, last):
        return None
    if choices:
        return last if pick(last, choices) is not None else None
    return last if re.search(r"\w", last) and len(re.findall(r"[^\W\d_]{2,}", stated(last))) <= 4 else None


def grade(output, answer, choices):
    """The verdict behind the reward -> "right", "wrong" or "unparsed" (no final answer). Reads only its arguments.

    `answer` is the reference: a letter or an option's text where there are `choices`, else free-form. ValueError if it
    is empty or none of the options.
    """
    gold = pick(answer, choices) if choices else 0
    if not answer.strip() or gold in (None, -1):
        raise ValueError(f"the reference answer {answer!r} is empty or no option of {choices}: drop this row")
    found = extract(output, choices)
    if found is None:
        return "unparsed"
    return "right" if (pick(found, choices) == gold if choices else same_answer(found, answer)) else "wrong"


# --- runs in, verdicts out --------------------------------------------------------------------------------------------


def key(question, reference, output):
    """sha256 of one judged item, three strings. JSON keeps their borders: ("ab", "c") is not ("a", "bc")."""
    return hashlib.sha256(json.dumps([question, reference, output]).encode()).hexdigest()


def read_answers(run):
    """A run folder's greedy answers: a list of {set, id, key, question, reference, choices, output} in the order of its
    evaluation sets. Stops with a sentence where the run is unfinished or the sets are not those it answered."""
    if not (run / "config.json").exists():
        raise SystemExit(f"{run} is no run folder (no config.json): name run folders only, such as runs/grpo-s0.")
    paths = [Path(path) for path in json.loads((run / "config.json").read_text())["args"]["eval"].split(",") if path]
    for path in paths:
        if not path.exists():
            raise SystemExit(f"{run} was evaluated on {path}, which is not here: call from the folder that holds it.")
    if not (run / "outputs.jsonl").exists():
        raise SystemExit(f"{run} is unfinished: give its command again, which resumes it, or move the folder away.")
    rows = {(path.stem, row["id"]): row for path in paths for row in read_jsonl(path)}
    outputs = {(line["set"], line["id"]): line["output"] for line in read_jsonl(run / "outputs.jsonl")}
    if unmatched := sorted(rows.keys() ^ outputs.keys()):
        raise SystemExit(
            f"{run}/outputs.jsonl and the evaluation sets differ in {len(unmatched)} rows, {unmatched[0][1]} of "
            f"{unmatched[0][0]} first: put the sets back as they were, or delete the folder and run the arm again."
        )
    answers = []
    for (name, id), row in rows.items():
        item = {"question": prompt_text(row), "reference": row["answer"], "output": outputs[name, id]}
        answers.append({"set": name, "id": id, "key": key(**item), "choices": row["choices"], **item})
    return answers


def blind_queue(answers, seed):
    """Distinct items to judge, without run, set or id, in an order that depends on the items and the seed alone."""
    fields = ("key", "question", "reference", "choices", "output")
    items = {answer["key"]: {field: answer[field] for field in fields} for answer in answers}
    queue = [items[k] for k in sorted(items)]
    random.Random(seed).shuffle(queue)
    return queue


def read_verdicts(path, judge=None):
    """A verdicts file as (judge, {key: bool}), an absent one as (judge, {}). Stops with a sentence where it holds
    another judge than the one asked for, or a line that is no verdict."""
    lines = read_jsonl(path) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not ({"key", "judge"} <= line.keys() and isinstance(line.get("verdict"), bool)):
            raise SystemExit(f"{path}, line {number} is no verdict (key, judge, true or false): is it a verdicts file?")
    judges = {line["judge"] for line in lines}
    if len(judges) > 1 or (judge and judges - {judge}):
        raise SystemExit(
            f"{path} holds verdicts by {' and '.join(sorted(judges))}, asked is {judge or 'one judge'}: verdicts of "
            "different judges never mix, name another file with --verdicts."
        )
    return judges.pop() if judges else judge, {line["key"]: line["verdict"] for line in lines}


def drop_torn_line(path):
    """Cuts off what a killed judge left behind the last newline of the verdicts file."""
    text = path.read_bytes() if path.exists() else b""
    if torn := len(text) - text.rfind(b"\n") - 1:
        os.truncate(path, len(text) - torn)
        print(f"{path} ended in a torn line ({torn} bytes, a judge was killed while writing): dropped, judged again.")


def rule(item):
    """Whether the training reward's grader calls the output right; an unparsed output is not right. -> bool"""
    return grade(item["output"], item["reference"], item["choices"]) == "right"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; what else is named is skipped")
    parser.add_argument("--judge", choices=["rule"], default="rule")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument("--seed", type=int, default=0, help="order of the queue")
    args = parser.parse_args(argv)

    runs = [path for path in args.runs if (path / "config.json").exists()]  # runs/* names other things as well
    if not runs:
        raise SystemExit(f"{args.runs[0]} is no run folder: name run folders, such as runs/grpo-s0.")
    answers = [answer for run in runs for answer in read_answers(run)]
    drop_torn_line(args.verdicts)
    verdicts = read_verdicts(args.verdicts, args.judge)[1]
    queue = blind_queue(answers, args.seed)
    todo = [item for item in queue if item["key"] not in verdicts]
    args.verdicts.parent.mkdir(parents=True, exist_ok=True)
    with open(args.verdicts, "a") as file:
        for item in tqdm(todo, desc=LABEL[args.judge], unit="output"):
            line = {"key": item["key"], "verdict": rule(item), "judge": args.judge, "seed": args.seed}
            file.write(json.dumps(line) + "\n")
            file.flush()  # a verdict that is known is on disk
    elsewhere = f" --runs {runs[0].parent} --verdicts {args.verdicts}"
    print(
        f"{len(runs)} runs, {len(answers)} outputs, {len(queue)} distinct: {len(todo)} judged now, "
        f"{len(queue) - len(todo)} reused ({LABEL[args.judge]}).\nVerdicts: {args.verdicts}. Next: python analyze.py"
        + elsewhere
        * (args.verdicts != VERDICTS)
    )


if __name__ == "__main__":
    main()
