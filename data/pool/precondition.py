"""Whether a pool is what the paper's is, before a GPU-hour goes into training: GRPO will stall on it, hints unlock it.

    torchrun --nproc_per_node 8 -m data.pool.precondition

Fresh rollouts, for those that selected the rows are wrong by selection. Each row is answered without a hint and with a
quarter, a half and three quarters of its solution shown. The figures go to <pool>.precondition.json, beside the pool,
where `analyze.py sparsity` finds them. Resumable.
"""

import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch.distributed as dist
from tqdm import tqdm

import grpo
from data.gates import gate, report
from data.pool import measure


@dataclass
class Args(grpo.Args):
    name: str = "precondition"
    pool: str = "data/pool/train.jsonl"
    eval: str = ""
    steps: int = 0
    runs: str = "data/pool"
    shown: str = "0,0.25,0.5,0.75"  # shares of a solution
    rollouts: int = 8  # to a row and share, at least a group
    limit: int = 1024  # rows, drawn at random; 0 for all
    batch: int = 512  # answers at a time on one process


SAME = [k for k in measure.SAME if k not in ("readable", "right")]
STALLS, READABLE, SOLVED = 0.75, 0.75, 0.9  # the least share of all-wrong groups, readable answers, solved rows


def hint_of(row, share):
    """The first sentences of a row's solution that make up `share` of it, less what gives the answer away -> text.

    Where two numbers of steps are as near, it is the one nearer to a half: a quarter of two steps is not none of them,
    three quarters are not all.
    """
    parts = common.segments(row, most=10**6)
    steps = share * (len(parts) - 1)
    return "".join(parts[: math.floor(steps + 0.5) if share <= 0.5 else math.ceil(steps - 0.5)]) if parts else ""


def all_wrong(profile, group):
    """The chance that `group` of a row's n rollouts, drawn without replacement, are all wrong."""
    n, wrong = profile["n"], profile["n"] - profile["correct"]
    return math.comb(wrong, group) / math.comb(n, group)


def figures(lines, group):
    """Measured lines (one a row and share) -> {share: {rows, hinted, tokens, right, error, all_wrong, floor, ...}}.

    `hinted` is the share of rows whose hint has any token, `tokens` the mean share of a solution's tokens in its hint:
    steps are whole, and what gives the answer away is left out, so that neither need be the share that was asked for.
    Bounds of all_wrong = E[(1-p)^G] for independent rollouts, whatever the spread of p over rows: at least
    (1 - E[p])^G by Jensen, at most 1 - E[p]. Errors are standard errors over rows. `right_without` is of the same rows
    without a hint (only rows with a solution get one), `gain` the mean of the differences, row by row.
    """
    rate = lambda x: x["profile"]["correct"] / x["profile"]["n"]
    found, without = {}, {x["id"]: rate(x) for x in lines if x["shown"] == 0}
    for share in sorted({x["shown"] for x in lines}):
        some = [x for x in lines if x["shown"] == share]
        mean = lambda f, some=some: sum(map(f, some)) / len(some)
        gain = lambda x: rate(x) - without[x["id"]]
        p, lift = mean(rate), mean(gain)
        dead = mean(lambda x: all_wrong(x["profile"], group))
        error = lambda f, m: math.sqrt(mean(lambda x: (f(x) - m) ** 2) / len(some))  # noqa: B023
        found[str(share)] = dict(
            rows=len(some), rollouts=sum(x["profile"]["n"] for x in some), hinted=mean(lambda x: x["hint"] > 0),
            tokens=mean(lambda x: x["hint"] / max(1, x["of"])),
            right=p, right_error=error(rate, p), right_without=p - lift, gain=lift, gain_error=error(gain, lift),
            all_wrong=dead, all_wrong_error=error(lambda x: all_wrong(x["profile"], group), dead),
            floor=(1 - p) ** group, ceiling=1 - p,
            readable=mean(lambda x: x["profile"]["formatted"] / x["profile"]["n"]),
            truncated=mean(lambda x: x["profile"]["truncated"] / x["profile"]["n"]),
        )  # fmt: skip
    return found


