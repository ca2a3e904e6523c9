"""analyze.py: every table and figure, from run folders or from a file of outcomes. Nothing is typed in by hand but the
paper's own numbers, in their own columns.

  python analyze.py                          every table
  python analyze.py main pairs               some of them
  python analyze.py --outcomes FILE          those that need outcomes only, from a CSV
  python analyze.py --save FILE              the runs' outcomes as such a CSV
  python analyze.py --runs results/toy/world0    those that need no outputs, from what results/ keeps of runs
  python analyze.py --figures DIR            draws dynamics, transfer and calibration (needs matplotlib)

Of training        sparsity     how dead the groups are, at the start and at the end
                   dynamics     reward, dead groups, length and entropy over the steps
                   gates        what was checked before and after
Of outcomes        main         accuracy on every set, worst case, whether the prior was delivered
                   pairs        every two arms: exact McNemar, mid-p, Holm
                   methods      the paper's method-level contrasts, over seeds
                   reversal     does a set rank the arms as the transfer set does?
                   composition  accuracy by kind of question, beside what guessing earns
Of outputs         audit        the rule grader against the judge, arm by arm
                   hacking      guessing, format, shuffled options, blank images, answers copied from the hint

Sets are known by name: `old` and `sparse` are in domain, together `combined`; the transfer set is `dynamath`, or where
there is none `cross`. `main`, `composition` and `audit` add the mean of an arm's seeds; `pairs` and `methods` compare
arms on the seeds they share, `reversal` by their means. Of training and in `hacking` every run stands for itself.

An outcomes file is a CSV of one row a question. A column of 0 and 1 alone is an arm, named as an arm or a run (`grpo`,
`grpo-s1`); every other column is an attribute, to slice by with --by. --arms names the arms where that is not so.
Some names are never arms and have a meaning: `set`, `id`, `source`, `subject`, `level`; `kind` (`choice` or `free`) or
`answer_type` (`multiple choice`); `seed_id` and `variant` (questions drawn from one program); of multiple choice
`options` (how many), `gold` and `shortest` (letters of the reference and of the first of the shortest options) and
`bare_letter` (the runs that said a letter and nothing else); `judge` (one in a file, named in every title).
"""

import argparse
import csv
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from judge import (
    VERDICTS,
    eval_paths,
    extract,
    file_path,
    grade,
    letters,
    need,
    pick,
    read_answers,
    read_config,
    read_jsonl,
    read_verdicts,
    shortlist,
)

need("numpy", "scipy", "tqdm")

import numpy as np
from scipy.stats import rankdata, t
from tqdm import tqdm

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

# What else is known of its results: correlation with DynaMath over eleven arms, points of one contrast, and why a prior
# did not arrive.
PAPER_RHO = {"old": "-0.74 (p = 0.011)", "sparse": "+0.89 (p < 0.001)"}
PAPER_PAIRS = {("combined", "vapohl", "vapo"): "+14.4"}
PAPER_LOST = dict(grpo="no prior", opd="no: teacher's cap", reopd="no: teacher's cap", vapo="no: MSE critic")
PAPER_LOST["opd-gated"] = "no: gated away"
DELIVERED, OTHERS = ([arm for arm, span in PAPER_DYNAMATH.items() if span == side] for side in (SIX, FIVE))
PAST = [*DELIVERED, "grpo", "opd-gated", "vapo"]  # arms with a reward
METHODS = [  # statement, arms (an end of them, or the mean of all), less arms, the paper on combined and on transfer
    ("1 a delivered prior separates", DELIVERED, min, OTHERS, max, "no overlap", "30.6 to 29.1"),
    ("2 hint-guided exploration", ["hintonly"], None, ["grpo"], None, "drives the gain", f"{SIX} to {FIVE}"),
    ("3 UFT's likelihood term", ["uft001", "uft002"], None, ["hintonly"], None, "adds nothing", "adds nothing"),
    ("4 HL-Gauss critic for MSE", ["vapohl"], None, ["vapo"], None, "+14.4", f"{SIX} to {FIVE}"),
    ("5 annealed, not gated", ["opd-annealed"], None, ["opd-gated"], None, "works, does not", f"{SIX} to {FIVE}"),
    ("6 two priors, not one", ["stack"], None, ["hintonly", "opd-annealed"], max, "adds nothing", "adds nothing"),
    ("7 past the teacher", PAST, max, ["opd"], None, "can pass", "can pass"),
]
DECLARED = [  # contrasts named before any run, first less second: their p needs no correction
    ("hintonly", "grpo"), ("uft001", "hintonly"), ("uft002", "hintonly"), ("vapohl", "vapo"),
    ("opd-annealed", "opd-gated"), ("stack", "hintonly"), ("stack", "opd-annealed"),
]  # fmt: skip
TERMS = ("instruction", "max_new_tokens", "max_pixels")  # flags under which answers are comparable
ATTRIBUTES = (  # columns of an outcomes file that are no arms
    "set", "id", "source", "subject", "level", "kind", "answer_type", "seed_id", "variant",
    "options", "gold", "shortest", "bare_letter", "judge",
)  # fmt: skip
NO_TRANSFER = "transfer set (dynamath or cross)"
NO_KIND = "kind of question is not in the file: add a column `kind` (choice or free)."
PROBES = ("shuffled", "blank")  # copies of a set by data/probes/prepare.py: <set>-shuffled and <set>-blank
DRAWS = 200_000  # of a permutation test that has too many permutations to count


# --- runs and outcomes ------------------------------------------------------------------------------------------------


def load(runs):
    """Every run folder below `runs`, in the paper's order of arms, then by seed: a list of {name, dir, arm, seed, args,
    sha256, metrics: one dict a step ([] for the base), gates: list}."""
    if (runs / "runs.jsonl").exists():
        return load_results(runs)
    loaded = []
    for config in sorted(runs.glob("*/config.json")):
        folder, facts = config.parent, read_config(config.parent)
        gates = folder / "gates.json"
        loaded.append(
            {
                "name": folder.name,
                "dir": folder,
                "arm": facts["args"]["name"],
                "seed": facts["args"]["seed"],
                "args": facts["args"],
                "sha256": facts.get("sha256", {}),
                "metrics": read_metrics(folder / "metrics.jsonl"),
                "gates": json.loads(gates.read_text())["gates"] if gates.exists() else [],
            }
        )
    if not loaded:
        raise SystemExit(f"{runs} holds no run folder: train an arm first, or name another folder with --runs.")
    return in_order(loaded)


def load_results(folder):
    """The runs of a folder of results/ as `load` gives them: what data/toy/replicate.py keeps of run folders."""
    cell = lambda x: float(x) if "." in x or "e" in x else int(x)
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = [(row.pop("run"), {k: cell(x) for k, x in row.items() if x}) for row in csv.DictReader(file)]
    loaded = [run | {"dir": folder / run["name"], "metrics": []} for run in read_jsonl(folder / "runs.jsonl")]
    by = {run["name"]: run["metrics"] for run in loaded}
    for name, row in rows:
        by[name].append(row)
    for run in loaded:
        if calibration := run.pop("calibration", None):  # summed over the steps
            run["metrics"][-1]["calibration"] = calibration
    return in_order(loaded)


def in_order(loaded):
    """Runs by arm as in the paper, then by seed. Stops with a sentence where two are one arm of one seed."""
    loaded = sorted(loaded, key=lambda run: (place(run), run["arm"], run["seed"]))
    for one, two in itertools.pairwise(loaded):
        if (one["arm"], one["seed"]) == (two["arm"], two["seed"]):
            raise SystemExit(
                f"{one['dir']} and {two['dir']} are both {one['arm']} of seed {one['seed']}: move one of them to "
                "another folder, or give its config.json a name of its own."
            )
    return loaded


def place(run):
    order = list(PAPER_DYNAMATH)
    return order.index(run["arm"]) if run["arm"] in order else len(order)


def read_metrics(path):
    """A run's metrics, one dict a step, less the torn last line of a run that was killed or is writing."""
    text = path.read_bytes() if path.exists() else b""
    rows = read_jsonl(path, torn=True) if text else []
    if text and not text.endswith(b"\n"):
        print(
            f"{path}: its last line is torn (a run was killed or is writing), {len(rows)} are whole.", file=sys.stderr
        )
    return rows


