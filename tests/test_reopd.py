"""Replay: how long the teacher's beginnings are, where they are cut, and whose tokens the student learns from."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import answers, equal, stock_logps
from scipy.stats import chisquare
from transformers import Qwen2VLForConditionalGeneration

import common
import reopd

# a processor whose tokens are single characters
LETTERS = SimpleNamespace(tokenizer=SimpleNamespace(batch_decode=lambda rows: ["".join(map(chr, x)) for x in rows]))
FIVE = "one. two. three. four. <answer>5</answer>"


def row(text, id="x"):
    return dict(id=id, teacher=[ord(c) for c in text])


def replayed(problems, step=0, **args):
    texts = reopd.replay_prefix(problems, step, LETTERS, replace(reopd.Args(), **args))
    return ["".join(map(chr, x)) for x in texts]


def parts_of(text):
    return text.count(".")


def test_the_number_of_replayed_segments_is_proportional_to_powers_of_the_decay(monkeypatch):
    monkeypatch.setattr(common, "teacher_cuts", lambda p, processor: [0, 5, 10, 17, 23])
    problems = [row(FIVE, str(i)) for i in range(6000)]
    counts = [parts_of(x) for x in replayed(problems)]
    expected = [0.4337, 0.2602, 0.1561, 0.0937, 0.0562]  # 0.6 ** t over its sum
    assert chisquare([counts.count(t) for t in range(5)], [6000 * x / sum(expected) for x in expected]).pvalue > 1e-3
    assert abs(sum(counts) / 6000 / 5 - 0.22) < 0.01  # of the answer, on average
    late = [parts_of(x) for x in replayed(problems, 299)]
    assert counts != late and abs(sum(late) / sum(counts) - 1) < 0.05  # by position, not by the training's step
    assert {parts_of(x) for x in replayed(problems, replay_start=0.0)} == {0}


def test_the_staircase_goes_down_at_each_quarter_of_the_training(monkeypatch):
    shares = [parts_of(replayed([row(FIVE)], step, replay="staircase")[0]) for step in range(300)]
    assert shares == [3] * 75 + [2] * 75 + [1] * 75 + [0] * 75  # 0.6, 0.4, 0.2 and 0 of five parts
    assert replayed([row(FIVE)], 0, replay="staircase", steps=3) == ["one. two. three."]


def test_a_draw_is_pure_in_seed_step_and_problem_and_shared_by_its_group():
    problems = [row(FIVE, str(i)) for i in range(40)]
    random.seed(1), torch.manual_seed(1)
    first = replayed(problems, 7)
    random.seed(2), torch.manual_seed(2)
    assert replayed(problems[::-1], 7) == first[::-1]
    assert replayed(problems[::2], 7) + replayed(problems[1::2], 7) == first[::2] + first[1::2]
    assert replayed(problems, 8) != first and replayed(problems, 7, seed=1) != first
    assert replayed([p for p in problems for _ in range(8)], 7) == [x for x in first for _ in range(8)]


def test_answers_are_cut_at_their_sentences_lines_and_steps_and_never_after_the_answer_has_begun():
    cuts = lambda text: [text[:n] for n in common.teacher_cuts(row(text), LETTERS)]
    assert cuts(FIVE) == ["", "one.", "one. two.", "one. two. three.", "one. two. three. four."]
    assert cuts("a;b;<answer>3</answer>") == ["", "a;", "a;b;"]
    text = "a\nb\nc! d? e. f. g"  # seven parts, near 1.4 of them each
    assert cuts(text) == ["", "a\n", "a\nb\nc!", "a\nb\nc! d?", "a\nb\nc! d? e. f."]
    assert cuts("a. <answer>1. 2.</answer> b. c.") == ["", "a."]
    assert cuts("one word") == cuts("") == [""]


def test_a_number_or_the_space_behind_a_sentence_is_no_end():
    cuts = lambda text: [text[:n] for n in common.teacher_cuts(row(text), LETTERS)]
    assert cuts("x is 3.14 here. y is 2.5 here. z") == ["", "x is 3.14 here.", "x is 3.14 here. y is 2.5 here."]
    assert cuts("one.\ntwo.\nthree") == ["", "one.\n", "one.\ntwo.\n"]


def test_prefixes_are_stored_token_ids_without_end_and_answer(load, rich):
    arm, seen = load(pool=rich), set()
    tokenizer = arm.processor.tokenizer
    for step in range(30):
        for p, ids in zip(arm.pool, reopd.replay_prefix(arm.pool, step, arm.processor, reopd.Args()), strict=True):
            text = tokenizer.decode(ids)
            assert ids == p["teacher"][: len(ids)] and not set(ids) & set(tokenizer.all_special_ids)
            assert "<answer>" not in text and (not ids or text[-1] in ".\n")
            seen.add(text.count("\n"))
    assert seen >= {0, 1, 2, 3}


@pytest.mark.parametrize("replay", ["position", "staircase"])
def test_rows_without_a_stored_answer_are_plain_distillation(load, rich, replay):
    arm, args = load(pool=rich), replace(reopd.Args(), replay=replay)
    bare = [p | dict(teacher=None) for p in arm.pool[:4]] + [p | dict(teacher=[]) for p in arm.pool[4:8]]
    bare += [{k: v for k, v in p.items() if k != "teacher"} for p in arm.pool[8:12]]
    assert [reopd.replay_prefix(bare, s, arm.processor, args) for s in (0, 100, 299)] == [[[]] * 12] * 3


def test_the_student_learns_from_its_own_tokens_alone(watch, make_args, load, rich, teacher, stock):
    args = make_args(
        reopd, steps=1, lr=0.0, pool=rich, teacher=teacher, replay="staircase", kl_coef=0.5, max_grad_norm=1e9
    )
    seen, arm = watch(reopd, args), load(replace(args, name="reference"))
    assert (seen.batch.forced.sum(1) > 10).all() and not (seen.batch.mask * seen.batch.forced).any()
    assert torch.equal(seen.advs[0] != 0, seen.batch.mask > 0)
    master = Qwen2VLForConditionalGeneration.from_pretrained(teacher).eval()
    stock.zero_grad()
    total = seen.batch.mask[:8].sum()
    for i in range(8):
        forced, sampled = answers(seen.batch)[i]
        assert forced == seen.problems[i]["teacher"][: len(forced)]
        ours, theirs = (stock_logps(m, arm, seen.problems[i], forced, sampled)[len(forced) :] for m in (stock, master))
        (-(0.5 * (theirs - ours).detach().clamp(-10, 5) * ours).sum() / total).backward()
    assert equal(seen.gradients[0], {n: p.grad for n, p in stock.named_parameters() if n in seen.gradients[0]}, 1e-4)
