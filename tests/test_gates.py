"""The gates before training: each catches what it is there for, and says so where a person reads it."""

import json
import math
from copy import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import common
from data import gates


def found(it):
    return {g["name"]: g for g in gates.shared(it.policy, it.processor, it.pool, it.args, it.run)}


def verdicts(it):
    return {name: g["verdict"] for name, g in found(it).items()}


def says(gate, verdict, *words):
    assert gate["verdict"] == verdict and all(word in gate["text"] for word in words), gate
    return True


def test_a_sound_set_up_fails_no_gate(load):
    assert "fail" not in verdicts(load()).values()


def test_a_sampler_whose_log_probs_are_not_the_models_fails(load, monkeypatch):
    score = common.score
    monkeypatch.setattr(common, "score", lambda *args: score(*args).roll(1, 1))
    gap = found(load())["log-probs"]
    assert says(gap, "fail", f"differ by {gap['value']:.1e} nats a token", "; over 1e-04 is", "row train", ": install")


def test_the_largest_gap_and_the_longest_prompt_are_those_of_all_ranks(load, monkeypatch):
    def gather(box, mine, every=dist.all_gather_object):
        every(box, mine)
        box.append(((400, "far"), (8.0, "off")))

    it = load()
    assert says(found(it)["prompt"], "pass", "takes ")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert says(found(it)["log-probs"], "pass", "8.0e+00 at most")
    it.policy.model.config.text_config.max_position_embeddings = 410
    assert says(found(it)["prompt"], "fail", "takes 400 tokens, an answer 20, of 410; it is row far:")


def test_groups_of_equal_answers_fail(load, monkeypatch):
    sample = common.sample
    monkeypatch.setattr(common, "sample", lambda *args: sample(*args, greedy=True))
    assert says(
        found(load())["sampling"], "fail", "25% of a group's answers are distinct; all to row train", "--temperature"
    )


def test_prompts_without_room_for_an_answer_fail(load):
    it = load()
    it.policy.model.config.text_config.max_position_embeddings = 30
    longest, name = max((it.processor.length(p), p["id"]) for p in it.pool)
    assert says(found(it)["prompt"], "fail", f"takes {longest} tokens, an answer 20, of 30; it is row {name}: lower")


@pytest.mark.parametrize(
    "method, more, words",
    [
        ("length", lambda it, tokens: tokens + 1, "tokens, by its image's size"),
        (
            "encode",
            lambda it, prompt: replace(prompt, ids=[*prompt.ids, it.pad]),
            "10 image tokens and 9 image features",
        ),
    ],
)
def test_a_row_whose_image_takes_other_tokens_than_it_has_features_is_named(load, monkeypatch, method, more, words):
    it, real = load(), vars(common.Processor)[method]
    it.pad = it.policy.model.config.image_token_id
    monkeypatch.setattr(common, "next_problems", lambda *_: it.pool[:4] * it.args.group)

    def wrong(processor, problem, *image):
        made = real(processor, problem, *image)
        return more(it, made) if problem["id"] == "train5" else made

    monkeypatch.setattr(common.Processor, method, wrong)
    assert says(found(it)["image"], "fail", "row train5 has", words, "; take preprocessor_config.json")


def test_dropout_fails(load):
    it = load()
    it.policy.model.config.text_config.attention_dropout = 0.1
    assert says(
        found(it)["weights"], "fail", "dropout 0.1; dropout makes", "set attention_dropout in ", "config.json to 0"
    )


@pytest.mark.parametrize("grade", ["unparsed", "right"])
def test_a_base_that_is_never_or_always_right_and_answers_that_cannot_be_read_are_warned_of(load, monkeypatch, grade):
    reward = torch.full((16,), float(grade == "right"))
    monkeypatch.setattr(common, "reward", lambda batch, problems: (reward, [grade] * 16))
    checks = found(load())
    assert says(checks["success"], "warn", f"{grade == 'right':.1%} of rollouts right", "nothing to learn from these")
    assert grade == "right" or says(checks["parsed"], "warn", "0% of answers can be read", "raise --max-new-tokens")
    assert "fail" not in {g["verdict"] for g in checks.values()}


def test_fewer_dead_groups_than_independent_answers_allow_are_warned_of(load, monkeypatch):
    one = lambda batch, problems: ((torch.arange(len(batch.text)) % 4 == 0).float(), ["right"] * len(batch.text))
    monkeypatch.setattr(common, "reward", one)
    assert says(found(load(problems=20))["dead groups"], "warn", "0% of groups all wrong", "; see in rollouts.jsonl")


def test_after_training_the_gates_name_what_did_not_move_is_not_finite_or_was_not_saved(load, monkeypatch, capsys):
    def write():
        common.save_checkpoint(it.policy, it.processor, it.run)
        gates.audit(it.policy, it.args, it.run)
        return capsys.readouterr().out

    it, name = load(steps=1, gates="warn"), "model.language_model.norm.weight"
    assert f"warn  moved: 0 of 58 tensors differ from {it.args.model} after 1 steps; see" in write()
    weight = it.policy.model.model.language_model.norm.weight.data
    weight.fill_(0.5)
    with monkeypatch.context() as m:
        m.setattr(common, "load_model", lambda path, dtype, load=common.load_model: load(it.args.model, dtype))
        assert f"fail  saved: 1 tensors of the checkpoint are not those that answer; first {name}:" in write()
    weight.fill_(math.nan)
    said = write()
    assert f"fail  finite: 1 tensors are not finite; first {name}: train again" in said
    assert (
        "pass  moved: 1 of 58" in said and "pass  saved: 0 tensors of the checkpoint are not those that answer" in said
    )


@pytest.mark.parametrize("flag, stops", [("stop", True), ("warn", False)])
def test_a_failed_gate_stops_the_run_unless_told_otherwise_and_is_on_record(load, capsys, flag, stops):
    it = load(gates=flag)
    rows = [gates.gate("sampling", False, 0.1, "all answers are equal"), gates.gate("pool", True, 23, "23 problems")]
    if stops:
        with pytest.raises(SystemExit, match="the gate sampling failed, see above"):
            gates.report(rows, it.args, it.run)
    else:
        gates.report(rows, it.args, it.run)
    assert "fail  sampling: all answers are equal" in capsys.readouterr().out
    gates.report(rows[1:], it.args, it.run, "after training")
    filed = json.loads((it.run.dir / "gates.json").read_text())["gates"]
    kept, later = "before training", "after training"
    assert [(g["name"], g["verdict"], g["when"]) for g in filed] == [
        ("sampling", "fail", kept), ("pool", "pass", kept), ("pool", "pass", later),
    ]  # fmt: skip


def test_under_bf16_positions_off_by_one_do_not_pass(load, monkeypatch):
    it = load()
    half = copy(it.run)
    half.dtype = torch.bfloat16
    it.policy, it.run = common.load_policy(it.args.model, it.args, half), half
    assert verdicts(it)["log-probs"] == "pass"
    score = common.score
    shifted = lambda policy, batch, args: score(
        policy, replace(batch, positions=batch.positions + batch_shift(batch)), args
    )
    batch_shift = lambda batch: (torch.arange(batch.ids.shape[1]) >= batch.ids.shape[1] - batch.mask.shape[1]).long()
    monkeypatch.setattr(common, "score", shifted)
    assert verdicts(it)["log-probs"] == "fail"
