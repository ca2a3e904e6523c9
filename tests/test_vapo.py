"""The critic arms: what V sees and when, what it is taught, what advantages are made of, and that nothing but the loss
of the critic tells vapo from vapohl."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, answers, banned, close, equal, inputs
from safetensors.torch import load_file
from scipy.stats import norm
from torch import tensor

import common
import vapo
from data import gates

MSE, HL = vapo.Args(critic_loss="mse"), vapo.Args(critic_loss="hlgauss")
both = pytest.mark.parametrize("loss", ["mse", "hlgauss"])
outputs = lambda loss: 1 if loss == "mse" else 51


def folder(args):
    return Path(args.runs) / f"{args.name}-s{args.seed}"


def lines(args, name="metrics.jsonl"):
    """The lines of a log without what a clock says."""
    return [{k: v for k, v in x.items() if "second" not in k} for x in common.read_jsonl(folder(args) / name)]


@pytest.fixture(scope="session")
def make_args(make_args):
    """The tiny world's, without its last answers, which cost time and are tested in test_arms.py."""
    return lambda *arm, **flags: make_args(*arm, **(dict(eval="") | flags))


@pytest.fixture
def sparse(monkeypatch):
    """One answer in sixteen is right."""

    def reward(batch, problems):
        right = torch.arange(len(batch.text)) % 16 == 5
        return right.float(), ["right" if x else "wrong" for x in right]

    monkeypatch.setattr(common, "reward", reward)


def full(critic):
    """{name: whole fp32 tensor} of all weights."""
    common.reshard(critic)
    return {n: p.full_tensor().detach().clone() for n, p in critic.named_parameters()}


