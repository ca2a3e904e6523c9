"""What the converters share: options and sentences out of text, images looked at once, counts of what was dropped."""

import hashlib
import json
import multiprocessing
import os
import re
import threading
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from data.rows import check_row, read_image  # isort: skip  # first: it says in a sentence which package is missing
from PIL import Image
from tqdm import tqdm

from judge import grade, letters

MARKS = (r"\(([A-Z])\)", r"(?:^|\n)[ \t]*([A-Z])[.:)](?=\s)")  # (A) anywhere; A. or A: or A) at the start of a line
HEADER = r"\s*(?:\b(?:choices?|options?)\s*:?)?\s*$"


def split_options(text):
    """`Find x. Choices: (A) 12 (B) 13` -> ("Find x.", ["12", "13"]); (text, []) where no options are written."""
    for mark in MARKS:
        found = [*re.finditer(mark, text)]
        for i, start in enumerate(found):
            names = "".join(m[1] for m in found[i:])
            if len(names) > 1 and names == letters(names):
                ends = [m.start() for m in found[i + 1 :]] + [len(text)]
                options = [text[m.end() : end].strip() for m, end in zip(found[i:], ends, strict=True)]
                own = [re.match(rf"{name}\s*[:.)]\s*(.+)", x, re.S) for name, x in zip(names, options, strict=True)]
                options = [m[1] for m in own] if all(own) else options  # (A) A: the left lung
                return re.sub(HEADER, "", text[: start.start()], flags=re.I), options
    return text, []


def sentences(text):
    """Text -> its sentences with the spaces behind them, so that joined as they are they make up the text.

    They end at full stops, semicolons and line ends, but not in `1. First step` or `A. 12`, and before an <answer> tag,
    which is whole.
    """
    text = text.strip()
    stop = r"(?<=[.!?])(?<!^[\dA-H]\.)(?<![.!?]\s[\dA-H]\.)\s+"
    ends = [m.end() for m in re.finditer(rf"{stop}|;\s*|\n+|。|(?=<answer>)", text, re.M)]
    ends = [end for end in ends if "<answer>" not in text[:end]]
    cuts = [0, *ends, len(text)]
    return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if text[a:b]]


def look(path):
    """An image file -> what is wrong with it or None, its size, whether it has transparent parts, and two hashes.

    sha: of its bytes, so that one picture under two names is one. dhash: 64 signs of brightness steps between
    neighbours on a grid of 8 x 9; equal or nearly so in pictures that look alike.
    """
    image, fault = (None, "the image's name is empty or a folder's") if Path(path).is_dir() else read_image(path)
    if fault:
        return {"fault": fault.replace(f" {path}", ""), "bytes": file_size(path)}
    grey = image.resize((9, 8), Image.Resampling.BOX).convert("L").tobytes()
    steps = [grey[i] < grey[i + 1] for i in range(71) if i % 9 < 8]
    alpha = Image.open(path).has_transparency_data
    return {
        "fault": None, "bytes": file_size(path), "size": image.size, "alpha": alpha,
        "sha": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16],
        "dhash": f"{sum(bit << i for i, bit in enumerate(steps)):016x}",
    }  # fmt: skip


def file_size(path):
    return os.path.getsize(path) if os.path.exists(path) else None


def look_at_all(names, folder, record, desc):
    """Every image of `names` below `folder` -> {name: what `look` says}, kept in the file `record` as it goes.

    When called again, only new, changed and missing files are looked at.
    """
    drop_torn_line(record)
    known = {x["image"]: x for x in read_whole_lines(record)}
    known = {k: x for k, x in known.items() if x["bytes"] is not None and x["bytes"] == file_size(folder / k)}
    left = [name for name in names if name not in known]
    with ThreadPoolExecutor() as threads, open(record, "a", encoding="utf-8") as file:
        bar = tqdm(total=len(names), initial=len(names) - len(left), desc=desc, unit="image", smoothing=0.05)
        for start in range(0, len(left), 1000):
            part = left[start : start + 1000]
            for name, facts in zip(part, threads.map(lambda x: look(folder / x), part), strict=True):
                known[name] = {"image": name} | facts
                file.write(json.dumps(known[name]) + "\n")
                bar.update()
            file.flush()
        bar.close()
    return {name: known[name] for name in names}


