"""analyze.py: statistics against independent computation and published outcomes, tables recomputed by hand."""

import csv
import hashlib
import importlib.util
import itertools
import json
import math
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from scipy.stats import binomtest

import analyze
import judge
from data.probes import prepare

OUTCOMES = Path(__file__).parents[2] / "shared" / "real_samples" / "dynamath_results.csv"


def by_rule(runs):
    judge.main([*map(str, runs), "--judge", "rule"])


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(arm, seed=0, metrics=(), right=None, gates=None, **args):
    """A run folder as an arm leaves it; `right` = {set: which of its 10 rows are answered rightly}."""
    folder = Path("runs") / f"{arm}-s{seed}"
    right = {"sparse": [], "cross": []} if right is None else right
    outputs = []
    for name, hits in right.items():
        rows = [{"id": f"{name}{i}", "question": f"{name} {i}?", "answer": str(i), "choices": []} for i in range(10)]
        write_lines(Path("data") / f"{name}.jsonl", rows)
        said = lambda i, hits=hits: f"It is <answer>{i if i in hits else i + 100}</answer>"
        outputs += [{"set": name, "id": row["id"], "output": said(i)} for i, row in enumerate(rows)]
    write_lines(folder / "outputs.jsonl", outputs)
    paths = ",".join(f"data/{name}.jsonl" for name in right)
    sha256 = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths.split(",")}
    config = {"args": {"name": arm, "seed": seed, "group": 8, "problems": 64, "eval": paths} | args, "sha256": sha256}
    (folder / "config.json").write_text(json.dumps(config))
    if metrics:
        write_lines(folder / "metrics.jsonl", metrics)
    if gates is not None:
        (folder / "gates.json").write_text(json.dumps({"gates": gates}))
    return str(folder)


def steps(n, **fields):
    """n lines of metrics; a field is a number or a function of the step."""
    base = {"reward": 0.0, "all_wrong": 1.0, "mixed": 0.0, "unparsed": 0.0, "length": 40.0, "truncated": 0.0}
    value = lambda x, i: x(i) if callable(x) else x
    return [{"step": i} | {k: value(x, i) for k, x in (base | fields).items()} for i in range(n)]


def table(name, data=None, runs=Path("runs")):
    """A table's parts, of an outcomes file or of the run folders."""
    loaded = [] if data else analyze.load(runs)
    if not data and name not in analyze.OF_TRAINING:
        data = analyze.judged(loaded, Path("runs/verdicts.jsonl"))
    title, rows, notes = analyze.TABLES[name](loaded, data)
    assert {len(row) for row in rows} == {len(rows[0])} and len(set(rows[0])) == len(rows[0])
    return title, rows, notes


def find(rows, **wanted):
    """The one row with these cells as {column: cell}."""
    named = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    (row,) = [row for row in named if all(row[k] == v for k, v in wanted.items())]
    return row


def outcomes(sets, arms, path=Path("outcomes.csv"), **attributes):
    """Writes an outcomes file and reads it: sets = {name: questions}, arms = {arm: {name: 0/1 list}}."""
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["set", "id", *attributes, *arms])
        for name, n in sets.items():
            lines.writerows(
                [name, i, *(x[name][i] for x in attributes.values()), *(x[name][i] for x in arms.values())]
                for i in range(n)
            )
    return analyze.read_outcomes(path)


def cells(rows, run):
    """A run's row as {column: cell}."""
    return next(dict(zip(rows[0], row, strict=True)) for row in rows if row[0] == run)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- statistics


@pytest.mark.parametrize(("b", "c", "p"), [(1, 8, 0.0391), (0, 5, 0.0625), (0, 6, 0.0313), (0, 0, 1), (7, 7, 1)])
def test_mcnemar_gives_the_reference_values(b, c, p):
    assert analyze.mcnemar(b, c) == analyze.mcnemar(c, b) == pytest.approx(p, abs=5.1e-5)


def test_mcnemar_is_the_exact_binomial_test_on_discordant_pairs():
    pairs = [(b, c) for b in range(13) for c in range(13) if b + c] + [(656, 600), (40, 90), (0, 2000), (3000, 2010)]
    for b, c in pairs:
        assert analyze.mcnemar(b, c) == pytest.approx(binomtest(b, b + c, 0.5).pvalue, rel=1e-9), (b, c)


@pytest.mark.parametrize(
    ("one", "two", "discordant", "p"),
    [
        ("Qwen2-7B", "InternVL2-26b", {656, 600}, 0.1206),
        ("claude3.5", "GPT4o", {633, 558}, 0.0320),
        ("deepseek7B", "llava1.6-vicuna-13B", {574, 475}, 0.00246),
    ],
)
def test_mcnemar_reproduces_published_dynamath_outcomes(one, two, discordant, p):
    if not OUTCOMES.exists():
        pytest.skip(f"{OUTCOMES} is not here: the published outcomes lie outside the repository")
    with open(OUTCOMES) as file:
        rows = [(row[one] == "1", row[two] == "1") for row in csv.DictReader(file)]
    b, c = sum(x and not y for x, y in rows), sum(y and not x for x, y in rows)
    assert len(rows) == 5010 and {b, c} == discordant
    assert analyze.mcnemar(b, c) == pytest.approx(p, rel=5e-3)


def test_wilson_is_scipys_interval():
    for k, n in [(0, 1), (0, 10), (3, 10), (10, 10), (96, 319), (29, 800)]:
        interval = binomtest(k, n).proportion_ci(method="wilson")
        assert analyze.wilson(k, n) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_the_floor_of_the_all_wrong_share_tells_independent_rollouts_from_miscounted_ones():
    draw, wrong_alarms, missed = random.Random(0), 0, 0
    for _ in range(300):  # 10 steps of 8 problems of one success rate: here the floor is met with equality
        groups = [[sum(draw.random() < 0.036 for _ in range(8)) for _ in range(8)] for _ in range(10)]
        rows = [{"reward": sum(group) / 64, "all_wrong": group.count(0) / 8} for group in groups]
        all_wrong, floor, slack = analyze.all_wrong_floor(rows, group=8, problems=8)
        assert floor == pytest.approx((1 - sum(map(sum, groups)) / 640) ** 8)
        wrong_alarms += all_wrong < floor - slack
        rare = [row | {"reward": row["reward"] / 8} for row in rows]  # a reward that is divided by the group twice
        all_wrong, floor, slack = analyze.all_wrong_floor(rare, group=8, problems=8)
        missed += all_wrong >= floor - slack
    assert wrong_alarms <= 3 and missed <= 3