def excite(critic):
    """A head that is not 0, so that V depends on what the critic sees."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in critic.head.parameters():
            p.copy_(torch.distributed.tensor.distribute_tensor(0.1 * torch.randn(p.shape), p.device_mesh, p.placements))
    return critic


@pytest.fixture(scope="module")
def arm(load):
    """A policy, a critic of three outputs, and one rollout batch. Never changed by a test."""
    arm = load(arm=vapo)
    arm.critic = excite(common.load_critic(arm.args.model, 3, arm.args, arm.run))
    arm.problems = common.next_problems(arm.pool, 0, arm.args, arm.run)
    torch.manual_seed(0)
    arm.batch = common.sample(arm.policy, arm.processor, arm.problems, arm.args, arm.run)
    arm.values = common.score(arm.critic, arm.batch, arm.args, common.token_values)
    return arm


def run_watched(watch, args, monkeypatch):
    """watch, and besides what the critic was taught in each pass -> seen; seen.fits: list of (batch, value, target),
    pretraining first; seen.lams: the lambdas that advantages were made with; critic: as it was at the end."""
    fits, lams, fit, gae, save = [], [], common.fit_critic, vapo.gae, common.save_critic

    def fit_(critic, optimizer, loss, batch, value, target, *rest):
        fits.append((batch, value.clone(), target.clone()))
        return fit(critic, optimizer, loss, batch, value, target, *rest)

    def gae_(reward, value, mask, lam):
        lams.append(lam)
        return gae(reward, value, mask, lam)

    with monkeypatch.context() as m:
        m.setattr(common, "fit_critic", fit_)
        m.setattr(vapo, "gae", gae_)
        m.setattr(common, "save_critic", lambda critic, run: kept.append(critic) or save(critic, run))
        kept = []
        seen = watch(vapo, args)
    seen.fits, seen.lams, seen.critic = fits, [x for x in lams if torch.is_tensor(x)], kept[0]
    return seen


# ---- the critic


def test_a_value_is_that_of_the_published_network_before_the_token_under_the_head(arm, stock):
    weights = full(arm.critic)
    weight, bias = weights["head.weight"], weights["head.bias"]
    for i in (0, 5, 11):
        forced, sampled = answers(arm.batch)[i]
        states = stock.model(**inputs(arm, arm.problems[i], sampled)).last_hidden_state[0, -len(sampled) - 1 : -1]
        assert close(arm.values[i][arm.batch.mask[i] > 0], states @ weight.T + bias, 1e-4)
    assert not arm.values[arm.batch.mask == 0].any() and arm.values.abs().max() > 0.1


def test_a_token_changes_the_values_after_it_and_neither_its_own_nor_those_before(arm):
    T = arm.batch.mask.shape[1]
    for t in (0, 3):
        ids = arm.batch.ids.clone()
        ids[:, t - T] = (ids[:, t - T] + 1 - 40) % 200 + 40
        other = common.score(arm.critic, replace(arm.batch, ids=ids), arm.args, common.token_values)
        changed = ((other - arm.values).abs() > 1e-4).any(-1)
        longer = arm.batch.mask[:, t + 1] > 0
        assert not changed[:, : t + 1].any() and changed[longer, t + 1].all() and longer.sum() > 3


def test_the_critic_sees_the_image_of_every_row(arm):
    for k in range(len(arm.batch.pixels)):
        pixels = [torch.zeros_like(x) if i == k else x for i, x in enumerate(arm.batch.pixels)]
        blind = common.score(arm.critic, replace(arm.batch, pixels=pixels), arm.args, common.token_values)
        assert ((blind - arm.values).abs() > 1e-4).any(-1).any(-1).tolist() == (arm.batch.image == k).tolist()


def test_values_do_not_depend_on_padding_or_the_micro_batch(arm):
    one = common.score(arm.critic, arm.batch, replace(arm.args, micro_batch=1), common.token_values)
    assert close(one, arm.values, 1e-4)
    rows = tensor([9, 2])
    assert close(common.token_values(arm.critic, arm.batch, rows, arm.args).detach(), arm.values[rows], 1e-4)


def test_the_critic_is_a_copy_that_neither_shares_weights_with_the_policy_nor_trains_a_frozen_tower(arm, stock):
    full(arm.critic)
    ours, theirs = dict(arm.critic.model.named_parameters()), dict(arm.policy.model.model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, _ in stock.model.named_parameters():
        assert ours[name] is not theirs[name]
        assert ours[name].requires_grad == theirs[name].requires_grad == ("visual" not in name)
    fresh, state = full(common.load_critic(arm.args.model, 1, arm.args, arm.run)), stock.model.state_dict()
    assert all(torch.equal(fresh[f"model.{n}"], x) for n, x in state.items())


@both
def test_a_trained_critic_comes_back_from_its_file_with_the_same_values_to_the_bit(
    loss, arm, make_args, watch, mixed, monkeypatch
):
    args = make_args(vapo, critic_loss=loss, steps=1)
    seen = run_watched(watch, args, monkeypatch)
    back = common.load_critic(args.model, outputs(loss), args, arm.run, folder(args) / "critic.safetensors")
    a, b = (common.score(x, arm.batch, args, common.token_values) for x in (seen.critic, back))
    assert torch.equal(a, b) and a.std() > 1e-3
    base, moved = common.load_model(args.model, torch.float32).model.state_dict(), full(back)
    assert sum(not torch.equal(moved[f"model.{n}"], x) for n, x in base.items()) > 20


def test_the_heads_file_is_fp32_and_the_forward_before_saving_leaves_no_rounded_weights_in_it(
    make_args, monkeypatch, load
):
    """After a forward without a backward the parameters are the compute copies, in bf16."""
    args = make_args(vapo)
    run = common.start(args)
    run.dtype = torch.bfloat16
    critic = excite(common.load_critic(args.model, 1, args, run))
    policy, processor = common.load_policy(args.model, args, run), common.Processor(args.model, args)
    batch = common.sample(policy, processor, common.next_problems(common.load_pool(args.pool), 0, args, run), args, run)
    common.score(critic, batch, args, common.token_values)
    common.save_critic(critic, run)
    saved, base = (
        load_file(run.dir / "critic.safetensors"),
        common.load_model(args.model, torch.float32).model.state_dict(),
    )
    assert all(x.dtype == torch.float32 for x in saved.values())
    assert all(torch.equal(saved[f"model.{n}"], x) for n, x in base.items())


# ---- advantages and targets


def brute(reward, value, n, lam):
    """A_t = sum_k lam^k delta_{t+k} over the n tokens of one answer, delta = r + V' - V, in float64."""
    v = [float(x) for x in value[:n]] + [0.0]
    delta = [(float(reward) if t == n - 1 else 0.0) + v[t + 1] - v[t] for t in range(n)]
    return [sum(lam**k * delta[t + k] for k in range(n - t)) for t in range(n)]


@pytest.fixture
def drawn():
    torch.manual_seed(0)
    n = tensor([1, 2, 5, 9, 12])
    mask = (torch.arange(12) < n[:, None]).float()
    return SimpleNamespace(n=n, mask=mask, value=torch.rand(5, 12) * mask, reward=tensor([1.0, 0, 1, 0, 1]))


def test_advantages_are_the_sum_over_the_rest_of_the_answer(drawn):
    for lam in torch.zeros(5), torch.full((5,), 0.95), tensor([0.0, 0.3, 0.8, 1.0, 0.5]):
        adv = vapo.gae(drawn.reward, drawn.value, drawn.mask, lam)
        for i, n in enumerate(drawn.n.tolist()):
            assert adv[i, :n].tolist() == pytest.approx(
                brute(drawn.reward[i], drawn.value[i], n, float(lam[i])), abs=1e-6
            )
            assert not adv[i, n:].any()


def test_lambda_1_is_monte_carlo_so_that_every_target_is_the_reward(drawn):
    target = vapo.gae(drawn.reward, drawn.value, drawn.mask, 1.0) + drawn.value
    assert close(target, drawn.reward[:, None] * drawn.mask, 1e-6)


