"""The paper's claims put to the test on toy worlds: what `make replicate` has run, kept small, told in tables.

python -m data.toy.replicate --runs runs/replicate     judge what is finished there, keep it in results/toy, then:
python -m data.toy.replicate                           tables, figures and results/toy/README.md, from results/toy alone

Of each world it keeps outcomes.csv (a row a question, a column of 0 and 1 a run), metrics.csv (a row a run and step),
outputs.csv (counts over the outputs of a run, set and kind), steps.csv (hard steps by whose bad habit their card is),
pretraining.csv (a row a critic and step of value pretraining), runs.jsonl (settings, versions, machine, gates, critics'
calibration) and precondition.json (rollouts on the pool before training); in others/ the same of the runs that are none
of the eleven arms. What it kept of other runs before stays, if their data are the same, so that arms and seeds can be
run in any order and place. `python analyze.py --runs results/toy/world0` reads these, too.

Rules of the verdicts, fixed before the final runs. A claim is a statistic with one value a seed, contrasts are paired
by seed; low and high are the ends of Student's 95 % interval over seeds (of the first claim, over rows of the pool).

  above x      holds if low > x, else it does not hold: what these seeds do not show is not said to hold
  below x      holds if high < x, else it does not hold
  nothing      "adds nothing" means less than 5 points: it holds if high < 5 and does not if low > 0; between them the
               interval is too wide to tell nothing from something, and the claim cannot be tested here

Nor can it with fewer than two seeds of all arms that it takes, or where what it explains did not happen. 5 points are
a fraction of what works here, and about the paper's whole range on transfer.
"""

import argparse
import csv
import importlib.util
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import analyze  # isort: skip  # first: it says in a sentence which package is missing
import numpy as np
from scipy.stats import t

import judge
from analyze import DELIVERED, FIVE, OTHERS, PAPER_DYNAMATH, PAPER_RHO, SIX, WINDOW
from data.toy.world import chain_of, habits, hard_steps

METRICS = ("reward", "all_wrong", "mixed", "unparsed", "truncated", "length", "entropy", "grad_norm", "teacher_kl",
           "explained_variance", "variance", "value_error", "eval_sparse", "eval_cross")  # fmt: skip
EXPLAINED = ("explained_variance", "variance")
FACTS = ("commit", "sha256", "python", "torch", "transformers", "device", "started", "ended")
COUNTS = ("n", "right", "strict", "unparsed", "tagged", "bare", "worked", "worked_right", "characters")
ELEVEN = [arm for arm in PAPER_DYNAMATH if arm != "base"]
FORMS = dict(tagged="<answer>.*?</answer>", bare=r"^\s*<answer>\s*[A-Z]\s*</answer>\s*$", worked="=")  # of an output
HABITS = {(True, True): "both", (True, False): "student", (False, True): "teacher", (False, False): "none"}
UNTRAINED = ("base", "teacher")  # without steps, a seed changes nothing: they are run once
READINGS = {"uft01": "hintonly", "uft02": "hintonly", "opd-group": "opd-gated", "reopd-staircase": "reopd",
            "vapo-mc": "vapo", "vapohl-mc": "vapohl", "vapo-fast": "vapo", "vapohl-fast": "vapohl"}  # fmt: skip
HOLDS, FAILS, UNTESTED = "holds", "does not hold", "cannot be tested here"
RESULTS = Path("results/toy")
BEGIN, END = "<!-- written by python -m data.toy.replicate -->", "<!-- end -->"


# --- from run folders to results/ -------------------------------------------------------------------------------------


def keep(runs, out):
    """Judge the finished runs of one world by rule, and write what `out` keeps of them -> names of the unfinished."""
    begun, done = (sorted(path.parent for path in runs.glob(f"*/{x}")) for x in ("config.json", "outputs.jsonl"))
    left = [str(path) for path in begun if path not in done]
    if not done:
        return left
    judge.main([*map(str, done), "--judge", "rule", "--verdicts", str(runs / "verdicts.jsonl")])
    data = analyze.judged(analyze.load(runs), runs / "verdicts.jsonl")
    strict, silent = (analyze.by_rule(data, rule) for rule in (analyze.strict, analyze.unparsed))
    known = [run["arm"] in PAPER_DYNAMATH for run in data.runs]
    for folder, mine in ((out, np.flatnonzero(known)), (out / "others", np.flatnonzero(np.logical_not(known)))):
        if len(mine):
            part = replace(data, runs=[data.runs[i] for i in mine], right=data.right[mine], output=data.output[mine])
            add(part, strict[mine], silent[mine], folder)
    pool = Path(data.runs[0]["args"]["pool"])
    told = {"precondition.json": pool.with_suffix(".precondition.json")}
    if pool.parent != Path("data/toy"):  # a world that is not shipped
        told["world.md"] = pool.with_name("readme.md")
    for name, path in told.items():
        if path.exists():
            (out / name).write_bytes(path.read_bytes())
    return left


