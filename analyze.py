"""analyze.py: tables from run folders. Nothing is typed in by hand but the paper's own numbers, in their own columns.

python analyze.py                     every table
python analyze.py sparsity gates      some: sparsity (how dead the groups are), gates (what was checked before
                                      training), main (accuracy by verdict on every evaluation set; judge first)
"""

import argparse
import json
import math
from pathlib import Path

from judge import VERDICTS, read_answers, read_jsonl, read_verdicts

# The paper's DynaMath accuracy is known as two ranges (abstract and introduction, arXiv 2608.21811). Which arm is in
# which is our reading of its finding 1. The order is that of the tables.
SIX, FIVE = "30.6-32.9", "27.0-29.1"
PAPER_DYNAMATH = {
    "base": "",
    "grpo": FIVE,
    "hintonly": SIX,
    "uft001": SIX,
    "uft002": SIX,
    "opd": FIVE,
    "opd-annealed": SIX,
    "opd-gated": FIVE,
    "reopd": FIVE,
    "vapo": FIVE,
    "vapohl": SIX,
    "stack": SIX,
}
PAPER_START = {"base": ("3.6", ""), "grpo": ("3.6", "85-97")}  # its pool: base rollouts right, groups all wrong, in %
WINDOW = 10  # steps at either end of a run that count as its start and its end


# --- runs and statistics ----------------------------------------------------------------------------------------------


def load(runs):
    """Every run folder below `runs`, in the paper's order of arms, then by seed: a list of {name, dir, arm, seed, args,
    metrics: one dict a step ([] for the base), gates: list}."""
    loaded = []
    for config in sorted(runs.glob("*/config.json")):
        folder, args = config.parent, json.loads(config.read_text()).get("args")
        if args is None:
            raise SystemExit(f"{config} is not of a run (it has no args): move that folder out of {runs}.")
        metrics, gates = folder / "metrics.jsonl", folder / "gates.json"
        loaded.append(
            {
                "name": folder.name,
                "dir": folder,
                "arm": args["name"],
                "seed": args["seed"],
                "args": args,
                "metrics": read_jsonl(metrics) if metrics.exists() else [],
                "gates": json.loads(gates.read_text())["gates"] if gates.exists() else [],
            }
        )
    if not loaded:
        raise SystemExit(f"{runs} holds no run folder: train an arm first, or name another folder with --runs.")
    order = list(PAPER_DYNAMATH)
    place = lambda run: order.index(run["arm"]) if run["arm"] in order else len(order)
    return sorted(loaded, key=lambda run: (place(run), run["arm"], run["seed"]))


def by_set(answers, value):
    """One run's answers as {set: {row id: value(answer)}}."""
    sets = {}
    for answer in answers:
        sets.setdefault(answer["set"], {})[answer["id"]] = value(answer)
    return sets


def judged(runs, path):
    """Verdicts joined with the runs: (judge, {run name: {set: {row id: bool}}}). Stops with a sentence where a verdict
    is missing, or where two runs answered different questions under one set's name."""
    judge, verdicts = read_verdicts(path)
    answers = {run["name"]: read_answers(run["dir"]) for run in runs}
    asked = {}
    for name, items in answers.items():
        for set_name, questions in by_set(items, lambda a: (a["question"], a["reference"])).items():
            first, theirs = asked.setdefault(set_name, (name, questions))
            if questions != theirs:
                raise SystemExit(
                    f"{first} and {name} answered different questions under the name {set_name}, and a table compares "
                    "runs on equal sets only: move one of them to a folder of its own and name that with --runs."
                )
    missing = {name: sum(item["key"] not in verdicts for item in items) for name, items in answers.items()}
    if any(missing.values()):
        counts = ", ".join(f"{name} {count} of {len(answers[name])}" for name, count in missing.items() if count)
        option = "" if path == VERDICTS else f" --verdicts {path}"
        raise SystemExit(f"verdicts are missing ({counts}): run `python judge.py {runs[0]['dir'].parent}/*{option}`.")
    return judge, {name: by_set(items, lambda a: verdicts[a["key"]]) for name, items in answers.items()}


