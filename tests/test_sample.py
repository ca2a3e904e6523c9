"""The sampler and the log-probs, against the published model code one answer at a time: nearly every silent bug of RL
on images is a disagreement between them (masks, shifts, positions, padding, pictures, temperatures)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, answers, banned, close, gather, inputs, stock_logps
from scipy.stats import chisquare

import common
import grpo

STOCK = dict(do_sample=False, top_k=0, top_p=1.0, temperature=1.0, repetition_penalty=1.0, return_dict_in_generate=True)


def draw(arm, problems=None, seed=0, **options):
    torch.manual_seed(seed)
    return common.sample(arm.policy, arm.processor, problems or arm.problems, arm.args, arm.run, **options)


BUCKET, MAKE, SPAN = common.bucket, common.Decoder.__init__, common.Decoder.span


def like_a_cpu(patch):
    patch.setattr(common, "bucket", BUCKET)
    patch.setattr(common.Decoder, "__init__", MAKE)
    patch.setattr(common.Decoder, "span", SPAN)


def like_a_gpu(patch):
    """Rows and columns in few shapes, as for graphs on a GPU, but so small that an answer crosses several of them."""
    patch.setattr(common, "bucket", lambda n, device: next(x for x in (4, 12, 20, 32, 48, 64, 4000) if x >= n))
    patch.setattr(common.Decoder, "span", lambda self, slots: min(-(-slots // 8) * 8, self.columns))


def by_blocks(q, keys, values, block_mask, kernel_options):
    """flex attention as it is once compiled. As it stands, the library reads every block."""
    row, at = torch.arange(len(q))[:, None], torch.arange(keys.shape[2])
    read = block_mask.to_dense()[:, 0, 0].repeat_interleave(128, 1) > 0  # (1, columns): all rows read the same
    seen = block_mask.mask_mod(row, 0, 0, at) & read
    return F.scaled_dot_product_attention(q, keys, values, seen[:, None, None])


def like_a_large_model(patch):
    """With the attention that is compiled for a large model."""
    like_a_gpu(patch)
    patch.setattr(common, "flex_attention", by_blocks)
    patch.setattr(common.Decoder, "__init__", lambda self, *a: MAKE(self, *a) or setattr(self, "large", True))
    patch.setattr(common.Decoder, "span", lambda self, slots: self.columns)


@pytest.fixture(scope="module", params=["exact shapes", "shapes like a GPU's", "attention of a large model"])
def arm(load, request):
    """Ten problems with images of all sizes, four answers each. Never changed by a test."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "shapes like a GPU's":
            like_a_gpu(patch)
        if request.param == "attention of a large model":
            like_a_large_model(patch)
        made = ten_problems(load)
        made.bound = 1e-5 if request.param == "exact shapes" else 2e-5  # wider buffers sum in another order
        yield made


def ten_problems(load):
    arm = load(problems=10, max_new_tokens=28)
    arm.problems = [row for row in arm.pool[:10] for _ in range(arm.args.group)]
    assert len({p.grid.prod().item() for p in map(arm.processor.encode, arm.pool[:10])}) == 5
    return arm


@pytest.fixture(scope="module")
def batch(arm):
    return draw(arm)


