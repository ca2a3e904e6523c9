"""judge.py on small run folders written here: blind, once per distinct output, and never lost."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

import analyze
import judge

ROWS = [
    {"id": "a", "question": "What is 40 + 5?", "answer": "45", "kind": "free", "choices": []},
    {"id": "b", "question": "Which is larger?", "answer": "B", "kind": "choice", "choices": ["3", "7"]},
    {"id": "c", "question": "Which is larger?", "answer": "B", "kind": "choice", "choices": ["3", "9"]},
]
RIGHT = ["So <answer>45</answer>", "So <answer>7</answer>", "So <answer>B</answer>"]  # an option's text is its letter
WRONG = ["So <answer>44</answer>", "So <answer>A</answer>", ""]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def by_rule(argv):
    judge.main([*argv, "--judge", "rule"])


@pytest.fixture
def write_run(tmp_path, monkeypatch):
    """A folder with one evaluation set; `write_run(arm, outputs)` writes a finished run of it, as an arm does."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "data" / "sparse.jsonl", ROWS)

    def write(arm, outputs, seed=0):
        folder = tmp_path / "runs" / f"{arm}-s{seed}"
        lines = [{"set": "sparse", "id": row["id"], "output": out} for row, out in zip(ROWS, outputs, strict=False)]
        write_lines(folder / "outputs.jsonl", lines)
        config = {"args": {"name": arm, "seed": seed, "eval": "data/sparse.jsonl", "group": 8}}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder.relative_to(tmp_path))

    return write


def lines():
    return [json.loads(line) for line in Path("runs/verdicts.jsonl").read_text().splitlines()]


def verdicts():
    assert len({line["key"] for line in lines()}) == len(lines()), "an item was judged twice"
    return {line["key"]: line["verdict"] for line in lines()}


def test_every_output_gets_the_verdict_of_the_grader(write_run):
    by_rule([write_run("grpo", RIGHT), write_run("hintonly", WRONG)])
    texts = ["What is 40 + 5?", "Which is larger?\n(A) 3\n(B) 7", "Which is larger?\n(A) 3\n(B) 9"]
    for text, answer, right, wrong in zip(texts, ["45", "B", "B"], RIGHT, WRONG, strict=True):
        assert verdicts()[judge.key(text, answer, right)] is True
        assert verdicts()[judge.key(text, answer, wrong)] is False
    assert len(lines()) == 6 and all(line["judge"] == "rule" and line["seed"] == 0 for line in lines())


def test_equal_questions_with_other_options_are_other_items(write_run):
    by_rule([write_run("grpo", [RIGHT[0], RIGHT[2], RIGHT[2]])])
    assert len(verdicts()) == 3  # rows b and c share question, answer and output, but not the options


def test_the_key_keeps_the_borders_of_its_parts():
    parts = [("ab", "c", "d"), ("a", "bc", "d"), ("ab", "cd", ""), ('ab", "c', "d", ""), ("ab", "c\n", "d")]
    assert len({judge.key(*part) for part in parts}) == len(parts)
    assert len(judge.key("é", "½", "\ud800")) == 64  # half a surrogate pair, as a cut-off decoder may leave it


def test_the_queue_holds_no_trace_of_the_arm(write_run, tmp_path):
    runs = [write_run("grpo", RIGHT), write_run("hintonly", WRONG), write_run("vapohl", RIGHT, seed=7)]
    queue = judge.blind_queue([answer for run in runs for answer in judge.read_answers(tmp_path / run)], seed=0)
    assert {field for item in queue for field in item} == {"key", "question", "reference", "choices", "output"}
    assert not any(word in json.dumps(queue) for word in ("grpo", "hintonly", "vapohl", "sparse", "runs", "-s0", "-s7"))


def test_the_order_of_the_queue_depends_on_items_and_seed_alone(write_run, tmp_path):
    one = judge.read_answers(tmp_path / write_run("grpo", RIGHT))
    two = judge.read_answers(tmp_path / write_run("hintonly", WRONG))
    orders = [[item["key"] for item in judge.blind_queue(answers, 3)] for answers in (one + two, two + one)]
    assert orders[0] == orders[1]
    assert len({tuple(item["key"] for item in judge.blind_queue(one + two, seed)) for seed in range(9)}) > 1


def test_a_new_arm_with_known_outputs_asks_nothing_new(write_run, tmp_path, capsys):
    by_rule([write_run("grpo", RIGHT)])
    before = (tmp_path / "runs" / "verdicts.jsonl").read_bytes()
    (tmp_path / "runs" / "grpo-s0").rename(tmp_path / "runs" / "stack-s3")
    by_rule(["runs/stack-s3", write_run("uft001", RIGHT)])
    assert (tmp_path / "runs" / "verdicts.jsonl").read_bytes() == before
    assert "2 runs, 6 outputs, 3 distinct: 0 judged now, 3 reused" in capsys.readouterr().out