def test_the_slack_of_the_floor_is_three_standard_errors():
    draw, gaps = random.Random(0), []
    for _ in range(2000):
        groups = [sum(draw.random() < 0.1 for _ in range(4)) for _ in range(200)]
        rows = [{"reward": sum(groups) / 800, "all_wrong": groups.count(0) / 200}]
        all_wrong, floor, slack = analyze.all_wrong_floor(rows, group=4, problems=200)
        gaps.append(all_wrong - floor)
    middle = sum(gaps) / len(gaps)
    error = (sum((gap - middle) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert slack == pytest.approx(3 * error, rel=0.15)


@pytest.mark.parametrize(("b", "c", "p"), [(1, 8, 0.0215), (0, 5, 0.0313), (0, 6, 0.0156), (0, 0, 1), (7, 7, 1)])
def test_mid_p_gives_the_reference_values(b, c, p):
    assert analyze.mcnemar_mid(b, c) == analyze.mcnemar_mid(c, b) == pytest.approx(p, abs=5.1e-5)


def test_mid_p_is_the_exact_p_less_the_probability_of_the_table():
    for b, c in [(1, 8), (2, 3), (40, 90), (656, 600), (5, 5)]:
        binomial = stats.binom(b + c, 0.5)
        p = min(1, 2 * binomial.cdf(min(b, c) - 1) + binomial.pmf(b))
        assert analyze.mcnemar_mid(b, c) == pytest.approx(p, rel=1e-9)


def test_the_smallest_detectable_difference_gives_the_reference_values():
    for n, points in {319: 6.3, 800: 3.8, 1119: 3.0, 501: 4.6, 5010: 1.4}.items():  # at 25 % discordance
        assert 100 * analyze.detectable(round(n / 4)) / n == pytest.approx(points, abs=0.051)
    for m in range(60):
        gaps = [abs(m - 2 * k) for k in range(m + 1) if analyze.mcnemar(k, m - k) < 0.05]
        assert analyze.detectable(m) == min(gaps, default=None)


def test_holm_is_the_closure_of_bonferroni():
    draw = random.Random(0)
    for n in (1, 2, 5, 8):
        ps = [draw.random() ** 3 for _ in range(n - 1)] + [0.01]
        ps[0] = ps[-1]  # a tie
        subsets = [s for k in range(1, n + 1) for s in itertools.combinations(range(n), k)]
        closed = [max(min(1, len(s) * min(ps[j] for j in s)) for s in subsets if i in s) for i in range(n)]
        assert analyze.holm(ps) == pytest.approx(closed)
    assert analyze.holm([]) == []


def test_spearman_is_scipys():
    draw = random.Random(0)
    for n in (3, 5, 11, 20):
        for top in (3, 100):  # with ties, and hardly any
            x, y = ([draw.randrange(top) for _ in range(n)] for _ in range(2))
            with warnings.catch_warnings(action="ignore"):
                rho = stats.spearmanr(x, y).statistic
            assert analyze.spearman(x, y) == pytest.approx(rho, nan_ok=True)
    assert analyze.spearman([0.1 + 0.2, 0.3, 1], [1, 1, 2]) == pytest.approx(1)  # ties but for a rounding


def permutation_with(D, n=11):
    """Two rankings of n without ties and with sum d^2 = D."""
    draw, x = random.Random(D), list(range(n))
    while True:
        pull = draw.uniform(-3, 3)
        y = sorted(x, key=lambda i, pull=pull: i * pull + draw.gauss(0, 4))
        if sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) == D:
            return x, y


@pytest.mark.parametrize(
    ("D", "rho", "p"),
    [
        (380, -0.7273, 0.014400),  # the last column by walking through all 39,916,800 orders
        (382, -0.7364, 0.012774),
        (384, -0.7455, 0.011215),
        (386, -0.7545, 0.009846),
        (24, 0.8909, 0.000520),
    ],
)
def test_eleven_arms_without_ties_give_the_known_p(D, rho, p):
    x, y = permutation_with(D)
    assert analyze.spearman(x, y) == pytest.approx(rho, abs=5e-5)
    assert analyze.permutation_p(x, y) == (pytest.approx(p, abs=5.1e-7), "exact")


def test_the_permutation_p_is_that_of_all_orders():
    draw = random.Random(1)
    for n, top in [(2, 9), (4, 100), (5, 3), (6, 4), (7, 100)]:
        x, y = list(range(n)), [draw.randrange(top) for _ in range(n)]
        y[0] = -1  # not all equal
        x[1] = x[-1]
        ours = abs(analyze.spearman(x, y))
        orders = [abs(analyze.spearman(x, order)) >= ours - 1e-12 for order in itertools.permutations(y)]
        assert analyze.permutation_p(x, y)[0] == pytest.approx(sum(orders) / len(orders)), (x, y)
    x, y = [3, 1, 4, 1.5, 9, 2.6], [2, 7, 1, 8, 2, 8]
    scipys = stats.permutation_test((x,), lambda z: stats.spearmanr(z, y).statistic, permutation_type="pairings")
    assert analyze.permutation_p(x, y)[0] == pytest.approx(scipys.pvalue)


def test_more_than_eleven_arms_are_drawn_by_seed():
    x, y = permutation_with(600, n=14)
    p, how = analyze.permutation_p(x, y)
    assert how == "Monte Carlo" and analyze.permutation_p(x, y) == (p, how) != analyze.permutation_p(x, y, seed=1)
    assert p == pytest.approx(stats.spearmanr(x, y).pvalue, abs=0.01)  # by Student's t, an approximation
    assert analyze.permutation_p(x, x)[0] == pytest.approx(1 / (analyze.DRAWS + 1))  # never 0


def test_clusters_of_one_are_the_paired_t_test_and_equal_ones_that_of_their_means():
    draw = np.random.default_rng(0)
    gaps = draw.integers(-1, 2, 40).astype(float)
    middle, half, p = analyze.clustered(gaps, range(40))
    test = stats.ttest_1samp(gaps, 0)
    assert (middle, p) == (pytest.approx(gaps.mean()), pytest.approx(test.pvalue))
    assert (middle - half, middle + half) == pytest.approx(tuple(test.confidence_interval()))
    cluster = np.arange(40) % 8  # 8 programs of 5 variants
    means = gaps.reshape(5, 8).mean(0)
    assert analyze.clustered(gaps, cluster)[2] == pytest.approx(stats.ttest_1samp(means, 0).pvalue)
    repeated = np.repeat(gaps, 10)  # ten copies of each question hold nothing new
    assert analyze.clustered(repeated, np.repeat(np.arange(40), 10)) == pytest.approx((middle, half, p))
    assert analyze.clustered(repeated, range(400))[2] < p / 2 or p > 0.5
    assert math.isnan(analyze.clustered(gaps[:1], [0])[2])


def test_intervals_and_errors_allow_for_questions_of_one_program():
    draw = np.random.default_rng(1)
    right = (draw.random(400) < np.repeat(draw.random(40), 10)).astype(float)  # 40 programs, each of its own difficulty
    programs, means = np.repeat(np.arange(40), 10), right.reshape(40, 10).mean(1)
    low, high = analyze.interval(right, programs)
    scale = stats.norm.ppf(0.975) * stats.sem(means)
    assert (low, high) == pytest.approx((means.mean() - scale, means.mean() + scale), abs=0.01)
    assert analyze.interval(right, None) == analyze.wilson(right.sum(), 400)
    assert analyze.interval(right, range(400)) == pytest.approx(analyze.wilson(right.sum(), 400), abs=1e-3)
    for alike in (np.zeros(400), np.ones(400), np.tile([0.0, 1.0], 200)):  # nothing between programs: 40 of them
        assert analyze.interval(alike, programs) == pytest.approx(analyze.wilson(40 * alike.mean(), 40))
    arms = {"grpo": {"old": right.astype(int), "sparse": right.astype(int)}}
    ids = {"old": [""] * 400, "sparse": programs}
    data = outcomes({"old": 400, "sparse": 400}, arms, seed_id=ids)
    p = right.mean()
    assert data.error([0], data.sets()["old"]) == pytest.approx(math.sqrt(p * (1 - p) / 400))
    assert data.error([0], data.sets()["sparse"]) == pytest.approx(stats.sem(means))
    arms = {f"grpo-s{seed}": {"old": (draw.random(400) < 0.5).astype(int)} for seed in range(3)}
    data = outcomes({"old": 400}, arms)
    expected = stats.sem(
        np.mean([x["old"] for x in arms.values()], axis=0), ddof=0
    )  # over questions, not p (1 - p) / n
    assert data.error([0, 1, 2], data.sets()["old"]) == pytest.approx(expected) and expected < 0.018


# ---- published outcomes


@pytest.fixture
def published():
    if not OUTCOMES.exists():
        pytest.skip(f"{OUTCOMES} is not here: the published outcomes lie outside the repository")
    return analyze.read_outcomes(OUTCOMES)


def test_published_dynamath_outcomes_give_the_published_accuracies(published):
    assert len(published.runs) == 14 and len(published.items) == 5010
    rows = table("main", published)[1]
    for arm, average, worst in [("Qwen2-7B", 42.1, 13.8), ("GPT4o", 63.3, 34.7), ("claude3.5", 64.8, 35.7),
                                ("llava1.5-7B", 16.4, 1.8)]:  # fmt: skip
        row = find(rows, run=arm)
        cell = row["dynamath_results (n = 5010 of 501 programs)"]
        assert cell.split()[0] == str(average)
        low, high = (float(x.strip("[],")) for x in cell.split()[1:])
        programs = np.unique(published.column("seed_id").astype(int), return_inverse=True)[1]
        right = published.right[[run["name"] for run in published.runs].index(arm)]
        means = np.bincount(programs, right) / np.bincount(programs)  # of 10 variants each: one number a program
        t_low, t_high = stats.t.interval(0.95, 500, means.mean(), stats.sem(means))
        assert (low, high) == pytest.approx((100 * t_low, 100 * t_high), abs=0.25)
        assert high - low > 1.7 * 100 * np.subtract(*analyze.wilson(right.sum(), 5010)[::-1])
        share, *bounds = row["dynamath_results, worst case (n = 501)"].split()
        whole = binomtest(round(worst * 5.01), 501).proportion_ci(method="wilson")
        assert share == str(worst) and bounds == [f"[{100 * whole.low:.1f},", f"{100 * whole.high:.1f}]"]
    rows = table("composition", published)[1]
    assert find(rows, who="Qwen2-7B")["multiple choice"] == "60.4"


def test_published_dynamath_outcomes_in_pairs(published):
    rows = table("pairs", published)[1]
    assert len(rows) == 1 + 14 * 13 // 2
    for pair, won, lost, p in [("InternVL2-26b - Qwen2-7B", 600, 656, 0.1206), ("GPT4o - claude3.5", 558, 633, 0.0320),
                               ("deepseek7B - llava1.6-vicuna-13B", 574, 475, 0.00246)]:  # fmt: skip
        row = find(rows, pair=pair)
        assert (row["won"], row["lost"]) == (won, lost)
        assert float(row["exact p"]) == pytest.approx(p, rel=5e-3) and float(row["mid-p"]) < p
        assert float(row["clustered p"]) > p and row["declared"] == ""  # ten variants are not ten questions
    number = lambda row, name: float(row[rows[0].index(name)].removeprefix("< "))
    holm, ps = ([number(row, name) for row in rows[1:]] for name in ("Holm p", "clustered p"))
    assert holm == pytest.approx(analyze.holm(ps), rel=0.02)  # of the printed, rounded p


def test_published_dynamath_outcomes_slice_by_type(published, capsys):
    analyze.main(["main", "reversal", "--outcomes", str(OUTCOMES), "--by", "answer_type"])
    out = capsys.readouterr().out
    for part in ("float (n = 2960 of 296", "multiple choice (n = 1740 of 174", "text (n = 310 of 31"):
        assert f"{part} programs)" in out
    assert out.count("Monte Carlo") == 3  # three pairs of slices, 14 arms
    Path("o.csv").write_text("level,grpo\n1,1\n,0\n")
    analyze.main(["main", "--outcomes", "o.csv", "--by", "level"])
    assert "no level (n = 1)" in capsys.readouterr().out


# ---- sparsity


def test_sparsity_recomputes_by_hand():
    metrics = steps(
        25,
        reward=lambda i: 0.01 * i,  # first ten 0.045, last ten (15 to 24) 0.195
        all_wrong=lambda i: 0.9 if i < 15 else 0.6,
        unparsed=lambda i: 0.5 if i == 0 else 0.0,  # over all 25 steps 0.02
        length=lambda i: 40 + i,
        mixed=0.2,
        truncated=0.1,
    )
    write_run("grpo", metrics=metrics)
    row = cells(table("sparsity")[1], "grpo-s0")
    assert row == {
        "run": "grpo-s0",
        "steps": 25,
        "reward, first 10": "4.5",
        "paper: base": "3.6",
        "reward, last 10": "19.5",
        "all wrong, first 10": "90.0",
        "paper: start": "85-97",
        "all wrong, last 10": "60.0",
        "mixed": "20.0",
        "unparsed": "2.0",
        "truncated": "10.0",
        "tokens": "52.0",
    }


def test_sparsity_sets_the_paper_beside_the_arms_it_speaks_of_only():
    for arm in ("base", "grpo", "hintonly"):
        write_run(arm, metrics=[] if arm == "base" else steps(12))
    Path("runs/base-s0/metrics.jsonl").touch()  # as the run of no steps leaves it
    _, rows, notes = table("sparsity")
    assert [cells(rows, f"{arm}-s0")["paper: start"] for arm in ("base", "grpo", "hintonly")] == ["", "85-97", ""]
    assert set(map(str, rows[1])) == {"base-s0", "0", "", "3.6"}
    assert not any("base-s0" in note for note in notes)


def test_sparsity_says_whether_the_all_wrong_share_is_possible():
    write_run("grpo", metrics=steps(20, reward=0.055, all_wrong=0.9))
    write_run("vapo", metrics=steps(20, reward=0.055, all_wrong=lambda i: 0.9 if i < 10 else 0.2))
    notes = table("sparsity")[2]
    assert len(notes) == 3 and notes[2].endswith(": holds in 3 of 4 starts and ends of runs.")
    failed = next(note for note in notes if "FAILS" in note)
    assert failed.startswith("vapo-s0, last 10 steps: all wrong 20.0 >= (1 - reward)^8 = 63.6 FAILS")  # 0.945 ** 8
    write_run("vapo", metrics=steps(20, reward=0.055, all_wrong=0.9))
    assert len(table("sparsity")[2]) == 2 and "holds in 4 of 4" in table("sparsity")[2][1]  # one line, not one a run


# ---- gates


def test_gates_lists_every_gate_and_names_the_runs_without():
    write_run("grpo", gates=[{"name": "sampling", "value": 0.98765, "verdict": "pass", "text": "a | b\nrollout 1"},
                             {"name": "saved", "value": "", "verdict": "skip", "text": "not asked"}])  # fmt: skip
    write_run("base")
    title, rows, notes = table("gates")
    assert rows[1:] == [
        ["grpo-s0", "sampling", "0.9877", "pass", "a | b"],
        ["grpo-s0", "saved", "", "skip", "not asked"],
    ]
    assert notes == ["no gates on record, as these are off or were not reached: base-s0."]
    assert r"a \| b" in analyze.markdown(title, rows, notes)


# ---- dynamics


def test_dynamics_recomputes_by_hand():
    all_wrong = lambda i: 0.9 if i < 3 else 0.5
    write_run("grpo", metrics=steps(12, reward=lambda i: i / 100, all_wrong=all_wrong, entropy=0.25))
    write_run("base")
    _, rows, notes = table("dynamics")
    assert [row[:4] for row in rows[1:]] == [
        ["grpo-s0", "0-2", "1.0", "90.0"], ["grpo-s0", "3-5", "4.0", "50.0"], ["grpo-s0", "6-7", "6.5", "50.0"],
        ["grpo-s0", "8-9", "8.5", "50.0"], ["grpo-s0", "10-11", "10.5", "50.0"],
    ]  # fmt: skip
    assert [row["entropy"] for row in (dict(zip(rows[0], row, strict=True)) for row in rows[1:])] == ["0.25"] * 5
    assert [row[-1] for row in rows[1:]] == ["85-97", "", "", "", ""]


def test_a_torn_last_line_of_metrics_is_left_out_and_said(capsys):
    folder = Path(write_run("grpo", metrics=steps(12)))
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + whole.splitlines()[0][:-5])
    assert len(analyze.load(Path("runs"))[0]["metrics"]) == 12
    said = "grpo-s0/metrics.jsonl: its last line is torn (a run was killed or is writing), 12 are whole"
    assert said in capsys.readouterr().err
    for text in ("{" + whole, "{" + whole[:-1]):  # the first line broken, then the last one torn as well
        (folder / "metrics.jsonl").write_text(text)
        with pytest.raises(SystemExit, match=r"metrics.jsonl, line 1 is not JSON"):
            analyze.load(Path("runs"))


