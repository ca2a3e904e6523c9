"""analyze.py: statistics against independent computation and published outcomes, tables recomputed by hand."""

import csv
import json
import random
from pathlib import Path

import pytest
from scipy.stats import binomtest

import analyze
import judge

OUTCOMES = Path(__file__).parents[2] / "shared" / "real_samples" / "dynamath_results.csv"


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
    config = {"args": {"name": arm, "seed": seed, "group": 8, "problems": 64, "eval": paths} | args}
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


def table(name):
    title, rows, notes = analyze.TABLES[name](analyze.load(Path("runs")), Path("runs/verdicts.jsonl"))
    assert {len(row) for row in rows} == {len(rows[0])}
    return title, rows, notes


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
    assert sum("FAILS" in note for note in notes) == 1 and sum(" holds " in note for note in notes) == 3
    failed = next(note for note in notes if "FAILS" in note)
    assert failed.startswith("vapo-s0, last 10 steps: all wrong 20.0 >= (1 - reward)^8 = 63.6 FAILS")  # 0.945 ** 8


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
    assert notes == ["base-s0: no gates on record."]
    assert r"a \| b" in analyze.markdown(title, rows, notes)


# ---- main


def test_main_recomputes_by_hand():
    runs = [
        write_run("base", right={"sparse": [0], "cross": [0, 1]}),
        write_run("grpo", right={"sparse": [], "cross": [0, 1]}),
        write_run("hintonly", right={"sparse": [1, 2, 3, 4, 5, 6, 7, 8], "cross": range(10)}),
    ]
    judge.main(runs)
    title, rows, notes = table("main")
    assert title == "Accuracy, % (rule judge, not comparable with the paper's LLM judge)"
    assert rows[0] == ["run", "seed", "sparse (n = 10)", "cross (n = 10)", "paper: DynaMath"]
    wilson = lambda k: "[{:.1f}, {:.1f}]".format(*(100 * x for x in binomtest(k, 10).proportion_ci(method="wilson")))
    assert rows[1:] == [
        ["base-s0", 0, f"10.0 {wilson(1)}", f"20.0 {wilson(2)}", ""],
        ["grpo-s0", 0, f"0.0 {wilson(0)}", f"20.0 {wilson(2)}", "27.0-29.1"],
        ["hintonly-s0", 0, f"80.0 {wilson(8)}", f"100.0 {wilson(10)}", "30.6-32.9"],
    ]
    tests = [note for note in notes if "McNemar" in note]
    assert tests == [
        "grpo-s0 against base-s0, exact two-sided McNemar, p uncorrected: "
        "sparse p = 1 (0 won, 1 lost), cross p = 1 (0 won, 0 lost).",
        "hintonly-s0 against base-s0, exact two-sided McNemar, p uncorrected: "
        "sparse p = 0.0391 (8 won, 1 lost), cross p = 0.00781 (8 won, 0 lost).",
    ]


def test_main_shows_each_seed_and_their_mean():
    hits = {0: [0], 2: [0, 1, 2], 10: [0, 1, 2, 3, 4]}
    judge.main([write_run("vapo", seed, right={"sparse": hits[seed]}) for seed in (10, 0, 2)] + [write_run("stack")])
    _, rows, notes = table("main")
    assert [row[0] for row in rows[1:]] == ["vapo-s0", "vapo-s2", "vapo-s10", "vapo, mean", "stack-s0"]
    assert rows[4] == ["vapo, mean", "3 seeds", "30.0", "", "27.0-29.1"]
    assert rows[1][3] == ""  # vapo was not asked cross
    assert sum("McNemar" in note for note in notes) == 1 and any("--name base --steps 0" in note for note in notes)


def test_the_paper_has_six_effective_arms_and_five_others():
    ranges = list(analyze.PAPER_DYNAMATH.values())
    assert ranges.count("30.6-32.9") == 6 and ranges.count("27.0-29.1") == 5 and len(ranges) == 12


def test_main_refuses_when_a_verdict_is_missing():
    runs = [write_run("base", right={"sparse": [0]}), write_run("grpo", right={"sparse": [0, 1]})]
    with pytest.raises(
        SystemExit, match=r"missing \(base-s0 10 of 10, grpo-s0 10 of 10\): run `python judge.py runs/\*`"
    ):
        table("main")
    judge.main(runs[:1])
    with pytest.raises(SystemExit, match=r"^verdicts are missing \(grpo-s0 1 of 10\)"):  # one output is new
        table("main")
    judge.main(runs)
    assert len(table("main")[1]) == 3


def test_main_refuses_runs_that_answered_different_questions():
    runs = [write_run("base"), write_run("grpo")]
    row = {"id": "sparse0", "question": "another?", "answer": "0", "choices": []}
    write_lines(Path("elsewhere/sparse.jsonl"), [row])
    write_lines(Path("runs/vapo-s0/outputs.jsonl"), [{"set": "sparse", "id": "sparse0", "output": ""}])
    config = {"args": {"name": "vapo", "seed": 0, "group": 8, "eval": "elsewhere/sparse.jsonl"}}
    Path("runs/vapo-s0/config.json").write_text(json.dumps(config))
    judge.main([*runs, "runs/vapo-s0"])
    with pytest.raises(SystemExit, match="base-s0 and vapo-s0 answered different questions under the name sparse"):
        table("main")


# ---- the command


def test_no_table_prints_all_and_a_named_one_itself(capsys):
    judge.main([write_run("base"), write_run("grpo", metrics=steps(10))])
    capsys.readouterr()
    analyze.main([])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("###")] == [
        "### Sparsity of the reward in training, %", "### Gates",
        "### Accuracy, % (rule judge, not comparable with the paper's LLM judge)",
    ]  # fmt: skip
    analyze.main(["gates"])
    assert capsys.readouterr().out.count("###") == 1


def test_markdown_has_one_line_a_row_and_columns_of_one_width():
    lines = analyze.markdown("T", [["a", "b"], ["long cell", 1]], ["n"]).splitlines()
    assert lines == ["### T", "", "| a         | b |", "|-----------|---|", "| long cell | 1 |", "", "- n"]


def test_what_is_not_there_is_said_in_one_sentence():
    for args, words in (([], "^runs holds no run folder"), (["--runs", "nowhere"], "^nowhere holds no run folder"),
                        (["speed"], "^there is no table speed: choose from sparsity, gates, main")):  # fmt: skip
        with pytest.raises(SystemExit, match=words):
            analyze.main(args)
    write_run("grpo", metrics=steps(3))
    Path("runs/grpo-s0/outputs.jsonl").unlink()  # still in training
    analyze.main(["sparsity", "gates"])
    with pytest.raises(SystemExit, match="grpo-s0 is unfinished"):
        analyze.main(["main"])


def test_another_folder_keeps_its_own_verdicts(capsys):
    run = write_run("grpo")
    Path("runs").rename("results")
    with pytest.raises(SystemExit, match=r"run `python judge.py results/\* --verdicts results/verdicts.jsonl`"):
        analyze.main(["main", "--runs", "results"])
    judge.main([run.replace("runs", "results"), "--verdicts", "results/verdicts.jsonl"])
    analyze.main(["main", "--runs", "results"])
    assert "grpo-s0" in capsys.readouterr().out