def gates(found, solved, group):
    """The figures against what the paper's experiment needs -> list of gates."""
    base = found["0.0"]
    noise = 3 * base["all_wrong_error"] + 1e-9
    within = base["floor"] - noise <= base["all_wrong"] <= base["ceiling"] + noise
    rows = [
        gate("GRPO will stall", base["all_wrong"] >= STALLS, base["all_wrong"],
             f"{base['right']:.1%} of fresh rollouts right (paper: 3.6%), {base['all_wrong']:.1%} of groups of "
             f"{group} all wrong (paper: 85-97%), at least {STALLS:.0%} wanted"),
        gate("consistent", within, base["floor"],
             f"all-wrong share between (1 - p)^{group} = {base['floor']:.1%} and 1 - p = {base['ceiling']:.1%}, "
             f"up to {noise:.1%} of noise"),
        gate("readable", base["readable"] >= READABLE, base["readable"],
             f"{base['readable']:.0%} of answers can be read, {base['truncated']:.0%} are cut by the limit; "
             f"below {READABLE:.0%} failures are of format, not of mathematics"),
        gate("solutions", solved >= SOLVED, solved,
             f"{solved:.0%} of the pool's rows have a solution that can be shown in part, at least "
             f"{SOLVED:.0%} wanted: python -m data.pool.solutions"),
    ]  # fmt: skip
    if half := found.get("0.5"):
        shown = ", ".join(f"{float(k):.0%} {x['right']:.1%}" for k, x in found.items() if k != "0.0")
        sure = half["gain"] > 2 * half["gain_error"] and half["right"] >= 2 * half["right_without"]
        rows.append(gate("hints unlock", sure, half["right"],
                    f"right by share of solution shown: {shown}; with none {half['right_without']:.1%} on the same "
                    f"{half['rows']} rows, {base['right']:.1%} on all {base['rows']}; half adds {half['gain']:.1%} +- "
                    f"{2 * half['gain_error']:.1%} (paper: half, 7.2 to 34.4%)"))  # fmt: skip
    return rows


def main(args):
    if args.rollouts < args.group:
        raise SystemExit(f"--rollouts {args.rollouts}: it takes a group of {args.group} at least.")
    given = args.shown.split(",")
    if not all(re.fullmatch(r"0|1|0?\.\d+", x) for x in given) or 0 not in (shares := dict.fromkeys(map(float, given))):
        raise SystemExit(f"--shown {args.shown} has to be shares of a solution, such as 0,0.25,0.5,0.75, with 0 among "
                         "them, the rollouts without a hint.")  # fmt: skip
    path = Path(args.pool)
    rows, run = common.load_pool(path), measure.start(args, SAME)
    able = {row["id"]: any(common.segments(row)) for row in rows}
    solved, sources = sum(able.values()) / len(rows), Counter(row.get("solution_source") or "none" for row in rows)
    rows = random.Random(args.seed).sample(rows, min(args.limit or len(rows), len(rows)))
    jobs = [(row, share) for share in shares for row in rows if share == 0 or able[row["id"]]]
    wanted = {(row["id"], measure.fingerprint(row), share) for row, share in jobs}
    done = {(x["id"], x["row"], x["shown"]) for x in measure.read_measured(run.dir)}
    dist.barrier()  # all have read before the first writes
    mine = [(row, s) for row, s in jobs if (row["id"], measure.fingerprint(row), s) not in done][run.rank :: run.world]
    policy, processor = measure.load(args, run)
    bar = tqdm(desc=f"{run.dir}", total=len(mine) * args.rollouts, unit="answer", disable=run.rank > 0)
    for part in measure.batched(mine, max(1, args.batch // args.rollouts)):
        run.begin("precondition", part[0][0]["id"], part[0][1])
        some, hints = [row for row, _ in part], [hint_of(row, share) for row, share in part]
        for (row, share), hint, answers in zip(
            part, hints, measure.roll(policy, processor, some, args.rollouts, args, run, hints), strict=True
        ):
            line = dict(id=row["id"], row=measure.fingerprint(row), shown=share, hint=len(processor.tokenize(hint)),
                        profile=measure.profile_of(answers), answers=answers)  # fmt: skip
            common.append_jsonl(run.dir / f"rollouts-{run.rank}.jsonl", line)
        bar.update(len(part) * args.rollouts)
    bar.close()
    dist.barrier()
    box = [None]
    if run.rank == 0:
        steps = {row["id"]: "".join((row.get("solution") or [])[:-1]) for row in rows}  # the last one holds the answer
        lines = {(x["id"], x["row"], x["shown"]): x for x in measure.read_measured(run.dir)}
        lines = [x | dict(of=len(processor.tokenize(steps[k[0]]))) for k, x in lines.items() if k in wanted]
        found = figures(lines, args.group)
        box = [gates(found, solved, args.group)]
        config = json.loads((run.dir / "config.json").read_text())
        facts = dict(pool=args.pool, sha256=config["sha256"][args.pool], model=args.model, group=args.group,
                     temperature=args.temperature, device=common.device_name(), torch=config["torch"], solved=solved,
                     solutions=sources, shown=found)  # fmt: skip
        common.write_text(path.with_suffix(".precondition.json"), json.dumps(facts, indent=1) + "\n")
        print(f"{path.with_suffix('.precondition.json')} is written.")
    dist.broadcast_object_list(box)
    report(box[0], args, run)
    if run.rank == 0:
        print(f"Next: python analyze.py sparsity --runs {args.runs}, and train.")


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