# ---- main


def test_main_recomputes_by_hand():
    runs = [
        write_run("base", right={"sparse": [0], "cross": [0, 1]}),
        write_run("grpo", right={"sparse": [], "cross": [0, 1]}),
        write_run("hintonly", right={"sparse": [1, 2, 3, 4, 5, 6, 7, 8], "cross": range(10)}),
    ]
    by_rule(runs)
    title, rows, notes = table("main")
    assert title == "Accuracy, % (rule judge, not comparable with the paper's LLM judge)"
    assert rows[0][:4] == ["run", "seed", "sparse (n = 10)", "cross (n = 10)"]
    assert rows[0][4:] == ["delivered", "paper: delivered", "paper: DynaMath"]
    wilson = lambda k: "[{:.1f}, {:.1f}]".format(*(100 * x for x in binomtest(k, 10).proportion_ci(method="wilson")))
    assert rows[1:] == [
        ["base-s0", 0, f"10.0 {wilson(1)}", f"20.0 {wilson(2)}", "", "", ""],
        ["grpo-s0", 0, f"0.0 {wilson(0)}", f"20.0 {wilson(2)}", "", "no prior", "27.0-29.1"],
        ["hintonly-s0", 0, f"80.0 {wilson(8)}", f"100.0 {wilson(10)}", "", "yes", "30.6-32.9"],
    ]
    tests = [note for note in notes if " against base-s0" in note]
    assert tests == [
        "grpo-s0 against base-s0, exact two-sided McNemar, p uncorrected: "
        "sparse p = 1 (0 won, 1 lost), cross p = 1 (0 won, 0 lost).",
        "hintonly-s0 against base-s0, exact two-sided McNemar, p uncorrected: "
        "sparse p = 0.0391 (8 won, 1 lost), cross p = 0.00781 (8 won, 0 lost).",
    ]


def test_main_shows_each_seed_and_their_mean():
    hits = {0: [0], 2: [0, 1, 2], 10: [0, 1, 2, 3, 4]}
    by_rule([write_run("vapo", seed, right={"sparse": hits[seed]}) for seed in (10, 0, 2)] + [write_run("stack")])
    _, rows, notes = table("main")
    assert [row[0] for row in rows[1:]] == ["vapo-s0", "vapo-s2", "vapo-s10", "vapo, mean", "stack-s0"]
    half = stats.t.interval(0.95, 2, 30, stats.sem([10, 30, 50]))[1] - 30
    assert rows[4] == ["vapo, mean", "3 seeds", f"30.0 +- {half:.1f}", "", "", "no: MSE critic", "27.0-29.1"]
    assert rows[1][3] == ""  # vapo was not asked cross
    assert not any(" against " in note for note in notes) and any("--name base --steps 0" in note for note in notes)


def test_the_paper_has_six_effective_arms_and_five_others():
    ranges = list(analyze.PAPER_DYNAMATH.values())
    assert ranges.count("30.6-32.9") == 6 and ranges.count("27.0-29.1") == 5 and len(ranges) == 12
    assert sorted(analyze.PAPER_LOST) == sorted(analyze.OTHERS) and len(analyze.METHODS) == 7
    assert list(analyze.STYLE) == list(analyze.PAPER_DYNAMATH)


def test_a_prior_is_delivered_where_it_beats_grpo_on_both_sets():
    up, none = [1] * 30 + [0] * 10, [0] * 40
    few = [1] * 5 + [0] * 35  # 5 won, none lost: p = 0.0625
    arm = lambda old, sparse, cross: {"old": old, "sparse": sparse, "cross": cross}
    arms = {
        "base": arm(up, up, up), "grpo": arm(none, none, none), "hintonly": arm(up, none, up), "opd": arm(up, up, few),
        "vapo": arm(none, few, up), "grpo-s1": arm(up, up, up), "stack-s1": arm(up, up, up),
        "reopd-s2": arm(up, up, up), "vapo-s1": arm(none, none, none),
    }  # fmt: skip
    data = outcomes({"old": 40, "sparse": 40, "cross": 40}, arms)
    _, rows, _ = table("main", data)
    assert rows[0][2:6] == ["old (n = 40)", "sparse (n = 40)", "combined (n = 80)", "cross (n = 40)"]
    verdicts = {row[0]: row[rows[0].index("delivered")] for row in rows[1:]}
    assert verdicts == {"base": "", "grpo": "", "grpo-s1": "", "grpo, mean": "", "hintonly": "yes", "opd": "no",
                        "reopd-s2": "", "vapo": "no", "vapo-s1": "no", "vapo, mean": "no",
                        "stack-s1": "no"}  # fmt: skip