@dataclass(eq=False)  # itself alone: a key of `by_rule`'s cache
class Outcomes:
    """Who was right on what: R runs by N questions."""

    source: str  # whose verdicts, for titles
    runs: list[dict]  # R of {name, arm, seed, ...}
    items: list[dict]  # N of {set, id, ...}: rows of the sets, or attributes of an outcomes file
    right: np.ndarray  # (R, N) 1 right, 0 wrong, nan where the run was not asked
    output: np.ndarray | None = None  # (R, N) what was answered, None where the run was not asked
    notes: list[str] = field(default_factory=list)
    verdicts: Path | None = None

    def column(self, name):
        return np.array([item.get(name, "") for item in self.items], dtype=object)

    def arms(self, base=True):
        """{arm: its rows}, with the base or without."""
        names = dict.fromkeys(run["arm"] for run in self.runs if base or run["arm"] != "base")
        return {arm: [i for i, run in enumerate(self.runs) if run["arm"] == arm] for arm in names}

    def ours(self):
        """Whether any run is of an arm of the paper."""
        return any(run["arm"] in PAPER_DYNAMATH for run in self.runs)

    def transfer(self):
        return next((name for name in ("dynamath", "cross") if name in self.column("set")), None)

    def sets(self):
        """{set: its columns}: old, sparse, the two combined, the transfer set, then the others."""
        column = self.column("set")
        found = {name: np.flatnonzero(column == name) for name in dict.fromkeys(column)}
        if {"old", "sparse"} <= found.keys():
            if "combined" in found:
                raise SystemExit("A set is called combined, as old and sparse together are here: rename that set.")
            found["combined"] = np.concatenate([found["old"], found["sparse"]])
        return {name: found[name] for name in ["old", "sparse", "combined", self.transfer(), *found] if name in found}

    def choice(self, at, wanted=True):
        """Those of the columns `at` that are multiple choice, or those that are not: by any field that says so. None of
        either where no question of all says what it is."""
        said = lambda i: "".join(str(self.items[i].get(k, "")) for k in ("kind", "answer_type")).lower()
        is_choice = lambda i: "choice" in said(i) or str(self.items[i].get("options") or "0") != "0"
        return np.array([i for i in at if is_choice(i) == wanted] if self.kinds() else [], dtype=int)

    def kinds(self):
        """Whether questions say what kind they are of."""
        return any(str(item.get(k, "")) for item in self.items for k in ("kind", "answer_type", "options"))

    def score(self, at, right=None, base=True):
        """{arm: accuracy on the columns `at`, the mean of its seeds that were asked}, nan where none was."""
        right, mine = self.right if right is None else right, lambda seeds: self.asked(seeds, at)
        return {arm: right[rows][:, at].mean() if (rows := mine(x)) else math.nan for arm, x in self.arms(base).items()}

    def asked(self, seeds, at):
        """Those of the runs `seeds` that were asked all of the columns `at`."""
        return [i for i in seeds if len(at) and np.isfinite(self.right[i, at]).all()]

    def lines(self, at):
        """(name, [row]) of each run that was asked the columns `at`, after two or more of an arm (their mean, rows)."""
        for arm, seeds in self.arms().items():
            mine = self.asked(seeds, at)
            yield from ((self.runs[i]["name"], [i]) for i in mine)
            if len(mine) > 1:
                yield f"{arm}, mean of {len(mine)}", mine

    def error(self, seeds, at):
        """Standard error of the mean of these runs' verdicts on the columns `at`: by question, or by program."""
        right, programs = self.right[seeds][:, at].mean(0), self.programs(at)
        return right.std() / math.sqrt(len(at)) if programs is None else cluster_error(right, programs)[0]

    def programs(self, at):
        """The program (`seed_id`) that each of the columns `at` was drawn from; None if these are independent."""
        ids = self.column("seed_id")[at]
        return ids if "" not in ids and len(set(ids)) < len(ids) else None


def check_terms(runs):
    """Stops with a sentence where two runs were evaluated with other settings, or on another set under one name, or
    where a set is no longer the file that was answered."""
    seen = {}
    for run in runs:
        terms = {f"--{term.replace('_', '-')}": run["args"].get(term) for term in TERMS}
        sha256 = {Path(path): sha for path, sha in run["sha256"].items()}  # ./data/x.jsonl is data/x.jsonl
        for path in eval_paths(run):
            terms[f"set {path.stem}"] = was = sha256.get(path)
            if path.exists() and was not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
                raise SystemExit(f"{path} is not the file that {run['name']} answered (see sha256 in its config.json): "
                                 "put that file back, or train the run again.")  # fmt: skip
        for term, value in terms.items():
            first, theirs = seen.setdefault(term, (run["name"], value))
            if value != theirs:
                raise SystemExit(
                    f"{first} and {run['name']} were evaluated with another {term} ({str(theirs)[:30]!r}, "
                    f"{str(value)[:30]!r}), and a table compares runs on equal terms only: move one of them to a "
                    "folder of its own and name that with --runs."
                )


def option_facts(row):
    """What composition asks of a row of multiple choice: how many options there are, and the letters of the reference
    ("" where it is none of them) and of the first of the shortest."""
    names, gold = letters(row["choices"]), pick(row["answer"], row["choices"])
    if not names:
        return {"options": 0}
    shortest = names[min(range(len(names)), key=lambda k: len(row["choices"][k]))]
    return {"options": len(names), "gold": "" if gold in (None, -1) else names[gold], "shortest": shortest}


def judged(runs, path):
    """Verdicts joined with those runs that are finished -> Outcomes. Stops with a sentence where one is missing."""
    judge, verdicts = read_verdicts(path)
    done = [run for run in runs if (run["dir"] / "outputs.jsonl").exists()]
    state = lambda n, of: "trained, not evaluated" if n == of else f"step {n} of {of}"
    states = {run["name"]: state(len(run["metrics"]), run["args"].get("steps")) for run in runs if run not in done}
    names = [f"{name} is unfinished ({state})" for name, state in states.items()]
    notes = [f"left out: {', '.join(names)}; the command that began a run resumes it."] if names else []
    if not done:
        raise SystemExit(f"There is nothing to compare: {', '.join(names)}. The command that began a run resumes it.")
    check_terms(done)
    answers, items, missing = [read_answers(run["dir"]) for run in done], {}, []
    for file in dict.fromkeys(file for run in done for file in eval_paths(run)):
        items |= {(file.stem, row["id"]): row | option_facts(row) | {"set": file.stem} for row in read_jsonl(file)}
    rows = [row | {"bare_letter": "", "judge": judge} for row in items.values()]
    at = {key: i for i, key in enumerate(items)}
    right, output = np.full((len(done), len(items)), np.nan), np.full((len(done), len(items)), None, dtype=object)
    for r, mine in enumerate(answers):
        unjudged = []
        for answer in mine:
            i, verdict = at[answer["set"], answer["id"]], verdicts.get(answer["key"])
            output[r, i] = answer["output"]
            if re.fullmatch(r"\W*+[A-Za-z]\W*+", re.sub("</?answer>", "", answer["output"])):
                rows[i]["bare_letter"] += f" {done[r]['name']}"
            if isinstance(verdict, bool):
                right[r, i] = verdict
            else:
                unjudged.append(f"{answer['set']}/{answer['id']}")
        if unjudged:
            few = f" (of these {shortlist(unjudged, 3)})" if len(unjudged) < len(mine) else ""
            missing.append(f"{done[r]['name']} {len(unjudged)} of {len(mine)}{few}")
    if missing:
        home, model = runs[0]["dir"].parent, (judge or "").rpartition(", prompt ")[0]
        options = f" --model {model} --address ADDRESS" if model else " --judge rule"
        options += "" if path == home / VERDICTS else f" --verdicts {path}"
        other = " with the address and --extra of before" if model else "" if judge else ", or with a --model"
        command = f"python judge.py {home}/*{options}"
        raise SystemExit(f"verdicts are missing: run `{command}`{other}. Without one: {shortlist(missing)}.")
    return Outcomes(by_judge(judge), done, rows, right, output, notes, path)


def by_judge(judge):
    return "rule judge, not comparable with the paper's LLM judge" if judge == "rule" else f"judge: {judge}"


