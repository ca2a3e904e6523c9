"""make replicate and its tables: a tiny world end to end, and synthetic worlds in which claims are known to hold."""

import csv
import json
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats

import analyze
import common
from data.toy import replicate, world
from data.toy.replicate import DELIVERED, ELEVEN, FAILS, HOLDS, OTHERS, UNTESTED

SIZES = {"old choice": 220, "old open": 100, "sparse": 250, "cross": 400, "worn choice": 220}
STEPS = 50
HABITS = ("student", "both", "teacher", "none")  # have a bad habit with a card


def sound(arm):
    """Accuracies in a world where the paper is right."""
    levels = dict(
        hintonly=0.7, uft001=0.7, uft002=0.69, stack=0.69, vapohl=0.66, grpo=0.3, opd=0.28, reopd=0.27, vapo=0.25
    )
    level = (levels | {"opd-annealed": 0.64, "opd-gated": 0.29}).get(arm, 0.24)
    turned = {"old choice": 0.9 - level, "worn choice": 0.9 - level}
    return {"cross": level, "sparse": level - 0.2, "old open": level + 0.1} | turned


def paper_is_right(arm, seed):
    """-> accuracies, counts that differ from what they imply, metrics of the first and of the later steps."""
    noise = np.random.default_rng([seed, *arm.encode()]).normal(0, 0.01, len(SIZES))
    shares = {name: x + e for (name, x), e in zip(sound(arm).items(), noise, strict=True)}
    if arm == "teacher":
        shares["sparse"] = 0.2
    if arm == "opd":
        shares["sparse"] = 0.19 + noise[0]
    dead = 0.93 + noise[0] / 2
    return shares, {"strict": 1.0 if arm in DELIVERED else 0.6, "worked": 0.99}, (dead, dead if arm == "grpo" else 0.2)