def test_the_reward_stands_at_the_last_token_once(drawn):
    given = vapo.gae(drawn.reward, torch.zeros_like(drawn.value), drawn.mask, torch.zeros(5))  # deltas alone
    assert torch.equal(given.sum(1), drawn.reward)
    assert torch.equal(given.gather(1, drawn.n[:, None] - 1)[:, 0], drawn.reward)


def test_padding_and_what_a_critic_says_there_change_no_advantage(drawn):
    lam = tensor([0.1, 0.5, 0.9, 0.7, 1.0])
    adv = vapo.gae(drawn.reward, drawn.value, drawn.mask, lam)
    wide, mask = (torch.nn.functional.pad(x, (0, 7)) for x in (drawn.value, drawn.mask))
    noisy = torch.where(mask > 0, wide, torch.randn_like(wide))
    padded = vapo.gae(drawn.reward, noisy, mask, lam)
    assert torch.equal(padded[:, :12], adv) and not padded[:, 12:].any()


def test_lambda_comes_from_the_true_length_and_stays_within_its_floor_and_1(watch, make_args, mixed, monkeypatch):
    shares = []
    for more in dict(lambda_alpha=0.05), dict(lambda_alpha=0.05, lambda_floor=0.9), dict(lambda_alpha=0.1):
        args = make_args(vapo, steps=1, **more)
        seen = run_watched(watch, args, monkeypatch)
        n = seen.batch.mask.sum(1)
        formula = [1 - 1 / (args.lambda_alpha * x) for x in n.tolist()]
        (lam,) = seen.lams
        assert lam.tolist() == pytest.approx([min(1, max(args.lambda_floor, x)) for x in formula], abs=1e-6)
        assert lam.min() >= 0 and lam.max() < 1 and n.min() < n.max()
        shares.append(lines(args)[0]["lambda_clamped"])
        assert shares[-1] == pytest.approx(sum(x < args.lambda_floor for x in formula) / len(formula))
    assert 0 < shares[2] < shares[0] and shares[1] == 1


@both
def test_targets_are_the_rewards_whatever_lambda_the_advantages_have(loss, watch, make_args, mixed, monkeypatch):
    args = make_args(vapo, critic_loss=loss, steps=2, lr=0.0)
    runs = [run_watched(watch, replace(args, name=f"a{a}", lambda_alpha=a), monkeypatch) for a in (0.01, 0.5)]
    for (batch, _, target), (_, _, other) in zip(*(x.fits for x in runs), strict=True):
        right = (torch.arange(16) % 2 == 0).float()[:, None] * batch.mask
        assert close(target, right, 1e-6) and torch.equal(target, other)
    assert len(runs[0].fits) == 3 + 2 and not torch.equal(runs[0].advs[1], runs[1].advs[1])


@pytest.mark.parametrize("loss, floor", [("mse", 0.01), ("hlgauss", 0.01), ("mse", 3.0)])
def test_advantages_are_those_of_the_values_before_the_update(loss, floor, watch, make_args, mixed, monkeypatch):
    """Over their standard deviation, or over the floor, and with their mean."""
    args = make_args(vapo, critic_loss=loss, steps=2, lr=1e-3, lambda_floor=0.6, adv_floor=floor)
    seen = run_watched(watch, args, monkeypatch)
    for step in (0, 1):
        batch, value, _ = seen.fits[args.value_steps + step]
        raw = torch.zeros_like(value)
        for i, n in enumerate(batch.mask.sum(1).int().tolist()):
            lam = max(0.6, 1 - 1 / (0.05 * n))
            raw[i, :n] = tensor(brute(float(i % 2 == 0), value[i], n, lam))
        std = raw[batch.mask > 0].std(correction=0)
        assert close(seen.advs[step], raw / max(std, floor), 1e-4) and 0.05 < std < 3
        assert raw[batch.mask > 0].mean().abs() > 1e-4
        assert lines(args)[step]["adv_std"] == pytest.approx(std.item(), rel=1e-4)


# ---- losses


def test_targets_of_hl_gauss_are_the_mass_of_a_normal_in_each_bin():
    edges = np.linspace(-0.2, 1.2, 52)
    for y in (0.0, 0.036, 0.5, 1.0):
        mass = np.diff(norm.cdf(edges, y, 0.75 * 1.4 / 51))
        assert vapo.hl_gauss(tensor(y)).tolist() == pytest.approx(list(mass / mass.sum()), abs=1e-5)
    assert vapo.hl_gauss(torch.zeros(3, 4)).shape == (3, 4, 51)


def test_a_projected_return_is_read_back_as_it_was():
    y = tensor([0.0, 0.036, 0.5, 1.0])
    p = vapo.hl_gauss(y)
    assert close(p.sum(-1), torch.ones(4), 1e-6) and close(vapo.value_of(p.log(), HL), y, 1e-4)