def test_the_worst_case_is_by_program_and_so_is_the_test():
    program = {"dynamath": [f"q{i // 5}" for i in range(40)]}
    grpo, stack = [0] * 40, [1] * 12 + [0] * 28  # programs 0 and 1 whole, 2 of 5 of program 2
    data = outcomes({"dynamath": 40}, {"grpo": {"dynamath": grpo}, "stack": {"dynamath": stack}}, seed_id=program)
    assert find(table("main", data)[1], run="stack")["dynamath, worst case (n = 8)"] == (
        "25.0 [{:.1f}, {:.1f}]".format(*(100 * x for x in binomtest(2, 8).proportion_ci(method="wilson")))
    )
    row = find(table("pairs", data)[1], pair="grpo - stack")
    means = np.array(stack).reshape(8, 5).mean(1)
    test = stats.ttest_1samp(means, 0)
    assert row["clustered p"] == row["Holm p"] == f"{test.pvalue:.3g}" and float(row["exact p"]) < 0.001
    low, high = test.confidence_interval()
    assert row["detectable"] == f"{50 * (high - low):.1f}"
    data.runs[0]["arm"] = "base"
    assert table("main", data)[2][-2].endswith(f": dynamath p = {test.pvalue:.3g} by program (12 won, 0 lost).")


def test_main_refuses_when_a_verdict_is_missing():
    runs = [write_run("base", right={"sparse": [0]}), write_run("grpo", right={"sparse": [0, 1]})]
    missing = r"^verdicts are missing: run `python judge.py runs/\* --judge rule`, or with a --model. Without one: "
    missing += r"base-s0 10 of 10, grpo-s0 10 of 10\.$"
    for name in [*analyze.OF_OUTCOMES, "audit", "hacking"]:
        with pytest.raises(SystemExit, match=missing):
            table(name)
    by_rule(runs[:1])
    with pytest.raises(SystemExit, match=r"--judge rule`. Without one: grpo-s0 1 of 10 \(of these sparse/sparse1\)\.$"):
        table("main")
    by_rule(runs)
    assert len(table("main")[1]) == 3
    lines = Path("runs/verdicts.jsonl").read_text().splitlines()
    Path("runs/verdicts.jsonl").write_text("\n".join(lines[1:]) + "\n")  # an item that the judge gave up on
    with pytest.raises(SystemExit, match=r"1 of 10 \(of these sparse/sparse\d"):
        table("main")
    named = Path("runs/verdicts.jsonl").read_text().replace('"rule"', '"org/m, prompt 0123abcd"')
    Path("runs/verdicts.jsonl").write_text(named)
    with pytest.raises(SystemExit, match=r"/\* --model org/m --address ADDRESS` with the address and --extra of"):
        table("main")


