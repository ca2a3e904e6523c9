"""Candidates and their rollouts -> train.jsonl, sparse.jsonl and old.jsonl: what the base gets wrong though readable.

    python -m data.pool.filter

The trap is a filter that selects format failures instead of hard problems: to the reward, an answer that can't be read
is as wrong as a wrong one. So a row has to be readable *and* wrong, by more rollouts than a training group has, for
rows that are all wrong by few of them come back to the mean on fresh ones. A small tail of rows that are sometimes
right keeps the pool's success from being zero.

old    what the source is like in general: any row, hard or not, a share of it with four options; one row an image
sparse the hardest of the same domain: never right in any rollout
train  the other hard rows and the tail. No two of the three share an image.
"""

import json
import os
import random
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import common  # isort: skip  # first: it says in a sentence which package is missing
import numpy as np
from tqdm import tqdm

from data.pool import measure
from data.rows import ROW
from judge import read_jsonl


@dataclass
class Args:
    rows: str = "data/mathv360k/rows.jsonl"
    measured: str = "data/pool/candidates-s0"
    out: str = "data/pool"
    seed: int = 0
    group: int = 8  # of training
    least: int = 64  # rollouts of a hard row
    readable: float = 0.75  # share of its rollouts in which an answer can be read
    right: float = 0.0  # share of its rollouts that are right, at most
    tail_low: float = 0.4  # a row of the tail is right in at least this share
    tail_high: float = 0.6  # and at most this
    tail_share: float = 0.05  # of train
    train: int = 20830  # rows, or as many as there are
    sparse: int = 800
    old: int = 319
    old_choice: float = 0.69  # share of old with four options
    near: int = 4  # signs of 64 in which the hashes of two like pictures differ at most


FIELDS = (*ROW, "image_sha", "image_dhash")


def read_profiles(folder):
    """{id: (fingerprint, profile)} of all rows measured so far."""
    if not Path(folder).is_dir():
        raise SystemExit(f"{folder} does not exist: run `torchrun --nproc_per_node 8 -m data.pool.measure` first.")
    lines, fields = tqdm(measure.read_measured(folder), f"{folder}", unit="row"), {"id", "row", "profile", "answers"}
    if not (found := {(x["id"], x["row"]): x["profile"] for x in lines if x.keys() == fields}):
        raise SystemExit(f"{folder} holds no rollouts of data.pool.measure: name its folder with --measured.")
    return found


def judge_row(profile, args):
    """What a measured row is: "unreadable", "right too often", "few rollouts", "tail" or "hard"."""
    n, right = profile["n"], profile["correct"] / profile["n"]
    if profile["formatted"] < args.readable * n:
        return "unreadable"
    if right > args.right:
        return "tail" if args.tail_low <= right <= args.tail_high else "right too often"
    return "hard" if n >= args.least else "few rollouts"


def draw_old(rows, args, draw):
    """One row an image, `old_choice` of them with four options -> list of rows."""
    wanted = dict(choice=round(args.old * args.old_choice))
    wanted["free"] = args.old - wanted["choice"]
    taken, images = [], set()
    for row in draw.sample(rows, len(rows)):
        fits = row["kind"] == "free" or len(row["choices"]) == 4
        if fits and wanted[row["kind"]] and row["image_sha"] not in images:
            taken.append(row)
            images.add(row["image_sha"])
            wanted[row["kind"]] -= 1
    if any(wanted.values()):
        raise SystemExit(f"old needs {wanted['choice']} more rows with four options and {wanted['free']} more free "
                         "ones, each on an image of its own: lower --old or change --old-choice.")  # fmt: skip
    return taken


def draw_images(rows, count, draw):
    """Rows image by image until there are `count` -> list of rows, the last image's cut."""
    by_image = defaultdict(list)
    for row in rows:
        by_image[row["image_sha"]].append(row)
    order = draw.sample(sorted(by_image), len(by_image))
    return [row for image in order for row in by_image[image]][:count]