def test_cross_entropy_is_counted_from_its_floor_and_has_the_gradient_of_cross_entropy():
    torch.manual_seed(0)
    output, target = torch.randn(2, 5, 51, requires_grad=True), (torch.rand(2, 5) > 0.5).float()
    loss, clipped = vapo.critic_loss(output, torch.zeros(2, 5), target, HL)
    p = vapo.hl_gauss(target)
    whole = torch.nn.functional.cross_entropy(output.flatten(0, 1), p.flatten(0, 1), reduction="none").view(2, 5)
    floor = torch.special.entr(p).sum(-1)
    assert close(loss, whole - floor, 1e-5) and close(floor, torch.full((2, 5), 1.2), 1e-3) and not clipped.any()
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), output, retain_graph=True) for x in (loss, whole))
    assert close(ours, theirs, 1e-6)
    assert close(vapo.critic_loss(p.clamp(min=1e-20).log(), target, target, HL)[0], torch.zeros(2, 5), 1e-5)


def test_the_squared_error_is_the_worse_of_the_free_and_the_clipped_and_by_hand():
    output = tensor([[0.1, 0.5, 0.5, -0.3, 0.9]], requires_grad=True)
    old, target = tensor([[0.0, 0.1, 0.1, 0.0, 0.5]]), tensor([[1.0, 1.0, 0.0, 0.0, 1.0]])
    loss, clipped = vapo.critic_loss(output[..., None], old, target, MSE)
    assert loss.tolist()[0] == pytest.approx([0.405, 0.245, 0.125, 0.045, 0.045])
    assert clipped.tolist() == [[False, True, False, False, True]]
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    assert gradient.tolist()[0] == pytest.approx([-0.9, 0, 0.5, -0.3, 0])


@both
def test_the_critics_gradient_is_that_of_the_published_network(loss, watch, make_args, load, mixed, stock, monkeypatch):
    """The first minibatch of the third step of pretraining, when the head is no longer 0."""
    args = make_args(vapo, critic_loss=loss, steps=1, max_grad_norm=1e9, critic_lr=1e-2)
    fit, kept, clip, gradients = common.fit_critic, [], common.clip_gradient, []

    def fit_(critic, *rest):
        kept.append(full(critic))
        return fit(critic, *rest)

    def clip_(critic, norm):
        gradients.append({n: p.grad.full_tensor().clone() for n, p in critic.named_parameters() if p.requires_grad})
        return clip(critic, norm)

    monkeypatch.setattr(common, "fit_critic", fit_)
    monkeypatch.setattr(common, "clip_gradient", clip_)
    seen = run_watched(watch, args, monkeypatch)
    weights, ours = kept[2], gradients[2 * 2]
    batch, arm = seen.fits[2][0], load(replace(args, name="reference"))
    problems = common.next_problems(arm.pool, 2, args, arm.run)
    model = common.load_model(args.model, torch.float32)
    model.model.load_state_dict({n.removeprefix("model."): x for n, x in weights.items() if n.startswith("model.")})
    head = [weights[f"head.{n}"].requires_grad_() for n in ("weight", "bias")]
    total, loss_sum = batch.mask[:8].sum(), 0.0
    for i in range(8):
        sampled = answers(batch)[i][1]
        states = model.model(**inputs(arm, problems[i], sampled)).last_hidden_state[0, -len(sampled) - 1 : -1]
        out, right = torch.nn.functional.linear(states, *head), float(i % 2 == 0)
        if loss == "mse":
            loss_sum = loss_sum + 0.5 * (out[:, 0] - right).square().sum()
        else:
            loss_sum = loss_sum - (vapo.hl_gauss(tensor(right)) * out.log_softmax(-1)).sum()
    (loss_sum / total).backward()
    theirs = {f"model.{n}": p.grad for n, p in model.model.named_parameters() if "visual" not in n}
    assert equal(ours, theirs | {"head.weight": head[0].grad, "head.bias": head[1].grad}, 1e-3)


@both
def test_the_policys_gradient_is_the_clipped_surrogate_and_the_likelihood_of_right_answers(
    loss, watch, make_args, load, mixed, stock, monkeypatch
):
    args = make_args(vapo, critic_loss=loss, steps=1, lr=0.0, max_grad_norm=1e9, positive_coef=0.3)
    seen, arm = run_watched(watch, args, monkeypatch), load(replace(args, name="reference"))
    ours = [g for g in seen.gradients if "head.weight" not in g][0]
    stock.zero_grad()
    total = seen.batch.mask[:8].sum()
    positives = sum(seen.batch.mask[i].sum() for i in range(0, 8, 2))
    for i in range(8):
        sampled = answers(seen.batch)[i][1]
        logits = stock(**inputs(arm, seen.problems[i], sampled)).logits[0, -len(sampled) - 1 : -1]
        logits[:, banned(arm)] = -torch.inf
        logp = logits.log_softmax(-1).gather(1, tensor(sampled)[:, None])[:, 0]
        adv = seen.advs[0][i][seen.batch.mask[i] > 0]
        (-(adv * logp).sum() / total - 0.3 * (i % 2 == 0) * logp.sum() / positives).backward()
    assert equal(ours, {n: p.grad for n, p in stock.named_parameters() if n in ours}, 1e-4)