def test_runs_that_were_evaluated_otherwise_are_refused():
    runs = [write_run("base", max_pixels=784), write_run("grpo", max_pixels=784), write_run("vapo", max_pixels=1568)]
    by_rule(runs)
    with pytest.raises(SystemExit, match=r"base-s0 and vapo-s0 were .* another --max-pixels \('784', '1568'\)"):
        table("main")
    write_run("vapo", max_pixels=784, instruction="Think.")
    with pytest.raises(SystemExit, match="another --instruction"):
        table("pairs")
    write_run("vapo", max_pixels=784)
    row = {"id": "sparse0", "question": "another?", "answer": "0", "choices": []}
    write_lines(Path("elsewhere/sparse.jsonl"), [row])
    write_lines(Path("runs/vapo-s0/outputs.jsonl"), [{"set": "sparse", "id": "sparse0", "output": ""}])
    config = json.loads(Path("runs/vapo-s0/config.json").read_text())
    config["args"]["eval"] = "elsewhere/sparse.jsonl"
    config["sha256"] = {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in ["elsewhere/sparse.jsonl"]
    }
    Path("runs/vapo-s0/config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="base-s0 and vapo-s0 were evaluated with another set sparse"):
        table("main")


@pytest.mark.parametrize("typed", ["data", "./data", "data/."])
def test_a_set_that_changed_after_the_run_is_refused(typed):
    by_rule([write_run("base"), write_run("grpo")])
    config = Path("runs/base-s0/config.json")  # a run keeps paths as they were typed
    config.write_text(config.read_text().replace("data/", f"{typed}/"))
    assert len(table("main")[1]) == 3
    rows = judge.read_jsonl("data/cross.jsonl")
    write_lines(Path("data/cross.jsonl"), [rows[0] | {"answer": "7"}, *rows[1:]])
    with pytest.raises(SystemExit, match="^data/cross.jsonl is not the file that base-s0 answered"):
        table("main")


def test_unfinished_runs_are_named_and_left_out():
    by_rule([write_run("base"), write_run("grpo")])
    Path(write_run("vapo", metrics=steps(7), steps=300), "outputs.jsonl").unlink()
    for name in ("main", "pairs", "audit"):
        _, rows, notes = table(name)
        assert not any("vapo-s0" in map(str, row) for row in rows)
        assert any("left out: vapo-s0 is unfinished (step 7 of 300)" in note for note in notes)
    write_run("stack", right={"sparse": [3], "cross": []})
    with pytest.raises(SystemExit, match=r"run `python judge.py runs/\* --judge rule`"):
        table("main")  # judge.py leaves an unfinished run out as well


# ---- outcomes files


def test_arms_and_attributes_of_an_outcomes_file():
    Path("o.csv").write_text("level,grpo-s1,variant,x-1,grpo,seed_id\n1,1,0,0,1,0\n2,0,1,0,1,1\n")
    data = analyze.read_outcomes(Path("o.csv"))
    assert [(run["arm"], run["seed"]) for run in data.runs] == [("grpo", 1), ("grpo", 0), ("x-1", 0)]
    assert data.right.tolist() == [[1, 0], [1, 1], [0, 0]]
    assert data.items[1] == {"set": "o", "id": 1, "level": "2", "variant": "1", "seed_id": "1"}
    assert data.notes == [
        "o.csv: read as arms: grpo-s1, grpo, x-1 (3); as attributes: level, variant, seed_id. --arms names the arms "
        "where this is not so."
    ]
    Path("o.csv").write_text("level , grpo-s1,variant,x-1, grpo,seed_id\n1, 1,0,0 ,1,0\n2,0,1,0 , 1 ,1\n")
    blanks = analyze.read_outcomes(Path("o.csv"))
    assert (blanks.runs, blanks.items, blanks.notes) == (data.runs, data.items, data.notes)
    named = analyze.read_outcomes(Path("o.csv"), ["x-1", "grpo"])
    assert [run["name"] for run in named.runs] == ["grpo", "x-1"] and named.items[0]["grpo-s1"] == "1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("set,grpo\nold,1\nold,\n", "row 3: the column 'grpo' holds ''. .* remove the row or fill in 0 or 1, or name"),
        ("set,grpo\nold,1.0\nold,0.0\n", "row 2: the column 'grpo' holds '1.0'"),
        ("set,grpo\nold,True\n", "row 2: the column 'grpo' holds 'True'"),
        ("grpo,vapo\n0,1\n1,1\n1,0\n2,1\n", "row 5: the column 'grpo' holds '2'"),
        ("set,kind\nold,1\n", "has no arm: no column but attributes"),
        ("", "has no arm"),
        ("set,grpo\nold,1\nold\n", "row 3 has 1 cells, the header 2"),
        ("set,grpo,grpo\nold,1,1\n", "two columns for one run"),
        ("grpo,,vapo\n0,3,1\n", "^o.csv, column 2 has no name: name it or remove it"),
        (",grpo\n0,1\n", "column 1 has no name"),
        ("set,grpo\nß,1\n".encode("latin-1"), "^o.csv is not UTF-8: save it as UTF-8"),
        ("set,grpo\n", "has no arm"),
        ("grpo-s0,grpo\n1,1\n", "two columns for one run"),
    ],
)
def test_an_outcomes_file_that_is_not_clear_is_refused(text, words):
    Path("o.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit, match=words):
        analyze.read_outcomes(Path("o.csv"))


def test_arms_that_are_named_have_to_be_columns_of_0_and_1():
    Path("o.csv").write_text("level,grpo\n1,1\n2,0\n")
    for arms, words in (("grpo,vapo", "^o.csv has no column vapo, which --arms names: choose from level, grpo"),
                        ("level", "row 3: the column 'level' holds '2'")):  # fmt: skip
        with pytest.raises(SystemExit, match=words):
            analyze.main(["main", "--outcomes", "o.csv", "--arms", arms])
    with pytest.raises(SystemExit, match="^--arms names columns of an outcomes file: give --outcomes as well"):
        analyze.main(["main", "--arms", "grpo"])


def test_outcomes_of_runs_give_the_same_tables_from_a_file():
    hits = {"base": [0], "grpo": [0, 1, 2], "hintonly": [1, 2, 3, 4, 8], "uft001": [5, 6, 7, 8, 9], "stack": []}
    sets = {"old": 3, "sparse": 1, "cross": 2}
    right = lambda hit: {name: [(i * k) % 10 for i in hit] for name, k in sets.items()}
    by_rule([write_run(arm, seed, right=right(hit)) for arm, hit in hits.items() for seed in (0, 1)])
    analyze.main(["--save", "saved.csv"])
    saved = analyze.read_outcomes(Path("saved.csv"))
    for name in analyze.OF_OUTCOMES:
        rows, again = table(name)[1], table(name, saved)[1]
        strict = [row for row in rows if "strict rule" not in row]  # outputs are needed for that
        assert strict == again, name


# ---- pairs, methods


def test_pairs_are_of_one_seed_and_holm_is_over_one_set_and_seed():
    draw = random.Random(0)
    names = ["base", "grpo", "hintonly", "stack", "vapohl", "vapo", "vapo-s1", "vapohl-s1"]
    arms = {name: {s: [draw.randrange(2) for _ in range(60)] for s in ("old", "sparse")} for name in names}
    _, rows, notes = table("pairs", outcomes({"old": 60, "sparse": 60}, arms))
    assert len(rows) - 1 == 3 * (10 + 1 + 1)  # old, sparse, combined; seed 0, seed 1, both
    of = [row for row in rows[1:] if row[:2] == ["combined", 0]]
    assert [row[2] for row in of if row[11]] == ["hintonly - grpo", "stack - hintonly", "vapohl - vapo"]
    assert [row[11] for row in of] == ["yes"] * 3 + [""] * 7
    both = lambda name: arms[name]["old"] + arms[name]["sparse"]
    for row in of:
        one, two = map(both, row[2].split(" - "))
        won, lost = (sum(x > y for x, y in zip(a, b, strict=True)) for a, b in ((one, two), (two, one)))
        assert row[3:7] == [f"{(won - lost) / 1.2:+.1f}", won, lost, f"{binomtest(won, won + lost).pvalue:.3g}"]
    ps = [binomtest(row[4], row[4] + row[5]).pvalue for row in of]
    assert [row[8] for row in of] == [f"{p:.3g}" for p in analyze.holm(ps)]
    assert [row[-1] for row in rows[1:] if row[-1]] == ["+14.4"] * 3  # vapohl - vapo combined, each seed and both
    assert find(rows, set="old", seed=1)["pair"] == "vapohl - vapo" and find(rows, set="old", seed=1)["Holm p"] != ""
    gaps = [np.mean(both(f"vapohl{s}")) - np.mean(both(f"vapo{s}")) for s in ("", "-s1")]
    test = stats.ttest_1samp(gaps, 0)
    assert list(find(rows, set="combined", seed="all").values())[2:] == [
        "vapohl - vapo", f"{100 * np.mean(gaps):+.1f}", "", "", "", "", *[f"{test.pvalue:.3g}"] * 2,
        f"{100 * (test.confidence_interval().high - np.mean(gaps)):.1f}", "yes", "+14.4",
    ]  # fmt: skip


def test_methods_are_paired_by_seed():
    shares = {"vapohl": 30, "vapo": 10, "vapohl-s1": 40, "vapo-s1": 10, "vapohl-s2": 20, "vapo-s3": 39}
    arms = {name: {"cross": [1] * k + [0] * (40 - k)} for name, k in shares.items()}
    row = find(table("methods", outcomes({"cross": 40}, arms))[1], statement="4 HL-Gauss critic for MSE")
    test = stats.ttest_1samp([50, 75], 0)
    low, high = test.confidence_interval()
    assert list(row.values())[1:] == ["cross", "vapohl - vapo", "+62.5", f"{low:+.1f} to {high:+.1f}",
                                      f"{test.pvalue:.3g}", 2, "30.6-32.9 to 27.0-29.1"]  # fmt: skip


def test_methods_take_ends_of_groups_and_say_what_was_not_run():
    shares = {"base": 30, "grpo": 11, "hintonly": 20, "uft001": 16, "uft002": 18, "opd": 12, "opd-gated": 15}
    arms = {name: {s: [1] * k + [0] * (40 - k) for s in ("old", "sparse", "cross")} for name, k in shares.items()}
    _, rows, _ = table("methods", outcomes({"old": 40, "sparse": 40, "cross": 40}, arms))
    assert len(rows) == 15 and {row[1] for row in rows[1:]} == {"combined", "cross"}
    of = lambda k: next(row for row in rows[1:] if row[0].startswith(k) and row[1] == "cross")
    assert of("1")[2:4] == ["uft001 - opd-gated (not run: opd-annealed vapohl stack reopd vapo)", "+2.5"]
    assert of("1")[5] == ""
    assert of("2")[2:4] == ["hintonly - grpo", "+22.5"]
    gaps = [1] * 9 + [0] * 31
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval()
    assert of("2")[4:7] == [f"{100 * low:+.1f} to {100 * high:+.1f}", f"{stats.ttest_1samp(gaps, 0).pvalue:.3g}", 1]
    assert of("3")[2:4] == ["uft001 & uft002 - hintonly", "-7.5"]
    assert of("4")[2:] == ["not run: vapohl vapo", "", "", "", "", "30.6-32.9 to 27.0-29.1"]
    assert of("6")[2] == "not run: stack opd-annealed" and of("7")[2].startswith("hintonly - opd (not run: ")


# ---- reversal


def eleven_arms(seed=0):
    """Eleven arms of rising skill. On free questions skill shows; a four-option question is answered by a letter out of
    habit (a quarter right), and the more skill an arm has, the more often it works instead and names no option."""
    draw, arms = random.Random(seed), {}
    for k, arm in enumerate([x for x in analyze.PAPER_DYNAMATH if x != "base"]):
        skill = k / 10
        free = lambda n, low, high, skill=skill: [int(draw.random() < low + (high - low) * skill) for _ in range(n)]
        letters = [int(draw.random() < 0.25 and draw.random() > 0.9 * skill) for _ in range(220)]
        arms[arm] = {"old": letters + free(99, 0.2, 0.32), "sparse": free(800, 0.05, 0.35)}
        arms[arm]["dynamath"] = free(501, 0.2, 0.5)
    kind = {"old": ["choice"] * 220 + ["free"] * 99, "sparse": ["free"] * 800, "dynamath": ["free"] * 501}
    return outcomes({"old": 319, "sparse": 800, "dynamath": 501}, arms, kind=kind)


def test_a_near_chance_slice_reverses_the_order_and_is_the_only_reason():
    _, rows, notes = table("reversal", eleven_arms())
    rho = {(row[0], row[2].split(" (")[0]): float(row[5]) for row in rows[1:]}
    assert all(row[4] == 11 and row[7] == "exact" for row in rows[1:])
    assert rho["old", "all"] < -0.7 and rho["old", "multiple choice alone"] < -0.9
    assert rho["old", "without multiple choice"] > 0.4 and rho["sparse", "all"] > 0.9
    old = find(rows, set="old", questions="all (319)")
    assert float(old["p"]) < 0.02 and old["paper"] == "-0.74 (p = 0.011)"
    low, high = map(float, old["leaving one arm out"].split(" to "))
    assert low <= rho["old", "all"] <= high < 0
    assert [row[-1] for row in rows[1:]].count("") == len(rows) - 3  # the paper's two
    x, y = ([*eleven_arms().score(eleven_arms().sets()[name]).values()] for name in ("old", "dynamath"))
    assert old["rho"] == f"{stats.spearmanr(x, y).statistic:+.2f}"


def test_reversal_leaves_the_base_out_and_takes_three_arms():
    data = eleven_arms()
    data.runs[0]["arm"] = "base"
    assert {row[4] for row in table("reversal", data)[1][1:]} == {10}
    data.runs, data.right = data.runs[:3], data.right[:3]
    assert {tuple(row[4:9]) for row in table("reversal", data)[1][1:]} == {(2, "", "", "", "")}
    tied = {arm: {"old": [x, 0], "cross": [1, y]} for arm, x, y in (("opd", 1, 0), ("grpo", 0, 1), ("vapo", 1, 1))}
    assert table("reversal", outcomes({"old": 2, "cross": 2}, tied))[1][1][5:9] == ["-0.50", "1", "exact", "undefined"]


@pytest.mark.parametrize("sets, words", [
    (["mine"], {"methods": "no combined (it takes old and sparse) and no transfer set (dynamath or cross): contrasts "
                           "on mine.",
                "reversal": "there is nothing to rank but mine: --by cuts a set by an attribute of its questions."}),
    (["old", "sparse"], {"methods": "no transfer set (dynamath or cross): contrasts on combined.",
                         "reversal": "no transfer set (dynamath or cross): every set against every other."}),
    (["sparse", "cross"], {"methods": "no combined (it takes old and sparse): contrasts on cross."}),
])  # fmt: skip
def test_without_a_transfer_set_a_table_says_so_and_uses_what_there_is(sets, words):
    arms = {arm: {name: [k, 1, 0] for name in sets} for arm, k in (("grpo", 0), ("hintonly", 1), ("opd", 1))}
    data = outcomes(dict.fromkeys(sets, 3), arms)
    for name, note in words.items():
        _, rows, notes = table(name, data)
        assert notes[0] == note and (len(rows) > 1) == (note[:8] != "there is")
    data = outcomes(dict.fromkeys(sets, 3), {"base": arms["grpo"], "grpo": arms["grpo"], "opd-s1": arms["opd"]})
    _, rows, notes = table("pairs", data)
    assert len(rows) == 1 and notes[0].startswith("there is no pair: it takes two arms beside the base, of one seed")


# ---- composition, audit, hacking: a set with options


def write_choices(arm, said, seed=0, **args):
    """A run that was asked four questions with options; `said` are its four outputs. Golds B, B, C, A."""
    options = [["10", "20", "3", "40"], ["11", "21", "31", "41"], ["12", "22", "32"], ["13", "23", "33", "43"]]
    rows = [{"id": f"old{i}", "question": f"Which {i}?", "answer": gold, "choices": options[i], "kind": "choice"}
            for i, gold in enumerate(["B", "21", "C", "A"])]  # fmt: skip
    rows.append({"id": "old4", "question": "How many?", "answer": "7", "choices": [], "kind": "free"})
    folder = Path(write_run(arm, seed, right={"sparse": []}, eval="data/sparse.jsonl,data/old.jsonl", **args))
    write_lines(Path("data/old.jsonl"), rows)
    outputs = judge.read_jsonl(folder / "outputs.jsonl")
    outputs += [{"set": "old", "id": f"old{i}", "output": x} for i, x in enumerate(said)]
    write_lines(folder / "outputs.jsonl", outputs)
    return str(folder)


SAID = {
    "base": ["<answer>B</answer>", "<answer>B</answer>", "<answer>B</answer>", "(B)", "<answer>7</answer>"],
    "grpo": ["<answer>20</answer>", "It is 21.", "<answer>C</answer>", "", "I count seven of them, so 7"],
}


def write_verdicts(**right):
    """An LLM judge's verdicts: {run name: rows of `old` that it calls right}; all else is wrong."""
    lines = []
    for name, hits in right.items():
        for answer in judge.read_answers(Path("runs") / name):
            lines.append({"key": answer["key"], "verdict": answer["id"] in hits, "judge": "model", "seed": 0})
    write_lines(Path("runs/verdicts.jsonl"), lines)


def test_composition_recomputes_by_hand():
    by_rule([write_choices(arm, said) for arm, said in SAID.items()])
    _, rows, notes = table("composition")
    row = lambda who: list(find(rows, set="old", who=who).values())[2:]
    chance = (3 / 4 + 1 / 3) / 4
    less = lambda right: f"{100 * (right - 4 * chance) / (4 - 4 * chance):.1f}"
    assert row("always B") == ["40.0", "50.0", less(2), "0.0", ""]
    assert row("random") == [f"{80 * chance:.1f}", f"{100 * chance:.1f}", "0.0", "0.0", ""]
    assert row("shortest") == ["20.0", "25.0", less(1), "0.0", ""]  # C, A, A, A
    assert row("base-s0") == ["60.0", "50.0", less(2), "100.0", "100.0"]
    assert row("grpo-s0") == ["80.0", "75.0", less(3), "100.0", "25.0"]
    said = (
        "old: 4 of 5 are multiple choice, 80.0 %, 1 with 3 options, 3 with 4 options (paper: 69 % of old-319, with 4)."
    )
    assert said in notes
    assert find(rows, set="sparse", who="grpo-s0")["multiple choice"] == ""


def test_composition_is_the_same_from_a_saved_file():
    by_rule([write_choices(arm, said) for arm, said in SAID.items()])
    analyze.main(["--save", "new/folder/saved.csv"])
    saved = analyze.read_outcomes(Path("new/folder/saved.csv"))
    for name in ("main", "composition"):
        (_, rows, notes), (_, again, same) = table(name), table(name, saved)
        assert again == rows and same[:-1] == notes, name
    assert {row[1] for row in rows[1:]} == {"always B", "random", "shortest", "base-s0", "grpo-s0"}
    for answer, gold in (("B", "B"), ("31", "C"), ("E", ""), ("17", "")):  # the last two are no option
        facts = analyze.option_facts({"answer": answer, "choices": ["11", "2", "31", "4"]})
        assert facts == {"options": 4, "gold": gold, "shortest": "B"}


def test_audit_shows_a_rule_that_turns_the_ranking_round():
    for arm, like in (("opd", "base"), ("grpo", "grpo"), ("base", "grpo")):
        write_choices(arm, SAID[like])
    write_verdicts(**{"base-s0": {"old0"}, "grpo-s0": {"old0", "old1", "old2", "old4"}, "opd-s0": {"old0", "old4"}})
    title, rows, notes = table("audit")
    assert title == "Rule graders against the judge, % and points (judge: model)"
    opd, grpo = (list(find(rows, set="old", run=f"{arm}-s0").values())[2:] for arm in ("opd", "grpo"))
    # strict: opd's B, B and 7 are right, of grpo's only C is; lenient: grpo's four
    assert opd == ["40.0", "60.0", "+20.0", "0", "1", "up to 30", "60.0", "+20.0", "0", "1", "0.0"]
    assert grpo == ["80.0", "20.0", "-60.0", "3", "0", "up to 30", "80.0", "+0.0", "0", "0", "20.0"]
    order = "first opd (judge: grpo), last grpo (judge: opd)"
    assert f"old, strict against judge: 1 of 1 pairs of arms change order; {order}." in notes  # the base is none
    assert any(note.startswith("old, lenient against judge: 0 of 1 pairs") for note in notes)


def test_audit_and_composition_rank_and_show_arms_by_the_mean_of_their_seeds():
    said = {"opd": [SAID["base"], SAID["grpo"]], "grpo": [SAID["grpo"], SAID["grpo"]]}
    by_rule([write_choices(arm, x, seed) for arm, seeds in said.items() for seed, x in enumerate(seeds)])
    _, rows, notes = table("audit")
    assert [row[1] for row in rows if row[0] == "old"] == ["grpo-s0", "grpo-s1", "grpo, mean of 2", "opd-s0", "opd-s1",
                                                           "opd, mean of 2"]  # fmt: skip
    mean = list(find(rows, set="old", run="opd, mean of 2").values())[2:]
    assert mean == ["70.0", "40.0", "-30.0", "1.5", "0", "up to 30", "70.0", "+0.0", "0", "0", "10.0"]
    assert any(note.startswith("old, strict against judge: 1 of 1 pairs of arms") for note in notes)
    mean = list(find(table("composition")[1], set="old", who="opd, mean of 2").values())[2:]
    chance = (3 / 4 + 1 / 3) / 4  # two and three of four right, all and one of four bare letters
    assert mean == ["70.0", "62.5", f"{100 * (2.5 - 4 * chance) / (4 - 4 * chance):.1f}", "100.0", "62.5"]


def test_a_seed_that_was_not_asked_a_set_is_told_and_the_others_stand():
    asked, some = {"sparse": [0], "cross": [1, 2]}, {"sparse": [3]}
    runs = [write_run("grpo", 0, right=asked), write_run("grpo", 1, right=some), write_run("hintonly", 0, right=asked)]
    by_rule(runs + [write_run("stack", 0, right=some), write_run("vapohl", 1, right=asked), write_run("vapo", 2)])
    data = analyze.judged(analyze.load(Path("runs")), Path("runs/verdicts.jsonl"))
    scores = data.score(data.sets()["cross"])
    assert scores["grpo"] == 0.2 and math.isnan(scores["stack"])
    assert find(table("main")[1], run="grpo, mean")["cross (n = 10)"] == "20.0 (1 seed)"
    of = lambda k: next(row for row in table("methods")[1] if row[0].startswith(k) and row[1] == "cross")
    assert of("2")[2:4] == ["hintonly - grpo", "+0.0"] and of("4")[2:4] == ["no seed in common", ""]
    notes = table("reversal")[2]
    assert "sparse, cross: stack left out, not asked both." in notes
    assert sum("left out" in note for note in notes) == 1
    lone = analyze.seed_mean(np.array([0.1, 0.3, math.nan]))
    assert lone.startswith("20.0 +- ") and lone.endswith(" (2 seeds)")


def test_hacking_recomputes_by_hand():
    folders = [write_choices(arm, said, model="base") for arm, said in SAID.items()]
    write_lines(Path("runs/grpo-s0/rollouts.jsonl"), [
        {"forced": "3+4=7;", "sampled": "<answer>7</answer>", "reward": 1.0},
        {"forced": "3+14=17;", "sampled": "<answer>7</answer>", "reward": 0.0},
        {"forced": "3+4=7;", "sampled": "<answer>9</answer>", "reward": 1.0},
        {"forced": "", "sampled": "<answer>7</answer>", "reward": 1.0},
    ])  # fmt: skip
    by_rule(folders)
    _, rows, notes = table("hacking")
    base, grpo = (list(find(rows, set="old", run=f"{arm}-s0").values())[2:] for arm in ("base", "grpo"))
    assert base[:4] == ["80.0", "100.0", "60.0", "60.0"] and grpo[:4] == ["40.0", "80.0", "80.0", "100.0"]
    assert base[4] == round(sum(map(len, SAID["base"])) / 5)
    assert base[5] == "A 0/25 B 100/50 C 0/25 D 0/0" and grpo[5] == "A 0/25 B 67/50 C 33/25 D 0/0"
    assert base[6:] == ["", "not run", "", "not run"]
    assert find(rows, set="sparse", run="grpo-s0")["options shuffled"] == "no options"
    assert {row[0] for row in rows[1:]} == {"old", "sparse"}  # what is combined of them says nothing new
    assert ("grpo-s0: of 3 rollouts on record that began with a hint 2 are right; in 1 the answer stands in the hint, "
            "of these 1 are right.") in notes  # fmt: skip


def write_probe(arm, model, said):
    """A run of runs/probes on copies of two rows of `old`."""
    folder = Path("runs/probes") / f"{arm}-s0"
    old = judge.read_jsonl("data/old.jsonl")
    write_lines(
        Path("copies/old-shuffled.jsonl"), [old[0] | {"choices": ["20", "10", "3", "40"], "answer": "A"}, old[3]]
    )
    write_lines(Path("copies/old-blank.jsonl"), old)
    lines = [{"set": "old-shuffled", "id": f"old{i}", "output": x} for i, x in zip((0, 3), said, strict=False)]
    lines += [{"set": "old-blank", "id": f"old{i}", "output": "B"} for i in range(5)]
    write_lines(folder / "outputs.jsonl", lines)
    paths = "copies/old-shuffled.jsonl,copies/old-blank.jsonl"
    (folder / "config.json").write_text(json.dumps({"args": {"name": arm, "seed": 0, "eval": paths, "model": model}}))
    return str(folder)


def test_hacking_sets_the_probes_beside_the_same_questions():
    folders = [write_choices(arm, said, model="base") for arm, said in SAID.items()]
    folders.append(write_probe("base", "runs/base-s0/checkpoint", ["B", "B"]))
    with pytest.raises(SystemExit, match=r"runs/probes/\* --judge rule --verdicts runs/verdicts.jsonl`"):
        by_rule(folders[:2])
        table("hacking")
    by_rule(folders)
    row = find(table("hacking")[1], set="old", run="base-s0")
    assert list(row.values())[-4:] == ["50.0", "0.0", "60.0", "40.0"]  # old0 and old3; all five
    assert find(table("hacking")[1], set="old", run="grpo-s0")["image blank"] == "not run"
    assert "probes" not in str(table("main")[1])
    write_probe("base", "runs/grpo-s0/checkpoint", ["B", "B"])
    with pytest.raises(SystemExit, match="probes/base-s0 is of runs/grpo-s0/checkpoint, not of base-s0's checkpoint"):
        table("hacking")


def test_probes_move_the_reference_and_grey_the_image():
    rows = [{"id": f"r{i}", "image": f"images/{i}.png", "question": "Which?", "answer": "B", "kind": "choice",
             "choices": [f"{i}", f"{i + 1}", f"{i + 2}"], "solution": ["B"]} for i in range(20)]  # fmt: skip
    rows += [rows[0] | {"id": "drawn", "choices": ["A", "B", "C"]}]
    rows += [rows[0] | {"id": "free", "choices": [], "answer": "7", "kind": "free", "image": "images/1.png"}]
    Path("data/images").mkdir(parents=True)
    for i in range(20):
        Image.new("RGB", (30 + i, 40), "red").save(f"data/images/{i}.png")
    write_lines(Path("data/old.jsonl"), rows)
    prepare.main(["data/old.jsonl", "--out", "data/probes/x"])
    moved, blank = (judge.read_jsonl(f"data/probes/x/old-{probe}.jsonl") for probe in analyze.PROBES)
    assert [row["id"] for row in moved] == [f"r{i}" for i in range(20)] and len(blank) == 22
    for row, was in zip(moved, rows, strict=False):
        gold = judge.pick(row["answer"], row["choices"])
        assert row["choices"][gold] == was["choices"][1] and gold != 1
        assert sorted(row["choices"]) == sorted(was["choices"])
        assert Image.open(Path("data/probes/x") / row["image"]).getpixel((0, 0)) == (255, 0, 0)
        assert row["solution"] == [] and row["teacher"] is None
    assert len({row["answer"] for row in moved}) == 2
    for row, was in zip(blank, rows, strict=True):
        image = Image.open(Path("data/probes/x") / row["image"])
        assert image.size == Image.open(Path("data") / was["image"]).size and len(image.getcolors()) == 1
        assert row["answer"] == was["answer"]
    assert len({row["image"] for row in blank}) == 22
    prepare.main(["data/old.jsonl", "--out", "data/probes/y"])
    assert moved == judge.read_jsonl("data/probes/y/old-shuffled.jsonl")
    with pytest.raises(SystemExit, match="data/nothing.jsonl does not exist"):
        prepare.main(["data/nothing.jsonl"])


# ---- figures


def write_eleven(seeds=(0, 1)):
    draw = random.Random(0)
    for arm, seed in itertools.product(analyze.PAPER_DYNAMATH, seeds):
        right = {name: [i for i in range(10) if draw.random() < 0.5] for name in ("old", "sparse", "cross")}
        counts = (40, 9, 0, 0, 4, 2, 0, 0, 0, 5)
        bins = [[(0.05 + k / 10) * n, (0.1 + 0.08 * k) * n, n] for k, n in enumerate(counts)]
        more = {"calibration": bins} if arm.startswith("vapo") else {}
        metrics = steps(0 if arm == "base" else 300, reward=lambda i: draw.random(), **more)
        write_run(arm, seed, right=right, metrics=metrics)
    by_rule([str(path) for path in Path("runs").glob("*-s*")])


def test_figures_are_drawn_small_and_what_cannot_be_is_said(capsys):
    pytest.importorskip("matplotlib", reason="figures need matplotlib, which is optional")
    write_eleven()
    analyze.main(["--figures", "figures"])
    for name in ("dynamics", "transfer", "calibration"):
        image = Image.open(f"figures/{name}.png")
        assert image.width == 1020 and Path(f"figures/{name}.png").stat().st_size < 200_000  # 3.4 inches
    for run in Path("runs").glob("vapo*"):
        write_lines(run / "metrics.jsonl", steps(3))
    analyze.main(["--figures", "more"])
    assert "more/calibration.png is not drawn: no run has a critic" in capsys.readouterr().out
    assert sorted(path.name for path in Path("more").iterdir()) == ["dynamics.png", "transfer.png"]


def test_a_transfer_set_that_no_trained_arm_was_asked_makes_no_figure(capsys):
    pytest.importorskip("matplotlib", reason="figures need matplotlib, which is optional")
    asked = dict.fromkeys(("old", "sparse"), [1, 2])
    by_rule([write_run("base", right=asked | {"cross": [1]}), write_run("grpo", right=asked, metrics=steps(3))])
    analyze.main(["--figures", "figures"])
    assert "transfer.png is not drawn: it takes two arms, one of them trained" in capsys.readouterr().out
    by_rule([write_run("opd", right={"sparse": [1], "cross": [2]})])
    analyze.main(["--figures", "figures"])
    assert Path("figures/transfer.png").exists()


def test_calibration_is_the_mean_return_in_each_bin():
    pytest.importorskip("matplotlib", reason="figures need matplotlib, which is optional")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bins = lambda n: [[0.04 * n, 0.02 * n, n], [0.3, 0.6, 2], *[[0, 0, 0]] * 8]
    write_run("grpo", metrics=steps(3))
    for seed in (0, 1):
        write_run("vapohl", seed, metrics=steps(2, calibration=lambda i: bins(6 + 8 * i)))
    line = analyze.draw_calibration(plt, analyze.load(Path("runs")), None).axes[0].lines[1]
    assert line.get_xdata() == pytest.approx([0.04, 0.15]) and line.get_ydata() == pytest.approx([0.02, 0.3])
    off = (0.02 * 40 + 0.15 * 8) / 48  # two seeds of two steps
    assert line.get_label() == f"vapohl: off by {off:.3f}" and line.get_linestyle() == "--"


def test_labels_of_eleven_arms_do_not_lie_on_one_another():
    pytest.importorskip("matplotlib", reason="figures need matplotlib, which is optional")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = analyze.draw_transfer(plt, [], eleven_arms())
    figure.canvas.draw()
    for axis in figure.axes:
        boxes = [text.get_window_extent() for text in axis.texts if text.get_text()]
        assert len(boxes) == 11 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        names = [line.get_markersize() for line in axis.lines if line.get_marker() == "o"]
        radius = max(names) / 2 * figure.dpi / 72
        dots = [axis.transData.transform(line.get_xydata()) for line in axis.lines if line.get_marker() == "o"]
        for (x, y), box in itertools.product(np.concatenate(dots), boxes):
            gap = math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))
            assert gap > radius, "a name touches a dot"
    assert figure.get_suptitle() == "outcomes of outcomes.csv"  # whose verdicts they are