def test_the_verdicts_file_among_the_runs_is_no_run(write_run, tmp_path):
    write_run("grpo", RIGHT)
    for _ in range(2):  # what a shell makes of runs/*
        by_rule([str(path) for path in sorted((tmp_path / "runs").iterdir())])
    assert len(verdicts()) == 3


def test_a_judge_killed_at_any_byte_of_its_file_ends_with_the_same_verdicts(write_run, tmp_path, capsys):
    runs, path = [write_run("grpo", RIGHT), write_run("hintonly", WRONG)], tmp_path / "runs" / "verdicts.jsonl"
    by_rule(runs)
    full, expected = path.read_bytes(), verdicts()
    capsys.readouterr()
    for cut in range(len(full)):
        path.write_bytes(full[:cut])
        by_rule(runs)
        out = capsys.readouterr().out
        assert verdicts() == expected
        kept = full[:cut].count(b"\n")
        assert path.read_bytes().startswith(full[: full[:cut].rfind(b"\n") + 1])
        assert f"{len(expected) - kept} judged now, {kept} reused" in out
        assert ("torn line" in out) == (cut > 0 and full[cut - 1 : cut] != b"\n")


def test_each_verdict_is_on_disk_before_the_next_is_asked_for(write_run, tmp_path, monkeypatch):
    runs, path, grade, seen = (
        [write_run("grpo", RIGHT), write_run("vapo", WRONG)],
        tmp_path / "runs/verdicts.jsonl",
        judge.grade,
        [],
    )

    def slow_grade(*args):
        seen.append(path.read_text().count("\n"))
        if len(seen) == 5:
            raise KeyboardInterrupt
        return grade(*args)

    monkeypatch.setattr(judge, "grade", slow_grade)
    with pytest.raises(KeyboardInterrupt):
        by_rule(runs)
    assert seen == [0, 1, 2, 3, 4] and len(verdicts()) == 4
    by_rule(runs)
    assert seen[5:] == [4, 5] and len(verdicts()) == 6


def test_verdicts_of_another_judge_are_never_mixed_in(write_run, tmp_path):
    run, path = write_run("grpo", RIGHT), tmp_path / "runs" / "verdicts.jsonl"
    write_lines(path, [{"key": "0" * 64, "verdict": True, "judge": "some-llm"}])
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"verdicts by some-llm, asked is rule.*--verdicts"):
        by_rule([run])
    assert path.read_bytes() == before
    by_rule([run, "--verdicts", "runs/rule.jsonl"])
    write_lines(path, [{"key": str(i), "verdict": True, "judge": name} for i, name in enumerate(["x", "y"])])
    with pytest.raises(SystemExit, match="x and y"):
        judge.read_verdicts(path)


def test_another_judge_than_rule_and_api_cannot_be_asked_for(write_run, capsys):
    with pytest.raises(SystemExit) as stop:
        judge.main([write_run("grpo", RIGHT), "--judge", "oracle"])
    assert stop.value.code == 2 and "invalid choice: 'oracle'" in capsys.readouterr().err


@pytest.mark.parametrize("verdict", ["false", 1, None])
def test_a_verdict_that_is_no_boolean_is_refused_with_its_line(write_run, tmp_path, verdict):
    good = {"key": "k", "verdict": True, "judge": "rule"}
    write_lines(tmp_path / "runs" / "verdicts.jsonl", [good, {"key": "l", "verdict": verdict, "judge": "rule"}])
    with pytest.raises(SystemExit, match="line 2 is no verdict"):
        by_rule([write_run("grpo", RIGHT)])


def test_unfinished_runs_are_named_and_the_others_judged(write_run, tmp_path, capsys):
    runs = [write_run("base", RIGHT), write_run("grpo", RIGHT), write_run("opd", WRONG)]
    (tmp_path / "runs/base-s0/outputs.jsonl").unlink()
    (tmp_path / "runs/opd-s0/outputs.jsonl").unlink()
    by_rule(runs)
    out = capsys.readouterr().out
    assert out.startswith(
        "Left out, as unfinished: runs/base-s0, runs/opd-s0. The command that began a run resumes it."
    )
    assert "1 runs, 3 outputs, 3 distinct: 3 judged now" in out and len(verdicts()) == 3
    (tmp_path / "runs/verdicts.jsonl").unlink()
    with pytest.raises(SystemExit, match="^There is nothing to judge yet"):
        by_rule([runs[0], runs[2]])
    assert "runs/base-s0, runs/opd-s0" in capsys.readouterr().out and not (tmp_path / "runs/verdicts.jsonl").exists()


