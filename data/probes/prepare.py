"""Copies of evaluation sets that `analyze.py hacking` compares with the sets themselves.

<set>-shuffled  its multiple choice with the options in another order, so that the reference has another letter
<set>-blank     all of its questions, each on a grey image of the size of its own

    python -m data.probes.prepare data/pool/old.jsonl data/dynamath/dynamath.jsonl
"""

import argparse
import json
import os
import random
from pathlib import Path

from judge import letters, need, pick, read_jsonl

need("PIL", "tqdm")

from PIL import Image
from tqdm import tqdm

GREY = (128, 128, 128)


def shuffled(row, draw):
    """The row with its options in an order drawn anew until the reference has moved. None for a row without options, or
    whose options are letters that stand in the question or in the image."""
    choices = row["choices"]
    if len(choices) < 2 or any(choice.strip() in letters(choices) for choice in choices):
        return None
    gold = order = pick(row["answer"], choices)
    while order == gold or order.index(gold) == gold:
        order = draw.sample(range(len(choices)), len(choices))
    return row | {"choices": [choices[i] for i in order], "answer": letters(choices)[order.index(gold)]}


def write(path, rows):
    path.with_suffix(".new").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    path.with_suffix(".new").replace(path)


def prepare(path, out, seed=0):
    """Writes the copies of one set into the folder `out` -> their paths."""
    rows = [row | {"solution": [], "teacher": None} for row in read_jsonl(path)]
    (out / "images").mkdir(parents=True, exist_ok=True)
    place = lambda row: os.path.relpath(path.parent / row["image"], out)
    moved = [shuffled(row | {"image": place(row)}, random.Random(f"{seed}/{row['id']}")) for row in rows]
    copies = {out / f"{path.stem}-shuffled.jsonl": [row for row in moved if row]}
    blank = []
    for number, row in enumerate(tqdm(rows, f"grey images of {path.stem}", unit="image")):
        image = Path("images") / f"{path.stem}-{number}.png"  # one a row: on one image equal questions would be one
        Image.new("RGB", Image.open(path.parent / row["image"]).size, GREY).save(out / image)
        blank.append(row | {"image": str(image)})
    copies[out / f"{path.stem}-blank.jsonl"] = blank
    for copy, found in copies.items():
        if found:
            write(copy, found)
        print(f"{copy}: {len(found)} of {len(rows)} rows{'' if found else ', so not written'}.")
    return [copy for copy, found in copies.items() if found]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", type=Path, metavar="SET.jsonl")
    parser.add_argument("--out", type=Path, help="data/probes/<the set's folder>, unless given")
    args = parser.parse_args(argv)
    made = []
    for path in args.sets:
        if not path.exists():
            raise SystemExit(f"{path} does not exist: name an evaluation set, such as data/toy/old.jsonl.")
        made += prepare(path, args.out or Path("data/probes") / path.parent.name)
    print(
        "Next, for every run, with its own evaluation flags (--toy, ...), here for runs/grpo-s0:\n"
        "  torchrun --nproc_per_node 8 grpo.py --name grpo --seed 0 --steps 0 --gates off --runs runs/probes "
        f"--model runs/grpo-s0/checkpoint --eval {','.join(map(str, made))}\n"
        "  python judge.py runs/probes/* --verdicts runs/verdicts.jsonl --judge rule, or the judge that the runs had\n"
        "  python analyze.py hacking"
    )


if __name__ == "__main__":
    main()