def add(data, strict, silent, folder):
    """Write what is kept of these runs, beside what `folder` keeps of others."""
    folder.mkdir(parents=True, exist_ok=True)
    new = [facts(run) for run in data.runs]
    names, path = [run["name"] for run in new], folder / "runs.jsonl"
    old = [run for run in (judge.read_jsonl(path) if path.exists() else []) if run["name"] not in names]
    for run, key in itertools.product(old, new[0]["sha256"]):
        if run["sha256"].get(key, "") not in ("", new[0]["sha256"][key]):
            raise SystemExit(f"{path} keeps {run['name']}, for which {key} was another file than for {names[0]}: "
                             f"remove {folder}, or name another folder with --results.")  # fmt: skip
    runs = sorted(old + new, key=lambda run: (analyze.place(run), run["arm"], run["seed"]))
    ranks = {run["name"]: rank for rank, run in enumerate(runs)}

    def write(name, header, rows):
        kept = [[row.get(k, "") for k in header] for row in read_csv(folder / name) if row["run"] not in names]
        write_csv(folder / name, header, sorted([*kept, *rows], key=lambda row: ranks[row[0]]))  # stable

    before = {(row["set"], row["id"]): row for row in read_csv(path.with_name("outcomes.csv"))}
    analyze.write_outcomes(data, path.with_name("outcomes.csv"))
    if old:  # a question stays that all runs were asked
        rows = [row for row in read_csv(path.with_name("outcomes.csv")) if (row["set"], row["id"]) in before]
        for row in rows:
            was = before[row["set"], row["id"]]
            row |= {run["name"]: was[run["name"]] for run in old}
            bare = {*was["bare_letter"].split()} - {*names} | {*row["bare_letter"].split()}
            row["bare_letter"] = "".join(f" {name}" for name in ranks if name in bare)
        header = [*(k for k in (rows or [{}])[0] if k not in ranks), *ranks]
        write_csv(path.with_name("outcomes.csv"), header, ([row[k] for k in header] for row in rows))
    write("outputs.csv", ("run", "set", "kind", *COUNTS), count(data, strict, silent))
    write("steps.csv", ("run", "set", "habit", "steps", "right"), count_steps(data))
    for name, fields in (("metrics", METRICS), ("pretraining", (*EXPLAINED, "value_error"))):
        rows = ([run["name"], row["step"], *(short(varied(row).get(k)) for k in fields)]
                for run in data.runs for row in analyze.read_metrics(run["dir"] / f"{name}.jsonl"))  # fmt: skip
        write(f"{name}.csv", ("run", "step", *fields), rows)
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def varied(row):
    """A line of a critic arm's log, and the `variance` of its returns, 0 or 1, summed over tokens: n p (1 - p)."""
    if "calibration" not in row:
        return row
    _, right, n = np.sum(row["calibration"], axis=0)
    return row | {"variance": right - right * right / n}


def pooled(rows):
    """Explained variance within a step: the mean over these steps, each counting by its `variance`, none without."""
    told = [[row[k] for k in EXPLAINED] for row in rows if "explained_variance" in row]
    if not told:
        return math.nan
    explained, variance = np.transpose(told)
    return np.average(explained, weights=variance)


def read_csv(path):
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def short(x):
    """A number of the log in six digits, which is more than tables show; empty where there is none."""
    return "" if x is None else f"{x:.6g}"


def facts(run):
    """What of a run is neither outcome nor curve: its settings, what it ran on, its gates, its critic's calibration."""
    config = json.loads((run["dir"] / "config.json").read_text())
    kept = {k: run[k] for k in ("name", "arm", "seed", "args", "gates")} | {k: config[k] for k in FACTS if k in config}
    if steps := analyze.column(run["metrics"], "calibration"):  # (steps, bins, 3)
        kept["calibration"] = np.sum(steps, axis=0).round(3).tolist()
    return kept


def count(data, strict, silent):
    """Rows of COUNTS, one for each run, set and kind of question. worked: a step is shown; bare: a letter, no more."""
    for (r, run), (name, at) in itertools.product(enumerate(data.runs), data.sets().items()):
        for kind in ("choice", "free") if name != "combined" else ():
            if some := [i for i in data.choice(at, kind == "choice") if data.output[r, i] is not None]:
                said, right = data.output[r, some], data.right[r, some]
                shares = [right, strict[r, some], silent[r, some]]
                shares += [[bool(re.search(form, x, re.S)) for x in said] for form in FORMS.values()]
                shares += [right * shares[-1], [len(x) for x in said]]
                yield [run["name"], name, kind, len(some), *(int(np.sum(x)) for x in shares)]


