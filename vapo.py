"""VAPO: a critic that is first taught on the frozen policy's answers says what each token is worth (2504.05118).

Value prior, door B, and the likelihood of right answers, door C. vapohl (2403.03950) differs in --critic-loss alone.

    torchrun --nproc_per_node 8 vapo.py --name vapohl --critic-loss hlgauss
"""

from dataclasses import dataclass

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch

from data import gates


@dataclass
class Args:
    # run
    name: str = "vapo"  # the run's folder is runs/<name>-s<seed>
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
    critic_loss: str = "mse"  # mse | hlgauss
    critic_lr: float = 2e-6
    value_steps: int = 50  # of value pretraining, at most
    value_clip: float = 0.2  # mse: V is not pulled further than this from its old value
    lambda_alpha: float = 0.05  # advantages of an answer of l tokens: lambda = 1 - 1 / (lambda_alpha l)
    lambda_floor: float = 0.0  # but never below this
    adv_floor: float = 0.1  # advantages are divided by their standard deviation, or by this where it is less
    positive_coef: float = 0.1  # times the mean negative log-likelihood of right answers' tokens
    # optimisation
    steps: int = 300
    lr: float = 1e-6
    warmup: int = 10  # steps
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    clip_low: float = 0.2  # ratio clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
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


def hl_gauss(y):
    """Mass of N(y, 0.75 bins) in each of 51 bins on [-0.2, 1.2], renormalised (2403.03950): (...) -> (..., 51)."""
    mass = torch.erf((torch.linspace(-0.2, 1.2, 52, device=y.device) - y[..., None]) / (0.75 * 1.4 / 51 * 2**0.5))
    return mass.diff() / (mass[..., -1:] - mass[..., :1])


def value_of(output, args):
    """V from the critic's outputs, of which mse has one: (..., K) -> (...)."""
    centres = torch.arange(0.5, 51, device=output.device) * 1.4 / 51 - 0.2
    return output.squeeze(-1) if args.critic_loss == "mse" else output.softmax(-1) @ centres


def critic_loss(output, old, target, args):
    """Clipped squared error, or cross-entropy above its least: (b, T, K), (b, T) x 2 -> (b, T), and where clipped."""
    if args.critic_loss == "mse":
        step = value_of(output, args) - old
        free, near = ((old + x - target) ** 2 / 2 for x in (step, step.clamp(-args.value_clip, args.value_clip)))
        return torch.maximum(free, near), near > free
    p = hl_gauss(target)
    return (torch.xlogy(p, p) - p * output.log_softmax(-1)).sum(-1), torch.zeros_like(old)


def gae(reward, value, mask, lam):
    """Generalised advantage (1506.02438, eq. 16) of reward at the last token, gamma 1: (B,), (B, T) x 2 -> (B, T).

    lam: (B,) or a number. No value follows the last token; lambda 1 gives return - V.
    """
    after = torch.cat([value[:, 1:] * mask[:, 1:] + reward[:, None] * (1 - mask[:, 1:]), reward[:, None]], 1)
    adv = (after - value) * mask
    for t in reversed(range(adv.shape[1] - 1)):
        adv[:, t] += lam * adv[:, t + 1]
    return adv