def read_outcomes(path, arms=()):
    """An outcomes file -> Outcomes, its arms those named, else all columns of 0 and 1 but ATTRIBUTES. Stops with a
    sentence where a column could be an arm and is none."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: name a CSV of one row a question and one column of 0 and 1 an arm.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *lines = [[cell.strip() for cell in row] for row in csv.reader(file) if row] or [[]]
    except UnicodeDecodeError:
        raise SystemExit(f"{path} is not UTF-8: save it as UTF-8.") from None
    if "" in header:
        raise SystemExit(f"{path}, column {header.index('') + 1} has no name: name it or remove it.")
    for number, line in enumerate(lines, 2):
        if len(line) != len(header):
            raise SystemExit(f"{path}, row {number} has {len(line)} cells, the header {len(header)}: repair that row.")
    columns, runs = dict(zip(header, zip(*lines, strict=True), strict=False)), []
    if unknown := [name for name in arms if name not in columns]:
        raise SystemExit(f"{path} has no column {unknown[0]}, which --arms names: choose from {', '.join(header)}.")
    for name in arms or [name for name in columns if name not in ATTRIBUTES]:
        values = {value.lower() for value in columns[name]}
        if values <= {"0", "1"}:
            arm, seed = re.fullmatch(r"(.+?)(?:-s(\d+))?", name).groups()
            runs.append({"name": name, "arm": arm, "seed": int(seed or 0)})
        elif arms or {"0", "1"} <= values or values <= {"0", "1", "", "0.0", "1.0", "true", "false", "nan"}:
            number, odd = next((i, x) for i, x in enumerate(columns[name], 2) if x not in ("0", "1"))
            raise SystemExit(
                f"{path}, row {number}: the column {name!r} holds {odd!r}. An arm is 0 or 1 in every row and an "
                "attribute never both: remove the row or fill in 0 or 1, or name the arms with --arms."
            )
    if not (runs and lines):
        raise SystemExit(f"{path} has no arm: no column but attributes (see --help) holds 0 and 1 alone.")
    if len(columns) < len(header) or len({(run["arm"], run["seed"]) for run in runs}) < len(runs):
        raise SystemExit(f"{path} has two columns for one run or attribute ({', '.join(header)}): rename one.")
    runs.sort(key=place)  # stable: other arms keep the order of the file
    right = np.array([[float(cell) for cell in columns[run["name"]]] for run in runs])
    columns |= {"set": [cell or "no set" for cell in columns["set"]]} if "set" in columns else {}
    others = [name for name in columns if name not in {run["name"] for run in runs}]
    items = [{"set": path.stem, "id": i} | {name: columns[name][i] for name in others} for i in range(len(lines))]
    judges = sorted(set(columns.get("judge", [""])))
    if len(judges) > 1:
        raise SystemExit(f"{path} holds outcomes by {' and '.join(map(repr, judges))} (column judge): accuracies by "
                         "different judges are not comparable, put each into a file of its own.")  # fmt: skip
    source = f"outcomes of {path.name}" + (f", {by_judge(judges[0])}" if judges[0] else "")
    names = [", ".join(run["name"] for run in runs), ", ".join(others) or "none"]
    notes = [f"{path}: read as arms: {names[0]} ({len(runs)}); as attributes: {names[1]}."]
    notes[0] += "" if arms else " --arms names the arms where this is not so."
    data = Outcomes(source, runs, items, right, notes=notes)
    if not data.ours():
        notes.append("none of the paper's arms is in the file, so nothing of the paper is set beside it.")
    return data


def write_outcomes(data, path):
    """Outcomes as a CSV that --outcomes reads: the questions that every run was asked."""
    asked = np.flatnonzero(np.isfinite(data.right).all(0))
    kept = [name for name in ATTRIBUTES if any(name in item for item in data.items)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*kept, *(run["name"] for run in data.runs)])
        table.writerows([*(data.items[i].get(k, "") for k in kept), *data.right[:, i].astype(int)] for i in asked)
    print(f"{path}: {len(data.runs)} runs x {len(asked)} questions, of {len(data.items)} that any of them was asked.")


def slice_by(data, attribute):
    """Cuts the questions into sets by an attribute of theirs, in place."""
    have = dict.fromkeys(key for item in data.items for key in item)
    if attribute not in have:
        raise SystemExit(f"there is no attribute {attribute} to slice by: choose from {', '.join(have)}.")
    for item in data.items:
        item["set"] = str(item.get(attribute, "")) or f"no {attribute}"


# --- statistics -------------------------------------------------------------------------------------------------------


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


def tail(n, k):
    """(sum_{j <= k} C(n, j), C(n, k)), exact."""
    term = total = 1
    for j in range(k):
        term = term * (n - j) // (j + 1)
        total += term
    return total, term


def mcnemar(b, c):
    """Exact two-sided McNemar test on the b and c discordant pairs:
    p = min(1, 2 sum_{k <= min(b,c)} C(n,k) / 2^n), n = b + c; 1 where n = 0."""
    return min(1.0, 2 * tail(b + c, min(b, c))[0] / 2 ** (b + c))


def mcnemar_mid(b, c):
    """McNemar's mid-p: the exact sum less the probability of the observed table (Fagerland et al. 2013)."""
    total, point = tail(b + c, min(b, c))
    return (2 * total - point) / 2 ** (b + c)