def test_without_a_right_answer_the_likelihood_term_is_0_and_not_nan(watch, make_args, monkeypatch):
    """V is 0 and so is every advantage: nothing may move, at whatever learning rate."""
    monkeypatch.setattr(common, "reward", lambda b, p: (torch.zeros(len(b.text)), ["wrong"] * len(b.text)))
    args = make_args(vapo, steps=2, lr=1e-2)
    seen = run_watched(watch, args, monkeypatch)
    base = common.load_model(args.model, torch.float32).state_dict()
    assert all(torch.equal(seen.weights[n], x) for n, x in base.items())
    assert all(row["loss"] == row["grad_norm"] == 0 for row in lines(args))


def test_one_minibatch_without_a_right_answer_learns_from_its_advantages_alone(watch, make_args, monkeypatch):
    first = lambda b, p: ((torch.arange(len(b.text)) < 4).float(), ["right"] * len(b.text))
    monkeypatch.setattr(common, "reward", first)
    seen = [run_watched(watch, make_args(vapo, steps=1, lr=0.0, positive_coef=c), monkeypatch) for c in (0.0, 0.5)]
    a, b = ([g for g in x.gradients if "head.weight" not in g] for x in seen)
    assert equal(a[1], b[1], 1e-6) and not equal(a[0], b[0], 1e-2)


def test_the_ratio_is_clipped_higher_than_lower():
    logp = tensor([[1.27, 1.29, 1.29, 0.79, 0.79]]).log().requires_grad_()
    adv = tensor([[1.0, 1.0, -1.0, -1.0, 1.0]])
    vapo.policy_loss(logp, torch.zeros(1, 5), adv, vapo.Args()).sum().backward()
    assert (logp.grad != 0).tolist() == [[True, False, True, False, True]]


# ---- value pretraining


@both
def test_both_critics_start_at_the_share_of_right_answers_among_the_stored_ones(loss, make_args, sparse, capsys):
    args = make_args(vapo, critic_loss=loss, steps=0, gates="warn")
    vapo.main(args)
    first = lines(args, "pretraining.jsonl")[0]
    assert [first[f"value_{x}"] for x in ("start", "middle", "end")] == pytest.approx([1 / 16] * 3, abs=1e-4)
    filed = {g["name"]: g for g in json.loads((folder(args) / "gates.json").read_text())["gates"]}
    assert filed["value at start"]["verdict"] == "pass" and filed["value at start"]["value"] == pytest.approx(
        1 / 16, abs=1e-4
    )
    assert filed["value at start"]["when"] == filed["critic"]["when"] == "after value pretraining"


@both
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.036, 0.5, 1.0])
def test_the_heads_bias_decodes_to_any_rate(loss, rate, make_args, monkeypatch):
    biases = []
    critic = SimpleNamespace(start_at=biases.append)
    monkeypatch.setattr(gates, "critics", lambda *_: [])
    monkeypatch.setattr(gates, "report", lambda *_: [])
    args = make_args(vapo, critic_loss=loss)
    vapo.pretrain(critic, None, rate, [], args, None)
    assert len(biases[0]) == outputs(loss)
    assert vapo.value_of(biases[0], args).item() == pytest.approx(rate, abs=1e-4)


@both
def test_a_critic_that_starts_elsewhere_fails_its_gate(loss, make_args, sparse, monkeypatch, capsys):
    monkeypatch.setattr(common.Critic, "start_at", lambda critic, bias: None)
    with pytest.raises(SystemExit, match="the gates? value at start"):
        vapo.main(make_args(vapo, critic_loss=loss, steps=1, gates="stop", instruction="stop"))
    assert "rollouts are right (paper: 3.6%); the head does not start at its bias: install" in capsys.readouterr().out


def test_a_critic_no_better_than_a_constant_stops_the_run_before_the_policy_moves(make_args, sparse, capsys):
    args = make_args(vapo, steps=1, gates="stop", critic_lr=0.0)
    with pytest.raises(SystemExit, match="the gate critic failed"):
        vapo.main(args)
    assert lines(args) == [] and "a constant 0%; 5% are wanted: raise --critic-lr or" in capsys.readouterr().out


