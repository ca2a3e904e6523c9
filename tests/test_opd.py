"""The teacher: who is taught and how much, which way the advantage points, and what the teacher saw to say so."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import answers, build_model, build_tokenizer, close, equal, stock_logps
from torch import tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

import common
import grpo
import opd
from data import gates


@pytest.fixture(scope="module")
def arm(load, make_args, teacher):
    """A student, another teacher, and one rollout batch. Never changed by a test."""
    arm = load(make_args(opd, mix="pure", teacher=teacher))
    arm.teacher = common.load_frozen(teacher, arm.processor, arm.run)
    arm.problems = common.next_problems(arm.pool, 0, arm.args, arm.run)
    torch.manual_seed(0)
    arm.batch = common.sample(arm.policy, arm.processor, arm.problems, arm.args, arm.run)
    arm.old_logp = common.score(arm.policy, arm.batch, arm.args)
    arm.gap = common.teacher_gap(arm.teacher, arm.old_logp, arm.batch, arm.args)
    return arm


@pytest.fixture(scope="module")
def master(teacher):
    return Qwen2VLForConditionalGeneration.from_pretrained(teacher).eval()


def own_gaps(arm, stock, master, problems, batch, rows):
    """log p_T - log p_S of the sampled tokens of these rows, by two stock forwards, with the student's log-probs."""
    for i in rows:
        forced, sampled = answers(batch)[i]
        ours, theirs = (stock_logps(m, arm, problems[i], forced, sampled)[len(forced) :] for m in (stock, master))
        yield ours, (theirs - ours).detach()


# ---- how much


def test_the_teachers_weight_is_as_computed_by_hand():
    reward = tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    args = opd.Args(group=4, steps=300, kl_coef=0.5, kl_until=0.6)
    weight = lambda step=0, **x: opd.teacher_weight(reward, step, replace(args, **x)).tolist()
    assert weight(mix="pure") == weight(299, mix="pure") == [0.5] * 12
    for step, expected in (0, 0.5), (45, 0.375), (90, 0.25), (179, 0.5 / 180), (180, 0), (181, 0), (299, 0):
        assert weight(step, mix="annealed") == pytest.approx([expected] * 12, abs=1e-7)
    assert not any(weight(180, mix="annealed")) and all(weight(179, mix="annealed"))
    for step in 0, 299:  # it persists
        assert weight(step, mix="gated") == [0, 0.5, 0.5, 0.5] + [0.5] * 4 + [0] * 4
        assert weight(step, mix="gated", gate="group") == [0] * 4 + [0.5] * 4 + [0] * 4


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("mix", ["pure", "annealed", "gated"])
def test_each_mix_adds_its_share_of_the_gap_to_the_rows_it_teaches(mix, watch, make_args, teacher, stock, master, load):
    args = make_args(opd, mix=mix, teacher=teacher, steps=4, lr=0.0, kl_coef=0.3, kl_until=0.5)
    seen, arm = watch(opd, args), load(replace(args, name="reference"))
    reward = (torch.arange(16) % 2 == 0).float()
    for step in 0, 1, 3:
        problems, batch = seen.batches[step]
        ours = 0 if mix == "pure" else grpo.group_advantage(reward, args)[:, None] * batch.mask
        rest = seen.advs[step] - ours
        share = {"pure": [1, 1, 1, 1], "annealed": [1, 0.5, 0, 0], "gated": [1, 1, 1, 1]}[mix][step]
        for i, (_, gap) in zip((0, 1, 6), own_gaps(arm, stock, master, problems, batch, (0, 1, 6)), strict=True):
            taught = share * (mix != "gated" or reward[i] == 0)
            assert close(rest[i][batch.mask[i] > 0], 0.3 * taught * gap.clamp(-10, 5), 1e-4)
            assert taught or torch.equal(seen.advs[step][i], ours[i])  # exactly 0
        assert not (seen.advs[step] * (1 - batch.mask)).any() and not seen.advs[step].requires_grad