@functools.cache
def detectable(discordant, level=0.05):
    """The least |b - c| with an exact McNemar p below `level` where b + c = `discordant`; None where there is none."""
    term = total = 1
    for k in range(discordant // 2 + 1):
        if 2 * total / 2**discordant >= level:
            return discordant - 2 * (k - 1) if k else None
        term = term * (discordant - k) // (k + 1)
        total += term


def holm(ps):
    """Holm's step-down adjusted p-values (1979): the i-th smallest of m is max_{j <= i} min(1, (m - j + 1) p_(j))."""
    order, least = np.argsort(ps, kind="stable"), np.sort(ps)
    adjusted = np.empty(len(ps))
    adjusted[order] = np.maximum.accumulate(np.minimum(1, least * np.arange(len(ps), 0, -1)))
    return adjusted.tolist()


def cluster_error(values, cluster):
    """Standard error of the mean of N values, whatever the dependence within G clusters -> (error, G), with
    error^2 = G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2 / N^2 (Liang and Zeger 1986); nan where G = 1."""
    labels = np.unique(np.asarray(cluster, dtype=str), return_inverse=True)[1]
    sums = np.bincount(labels, values - values.mean())
    G = len(sums)
    return math.sqrt(G / (G - 1) * (sums @ sums)) / len(values) if G > 1 else math.nan, G


def interval(right, programs):
    """95 % interval of the mean p of N >= 1 verdicts, (low, high): Wilson's over the questions; where these are drawn
    from programs, Wilson's over as many independent ones as have the same error, p (1 - p) / `cluster_error`^2 (Kish
    1965), at most N, and the number of programs where that error is 0."""
    if programs is None:
        return wilson(right.sum(), len(right))
    p, (error, n) = right.mean(), cluster_error(right, programs)
    if error > 1e-12:
        n = min(len(right), p * (1 - p) / error**2)
    return wilson(p * n, n)


def clustered(difference, cluster):
    """Mean of N differences, half of its 95 % interval and its two-sided p by `cluster_error`, Student's t on G - 1
    degrees of freedom. With clusters of one it is the paired t-test."""
    middle, (error, G) = difference.mean(), cluster_error(difference, cluster)
    if G < 2:
        return middle, math.nan, math.nan
    if error < 1e-12:  # all clusters alike: they say nothing of how far others would lie
        return (middle, 0.0, 1.0) if abs(middle) < 1e-12 else (middle, math.nan, math.nan)
    return middle, t.ppf(0.975, G - 1) * error, 2 * t.sf(abs(middle) / error, G - 1)


def spearman(x, y):
    """Spearman's rho, the correlation of mid-ranks; nan where all of x or of y are equal."""
    r, s = (rank - rank.mean() for rank in map(ranks, (x, y)))
    scale = math.sqrt((r @ r) * (s @ s))
    return r @ s / scale if scale else math.nan


def ranks(x):
    return rankdata(np.round(x, 12))  # a mean of seeds must not tell 0.3 from 0.1 + 0.2


def permutation_p(x, y, seed=0):
    """Two-sided permutation p of Spearman's rho: the share of all n! orders of y with a |rho| no smaller than ours.

    Up to 11 values, with ties or without, it is exact. Given the ranks, rho depends on D = sum (r_i - s_pi(i))^2 alone;
    its distribution is built up position by position over the 2^n sets of values already placed, so that no order is
    walked through. Beyond 11, (k + 1) / (DRAWS + 1) of random orders. -> (p, "exact" or "Monte Carlo")
    """
    r, s = (np.rint(2 * ranks(v)).astype(int) for v in (x, y))  # doubled, mid-ranks are whole
    n = len(r)
    centre = n * (r @ r + s @ s) - 2 * r.sum() * s.sum()  # n times the D at which rho = 0
    far = lambda D: abs(n * D - centre)
    ours = far(((r - s) ** 2).sum())
    if n > 11:
        draws = np.random.default_rng(seed).permuted(np.tile(s, (DRAWS, 1)), axis=1)
        return ((far(((r - draws) ** 2).sum(1)) >= ours).sum() + 1) / (DRAWS + 1), "Monte Carlo"
    top = ((np.sort(r) - np.sort(s)[::-1]) ** 2).sum()  # the largest D
    layer = {0: np.eye(1, top + 1, dtype=np.int64)[0]}  # {values placed, as bits: orders that lead to each D}
    for value in r:
        following = {}
        for placed, orders in layer.items():
            for j in [j for j in range(n) if not placed >> j & 1]:
                sums, d = following.setdefault(placed | 1 << j, np.zeros(top + 1, np.int64)), (value - s[j]) ** 2
                sums[d:] += orders[: top + 1 - d]
        layer = following
    (orders,) = layer.values()
    return orders[far(np.arange(top + 1)) >= ours].sum() / math.factorial(n), "exact"


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


# --- tables: each (runs, outcomes) -> title, rows (the first is the header), notes ------------------------------------


def percent(share):
    return "" if share is None else f"{100 * share:.1f}"


def precondition_note(pool):
    """What `data.pool.precondition` measured of a pool, as an indented Markdown table -> text, or None if it was not.

    all wrong is the share of groups; its bounds are (1 - right)^G, by Jensen, and 1 - right.
    """
    path = Path(pool).with_suffix(".precondition.json")
    if not path.exists():
        return None
    facts = json.loads(path.read_text())
    header = ["solution shown", "rows", "with a hint", "tokens shown", "right", "paper: right", "all wrong", "bounds"]
    rows = [[*header, "paper: all wrong", "readable", "truncated"]]
    paper = {"0.0": ("3.6 (pool), 7.2 (hint test)", "85-97"), "0.5": ("34.4", "")}
    for share, x in facts["shown"].items():
        right, dead = (f"{percent(x[k])} +- {percent(2 * x[k + '_error'])}" for k in ("right", "all_wrong"))
        bounds = f"{percent(x['floor'])} to {percent(x['ceiling'])}"
        known = paper.get(share, ("", ""))
        hint = [percent(x.get(k)) for k in ("hinted", "tokens")]  # steps are whole: not quite the share asked for
        rows.append([f"{float(share):.0%}", x["rows"], *hint, right, known[0], dead, bounds, known[1]])
        rows[-1] += [percent(x["readable"]), percent(x["truncated"])]
    stale = Path(pool).exists() and hashlib.sha256(Path(pool).read_bytes()).hexdigest() != facts["sha256"]
    title = (
        f"preconditions of {pool}, fresh rollouts of {facts['model']} in %, +- 2 s.e. over rows, groups of "
        f"{facts['group']}; {percent(facts['solved'])} % of its rows have a solution"
    )
    title += "; THE POOL HAS CHANGED SINCE, measure again" * stale
    return title + ":\n\n" + "\n".join("  " + line for line in grid(rows)) + "\n"


def sparsity_table(runs, path):
    """Training rollouts: reward and all-wrong groups at the start and at the end, the rest over all steps. Below it,
    what was measured of each pool before training."""
    start, end = f"first {WINDOW}", f"last {WINDOW}"
    header = ["run", "steps", f"reward, {start}", "paper: base", f"reward, {end}", f"all wrong, {start}"]
    rows = [header + ["paper: start", f"all wrong, {end}", "mixed", "unparsed", "truncated", "tokens"]]
    notes = ["paper: rollouts of its base model that are right, and GRPO groups all wrong at the start, on its pool."]
    pools = dict.fromkeys(run["args"]["pool"] for run in runs if run["args"].get("pool"))
    before = [note for pool in pools if (note := precondition_note(pool))]
    held = []
    for run in [run for run in runs if run["metrics"] or not before]:  # beside a pool lie folders of no training
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
            held.append(found >= floor - slack)
            if not held[-1]:
                notes.append(
                    f"{run['name']}, {when} steps: all wrong {percent(found)} >= (1 - reward)^{group} = "
                    f"{percent(floor)} FAILS by more than noise ({percent(slack)}): rewards or groups are miscounted."
                )
    if held:
        notes.append(
            "all wrong >= (1 - reward)^G, the least that independent rollouts allow, but for sampling noise of three "
            f"standard errors: holds in {sum(held)} of {len(held)} starts and ends of runs."
        )
    return "Sparsity of the reward in training, %", rows, notes + before


def gates_table(runs, path):
    """Every gate of every run as the run recorded it; of a long text the first line, the rest is in its gates.json."""
    rows = [["run", "gate", "value", "verdict", "in words"]]
    for run in runs:
        for gate in run["gates"]:
            value = f"{gate['value']:.4g}" if isinstance(gate["value"], float) else gate["value"]
            rows.append([run["name"], gate["name"], value, gate["verdict"], gate["text"].split("\n")[0]])
    without = [run["name"] for run in runs if not run["gates"]]
    notes = [f"no gates on record, as these are off or were not reached: {', '.join(without)}."] if without else []
    return "Gates", rows, notes


def dynamics_table(runs, data):
    """Training in fifths: means of what was logged over the steps of each."""
    shares, others = ("reward", "all_wrong", "mixed", "unparsed", "truncated"), ("length", "entropy", "grad_norm")
    rows = [["run", "steps", *(name.replace("_", " ") for name in shares + others), "paper: all wrong"]]
    for run in runs:
        parts = np.array_split(np.array(run["metrics"], dtype=object), 5)
        for k, steps in enumerate(part for part in parts if len(part)):
            row = [run["name"], f"{steps[0]['step']}-{steps[-1]['step']}"]
            row += [percent(mean(column(steps, name))) for name in shares]
            values = [mean(column(steps, name)) for name in others]
            row += ["" if value is None else f"{value:.3g}" for value in values]
            rows.append([*row, PAPER_START.get(run["arm"], ("", ""))[1] if k == 0 else ""])
    notes = [
        "paper, earlier rounds, whose pool was easier: groups all wrong 77 % at the start, about 30 % in training."
    ]
    if len(rows) == 1:
        notes = [f"no run has a step of training on record: {shortlist([run['name'] for run in runs])}."]
    return "Training dynamics, % of rollouts or groups; length in tokens", rows, notes


def points(share):
    """A share in %, empty where it is nan."""
    return percent(None if math.isnan(share) else share)


def bounded(share, low, high):
    return "" if math.isnan(share) else f"{points(share)} [{points(low)}, {points(high)}]"


def p_value(p):
    return "" if p is None or math.isnan(p) else f"{p:.3g}" if p > 1e-99 else "< 1e-99"


def compare(data, i, j, at):
    """Runs i and j on the columns `at` -> (won, lost, difference, p, half), None if one was not asked: p is McNemar's
    and half None, or where questions share a program, p and half of the 95 % interval are by program."""
    one, two = data.right[i, at], data.right[j, at]
    if not np.isfinite(one - two).all():
        return None
    won, lost, programs = int((one > two).sum()), int((two > one).sum()), data.programs(at)
    if programs is None:
        return won, lost, (one - two).mean(), mcnemar(won, lost), None
    gap, half, p = clustered(one - two, programs)
    return won, lost, gap, p, half


def duel(data, one, two, at, seed):
    """Arms one and two of a seed on the columns `at`, as `compare` has it, or where `seed` is None over two or more
    seeds that both have, paired by seed: ("", "", difference, p, half). None where that can't be said."""
    if seed is None:
        found = contrast(data, [one], [two], at)
        return ("", "", found[0], found[2], found[1]) if found and found[3] > 1 else None
    row = {run["arm"]: i for i, run in enumerate(data.runs) if run["seed"] == seed}
    return compare(data, row[one], row[two], at) if {one, two} <= row.keys() else None


def delivered(data, arm, seed):
    """Whether an arm beats grpo in a `duel` on the combined and on the transfer set, each at p < 0.05 -> "yes", "no",
    or "" where that can't be said."""
    sets = data.sets()
    goals = [sets[name] for name in ("combined", data.transfer()) if name in sets]
    found = [duel(data, arm, "grpo", at, seed) for at in goals]
    if len(goals) < 2 or arm in ("base", "grpo") or not all(found) or any(math.isnan(p) for _, _, _, p, _ in found):
        return ""
    return "yes" if all(gap > 0 and p < 0.05 for _, _, gap, p, _ in found) else "no"


def main_table(runs, data):
    """Accuracy on every set, a row a run and the mean of an arm's seeds; worst case; delivered; tests against base."""
    sets = data.sets()
    drawn = {name: ids for name, at in sets.items() if (ids := data.programs(at)) is not None}
    of = lambda name: f" of {len(set(drawn[name]))} programs" if name in drawn else ""
    header = ["run", "seed", *(f"{name} (n = {len(at)}{of(name)})" for name, at in sets.items())]
    header += [f"{name}, worst case (n = {len(set(ids))})" for name, ids in drawn.items()]
    rows = [[*header, "delivered", "paper: delivered", "paper: DynaMath"]]
    notes = [
        "[low, high]: Wilson's 95 % interval over questions, +-: Student's over seeds; neither holds both.",
    ]
    if data.ours():
        notes += [
            f"paper: LLM judge, one seed; {SIX} for its six effective arms (by our reading), {FIVE} for the others.",
            "delivered: better than grpo of the same seed on the combined and on the transfer set, each at p < 0.05 by "
            "exact McNemar, by program where questions share one; the mean, paired by seed. paper: whose prior reached "
            "the policy, in its words.",
        ]
    if drawn:
        notes.append(
            f"{', '.join(drawn)}: variants of one program (seed_id) are not independent, so intervals and p are by "
            "program: Wilson's over the effective number of questions, and Student's. worst case: share of programs "
            "all of whose variants are right, with Wilson's over programs."
        )
    base = next((i for i, run in enumerate(data.runs) if run["arm"] == "base"), None)
    if base is None and data.ours():
        notes.append("no run of the base model, so no McNemar test: `torchrun grpo.py --name base --steps 0`.")
    for i, run in enumerate(data.runs):
        cells, tests, seeds = [], [], data.arms()[run["arm"]]
        for name, at in sets.items():
            mine = data.right[i, at]
            cells.append(bounded(mine.mean(), *interval(mine, drawn.get(name))))
            if base not in (None, i) and (found := compare(data, i, base, at)):
                won, lost, _, p, _ = found
                tests.append(f"{name} p = {p_value(p)}{' by program' * (name in drawn)} ({won} won, {lost} lost)")
        for name, ids in drawn.items():
            mine = data.right[i, sets[name]]
            worst = np.array([mine[ids == id].min() for id in set(ids)])
            cells.append(bounded(worst.mean(), *wilson(worst.sum(), len(worst))))
        paper = PAPER_DYNAMATH.get(run["arm"], "")
        told = [PAPER_LOST.get(run["arm"], "yes" if paper == SIX else ""), paper]
        rows.append([run["name"], run["seed"], *cells, delivered(data, run["arm"], run["seed"]), *told])
        if tests:
            rival = data.runs[base]["name"]
            notes.append(f"{run['name']} against {rival}, exact two-sided McNemar, p uncorrected: {', '.join(tests)}.")
        if len(seeds) > 1 and i == seeds[-1]:
            cells = [seed_mean(data.right[seeds][:, at].mean(1)) for at in sets.values()] + [""] * len(drawn)
            cells.append(delivered(data, run["arm"], None))
            rows.append([f"{run['arm']}, mean", f"{len(seeds)} seeds", *cells, *told])
    return f"Accuracy, % ({data.source})", rows, notes + data.notes


def seed_mean(values):
    """Mean of an arm's seeds, those that were asked, and half of Student's 95 % interval -> cell."""
    wanted, values = len(values), values[np.isfinite(values)]
    n = len(values)
    few = f" ({n} seed{'s' * (n > 1)})" * (n < wanted)
    if n < 2:
        return points(values.sum()) + few if n else ""
    half = values.std(ddof=1) / n**0.5 * t.ppf(0.975, n - 1)
    return f"{points(values.mean())} +- {points(half)}{few}"


def pairs_table(runs, data):
    """Every two arms of one seed on every set, and over their seeds: exact McNemar, mid-p, Holm over the pairs."""
    header = ["set", "seed", "pair", "difference", "won", "lost", "exact p", "mid-p", "Holm p", "clustered p"]
    rows, arms = [[*header, "detectable", "declared", "paper"]], data.arms(base=False)
    seeds = sorted({run["seed"] for run in data.runs})
    for (name, at), seed in itertools.product(data.sets().items(), [*seeds, *[None] * (len(seeds) > 1)]):
        family = []
        for pair in itertools.combinations(arms, 2):
            pair = pair[::-1] if pair[::-1] in DECLARED else pair
            if found := duel(data, *pair, at, seed):
                family.append((pair, *found))
        adjusted = dict(zip([pair for pair, *_ in family], holm([p for *_, p, _ in family]), strict=True))
        for pair, won, lost, gap, p, half in sorted(family, key=lambda x: x[0] not in DECLARED):
            row = [name, "all" if seed is None else seed, " - ".join(pair), f"{100 * gap:+.1f}", won, lost]
            row += ["", ""] if seed is None else [p_value(mcnemar(won, lost)), p_value(mcnemar_mid(won, lost))]
            row += [p_value(adjusted[pair]), "" if half is None else p_value(p)]
            least = (detectable(won + lost) or math.nan) / len(at) if half is None else half
            rows.append([*row, points(least), "yes" if pair in DECLARED else "", PAPER_PAIRS.get((name, *pair), "")])
    notes = [
        "difference in points; won, lost: questions that only the first, only the second arm got right.",
        "clustered p: by program, as variants of one program (seed_id) are not independent; in rows of seed all, which "
        "are over the seeds that both arms have, by seed. Where there is this p it holds, not the exact p.",
        "Holm p: of the p that holds, over all pairs of one set and seed. Of a contrast declared before any run that p "
        "holds as it is.",
        "detectable: points that would give p below 0.05, the exact p at this pair's number of discordant questions, "
        "the clustered p at this pair's scatter.",
    ]
    if len(rows) == 1:
        notes = ["there is no pair: it takes two arms beside the base, of one seed, that were asked the same set."]
    return f"Pairs of arms ({data.source})", rows, notes + data.notes


def contrast(data, left, right, at):
    """Mean of the arms `left` less mean of the arms `right` on the columns `at`, over the seeds that all of them share.

    -> (difference, half of its 95 % interval, p, seeds), or None without such a seed. Paired by seed where there are
    two or more; else over questions, by program where they share one.
    """
    by = {(run["arm"], run["seed"]): data.right[i, at] for i, run in enumerate(data.runs)}
    complete = lambda seed: all((arm, seed) in by and np.isfinite(by[arm, seed]).all() for arm in left + right)
    seeds = sorted(seed for seed in {run["seed"] for run in data.runs} if complete(seed))
    if not seeds:
        return None
    average = lambda arms, seed: np.mean([by[arm, seed] for arm in arms], axis=0)
    gaps, programs = np.array([average(left, seed) - average(right, seed) for seed in seeds]), data.programs(at)
    if len(seeds) > 1:
        return *clustered(gaps.mean(1), seeds), len(seeds)
    return *clustered(gaps[0], range(len(at)) if programs is None else programs), 1


def methods_table(runs, data):
    """The seven statements on methods in the paper's abstract and introduction, as contrasts of arms."""
    rows, sets = [["statement", "set", "contrast", "difference", "95 %", "p", "seeds", "paper"]], data.sets()
    goals = ["combined", data.transfer()]
    names = [name for name in goals if name in sets] or list(sets)
    for (statement, left, low, right, high, *paper), name in itertools.product(METHODS if data.ours() else [], names):
        score = {arm: x for arm, x in data.score(sets[name]).items() if not math.isnan(x)}
        absent = [arm for arm in left + right if arm not in score]
        end = lambda group, of, score=score: [of((x for x in group if x in score), key=score.get, default="")]
        sides = [end(left, low) if low else left, end(right, high) if high else right]
        found = contrast(data, *sides, sets[name])
        without = f"not run: {' '.join(absent)}" if absent else "no seed in common"
        row = [statement, name, " - ".join(map(" & ".join, sides)) if found else without]
        if found:
            gap, half, p, seeds = found
            row[2] += f" ({without})" if absent else ""
            bounds = f"{100 * (gap - half):+.1f} to {100 * (gap + half):+.1f}"
            row += [f"{100 * gap:+.1f}", "seeds agree, no bound" if math.isnan(half) else bounds]
            row += ["" if low or high else p_value(p), seeds]
        rows.append([*row, *[""] * (7 - len(row)), dict(zip(goals, paper, strict=True)).get(name, "")])
    missing = [] if "combined" in sets else ["combined (it takes old and sparse)"]
    missing += [] if data.transfer() else [NO_TRANSFER]
    notes = [f"no {' and no '.join(missing)}: contrasts on {', '.join(names)}."] if missing else []
    notes += [
        "difference in points. 95 %: over seeds, paired by seed, by Student's t; with one seed over questions, or the "
        "programs they share.",
        "1, 6 and 7 set the lowest or highest arm of a group against another, chosen by its result: so without a p.",
        "paper: read off its abstract and introduction (its section 5 was not at hand): points, or DynaMath accuracy.",
        "4 is the clean contrast of critics: vapo differs from grpo in more than its critic.",
    ]
    notes = notes if data.ours() else []
    return f"Contrasts of methods ({data.source})", rows, notes + data.notes


def strict(output, item):
    """The rule of many training rewards: what the last <answer> tag holds, else the whole output, is the gold letter,
    or for free answers the reference to the sign."""
    said = (re.findall("<answer>(.*?)</answer>", output, re.S) or [output])[-1].strip()
    if not item["choices"]:
        return said == item["answer"].strip()
    return said == letters(item["choices"])[pick(item["answer"], item["choices"])]


def lenient(output, item):
    """The training reward's own grader: a letter, an option's text or a number, in any usual form and place."""
    return grade(output, item["answer"], item["choices"]) == "right"


def unparsed(output, item):
    return extract(output, item["choices"]) is None


@functools.cache
def by_rule(data, rule):
    """What a rule (output, item) -> bool says of every output: (R, N), nan where the run was not asked."""
    cell = lambda output, item: math.nan if output is None else float(rule(output, item))
    rows = tqdm(data.output, f"{rule.__name__}, by rule", unit="run", leave=False)
    return np.array([[cell(*pair) for pair in zip(row, data.items, strict=True)] for row in rows])


def reversal_table(runs, data):
    """Spearman's rho over arms between each set and the transfer set: does it rank them alike, and by which part?"""
    header = ["set", "with", "questions", "graded by", "arms", "rho", "p", "how", "leaving one arm out", "paper"]
    rows, sets, transfer = [header], data.sets(), data.transfer()
    graders = {"judge": data.right} | ({} if data.output is None else {"strict rule": by_rule(data, strict)})
    lost = {}
    ends = [(name, transfer) for name in sets if name != transfer] if transfer else itertools.combinations(sets, 2)
    for name, other in ends:
        slices = {"all": sets[name]}
        some, rest = data.choice(sets[name]), data.choice(sets[name], False)
        slices |= {"without multiple choice": rest, "multiple choice alone": some} if len(some) and len(rest) else {}
        for (label, at), (grader, right) in itertools.product(slices.items(), graders.items()):
            scores = [data.score(part, right, base=False) for part in (at, sets[other])]
            both = [arm for arm in scores[0] if not math.isnan(scores[0][arm] + scores[1][arm])]
            x, y = (np.array([score[arm] for arm in both]) for score in scores)
            if away := [arm for arm in scores[0] if arm not in both]:
                lost |= {f"{name}, {other}: {', '.join(away)} left out, not asked both.": None}
            row = [name, other, f"{label} ({len(at)})", grader, len(x), *[""] * 4]
            if len(x) > 2 and not math.isnan(rho := spearman(x, y)):
                p, how = permutation_p(x, y)
                left = [spearman(np.delete(x, i), np.delete(y, i)) for i in range(len(x))]
                span = "undefined" if np.isnan(left).any() else f"{min(left):+.2f} to {max(left):+.2f}"
                row[5:] = [f"{rho:+.2f}", p_value(p), how, span]
            ours = label == "all" and grader == "judge" and other == transfer
            rows.append([*row, PAPER_RHO.get(name, "") if ours else ""])
    notes = [
        "arms: without the base, each the mean of its seeds that were asked. It takes three. The other set keeps its "
        "multiple choice.",
        f"p: two-sided; exact over all orders up to 11 arms, else by {DRAWS:,} random ones, seed 0. Arms that share "
        "code and a prior are no independent sample: read p as a description.",
    ]
    notes += [] if data.kinds() else [NO_KIND]
    notes += lost
    if not transfer:
        notes.insert(0, f"no {NO_TRANSFER}: every set against every other.")
    if len(rows) == 1:
        notes = [f"there is nothing to rank but {', '.join(sets)}: --by cuts a set by an attribute of its questions."]
    return f"Does a set rank the arms as {transfer or 'another'} does? ({data.source})", rows, notes + data.notes


def composition_table(runs, data):
    """What a set is made of, what guessing earns on it, and how the runs do by kind of question."""
    rows, notes = [["set", "who", "all", "multiple choice", "less chance", "others", "bare letter"]], []
    for name, at in data.sets().items():
        some, rest = data.choice(at), data.choice(at, False)
        listed = [i for i in some if re.fullmatch(r"[1-9]\d*", str(data.items[i].get("options")))]
        sizes, golds, short = ([data.items[i].get(x, "") for i in listed] for x in ("options", "gold", "shortest"))
        sizes = [int(size) for size in sizes]
        chance = np.array([1 / k for k in sizes])
        guesses = {"always B": ["B"] * len(golds) if any(golds) else [], "shortest": short if any(short) else []}
        guesses = {
            who: np.array([x == y for x, y in zip(said, golds, strict=True)]) for who, said in guesses.items() if said
        }
        less = lambda mine, chance=chance: points((mine - chance).sum() / (1 - chance).sum()) if len(mine) else ""
        for who, mine in (guesses | {"random": chance}).items() if listed else ():
            rows.append([name, who, points(mine.sum() / len(at)), points(mine.mean()), less(mine), "0.0", ""])
        said = [item["bare_letter"].split() for item in (data.items[i] for i in some) if "bare_letter" in item]
        for who, seeds in data.lines(at):
            mine, names = data.right[seeds].mean(0), [data.runs[i]["name"] for i in seeds]
            whole, choice, others = (points(mine[part].mean()) if len(part) else "" for part in (at, some, rest))
            bare = mean(one in bare for one in names for bare in said)
            rows.append([name, who, whole, choice, less(mine[listed]), others, percent(bare)])
        if not data.kinds():
            continue
        counts = "".join(f", {sizes.count(k)} with {k} options" for k in sorted(set(sizes)))
        paper = " (paper: 69 % of old-319, with 4)" if name == "old" else ""
        notes.append(
            f"{name}: {len(some)} of {len(at)} are multiple choice, {percent(len(some) / len(at))} %{counts}{paper}."
        )
    notes += [] if data.kinds() else [NO_KIND]
    notes += [
        "always B, random, shortest (the first of the shortest option texts): guesses; the base is a run.",
        "less chance: sum (right - 1/k) / sum (1 - 1/k) over questions of k listed options, 0 for random guesses.",
    ]
    notes += ["paper: on the multiple choice of old-319 all its arms are near 25 %."] if data.ours() else []
    return f"Composition of the sets, % ({data.source})", rows, notes + data.notes


def audit_table(runs, data):
    """Two rule graders against the judge: do they err by arm, and does their ranking of the arms differ?"""
    header = ["set", "run", "judge", "strict", "strict - judge", "strict wronged", "strict favoured", "paper: bias"]
    rows, notes = [[*header, "lenient", "lenient - judge", "lenient wronged", "lenient favoured", "unparsed"]], []
    graded = {"strict": by_rule(data, strict), "lenient": by_rule(data, lenient)}
    silent = by_rule(data, unparsed)
    for name, at in data.sets().items():
        for who, seeds in data.lines(at):
            judge, count = data.right[seeds][:, at], lambda x: f"{round(x.sum(1).mean(), 1):g}"
            row = [name, who, points(judge.mean())]
            for label, right in graded.items():
                mine = right[seeds][:, at]
                row += [points(mine.mean()), f"{100 * (mine - judge).mean():+.1f}", count(judge > mine)]
                row += [count(mine > judge), *["up to 30"] * (label == "strict")]
            rows.append([*row, points(silent[seeds][:, at].mean())])
        for label, right in graded.items():
            scores = [data.score(at, which, base=False) for which in (right, data.right)]
            rule, judge = ({arm: round(x, 12) for arm, x in score.items() if not math.isnan(x)} for score in scores)
            pairs = list(itertools.combinations(judge, 2))
            flips = sum((judge[x] - judge[y]) * (rule[x] - rule[y]) < 0 for x, y in pairs)
            if pairs:
                best, worst = ([end(score, key=score.get) for score in (rule, judge)] for end in (max, min))
                notes.append(
                    f"{name}, {label} against judge: {flips} of {len(pairs)} pairs of arms change order; first "
                    f"{best[0]} (judge: {best[1]}), last {worst[0]} (judge: {worst[1]})."
                )
    notes += [
        "strict: the <answer> tag, else the whole output, is the gold letter or the reference to the sign; lenient: "
        "the training reward's grader. wronged: right by the judge alone; favoured: by the rule alone; of a mean, a "
        "seed. Pairs of arms are without the base, each the mean of its seeds.",
        "paper: a heuristic extractor penalised arms by up to 30 points, unequally, and turned the ranking round.",
    ]
    if data.source.startswith("rule"):
        notes.append("the judge here is the lenient rule itself: these two agree by construction.")
    return f"Rule graders against the judge, % and points ({data.source})", rows, notes + data.notes


def hacking_table(runs, data):
    """Other explanations of a gain: guessing, format, length, options by place, answers without looking, copying."""
    header = ["set", "run", "format", "parsed", "accuracy", "given parsed", "characters", "letters said / gold, %"]
    rows = [[*header, "options in place", "options shuffled", "image seen", "image blank"]]
    folder, again = data.runs[0]["dir"].parent / "probes", {}
    if any(folder.glob("*/config.json")):
        probes = judged(load(folder), data.verdicts)
        check_terms([*data.runs, *probes.runs])
        for run, right in zip(probes.runs, probes.right, strict=True):
            if Path(run["args"]["model"]).resolve() != (folder.parent / run["name"] / "checkpoint").resolve():
                raise SystemExit(
                    f"{run['dir']} is of {run['args']['model']}, not of {run['name']}'s checkpoint: delete it."
                )
            again |= {(run["name"], x["set"], x["id"]): y for x, y in zip(probes.items, right, strict=True)}
    silent = by_rule(data, unparsed)
    for (name, at), (r, run) in itertools.product(data.sets().items(), enumerate(data.runs)):
        said, right, heard = data.output[r], data.right[r], at[silent[r, at] == 0]
        if name == "combined" or None in said[at]:
            continue
        row = [name, run["name"], percent(mean(bool(re.search("<answer>.*?</answer>", x, re.S)) for x in said[at]))]
        row += [percent(len(heard) / len(at)), points(right[at].mean()), percent(mean(right[heard]))]
        listed = [i for i in at if data.items[i].get("choices")]
        options = {i: data.items[i]["choices"] for i in listed}
        golds = [pick(data.items[i]["answer"], options[i]) for i in listed]
        named = [pick(extract(said[i], options[i]), options[i]) for i in heard if i in options]
        share = lambda values, k: round(100 * values.count(k) / max(1, len(values)))
        names = letters(max(options.values(), key=len, default=[]))
        row += [round(mean(map(len, said[at])))]
        row += [" ".join(f"{x} {share(named, k)}/{share(golds, k)}" for k, x in enumerate(names))]
        for probe in PROBES:
            copies = {i: again.get((run["name"], f"{name}-{probe}", data.items[i]["id"]), math.nan) for i in at}
            copies = {i: x for i, x in copies.items() if not math.isnan(x)}
            none = "not run" if listed or probe == "blank" else "no options"
            row += [percent(mean(right[[*copies]])), percent(mean(copies.values()))] if copies else ["", none]
        rows.append(row)
    notes = [
        "given parsed: accuracy among outputs in which the rule grader finds an answer; letters said: among those.",
        "options shuffled, image blank: the same questions with their options in another order, or on a grey image; "
        "left of each, just those as they were. What shuffling takes away was a habit of letters, what blanking leaves "
        "was not read off the image. `python -m data.probes.prepare SET.jsonl` makes the copies and says what is next.",
        "paper: tested and refuted guessing and format as explanations of the main gain; its figures are not known.",
    ]
    return f"Other explanations of a gain ({data.source})", rows, notes + copied(data.runs) + data.notes


def copied(runs):
    """Of the rollouts on record that were shown a hint, those whose answer stands in it -> a note a run."""
    notes, right = [], lambda rows: sum(row["reward"] > 0 for row in rows)
    for run in runs:
        path = run["dir"] / "rollouts.jsonl"
        shown = [row for row in (read_jsonl(path) if path.exists() else []) if row["forced"]]
        found = [(row, (extract(row["sampled"], []) or "").strip()) for row in shown]
        same = [row for row, x in found if x and re.search(rf"(?<!\w){re.escape(x)}(?!\w)", row["forced"])]
        if shown:
            notes.append(
                f"{run['name']}: of {len(shown)} rollouts on record that began with a hint {right(shown)} are right; "
                f"in {len(same)} the answer stands in the hint, of these {right(same)} are right."
            )
    return notes


def grid(rows):
    """The lines of a Markdown table, its first row the header, padded so that it reads as well in a terminal."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def markdown(title, rows, notes):
    """A table as Markdown, less the columns that are empty throughout."""
    filled = [cells for cells in zip(*rows, strict=True) if len(rows) == 1 or any(str(x) for x in cells[1:])]
    rows = [*zip(*filled, strict=True)]
    return "\n".join([f"### {title}", "", *grid(rows), "", *(f"- {note}" for note in notes)]) + "\n"


# --- figures ----------------------------------------------------------------------------------------------------------

COLUMN = 3.4  # inches: one column of a paper
STYLE = {  # a colour a family of priors
    "base": "0.6 :", "grpo": "0.2 -", "hintonly": "tab:blue -", "uft001": "tab:blue --", "uft002": "tab:blue :",
    "opd": "tab:green -", "opd-annealed": "tab:green --", "opd-gated": "tab:green :", "reopd": "tab:green -.",
    "vapo": "tab:red -", "vapohl": "tab:red --", "stack": "tab:purple -",
}  # fmt: skip


def style(arm):
    return dict(zip(("color", "linestyle"), STYLE.get(arm, "0.4 -").split(), strict=True))


def figures(runs, data, folder):
    """Draws what can be drawn into `folder`: PNG of one column's width at 300 dots an inch."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("Figures need matplotlib, and nothing else here does: run `pip install matplotlib`.")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    plt.rcParams |= {"font.size": 8, "savefig.dpi": 300, "figure.constrained_layout.use": True, "lines.linewidth": 1.2}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in dict(dynamics=draw_dynamics, transfer=draw_transfer, calibration=draw_calibration).items():
        drawn = draw(plt, runs, data)
        if isinstance(drawn, str):
            print(f"{folder / name}.png is not drawn: {drawn}.")
            continue
        drawn.savefig(path := folder / f"{name}.png")
        plt.close(drawn)
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True, dpi=(300, 300))  # a third of the size
        print(path)