def test_figures_without_matplotlib_stop_with_a_sentence(monkeypatch):
    by_rule([write_run("base"), write_run("grpo", metrics=steps(12))])
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name))
    with pytest.raises(SystemExit, match="^Figures need matplotlib.* `pip install matplotlib`"):
        analyze.main(["--figures", "figures"])


# ---- the command


def test_no_table_prints_all_and_a_named_one_itself(capsys):
    by_rule([write_run("base"), write_run("grpo", metrics=steps(10))])
    capsys.readouterr()
    analyze.main([])
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("###")]
    assert heads[:3] == ["### Sparsity of the reward in training, %",
                         "### Training dynamics, % of rollouts or groups; length in tokens", "### Gates"]  # fmt: skip
    assert heads[3] == "### Accuracy, % (rule judge, not comparable with the paper's LLM judge)"
    assert len(heads) == len(analyze.TABLES) == 10 and all("(rule judge, not" in head for head in heads[3:])
    analyze.main(["gates"])
    assert capsys.readouterr().out.count("###") == 1
    data = eleven_arms()
    analyze.main(["--outcomes", "outcomes.csv"])
    assert capsys.readouterr().out.count("### ") == len(analyze.OF_OUTCOMES) and data
    with pytest.raises(SystemExit, match="the table audit needs run folders, not outcomes alone"):
        analyze.main(["main", "audit", "--outcomes", "outcomes.csv"])
    with pytest.raises(SystemExit, match="no attribute level to slice by: choose from set, id, kind"):
        analyze.main(["main", "--outcomes", "outcomes.csv", "--by", "level"])


