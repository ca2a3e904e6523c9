"""Stack: hints and a fading teacher, who sees the hint as well.

Text and distribution priors, doors A and B: hint.py with opd.py --mix annealed.

    torchrun --nproc_per_node 8 stack.py
"""

import math
import random
from dataclasses import dataclass

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch

from data import gates


@dataclass
class Args:
    # run
    name: str = "stack"  # the run's folder is runs/<name>-s<seed>
    model: str = "Qwen/Qwen2-VL-2B-Instruct"  # a folder or a hub name
    pool: str = "data/pool/train.jsonl"
    eval: str = "data/pool/sparse.jsonl,data/pool/old.jsonl,data/dynamath/dynamath.jsonl"
    instruction: str = "Think step by step, then give the final answer between <answer> and </answer>."
    seed: int = 0
    # rollouts
    problems: int = 64  # a step, over all processes
    group: int = 8  # answers to each problem
    temperature: float = 1.0
    max_new_tokens: int = 512
    max_pixels: int = 401408  # 512 image tokens
    # prior
    hint_start: float = 0.95  # chance of a segment of the solution to be shown, at first
    hint_end: float = 0.05  # and where the cosine ends
    hint_until: float = 0.6  # of the steps; no hints after that
    teacher: str = "Qwen/Qwen2-VL-7B-Instruct"
    kl_coef: float = 1.0
    kl_until: float = 0.6  # of the steps; there the teacher falls silent
    # optimisation
    steps: int = 300
    lr: float = 1e-6
    warmup: int = 10  # steps
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    clip_low: float = 0.2  # ratio clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    minibatches: int = 2  # optimiser steps a rollout batch
    micro_batch: int = 32  # sequences a forward on one process
    freeze_vision: int = 1
    checkpointing: int = 1  # recompute activations in the backward pass
    # bookkeeping
    runs: str = "runs"
    gates: str = "stop"  # stop | warn | off
    save_every: int = 25  # steps
    eval_every: int = 50  # steps, 0 for never
    eval_size: int = 200  # rows of each set
    patience: int = 50  # steps without a mixed group before the run complains


def hint_chance(step, args):
    """Cosine from hint_start to hint_end over the first hint_until of the steps, then exactly 0 (2505.16984)."""
    last, end = args.hint_until * args.steps, min(args.hint_end, args.hint_start)
    return end + (args.hint_start - end) * (1 + math.cos(math.pi * step / last)) / 2 if step < last else 0.0


def hint_prefix(problems, step, processor, args):
    """Begin an answer with the first Binomial(K, hint_chance) of K segments of its solution -> B lists of token ids."""
    prefix = []
    for p in problems:
        cut, draw = common.segments(p), random.Random(f"{args.seed}/{step}/{p['id']}")  # the same for the whole group
        shown = sum(draw.random() < hint_chance(step, args) for _ in cut)
        prefix.append(processor.tokenize("".join(cut[:shown])))
    return prefix


def group_advantage(reward, args):
    """Reward minus the group's mean, over the group's standard deviation (2402.03300, section 4.1.2): (B,) -> (B,).

    Zero exactly where all of a group are wrong or all are right.
    """
    group = reward.view(-1, args.group)
    return ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)).view(-1)


def policy_loss(logp, old_logp, adv, args):
    """Clipped surrogate of each token (1707.06347, eq. 7): (b, T) x 3 -> (b, T)."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return -torch.minimum(ratio * adv, clipped * adv)


def main(args):
    run = common.start(args)
    pool, sets = common.load_pool(args.pool, least=args.problems), common.load_sets(args)
    policy = common.load_policy(args.model, args, run)
    processor = common.Processor(args.model, args)
    teacher = common.load_frozen(args.teacher, processor, run)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.999), weight_decay=args.weight_decay)
    run.resume((policy, optimizer))
    if run.step == 0 and args.gates != "off":
        checks = gates.shared(policy, processor, pool, args, run)
        checks += gates.hints(policy, processor, pool, args, run)
        checks += gates.teachers(teacher, policy, processor, pool, sets, args, run)
        gates.report(checks, args, run)

    for step in range(run.step, args.steps):
        run.begin(step)
        # ---- 1. problems
        problems = common.next_problems(pool, step, args, run)  # B rows
        # ---- 2. rollout
        prefix = hint_prefix(problems, step, processor, args)  # B lists of token ids
        batch = common.sample(policy, processor, problems, args, run, prefix)
        reward, grades = common.reward(batch, problems)  # (B,)
        run.lap("rollout")
        # ---- 3. advantage
        old_logp = common.score(policy, batch, args)  # (B, T)
        gap = common.teacher_gap(teacher, old_logp, batch, args)  # (B, T) log p_T - log p_S of sampled tokens
        kl = args.kl_coef * max(0.0, 1 - step / (args.kl_until * args.steps)) * gap.clamp(-10, 5)  # (B, T)
        adv = group_advantage(reward, args)[:, None] * batch.mask + kl  # (B, T)
        run.lap("advantage")
        # ---- 4. update
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / args.warmup)
        loss_sum = norm_sum = 0.0
        for minibatch in torch.arange(len(reward)).chunk(args.minibatches):
            optimizer.zero_grad()
            tokens = run.sum(batch.mask[minibatch].sum())  # of all ranks
            for rows in common.micro_batches(policy, minibatch, args):
                logp = common.token_logps(policy, batch, rows, args)  # (b, T)
                loss = policy_loss(logp, old_logp[rows], adv[rows], args) * batch.mask[rows]  # (b, T)
                loss = loss.sum() / tokens * run.world  # FSDP averages gradients over ranks
                loss.backward()
                loss_sum += loss.detach() / args.minibatches
            norm_sum += common.clip_gradient(policy, args.max_grad_norm) / args.minibatches
            optimizer.step()
        run.lap("update")
        # ---- 5. log and save
        run.log(
            step,
            **common.rollout_stats(batch, reward, grades, args),
            loss=loss_sum,
            grad_norm=norm_sum,
            entropy=-(old_logp * batch.mask).sum() / batch.mask.sum(),
            **common.teacher_stats(gap, kl, adv, batch),
            mismatch=((old_logp - batch.logp) * batch.mask).abs().sum() / batch.mask.sum(),
            **common.evaluate(policy, processor, sets, step, args, run),
        )
        run.show(step, batch, problems, reward, adv)
        run.save(step, (policy, optimizer))

    common.save_checkpoint(policy, processor, run)
    gates.audit(policy, args, run)
    common.write_outputs(policy, processor, sets, args, run)


if __name__ == "__main__":
    main(common.parse(Args))