@pytest.fixture
def pretraining(monkeypatch):
    """pretraining(explained, steps) -> how many steps value pretraining takes if its fifths explain this much."""

    def steps(explained, value_steps):
        taken = []
        rollouts = [(SimpleNamespace(mask=torch.ones(2, 3)), torch.zeros(2))] * value_steps
        monkeypatch.setattr(common, "score", lambda *_: torch.zeros(2, 3, 1))
        monkeypatch.setattr(common, "moments", lambda *_: len(taken))
        monkeypatch.setattr(common, "fit_critic", lambda *_: {})
        monkeypatch.setattr(common, "explained_variance", lambda part: explained[part[0] // max(1, value_steps // 5)])
        monkeypatch.setattr(gates, "critics", lambda *_: [])
        monkeypatch.setattr(gates, "report", lambda *_: [])
        run = SimpleNamespace(note=lambda step, **_: taken.append(step))
        vapo.pretrain(
            SimpleNamespace(start_at=lambda bias: None), None, 0.1, rollouts, replace(MSE, value_steps=value_steps), run
        )
        return len(taken)

    return steps


def test_value_pretraining_ends_where_explained_variance_stops_rising_or_at_its_last_step(pretraining):
    assert pretraining([-0.1, 0.1, 0.2, 0.3, 0.4], 50) == 50
    assert pretraining([0.1, 0.2, 0.1, 0.2, 0.4], 50) == 40
    assert pretraining([0.3, 0.1, 0.2, 0.2, 0.4], 50) == 30
    assert pretraining([0.3, 0.1, 0.4, 0.2, 0.5], 50) == 50  # one fifth may be noise
    assert pretraining([-0.1, -0.2, -0.3, -0.4, -0.5], 50) == 50  # nothing has been learnt yet
    assert pretraining([0.01, 0.005, 0.03, 0.02, 0.1], 50) == 50  # next to nothing
    assert pretraining([math.nan, 0.1, math.nan, 0.2, 0.1], 50) == 50
    assert pretraining([0.3, 0.1, 0.2, 0.1], 4) == 3 and pretraining([0.3], 1) == 1


def test_explained_variance_is_the_textbooks_and_undefined_where_all_returns_are_equal(arm):
    torch.manual_seed(0)
    mask = (torch.arange(9) < tensor([[3], [9], [1], [6]])).float()
    value, reward, real = torch.randn(4, 9), tensor([0.0, 1, 1, 0]), mask > 0
    target = reward[:, None].expand(4, 9)
    parts = [common.moments(value[i], target[i], mask[i], arm.run) for i in (slice(0, 2), slice(2, 4))]
    v, r = value[real].numpy(), target[real].numpy()
    assert common.explained_variance(parts) == pytest.approx(1 - np.var(r - v) / np.var(r), rel=1e-5)
    for same in (0.0, 1.0):
        assert math.isnan(common.explained_variance([common.moments(value, torch.full((4, 9), same), mask, arm.run)]))


@pytest.mark.parametrize("share", [0, 1])
def test_where_all_returns_are_equal_no_explained_variance_is_logged(share, make_args, monkeypatch):
    monkeypatch.setattr(
        common, "reward", lambda b, p: (torch.full((len(b.text),), float(share)), ["right"] * len(b.text))
    )
    args = make_args(vapo, steps=2, gates="stop")
    with pytest.raises(SystemExit, match="the gate critic failed"):
        vapo.main(args)
    vapo.main(args := replace(args, gates="warn", name="on"))
    assert not any("explained_variance" in row for row in lines(args) + lines(args, "pretraining.jsonl"))


@both
def test_what_is_logged_of_the_critic_is_what_it_was(loss, watch, make_args, mixed, monkeypatch):
    args = make_args(vapo, critic_loss=loss, steps=2, lr=1e-3)
    seen, rows = run_watched(watch, args, monkeypatch), None
    rows = lines(args, "pretraining.jsonl") + lines(args)
    assert len(rows) == 3 + 2
    for row, (batch, value, target) in zip(rows, seen.fits, strict=True):
        n, real = batch.mask.sum(1).int(), batch.mask > 0
        r, v = target[real].double(), value[real].double()
        assert row["explained_variance"] == pytest.approx((1 - (r - v).var() / r.var()).item(), abs=1e-4)
        assert row["value_error"] == pytest.approx((r - v).square().mean().item(), rel=1e-4)
        for name, at in (("start", 0 * n), ("middle", n // 2), ("end", n - 1)):
            assert row[f"value_{name}"] == pytest.approx(value[range(16), at.tolist()].mean().item(), abs=1e-6)
        total, returns, count = zip(*row["calibration"], strict=True)
        assert sum(count) == real.sum() and sum(total) == pytest.approx(v.sum().item(), abs=0.01)
        assert sum(returns) == pytest.approx(r.sum().item(), abs=0.01)
        for k, (low, high) in enumerate(zip([-9, *common.CALIBRATION], [*common.CALIBRATION, 9], strict=True)):
            assert count[k] == ((v > low) & (v <= high)).sum()
        assert (row["value_clipped"] == 0) or loss == "mse"
        assert row["critic_loss"] > 0 and row["critic_grad_norm"] > 0


def test_the_share_of_clipped_values_is_logged(make_args, mixed):
    shares = []
    for clip in (1e-4, 10.0):
        vapo.main(args := make_args(vapo, steps=1, critic_lr=1e-2, value_clip=clip))
        shares.append(lines(args)[0]["value_clipped"])
    assert shares[0] > 0.05 and shares[1] == 0


# ---- the stored rollouts


def stored(args):
    """The folder of stored rollouts below args.runs, of which there is one."""
    (place,) = Path(args.runs).glob("rollouts-*")
    return place


@pytest.fixture
def drawn_keys(monkeypatch):
    """The keys of the batches that were sampled for the store since."""
    keys, begin = [], common.Run.begin
    monkeypatch.setattr(common.Run, "begin", lambda run, *key: keys.append(key) or begin(run, *key))
    return lambda: [key[1] for key in keys if key[0] == "stored rollouts"]


def test_a_replayed_batch_is_the_one_that_was_sampled(load, make_args, monkeypatch):
    it = load(make_args(vapo, max_new_tokens=9))
    sample, batches = common.sample, []
    monkeypatch.setattr(common, "sample", lambda *x, **k: batches.append(sample(*x, **k)) or batches[-1])
    _, rollouts = common.stored_rollouts(it.policy, it.processor, it.pool, it.args, it.run)
    assert len(list(rollouts)) == 3 and len(batches) == 6
    for a, b in zip(batches[:3], batches[3:], strict=True):
        for key in ("ids", "attention", "positions", "forced", "mask", "finished", "image"):
            assert torch.equal(vars(a)[key], vars(b)[key]), key
        assert a.text == b.text and not a.finished.all()
        assert all(torch.equal(x, y) for x, y in zip(a.pixels + a.grid, b.pixels + b.grid, strict=True))


def test_both_arms_learn_from_one_file_in_one_order(make_args, mixed, drawn_keys, watch, monkeypatch):
    args = make_args(vapo, steps=1, name="vapo")
    one = run_watched(watch, args, monkeypatch)
    assert drawn_keys() == [0, 1, 2]
    files = {p.name: p.read_bytes() for p in stored(args).iterdir()}
    other = run_watched(
        watch, replace(args, name="vapohl", critic_loss="hlgauss", critic_lr=1e-4, lr=1e-3), monkeypatch
    )
    assert drawn_keys() == [0, 1, 2] and files == {p.name: p.read_bytes() for p in stored(args).iterdir()}
    assert set(files) == {"settings.json", "000000.jsonl", "000001.jsonl", "000002.jsonl"}
    for (a, _, r), (b, _, s) in zip(one.fits[:3], other.fits[:3], strict=True):
        assert torch.equal(a.ids, b.ids) and close(r, s, 1e-6)


def test_rollouts_of_another_pool_model_seed_or_sampling_are_never_used(make_args, mixed, drawn_keys, world, teacher):
    args = make_args(vapo, steps=0, value_steps=1)
    vapo.main(args)
    pool = world / "other.jsonl"
    pool.write_text("".join(reversed((world / "train.jsonl").read_text().splitlines(keepends=True))))
    changes = [dict(pool=str(pool)), dict(model=teacher), dict(seed=1), dict(temperature=0.9), dict(max_new_tokens=7),
               dict(group=2), dict(problems=2), dict(instruction="Add."), dict(max_pixels=28 * 28 * 4)]  # fmt: skip
    for k, change in enumerate(changes, 1):
        if "model" in change:
            common.Processor(args.model, args).images.save_pretrained(teacher)
        vapo.main(replace(args, name=f"n{k}", minibatches=1, **change))
        assert drawn_keys() == [0] * (k + 1), change
    assert len(list(Path(args.runs).glob("rollouts-*"))) == len(changes) + 1
    vapo.main(replace(args, name="same", critic_loss="hlgauss", lr=1.0, critic_lr=1.0, minibatches=1, micro_batch=2))
    assert len(drawn_keys()) == len(changes) + 1


def test_the_same_path_with_other_weights_is_another_model(make_args, mixed, drawn_keys, tmp_path, teacher):
    import shutil

    args = make_args(vapo, steps=0, value_steps=1, model=str(tmp_path / "model"))
    shutil.copytree(make_args().model, args.model)
    vapo.main(args)
    shutil.copy(Path(teacher) / "model.safetensors", args.model)
    vapo.main(replace(args, name="second"))
    assert drawn_keys() == [0, 0]


def test_missing_steps_are_sampled_and_half_written_ones_ignored(make_args, mixed, drawn_keys):
    args = make_args(vapo, steps=0, value_steps=4)
    vapo.main(args)
    before = {p.name: p.read_bytes() for p in stored(args).iterdir()}
    (stored(args) / "000001.jsonl").unlink()
    (stored(args) / "000001.jsonl.new").write_text('{"id": "tr')
    (stored(args) / "000003.jsonl").rename(stored(args) / "vapo-s0")  # written, but killed before it got its name
    vapo.main(again := replace(args, name="again"))
    assert drawn_keys() == [0, 1, 2, 3, 1, 3]
    (stored(args) / "000001.jsonl.new").unlink(), (stored(args) / "vapo-s0").unlink()
    assert before == {p.name: p.read_bytes() for p in stored(args).iterdir()}
    assert lines(args, "pretraining.jsonl") == lines(again, "pretraining.jsonl")


# ---- whole runs


def test_vapo_and_vapohl_differ_in_their_names_and_one_field():
    text = (ROOT / "README.md").read_text() + (ROOT / "Makefile").read_text()
    found = set(re.findall(r"vapo\.py (--name \w+ --critic-loss \w+)", text))
    assert len(found) == 2
    one, other = (asdict(common.parse(vapo.Args, command.split())) for command in found)
    assert {k: (one[k], other[k]) for k in one if one[k] != other[k]}.keys() == {"name", "critic_loss"}
    assert {one["name"]: one["critic_loss"], other["name"]: other["critic_loss"]} == dict(vapo="mse", vapohl="hlgauss")


@both
def test_the_first_steps_are_finite_in_bf16_and_v_starts_exactly(loss, make_args, sparse, monkeypatch):
    init = common.Run.__init__

    def bf16(run, args):
        init(run, args)
        run.dtype = torch.bfloat16

    monkeypatch.setattr(common.Run, "__init__", bf16)
    heads, forward = [], torch.nn.Linear.forward

    def seen(head, x):
        if head.out_features == outputs(loss):
            heads.append((x.dtype, head.weight.dtype))
        return forward(head, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", seen)
    args = make_args(vapo, critic_loss=loss, steps=2, lr=1e-4, checkpointing=1)
    vapo.main(args)
    rows = lines(args, "pretraining.jsonl") + lines(args)
    assert rows[0]["value_start"] == pytest.approx(1 / 16, abs=1e-4)
    assert set(heads) == {(torch.float32, torch.float32)}
    assert all(math.isfinite(x) for row in rows for x in row.values() if not isinstance(x, list))
    assert all(
        x.dtype == torch.float32 and x.isfinite().all() for x in load_file(folder(args) / "critic.safetensors").values()
    )


def test_another_loss_is_refused(make_args, capsys):
    with pytest.raises(SystemExit, match="--critic-loss hl is none of mse and hlgauss"):
        vapo.main(make_args(vapo, critic_loss="hl"))
    with pytest.raises(SystemExit):
        common.parse(vapo.Args, ["--critic-loss", "hl"])
    assert "argument --critic-loss: invalid choice: 'hl'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--value-steps 0 has to be above 0"):
        vapo.main(make_args(vapo, value_steps=0))


def left(args):
    """What a run has left that may depend on how often it was killed: nothing."""
    names = ("critic.safetensors", "checkpoint/model.safetensors", "outputs.jsonl", "rollouts.jsonl", "gates.json")
    files = [(folder(args) / name).read_bytes() for name in names]
    return files + [lines(args), lines(args, "pretraining.jsonl")]


@pytest.mark.parametrize(
    "stage, count, loss",
    [("stored rollouts", 2, "mse"), ("note", 2, "mse"), ("step", 0, "mse"), ("step", 1, "hlgauss"), ("step", 3, "mse")],
)
def test_a_run_killed_anywhere_ends_as_if_nothing_had_happened(
    loss, stage, count, make_args, mixed, monkeypatch, drawn_keys
):
    args = make_args(
        vapo, critic_loss=loss, steps=4, lr=1e-3, save_every=3, gates="warn", max_new_tokens=8, eval_every=2
    )
    vapo.main(whole := replace(args, name="whole"))
    for place in Path(args.runs).glob("rollouts-*/*"):
        place.unlink()
    begin, note = common.Run.begin, common.Run.note

    def begin_(run, *key):
        if key == ((stage, count) if stage != "step" else (count,)):
            raise KeyboardInterrupt
        begin(run, *key)

    def note_(run, step, **values):
        if stage == "note" and step == count:
            raise KeyboardInterrupt
        note(run, step, **values)

    with monkeypatch.context() as m:
        m.setattr(common.Run, "begin", begin_)
        m.setattr(common.Run, "note", note_)
        with pytest.raises(KeyboardInterrupt):
            vapo.main(args)
    before = len(drawn_keys())
    vapo.main(args)
    assert left(args) == left(whole)
    assert len(drawn_keys()) - before == (1 if stage == "stored rollouts" else 0)
    assert not (folder(args) / "state").exists()


def test_value_pretraining_that_is_over_is_not_done_again(make_args, mixed, monkeypatch):
    args = make_args(vapo, steps=2, save_every=100)
    with monkeypatch.context() as m:
        m.setattr(common, "next_problems", None)
        m.setattr(common, "stored_rollouts", lambda *_: (0.5, []))
        m.setattr(gates, "critics", lambda *_: [])
        with pytest.raises(TypeError):
            vapo.main(args)
    assert [p.name for p in (folder(args) / "state").iterdir()] == ["000000"]
    monkeypatch.setattr(common, "stored_rollouts", None)
    vapo.main(args)
    assert len(lines(args)) == 2