def near_duplicates(a, b, args):
    """Pairs of two sets that may be one problem -> list of {a, b, distance, same_question}.

    Their pictures look alike (hashes differ in at most `near` signs) and their questions are equal but for numbers.
    """
    hashes = [np.array([int(row["image_dhash"], 16) for row in rows], np.uint64) for rows in (a, b)]
    plain = lambda row: re.sub(r"[\d.,]+", "0", " ".join([row["question"], *row["choices"]]).lower())
    texts, found = [[plain(row) for row in rows] for rows in (a, b)], []
    for j, signs in enumerate(hashes[1]):
        distance = np.bitwise_count(hashes[0] ^ signs)
        for i in np.flatnonzero(distance <= args.near):
            if texts[0][i] == texts[1][j]:
                same = a[i]["question"] == b[j]["question"] and a[i]["choices"] == b[j]["choices"]
                found.append(dict(a=a[i]["id"], b=b[j]["id"], distance=int(distance[i]), same_question=same))
    return found


def describe(name, rows):
    """A line of the table that compares filters; shares of rollouts are means over rows."""
    profiles = [row["profile"] for row in rows if row["profile"]]
    share = lambda k: f"{sum(x[k] / x['n'] for x in profiles) / max(1, len(profiles)):.1%}"
    unread = sum(x["formatted"] < 0.5 * x["n"] for x in profiles)
    choice = sum(row["kind"] == "choice" for row in rows) / max(1, len(rows))
    return (f"| {name} | {len(rows)} | {unread} | {share('correct')} | {share('formatted')} | {share('truncated')} | "
            f"{choice:.0%} |")  # fmt: skip


def read_rows(args):
    """Rows with their profiles -> (all rows, {what `judge_row` calls them or "not measured": rows})."""
    everything, kinds, profiles = [], defaultdict(list), read_profiles(args.measured)
    for number, row in enumerate(tqdm(read_jsonl(args.rows), args.rows, unit="row"), 1):
        if missing := [k for k in FIELDS if not isinstance(row, dict) or k not in row]:
            raise SystemExit(f"{args.rows}, line {number} has no field {missing[0]}: name rows that "
                             "data.mathv360k.prepare wrote with --rows.")  # fmt: skip
        row["profile"] = profiles.get((row["id"], measure.fingerprint(row)))  # none of what the row was before
        everything.append(row)
        kinds[judge_row(row["profile"], args) if row["profile"] else "not measured"].append(row)
    if len(kinds["not measured"]) == len(everything):
        raise SystemExit(f"None of the {len(everything)} rows of {args.rows} is among the {len(profiles)} measured in "
                         f"{args.measured}: both have to be of one pool, or measure again.")  # fmt: skip
    return everything, kinds


def make_sets(everything, kinds, args):
    """-> {train, sparse, old: rows}, and what each rule removed from all rows on the way to train, in order."""
    draw = random.Random(args.seed)

    def apart(rows, others):
        images = {row["image_sha"] for row in others}
        return [row for row in rows if row["image_sha"] not in images]

    old = draw_old(everything, args, draw)
    hard = apart(kinds["hard"], old)
    never = [row for row in hard if row["profile"]["correct"] == 0]
    removed = {
        "not measured": len(kinds["not measured"]),
        f"an answer can be read in less than {args.readable:.0%} of its rollouts": len(kinds["unreadable"]),
        f"right in more than {args.right:.0%} of them, and not of the tail": len(kinds["right too often"]),
        f"fewer than {args.least} rollouts": len(kinds["few rollouts"]),
        f"tail ({args.tail_low:.0%} to {args.tail_high:.0%} right), counted below": len(kinds["tail"]),
        "its image is in old": len(kinds["hard"]) - len(hard),
    }
    if len(never) <= args.sparse:
        print_rules(everything, removed)
        few = sum(row["profile"]["correct"] == 0 for row in kinds["few rollouts"])
        raise SystemExit(f"{len(never)} rows are readable and never right in {args.least} rollouts, and sparse alone "
                         f"takes {args.sparse}; {few} more are never right in fewer: measure more candidates, or lower "
                         f"--sparse{' or --least' * (few > 0)}.")  # fmt: skip
    sparse = draw_images(never, args.sparse, draw)
    left, tail = apart(hard, sparse), apart(kinds["tail"], old + sparse)
    base = draw.sample(left, min(len(left), round(args.train * (1 - args.tail_share))))
    wanted = round(len(base) * args.tail_share / (1 - args.tail_share))
    tail = draw.sample(tail, min(len(tail), wanted))
    if len(tail) < wanted:
        print(f"The tail is {len(tail)} rows, not {wanted}: measure more candidates, or widen --tail-low, --tail-high.")
    if len(base) + len(tail) < args.train:
        print(f"train has {len(base) + len(tail)} rows, not {args.train}: measure more candidates for more.")
    removed |= {
        "in sparse": len(sparse),
        "its image is in sparse": len(hard) - len(sparse) - len(left),
        f"more than train takes ({args.train})": len(left) - len(base),
        "plus the tail": -len(tail),
    }
    return dict(train=draw.sample(base + tail, len(base + tail)), sparse=sparse, old=old), removed


