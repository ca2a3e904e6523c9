"""The paper's finding, in small: on sparse problems hints learn where plain GRPO stays dead. Half an hour on a CPU."""

import os
from pathlib import Path

import pytest
from conftest import ROOT

import common
import grpo
import hint
from judge import grade, read_jsonl

SEEDS, SETS = (0, 1, 2), ("sparse", "cross")


def accuracy(folder, name):
    """Greedy accuracy on a toy set from a run's outputs.jsonl, by the rule grader."""
    rows = {row["id"]: row for row in read_jsonl(ROOT / f"data/toy/{name}.jsonl")}
    outputs = {x["id"]: x["output"] for x in read_jsonl(folder / "outputs.jsonl") if x["set"] == name}
    assert rows.keys() == outputs.keys()
    return sum(grade(outputs[i], p["answer"], p["choices"]) == "right" for i, p in rows.items()) / len(rows)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "data/toy/images").exists(), reason="no toy images: run python -m data.toy.prepare")
def test_every_seed_of_hints_beats_every_seed_of_grpo_whose_groups_stay_dead(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    scores = {}
    for arm in grpo, hint:
        for seed in SEEDS:
            args = common.parse(arm.Args, ["--toy", "--runs", str(tmp_path), "--seed", str(seed)])
            arm.main(args)
            folder = Path(tmp_path) / f"{args.name}-s{seed}"
            scores[args.name, seed] = {name: accuracy(folder, name) for name in SETS}
            dead = [row["all_wrong"] for row in read_jsonl(folder / "metrics.jsonl")]
            assert len(dead) == args.steps
            if arm is grpo:
                assert sum(dead) / len(dead) > 0.5
    print(*(f"{name}-s{seed}: {x}" for (name, seed), x in scores.items()), sep=os.linesep)
    for name in SETS:
        best = max(scores["grpo", seed][name] for seed in SEEDS)
        assert min(scores["hintonly", seed][name] for seed in SEEDS) > best, (name, scores)