# ---- which way


def tiny_step(student, master, tokens, weights):
    """The gradient of opd's loss on a one-token world, as the arm computes it from its log-probs."""
    logits = student.clone().requires_grad_()
    logp = logits.log_softmax(-1)[tokens]
    gap = (master.log_softmax(-1)[tokens] - logp).detach()
    (opd.policy_loss(logp, logp.detach(), gap, opd.Args()) * weights).sum().backward()
    return logits.grad


def reverse_kl(student, master):
    p = student.log_softmax(-1)
    return (p.exp() * (p - master.log_softmax(-1))).sum()


def test_one_step_moves_a_small_student_towards_its_teacher():
    student, master = tensor([0.5, 0.0, -1.0]), tensor([-1.0, 1.0, 0.0])
    tokens = torch.multinomial(student.softmax(-1), 4000, True, generator=torch.Generator().manual_seed(0))
    moved = student - 0.5 * tiny_step(student, master, tokens, 1 / len(tokens))
    assert reverse_kl(moved, master) < 0.7 * reverse_kl(student, master)
    before, after, goal = (x.softmax(-1) for x in (student, moved, master))
    assert ((after - goal).abs() < (before - goal).abs()).all()


def test_the_expected_gradient_is_exactly_that_of_the_reverse_kl():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        student, master = torch.randn(2, 7, generator=draw)
        ours = tiny_step(student, master, torch.arange(7), student.softmax(-1))
        (exact,) = torch.autograd.grad(reverse_kl(x := student.clone().requires_grad_(), master), x)
        assert close(ours, exact, 1e-6) and exact.abs().max() > 1e-2


def test_the_gradient_of_a_run_is_that_of_the_published_models(watch, make_args, load, teacher, stock, master):
    args = make_args(opd, mix="pure", teacher=teacher, steps=1, lr=0.0, temperature=0.8, max_grad_norm=1e9)
    seen, arm = watch(opd, args), load(replace(args, name="reference"))
    stock.zero_grad()
    total = seen.batch.mask[:8].sum()
    for ours, gap in own_gaps(arm, stock, master, seen.problems, seen.batch, range(8)):
        (-(gap.clamp(-10, 5) * ours).sum() / total).backward()
    assert equal(seen.gradients[0], {n: p.grad for n, p in stock.named_parameters() if n in seen.gradients[0]}, 1e-4)


@pytest.mark.parametrize("mix", ["pure", "annealed", "gated"])
def test_a_step_of_a_run_moves_the_student_towards_its_teacher(mix, watch, make_args, load, teacher, stock, master):
    """Rewards are all 0: what the teacher likes better must become likelier, and the rest less so."""
    args = make_args(opd, mix=mix, teacher=teacher, steps=1, lr=1e-4, minibatches=1)
    seen, arm = watch(opd, args), load(replace(args, name="reference"))
    after, gains = common.score(seen.policy, seen.batch, args), []
    gaps = own_gaps(arm, stock, master, seen.problems, seen.batch, range(16))
    for i, (before, gap) in enumerate(gaps):
        gains.append((gap * (after[i][seen.batch.mask[i] > 0] - before.detach())).sum().item())
    assert sum(gains) > 0.1 and sum(x > 0 for x in gains) > 12


# ---- the gap


def test_the_gap_is_that_of_the_published_models_on_sampled_tokens_and_0_elsewhere(arm, stock, master):
    rows = range(0, 16, 3)
    for i, (_, gap) in zip(rows, own_gaps(arm, stock, master, arm.problems, arm.batch, rows), strict=True):
        assert close(arm.gap[i][arm.batch.mask[i] > 0], gap, 1e-4)
    assert not (arm.gap * (1 - arm.batch.mask)).any() and not arm.gap.requires_grad and arm.gap.abs().max() > 0.1