def draw_dynamics(plt, runs, data):
    """Reward, all-wrong groups and length over the steps: a moving mean, with several seeds their mean and span."""
    arms = {}
    for run in runs:
        if len(run["metrics"]) >= WINDOW:
            arms.setdefault(run["arm"], []).append(run["metrics"])
    if not arms:
        return f"no run has {WINDOW} steps on record"
    figure, axes = plt.subplots(3, 1, figsize=(COLUMN, 5.6), sharex=True)
    panels = {"reward": "rollouts right, %", "all_wrong": "groups all wrong, %", "length": "length, tokens"}
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for arm, seeds in arms.items():
            steps = np.arange(WINDOW, min(map(len, seeds)) + 1)
            smooth = lambda values: np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid")
            lines = np.array([smooth([row[name] for row in rows[: steps[-1]]]) for rows in seeds])
            lines *= 1 if name == "length" else 100
            axis.plot(steps, lines.mean(0), label=arm, **style(arm))
            if len(lines) > 1:
                axis.fill_between(steps, lines.min(0), lines.max(0), color=style(arm)["color"], alpha=0.15, lw=0)
        axis.set_ylabel(label)
    axes[-1].set_xlabel(f"step (mean of the last {WINDOW})")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_transfer(plt, runs, data):
    """Accuracy of every arm on `old` and on `sparse` against that on the transfer set, with one standard error each,
    by program where questions share one."""
    sets, arms, panels = data.sets(), data.arms(), {}
    for name in ("old", "sparse"):
        pair = [sets.get(x, []) for x in (name, data.transfer())]
        scores = [data.score(at) for at in pair]
        spots = {arm: np.array([score[arm] for score in scores]) for arm in arms}
        spots = {arm: spot for arm, spot in spots.items() if np.isfinite(spot).all()}
        panels |= {name: (pair, spots)} if spots.keys() - {"base"} else {}
    if not panels or len(arms) < 2:
        return "it takes two arms, one of them trained and asked a transfer set, and old or sparse"
    figure, axes = plt.subplots(len(panels), 1, figsize=(COLUMN, 2.8 * len(panels)), squeeze=False)
    marked = []
    for axis, (name, (pair, spots)) in zip(axes[:, 0], panels.items(), strict=True):
        for arm, spot in spots.items():
            x, y = (100 * data.error(data.asked(arms[arm], at), at) for at in pair)
            look = dict(color=style(arm)["color"], ecolor="0.85", elinewidth=0.6)
            axis.errorbar(*100 * spot, y, x, fmt="o", ms=4, **look)
        axis.set(xlabel=f"{name}, % right", ylabel=f"{data.transfer()}, % right")
        x, y = np.array([spot for arm, spot in spots.items() if arm != "base"]).T
        if len(x) > 2 and not math.isnan(rho := spearman(x, y)):
            axis.set_title(f"Spearman {rho:+.2f} over {len(x)} arms, p = {p_value(permutation_p(x, y)[0])}", fontsize=8)
        marked.append((axis, {arm: 100 * spot for arm, spot in spots.items()}))
    figure.suptitle(data.source, fontsize=6)
    figure.canvas.draw()  # now the axes are where they stay
    for axis, spots in marked:
        label_points(axis, spots)
    return figure


