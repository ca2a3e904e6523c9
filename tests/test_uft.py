"""UFT: what the likelihood term is, and what it leaves alone."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import answers, close, equal, stock_logps

import common
import hint
import uft


@pytest.fixture
def reference(load, stock):
    """reference(seen, rows, args) -> NLL of these rows' hints a token, by one stock forward a row, with gradient."""

    def reference(seen, rows, args):
        arm, forced = load(replace(args, name="reference")), [answers(seen.batch)[i][0] for i in rows]
        total = sum(
            stock_logps(stock, arm, seen.problems[i], f, []).sum() for i, f in zip(rows, forced, strict=True) if f
        )
        return -total / sum(map(len, forced))

    return reference


def norm(gradient):
    return math.sqrt(sum(g.square().sum().item() for g in gradient.values()))


def test_without_reward_the_gradient_is_that_of_the_hints_likelihood_alone(watch, make_args, rich, stock, reference):
    """Random answers are all wrong: what is left is the term. Token mean over the minibatch, shift and sign at once."""
    args = make_args(uft, steps=1, lr=0.0, pool=rich, sft_coef=0.3, max_grad_norm=1e9, temperature=0.8, hint_start=0.8)
    seen, values = watch(uft, args), []
    assert seen.metrics[0]["all_wrong"] == 1 and seen.batch.forced.sum(1).unique().numel() > 1
    for half, gradient in enumerate(seen.gradients):
        stock.zero_grad()
        values.append(args.sft_coef * reference(seen, range(half * 8, half * 8 + 8), args))
        values[-1].backward()
        assert equal(gradient, {n: p.grad for n, p in stock.named_parameters() if n in gradient})
    assert seen.metrics[0]["loss"] == pytest.approx(sum(values).item() / 2, rel=1e-4)


@pytest.mark.usefixtures("mixed")
def test_with_reward_the_term_is_added_to_the_gradient_of_the_hint_arm(watch, make_args, rich, stock, reference):
    args = dict(steps=1, lr=0.0, pool=rich, max_grad_norm=1e9)
    both, alone = watch(uft, make_args(uft, sft_coef=0.5, **args)), watch(hint, make_args(hint, **args))
    stock.zero_grad()
    (0.5 * reference(both, range(8), make_args(uft, **args))).backward()
    term = {n: p.grad for n, p in stock.named_parameters() if n in both.gradients[0]}
    assert equal({n: both.gradients[0][n] - alone.gradients[0][n] for n in term}, term, 1e-4)


@pytest.mark.usefixtures("mixed")
def test_the_gradient_does_not_depend_on_the_micro_batch(watch, make_args, rich):
    args = dict(steps=1, lr=0.0, pool=rich, sft_coef=1.0, hint_start=0.7)
    runs = [watch(uft, make_args(uft, micro_batch=n, **args)) for n in (1, 3, 8)]
    assert runs[0].batch.forced.sum(1).unique().numel() > 1
    for other in runs[1:]:
        assert all(equal(a, b) for a, b in zip(runs[0].gradients, other.gradients, strict=True))
        assert other.metrics[0]["loss"] == pytest.approx(runs[0].metrics[0]["loss"], abs=1e-5)


def test_without_hints_the_term_is_exactly_0_and_finite(watch, make_args, rich):
    seen = watch(uft, make_args(uft, steps=1, pool=rich, sft_coef=1.0, hint_start=0.0))
    row = seen.metrics[0]
    assert row["loss"] == row["grad_norm"] == row["hint_norm"] == row["policy_norm"] == 0
    assert not any(g.any() for g in seen.gradients[0].values())


def test_the_log_prob_of_each_hint_token_is_the_published_models_and_a_shift_by_one_would_show(load, rich, stock):
    arm = load(pool=rich)
    problems = common.next_problems(arm.pool, 0, arm.args, arm.run)
    prefix = uft.hint_prefix(problems, 0, arm.processor, replace(uft.Args(), hint_start=0.9))
    batch = common.sample(arm.policy, arm.processor, problems, arm.args, arm.run, prefix)
    logp = common.score(arm.policy, batch, arm.args)
    for i in range(0, 16, 4):
        ours, sampled = logp[i][batch.forced[i] > 0], answers(batch)[i][1]
        theirs = stock_logps(stock, arm, problems[i], prefix[i], sampled).detach()[: len(prefix[i])]
        assert len(ours) > 10 and close(ours, theirs, 1e-4)
        assert not close(ours[1:], theirs[:-1], 1) and ours.sum() == pytest.approx(theirs.sum().item(), abs=1e-3)


# ---- the norms that are logged


@pytest.mark.usefixtures("mixed")
def test_the_norm_of_each_term_is_logged_every_10_steps_and_changes_nothing(watch, make_args, rich, monkeypatch):
    args = make_args(uft, steps=11, lr=1e-4, pool=rich, problems=2, max_new_tokens=8, minibatches=1)
    seen = watch(uft, args)
    for name in "policy_norm", "hint_norm":
        assert [x["step"] for x in seen.metrics if name in x] == [0, 10]
    monkeypatch.setattr(common, "term_norms", lambda *rest: {})
    quiet = watch(uft, replace(args, name="quiet"))
    assert all(torch.equal(x, quiet.weights[k]) for k, x in seen.weights.items())
    assert [x["loss"] for x in seen.metrics] == [x["loss"] for x in quiet.metrics]


@pytest.mark.usefixtures("mixed")
def test_the_norm_of_the_hint_term_is_that_of_its_own_gradient(watch, make_args, rich, stock, reference):
    args = make_args(uft, sft_coef=0.2, steps=1, lr=0.0, pool=rich)
    seen = watch(uft, args)
    stock.zero_grad()
    (0.2 * reference(seen, range(16), args)).backward()
    term = {n: p.grad for n, p in stock.named_parameters() if n in seen.gradients[0]}
    assert seen.metrics[0]["hint_norm"] == pytest.approx(norm(term), rel=1e-4)
    assert all(p.grad is None or not p.grad.full_tensor().any() for p in seen.policy.parameters())


@pytest.mark.usefixtures("mixed")
def test_the_norm_of_the_policy_term_is_that_of_its_own_gradient(watch, make_args, rich):
    args = dict(steps=1, lr=0.0, pool=rich, minibatches=1, max_grad_norm=1e9)
    both, alone = watch(uft, make_args(uft, **args)), watch(hint, make_args(hint, **args))
    assert both.metrics[0]["policy_norm"] == pytest.approx(norm(alone.gradients[0]), rel=1e-4)