def test_what_needs_no_verdicts_is_printed_before_the_stop(capsys):
    write_run("grpo", metrics=steps(10))
    with pytest.raises(SystemExit, match="verdicts are missing"):
        analyze.main([])
    assert capsys.readouterr().out.count("### ") == 3


def test_markdown_has_one_line_a_row_and_columns_of_one_width():
    lines = analyze.markdown("T", [["a", "b"], ["long cell", 1]], ["n"]).splitlines()
    assert lines == ["### T", "", "| a         | b |", "|-----------|---|", "| long cell | 1 |", "", "- n"]


def test_what_is_not_there_is_said_in_one_sentence():
    for args, words in (([], "^runs holds no run folder"), (["--runs", "nowhere"], "^nowhere holds no run folder"),
                        (["speed"], "^there is no table speed: choose from sparsity, dynamics, gates")):  # fmt: skip
        with pytest.raises(SystemExit, match=words):
            analyze.main(args)
    write_run("grpo", metrics=steps(3))
    Path("runs/grpo-s0/outputs.jsonl").unlink()  # still in training
    analyze.main(["sparsity", "gates"])
    with pytest.raises(SystemExit, match=r"grpo-s0 is unfinished \(step 3 of None\)"):
        analyze.main(["main"])
    Path(write_run("grpo", metrics=steps(3), steps=3), "outputs.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"grpo-s0 is unfinished \(trained, not evaluated\)"):
        analyze.main(["main"])
    write_run("base")
    Path("runs/grpo-s0/metrics.jsonl").unlink()
    assert table("dynamics")[1:] == ([table("dynamics")[1][0]],
                                     ["no run has a step of training on record: base-s0, grpo-s0."])  # fmt: skip


def test_bad_files_and_folders_get_one_sentence():
    runs = [write_run("grpo"), write_run("vapo")]
    by_rule(runs)
    for args in (["--verdicts", "runs"], ["--save", "runs"], ["--outcomes", "runs"]):
        with pytest.raises(SystemExit, match="^runs is a folder, where a file is asked for"):
            analyze.main(["main", *args])
    with pytest.raises(SystemExit, match="^runs is a folder, where a file is asked for"):
        judge.main([*runs, "--judge", "rule", "--verdicts", "runs"])
    Path("runs/vapo-s0").rename("runs/again")
    for name in ("runs/grpo-s0", "runs/again"):
        config = json.loads(Path("runs/grpo-s0/config.json").read_text())
        Path(name, "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="^runs/again and runs/grpo-s0 are both grpo of seed 0: move one"):
        analyze.main(["main"])
    Path("data/cross.jsonl").write_bytes('{"id": "é"}\n'.encode("latin-1"))
    with pytest.raises(SystemExit, match="^data/cross.jsonl, line 1 is not UTF-8: save the file as UTF-8"):
        judge.main([*runs[:1], "--judge", "rule"])


def test_a_long_list_of_runs_without_verdicts_is_cut():
    for seed in range(7):
        write_run("grpo", seed)
    with pytest.raises(SystemExit, match=r"grpo-s0 20 of 20, .*, grpo-s4 20 of 20 and 2 more\.$") as stop:
        table("main")
    assert "grpo-s5" not in str(stop.value)


def test_a_set_called_combined_is_neither_replaced_nor_mixed_up():
    one = {"old": [1], "sparse": [0], "combined": [1]}
    with pytest.raises(SystemExit, match="^A set is called combined, as old and sparse together are here: rename"):
        table("main", outcomes(dict.fromkeys(one, 1), {"grpo": one}))
    alone = outcomes({"combined": 1, "sparse": 1}, {"grpo": one})
    assert find(table("main", alone)[1], run="grpo")["combined (n = 1)"].startswith("100.0")


def test_outcomes_of_other_peoples_models_carry_nothing_of_the_paper(capsys):
    Path("o.csv").write_text("set,x\nmine,1\n,0\n")
    analyze.main(["--outcomes", "o.csv"])
    said = capsys.readouterr().out
    assert "| x   | 0    | 100.0 [20.7, 100.0] | 0.0 [0.0, 79.3] |\n" in said and "no set (n = 1)" in said
    assert not any(word in said for word in ("paper:", "delivered", "torchrun", "vapo", "grpo"))
    assert said.count("none of the paper's arms is in the file") == len(analyze.OF_OUTCOMES)
    assert "read as arms: x (1); as attributes: set." in said
    Path("o.csv").write_text("set,grpo\nmine,1\n")
    analyze.main(["main", "--outcomes", "o.csv"])
    assert "paper: DynaMath" in (said := capsys.readouterr().out) and "none of the paper's arms" not in said


def test_another_folder_keeps_its_own_verdicts(capsys):
    run = write_run("grpo")
    Path("runs").rename("results")
    with pytest.raises(SystemExit, match=r"run `python judge.py results/\* --judge rule`"):
        analyze.main(["main", "--runs", "results"])
    by_rule([run.replace("runs", "results")])
    analyze.main(["main", "--runs", "results"])
    assert "grpo-s0" in capsys.readouterr().out


def test_seeds_that_all_say_the_same_bound_nothing():
    """Two equal gaps have no scatter, and that is no proof that a third seed's gap would be equal too."""
    middle, half, p = analyze.clustered(np.array([1.0, 0.0, 1.0, 0.0]), [0, 0, 1, 1])
    assert middle == 0.5 and math.isnan(half) and math.isnan(p)
    sets = {"old": 9, "sparse": 9, "cross": 9}
    scores = {"grpo-s0": 0, "grpo-s1": 0, "stack-s0": 1, "stack-s1": 1}
    arms = {run: {name: [k] * 9 for name in sets} for run, k in scores.items()}
    row = find(table("main", outcomes(sets, arms))[1], run="stack, mean")
    assert row["delivered"] == "" and row["cross (n = 9)"] == "100.0 +- 0.0"
    assert analyze.clustered(np.zeros(4), [0, 0, 1, 1]) == (0.0, 0.0, 1.0)


def test_results_without_outputs_have_their_tables_and_refuse_the_others(capsys):
    write_run("grpo", metrics=steps(3), right={"sparse": [1], "cross": [1, 2]})
    outcomes({"sparse": 10}, {"grpo-s0": {"sparse": [0] * 9 + [1]}}, Path("kept.csv"))
    kept = Path("results/world0")
    kept.mkdir(parents=True)
    Path("kept.csv").rename(kept / "outcomes.csv")
    run = {"name": "grpo-s0", "arm": "grpo", "seed": 0, "args": {"group": 8, "problems": 64}, "gates": []}
    write_lines(kept / "runs.jsonl", [run | {"calibration": [[1.0, 2.0, 3.0]]}])
    (kept / "metrics.csv").write_text("run,step,reward,all_wrong,entropy\ngrpo-s0,0,0,1,\ngrpo-s0,1,0.25,0.5,1e-05\n")
    (loaded,) = analyze.load(kept)
    assert loaded["metrics"] == [{"step": 0, "reward": 0, "all_wrong": 1},
                                 {"step": 1, "reward": 0.25, "all_wrong": 0.5, "entropy": 1e-5,
                                  "calibration": [[1.0, 2.0, 3.0]]}]  # fmt: skip
    analyze.main(["--runs", str(kept)])
    said = capsys.readouterr().out
    assert "### Training dynamics" in said and "### Gates" in said and "10.0 [1.8, 40.4]" in said
    with pytest.raises(SystemExit, match="the table audit needs outputs, and results/world0 keeps none"):
        analyze.main(["audit", "--runs", str(kept)])


@pytest.mark.parametrize("item, choice", [
    ({"kind": "free", "answer_type": "multiple choice"}, True),  # DynaMath: only the picture shows its options
    ({"kind": "choice", "answer_type": "text"}, True),  # MathVista: the type of the value of an option
    ({"kind": "free", "answer_type": "float"}, False), ({"kind": "choice"}, True), ({"kind": "free"}, False),
    ({"kind": "Multiple Choice"}, True), ({"options": 4}, True), ({"options": "0"}, False), ({}, None),
])  # fmt: skip
def test_multiple_choice_is_what_any_field_calls_so(item, choice):
    data = analyze.Outcomes.__new__(analyze.Outcomes)
    data.items = [item]
    expected = {True: ([0], []), False: ([], [0]), None: ([], [])}[choice]
    assert (list(data.choice([0])), list(data.choice([0], False))) == expected


def test_a_kind_that_is_not_in_the_file_is_not_made_up():
    data = outcomes({"old": 2, "cross": 2}, {arm: {"old": [0, k], "cross": [k, 1]} for arm, k in (("x", 0), ("y", 1))})
    _, rows, notes = table("composition", data)
    assert [row[2:] for row in rows[1:3]] == [["0.0", "", "", "", ""], ["50.0", "", "", "", ""]]
    assert analyze.NO_KIND in notes and not any("of 2 are multiple choice" in note for note in notes)
    assert any(analyze.NO_KIND in note for note in table("reversal", data)[2])
    known = outcomes({"old": 2}, {"x": {"old": [0, 1]}}, options={"old": ["4", ""]})  # blank: none listed, so free
    _, rows, notes = table("composition", known)
    assert "old: 1 of 2 are multiple choice" in str(notes)
    assert [row[1] for row in rows[1:]] == ["random", "x"]  # without gold and shortest the other guesses are unknown


def test_a_file_of_outcomes_names_its_judge_and_holds_one(capsys):
    by_rule([write_run("grpo"), write_run("vapo")])
    analyze.main(["--save", "saved.csv"])
    saved = analyze.read_outcomes(Path("saved.csv"))
    assert table("main", saved)[0] == (
        "Accuracy, % (outcomes of saved.csv, rule judge, not comparable with the paper's LLM judge)"
    )
    named = outcomes({"old": 1}, {"x": {"old": [1]}}, judge={"old": ["org/m, prompt 0123abcd"]})
    assert named.source == "outcomes of outcomes.csv, judge: org/m, prompt 0123abcd"
    for other in ("rule", ""):
        with pytest.raises(SystemExit, match="^outcomes.csv holds outcomes by .* and 'z' .* judges are not comparable"):
            outcomes({"old": 2}, {"x": {"old": [1, 0]}}, judge={"old": ["z", other]})