def label_points(axis, spots):
    """Writes each name by its point, at the nearest of the places tried that covers no point and no other name."""
    taken, dots, radius = [], axis.transData.transform([*spots.values()]), 2.5 * axis.figure.dpi / 72  # of a dot
    places = [(reach, math.radians(turn)) for reach in (6, 10, 15, 21, 28, 36, 45) for turn in range(0, 360, 30)]
    for name, spot in spots.items():
        look, clash = dict(textcoords="offset points", va="center", color=style(name)["color"]), {}
        text = axis.annotate(name, spot, (0, 0), **look)
        text.set_in_layout(False)
        put = lambda reach, turn, text=text: text.set(
            position=(reach * math.cos(turn), reach * math.sin(turn)),
            ha=("center", "left", "right")[round(1.4 * math.cos(turn))],
        )
        for place_ in places:
            put(*place_)
            box = text.get_window_extent()
            outside = sum(not axis.bbox.contains(*corner) for corner in (box.min, box.max))
            on_dots = sum(box.padded(radius).contains(*dot) for dot in dots)
            clash[place_] = outside + sum(box.overlaps(x) for x in taken) + on_dots
            if not clash[place_]:
                break
        best = min(clash, key=clash.get)
        put(*best)
        taken.append(text.get_window_extent())
        if best[0] > 10:
            line = dict(arrowstyle="-", lw=0.4, color="0.6")
            axis.annotate("", spot, text.get_position(), textcoords="offset points", arrowprops=line).set_in_layout(
                False
            )