@pytest.fixture(scope="module")
def prefix(arm):
    """Forced beginnings of 0, 3, 6, ... tokens, one for each problem."""
    text = "I see a number, it could be this one"
    ids = arm.processor.tokenizer(text).input_ids
    return [ids[: 3 * (i // arm.args.group)] for i in range(len(arm.problems))]


@pytest.fixture(scope="module")
def hinted(arm, prefix):
    return draw(arm, prefix=prefix)


# ---- masks


def test_a_row_is_prompt_then_forced_then_sampled_tokens_with_padding_at_both_ends_only(arm, prefix, hinted):
    for i, (forced, sampled) in enumerate(answers(hinted)):
        assert forced == prefix[i] and sampled
        real = hinted.ids[i][hinted.attention[i].bool()].tolist()
        assert real == arm.processor.encode(arm.problems[i]).ids + forced + sampled
        inside = hinted.attention[i].nonzero()[:, 0]
        assert len(inside) == inside[-1] - inside[0] + 1


def test_forced_and_sampled_tokens_never_overlap_and_only_sampled_ones_are_counted(arm, prefix, hinted):
    assert not (hinted.mask * hinted.forced).any()
    assert hinted.forced.sum(1).tolist() == [len(x) for x in prefix]
    stats = common.rollout_stats(hinted, torch.zeros(len(prefix)), ["wrong"] * len(prefix), arm.args)
    assert stats["tokens"] == hinted.mask.sum() == sum(len(sampled) for _, sampled in answers(hinted))


def test_the_text_that_is_graded_is_the_sampled_part_alone(arm, prefix, hinted):
    read = lambda ids: arm.processor.tokenizer.decode(ids, skip_special_tokens=True)
    assert hinted.text == [read(sampled) for _, sampled in answers(hinted)]
    assert hinted.hint == [read(x) for x in prefix]


def test_all_answers_to_a_problem_share_prompt_and_prefix_to_the_id(arm, hinted):
    T, G = hinted.mask.shape[1], arm.args.group
    start = torch.cat([hinted.ids[:, :-T], hinted.ids[:, -T:] * hinted.forced.long()], 1)
    start = start.view(-1, G, start.shape[1])
    assert (start == start[:, :1]).all()
    assert any(len(set(hinted.text[i : i + G])) == G for i in range(0, len(hinted.text), G))


def test_an_answer_ends_with_the_first_of_either_end_token_which_counts_as_sampled(arm, batch):
    ends, used = arm.processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]), set()
    for (_, sampled), finished in zip(answers(batch), batch.finished, strict=True):
        assert not set(sampled[:-1]) & set(ends)
        assert (sampled[-1] in ends) == finished
        assert finished or len(sampled) == arm.args.max_new_tokens
        used |= set(sampled) & set(ends)
    assert used == set(ends) and 0 < batch.finished.sum() < len(batch.finished)


def test_an_answer_that_the_limit_cut_is_unfinished_and_its_reward_is_zero_whatever_it_says(arm, batch):
    problem = dict(arm.pool[0], answer="7", kind="free", choices=[])
    two = replace(batch, text=["<answer>7</answer>"] * 2, finished=torch.tensor([True, False]))
    reward, grades = common.reward(two, [problem] * 2)
    assert reward.tolist() == [1, 0] and grades == ["right", "unparsed"]


def test_ids_after_the_end_token_change_neither_log_probs_nor_loss(arm, batch):
    T = batch.mask.shape[1]
    after = torch.cat([torch.zeros_like(batch.ids[:, :-T]), (batch.mask == 0).long()], 1).bool()
    other = replace(batch, ids=batch.ids.masked_fill(after, 77))
    a, b = (common.score(arm.policy, x, arm.args) for x in (batch, other))
    assert after.any() and torch.equal(a, b) and not (a * (1 - batch.mask)).any()
    adv = torch.randn(len(a), 1) * batch.mask
    loss = [(grpo.policy_loss(x, batch.logp, adv, arm.args) * batch.mask).sum() for x in (a, b)]
    assert loss[0] == loss[1] != 0


def test_answers_of_an_earlier_call_make_its_batch_again_without_running_the_model(arm, prefix, hinted, monkeypatch):
    monkeypatch.setattr(common, "embed", None)
    again = draw(arm, prefix=prefix, answers=[sampled for _, sampled in answers(hinted)])
    assert not again.logp.any() and again.text == hinted.text and again.hint == hinted.hint
    for name in ("ids", "attention", "positions", "forced", "mask", "finished", "image"):
        assert torch.equal(vars(again)[name], vars(hinted)[name]), name


# ---- log-probs


def test_sampler_and_training_forward_and_the_published_forward_give_the_same_log_probs(arm, stock, batch):
    mine = common.score(arm.policy, batch, arm.args)
    assert close(mine, batch.logp, arm.bound)
    for i, (forced, sampled) in enumerate(answers(batch)):
        assert close(mine[i][batch.mask[i] > 0], stock_logps(stock, arm, arm.problems[i], forced, sampled))


def test_so_they_do_with_forced_beginnings_of_different_lengths_which_have_log_probs_too(arm, stock, hinted):
    mine = common.score(arm.policy, hinted, arm.args)
    assert close(mine * hinted.mask, hinted.logp)
    for i, (forced, sampled) in enumerate(answers(hinted)):
        real = hinted.mask[i] + hinted.forced[i] > 0
        assert close(mine[i][real], stock_logps(stock, arm, arm.problems[i], forced, sampled))


def test_at_temperature_0_7_sampler_and_training_agree_and_differ_from_temperature_1(arm):
    cold = replace(arm.args, temperature=0.7)
    torch.manual_seed(0)
    batch = common.sample(arm.policy, arm.processor, arm.problems, cold, arm.run)
    assert close(common.score(arm.policy, batch, cold), batch.logp, arm.bound / cold.temperature)
    assert not close(common.score(arm.policy, batch, arm.args), batch.logp, 0.1)
    assert batch.mask.sum() > 100


def test_the_published_generate_led_along_the_sampled_tokens_gives_the_samplers_log_probs(arm, stock, batch):
    for i in range(0, len(arm.problems), 5):
        x, (_, sampled) = inputs(arm, arm.problems[i]), answers(batch)[i]
        n = x["input_ids"].shape[1]
        x["prefix_allowed_tokens_fn"] = lambda _, ids, n=n, sampled=sampled: [sampled[len(ids) - n]]
        out = stock.generate(**x, **STOCK, max_new_tokens=len(sampled), output_logits=True)
        assert out.sequences[0, n:].tolist() == sampled
        told = gather(arm, torch.cat(out.logits), sampled)
        assert close(told, batch.logp[i][batch.mask[i] > 0], 2e-5)  # logits of tens: fp32 itself is no finer


def test_on_the_trained_toy_they_agree_to_one_in_a_hundred_thousand(make_args, load):
    toy = common.parse(grpo.Args, ["--toy", "--runs", make_args().runs])
    arm = load(replace(toy, model=str(ROOT / toy.model), pool=str(ROOT / toy.pool)))
    model = arm.policy.sampler
    batch = draw(arm, [row for row in arm.pool[:16:2] for _ in range(arm.args.group)])
    for i in range(0, 64, 5):
        x, (_, sampled) = inputs(arm, arm.pool[i // 8 * 2]), answers(batch)[i]
        n = x["input_ids"].shape[1]
        x["prefix_allowed_tokens_fn"] = lambda _, ids, n=n, sampled=sampled: [sampled[len(ids) - n]]
        out = model.generate(**x, **STOCK, max_new_tokens=len(sampled), output_logits=True)
        assert close(gather(arm, torch.cat(out.logits), sampled), batch.logp[i][batch.mask[i] > 0], 1e-5)


def test_greedy_answers_are_those_of_the_published_generate_on_images_of_all_sizes_after_another_batch(arm, stock):
    draw(arm, arm.problems[:8])  # another batch size must leave nothing behind
    single = replace(arm.args, group=1)
    batch = common.sample(arm.policy, arm.processor, arm.pool[:10], single, arm.run, greedy=True)
    for i, (_, sampled) in enumerate(answers(batch)):
        out = stock.generate(**inputs(arm, arm.pool[i]), **STOCK, max_new_tokens=single.max_new_tokens,
                             output_scores=True, suppress_tokens=banned(arm), eos_token_id=arm.policy.eos)  # fmt: skip
        assert out.sequences[0, -len(sampled) :].tolist() == sampled
        logp = stock.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)[0]
        assert close(logp, batch.logp[i][batch.mask[i] > 0])


def test_positions_are_those_of_the_published_rope_index(arm, stock, hinted):
    for i, (forced, sampled) in enumerate(answers(hinted)):
        x = inputs(arm, arm.problems[i], forced + sampled)
        keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        places, _ = stock.model.get_rope_index(**{k: x[k] for k in keys})
        assert torch.equal(hinted.positions[:, i, hinted.attention[i].bool()], places[:, 0])


def test_log_probs_of_a_row_depend_neither_on_micro_batch_nor_on_company_nor_on_order(arm, hinted):
    whole = common.score(arm.policy, hinted, replace(arm.args, micro_batch=100, minibatches=1))
    for micro_batch, minibatches in ((1, 1), (3, 1), (8, 2), (7, 4)):
        args = replace(arm.args, micro_batch=micro_batch, minibatches=minibatches)
        assert close(common.score(arm.policy, hinted, args), whole)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shuffled = common.token_logps(arm.policy, hinted, order, arm.args)
        assert close(shuffled, whole[order])
        for i in (0, 17, 39):
            assert close(common.token_logps(arm.policy, hinted, torch.tensor([i]), arm.args)[0], whole[i])


def test_a_group_s_prompt_runs_once_in_training_and_its_gradient_is_that_of_rows_alone(load):
    arm, seen = load(problems=4), []
    problems = [row for row in arm.pool[:4] for _ in range(arm.args.group)]
    hints = [arm.processor.tokenize("Sum is " * (i // arm.args.group)) for i in range(len(problems))]
    batch = draw(arm, problems, prefix=hints)
    norm = arm.policy.model.model.language_model.layers[0].input_layernorm
    norm.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    weight, gradients = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)), []
    for rows in (torch.arange(len(problems)).split(len(problems)), torch.arange(len(problems)).split(1)):
        arm.policy.zero_grad()
        for cut in rows:
            (common.token_logps(arm.policy, batch, cut, arm.args) * weight[cut]).sum().backward()
        gradients.append([p.grad.full_tensor().clone() for p in arm.policy.parameters() if p.requires_grad])
    assert all(close(a, b, 1e-5 * b.abs().max().item() + 1e-7) for a, b in zip(*gradients, strict=True))
    tokens, answer = batch.attention.sum(1), (batch.mask + batch.forced > 0).sum(1)
    prompts = (tokens - answer)[:: arm.args.group]
    assert seen == [prompts.sum() + answer.sum(), *tokens.tolist()] and len(prompts.unique()) > 1


def test_a_greedy_answer_is_the_same_alone_and_in_a_batch(arm):
    single = replace(arm.args, group=1)
    together = common.sample(arm.policy, arm.processor, arm.pool[:10], single, arm.run, greedy=True)
    for i in (3, 4, 5, 9):
        alone = common.sample(arm.policy, arm.processor, arm.pool[i : i + 1], single, arm.run, greedy=True)
        assert answers(alone)[0] == answers(together)[i]
    length = together.mask.sum(1)
    assert length[3] < 8 and length[[4, 5, 9]].min() > 16  # answer 3 ended early and was dropped


def test_greedy_answers_are_the_same_in_shapes_like_a_gpus(load, monkeypatch):
    def greedy(B, shapes):
        step = common.Decoder.step
        with monkeypatch.context() as m:
            m.setattr(common.Decoder, "step", lambda self, *shape: shapes.append(shape[:2]) or step(self, *shape))
            return common.sample(it.policy, it.processor, it.pool[:B], single, it.run, greedy=True)

    it, exact, rounded = load(max_new_tokens=28), [], []
    single = replace(it.args, group=1)
    like_a_cpu(monkeypatch)  # whatever `arm` has now
    one = [greedy(B, exact) for B in (23, 10, 23)]
    like_a_gpu(monkeypatch)
    other = [greedy(B, rounded) for B in (23, 10, 23)]  # the third meets what the others have left
    assert len({n for n, _ in rounded}) == 4 and len({columns for _, columns in rounded}) == 5
    assert all(n <= m and a <= b for (n, a), (m, b) in zip(exact, rounded, strict=True))
    for a, b in zip(one, other, strict=True):
        assert answers(a) == answers(b) and close(a.logp, b.logp) and a.mask.sum() > 100


def test_dropping_finished_rows_changes_nothing_for_the_others(arm, batch):
    length = batch.mask.sum(1)
    late = length > 16  # the sampler drops what has ended every eighth token
    assert (length < 8).sum() > 5 and late.sum() > 5
    assert close(batch.logp[late], common.score(arm.policy, batch, arm.args)[late], arm.bound)


def test_answers_that_go_on_into_the_next_block_of_columns_keep_their_log_probs(arm):
    width = max(len(arm.processor.encode(p).ids) for p in arm.problems)
    seven = arm.processor.tokenizer("7").input_ids
    long = draw(arm, prefix=[seven * (120 - width)] * len(arm.problems))  # up to 148 columns, 128 are a block
    assert long.mask.sum(1).max() > 16
    assert close(long.logp, common.score(arm.policy, long, arm.args) * long.mask, arm.bound)


@pytest.mark.parametrize("slot", [0, 127, 128, 255, 256, 300, 511])
def test_the_attention_of_a_large_model_reads_the_filled_blocks_and_of_those_what_a_row_has_seen(slot, monkeypatch):
    torch.manual_seed(0)
    q, keys, values = torch.randn(3, 2, 6, 16), torch.randn(3, 2, 512, 16), torch.randn(3, 2, 512, 16)
    seen = torch.arange(512).expand(3, -1) <= slot
    seen = seen & (torch.arange(512) >= torch.tensor([0, slot // 2, slot])[:, None])  # the last sees its token alone
    blocks = torch.tensor([[[slot // 128 + 1]]], dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 1, 1, 4)
    plain = common.attend(q, keys, values, seen, None)
    assert close(plain[2], values[2, :, None, slot].expand(-1, 6, -1))
    assert close(common.attend(q, keys, values, seen, blocks), plain)
    monkeypatch.setattr(common, "flex_attention", by_blocks)
    assert close(common.attend(q, keys, values, seen, blocks), plain)


# ---- images


def test_every_row_sees_its_image(arm, batch):
    blank = replace(batch, pixels=[torch.zeros_like(x) for x in batch.pixels])
    change = (common.score(arm.policy, blank, arm.args) - batch.logp).abs().amax(1)
    assert change.min() > 1e-3


def test_every_row_sees_the_image_of_its_own_problem(arm, batch):
    """Images of equal size tiled over the rows instead of repeated within groups raise no error: only numbers tell."""
    twins = [p for p in arm.pool if arm.processor.encode(p).grid.tolist() == [[1, 6, 6]]][:3]
    assert len({p["question"] for p in twins}) > 1
    problems = [p for p in twins for _ in range(arm.args.group)]
    batch = draw(arm, problems)
    assert batch.image.tolist() == [i // arm.args.group for i in range(len(problems))]
    for i, problem in enumerate(problems):
        pixels = arm.processor.encode(problem).pixels
        assert torch.equal(batch.pixels[batch.image[i]], pixels)
    tiled = replace(batch, image=torch.arange(len(problems)) % len(twins))
    moved = tiled.image != batch.image
    change = (common.score(arm.policy, tiled, arm.args) - batch.logp).abs().amax(1)
    assert close(change[~moved], torch.zeros(())) and change[moved].min() > 1e-3


def test_part_of_a_batch_carries_its_own_images_only(arm, batch):
    rows = torch.tensor([38, 4, 5, 22])
    part = batch[rows]
    assert len(part.pixels) == len(part.grid) == 3
    for i, row in enumerate(rows):
        assert torch.equal(part.pixels[part.image[i]], batch.pixels[batch.image[row]])
        assert part.text[i] == batch.text[row] and part.finished[i] == batch.finished[row]


# ---- what is drawn


def test_a_seed_gives_the_same_tokens_and_step_seed_and_rank_give_others(load, arm):
    def tokens(seed, step, rank):
        arm.run.args, arm.run.rank = replace(arm.args, seed=seed), rank
        arm.run.begin(step)
        return [s for _, s in answers(common.sample(arm.policy, arm.processor, arm.problems, arm.args, arm.run))]

    try:
        first = tokens(0, 0, 0)
        assert tokens(0, 0, 0) == first
        for other in (tokens(1, 0, 0), tokens(0, 1, 0), tokens(0, 0, 1)):
            assert sum(a == b for a, b in zip(first, other, strict=True)) < 5
    finally:
        arm.run.args, arm.run.rank = arm.args, 0


def test_the_models_own_generation_settings_are_never_read(arm, stock, batch):
    assert stock.generation_config.top_k == 1 and stock.generation_config.temperature == 0.01  # the trap is set
    texts = [set(batch.text[i : i + arm.args.group]) for i in range(0, len(batch.text), arm.args.group)]
    assert sum(map(len, texts)) > 0.9 * len(batch.text)


def test_no_vision_token_and_nothing_beyond_the_vocabulary_is_ever_sampled_however_likely(load):
    arm = load(problems=4, max_new_tokens=12, group=8)
    never = banned(arm)
    assert len(never) == 5 + 8
    for weight in (arm.policy.model.lm_head.weight.to_local(), arm.policy.sampler.lm_head.weight):
        weight = weight.detach()
        push = 50 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
        weight[never] = torch.stack([push if i % 2 else -push for i in range(len(never))])  # one of each pair is huge
    problems = [row for row in arm.pool[:4] for _ in range(8)]
    for batch in (draw(arm, problems), draw(arm, problems, greedy=True)):
        assert not {x for _, sampled in answers(batch) for x in sampled} & set(never)
        assert close(common.score(arm.policy, batch, arm.args), batch.logp, 1e-4) and batch.logp.isfinite().all()


def test_first_tokens_are_drawn_with_the_softmaxs_frequencies(arm, stock):
    many = replace(arm.args, group=4000, max_new_tokens=1)
    torch.manual_seed(0)
    batch = common.sample(arm.policy, arm.processor, arm.pool[:1] * 4000, many, arm.run)
    with torch.no_grad():
        logits = stock(**inputs(arm, arm.pool[0])).logits[0, -1]
    logits[banned(arm)] = -torch.inf
    expected = logits.softmax(-1) * 4000
    seen = batch.ids[:, -1].bincount(minlength=len(expected)).float()
    often = expected > 10
    pool = lambda x: torch.cat([x[often], x[~often].sum()[None]]).double()
    assert often.sum() > 20
    assert chisquare(pool(seen), pool(expected) * (4000 / pool(expected).sum())).pvalue > 0.001


# ---- weights


def test_the_sampler_sees_the_weights_of_every_optimiser_step(load):
    arm = load(problems=3)
    arm.problems = [row for row in arm.pool[:3] for _ in range(arm.args.group)]
    optimizer = torch.optim.SGD([p for p in arm.policy.parameters() if p.requires_grad], lr=1.0)
    before = draw(arm)
    for _ in range(2):
        optimizer.zero_grad()
        logp = common.token_logps(arm.policy, before, torch.arange(len(before.mask)), arm.args)
        (logp * before.mask).mean().neg().backward()
        optimizer.step()
        batch = draw(arm)
        assert close(common.score(arm.policy, batch, arm.args), batch.logp)
        assert not close(common.score(arm.policy, before, arm.args), before.logp, 1e-2)


@pytest.mark.parametrize("freeze_vision", [1, 0])
def test_recomputing_activations_changes_neither_gradient_nor_samples(load, freeze_vision):
    ids, gradient, runs = [], [], [0, 0]
    for checkpointing in (0, 1):
        arm = load(problems=3, checkpointing=checkpointing, freeze_vision=freeze_vision)
        count = lambda *_, i=checkpointing: runs.__setitem__(i, runs[i] + 1)
        arm.policy.model.model.language_model.layers[0].input_layernorm.register_forward_hook(count)
        batch = draw(arm, [row for row in arm.pool[:3] for _ in range(arm.args.group)])
        logp = common.token_logps(arm.policy, batch, torch.arange(len(batch.mask)), arm.args)
        (logp * batch.mask).mean().backward()
        gradient.append(torch.cat([p.grad.full_tensor().flatten() for p in arm.policy.parameters() if p.requires_grad]))
        ids.append(answers(draw(arm, [row for row in arm.pool[:3] for _ in range(arm.args.group)], seed=1)))
    assert runs == [1, 2]  # the second time in the backward pass
    assert ids[0] == ids[1]
    assert close(*gradient, 1e-6) and gradient[0].abs().max() > 1e-3


@pytest.mark.parametrize("freeze_vision", [1, 0])
@pytest.mark.parametrize("checkpointing", [0, 1])
def test_the_vision_tower_takes_part_in_the_backward_pass_only_where_it_is_trained(load, freeze_vision, checkpointing):
    arm, calls = load(problems=3, checkpointing=checkpointing, freeze_vision=freeze_vision), []
    batch = draw(arm, [row for row in arm.pool[:3] for _ in range(arm.args.group)])
    arm.policy.model.model.visual.merger.register_full_backward_hook(lambda *_: calls.append(1))
    common.token_logps(arm.policy, batch, torch.arange(len(batch.mask)), arm.args).sum().backward()
    assert len(calls) == 1 - freeze_vision


def test_two_forwards_are_equal_to_the_bit_though_the_policy_is_in_training_mode(arm, batch):
    assert arm.policy.training and not arm.policy.sampler.training
    assert torch.equal(common.score(arm.policy, batch, arm.args), common.score(arm.policy, batch, arm.args))


def test_the_log_prob_of_an_end_token_has_a_gradient(load):
    arm = load(problems=4)
    batch = draw(arm, [row for row in arm.pool[:4] for _ in range(arm.args.group)])
    end = torch.isin(batch.ids[:, -batch.mask.shape[1] :], torch.tensor(arm.policy.eos))
    first = end & (end.cumsum(1) == 1)
    logp = common.token_logps(arm.policy, batch, torch.arange(len(end)), arm.args)
    (logp * first * batch.mask).sum().backward()
    assert first.sum() == batch.finished.sum() > 2 and batch.mask[first].all()
    assert all(p.grad.full_tensor().abs().max() > 0 for p in arm.policy.parameters() if p.requires_grad)


def test_under_bf16_the_sampler_keeps_its_rotary_tables_in_fp32(load):
    """Rounded to bf16, the angle of position 800 would be off by radians."""
    it = load()
    half = SimpleNamespace(world=1, device=it.run.device, dtype=torch.bfloat16)
    policy = common.load_policy(it.args.model, it.args, half)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}  # master weights
    sampler = policy.sampler
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}
    tables = dict(it.policy.model.named_buffers())
    assert tables and all(torch.equal(x, tables[name]) for name, x in sampler.named_buffers())
