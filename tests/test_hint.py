"""Hints: how long they are, what they never hold, and that nothing but an answer's context comes from them."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, answers, equal
from scipy.stats import binom, chisquare

import common
import hint
import stack
import uft
from data import gates

HINTED = [hint, uft, stack]
TEXT = SimpleNamespace(tokenize=lambda text: text)  # a processor whose tokens are text


def row(solution, answer="7", choices=(), id="x"):
    kind = "choice" if choices else "free"
    return dict(id=id, answer=answer, choices=list(choices), kind=kind, solution=solution, question="?")


def shown(problems, step=0, arm=hint, **args):
    return arm.hint_prefix(problems, step, TEXT, replace(arm.Args(), **args))


def many(n):
    return [row([f"Part {k}. " for k in range(5)], id=f"id{i}") for i in range(n)]


# ---- how long


@pytest.mark.parametrize("arm", HINTED)
def test_the_chance_falls_by_a_cosine_and_is_exactly_0_after_the_last_hinted_step(arm):
    args = replace(arm.Args(), steps=300, hint_start=0.95, hint_end=0.05, hint_until=0.6)
    expected = {
        0: 0.95,
        45: 0.5 + 0.45 * math.sqrt(0.5),
        90: 0.5,
        179: 0.05 + 0.45 * (1 + math.cos(math.pi * 179 / 180)),
    }
    assert {k: arm.hint_chance(k, args) for k in expected} == pytest.approx(expected, abs=1e-12)
    assert [arm.hint_chance(k, args) for k in (180, 181, 299)] == [0, 0, 0]
    steps = [arm.hint_chance(k, args) for k in range(181)]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 181
    assert arm.hint_chance(15, replace(args, steps=50)) == pytest.approx(0.5)  # the middle of 30 hinted steps
    assert {arm.hint_chance(k, replace(args, hint_start=0.0)) for k in range(300)} == {0}


def test_the_number_of_segments_is_binomial_and_stops_before_the_last(monkeypatch):
    problems = many(4000)
    cut = common.segments(problems[0])  # of all: to cut 4000 solutions takes seconds
    monkeypatch.setattr(common, "segments", lambda p: cut)
    for step, p in (0, 0.95), (90, 0.5), (150, hint.hint_chance(150, hint.Args())):
        counts = [text.count("Part") for text in shown(problems, step)]
        law = binom.pmf(range(6), 5, p)
        expected = [*law[:4], law[4] + law[5]]
        few = next(i for i in range(5) if 4000 * sum(expected[: i + 1]) > 5)  # pool the rare ones
        seen = [sum(c <= few for c in counts)] + [counts.count(i) for i in range(few + 1, 5)]
        law = [sum(expected[: few + 1]), *expected[few + 1 :]]
        assert max(counts) == 4 and chisquare(seen, [4000 * x for x in law]).pvalue > 1e-3
    assert set(shown(problems, 180)) == {""}


def test_a_hint_is_a_pure_function_of_seed_step_and_problem():
    problems = many(60)
    torch.manual_seed(1), random.seed(1)
    first = shown(problems, 60)
    torch.manual_seed(2), random.seed(2)
    assert shown(problems[::-1], 60) == first[::-1]  # other problems and their order do not matter
    assert [shown([p], 60)[0] for p in problems] == first
    assert shown(problems[0::2], 60) + shown(problems[1::2], 60) == first[0::2] + first[1::2]  # as two ranks share them
    assert shown(problems, 61) != first and shown(problems, 60, seed=1) != first
    assert shown([x for x in problems for _ in range(8)], 60) == [x for x in first for _ in range(8)]  # one a group
    assert len(set(first)) == 4


def test_all_hinted_arms_draw_the_same_hints():
    problems = many(60)
    for step in (0, 60, 170, 200):
        assert shown(problems, step, uft) == shown(problems, step, stack) == shown(problems, step)


# ---- what they hold


def rows_of_all_kinds(world, rich):
    rows = common.read_jsonl(world / "train.jsonl") + common.read_jsonl(rich)
    if (ROOT / "data/toy/train.jsonl").exists():
        rows += common.read_jsonl(ROOT / "data/toy/train.jsonl")[:300]
    draw = random.Random(0)
    for i in range(400):  # up to five sentences, where each is a part; some of them state the answer
        choices = [["6", "7"], ["red", "blue"], []][i % 3]
        answer, gold = ("B", choices[1]) if choices else ("7", "7")
        told = [f"So it is {gold}. ", f"The answer is {answer}. ", f"x = {gold}\n", f"<answer>{answer}</answer>"]
        plain = [f"Add {draw.randrange(20, 90)}. ", "Look at it. ", "Next. "]
        rows.append(row([draw.choice(plain * 3 + told) for _ in range(draw.randrange(6))], answer, choices, f"r{i}"))
    return rows


def test_no_hint_holds_the_last_part_or_states_the_answer(world, rich):
    cut = 0
    for p in rows_of_all_kinds(world, rich):
        solution, parts = p["solution"], common.segments(p)
        most = "".join(parts)
        assert len(parts) == min(5, len(solution))
        assert "".join(solution).startswith(most) and len(most) <= len("".join(solution[:-1]))
        gold = {"A": 0, "B": 1}.get(p["answer"])
        gold = p["answer"] if gold is None or not p["choices"] else p["choices"][gold]
        assert common.grade(most, p["answer"], p["choices"]) != "right"
        if p["id"][0] == "r" and not p["id"].startswith("train"):
            ends = [x.strip(" .\n") for x in solution[: sum(map(bool, parts))]]
            assert not any(x.endswith((f"is {gold}", f"= {gold}", f"is {p['answer']}", "</answer>")) for x in ends)
            cut += 0 < sum(map(bool, parts)) < len(parts) - 1
    assert cut > 40


def test_a_solution_is_shown_up_to_the_first_sentence_that_states_the_answer():
    assert common.segments(row(["a. ", "So x = 7. ", "Check: 3 + 4. ", "d. ", "e"])) == ["a. ", "", "", "", ""]
    assert common.segments(row(["a. ", "It is (B). ", "c. ", "d"], "B", ["6", "7"])) == ["a. ", "", "", ""]
    assert common.segments(row(["a. ", "It is 7. ", "c. ", "d"], "B", ["6", "7"])) == ["a. ", "", "", ""]
    assert common.segments(row(["a. ", "It has 17 or 7.5 parts. ", "c"])) == ["a. ", "It has 17 or 7.5 parts. ", ""]
    assert max(shown([row(["a. ", "So x = 7. ", "c. ", "d"], id=str(i)) for i in range(50)]), key=len) == "a. "


def test_so_it_is_where_the_sentence_stands_inside_a_part_of_several():
    solution = [f"s{i}. " for i in range(4)] + ["So x = 7. ", "This was by adding. "] + [f"t{i}. " for i in range(4)]
    assert "x = 7" not in "".join(common.segments(row(solution)))


def test_parts_are_cut_at_even_shares_of_the_sentences():
    parts = common.segments(row([f"{'abcdefghijkl'[i]}" for i in range(12)]))
    assert parts == ["ab", "cde", "fg", "hij", ""]  # round(12 k / 5) = 2, 5, 7, 10, 12


def test_a_solution_of_no_or_one_sentence_gives_no_hint(load):
    processor = load().processor
    for solution in [], ["Only this."], None:
        assert hint.hint_prefix([row(solution)], 0, processor, replace(hint.Args(), hint_start=1.0)) == [[]]


# ---- tokens


def test_what_looks_like_a_special_token_in_a_solution_stays_text(load):
    arm, text = load(), "See <|image_pad|> or <|im_end|>. "
    (ids,) = hint.hint_prefix([row([text, "b"])], 0, arm.processor, replace(hint.Args(), hint_start=1.0))
    assert not set(ids) & set(arm.processor.tokenizer.all_special_ids)
    assert arm.processor.tokenizer.decode(ids) == text


def test_hints_are_the_tokens_of_their_text_whole_and_outside_the_policy_mask(watch, make_args, rich, load):
    args = make_args(hint, steps=1, pool=rich, max_new_tokens=8, hint_start=1.0)
    seen, tokenizer = watch(hint, args), load().processor.tokenizer
    for p, (forced, sampled), text, mask in zip(seen.problems, answers(seen.batch), seen.batch.hint, seen.batch.mask,
                                                strict=True):  # fmt: skip
        expected = "".join(common.segments(p)[:4])
        assert forced == tokenizer(expected).input_ids and text == expected
        assert len(forced) > args.max_new_tokens and mask.sum() == len(sampled) <= 8
    assert not (seen.batch.mask * seen.batch.forced).any() and not (seen.advs[0] * seen.batch.forced).any()


def test_a_long_hint_is_not_truncated(load):
    arm = load(problems=1)
    problem = arm.pool[0] | dict(solution=["It is quite far from here to there. " * 3] * 4 + ["7"], answer="7")
    prefix = hint.hint_prefix([problem] * 4, 0, arm.processor, replace(hint.Args(), hint_start=1.0))
    assert len(prefix[0]) > 200
    batch = common.sample(arm.policy, arm.processor, [problem] * 4, arm.args, arm.run, prefix)
    assert [forced for forced, _ in answers(batch)] == prefix


# ---- what they never touch


def test_the_reward_never_reads_a_hint(load):
    arm = load(problems=1)
    problem = arm.pool[0]
    prefix = [arm.processor.tokenize(f"So <answer>{problem['answer']}</answer>")] * 4
    arm.policy.banned.fill_(-math.inf)[arm.policy.eos] = 0  # all that can follow is the end
    batch = common.sample(arm.policy, arm.processor, [problem] * 4, arm.args, arm.run, prefix)
    assert batch.text == [""] * 4 and batch.finished.all() and problem["answer"] in batch.hint[0]
    reward, grades = common.reward(batch, [problem] * 4)
    assert not reward.any() and grades == ["unparsed"] * 4
    assert common.reward(replace(batch, text=batch.hint), [problem] * 4)[0].all()


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("arm", HINTED)
def test_the_policy_gradient_does_not_depend_on_the_log_probs_of_hints(arm, watch, make_args, rich, monkeypatch):
    args = make_args(arm, steps=1, lr=0.0, pool=rich, hint_start=0.9)
    plain, token_logps = watch(arm, args), common.token_logps

    def other(policy, batch, rows, args):
        logp = token_logps(policy, batch, rows, args)
        return logp * (1 + 6 * batch.forced[rows]) - batch.forced[rows]

    monkeypatch.setattr(common, "token_logps", other)
    changed = watch(arm, replace(args, name="changed"))
    assert plain.batch.forced.any()
    same = all(equal(a, b) for a, b in zip(changed.gradients, plain.gradients, strict=True))
    assert same == (arm is not uft)  # it alone trains on them


def test_the_entropy_that_is_logged_is_that_of_sampled_tokens(watch, make_args, rich):
    seen = watch(hint, make_args(hint, steps=1, lr=0.0, pool=rich, hint_start=0.9))
    expected = -(seen.batch.logp.sum() / seen.batch.mask.sum()).item()  # the sampler's own, 0 at forced tokens
    assert seen.metrics[0]["entropy"] == pytest.approx(expected, rel=1e-4)


# ---- gates


def test_the_gates_pass_on_the_tiny_world_and_fail_without_solutions_or_with_told_answers(load, monkeypatch):
    arm = load()
    verdicts = lambda pool: {
        g["name"]: (g["verdict"], g["value"], g["text"])
        for g in gates.hints(arm.policy, arm.processor, pool, arm.args, arm.run)
    }
    good = verdicts(arm.pool)
    assert good["solutions"][:2] == ("pass", 1.0) and good["no leak"] == ("pass", 0, "0 hints state the answer")
    bare = [p | dict(solution=[]) for p in arm.pool[:5]] + arm.pool[5:]
    verdict, share, text = verdicts(bare)["solutions"]
    assert verdict == "fail" and share == pytest.approx(1 - 5 / len(bare))
    assert "shown in part; not train0, train1, train2: run data.pool.solutions, or" in text
    monkeypatch.setattr(common, "segments", lambda p, most=5: [f"So <answer>{p['answer']}</answer>", ""])
    told = "23 hints state the answer; first train0, train1, train2: rewrite these rows' solutions"
    assert verdicts(arm.pool)["no leak"] == ("fail", len(arm.pool), told)
