"""Switched off, a prior leaves its parent's run to the bit: rollouts, updates, weights, metrics. Switched on, it never
does: a term that is computed and logged but never added would pass every other test."""

import re

import pytest
import torch

import grpo
import hint
import opd
import reopd
import stack
import uft

OWN = r"seconds_|tokens_per_second|memory_|teacher_kl|clamped|rms_|policy_norm|hint_norm"
OFF = {
    "hints of chance 0": (hint, dict(hint_start=0.0), grpo, {}),
    "likelihood of weight 0": (uft, dict(sft_coef=0.0), hint, {}),
    "annealed teacher of weight 0": (opd, dict(mix="annealed", kl_coef=0.0), grpo, {}),
    "gated teacher of weight 0": (opd, dict(mix="gated", kl_coef=0.0), grpo, {}),
    "gated teacher of weight 0, by groups": (opd, dict(mix="gated", gate="group", kl_coef=0.0), grpo, {}),
    "stack without teacher": (stack, dict(kl_coef=0.0), hint, {}),
    "stack without hints": (stack, dict(hint_start=0.0), opd, dict(mix="annealed")),
    "stack without both": (stack, dict(hint_start=0.0, kl_coef=0.0), grpo, {}),
    "replay of nothing": (reopd, dict(replay_start=0.0), opd, dict(mix="pure")),
}
ON = {
    "hint": (hint, {}, grpo, {}),
    "uft": (uft, {}, hint, {}),
    "opd": (opd, dict(mix="pure"), grpo, {}),
    "opd-annealed": (opd, dict(mix="annealed"), grpo, {}),
    "opd-gated": (opd, dict(mix="gated"), grpo, {}),
    "opd-gated is not annealed": (opd, dict(mix="gated"), opd, dict(mix="annealed")),
    "reopd": (reopd, {}, opd, dict(mix="pure")),
    "stack has a teacher": (stack, {}, hint, {}),
    "stack has hints": (stack, {}, opd, dict(mix="annealed")),
}


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def finish(watch, make_args, rich, teacher, known, mixed):
    """finish(arm, **overrides) -> (weights, metrics) after three steps: two with the prior, one when it has faded."""

    def finish(arm, **overrides):
        key = (arm.__name__, *sorted(overrides.items()))
        if key not in known:
            prior = dict(teacher=teacher) if hasattr(arm.Args, "teacher") else {}
            seen = watch(
                arm,
                make_args(
                    arm, **(dict(steps=3, lr=1e-3, pool=rich, problems=2, max_new_tokens=12) | prior | overrides)
                ),
            )
            assert len(seen.metrics) == 3 and seen.metrics[0]["mixed"] == 1
            known[key] = seen.weights, [{k: v for k, v in x.items() if not re.match(OWN, k)} for x in seen.metrics]
        return known[key]

    return finish


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("pair", OFF)
def test_with_its_prior_off_an_arm_is_its_parent_to_the_bit(pair, finish):
    child, off, parent, how = OFF[pair]
    (weights, metrics), (expected, log) = finish(child, **off), finish(parent, **how)
    assert metrics == log and len(metrics[0]) > 12
    assert same(weights, expected)


@pytest.mark.parametrize("pair", ON)
def test_with_its_prior_on_an_arm_is_not_its_parent(pair, finish):
    child, on, parent, how = ON[pair]
    (weights, metrics), (expected, log) = finish(child, **on), finish(parent, **how)
    assert not same(weights, expected)
    assert metrics[1:] != log[1:]


def test_rows_without_stored_answers_make_reopd_plain_distillation(finish, world):
    plain = dict(pool=str(world / "train.jsonl"))
    (weights, metrics), (expected, log) = finish(reopd, **plain), finish(opd, mix="pure", **plain)
    assert metrics == log and same(weights, expected)


def test_a_student_that_is_its_own_teacher_learns_exactly_nothing_at_the_first_step(watch, make_args, world):
    for arm, more in (opd, dict(mix="pure")), (reopd, {}):
        args = make_args(arm, steps=1, lr=1e-2, teacher=str(world / "student"), **more)
        seen = watch(arm, args)
        assert not seen.advs[0].any() and seen.metrics[0]["teacher_kl"] == 0 and seen.metrics[0]["grad_norm"] == 0


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("arm", [opd, stack])
def test_once_the_teacher_has_faded_advantages_are_those_of_grpo_to_the_bit(arm, watch, make_args, teacher):
    mix = dict(mix="annealed") if arm is opd else {}
    args = make_args(arm, steps=4, lr=1e-3, teacher=teacher, kl_until=0.5, **mix)
    seen = watch(arm, args)
    reward = (torch.arange(16) % 2 == 0).float()
    for step, (_, batch) in enumerate(seen.batches[:4]):
        expected = grpo.group_advantage(reward, args)[:, None] * batch.mask
        assert torch.equal(seen.advs[step], expected) == (step >= 2)
        assert (seen.metrics[step]["rms_teacher"] == 0) == (step >= 2)