def print_rules(everything, removed):
    """What each rule removed."""
    left = len(everything)
    print(f"\n| rule | rows removed | left |\n| --- | --- | --- |\n| all rows | | {left} |")
    for rule, count in removed.items():
        left -= count
        print(f"| {rule} | {count} | {left} |")


def print_filters(everything, train, args):
    """This pool beside that of a filter that sees the reward alone."""
    profiled = [row for row in everything if row["profile"]]
    blind = [row for row in profiled if row["profile"]["correct"] <= args.right * row["profile"]["n"]]
    lost = [row for row in blind if judge_row(row["profile"], args) == "unreadable"]
    print("\n| filter | rows | of them mostly unreadable | rollouts right | readable | cut by the limit | choice |\n"
          "| --- | --- | --- | --- | --- | --- | --- |\n"
          + "\n".join([describe("wrong and readable (train)", train),
                       describe("by reward alone: wrong or unreadable", blind),
                       describe("what reward alone would have let in", lost)])
          + "\n\nA row counts by its own selecting rollouts here, so its success is low by selection: "
          "data.pool.precondition measures it afresh.\n")  # fmt: skip


def report_near(sets, args):
    """Near-duplicates between the sets -> near_duplicates.json, and a line for each pair of sets."""
    found = {}
    for a, b in (("train", "sparse"), ("train", "old"), ("sparse", "old")):
        near = found[f"{a} and {b}"] = near_duplicates(sets[a], sets[b], args)
        shared = {x["image_sha"] for x in sets[a]} & {x["image_sha"] for x in sets[b]}
        print(f"{a} and {b}: {len(shared)} images shared, {len(near)} near-duplicates (like pictures, questions equal "
              f"but for numbers), {sum(x['same_question'] for x in near)} of them with equal questions.")  # fmt: skip
    common.write_text(Path(args.out) / "near_duplicates.json", json.dumps(found, indent=1) + "\n")


def main(args):
    if args.least <= args.group:
        raise SystemExit(f"--least {args.least}: rows that are all wrong in a few rollouts come back to the mean on "
                         f"fresh ones, so select by more than the {args.group} of a training group.")  # fmt: skip
    if not Path(args.rows).exists() or not Path(args.rows).stat().st_size:
        raise SystemExit(f"{args.rows} does not exist or is empty: run `python -m data.mathv360k.prepare --source DIR` "
                         "first.")  # fmt: skip
    out = Path(args.out)
    train = out / "train.jsonl"
    if train.exists() and any(x.get("solution") or x.get("teacher") for x in read_jsonl(train)):
        raise SystemExit(f"{train} holds solutions or teacher answers: remove it to filter again (data.pool.solutions "
                         "puts back those that it has on file), or name another --out.")  # fmt: skip
    everything, kinds = read_rows(args)
    sets, removed = make_sets(everything, kinds, args)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        place = lambda row: os.path.relpath(Path(args.rows).parent / row["image"], out)
        lines = [row | dict(split=name, image=place(row), teacher=None) for row in rows]
        common.write_text(out / f"{name}.jsonl", common.jsonl(lines))
    print_rules(everything, removed)
    print_filters(everything, sets["train"], args)
    report_near(sets, args)
    print(f"{', '.join(f'{name} {len(rows)}' for name, rows in sets.items())} rows in {out}, and near_duplicates.json. "
          "Next: torchrun --nproc_per_node 8 -m data.pool.solutions")  # fmt: skip


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