def test_another_sampled_token_has_another_gap(arm):
    T = arm.batch.mask.shape[1]
    ids = arm.batch.ids.clone()
    ids[:, -T] = (ids[:, -T] + 1 - 40) % 200 + 40
    other = replace(arm.batch, ids=ids)
    gap = common.teacher_gap(arm.teacher, common.score(arm.policy, other, arm.args), other, arm.args)
    assert ((gap - arm.gap)[:, 0].abs() > 1e-4).all()


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_tokens_that_the_teacher_did_not_score_get_no_advantage(arm, missing, monkeypatch):
    scores = common.score(arm.teacher, arm.batch, arm.args)
    scores[3], scores[5, 1] = missing, missing
    monkeypatch.setattr(common, "score", lambda *_: scores)
    gap = common.teacher_gap(arm.teacher, arm.old_logp, arm.batch, arm.args)
    assert not gap[3].any() and gap[5, 1] == 0
    gap[3], gap[5, 1] = arm.gap[3], arm.gap[5, 1]
    assert torch.equal(gap, arm.gap)


@pytest.mark.usefixtures("mixed")
def test_outliers_are_clamped_and_what_is_logged_is_what_was_added(watch, make_args, monkeypatch):
    def teacher_gap(teacher, old_logp, batch, args):
        gap = 0.5 * batch.mask
        gap[0], gap[1] = -30 * batch.mask[0], 20 * batch.mask[1]
        return gap

    monkeypatch.setattr(common, "teacher_gap", teacher_gap)
    args = make_args(opd, mix="gated", steps=1, kl_coef=0.1)
    seen = watch(opd, args)
    n, row = seen.batch.mask.sum(1), seen.metrics[0]
    right = torch.arange(16) % 2 == 0
    a = 0.5 / math.sqrt(4 * 0.25 / 3)
    assert close(seen.advs[0][1], (0.1 * 5 - a) * seen.batch.mask[1], 1e-5)
    assert close(seen.advs[0][0], a * seen.batch.mask[0], 1e-5) and close(
        seen.advs[0][3], (0.05 - a) * seen.batch.mask[3]
    )
    assert row["clamped"] == pytest.approx(((n[0] + n[1]) / n.sum()).item())
    assert row["teacher_kl"] == pytest.approx(
        (30 * n[0] - 20 * n[1] - 0.5 * n[2:].sum()).item() / n.sum().item(), rel=1e-5
    )
    taught = 0.25 * n[1] + 0.0025 * (n[~right].sum() - n[1])
    assert row["rms_teacher"] == pytest.approx((taught / n.sum()).sqrt().item(), rel=1e-4)
    assert row["rms_reward"] == pytest.approx(a, rel=1e-4)
    seen = watch(opd, replace(args, mix="pure", name="pure"))
    assert close(seen.advs[0][0], -1.0 * seen.batch.mask[0]) and seen.metrics[0]["rms_reward"] == 0


# ---- the teacher


def test_the_teacher_sees_the_image_of_every_row(arm):
    seen = common.score(arm.teacher, arm.batch, arm.args)
    for k in range(len(arm.batch.pixels)):
        pixels = [torch.zeros_like(x) if i == k else x for i, x in enumerate(arm.batch.pixels)]
        blind = common.score(arm.teacher, replace(arm.batch, pixels=pixels), arm.args)
        changed = ((blind - seen).abs() > 1e-4).any(1)
        assert changed.tolist() == (arm.batch.image == k).tolist()