def pretrain(critic, optimizer, rate, rollouts, args, run):
    """Value pretraining (2504.05118): from V = rate, until two fifths in a row explain no more than one before."""
    mixed = torch.tensor([1 - rate, rate]) @ hl_gauss(torch.tensor([0.0, 1.0]))  # (51,)
    critic.start_at(torch.tensor([rate]) if args.critic_loss == "mse" else mixed.clamp(min=1e-6).log())
    window, seen = max(1, args.value_steps // 5), []
    for step, (batch, reward) in enumerate(rollouts):
        value = value_of(common.score(critic, batch, args, common.token_values), args) * batch.mask  # (B, T)
        target = gae(reward, value, batch.mask, 1.0) + value  # (B, T) lambda 1: the reward itself
        seen.append(common.moments(value, target, batch.mask, run))
        run.note(step, **common.fit_critic(critic, optimizer, critic_loss, batch, value, target, args, run))
        explained = [common.explained_variance(seen[i:][:window]) for i in range(0, len(seen), window)]
        if len(seen) % window == 0 and max(0.05, *explained[-2:]) <= max(explained[:-2], default=0.0):
            break
    gates.report(gates.critics(rate, seen, window), args, run, "after value pretraining")


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
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.999), weight_decay=args.weight_decay)
    critic = common.load_critic(args.model, 1 if args.critic_loss == "mse" else 51, args, run)
    trained = [p for p in critic.parameters() if p.requires_grad]
    critic_optimizer = torch.optim.AdamW(trained, lr=args.critic_lr, weight_decay=args.weight_decay)
    resumed = run.resume((policy, optimizer), (critic, critic_optimizer))
    if run.step == 0 and args.gates != "off":
        checks = gates.shared(policy, processor, pool, args, run)
        gates.report(checks, args, run)
    if not resumed:
        pretrain(critic, critic_optimizer, *common.stored_rollouts(policy, processor, pool, args, run), args, run)
        run.save(-1, (policy, optimizer), (critic, critic_optimizer))

    for step in range(run.step, args.steps):
        run.begin(step)
        # ---- 1. problems
        problems = common.next_problems(pool, step, args, run)  # B rows
        # ---- 2. rollout
        batch = common.sample(policy, processor, problems, args, run)
        reward, grades = common.reward(batch, problems)  # (B,)
        run.lap("rollout")
        # ---- 3. advantage
        old_logp = common.score(policy, batch, args)  # (B, T)
        value = value_of(common.score(critic, batch, args, common.token_values), args) * batch.mask  # (B, T)
        target = gae(reward, value, batch.mask, 1.0) + value  # (B, T) lambda 1: the reward itself
        lam = 1 - 1 / (args.lambda_alpha * batch.mask.sum(1))  # (B,) from the true length
        adv = gae(reward, value, batch.mask, lam.clamp(args.lambda_floor, 1))  # (B, T)
        adv_std = common.masked_std(adv, batch.mask, run)
        adv = adv / adv_std.clamp(min=args.adv_floor)
        run.lap("advantage")
        # ---- 4. update
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / args.warmup)
        fitted = common.fit_critic(critic, critic_optimizer, critic_loss, batch, value, target, args, run)
        right = reward[:, None] * batch.mask  # (B, T)
        loss_sum = norm_sum = 0.0
        for minibatch in torch.arange(len(reward)).chunk(args.minibatches):
            optimizer.zero_grad()
            tokens = run.sum(batch.mask[minibatch].sum())  # of all ranks
            positives = run.sum(right[minibatch].sum()).clamp(min=1)
            for rows in common.micro_batches(policy, minibatch, args):
                logp = common.token_logps(policy, batch, rows, args)  # (b, T)
                loss = policy_loss(logp, old_logp[rows], adv[rows], args) * batch.mask[rows]  # (b, T)
                loss = loss.sum() / tokens * run.world  # FSDP averages gradients over ranks
                loss = loss - args.positive_coef * (logp * right[rows]).sum() / positives * run.world
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
            **fitted,
            adv_std=adv_std,
            lambda_clamped=(lam < args.lambda_floor).double(),
            mismatch=((old_logp - batch.logp) * batch.mask).abs().sum() / batch.mask.sum(),
            **common.evaluate(policy, processor, sets, step, args, run),
        )
        run.show(step, batch, problems, reward, adv)
        run.save(step, (policy, optimizer), (critic, critic_optimizer))

    common.save_critic(critic, run)
    common.save_checkpoint(policy, processor, run)
    gates.audit(policy, args, run)
    common.write_outputs(policy, processor, sets, args, run)


if __name__ == "__main__":
    main(common.parse(Args))