@pytest.mark.parametrize("config", ["", "{", "[1]", '{"model_type": "m"}', '{"args": null}', '{"args": {"lr": 1}}'])
def test_a_config_that_is_not_of_a_run_is_named(write_run, config):
    run = write_run("grpo", RIGHT)
    Path(run, "config.json").write_text(config)
    for load in (lambda: by_rule([run]), lambda: analyze.load(Path("runs"))):
        with pytest.raises(SystemExit, match=r"^runs/grpo-s0/config.json is not of a run \(.*: move .* out of runs\."):
            load()


def test_without_a_judge_the_command_stops_and_names_both(write_run, monkeypatch):
    for name in ("JUDGE_MODEL", "JUDGE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="^An LLM judge needs --model and --address .* --judge rule"):
        judge.main([write_run("grpo", RIGHT)])
    assert not Path("runs/verdicts.jsonl").exists()


def test_verdicts_lie_beside_the_runs_and_the_last_line_is_the_command_that_reads_them(write_run, tmp_path, capsys):
    write_run("grpo", RIGHT)
    for home, more in (("runs", []), ("my results", []), (".", []), ("my results", ["--verdicts", "other.jsonl"])):
        Path(home).mkdir(exist_ok=True)
        if not Path(home, "grpo-s0").exists():
            shutil.copytree("runs/grpo-s0", Path(home, "grpo-s0"))
        by_rule([f"{home}/grpo-s0", *more])
        assert Path(more[1] if more else f"{home}/verdicts.jsonl").exists()
        command = capsys.readouterr().out.splitlines()[-1].split(". Next: python analyze.py")[1]
        assert (command == "") == (home == "runs")
        analyze.main(["main", *shlex.split(command)])
        assert "| grpo-s0 |" in capsys.readouterr().out


def test_outputs_that_do_not_fit_their_sets_are_named(write_run, tmp_path):
    with pytest.raises(SystemExit, match=r"grpo-s0/outputs.jsonl .* differ in 2 rows, b of sparse first"):
        by_rule([write_run("grpo", RIGHT[:1])])
    write_lines(tmp_path / "data" / "sparse.jsonl", ROWS[:2])
    with pytest.raises(SystemExit, match=r"differ in 1 rows, c of sparse first"):
        by_rule([write_run("grpo", RIGHT)])


def test_folders_and_sets_that_are_not_there_are_named(write_run, tmp_path):
    with pytest.raises(SystemExit, match=r"^runs/\* is no run folder"):
        by_rule(["runs/*"])
    run = write_run("grpo", RIGHT)
    with pytest.raises(SystemExit, match=r"^data/sparse.jsonl is no run folder"):
        by_rule(["data/sparse.jsonl"])
    (tmp_path / "data" / "sparse.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"evaluated on data/sparse\.jsonl, which is not here"):
        by_rule([run])


def test_an_output_may_hold_any_character(write_run):
    odd = ["line\u2028separator\x85 <answer>45</answer>", "\r\n\t\0 é ½ 答 <answer>B</answer>", '{"verdict": true}']
    by_rule([write_run("grpo", odd)])
    assert sorted(verdicts().values()) == [False, True, True]


def test_the_rule_judge_says_what_it_is_and_what_comes_next(write_run, capsys):
    by_rule([write_run("grpo", RIGHT)])
    captured = capsys.readouterr()
    assert "rule judge, not the paper's LLM judge" in captured.out
    assert "rule judge, not the paper's LLM judge" in captured.err  # the progress bar
    assert captured.out.endswith("Verdicts: runs/verdicts.jsonl. Next: python analyze.py\n")
    by_rule(["runs/grpo-s0", "--verdicts", "runs/other.jsonl"])
    assert capsys.readouterr().out.endswith("Next: python analyze.py --verdicts runs/other.jsonl\n")
    with pytest.raises(SystemExit, match="^The rule judge asks no model: leave out --judge rule, or --model"):
        by_rule(["runs/grpo-s0", "--model", "org/m"])


def test_the_next_command_is_named_where_it_has_all_it_needs(write_run, capsys):
    runs = [write_run(arm, [f"{arm} {text}" for text in RIGHT]) for arm in ("grpo", "vapo")]
    by_rule([*runs, "--limit", "4"])
    out = capsys.readouterr().out
    assert out.endswith("2 are left: the same command goes on. Verdicts: runs/verdicts.jsonl.\n") and "Next" not in out
    by_rule(runs[:1])
    assert (
        "\nNot named were vapo-s0 in runs, and a table wants verdicts on all of its runs.\n" in capsys.readouterr().out
    )
    by_rule([*runs[:1], str(Path(runs[1]).resolve())])
    assert "Not named" not in capsys.readouterr().out