def test_a_teacher_with_a_wider_padded_vocabulary_gives_the_same_scores(arm, teacher, tmp_path):
    model = common.load_model(teacher, torch.float32)
    rows = model.config.text_config.vocab_size
    model.resize_token_embeddings(rows + 40, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[rows:] = 3 * torch.randn(40, 64)
    model.save_pretrained(tmp_path)
    arm.processor.tokenizer.save_pretrained(tmp_path)
    wide = common.load_frozen(tmp_path, arm.processor, arm.run)
    assert wide.model.lm_head.weight.shape[0] == rows + 40
    a, b = (common.score(x, arm.batch, arm.args) for x in (wide, arm.teacher))
    assert close(a, b, 1e-5)


@pytest.mark.parametrize("change", ["one more", "two swapped"])
def test_another_tokenizer_is_refused_and_the_first_difference_named(arm, tmp_path, change):
    tokenizer = build_tokenizer()
    if change == "one more":
        tokenizer.add_tokens(["<odd>"])
        words = ["another tokenizer", "<odd>"]
    tokenizer.save_pretrained(tmp_path)
    if change == "two swapped":
        path = tmp_path / "tokenizer.json"
        data = json.loads(path.read_text())
        vocab = data["model"]["vocab"]
        a, b = sorted(vocab, key=vocab.get)[100:102]
        vocab[a], vocab[b] = vocab[b], vocab[a]
        path.write_text(json.dumps(data))
        words = ["another tokenizer", repr((b, vocab[b])), repr((a, vocab[b]))]
    build_model(tokenizer).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        common.load_frozen(tmp_path, arm.processor, arm.run)
    assert all(word in str(stop.value) for word in words), stop.value


def test_the_teacher_never_changes_and_is_never_in_training_mode(watch, make_args, teacher, monkeypatch):
    load, kept = common.load_frozen, []
    monkeypatch.setattr(common, "load_frozen", lambda *x: kept.append(load(*x)) or kept[-1])
    seen = watch(opd, make_args(opd, mix="pure", teacher=teacher, steps=2, lr=1e-2))
    after, before = kept[0].model.state_dict(), common.load_model(teacher, torch.float32).state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert not any(m.training for m in kept[0].modules()) and not any(p.requires_grad for p in kept[0].parameters())
    assert seen.gradients[0] and any(g.any() for g in seen.gradients[0].values())


def test_the_gates_pass_on_the_tiny_world_and_fail_for_a_blind_teacher(arm, teacher, monkeypatch):
    other = common.load_frozen(teacher, arm.processor, arm.run)
    sets = common.load_sets(arm.args)
    check = lambda: {
        g["name"]: (g["verdict"], g["value"], g["text"])
        for g in gates.teachers(other, arm.policy, arm.processor, arm.pool, sets, arm.args, arm.run)
    }
    good = check()
    assert [verdict for verdict, *_ in good.values()] == ["pass"] * 3 and good["teacher's eyes"][1] == 1
    assert good["self-teaching"][1] == 0
    with torch.no_grad():  # every patch now looks the same
        for p in other.model.model.visual.merger.parameters():
            p.zero_()
    *found, text = check()["teacher's eyes"]
    assert found == ["fail", 0] and "0% of its scores change with the image; least that of row train" in text
    gap = common.teacher_gap
    monkeypatch.setattr(common, "teacher_gap", lambda *x: gap(*x) + 0.01)
    verdict, _, text = check()["self-teaching"]
    assert verdict == "fail" and "advantage of 1.0e-02 nats; teacher and student are not scored alike" in text


def test_a_teacher_of_the_same_weights_has_no_gap_at_all(arm, world):
    itself = common.load_frozen(world / "student", arm.processor, arm.run)
    assert not common.teacher_gap(itself, arm.old_logp, arm.batch, arm.args).any()
    assert isinstance(arm.processor.tokenizer, PreTrainedTokenizerFast)


def test_a_mix_or_gate_that_does_not_exist_is_refused(make_args, capsys):
    for word in ("mix", "gate"):
        with pytest.raises(SystemExit, match=f"--{word} x is none of"):
            opd.main(make_args(opd, steps=1, **{word: "x"}))
    for word, choices in dict(mix="'pure', 'annealed', 'gated'", gate="'rollout', 'group'").items():
        with pytest.raises(SystemExit):
            common.parse(opd.Args, [f"--{word}", "x"])
        said = capsys.readouterr().err.replace("pure, annealed, gated", choices).replace("rollout, group", choices)
        assert f"argument --{word}: invalid choice: 'x' (choose from {choices})" in said
