"""What a problem row is, and what is done with rows before any model: read, checked, drawn, cut. Needs no torch.

A row is a line of JSON: `id`; `image`, a path from the file's folder; `question`; `answer`, the gold; `kind`, choice or
free; `choices`, the options' texts or []. Where there is one it has a `solution`, sentences that make up the text when
joined as they are and the last of which states the answer, and a `teacher` answer, token ids.
"""

import os
import random
import re
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path

from judge import grade, need, pick, read_jsonl

need("PIL", "tqdm")

from PIL import Image
from tqdm import tqdm

ROW = ("id", "image", "question", "answer", "kind", "choices")
MARKS = re.compile(r"<image>|<\|\w\w+\|>")  # what the chat template alone may put into a prompt


def load_pool(path, least=1, decode=True):
    """A pool or an evaluation set -> list of rows, each row and image checked; `image` becomes the path from here.

    Stops with one sentence that names the file, the first bad row and the remedy, and counts the other bad rows.
    decode=False looks only whether the images are there, for rows whose converter has decoded them.
    """
    path, bad, numbers, golds = Path(path), [], {}, {}
    if not path.is_file():
        raise SystemExit(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: {_remedy(path)}.")
    with open(path, encoding="utf-8", errors="surrogateescape") as lines:
        if odd := next((number for number, x in enumerate(lines, 1) if re.search("[\udc80-\udcff]", x)), None):
            raise SystemExit(f"{path}, line {odd} is not UTF-8: save the file in that encoding.")
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        fault = check_row(row)
        if not fault and numbers.setdefault(row["id"], number) != number:
            fault = f"its id is that of line {numbers[row['id']]} too: give each row its own"
        if not fault:
            first = golds.setdefault((row["image"], row["question"], *row["choices"]), (row["answer"], number))
            if first[0] != row["answer"]:
                fault = f"line {first[1]} asks the same and has another gold: drop both"
        if fault:
            bad.append(f"line {number} (id {row.get('id') if isinstance(row, dict) else None}): {fault}")
        else:
            row["image"] = str(path.parent / row["image"])
    if not bad:
        images = [*dict.fromkeys(row["image"] for row in rows)]
        check = check_image if decode else lambda x: None if os.path.exists(x) else f"the image {x} is missing"
        with ThreadPoolExecutor() as threads:
            faults = tqdm(threads.map(check, images), f"images of {path.name}", len(images), unit="image",
                          leave=False, disable=len(images) < 2000)  # fmt: skip
            faults = dict(zip(images, faults, strict=True))
        faults = [(number, row["id"], faults[row["image"]]) for number, row in enumerate(rows, 1)]
        bad = [f"line {number} (id {id}): {fault}" for number, id, fault in faults if fault]
    if bad:
        remedy = f"; {_remedy(path)}" if "is missing" in bad[0] else ""
        raise SystemExit(f"{path}, {bad[0]}{remedy}{f' ({len(bad) - 1} more rows are bad)' if len(bad) > 1 else ''}.")
    if not rows:
        raise SystemExit(f"{path} is empty: put problems in it, one JSON row a line.")
    if len(rows) < least:
        raise SystemExit(f"{path} holds {len(rows)} problems and a step takes {least}: lower --problems or add rows.")
    return rows


def _remedy(path):
    """What to do about a pool that is not there, or about its images."""
    folder = path if path.is_dir() else path.parent
    script, readme = folder / "prepare.py", folder / "readme.md"
    if not path.is_file() and (others := sorted(x.name for x in folder.glob("*.jsonl"))):
        return f"{folder} holds {', '.join(others)}"
    if script.exists() and not path.is_absolute():
        return f"run `python -m {'.'.join(script.with_suffix('').parts)}`"
    return f"{readme} says how to make it" if readme.exists() else "check the path"


def check_row(row):
    """What is wrong with the text of a row, and what to do about it, or None."""
    if not isinstance(row, dict):
        return "it is no JSON object: write one row a line"
    if missing := [k for k in ROW if k not in row]:
        return f"there is no field {missing[0]}: a row has {', '.join(ROW)}"
    texts, lists = [row[k] for k in ROW[:4]], [row["choices"], *(row.get(k) or [] for k in ("solution", "teacher"))]
    if not all(isinstance(x, list) for x in lists):
        return "choices, solution and teacher have to be lists: write [] where there is nothing"
    if not all(isinstance(x, str) for x in texts + lists[0] + lists[1]):
        return 'id, image, question, answer, each option and each sentence have to be text: write 4 as "4"'
    if not all(type(x) is int and x >= 0 for x in lists[2]):
        return "its teacher answer holds something else than token ids: write a list of whole numbers"
    if re.search("[\ud800-\udfff]", " ".join(texts + lists[0] + lists[1])):
        return "half a character (a lone surrogate such as \\ud800) stands in its text: take it out"
    if row["kind"] not in ("choice", "free"):
        return f"its kind is {row['kind']!r}: write choice or free"
    if not len(set(row["choices"])) == len(row["choices"]) <= 26:
        return "two of its options are equal, or there are more than 26: repair or remove the row"
    if not row["question"].strip() or not row["answer"].strip():
        return "question or answer is empty: remove the row"
    if found := MARKS.search(" ".join([row["question"], *row["choices"]])):
        return f"{found[0]} stands in the text: take it out, the prompt places the image itself"
    if (row["kind"] == "choice" or row["choices"]) and pick(row["answer"], row["choices"]) in (None, -1):
        return f"the gold {row['answer']!r} is none of its {len(row['choices'])} options: parse them or drop the row"


def check_image(path):
    """What is wrong with an image file, and what to do about it, or None. Decodes it whole."""
    return read_image(path)[1]


def read_image(path):
    """An image file -> (its picture, None) or (None, what is wrong with it, and what to do about it)."""
    if not os.path.exists(path):
        return None, f"the image {path} is missing"
    try:
        width, height = (image := load_image(path)).size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return None, f"the image {path} can't be read ({error}): replace it or remove the row"
    if max(width, height) > 200 * min(width, height):
        return None, f"the image {path} is {width} x {height}, longer than 200 : 1: remove the row"
    return image, None


def load_image(path):
    """RGB; what is transparent is laid on white (a plain conversion would make it black)."""
    image = Image.open(path).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def load_sets(args):
    """{name: rows} of the evaluation sets, loaded before training so that a bad one stops the run early."""
    paths = [path for path in args.eval.split(",") if path]
    if len({Path(path).stem for path in paths}) < len(paths):
        raise SystemExit(f"--eval {args.eval} names two files alike, by which sets are known: rename one.")
    return {Path(path).stem: load_pool(path) for path in paths}


def next_problems(pool, step, args, run):
    """This rank's problems of step `step`, each `group` times in a row -> list of B rows. Pure in (seed, step, rank).

    Shuffled epochs, joined end to end. Rank r takes every world-th problem: the first minibatch of all ranks together
    is then the first minibatch of a single process.
    """
    rows = []
    for k in range(step * args.problems + run.rank, (step + 1) * args.problems, run.world):
        epoch, i = divmod(k, len(pool))
        rows += [pool[shuffled(args.seed, epoch, len(pool))[i]]] * args.group
    return rows


@cache
def shuffled(seed, epoch, n):
    return random.Random(f"{seed}/{epoch}").sample(range(n), n)


def segments(problem, most=5):
    """A reference solution of n sentences cut into K <= `most` parts, the k-th cut at round(k n / K) -> K texts.

    Parts that would give the answer away are empty: the last, and all from the first sentence that ends in the answer.
    """
    solution, choices = problem.get("solution") or [], problem["choices"]
    K = min(most, len(solution))
    ends = [round(k * len(solution) / K) for k in range(1, K + 1)]
    parts = ["".join(solution[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    gold = choices[pick(problem["answer"], choices)] if choices else problem["answer"]
    stated = re.compile(rf"(?<![\w.]){re.escape(gold)}[^\w]*$")
    told = lambda text: stated.search(text) or grade(text, problem["answer"], choices) == "right"
    first = next((i for i, sentence in enumerate(solution) if told(sentence)), len(solution))
    return [part if end <= first and end < len(solution) else "" for part, end in zip(parts, ends, strict=True)]


def teacher_cuts(problem, processor, most=5):
    """Where a stored teacher answer may be cut: tokens in its first 0..K-1 of K <= `most` parts -> list, [0] if none.

    Parts end at sentences, lines or steps; never after the answer has begun.
    """
    ids = problem.get("teacher") or []
    texts = processor.tokenizer.batch_decode([[i] for i in ids])
    chars = [*accumulate(map(len, texts))]
    found = re.finditer(r"[.!?](?=\s)\n*|;|\n+", "".join(texts))
    ends = sorted({bisect_left(chars, m.end()) + 1 for m in found} | {len(ids)} - {0})
    K = min(most, len(ends))
    cuts = [0] + [ends[round(k * len(ends) / K) - 1] for k in range(1, K)]
    return [cut for cut in cuts if "<answer>" not in "".join(texts[:cut])]