def write_world(folder, tell, seeds=(0, 1, 2, 3, 4), arms=ELEVEN, half=0.32):
    """A world as results/ keeps it, from tell(arm, seed): outcomes, outputs' counts, metrics, runs."""
    folder.mkdir(parents=True)
    every = [("base", 0), ("teacher", 0), *((arm, seed) for arm in arms for seed in seeds)]
    told = {run: tell(*run) for run in every}
    for part, mine in ((folder, [x for x in every if x[0] != "teacher"]), (folder / "others", [("teacher", 0)])):
        part.mkdir(exist_ok=True)
        right = {}
        for run in mine:
            draw = np.random.default_rng(run[1])
            right[run] = {k: draw.permutation(n) < round(told[run][0][k] * n) for k, n in SIZES.items()}
        names = [f"{arm}-s{seed}" for arm, seed in mine]
        with open(part / "outcomes.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["set", "id", "kind", *names])
            for name, n in SIZES.items():
                kind = "choice" if "choice" in name else "free"
                rows = (
                    [name.split()[0], f"{name}{i}", kind, *(int(right[run][name][i]) for run in mine)] for i in range(n)
                )
                table.writerows(rows)
        counts = []
        for run, name in zip(mine, names, strict=True):
            for slice_, n in SIZES.items():
                hits, more = int(right[run][slice_].sum()), told[run][1]
                strict = round(hits * more["strict"]) if slice_.startswith("old") else hits
                counts.append([name, slice_.split()[0], "choice" if "choice" in slice_ else "free", n, hits, strict,
                               more.get("unparsed", 0), n, 0, n, round(hits * more["worked"]), 30 * n])  # fmt: skip
        replicate.write_csv(part / "outputs.csv", ("run", "set", "kind", *replicate.COUNTS), counts)
        steps = []
        for run, name in zip(mine, names, strict=True):
            for step in range(STEPS if run[0] not in replicate.UNTRAINED else 0):
                dead = told[run][2][step >= 10]
                steps.append([name, step, 1 - dead, dead, 1 - dead, 0, 0, 40, 0.5, 1.0, *[""] * 5])
        replicate.write_csv(part / "metrics.csv", ("run", "step", *replicate.METRICS), steps)
        done = [[name, "sparse", habit, 100, 10 * k] for name in names for k, habit in enumerate(HABITS)]
        replicate.write_csv(part / "steps.csv", ("run", "set", "habit", "steps", "right"), done)
        learnt = [[f"{arm}-s{seed}", step, *("" if step == 9 else x for x in (
                       0.01 * step + 0.1 * seed + 0.2 * (arm == "vapohl"), 3.0 if step == 11 else 1.0))]
                  for arm, seed in mine if arm in ("vapo", "vapohl") for step in range(12)]  # fmt: skip
        replicate.write_csv(part / "pretraining.csv", ("run", "step", *replicate.EXPLAINED), learnt)
        args = {"group": 8, "problems": 8, "steps": STEPS, "pool": ""}
        runs = [dict(name=f"{a}-s{s}", arm=a, seed=s, args=args, gates=[], device="abacus", torch="2", python="3",
                     transformers="5", commit="0" * 40, started=f"2026-01-01T00:0{s}:00Z",
                     ended=f"2026-01-01T00:0{s + 2}:00Z") for a, s in mine]  # fmt: skip
        (part / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    shown = {"0.5": {"rows": 700, "right": half, "gain": half - 0.03, "gain_error": 0.01}}
    (folder / "precondition.json").write_text(json.dumps({"shown": shown}))
    return replicate.World(folder)


def verdicts(world):
    """The claims table's last column, by claim."""
    _, (header, *rows), _ = replicate.claims_table([world])
    assert (
        header[-1] == "verdict" and len(rows) == len(replicate.CLAIMS) and {len(row) for row in rows} == {len(header)}
    )
    return {row[1]: row[-1].strip("*") for row in rows}


def claim(words):
    (one,) = [x.text for x in replicate.CLAIMS if words in x.text]
    return one


def test_every_claim_holds_where_the_paper_is_right(tmp_path):
    assert set(verdicts(write_world(tmp_path / "world0", paper_is_right)).values()) == {HOLDS}


# what is turned round -> the claims that no longer hold, and what they are instead
TURNED = {
    "all arms are alike": (
        lambda arm, x: {k: 0.5 + (v - sound(arm)[k]) for k, v in x.items()},
        {"lie above": FAILS, "combined in-domain": FAILS, "drives the gain": FAILS, "annealed beats": FAILS,
         "annealed distillation helps": FAILS, "vapo, combined": FAILS, "same on transfer": FAILS, "reverse of": FAILS,
         "without multiple choice": UNTESTED, "not format": FAILS},
    ),
    "UFT and stacking help": (
        lambda arm, x: {k: v + 0.15 * (arm in ("uft001", "uft002", "stack")) for k, v in x.items()},
        {"likelihood": FAILS, "stacking": FAILS},
    ),
    "the gated teacher helps": (
        lambda arm, x: {k: v + 0.6 * (arm == "opd-gated") for k, v in x.items()} | {"old choice": 0.3},
        {"lie above": FAILS, "combined in-domain": FAILS, "gated persistent": FAILS, "annealed beats": FAILS,
         "reverse of": FAILS, "without multiple choice": UNTESTED},
    ),
    "the teacher is no ceiling": (
        lambda arm, x: x | ({"sparse": 0.35} if arm == "opd" else {}),
        {"is capped": FAILS},
    ),
    "the teacher is out of reach": (
        lambda arm, x: x | ({"sparse": 0.9} if arm == "teacher" else {}),
        {"it is not: opd": FAILS},
    ),
    "the MSE critic is as good": (
        lambda arm, x: sound("vapohl") | {"cross": x["cross"] + 0.4} if arm == "vapo" else x,
        {"lie above": FAILS, "combined in-domain": FAILS, "vapo, combined": FAILS, "same on transfer": FAILS},
    ),
    "old ranks as transfer does": (
        lambda arm, x: x | {"old choice": x["cross"]},
        {"reverse of": FAILS, "without multiple choice": UNTESTED},
    ),
    "all of old is turned round": (
        lambda arm, x: x | {"old choice": 0.9 - x["cross"], "old open": 0.9 - x["cross"]},
        {"without multiple choice": FAILS, "reverse of": HOLDS},
    ),
    "sparse is turned round": (lambda arm, x: x | {"sparse": 0.9 - x["sparse"]}, {"predicts": FAILS}),
}  # fmt: skip


@pytest.mark.parametrize("turn", TURNED)
def test_a_claim_does_not_hold_where_its_opposite_is_true(tmp_path, turn):
    change, wanted = TURNED[turn]
    tell = lambda arm, seed: (change(arm, paper_is_right(arm, seed)[0]), *paper_is_right(arm, seed)[1:])
    found = verdicts(write_world(tmp_path / "world0", tell))
    for words, said in wanted.items():
        assert found[claim(words)] == said, words
    print({k: v for k, v in found.items() if v != HOLDS})


def test_training_before_and_after_is_told_apart(tmp_path):
    """grpo takes off, the start is not sparse, hints do not unlock, graders agree, and guesses explain the gain."""

    def tell(arm, seed):
        shares, _, (first, _) = paper_is_right(arm, seed)
        return shares, {"strict": 0.99, "worked": 0.1 if arm in DELIVERED else 1.0}, (first - 0.2, 0.3)

    found = verdicts(write_world(tmp_path / "world0", tell, half=0.04))
    for words in ("unlocks", "start all wrong", "stalls", "rule grader", "not guessing"):
        assert found[claim(words)] == FAILS, words
    assert found[claim("not format")] == HOLDS  # every answer can be read


def test_a_gain_that_is_all_format_is_found(tmp_path):
    def tell(arm, seed):
        shares, more, dead = paper_is_right(arm, seed)
        read = 360 if arm in DELIVERED else round(shares["cross"] / 0.8 * 400)
        shares |= {"cross": 0.72} if arm in DELIVERED else {}
        return shares, more | {"unparsed": 400 - read}, dead

    assert verdicts(write_world(tmp_path / "world0", tell))[claim("not format")] == FAILS


def test_what_was_not_run_cannot_be_tested(tmp_path):
    some = [arm for arm in ELEVEN if arm not in ("uft002", "vapo")]
    world = write_world(tmp_path / "world0", paper_is_right, arms=some)
    found, texts = verdicts(world), {row[1]: row[-2] for row in replicate.claims_table([world])[1][1:]}
    for words in ("lie above", "likelihood", "vapo, combined", "predicts", "rule grader"):
        assert found[claim(words)] == UNTESTED and "not run: " in texts[claim(words)]
    assert texts[claim("vapo, combined")] == "(not run: vapo)"
    assert found[claim("drives the gain")] == found[claim("stacking")] == HOLDS
    (tmp_path / "world0/precondition.json").unlink()
    one = write_world(tmp_path / "world1", paper_is_right, seeds=(3,))
    assert set(verdicts(one).values()) == {UNTESTED, HOLDS} and verdicts(one)[claim("unlocks")] == HOLDS
    assert verdicts(replicate.World(tmp_path / "world0"))[claim("unlocks")] == UNTESTED


# ---- statistics against independent computations


def test_the_verdict_keeps_the_rules_of_the_docstring():
    cases = [("above", 0, 0.1, 9, HOLDS), ("above", 0, -0.1, 9, FAILS), ("above", 85, 84.9, 99, FAILS),
             ("below", 0, -0.5, -0.1, HOLDS), ("below", 0, -0.5, 0.1, FAILS), ("nothing", 5, -9, 4.9, HOLDS),
             ("nothing", 5, 1, 4.9, HOLDS), ("nothing", 5, 0.1, 5.1, FAILS), ("nothing", 5, -0.1, 5.1, UNTESTED),
             ("above", 0, np.nan, np.nan, UNTESTED), ("nothing", 5, np.nan, np.nan, UNTESTED)]  # fmt: skip
    for sense, bound, low, high, said in cases:
        assert replicate.verdict((sense, bound), low, high) == said, (sense, low, high)


def test_the_interval_is_scipys():
    values = [3.0, 5.5, -1.0, 4.0, 2.5]
    middle, half = replicate.interval(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (middle - half, middle + half) == pytest.approx((low, high))
    assert replicate.interval([2.0, 2.0, 2.0]) == (2.0, 0.0)
    assert np.isnan(replicate.interval([1.0])[1]) and np.isnan(replicate.interval([])).all()


def test_claims_are_recomputed_from_the_file_of_outcomes(tmp_path):
    """By plain reading of outcomes.csv and metrics.csv, with scipy's tests, paired by seed."""
    world = write_world(tmp_path / "world0", paper_is_right)
    with open(tmp_path / "world0/outcomes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(tmp_path / "world0/metrics.csv", newline="") as file:
        steps = list(csv.DictReader(file))
    seeds = range(5)
    acc = lambda arm, s, *sets: 100 * statistics.mean(int(x[f"{arm}-s{s}"]) for x in rows if x["set"] in sets)
    got = {x.text: replicate.measure(x, world) for x in replicate.CLAIMS}

    def same(words, values):
        middle, half, over = got[claim(words)]
        ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (middle - half, middle + half) == pytest.approx(tuple(ends)) and over == "5 seeds"

    paired = lambda one, two, *sets: [acc(one, s, *sets) - acc(two, s, *sets) for s in seeds]
    same("drives the gain", paired("hintonly", "grpo", "cross"))
    same("vapo, combined", paired("vapohl", "vapo", "old", "sparse"))
    both = [(a + b) / 2 for a, b in zip(*(paired(x, "hintonly", "cross") for x in ("uft001", "uft002")), strict=True)]
    same("likelihood", both)
    same("stacking", paired("stack", "hintonly", "cross"))  # the better of the two
    ceiling = 100 * statistics.mean(
        int(x["teacher-s0"])
        for x in csv.DictReader((tmp_path / "world0/others/outcomes.csv").read_text().splitlines())
        if x["set"] == "sparse"
    )
    same("is capped", [acc("opd", s, "sparse") - ceiling for s in seeds])
    six, five = ([[acc(arm, s, "cross") for arm in side] for s in seeds] for side in (DELIVERED, OTHERS))
    same("lie above", [min(a) - max(b) for a, b in zip(six, five, strict=True)])
    rho = lambda s, test: stats.spearmanr(*([acc(a, s, x) for a in ELEVEN] for x in (test, "cross"))).statistic
    same("predicts", [rho(s, "sparse") for s in seeds])
    late = lambda s: [float(x["all_wrong"]) for x in steps if x["run"] == f"grpo-s{s}" and int(x["step"]) >= 40]
    same("stalls", [100 * statistics.mean(late(s)) for s in seeds])
    assert got[claim("unlocks")] == (pytest.approx(29.0), pytest.approx(1.96), "700 rows")


def test_the_report_is_written_between_its_marks_from_results_alone(tmp_path, capsys):
    (tmp_path / "README.md").write_text(f"# Before\n\n{replicate.BEGIN}\n\nold\n{replicate.END}\n\nAfter.\n")
    for name in ("world0", "world1"):
        write_world(tmp_path / name, paper_is_right, seeds=(0, 1, 2))
    replicate.report(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"# Before\n\n{replicate.BEGIN}\n\n### The") and text.endswith(
        f"{replicate.END}\n\nAfter.\n"
    )
    assert text.count("*holds*") == 2 * len(replicate.CLAIMS) and "old\n" not in text
    # seeds 0, 1 and 2 ran for two minutes each and began a minute apart, the untrained with the first
    assert text.count("4 minutes in which any ran, 24 at a time at most, 2.0 minutes a run; torch 2,") == 2
    replicate.report(tmp_path)
    assert (tmp_path / "README.md").read_text() == text
    with pytest.raises(SystemExit, match="keeps no world"):
        replicate.report(tmp_path / "nowhere")


def test_figures_are_svg_below_200_kb_with_every_arm(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib, which is optional")
    replicate.figures(write_world(tmp_path / "world0", paper_is_right), tmp_path)
    for name in ("dynamics", "transfer"):
        text = (tmp_path / f"{name}.svg").read_text()
        assert len(text) < 200_000 and all(arm in text for arm in ELEVEN)
    replicate.figures(write_world(tmp_path / "world1", paper_is_right, arms=["grpo"], seeds=(0,)), tmp_path)


def test_a_changed_world_stands_beside_the_unchanged_with_what_it_has_alone(tmp_path, capsys):
    write_world(tmp_path / "world0", paper_is_right)
    dead = lambda arm, seed: (*paper_is_right(arm, seed)[:2], (0.95, 0.5))
    write_world(tmp_path / "worldnotail", dead, arms=["grpo"], seeds=(0, 1, 2))
    replicate.report(tmp_path)
    text = (tmp_path / "README.md").read_text()
    first, second = text.split("### ")[1:3]
    assert "worldnotail" not in first and "Where world0 is changed" in second
    rows = [line for line in second.splitlines() if line.startswith("|")][2:]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2", "3"]  # claims about grpo alone
    stalls = [x.strip() for x in rows[2].split("|")]
    assert stalls[5].startswith("93") and stalls[6] == "*holds*"
    assert stalls[7].startswith("50.0") and stalls[7].endswith("(3 seeds)") and stalls[8] == "*does not hold*"


def test_readings_stand_beside_their_arm(tmp_path):
    sound_ = lambda arm, seed: paper_is_right(replicate.READINGS.get(arm, arm), seed)
    one = write_world(tmp_path / "world0", sound_, arms=[*ELEVEN, "uft01", "reopd-staircase"], seeds=(0, 1))
    _, rows, _ = replicate.readings_table(one)
    assert [row[:3] for row in rows[1:]] == [["uft01", "hintonly", 2], ["reopd-staircase", "reopd", 2]]
    assert rows[1][4] == rows[1][6] == "+0.0 [+0.0, +0.0]" and rows[1][5].startswith("7")


def test_outputs_are_counted_by_kind(tmp_path):
    rows = [dict(set="old", kind="choice", choices=["12", "13"], answer="B")] * 4 + [
        dict(set="cross", kind="free", choices=[], answer="13")] * 3  # fmt: skip
    said = ["<answer>B</answer>", "12;+1=13;<answer>13</answer>", " <answer> A </answer>", "12;+1=13;",
            "12;+1=13;<answer>13</answer>", "<answer>13</answer>", "no idea"]  # fmt: skip
    right = np.array([[1, 1, 0, 0, 1, 1, 0]], dtype=float)  # by some judge
    data = analyze.Outcomes("rule", [dict(name="grpo-s0", arm="grpo", seed=0)], rows, right, np.array([said], object))
    strict, silent = (analyze.by_rule(data, rule) for rule in (analyze.strict, analyze.unparsed))
    found = {tuple(row[:3]): dict(zip(replicate.COUNTS, row[3:], strict=True))
             for row in replicate.count(data, strict, silent)}  # fmt: skip
    assert found.keys() == {("grpo-s0", "old", "choice"), ("grpo-s0", "cross", "free")}
    assert found["grpo-s0", "old", "choice"] == dict(
        n=4, right=2, strict=1, unparsed=int(silent[0, :4].sum()), tagged=3, bare=2, worked=2, worked_right=1,
        characters=sum(map(len, said[:4])),
    )  # fmt: skip
    cross = found["grpo-s0", "cross", "free"]
    assert [cross[k] for k in ("n", "right", "strict", "tagged", "bare", "worked", "worked_right")] == [
        3,
        2,
        2,
        2,
        0,
        1,
        1,
    ]


def test_hard_steps_are_counted_up_to_the_first_fault_by_whose_habit_the_card_is(tmp_path):
    chain = ["327", "+8", "-20", "-60", "+70"]  # 335, carries; 315; 255, borrows; 325, carries
    right = "327;+8=335;-20=315;-60=255;+70=325;<answer>325</answer>"
    assert world.hard_steps(right, chain) == [("+8", True), ("-60", True), ("+70", True)]
    assert world.hard_steps(right.replace("255", "155"), chain) == [("+8", True), ("-60", False)]
    assert world.hard_steps("327;+8=335;-20=316;-60=256;", chain) == [("+8", True)]  # an easy step ends it, too
    assert world.hard_steps("327;-20=307", chain) == [("+8", False)]  # left out
    assert world.hard_steps("<answer>325</answer>", chain) == world.hard_steps("372;+8=380", chain) == []

    seed = next(
        s for s in range(99) if "+8" in world.habits("student", s)[1] and "+8" not in world.habits("teacher", s)[1]
    )
    student, teacher = (world.habits(name, seed)[1] for name in ("student", "teacher"))
    whose = lambda card: {(1, 0): "student", (1, 1): "both", (0, 1): "teacher", (0, 0): "none"}[
        card in student, card in teacher]  # fmt: skip
    cells = [[x, 0, 0] for x in [*"327", *chain[1:]]] + [None] * 5
    items = [dict(set="cross", draw=dict(dark=False, cells=cells))] * 2 + [dict(set="mine")]
    said = np.array([[right, right.replace("335", "325"), right], [None, None, right]], object)
    runs = [dict(name=f"grpo-s{i}", args=dict(pool=f"data/toy/seed{seed}/train.jsonl")) for i in (0, 1)]
    rows = [*replicate.count_steps(analyze.Outcomes("rule", runs, items, None, said))]
    assert {row[0] for row in rows} == {"grpo-s0"} and {row[1] for row in rows} == {"cross"}
    wanted = {whose(card): [0, 0] for card in ("+8", "-60", "+70")}
    for card, good in [("+8", 1), ("-60", 1), ("+70", 1), ("+8", 0)]:
        wanted[whose(card)] = [wanted[whose(card)][0] + 1, wanted[whose(card)][1] + good]
    assert {row[2]: row[3:] for row in rows} == wanted


def test_the_table_of_steps_has_a_column_a_habit(tmp_path):
    _, (header, *rows), _ = replicate.steps_table(write_world(tmp_path / "world0", paper_is_right, seeds=(0, 1)))
    assert header[2:6] == [f"sparse: {habit}" for habit in HABITS] and header[6].startswith("cross")
    assert len(rows) == 2 + len(ELEVEN) and {len(row) for row in rows} == {len(header)}
    assert rows[0] == ["teacher", 1, "0.0", "10.0", "20.0", "30.0", *[""] * 4]
    assert rows[2][3] == "10.0 +- 0.0"


def test_steps_are_pooled_by_the_variance_of_their_returns():
    rng, rows, returns, errors = np.random.default_rng(0), [], [], []
    for share in (0.0, 0.1, 0.5):
        target = (rng.random(40) < share).astype(float)
        value = 0.5 * target + rng.normal(0, 0.1, 40)
        bins = np.stack([value, target, np.ones(40)], 1).reshape(4, 10, 3).sum(1)
        rows.append({"calibration": bins.tolist()})
        if target.any():
            rows[-1]["explained_variance"] = 1 - (target - value).var() / target.var()
            returns.append(40 * target.var())
            errors.append(40 * (target - value).var())
    found = replicate.pooled([replicate.varied(row) for row in rows])
    assert len(returns) == 2 and found == pytest.approx(1 - sum(errors) / sum(returns))
    assert np.isnan(replicate.pooled(rows[:1])) and replicate.varied({"reward": 1}) == {"reward": 1}


def test_critics_are_set_side_by_side_as_they_learn(tmp_path):
    _, rows, notes = replicate.critics_table(write_world(tmp_path / "world0", paper_is_right, seeds=(0, 1)))
    assert [row[0] for row in rows[1:]] == [
        f"value pretraining, {x}" for x in ("1 to 3", "4 to 6", "7 to 9", "10 to 12")
    ]
    assert [row[1].split(" ")[0] for row in rows[1:]] == ["6.0", "9.0", "12.0", "15.8"]  # 10, thrice 11
    assert [row[3] for row in rows[1:]] == ["+20.0 [+20.0, +20.0]"] * 4 and "2 seeds" in notes[-1]
    alone = write_world(tmp_path / "world1", paper_is_right, arms=["vapo"])
    assert len(replicate.critics_table(alone)[1]) == 1  # a header


def test_a_run_keeps_its_settings_machine_and_summed_calibration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"args": {"name": "vapo"}, "device": "abacus", "torch": "2"}))
    metrics = [{"step": 0}, {"step": 1, "calibration": [[0.5, 1, 2]]}, {"step": 2, "calibration": [[0.25, 0, 3]]}]
    run = dict(name="vapo-s0", arm="vapo", seed=0, args={"steps": 3}, gates=[], dir=tmp_path, metrics=metrics)
    kept = {k: run[k] for k in ("name", "arm", "seed", "args", "gates")} | dict(device="abacus", torch="2")
    assert replicate.facts(run) == kept | {"calibration": [[0.75, 1, 5]]}
    assert "calibration" not in replicate.facts(run | {"metrics": metrics[:1]})


# ---- the command, end to end


def small_toy(folder):
    """The first rows of the shipped world's sets, with its student; its teacher is lost."""
    folder.mkdir()
    (folder / "student").symlink_to(ROOT / "data/toy/student")
    for name in world.NAMES:
        rows = common.read_jsonl(ROOT / f"data/toy/{name}.jsonl")[: 8 if name in ("train", "old") else 4]
        for row in rows:
            world.draw_row(row, folder)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(folder / "old.jsonl", folder / "worn.jsonl")
    shutil.copy(ROOT / "data/toy/train.precondition.json", folder)
    (folder / "images/ready").touch()


def make(tmp_path, arms):
    flags = "--steps 2 --problems 2 --group 4 --eval-every 0 --gates warn"
    places = [f"TOY={tmp_path}/toy", f"RUNS={tmp_path}/runs", f"RESULTS={tmp_path}/results", f"PY={sys.executable}"]
    command = ["make", "replicate", *places, "WORLDS=0", "SEEDS=0 1", f"ARMS={arms}", f"FLAGS={flags}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_one_command_trains_judges_and_tells_and_goes_on_where_it_was(tmp_path):
    small_toy(tmp_path / "toy")
    done = make(tmp_path, "base grpo hintonly")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    runs, kept = tmp_path / "runs/world0", tmp_path / "results/world0"
    names = ["base-s0", "grpo-s0", "grpo-s1", "hintonly-s0", "hintonly-s1"]
    assert [path.parent.name for path in sorted(runs.glob("*/outputs.jsonl"))] == names
    assert said.count("is finished") == 5 and "5 of 5" in said
    files = {"outcomes.csv", "outputs.csv", "steps.csv", "metrics.csv", "pretraining.csv", "runs.jsonl",
             "precondition.json"}  # fmt: skip
    assert {path.name for path in kept.iterdir() if path.suffix != ".svg"} == files

    # tables from results/ are those from runs/
    loaded = analyze.load(runs)
    whole, small = analyze.judged(loaded, runs / "verdicts.jsonl"), analyze.read_outcomes(kept / "outcomes.csv")
    for name in ("sparsity", "dynamics", "gates"):
        assert analyze.TABLES[name](analyze.load(kept), None) == analyze.TABLES[name](loaded, None)
    for name in ("main", "pairs", "methods"):
        assert analyze.TABLES[name]([], small)[1] == analyze.TABLES[name](loaded, whole)[1]
    readme = (tmp_path / "results/README.md").read_text()
    cross, by = whole.sets()["cross"], dict(zip([run["name"] for run in whole.runs], whole.right, strict=True))
    gap = statistics.mean((by[f"hintonly-s{s}"] - by[f"grpo-s{s}"])[cross].mean() for s in (0, 1))
    row = next(line for line in readme.splitlines() if "drives the gain" in line)
    assert f"| {100 * gap:+.1f} [" in row and "(2 seeds)" in row
    assert f"5 runs of 2 steps on {common.device_name()}" in readme and "not recorded" not in readme

    # a run that is gone is trained again, no other is; one that cannot start is named; what is kept is what it was
    before = {name: (kept / name).read_bytes() for name in files - {"runs.jsonl"}}
    times = {name: (runs / name / "outputs.jsonl").stat().st_mtime_ns for name in names}
    shutil.rmtree(runs / "grpo-s1")
    done = make(tmp_path, "base grpo hintonly opd")
    said = done.stdout
    assert done.returncode and "Unfinished, and left out: " in done.stderr
    assert said.count("is finished") == 1 and "grpo-s1 is finished" in said
    assert said.count(" stopped:") == 2 and "opd-s0 stopped:" in said and "toy/teacher" in said
    changed = [name for name in names if (runs / name / "outputs.jsonl").stat().st_mtime_ns != times[name]]
    assert changed == ["grpo-s1"] and {name: (kept / name).read_bytes() for name in before} == before

    # a part of the runs replaces its own part of what is kept, and nothing that had other data
    elsewhere = tmp_path / "elsewhere/world0"
    shutil.copytree(runs / "grpo-s1", elsewhere / "grpo-s1")
    runs_kept = (kept / "runs.jsonl").read_text()
    for name in ("outputs.csv", "steps.csv", "metrics.csv", "runs.jsonl"):
        lines = (kept / name).read_text().splitlines(keepends=True)
        rest = [line for line in lines if not line.startswith(("grpo-s1,", '{"name": "grpo-s1"'))]
        assert len(rest) < len(lines)
        (kept / name).write_text("".join(rest))
    rows = replicate.read_csv(kept / "outcomes.csv")
    for row in rows:
        del row["grpo-s1"]
        row["bare_letter"] = row["bare_letter"].replace(" grpo-s1", "")
    replicate.write_csv(kept / "outcomes.csv", rows[0], [row.values() for row in rows])
    assert not replicate.keep(elsewhere, kept)
    assert {name: (kept / name).read_bytes() for name in before} == before
    assert (kept / "runs.jsonl").read_text() == runs_kept
    sha = common.read_jsonl(kept / "runs.jsonl")[0]["sha256"][f"{tmp_path}/toy/cross.jsonl"]
    (kept / "runs.jsonl").write_text(runs_kept.replace(sha, "0" * 64))
    with pytest.raises(SystemExit, match=r"keeps base-s0, for which .*cross.jsonl was another file than for grpo-s1"):
        replicate.keep(elsewhere, kept)
