"""GRPO's arithmetic by hand, and the gradient that `grpo.main` really applies against the published model."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import answers, close, equal, stock_logps
from torch import tensor

import common
import grpo


@pytest.fixture
def train(watch):
    """train(args) runs grpo.main -> what `watch` saw of it, and the weights before and after."""

    def train(args):
        seen = watch(grpo, args)
        seen.before = dict(common.load_model(args.model, torch.float32).named_parameters())
        seen.after = {name: seen.weights[name] for name in seen.before}
        return seen

    return train


# ---- the two functions


def test_advantages_are_those_computed_by_hand(make_args):
    args = make_args(group=8)
    adv = grpo.group_advantage(tensor([1.0, 0, 0, 0, 0, 0, 0, 0] + [1.0, 0, 1, 0, 1, 0, 1, 0]), args)
    deviation = math.sqrt(1 / 8)  # with 7 degrees of freedom
    one, other = (1 - 1 / 8) / deviation, (0 - 1 / 8) / deviation
    assert close(adv[:8], tensor([one] + [other] * 7)) and round(one, 3) == 2.475 and round(other, 3) == -0.354
    assert close(adv[8:], tensor([0.9354, -0.9354] * 4), 1e-4)


def test_a_group_of_equal_rewards_gets_exact_zeros(make_args):
    for value in (0.0, 1.0):
        assert not grpo.group_advantage(torch.full((16,), value), make_args(group=8)).any()


def test_advantages_of_a_group_sum_to_zero_and_other_groups_do_not_matter(make_args):
    args = make_args(group=8)
    reward = (torch.rand(80, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    adv = grpo.group_advantage(reward, args)
    assert close(adv.view(10, 8).sum(1), torch.zeros(10))
    other = reward.clone()
    other[8:] = 1 - other[8:].flip(0)
    assert torch.equal(grpo.group_advantage(other, args)[:8], adv[:8])
    assert torch.equal(grpo.group_advantage(reward[:8], args), adv[:8])


def test_the_loss_of_each_token_and_its_gradient_are_those_of_the_clipped_surrogate(make_args):
    args = make_args(clip_low=0.2, clip_high=0.28)
    draw = random.Random(0)
    cells = [(draw.uniform(-0.6, 0.6), draw.choice([-1.5, 0.0, 0.7])) for _ in range(60)]
    cells += [(math.log(x), a) for x in (0.7999, 0.8001, 1, 1.2799, 1.2801) for a in (-2.0, 2.0)]
    old = torch.linspace(-5, -0.1, len(cells)).view(10, -1)
    logp = (old + tensor([x for x, _ in cells]).view_as(old)).requires_grad_()
    adv = tensor([a for _, a in cells]).view_as(old)
    loss = grpo.policy_loss(logp, old, adv, args)
    assert loss.shape == old.shape
    loss.sum().backward()
    for i, (log_ratio, a) in enumerate(cells):
        ratio = math.exp(log_ratio)
        cut = (ratio > 1.28 and a > 0) or (ratio < 0.8 and a < 0)  # only moves that went too far are cut
        expected = -a * (1.28 if a > 0 else 0.8) if cut else -a * ratio
        assert loss.view(-1)[i].item() == pytest.approx(expected, abs=1e-5)
        assert logp.grad.view(-1)[i].item() == pytest.approx(0.0 if cut else -a * ratio, abs=1e-5)


def test_one_tokens_ratio_does_not_touch_another_token(make_args):
    args, old = make_args(), torch.full((2, 5), -1.0)
    logp = old.clone()
    logp[0, 2] += 0.5
    loss = grpo.policy_loss(logp, old, torch.ones(2, 5), args)
    assert (loss != -1).nonzero().tolist() == [[0, 2]]


def test_an_absurd_ratio_stays_finite(make_args):
    logp = tensor([[200.0, -200.0]], requires_grad=True)
    loss = grpo.policy_loss(logp, torch.zeros(1, 2), tensor([[-1.0, 1.0]]), make_args())
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all()


# ---- the gradient of grpo.main


@pytest.mark.usefixtures("mixed")
def test_the_gradient_of_each_minibatch_is_that_of_the_published_model(train, load, make_args, stock):
    """One answer at a time; advantage, mask with the end token, denominator, zeroed gradients, temperature at once."""
    args = make_args(steps=1, lr=0.0, temperature=0.8, max_grad_norm=1e9)
    seen, arm = train(args), load(replace(args, name="reference"))
    assert len(seen.gradients) == 2
    for half, gradient in enumerate(seen.gradients):
        rows = range(half * 8, half * 8 + 8)
        everything = [answers(seen.batch)[i][1] for i in rows]
        stock.zero_grad()
        for i, sampled in zip(rows, everything, strict=True):
            logp = stock_logps(stock, arm, seen.problems[i], [], sampled)
            adv = (1 if i % 2 == 0 else -1) * 0.5 / math.sqrt(4 * 0.25 / 3)  # two of four are right
            (-adv * logp.sum() / sum(map(len, everything))).backward()
        reference = {n: p.grad for n, p in stock.named_parameters() if n in gradient}
        assert equal(gradient, reference)
    assert not equal(*seen.gradients, 0.1)


@pytest.mark.usefixtures("mixed")
def test_the_gradient_does_not_depend_on_the_micro_batch(train, make_args):
    runs = [train(make_args(steps=1, lr=0.0, micro_batch=n)) for n in (1, 2, 4, 8)]
    assert runs[0].batch.mask.sum(1).unique().numel() > 3
    for other in runs[1:]:
        for a, b in zip(runs[0].gradients, other.gradients, strict=True):
            assert equal(a, b)


@pytest.mark.usefixtures("mixed")
def test_a_fully_masked_row_more_changes_nothing(train, make_args, monkeypatch):
    alone = train(make_args(steps=1, lr=0.0, problems=2, minibatches=1))
    sample = common.sample

    def sample_twice(policy, processor, problems, args, *rest, **more):
        batch = sample(policy, processor, problems[:8], args, *rest, **more)
        if more:
            return batch
        batch = batch[torch.tensor([*range(8), *range(4, 8)])]
        batch.mask[8:] = 0
        return batch

    monkeypatch.setattr(common, "sample", sample_twice)
    more = train(make_args(steps=1, lr=0.0, problems=3, minibatches=1))
    assert len(more.batch.mask) == 12
    assert equal(alone.gradients[0], more.gradients[0])
    assert alone.metrics[0]["loss"] == pytest.approx(more.metrics[0]["loss"], abs=1e-6)


@pytest.mark.usefixtures("mixed")
def test_the_ratio_is_exactly_1_in_the_first_minibatch_and_not_in_the_second(train, make_args):
    seen = train(make_args(steps=1, lr=1e-3))
    assert len(seen.ratios) == 4  # two minibatches of two micro-batches
    assert not seen.ratios[0].any() and not seen.ratios[1].any()
    assert seen.ratios[2].abs().max() > 1e-3 and seen.ratios[3].abs().max() > 1e-3


@pytest.mark.usefixtures("mixed")
def test_advantages_sit_on_sampled_tokens_of_the_rows_that_earned_them(train, make_args):
    seen = train(make_args(steps=1))
    adv = torch.cat(seen.advs)
    assert torch.equal(adv != 0, seen.batch.mask > 0)
    assert ((adv.sum(1) > 0) == (torch.arange(16) % 2 == 0)).all()
    assert {p["id"] for p in seen.problems[:4]} == {seen.problems[0]["id"]}


@pytest.mark.usefixtures("mixed")
def test_the_gradient_is_clipped_to_its_norm_and_the_norm_before_is_logged(train, make_args):
    seen = train(make_args(steps=1, max_grad_norm=0.01))
    norm = lambda gradient: math.sqrt(sum(g.square().sum().item() for g in gradient.values()))
    assert seen.norms == pytest.approx([norm(g) for g in seen.gradients], rel=1e-4)
    assert [norm(g) for g in seen.clipped] == pytest.approx([0.01] * 2, rel=1e-3) and min(seen.norms) > 0.02
    assert seen.metrics[0]["grad_norm"] == pytest.approx(sum(seen.norms) / 2, rel=1e-4)


def test_what_is_logged_is_what_the_step_did(train, make_args, monkeypatch):
    rewards = tensor([1.0, 0, 0, 0] + [0.0] * 8 + [1.0] * 4)
    grades = ["right"] + ["wrong"] * 10 + ["unparsed"] + ["right"] * 4
    monkeypatch.setattr(common, "reward", lambda batch, problems: (rewards, grades))
    seen = train(make_args(steps=1, lr=0.0))
    row, lengths = seen.metrics[0], [len(sampled) for _, sampled in answers(seen.batch)]
    expected = dict(step=0, reward=5 / 16, right=5 / 16, wrong=10 / 16, unparsed=1 / 16, all_wrong=0.5, all_right=0.25,
                    mixed=0.25, tokens=sum(lengths), length=sum(lengths) / 16,
                    truncated=sum(not x for x in seen.batch.finished.tolist()) / 16,
                    entropy=-seen.batch.logp.sum().item() / sum(lengths))  # fmt: skip
    assert {k: row[k] for k in expected} == pytest.approx(expected, rel=1e-4)
    adv = tensor([1.5, -0.5, -0.5, -0.5]) / 1.0  # mean 1/4, standard deviation 1/2
    loss = -sum(a * n for a, n in zip(adv.tolist(), lengths[:4], strict=True)) / sum(lengths[:8]) / 2
    assert row["loss"] == pytest.approx(loss, abs=1e-5) and row["mismatch"] < 1e-5


# ---- weights


def test_a_step_of_dead_groups_leaves_every_weight_as_it_is_to_the_bit(train, make_args, monkeypatch):
    rewards = tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 8)
    monkeypatch.setattr(common, "reward", lambda batch, problems: (rewards, ["wrong"] * 16))
    seen = train(make_args(steps=3, lr=1e-2, weight_decay=0.0))
    assert all(torch.equal(seen.before[k], seen.after[k]) for k in seen.before)
    assert seen.norms == [0.0] * 6


@pytest.mark.usefixtures("mixed")
def test_at_learning_rate_1e_6_most_weights_move_because_the_masters_are_fp32(train, load, make_args):
    seen = train(make_args(steps=10, lr=1e-6, problems=2))
    trained = [k for k in seen.before if "visual" not in k]
    moved = sum((seen.before[k] != seen.after[k]).sum().item() for k in trained)
    assert moved > 0.5 * sum(seen.before[k].numel() for k in trained)
    assert {p.dtype for p in load().policy.parameters()} == {torch.float32}


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("freeze_vision", [1, 0])
def test_the_vision_tower_moves_only_when_it_is_not_frozen(train, make_args, freeze_vision):
    seen = train(make_args(steps=1, lr=1e-3, freeze_vision=freeze_vision))
    vision = [k for k in seen.before if "visual" in k]
    assert len(vision) > 10
    kept = lambda name: torch.equal(seen.before[name], seen.after[name])
    assert all(kept(k) == bool(freeze_vision) for k in vision if k.endswith("weight"))
    assert not kept("model.language_model.embed_tokens.weight")


@pytest.mark.usefixtures("mixed")
def test_the_learning_rate_warms_up_in_a_straight_line(train, make_args):
    """The first step of Adam moves a weight by the learning rate, whatever its gradient."""
    for warmup in (1, 10):
        seen = train(make_args(steps=1, lr=1e-3, warmup=warmup, minibatches=1))
        move = max((seen.before[k] - seen.after[k]).abs().max().item() for k in seen.before)
        assert move == pytest.approx(1e-3 / warmup, rel=1e-2)


def test_a_gradient_that_is_not_finite_stops_the_run_with_a_sentence_before_any_weight_changes(make_args, monkeypatch):
    def reward(batch, problems):
        right = (torch.arange(16) % 2).double()
        return (right / 0 if torch.is_grad_enabled() else right), ["right"] * 16

    monkeypatch.setattr(common, "reward", reward)
    step, stepped = torch.optim.AdamW.step, []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *x, **y: stepped.append(1) or step(*x, **y))
    args = make_args(steps=2)
    with pytest.raises(SystemExit, match="gradient is not finite"):
        grpo.main(args)
    assert not stepped


# ---- problems


def test_problems_are_a_pure_function_of_seed_step_and_rank(load, make_args):
    pool, args = load().pool, make_args()
    ids = lambda step, rank=0, world=1, **x: [
        p["id"] for p in common.next_problems(pool, step, replace(args, **x), SimpleNamespace(rank=rank, world=world))
    ]
    torch.manual_seed(1), random.seed(1)
    first = [ids(s) for s in range(12)]
    torch.manual_seed(2), random.seed(2)
    assert [ids(s) for s in reversed(range(12))] == first[::-1]
    assert [ids(s, seed=1) for s in range(12)] != first and len({json.dumps(x) for x in first}) == 12
    for s, rows in enumerate(first):
        assert rows == [x for x in rows[:: args.group] for _ in range(args.group)]  # a group stays together
        parts = [ids(s, rank, 2) for rank in (0, 1)]
        assert not set(parts[0]) & set(parts[1]) and sorted(parts[0] + parts[1]) == sorted(rows)
        firsts = [part[: len(part) // 2] for part in parts]  # the ranks' first minibatches are the one process's
        assert sorted(firsts[0] + firsts[1]) == sorted(rows[: len(rows) // 2])


def test_every_problem_comes_once_an_epoch_in_a_new_order(load, make_args):
    pool, args = load().pool, make_args(group=1, problems=4)
    run = SimpleNamespace(rank=0, world=1)
    stream = [p["id"] for s in range(23) for p in common.next_problems(pool, s, args, run)]
    epochs = [stream[i : i + 23] for i in range(0, 92, 23)]  # 23 problems, 4 a step
    assert all(sorted(epoch) == sorted(p["id"] for p in pool) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_weight_decay_shrinks_the_weights_even_where_no_group_teaches(train, make_args, monkeypatch):
    monkeypatch.setattr(common, "reward", lambda batch, _: (torch.zeros(len(batch.text)), ["wrong"] * len(batch.text)))
    seen = train(make_args(steps=1, lr=1e-2, weight_decay=0.5, minibatches=1))
    trained = [n for n, p in seen.before.items() if "visual" not in n]
    assert all(close(seen.after[n], seen.before[n] * (1 - 1e-2 * 0.5), 1e-6) for n in trained)
