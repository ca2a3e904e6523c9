"""DynaMath's 501 questions in 10 variants each -> dynamath.jsonl, the evaluation set outside the training domain.

    python -m data.dynamath.prepare --source DIR

DIR is the hub's download (data/sample1-*.parquet ... sample10-*; reading them takes the package pyarrow) or the
repository (.../10trials/trial1/dataset.json and its images ... trial10). No row is dropped: the set has 5,010.
"""

import json
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import common  # isort: skip  # first: it says in a sentence which package is missing
from tqdm import tqdm

from data import convert
from data.rows import check_image, check_row
from judge import letters, pick


@dataclass
class Args:
    source: str = ""  # the downloaded folder
    out: str = "data/dynamath"
    variants: int = 10  # that have to be there
    seeds: int = 501  # questions that each variant has to have


def find_variants(source):
    """The files that hold one variant each -> {number: path}."""
    found = {}
    for path in [*sorted(source.rglob("*.parquet")), *sorted(source.rglob("dataset.json"))]:
        place = str(path.relative_to(source))
        if number := re.findall(r"(?:trial|sample_variant|sample|variant)_?(\d+)\b", place):
            found.setdefault(int(number[-1]), path)
    return found


def read_hub(path):
    """A variant of the hub's form -> list of (seed, question, gold, answer type, subject, level, image)."""
    if find_spec("pyarrow") is None:
        raise SystemExit(
            f"{path} is a Parquet file, and reading it takes the package pyarrow: run `pip install pyarrow`, or take "
            "the repository DynaMath/DynaMath instead, which needs nothing."
        )
    from pyarrow import parquet

    return list(map(from_hub, parquet.read_table(path).to_pylist()))


def from_hub(row):
    names = ("id", "question", "ground_truth", "answer_type", "subject", "knowledge_level", "decoded_image")
    *values, image = fields(row, names)
    return *values, image["bytes"]


def fields(row, names):
    """The values of these columns, or a sentence that names the missing one."""
    if missing := [name for name in names if name not in row]:
        raise SystemExit(f"A question has no {missing[0]!r}, only {', '.join(row)}: download the data again.")
    return [row[name] for name in names]


def read_repository(path):
    """A variant of the repository's form -> the same, the image as the path of its file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SystemExit(f"{path} is not JSON ({error}): download it again.") from None
    if not isinstance(rows, dict) or not all(seed.isdecimal() and isinstance(row, dict) for seed, row in rows.items()):
        raise SystemExit(f"{path} does not hold questions by their numbers: download it again.")
    names = ("question", "answer", "answer_type", "subject", "level", "image")
    values = [(seed, *fields(row, names)) for seed, row in rows.items()]
    return [(*value, path.parent / image) for *value, image in values]


def make_row(variant, seed, question, answer, answer_type, subject, level):
    """A published question -> a row, less its image.

    Where only the picture shows the options, its kind is free, as it is graded by its letter; its answer_type still
    says that it is multiple choice, for analysis to count by.
    """
    if not isinstance(question, str):
        raise SystemExit(f"Question {seed} of variant {variant} has no text but {question!r}: download the data again.")
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        raise SystemExit(f"Question {seed} of variant {variant} has no answer but {answer!r}: download the data again.")
    text, choices = convert.split_options(question) if answer_type == "multiple choice" else (question, [])
    place = pick(str(answer), choices) if choices else None
    if place in (None, -1) or len(set(choices)) < len(choices):
        text, choices = question, []
    return dict(
        id=f"dynamath_q{int(seed):03d}_v{variant:02d}", source="DynaMath", split="dynamath", image=None,
        question=text.strip(), answer=letters(choices)[place] if choices else str(answer).strip(),
        kind="choice" if choices else "free", choices=choices, seed_id=int(seed), variant=variant,
        answer_type=answer_type, subject=subject, level=level,
    )  # fmt: skip


def main(args):
    source, out, rows, bad = Path(args.source), Path(args.out), [], []
    if not args.source or not source.is_dir():
        raise SystemExit(f"There is no folder {args.source!r}: download DynaMath/DynaMath_Sample, or clone "
                         "DynaMath/DynaMath, and name its folder with --source.")  # fmt: skip
    found = find_variants(source)
    if len(found) != args.variants:
        raise SystemExit(
            f"{source} holds {len(found)} of {args.variants} variants (data/sample1-*.parquet ... or "
            ".../trial1/dataset.json ...): download DynaMath/DynaMath_Sample, or clone DynaMath/DynaMath, and name its "
            "folder with --source."
        )
    for variant, path in tqdm(sorted(found.items()), "variants", unit="variant"):
        read = read_hub if path.suffix == ".parquet" else read_repository
        items = read(path)
        if len(items) != args.seeds:
            raise SystemExit(f"{path} holds {len(items)} questions, not {args.seeds}: download it again.")
        for *fields, image in items:
            row = make_row(variant, *fields)
            row["image"] = f"images/{row['id']}.png"
            target = out / row["image"]
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(image, bytes):
                target.write_bytes(image)
            elif image.exists():
                target.write_bytes(image.read_bytes())
            if fault := check_row(row) or check_image(target):
                bad.append(f"{row['id']}: {fault}")
            rows.append(row)
    if bad:
        raise SystemExit(f"{len(bad)} of {len(rows)} rows are bad, first {bad[0]}; nothing was written.")
    common.write_text(out / "dynamath.jsonl", common.jsonl(rows))
    convert.print_counts(rows, [])
    types = {x["answer_type"] for x in rows}
    print(", ".join(f"{t} {sum(x['answer_type'] == t for x in rows)}" for t in sorted(types)))
    lost = sum(x["answer_type"] == "multiple choice" and not x["choices"] for x in rows)
    unread = [x["id"] for x in rows if convert.check_gold(x)]
    print(f"{lost} multiple choice rows have no usable options in their text and are graded by their letter.")
    if unread:
        print(f"The rule grader can't read {len(unread)} golds ({', '.join(unread[:5])} ...): an LLM judge reads them.")
    print(f"{out / 'dynamath.jsonl'} is ready: it is in every arm's --eval.")


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