def draw_calibration(plt, runs, data):
    """What critics expected against what came, by bins of V, over all of training and all seeds of an arm."""
    arms = {}
    for run in runs:
        if steps := column(run["metrics"], "calibration"):  # (steps, bins, 3) sum of V, sum of returns, count
            arms[run["arm"]] = arms.get(run["arm"], 0) + np.sum(steps, axis=0)
    if not arms:
        return "no run has a critic (`calibration` in metrics.jsonl)"
    figure, axis = plt.subplots(figsize=(COLUMN, 2.8))
    top = max((bins[bins[:, 2] > 0, :2] / bins[bins[:, 2] > 0, 2:]).max() for bins in arms.values())
    axis.plot([0, top], [0, top], color="0.85", lw=0.8)  # V is the mean return
    for arm, bins in arms.items():
        value, gain, count = bins[bins[:, 2] > 0].T
        label = f"{arm}: off by {abs(value - gain).sum() / count.sum():.3f}"  # the mean gap over tokens, bin by bin
        axis.plot(value / count, gain / count, marker="o", ms=3, label=label, **style(arm))
    axis.set(xlabel="value expected", ylabel="return that came")
    axis.legend()
    return figure


# --- the command ------------------------------------------------------------------------------------------------------

OF_TRAINING = {"sparsity": sparsity_table, "dynamics": dynamics_table, "gates": gates_table}
OF_OUTCOMES = {"main": main_table, "pairs": pairs_table, "methods": methods_table, "reversal": reversal_table,
               "composition": composition_table}  # fmt: skip