def mean(values):
    """Mean of some numbers, None where there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None


def column(rows, field):
    return [row[field] for row in rows if field in row]


def wilson(k, n):
    """95 % interval of k right out of n >= 1 (Wilson 1927): (low, high) as shares."""
    z = 1.959964
    centre, half = k + z * z / 2, z * math.sqrt(k * (n - k) / n + z * z / 4)
    return (centre - half) / (n + z * z), (centre + half) / (n + z * z)


def mcnemar(b, c):
    """Exact two-sided McNemar test on the b and c discordant pairs:
    p = min(1, 2 sum_{k <= min(b,c)} C(n,k) / 2^n), n = b + c; 1 where n = 0."""
    n = b + c
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(b, c) + 1)) / 2**n)


def all_wrong_floor(rows, group, problems):
    """Share of groups all wrong against the least that independent rollouts allow, (1 - reward)^G: by Jensen
    E[(1 - p)^G] >= (1 - E[p])^G, however p varies over problems. -> (all_wrong, floor, slack)

    slack is 3 standard errors of all_wrong - floor where every problem has the same p (delta method; the variance of a
    group is floor * P(two or more right)), plus the rounding of the log.
    """
    all_wrong, p = mean(column(rows, "all_wrong")), mean(column(rows, "reward"))
    floor = (1 - p) ** group
    two = max(0.0, 1 - floor - group * p * (1 - p) ** (group - 1))
    return all_wrong, floor, 3 * math.sqrt(floor * two / (problems * len(rows))) + 1e-6


# --- tables: each (runs, verdicts file) -> title, rows (the first is the header), notes -------------------------------


def percent(share):
    return "" if share is None else f"{100 * share:.1f}"


def sparsity_table(runs, path):
    """Training rollouts: reward and all-wrong groups at the start and at the end, the rest over all steps."""
    start, end = f"first {WINDOW}", f"last {WINDOW}"
    header = ["run", "steps", f"reward, {start}", "paper: base", f"reward, {end}", f"all wrong, {start}"]
    rows = [header + ["paper: start", f"all wrong, {end}", "mixed", "unparsed", "truncated", "tokens"]]
    notes = ["paper: rollouts of its base model that are right, and GRPO groups all wrong at the start, on its pool."]
    for run in runs:
        metrics, group = run["metrics"], run["args"]["group"]
        share = lambda field, steps: percent(mean(column(steps, field)))
        base, dead = PAPER_START.get(run["arm"], ("", ""))
        length = mean(column(metrics, "length"))
        first, last = metrics[:WINDOW], metrics[-WINDOW:]
        row = [run["name"], len(metrics), share("reward", first), base, share("reward", last)]
        row += [share("all_wrong", first), dead, share("all_wrong", last)]
        row += [share(field, metrics) for field in ("mixed", "unparsed", "truncated")]
        rows.append(row + ["" if length is None else f"{length:.1f}"])
        for when, steps in ((start, first), (end, last)) if metrics else ():
            found, floor, slack = all_wrong_floor(steps, group, run["args"]["problems"])
            notes.append(
                f"{run['name']}, {when} steps: all wrong {percent(found)} >= (1 - reward)^{group} = {percent(floor)} "
                + ("holds" if found >= floor - slack else "FAILS, rewards or groups are miscounted")
                + f" (up to {percent(slack)} of sampling noise)."
            )
    return "Sparsity of the reward in training, %", rows, notes


def gates_table(runs, path):
    """Every gate of every run as the run recorded it; of a long text the first line, the rest is in its gates.json."""
    rows = [["run", "gate", "value", "verdict", "in words"]]
    for run in runs:
        for gate in run["gates"]:
            value = f"{gate['value']:.4g}" if isinstance(gate["value"], float) else gate["value"]
            rows.append([run["name"], gate["name"], value, gate["verdict"], gate["text"].split("\n")[0]])
    return "Gates", rows, [f"{run['name']}: no gates on record." for run in runs if not run["gates"]]


def main_table(runs, path):
    """Accuracy by verdict on every evaluation set, a row a run and the mean of an arm's seeds; McNemar against base."""
    judge, right = judged(runs, path)
    sizes = {name: len(items) for sets in right.values() for name, items in sets.items()}
    rows = [["run", "seed", *(f"{name} (n = {n})" for name, n in sizes.items()), "paper: DynaMath"]]
    notes = ["[low, high]: Wilson's 95 % interval over questions; it holds no scatter between seeds."]
    notes.append(
        f"paper: LLM judge, one seed; {SIX} for its six effective arms (by our reading), {FIVE} for the others."
    )
    base = next((run["name"] for run in runs if run["arm"] == "base"), None)
    if not base:
        notes.append("no run of the base model, so no McNemar test: `torchrun grpo.py --name base --steps 0`.")
    for run in runs:
        mine, cells, tests = right[run["name"]], [], []
        for name in sizes:
            items = list(mine.get(name, {}).values())
            low, high = wilson(sum(items), len(items)) if items else (None, None)
            cells.append(f"{percent(mean(items))} [{percent(low)}, {percent(high)}]" if items else "")
            if base and run["arm"] != "base" and name in mine and name in right[base]:
                won, lost = (
                    sum(mine[name][id] == x != right[base][name][id] for id in mine[name]) for x in (True, False)
                )
                tests.append(f"{name} p = {mcnemar(won, lost):.3g} ({won} won, {lost} lost)")
        paper = PAPER_DYNAMATH.get(run["arm"], "")
        rows.append([run["name"], run["seed"], *cells, paper])
        if tests:
            notes.append(f"{run['name']} against {base}, exact two-sided McNemar, p uncorrected: {', '.join(tests)}.")
        seeds = [right[other["name"]] for other in runs if other["arm"] == run["arm"]]
        if len(seeds) > 1 and mine is seeds[-1]:
            means = [mean(mean(sets[name].values()) for sets in seeds if name in sets) for name in sizes]
            rows.append([f"{run['arm']}, mean", f"{len(seeds)} seeds", *map(percent, means), paper])
    by = "rule judge, not comparable with the paper's LLM judge" if judge == "rule" else f"judge: {judge}"
    return f"Accuracy, % ({by})", rows, notes


TABLES = {"sparsity": sparsity_table, "gates": gates_table, "main": main_table}


def markdown(title, rows, notes):
    """One table as Markdown, its columns padded so that it reads as well in a terminal."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([f"### {title}", "", *lines, "", *(f"- {note}" for note in notes)]) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="*", help=f"{', '.join(TABLES)}; none is all")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of run folders")
    parser.add_argument("--verdicts", type=Path, help="verdicts.jsonl in that folder, unless given")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.table if name not in TABLES]:
        raise SystemExit(f"there is no table {unknown[0]}: choose from {', '.join(TABLES)}.")
    runs = load(args.runs)
    for name in args.table or TABLES:
        print(markdown(*TABLES[name](runs, args.verdicts or args.runs / "verdicts.jsonl")))


if __name__ == "__main__":
    main()
