"""Copies of the shipped world with one thing changed: would a claim that fails in it hold in them?

python -m data.toy.changed notail     the pool without its tail: only what the base got wrong in 256 of 256 rollouts
python -m data.toy.changed kin        a teacher whose bad habits are all its student's, too (a GPU, minutes); so it is
                                      also worse on the pool, which was selected for the student's

Each is a world in a folder of that name, for `--toy data/toy/notail` or `make replicate WORLDS=notail ARMS=grpo`.
"""

import argparse

import common  # isort: skip  # first: it says in a sentence which package is missing
from data.toy import prepare, world


def link(path, target):
    if not path.is_symlink():
        path.symlink_to(target)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("change", choices=("notail", "kin"))
    change = parser.parse_args(argv).change
    prepare.check_files()
    prepare.draw_missing()
    folder = prepare.HERE / change
    folder.mkdir(exist_ok=True)
    for name in ("student", "images", "cross.jsonl", "sparse.jsonl", "old.jsonl", "easy.jsonl", "worn.jsonl"):
        link(folder / name, f"../{name}")
    rows = common.read_jsonl(prepare.HERE / "train.jsonl")
    if change == "notail":
        link(folder / "teacher", "../teacher")
        rows = [row for row in rows if row["profile"]["correct"] == 0]
        told = f"The shipped world with {len(rows)} problems to train on: those that the base was never right in."
    else:
        world.KIN = True
        if not (folder / "teacher/model.safetensors").exists():
            prepare.build_models(folder, ["teacher"])
        seen = [row | {"image": str(prepare.HERE / row["image"])} for row in rows]
        with prepare.sampler() as ask:
            answers = ask(f"{change}/teacher", seen, "replay")
        tokenizer, right = prepare.make_tokenizer(), sum(grade == "right" for [(_, grade)] in answers)
        for row, [(text, _)] in zip(rows, answers, strict=True):
            row["teacher"] = tokenizer(text).input_ids
        told = f"The shipped world with another teacher: {right / len(rows):.1%} of its answers to the pool are right."
    common.write_text(folder / "readme.md", f"{told}\n")
    common.write_text(folder / "train.jsonl", common.jsonl(rows))  # last: it says that all is there
    print(f"{told}\n{folder} is made. Next: make replicate WORLDS={change} ARMS=... SEEDS=...")


if __name__ == "__main__":
    main()
