"""Copies of the shipped world with one thing changed: would a claim that fails in it hold in them?

python -m data.toy.changed notail     the pool without its tail: only what the base got wrong in 256 of 256 rollouts
python -m data.toy.changed rich       a pool of which a third is tail, so that a critic has more right answers to learn
                                      from (minutes); so it is also larger, and the new rows are selected by 32
                                      rollouts, not by 256
python -m data.toy.changed kin        a teacher whose bad habits are all its student's, too (a GPU, minutes); so it is
                                      also worse on the pool, which was selected for the student's

Each is a world in a folder of that name, for `--toy data/toy/notail` or `make replicate WORLDS=notail ARMS=grpo`.
"""

import argparse
import random
import tempfile

import common  # isort: skip  # first: it says in a sentence which package is missing
from data.toy import prepare, world

RICH_SHARE, BATCH = 1 / 3, 500  # tail items, of the pool of `rich`; candidates at a time


def link(path, target):
    if not path.is_symlink():
        path.symlink_to(target)


def draw_tail(ask, count, seen):
    """`count` new rows of the tail, by the rule of the shipped ones after its first two rounds; none is in `seen`."""
    rng, tail = random.Random(f"{world.SEED}/rich"), []
    with tempfile.TemporaryDirectory() as scratch:
        while len(tail) < count:
            rows = world.make_problems(world.POOL, BATCH, rng, seen)
            for i, row in enumerate(rows):
                row["image"] = f"{scratch}/{len(seen)}-{i}.png"
                row["profile"] = {"n": 0, "correct": 0, "formatted": 0}
            for i, group in enumerate(world.ROUNDS[:2]):
                rows = prepare.filtered(ask, rows, f"rich {len(seen)}-{i}", group)
            tail += rows
            print(f"{len(tail)} problems of the tail found, {count} are wanted")
    return tail[:count]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("change", choices=("notail", "rich", "kin"))
    change = parser.parse_args(argv).change
    prepare.check_files()
    prepare.draw_missing()
    folder = prepare.HERE / change
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").unlink(missing_ok=True)  # it says that all is there
    for name in ("student", "images", "cross.jsonl", "sparse.jsonl", "old.jsonl", "easy.jsonl", "worn.jsonl"):
        link(folder / name, f"../{name}")
    if change != "kin":
        link(folder / "teacher", "../teacher")
    rows = common.read_jsonl(prepare.HERE / "train.jsonl")
    never, new = [row for row in rows if row["profile"]["correct"] == 0], []  # new: the teacher has to answer them
    if change == "notail":
        rows = never
        told = f"The shipped world with {len(rows)} problems to train on: those that the base was never right in."
    elif change == "rich":
        known = [row for name in world.NAMES for row in common.read_jsonl(prepare.HERE / f"{name}.jsonl")]
        count = round(len(never) * RICH_SHARE / (1 - RICH_SHARE)) - (len(rows) - len(never))
        with prepare.sampler() as ask:
            tail = draw_tail(ask, count, {str(row["draw"]) for row in known})
        for i, row in enumerate(tail):
            row |= {"image": f"drawn/rich-{i:04d}.png", "solution_source": "generator"}
            world.draw_row(row, folder)
            fields = {key: row.get(key) for key in prepare.FIELDS}
            new.append({"id": f"rich-{i:04d}", "source": "toy", "split": "train"} | fields)
        rows += new
        told = f"The shipped world with {count} more problems of the tail to train on, {len(rows)} in all."
    else:
        world.KIN, new = True, rows
        if not (folder / "teacher/model.safetensors").exists():
            prepare.build_models(folder, ["teacher"])
        told = "The shipped world with another teacher."
    if new:
        seen = [row | {"image": str(folder / row["image"])} for row in new]
        with prepare.sampler() as ask:
            answers = ask(f"{change}/teacher", seen, "replay")
        tokenizer, right = prepare.make_tokenizer(), sum(grade == "right" for [(_, grade)] in answers)
        for row, [(text, _)] in zip(new, answers, strict=True):
            row["teacher"] = tokenizer(text).input_ids
        told += f" Of its teacher's answers to these {len(new)}, {right / len(new):.1%} are right."
    common.write_text(folder / "readme.md", f"{told}\n")
    common.write_text(folder / "train.jsonl", common.jsonl(rows))
    print(f"{told}\n{folder} is made. Next: make replicate WORLDS={change} ARMS=... SEEDS=...")


if __name__ == "__main__":
    main()