def count_steps(data):
    """Rows of run, set, whose bad habit the card is, hard steps taken on course, those of them that are right."""
    for run, outputs in zip(data.runs, data.output, strict=True):
        name, found = Path(run["args"]["pool"]).parent.name, {}
        seed = int(name[4:]) if re.fullmatch(r"seed\d+", name) else 0
        bad = [habits(model, seed, name == "kin")[1] for model in ("student", "teacher")]
        for item, output in zip(data.items, outputs, strict=True):
            if output is not None and "draw" in item:
                for card, right in hard_steps(output, chain_of(item["draw"])):
                    steps = found.setdefault((item["set"], HABITS[card in bad[0], card in bad[1]]), [])
                    steps.append(right)
        for (part, habit), steps in sorted(found.items()):
            yield [run["name"], part, habit, len(steps), sum(steps)]


# --- what results/ keeps of a world -----------------------------------------------------------------------------------


class World:
    """A world's runs as results/ keeps them: `acc` and `said` know arms by seed, the untrained by none."""

    def __init__(self, folder):
        self.name, self.runs, self.share, self.counts, self.steps = folder.name, [], {}, {}, {}
        self.log, self.before = {}, {}  # in training, and in value pretraining
        pool = folder / "precondition.json"
        self.shown = json.loads(pool.read_text())["shown"] if pool.exists() else {}
        for part in [path.parent for path in (folder / "runs.jsonl", folder / "others/runs.jsonl") if path.exists()]:
            self.runs += analyze.load(part)
            data = analyze.read_outcomes(part / "outcomes.csv")
            sets = data.sets()
            sets |= {"old choice": data.choice(sets["old"]), "old open": data.choice(sets["old"], False)}
            for run, right in zip(data.runs, data.right, strict=True):
                self.share[run["arm"], run["seed"]] = {name: right[at].mean() for name, at in sets.items() if len(at)}
            for row in read_csv(part / "outputs.csv"):
                counts = self.counts.setdefault((row["run"], row["set"]), {})
                counts[row["kind"]] = Counter({k: int(row[k]) for k in COUNTS})
            for row in read_csv(part / "steps.csv"):
                self.steps[row["run"], row["set"], row["habit"]] = 100 * int(row["right"]) / int(row["steps"])
            runs = {run["name"]: (run["arm"], run["seed"]) for run in data.runs}
            for row in read_csv(part / "pretraining.csv"):
                told = {k: float(row[k]) for k in EXPLAINED if row[k]}
                self.before.setdefault(runs[row["run"]], []).append(told)
        self.log = {(run["arm"], run["seed"]): run["metrics"] for run in self.runs}

    def seeds(self, arms):
        """Seeds of which there are runs of all these arms, one of which at least is trained."""
        seeds = sorted({seed for arm, seed in self.share if arm not in UNTRAINED})
        return [s for s in seeds if all((arm, 0 if arm in UNTRAINED else s) in self.share for arm in arms)]

    def acc(self, arms, seed, name):
        """Accuracy in % of an arm, or the mean of several, on a set; nan where it was not asked."""
        arms = [arms] if isinstance(arms, str) else arms
        return 100 * np.mean([self.share[arm, 0 if arm in UNTRAINED else seed].get(name, math.nan) for arm in arms])

    def said(self, arm, seed, name, kind=None):
        """The COUNTS of an arm's outputs on a set, or on one kind of its questions."""
        kinds = self.counts[f"{arm}-s{0 if arm in UNTRAINED else seed}", name]
        return kinds.get(kind, Counter()) if kind else sum(kinds.values(), Counter())

    def logged(self, arm, seed, field, steps):
        """Mean of what was logged over a slice of the steps; nan where it was not."""
        values = analyze.column(self.log[arm, seed][steps], field)
        return np.mean(values) if values else math.nan

    def fifth(self, arm, seed, field, last):
        n = max(1, len(self.log[arm, seed]) // 5)
        return self.logged(arm, seed, field, slice(-n, None) if last else slice(0, n))

    def better(self, arms):
        """The one of these arms that is better on transfer, over the seeds that they share."""
        return max(arms, key=lambda arm: sum(self.acc(arm, s, "cross") for s in self.seeds(arms)))

    def rho(self, seed, name):
        """Spearman's rho of the eleven arms between a set and the transfer set; nan where one was not asked it."""
        if any(math.isnan(self.acc(arm, seed, name)) for arm in ELEVEN):
            return math.nan
        return analyze.spearman(*([self.acc(arm, seed, x) for arm in ELEVEN] for x in (name, "cross")))


# --- claims -----------------------------------------------------------------------------------------------------------


@dataclass
class Claim:
    text: str
    paper: str
    rule: tuple  # (above | below | nothing, bound)
    arms: list  # that it takes
    value: object  # (world, seed) -> the statistic
    form: str = "{:+.1f}"  # points; of a level, no sign
    after: str = ""  # the claim without which this one has nothing to explain


def less(one, two, name):
    """One arm, or the mean of several, less another on a set, in points."""
    return lambda w, s: w.acc(one, s, name) - w.acc(two, s, name)


def apart(name):
    """The lowest of the delivered arms less the highest of the others, in points."""
    return lambda w, s: min(w.acc(arm, s, name) for arm in DELIVERED) - max(w.acc(arm, s, name) for arm in OTHERS)


def gain(share):
    """What the delivered arms have more than grpo of a share of their transfer outputs, in points."""
    of = lambda w, arm, s: 100 * share(w.said(arm, s, "cross"))
    return lambda w, s: np.mean([of(w, arm, s) for arm in DELIVERED]) - of(w, "grpo", s)


def bias(w, s):
    """How differently the strict rule errs by arm on old: the largest strict - judge less the smallest, in points."""
    counts = [w.said(arm, s, "old") for arm in ELEVEN]
    return 100 * np.ptp([(x["strict"] - x["right"]) / x["n"] for x in counts])


ABOVE, BELOW, NOTHING, CORR = ("above", 0), ("below", 0), ("nothing", 5), "{:+.2f}"
UNLOCKS = "half a solution unlocks: right with it, less without"
REVERSED = "`old` ranks the arms in reverse of transfer: rho"
CLAIMS = [
    Claim(UNLOCKS, "7.2 to 34.4", ABOVE, [], None),
    Claim("grpo's groups start all wrong, %, first steps", "85-97", ("above", 85), ["grpo"],
          lambda w, s: 100 * w.logged("grpo", s, "all_wrong", slice(WINDOW)), "{:.1f}"),
    Claim("grpo stalls: groups all wrong, %, last fifth of the steps", "will stall", ("above", 85), ["grpo"],
          lambda w, s: 100 * w.fifth("grpo", s, "all_wrong", True), "{:.1f}"),
    Claim("arms whose prior is delivered lie above the others on transfer: lowest less highest", "30.6 to 29.1",
          ABOVE, ELEVEN, apart("cross")),
    Claim("and on the combined in-domain sets", "no overlap", ABOVE, ELEVEN, apart("combined")),
    Claim("hint-guided exploration drives the gain: hintonly - grpo, transfer", f"{SIX} to {FIVE}", ABOVE,
          ["hintonly", "grpo"], less("hintonly", "grpo", "cross")),
    Claim("UFT's likelihood term adds nothing: uft001 & uft002 - hintonly, transfer", "adds nothing", NOTHING,
          ["uft001", "uft002", "hintonly"], less(["uft001", "uft002"], "hintonly", "cross")),
    Claim("pure distillation is capped: opd - its teacher, sparse", "inherits the ceiling", NOTHING, ["opd", "teacher"],
          less("opd", "teacher", "sparse")),
    Claim("with a reward it is not: opd-annealed - the teacher, sparse", "can pass it", ABOVE,
          ["opd-annealed", "teacher"], less("opd-annealed", "teacher", "sparse")),
    Claim("annealed distillation helps: opd-annealed - grpo, transfer", f"{SIX} to {FIVE}", ABOVE,
          ["opd-annealed", "grpo"], less("opd-annealed", "grpo", "cross")),
    Claim("gated persistent distillation does not: opd-gated - grpo, transfer", "does not work", NOTHING,
          ["opd-gated", "grpo"], less("opd-gated", "grpo", "cross")),
    Claim("annealed beats gated: opd-annealed - opd-gated, transfer", f"{SIX} to {FIVE}", ABOVE,
          ["opd-annealed", "opd-gated"], less("opd-annealed", "opd-gated", "cross")),
    Claim("HL-Gauss for MSE: vapohl - vapo, combined", "+14.4", ABOVE, ["vapohl", "vapo"],
          less("vapohl", "vapo", "combined")),
    Claim("the same on transfer", f"{SIX} to {FIVE}", ABOVE, ["vapohl", "vapo"], less("vapohl", "vapo", "cross")),
    Claim("stacking adds nothing: stack - the better of hintonly and opd-annealed, transfer", "adds nothing", NOTHING,
          ["stack", "hintonly", "opd-annealed"],
          lambda w, s: less("stack", w.better(["hintonly", "opd-annealed"]), "cross")(w, s)),
    Claim(REVERSED, PAPER_RHO["old"], BELOW, ELEVEN, lambda w, s: w.rho(s, "old"), CORR),
    Claim("`worn`, which is `old` with multiple choice that nobody can read, ranks them in reverse: rho", "", BELOW,
          ELEVEN, lambda w, s: w.rho(s, "worn"), CORR),
    Claim("without multiple choice more than half of the reversal goes: rho of `old`'s open part less half of its own",
          "it goes", ABOVE, ELEVEN, lambda w, s: w.rho(s, "old open") - w.rho(s, "old") / 2, CORR, REVERSED),
    Claim("`sparse` predicts transfer: rho", PAPER_RHO["sparse"], ABOVE, ELEVEN, lambda w, s: w.rho(s, "sparse"), CORR),
    Claim("a rule grader errs by arm: strict rule - judge on `old`, spread over arms", "up to 30", ("above", 5), ELEVEN,
          bias),
    Claim("the gain is not guessing: right without work, delivered arms - grpo, transfer", "refuted", NOTHING,
          [*DELIVERED, "grpo"], gain(lambda x: (x["right"] - x["worked_right"]) / x["n"])),
    Claim("the gain is not format: right of what can be read, delivered arms - grpo, transfer", "refuted", ABOVE,
          [*DELIVERED, "grpo"], gain(lambda x: x["right"] / max(1, x["n"] - x["unparsed"]))),
]  # fmt: skip


def interval(values):
    """Mean of some values and half of Student's 95 % interval; nan where it takes more of them."""
    n = len(values)
    half = np.std(values, ddof=1) / n**0.5 * t.ppf(0.975, n - 1) if n > 1 else math.nan
    return np.mean(values) if n else math.nan, half


def verdict(rule, low, high):
    """What the docstring's rules say of an interval."""
    sense, bound = rule
    if math.isnan(low + high):
        return UNTESTED
    if sense == "nothing":
        return HOLDS if high < bound else FAILS if low > 0 else UNTESTED
    return HOLDS if (low > bound if sense == "above" else high < bound) else FAILS


def measure(claim, world):
    """-> (mean, half of its 95 % interval, "n seeds" or why not)."""
    if claim.text == UNLOCKS:
        if not (half := world.shown.get("0.5")):
            return math.nan, math.nan, "no precondition.json"
        return 100 * half["gain"], 196 * half["gain_error"], f"{half['rows']} rows"
    values = [x for x in (claim.value(world, s) for s in world.seeds(claim.arms)) if not math.isnan(x)]
    middle, half = interval(values)
    absent = [arm for arm in claim.arms if arm not in {arm for arm, _ in world.share}]
    return middle, half, f"not run: {' '.join(absent)}" if absent else f"{len(values)} seed{'s' * (len(values) != 1)}"


def cell(middle, half, form="{:+.1f}"):
    """mean [low, high], empty where there is none."""
    if math.isnan(middle):
        return ""
    ends = "" if math.isnan(half) else f" [{form.format(middle - half)}, {form.format(middle + half)}]"
    return form.format(middle) + ends


def claims_table(worlds, title="The paper's claims", of=()):
    """All claims, or those alone of which there is a value in one of the worlds `of`."""
    header = ["", "claim", "paper", "holds if", *itertools.chain(*([x.name, "verdict"] for x in worlds))]
    rows, found = [header], {}
    for number, claim in enumerate(CLAIMS, 1):
        (sense, bound), measured = claim.rule, [measure(claim, world) for world in worlds]
        if of and all(math.isnan(x[0]) for x, world in zip(measured, worlds, strict=True) if world in of):
            continue
        rows.append([number, claim.text, claim.paper, f"{'low >' if sense == 'above' else 'high <'} {bound}"])
        for world, (middle, half, over) in zip(worlds, measured, strict=True):
            said = verdict(claim.rule, middle - half, middle + half)
            said = UNTESTED if claim.after and found.get((world.name, claim.after)) != HOLDS else said
            found[world.name, claim.text] = said
            rows[-1] += [f"{cell(middle, half, claim.form)} ({over})".strip(), f"*{said}*"]
    notes = [
        "mean [low, high: 95 %], points unless it is a share or rho; rules: the docstring of data/toy/replicate.py. "
        "Student's intervals know no bounds: an end may lie past 100 % or 1.",
        f"delivered, by our reading: {', '.join(DELIVERED)}; the others: {', '.join(OTHERS)}. transfer: `cross`.",
        f"Of {len(CLAIMS)} intervals at 95 % one is expected to miss its value by chance.",
        f"2: the first {WINDOW} steps. 4, 5: the ends of two groups, which noise alone moves towards each other.",
        "7, 8, 11, 15, 21: between something (low > 0) and nothing (high < 5) is *cannot be tested here*. 18 explains "
        "16, and cannot be tested where that does not hold.",
        "20: the judge is a rule itself, the reward's own; strict takes what the <answer> tag holds to the letter. "
        "21: `cross` has no multiple choice, and a guess of three digits is hardly ever right.",
    ]
    return title, rows, notes[:1] if of else notes


def arms_table(world):
    """Accuracy, means of an arm's seeds with 95 % intervals over them, and what the log and the outputs say of it."""
    sets = ("sparse", "cross", "combined", "old", "old choice", "old open", "worn", "easy")
    sets = [name for name in sets if all(name in shares for shares in world.share.values())]
    rows = [["arm", "seeds", *sets, "bare letter", "all wrong, first fifth", "all wrong, last", "tokens", "V explains"]]
    rows[0] += ["paper: DynaMath", "on"]
    for arm in ("teacher", "base", *ELEVEN, *READINGS):
        if seeds := sorted(seed for one, seed in world.share if one == arm):
            cells = [spread([world.acc(arm, s, x) for s in seeds]) for x in sets]
            said = [world.said(arm, s, "old", "choice") for s in seeds]
            late = [("all_wrong", False), ("all_wrong", True), ("length", True)]
            late = [np.mean([world.fifth(arm, s, *x) for s in seeds]) for x in late]
            late[2] /= 100  # tokens, no share
            late.append(np.mean([pooled(world.log[arm, s][-(len(world.log[arm, s]) // 5) :]) for s in seeds]))
            bare = analyze.mean(x["bare"] / x["n"] for x in said if x["n"])
            rows.append([arm, len(seeds), *cells, analyze.percent(bare), *map(analyze.points, late)])
            on = Counter(run.get("device", "").removeprefix("NVIDIA ") for run in world.runs if run["arm"] == arm)
            on = ", ".join(f"{device} {n}" if len(on) > 1 else device for device, n in on.items())
            rows[-1] += [PAPER_DYNAMATH.get(arm, ""), on]
    notes = [
        "+-: half of Student's 95 % interval over seeds. bare letter: of the answers to multiple choice.",
        "tokens of a rollout, V explains (the critic, of the variance of returns): the last fifth of the steps.",
        "on: a CPU computes in fp32, a GPU in bf16 under fp32 master weights.",
    ]
    return f"{world.name}: accuracy and training, %", rows, notes


def steps_table(world):
    """What an arm has unlearnt: hard steps that are right, by whose bad habit their card is, over an arm's seeds."""
    sets, rows = ("sparse", "cross"), [["arm", "seeds"]]
    rows[0] += [f"{name}: {habit}" for name in sets for habit in ("student", "both", "teacher", "none")]
    for arm in ("teacher", "base", *ELEVEN, *READINGS):
        if seeds := sorted(seed for one, seed in world.share if one == arm):
            found = [[world.steps.get((f"{arm}-s{s}", *x.split(": ")), math.nan) for s in seeds] for x in rows[0][2:]]
            rows.append([arm, len(seeds), *map(spread, found)])
    note = "Hard steps after right ones alone, greedy. student, both, teacher, none: has a bad habit with the card."
    return f"{world.name}: hard steps done right, %", rows, [note]


def critics_table(world):
    """How much of the variance of returns critics explain as they learn, HL-Gauss beside MSE by seed."""
    arms, rows = ("vapo", "vapohl"), [["steps", "vapo", "vapohl", "vapohl - vapo"]]
    seeds = [s for s in world.seeds(arms) if all((arm, s) in world.before for arm in arms)]
    for name, of in (("value pretraining", world.before), ("training", world.log)):
        n = min((len(of[arm, s]) for arm in arms for s in seeds), default=0)
        for k in range(4 if n else 0):
            part = slice(k * n // 4, (k + 1) * n // 4)
            both = [[100 * pooled(of[arm, s][part]) for s in seeds] for arm in arms]
            if np.isfinite(both).any():
                gap = cell(*interval(np.subtract(both[1], both[0])))
                rows.append([f"{name}, {part.start + 1} to {part.stop}", *map(spread, both), gap])
    notes = ["Of returns not trained on yet, 1 - Var(R - V) / Var(R) within a step: the mean over the steps that have "
             "right answers, weighted by Var(R). What V errs in the others, or from step to step, does not count.",
             f"{len(seeds)} seeds; the same rollouts for both critics in value pretraining."]  # fmt: skip
    return f"{world.name}: what critics explain, %", rows, notes


def spread(values):
    """Accuracies of an arm's seeds in % -> mean +- half of the interval."""
    return analyze.seed_mean(np.array(values) / 100)


def readings_table(world):
    """Other readings of three arms and settings of the critics beside what is in the tables, paired by seed."""
    rows = [["arm", "beside", "seeds", "sparse", "sparse: difference", "cross", "cross: difference"]]
    for arm, other in READINGS.items():
        if seeds := world.seeds([arm, other]):
            rows.append([arm, other, len(seeds)])
            for name in ("sparse", "cross"):
                gaps = [less(arm, other, name)(world, s) for s in seeds]
                rows[-1] += [spread([world.acc(arm, s, name) for s in seeds]), cell(*interval(gaps))]
    notes = [
        "uft01, uft02: coefficients 0.01 and 0.02; opd-group: --gate group; reopd-staircase: --replay staircase.",
        "mc: --lambda-floor 1, so that advantages are return - V; fast: --critic-lr 1e-3, thrice the default.",
    ]
    return f"{world.name}: other readings", rows, notes


def ran(world):
    """What a world's runs ran on, when and for how long, as they recorded it themselves -> a line. A run that was
    killed counts from where it was resumed."""
    told = lambda field: ", ".join(sorted({str(run[field]) for run in world.runs if run.get(field)})) or "not recorded"
    timed = [run for run in world.runs if "ended" in run]
    spans = sorted([datetime.fromisoformat(run[end]).timestamp() for end in ("started", "ended")] for run in timed)
    busy = until = 0.0
    for start, end in spans:  # their union: pauses between calls do not count
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    most = max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)
    each = np.mean([end - start for start, end in spans]) / 60 if spans else math.nan
    days = sorted(run[end][:10] for run in timed for end in ("started", "ended")) or ["no date"]
    steps = sorted({run["args"]["steps"] for run in world.runs} - {0})
    return (
        f"{world.name}: {len(world.runs)} runs of {' or '.join(map(str, steps))} steps on {told('device')}, "
        f"{' to '.join(sorted({days[0], days[-1]}))}: {busy / 60:.0f} minutes in which any ran, {most} at a time at "
        f"most, {each:.1f} minutes a run; torch {told('torch')}, transformers {told('transformers')}, Python "
        f"{told('python')}, commit {re.sub('(?<=[0-9a-f]{12})[0-9a-f]+', '', told('commit'))}."
    )


# --- figures ----------------------------------------------------------------------------------------------------------

FAMILIES = {
    "hints": ["hintonly", "uft001", "uft002"],
    "distillation": ["opd", "opd-annealed", "opd-gated", "reopd"],
    "critics": ["vapo", "vapohl"],
    "both": ["stack"],
}


def figures(world, folder):
    """Draws dynamics, transfer and the critics' calibration as SVG, all seeds in each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 8, "figure.constrained_layout.use": True, "lines.linewidth": 1.2}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "always the same file"}
    drawn = {"dynamics": draw_dynamics(plt, world), "transfer": draw_transfer(plt, world)}
    drawn["calibration"] = analyze.draw_calibration(plt, world.runs, None)
    for name, figure in drawn.items():
        if isinstance(figure, str):
            print(f"{folder / name}.svg is not drawn: {figure}.")
        else:
            figure.savefig(path := folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", path.read_text()))  # a third of the size


def draw_dynamics(plt, world):
    """Reward and all-wrong groups over the steps, a row a family with grpo in each: mean and range of the seeds."""
    panels = {"reward": "rollouts right, % (hinted ones, too)", "all_wrong": "groups all wrong, %"}
    figure, axes = plt.subplots(len(FAMILIES), 2, figsize=(7, 7.5), sharex=True, sharey=True)
    for (family, arms), row in zip(FAMILIES.items(), axes, strict=True):
        for arm, colour in zip(
            ("grpo", *arms), ("0.3", "tab:blue", "tab:orange", "tab:green", "tab:red"), strict=False
        ):
            seeds = [log for (one, _), log in world.log.items() if one == arm and len(log) >= WINDOW]
            steps = np.arange(WINDOW, min(map(len, seeds), default=0) + 1)
            for axis, field in zip(row, panels, strict=True) if seeds else ():
                logs = [np.convolve(analyze.column(x, field), [100 / WINDOW] * WINDOW, "valid") for x in seeds]
                logs = np.array([x[: len(steps)] for x in logs])
                axis.plot(steps[::3], logs.mean(0)[::3], color=colour, label=f"{arm} ({len(seeds)})")
                axis.fill_between(
                    steps[::3], *(x[::3] for x in (logs.min(0), logs.max(0))), color=colour, alpha=0.15, lw=0
                )
        row[0].set_ylabel(family)
        if row[1].get_legend_handles_labels()[0]:
            row[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axis, end, title in zip(axes[0], axes[-1], panels.values(), strict=True):
        axis.set_title(title)
        end.set_xlabel(f"step (mean of the last {WINDOW})")
    return figure


def draw_transfer(plt, world):
    """Accuracy on old and on sparse against transfer: a large dot is an arm's mean, the small ones are its seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), sharey=True)
    marked = []
    for axis, name in zip(axes, ("old", "sparse"), strict=True):
        spots = {}
        for arm in ("base", *ELEVEN):
            if seeds := [s for one, s in world.share if one == arm]:
                dots = np.array([[world.acc(arm, s, x) for x in (name, "cross")] for s in seeds])
                axis.scatter(*dots.T, s=5, color=analyze.style(arm)["color"], alpha=0.4, lw=0)
                axis.scatter(*(spot := dots.mean(0)), s=22, color=analyze.style(arm)["color"], zorder=3)
                spots[arm] = spot
        marked.append((axis, spots))
        axis.set(xlabel=f"{name}, % right", ylabel="cross, % right" * (name == "old"))
        if seeds := world.seeds(ELEVEN):
            axis.set_title(f"Spearman {np.mean([world.rho(s, name) for s in seeds]):+.2f}, mean of {len(seeds)} seeds")
    figure.canvas.draw()  # now the axes are where they stay
    for axis, spots in marked:
        analyze.label_points(axis, spots)
    return figure


# --- README -----------------------------------------------------------------------------------------------------------


def fill(readme, parts):
    """Put parts between the marks of a README, which is made if there is none."""
    said = readme.read_text(encoding="utf-8") if readme.exists() else f"{BEGIN}{END}\n"
    before, after = said.split(BEGIN)[0], said.split(END)[-1]
    readme.write_text(before + "\n".join([BEGIN, "", *parts, END]) + after, encoding="utf-8")


def report(results):
    """All tables as Markdown, between the marks of the README; the claims in the project's README, too; figures beside
    it where matplotlib is there."""
    folders = sorted({results / x.relative_to(results).parts[0] for x in results.glob("world*/**/runs.jsonl")})
    worlds, drawn = [World(folder) for folder in folders], importlib.util.find_spec("matplotlib")
    changed = [world for world in worlds if not world.name.removeprefix("world").isdigit()]  # data/toy/changed.py
    plain = [world for world in worlds if world not in changed]
    for world in plain if drawn else ():
        figures(world, results / world.name)
    if not worlds:
        raise SystemExit(f"{results} keeps no world: name the runs with --runs, or another folder with --results.")
    text = [analyze.markdown(*claims_table(plain))] if plain else []
    if changed:
        beside = [world for world in plain if world.name == "world0"]
        text.append(analyze.markdown(*claims_table([*beside, *changed], "Where world0 is changed", changed)))
    text.append("\n".join(f"- {ran(world)}" for world in worlds) + "\n")
    for world in worlds:
        text.append(analyze.markdown(*arms_table(world)))
        paths = sorted((results / world.name).glob("*.svg"))
        text += [f"![{world.name}: {path.stem}]({world.name}/{path.name})\n" for path in paths]
        text.append(analyze.markdown(*steps_table(world)))
        text += [analyze.markdown(*x) for x in (critics_table(world), readings_table(world)) if len(x[1]) > 1]
    fill(results / "README.md", text)
    if results == RESULTS:
        fill(Path("README.md"), text[: bool(plain) + bool(changed) + 1])
    print(*text[:2], f"{results / 'README.md'} is written.", sep="\n")
    if not drawn:
        print("Its figures need matplotlib: `pip install matplotlib`, then `python -m data.toy.replicate`.")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder of worlds of run folders, to be kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    worlds = sorted(args.runs.glob("world*")) if args.runs else []
    left = [name for world in worlds for name in keep(world, args.results / world.name)]
    report(args.results)
    if left:
        raise SystemExit(f"Unfinished, and left out: {', '.join(left)}. `make replicate` resumes them.")


if __name__ == "__main__":
    main()
