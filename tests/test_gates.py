"""The gates before training: each catches what it is there for, and says so where a person reads it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import common


def verdicts(it):
    return {g["name"]: g["verdict"] for g in common.shared_gates(it.policy, it.processor, it.pool, it.args, it.run)}


def test_a_sound_set_up_fails_no_gate(load):
    assert "fail" not in verdicts(load()).values()


def test_a_sampler_whose_log_probs_are_not_the_models_fails(load, monkeypatch):
    score = common.score
    monkeypatch.setattr(common, "score", lambda *args: score(*args).roll(1, 1))
    assert verdicts(load())["log-probs"] == "fail"


def test_groups_of_equal_answers_fail(load, monkeypatch):
    sample = common.sample
    monkeypatch.setattr(common, "sample", lambda *args: sample(*args, greedy=True))
    assert verdicts(load())["sampling"] == "fail"


def test_prompts_without_room_for_an_answer_fail(load):
    it = load()
    it.policy.model.config.text_config.max_position_embeddings = 30
    assert verdicts(it)["prompt"] == "fail"


def test_dropout_fails(load):
    it = load()
    it.policy.model.config.text_config.attention_dropout = 0.1
    assert verdicts(it)["weights"] == "fail"


def test_a_base_that_is_never_right_and_answers_that_cannot_be_read_are_warned_of(load, monkeypatch):
    none = lambda batch, problems: (torch.zeros(len(batch.text)), ["unparsed"] * len(batch.text))
    monkeypatch.setattr(common, "reward", none)
    found = verdicts(load())
    assert found["success"] == found["parsed"] == "warn" and "fail" not in found.values()


@pytest.mark.parametrize("gates, stops", [("stop", True), ("warn", False)])
def test_a_failed_gate_stops_the_run_unless_told_otherwise_and_is_on_record(load, capsys, gates, stops):
    it = load(gates=gates)
    rows = [common.gate("sampling", False, 0.1, "all answers are equal"), common.gate("pool", True, 23, "23 problems")]
    if stops:
        with pytest.raises(SystemExit, match="the gate sampling failed, see above"):
            common.report_gates(rows, it.args, it.run)
    else:
        common.report_gates(rows, it.args, it.run)
    assert "fail  sampling: all answers are equal" in capsys.readouterr().out
    common.report_gates(rows[1:], it.args, it.run, "after training")
    filed = json.loads((it.run.dir / "gates.json").read_text())["gates"]
    kept, later = "before training", "after training"
    assert [(g["name"], g["verdict"], g["when"]) for g in filed] == [
        ("sampling", "fail", kept), ("pool", "pass", kept), ("pool", "pass", later),
    ]  # fmt: skip


def test_under_bf16_positions_off_by_one_do_not_pass(load, monkeypatch):
    it = load()
    half = SimpleNamespace(
        **vars(it.run) | dict(dtype=torch.bfloat16), begin=it.run.begin, mean=it.run.mean, sum=it.run.sum
    )
    it.policy, it.run = common.load_policy(it.args.model, it.args, half), half
    assert verdicts(it)["log-probs"] == "pass"
    score = common.score
    shifted = lambda policy, batch, args: score(
        policy, replace(batch, positions=batch.positions + batch_shift(batch)), args
    )
    batch_shift = lambda batch: (torch.arange(batch.ids.shape[1]) >= batch.ids.shape[1] - batch.mask.shape[1]).long()
    monkeypatch.setattr(common, "score", shifted)
    assert verdicts(it)["log-probs"] != "pass"