TABLES = OF_TRAINING | OF_OUTCOMES | {"audit": audit_table, "hacking": hacking_table}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="*", help=f"{', '.join(TABLES)}; none is all")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of run folders")
    parser.add_argument("--verdicts", type=file_path, help=f"{VERDICTS} in that folder, unless given")
    parser.add_argument("--outcomes", type=file_path, metavar="FILE", help="a CSV of outcomes, instead of runs")
    parser.add_argument("--arms", default="", metavar="A,B,...", help="those of its columns that are arms")
    parser.add_argument("--by", metavar="ATTRIBUTE", help="slice the questions by this, not by evaluation set")
    parser.add_argument("--save", type=file_path, metavar="FILE", help="write the outcomes as a CSV")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw into this folder")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.table if name not in TABLES]:
        raise SystemExit(f"there is no table {unknown[0]}: choose from {', '.join(TABLES)}.")
    if args.outcomes and (away := [name for name in args.table if name not in OF_OUTCOMES]):
        raise SystemExit(f"the table {away[0]} needs run folders, not outcomes alone: leave --outcomes out.")
    arms = [name.strip() for name in args.arms.split(",") if name.strip()]
    if arms and not args.outcomes:
        raise SystemExit("--arms names columns of an outcomes file: give --outcomes as well.")
    runs, data, known = [] if args.outcomes else load(args.runs), None, TABLES
    if not args.outcomes and (args.runs / "outcomes.csv").exists():
        args.outcomes, known = args.runs / "outcomes.csv", OF_TRAINING | OF_OUTCOMES
        if away := [name for name in args.table if name not in known]:
            raise SystemExit(f"the table {away[0]} needs outputs, and {args.runs} keeps none: name run folders.")
    every = [] if args.save or args.figures else known if runs else OF_OUTCOMES
    for name in [*(args.table or every), *["save"] * bool(args.save), *["figures"] * bool(args.figures)]:
        if data is None and name not in OF_TRAINING:
            verdicts = args.verdicts or args.runs / VERDICTS
            data = read_outcomes(args.outcomes, arms) if args.outcomes else judged(runs, verdicts)
            if args.by:
                slice_by(data, args.by)
        if name == "save":
            write_outcomes(data, args.save)
        elif name == "figures":
            figures(runs, data, args.figures)
        else:
            print(markdown(*TABLES[name](runs, data)))


if __name__ == "__main__":
    main()
