"""How often the base model is right, and readable, on every candidate: rollouts with training's sampler and reward.

    torchrun --nproc_per_node 8 -m data.pool.measure

Candidates come in a fixed random order, and each is finished before the next: whenever this is stopped, what is there
is a fair sample that the filter can read. Called again, with any number of processes, it goes on with the others.
"""

import hashlib
import json
import os
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import common  # isort: skip  # first: it says in a sentence which package is missing
from tqdm import tqdm

import grpo
from data import convert


@dataclass
class Args(grpo.Args):  # rollouts are those of training: its defaults, its flags
    name: str = "candidates"
    pool: str = "data/mathv360k/rows.jsonl"
    eval: str = ""
    steps: int = 0
    runs: str = "data/pool"
    rollouts: str = "16,16,32,64"  # rounds: a candidate goes on while it is readable and not right too often
    readable: float = 0.75  # share of its rollouts in which an answer can be read
    right: float = 0.0  # share of its rollouts that are right, at most
    limit: int = 0  # candidates, 0 for all
    batch: int = 512  # answers at a time on one process


SAME = "model pool instruction temperature max_new_tokens max_pixels rollouts readable right seed".split()


def start(args, same=SAME):
    """The run's folder, as `common.start` makes it, for any number of processes; refuses to mix settings."""
    config = Path(args.runs) / f"{args.name}-s{args.seed}" / "config.json"
    if any(path.stat().st_size for path in config.parent.glob("*.jsonl")):  # else nothing can be mixed
        if not config.exists():
            raise SystemExit(f"{config} is missing beside rollouts, which it has the settings of: put it back.")
        was = json.loads(config.read_text())["args"]
        for k in same:
            if was.get(k) != vars(args)[k]:
                raise SystemExit(f"{config.parent} was made with {common.flag(k)} {was.get(k)!r} and can't go on with "
                                 f"{vars(args)[k]!r}: use the same flags, or another --name.")  # fmt: skip
    run = common.start(replace(args, problems=int(os.environ.get("WORLD_SIZE", 1)), minibatches=1))
    convert.drop_torn_line(run.dir / f"rollouts-{run.rank}.jsonl")
    return run


def load(args, run):
    """-> the base model as a sampler in training's precision, and its processor."""
    processor = common.Processor(args.model, args)
    return common.load_frozen(args.model, processor, run), processor


def fingerprint(row):
    """What a measurement is of: the question, its options, gold and image, and the solution that hints are cut from."""
    what = [row.get(k) for k in ("question", "choices", "answer", "image_sha", "solution")]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def read_measured(folder):
    """Lines of all processes so far: {id, row: its fingerprint, profile, ...}."""
    for path in sorted(Path(folder).glob("rollouts-*.jsonl")):
        yield from convert.read_whole_lines(path)


def roll(policy, processor, rows, group, args, run, hints=None):
    """`group` answers to each row, begun with its hint if hints are given -> for each row a list of [grade, text].

    An answer that the token limit cut off is "unparsed" to the reward; here it is "cut".
    """
    problems = [row for row in rows for _ in range(group)]
    prefix = [processor.tokenize(hint) for hint in hints for _ in range(group)] if hints else None
    batch = common.sample(policy, processor, problems, replace(args, group=group), run, prefix)
    grades = common.reward(batch, problems)[1]
    answers = [[g if done else "cut", text] for g, text, done in zip(grades, batch.text, batch.finished, strict=True)]
    return batched(answers, group)


def profile_of(answers):
    """Counts of a row's rollouts: n, correct, formatted (an answer could be read), truncated (cut by the limit)."""
    grades = [grade for grade, _ in answers]
    return dict(n=len(grades), correct=grades.count("right"), formatted=grades.count("right") + grades.count("wrong"),
                truncated=grades.count("cut"))  # fmt: skip


def batched(items, n):
    return [items[i : i + n] for i in range(0, len(items), n)]


def goes_on(profile, args):
    n, correct, formatted = profile["n"], profile["correct"], profile["formatted"]
    return correct <= args.right * n and formatted >= args.readable * n


def main(args):
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.rollouts):
        raise SystemExit(f"--rollouts {args.rollouts} has to be the sizes of rounds, such as 16,16,32,64.")
    rows, run = common.load_pool(args.pool, decode=False), start(args)
    random.Random(args.seed).shuffle(rows)
    rows = rows[: args.limit or len(rows)]
    done = {(x["id"], x["row"]) for x in read_measured(run.dir)}
    common.dist.barrier()  # all have read before the first writes
    left = [row for row in rows if (row["id"], fingerprint(row)) not in done]
    mine, rounds = left[run.rank :: run.world], [int(x) for x in args.rollouts.split(",")]
    policy, processor = load(args, run)
    bar = tqdm(desc=f"{run.dir}", total=len(rows), initial=len(rows) - len(left), unit="row", disable=run.rank > 0)
    right = read = rollouts = never = count = 0
    for part in batched(mine, max(1, args.batch // rounds[0])):
        answers, live = {row["id"]: [] for row in part}, part
        for i, group in enumerate(rounds):
            for some in batched(live, max(1, args.batch // group)):
                run.begin("measure", some[0]["id"], i)
                for row, new in zip(some, roll(policy, processor, some, group, args, run), strict=True):
                    answers[row["id"]] += new
            live = [row for row in live if goes_on(profile_of(answers[row["id"]]), args)]
        lines = [dict(id=row["id"], row=fingerprint(row), profile=profile_of(answers[row["id"]]),
                      answers=answers[row["id"]]) for row in part]  # fmt: skip
        common.append_jsonl(run.dir / f"rollouts-{run.rank}.jsonl", *lines)
        for p in (line["profile"] for line in lines):
            right, read, rollouts = right + p["correct"], read + p["formatted"], rollouts + p["n"]
        never, count = never + len(live), count + len(part)
        bar.update(min(len(part) * run.world, bar.total - bar.n))  # the others are about as far
        bar.set_postfix_str(f"{right / rollouts:.1%} of rollouts right, {read / rollouts:.0%} readable, "
                            f"{never / count:.0%} of rows readable and hard so far")  # fmt: skip
    bar.close()
    common.dist.barrier()  # all have written before one counts
    if run.rank == 0:
        found = len({x["id"] for x in read_measured(run.dir)} & {row["id"] for row in rows})
        print(f"{run.dir}: {found} of {len(rows)} rows are measured. Next: python -m data.pool.filter", flush=True)


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