def in_order(function, chunks, workers):
    """map(function, chunks) by `workers` processes; few chunks are held at a time, so that memory stays bounded."""
    if workers == 1:
        yield from map(function, chunks)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), end_with_parent) as pool:
        waiting = deque()
        for chunk in chunks:
            waiting.append(pool.submit(function, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def end_with_parent():
    """Make a worker end when the process that started it is gone, which can't tell it where it was killed."""
    watch = lambda: (multiprocessing.parent_process().join(), os._exit(1))
    threading.Thread(target=watch, daemon=True).start()


def read_whole_lines(path):
    """The rows of a JSONL file that may still grow, less a last line that has no end yet."""
    if Path(path).exists():
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def drop_torn_line(path):
    """Cut off what a killed process left behind the last newline. For the one process that appends to the file."""
    if Path(path).exists():
        with open(path, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end and (file.seek(end - 1), file.read(1))[1] != b"\n":
                end -= 1
            file.truncate(end)


def check_bad_images(facts, limit, folder):
    """Count images and stop where more than the share `limit` can't be used."""
    bad = [x for x in facts.values() if x["fault"]]
    clear = sum(x.get("alpha", False) for x in facts.values())
    print(f"{len(facts)} images, {len({x.get('sha') for x in facts.values()} - {None})} distinct, {clear} with "
          f"transparent parts (laid on white), {len(bad)} missing or bad.", flush=True)  # fmt: skip
    if len(bad) > limit * len(facts):
        raise SystemExit(
            f"{len(bad)} of {len(facts)} images below {folder} can't be used ({len(bad) / len(facts):.1%}), first "
            f"{bad[0]['image']} ({bad[0]['fault']}): unpack the archive again, or go on without their rows with "
            f"--bad-images {min(1, len(bad) / len(facts) + 0.01):.2f}."
        )


def reason(fault):
    """A fault in general terms, to be counted: without names and numbers, and without the remedy."""
    fault = re.sub(r"^(the image .*?) ?\(.*", r"\1", fault, flags=re.S)
    fault = re.sub(r"(?<!\w)'.*?'(?!\w)|\"[^\"]*\"|<\S*?>|\d+", "..", fault, flags=re.S)  # can't is no quote
    return fault.partition(": ")[0].strip()


def check_gold(row):
    """What is wrong with a row's text, or with a gold that the grader can't read back, or None."""
    if fault := check_row(row):
        return fault
    if grade(f"<answer>{row['answer']}</answer>", row["answer"], row["choices"]) != "right":
        return f"the grader does not take its gold {row['answer']!r} for right"


def print_counts(rows, drops):
    """Rows by source and kind, dropped rows by reason; both as Markdown. rows, drops: iterables of dicts."""
    counts, images, golds, examples = Counter(), set(), Counter(), {}
    for row in rows:
        counts[row["source"], row["kind"]] += 1
        images.add(row["image"])
        golds[row["answer"]] += row["kind"] == "choice"
    reasons = Counter()
    for drop in drops:
        reasons[drop["reason"]] += 1
        examples.setdefault(drop["reason"], drop["id"])
    total, sources = sum(counts.values()), sorted({source for source, _ in counts})
    print("\n| source | rows | choice | free |\n| --- | --- | --- | --- |")
    for source in sources:
        choice, free = counts[source, "choice"], counts[source, "free"]
        print(f"| {source} | {choice + free} | {choice} | {free} |")
    choice = sum(n for (_, kind), n in counts.items() if kind == "choice")
    print(f"| all, on {len(images)} images | {total} | {choice} | {total - choice} |")
    if choice:
        best, n = golds.most_common(1)[0]
        print(f"\nAlways answering {best} would be right in {n / choice:.0%} of the multiple choice.")
    if reasons:
        print("\n| dropped because | rows | first |\n| --- | --- | --- |")
        for why, n in reasons.most_common():
            print(f"| {why} | {n} | {examples[why]} |")
    print(flush=True)
