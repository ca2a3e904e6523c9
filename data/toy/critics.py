"""What trained critics of vapo.py know, told on fresh answers to their pool. From the repository's root:

    python -m data.toy.critics runs/vapo-s0 runs/vapohl-s0 --policy base

How much of the returns do they explain, beside a table? What is V along right and wrong solutions? How large are
advantages? Answers are the base's, which suits critics of value pretraining alone (vapo.py --steps 0), or the trained
policy's. Every run gets the same problems.
"""

import argparse
import hashlib
import json
import random
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import common  # isort: skip  # first: it says in a sentence which package is missing
import numpy as np
import torch
from tqdm import tqdm

import analyze
import vapo

ALONE = SimpleNamespace(sum=lambda x: x)  # a run of one process, where sums over ranks are the sums


class Token(NamedTuple):
    """A sampled token under a critic."""

    step: int
    half: int  # 0 or 1: the half of the pool that its problem is in
    group: str  # all wrong | all right | mixed, wrong | mixed, right: its group of answers, then its own
    state: str  # before it, see `states`
    enters: bool  # the answer's first token in this state
    value: float  # V before it
    reward: float  # also its return
    raw: float  # advantage, with the run's lambda
    adv: float  # what the update would make of that: divided by the batch's standard deviation, or the floor


def states(texts, solution):
    """The state before each of an answer's tokens, from what stands before it alone: n texts -> n words.

    Sentences end at `;`. "on course" while those that have ended are the solution's, then "off course", each with the
    number of the solution's sentences left, its answer included; "no work" once the answer has begun without any.
    """
    found = []
    for t in range(len(texts)):
        *said, begun = "".join(texts[:t]).split(";")
        kind = "on" if [f"{x};" for x in said] == solution[: len(said)] else "off"
        guess = not said and begun.startswith("<answer>")
        found.append("no work" if guess else f"{kind} course, {max(0, len(solution) - len(said)):2} left")
    return found


def gather(pairs):
    """(key, value) pairs -> {key: list of values}."""
    found = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def table_critic(tokens):
    """V of a table critic, a number a token: the mean return of the tokens in the same state in the *other* half of the
    pool, of all tokens there if none is. It is asked before each token, prepare.table_critic before each sentence."""
    keyed = [((x.half, state), x.reward) for x in tokens for state in (x.state, None)]
    means = {key: sum(r) / len(r) for key, r in gather(keyed).items()}
    return [means.get((1 - x.half, x.state), means.get((1 - x.half, None), 0.0)) for x in tokens]


def explained(tokens, values):
    """Explained variance of the returns R by V, 1 - Var(R - V) / Var(R) over all tokens, and its standard error: over
    200 draws of as many steps with replacement, less those where returns are all equal; nan where all are."""
    value, reward = torch.tensor([values, [x.reward for x in tokens]])[:, None]  # (1, tokens) x 2
    step, drawn = torch.tensor([[x.step for x in tokens]]), random.Random(0)
    sums = [common.moments(value, reward, (step == s).float(), ALONE) for s in step.unique()]
    again = [common.explained_variance(drawn.choices(sums, k=len(sums))) for _ in range(200)]
    share = common.explained_variance(sums)
    return share, float(np.nanstd(again)) if share == share else share


def profile(tokens):
    """{state: (answers that enter it, share of them right in the end, mean and deviation of V as they enter)}."""
    found = gather((x.state, (x.reward, x.value)) for x in tokens if x.enters)
    return {state: (len(x), *np.mean(x, 0), np.std(x, 0)[1]) for state, x in found.items()}


def scale(tokens):
    """{group: (tokens, mean of the raw advantages, rms of the raw ones, rms of the divided ones)}."""
    found = gather((x.group, (x.raw, x.adv)) for x in tokens)
    return {group: (len(x), np.mean(x, 0)[0], *np.mean(np.square(x), 0) ** 0.5) for group, x in found.items()}


def settings(folder, policy):
    """The flags of a critic run that has ended -> vapo.Args. Anything else stops with a sentence."""
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    flags = config.get("args", {})
    if "critic_loss" not in flags:
        raise SystemExit(f"{folder} is no run of a critic arm: name folders that vapo.py has made.")
    if not (folder / "outputs.jsonl").exists():
        raise SystemExit(f"{folder} has not ended: the command that began it resumes it.")
    for part in ("critic.safetensors", *["checkpoint"] * (policy == "trained")):
        if not (folder / part).exists():
            raise SystemExit(f"{folder} has ended but lacks {part}: put it back, or train again.")
    pool = Path(flags["pool"])
    if pool.is_file() and hashlib.sha256(pool.read_bytes()).hexdigest() != config["sha256"].get(flags["pool"]):
        raise SystemExit(f"{pool} is not the file that {folder} was trained on: put that one back, or train again.")
    return vapo.Args(**{f.name: flags[f.name] for f in fields(vapo.Args) if f.name in flags})


def study(folder, steps, policy="base"):
    """`steps` batches of fresh answers to the run's pool, under the run's critic -> list of Token, answer by answer."""
    args, tokens = settings(folder, policy), []
    pool, model = common.load_pool(args.pool), args.model if policy == "base" else folder / "checkpoint"
    if none := [row["id"] for row in pool if not row.get("solution")]:
        raise SystemExit(f"{args.pool}, id {none[0]}: there is no solution to compare answers with; add it.")
    half = {row["id"]: i % 2 for i, row in enumerate(pool)}
    with tempfile.TemporaryDirectory() as runs:
        args = replace(args, runs=runs, seed=12345)  # the same for all, whatever they were trained with
        run, processor = common.start(args), common.Processor(args.model, args)
        actor, outputs = common.load_frozen(model, processor, run), 1 if args.critic_loss == "mse" else 51
        critic = common.load_critic(args.model, outputs, args, run, folder / "critic.safetensors")
        for step in tqdm(range(steps), f"{folder.name}: fresh answers", unit="step"):
            run.begin("critics", step)
            problems = common.next_problems(pool, step, args, run)
            batch = common.sample(actor, processor, problems, args, run)
            reward, mask = common.reward(batch, problems)[0], batch.mask
            value = vapo.value_of(common.score(critic, batch, args, common.token_values), args) * mask
            lam = 1 - 1 / (args.lambda_alpha * mask.sum(1))  # advantages as in vapo.py
            raw = vapo.gae(reward, value, mask, lam.clamp(args.lambda_floor, 1))
            adv = raw / common.masked_std(raw, mask, run).clamp(min=args.adv_floor)
            right = reward.view(-1, args.group).mean(1).tolist()
            for i, (p, r) in enumerate(zip(problems, reward.tolist(), strict=True)):
                ids, share = batch.ids[i, -mask.shape[1] :][mask[i] > 0].tolist(), right[i // args.group]
                texts = processor.tokenizer.batch_decode([[x] for x in ids], skip_special_tokens=True)
                group = f"{'all' if share in (0, 1) else 'mixed,'} {'right' if r else 'wrong'}"
                told, last = states(texts, p["solution"]), None
                for state, v, a, b in zip(told, *(x[i, : len(ids)].tolist() for x in (value, raw, adv)), strict=True):
                    tokens.append(Token(step, half[p["id"]], group, state, state != last, v, r, a, b))
                    last = state
    return tokens


def beside(title, seen, tell, columns, *notes):
    """What `tell` says of each run's tokens, {row: cells}, as Markdown: runs side by side, rows as solutions go on."""
    told, rows = [tell(tokens) for tokens in seen.values()], [["", *(f"{run}: {x}" for run in seen for x in columns)]]
    for key in sorted(set().union(*told), reverse=True):
        cells = [x for found in told for x in found.get(key, [""] * len(columns))]
        rows.append([key, *(f"{x:.4f}" if isinstance(x, float) else x for x in cells)])
    return analyze.markdown(title, rows, notes)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of vapo.py that have ended")
    parser.add_argument("--steps", type=int, default=50, help="rollout batches, each as large as the run's")
    parser.add_argument("--policy", choices=("base", "trained"), default="base", help="who answers")
    cli = parser.parse_args(argv)
    if cli.steps < 1:
        raise SystemExit(f"--steps {cli.steps} has to be above 0.")
    for folder in cli.runs:
        settings(folder, cli.policy)  # before the first of them takes its minutes
    alike = len({folder.name for folder in cli.runs}) < len(cli.runs)
    seen = {str(folder) if alike else folder.name: study(folder, cli.steps, cli.policy) for folder in cli.runs}
    rows = [["run", "tokens", "mean return", "explained by the critic", "by a table of states"]]
    for run, tokens in seen.items():
        both = explained(tokens, [x.value for x in tokens]), explained(tokens, table_critic(tokens))
        shares = (f"{share:.1%} +- {error:.1%}" for share, error in both)
        rows.append([run, len(tokens), f"{np.mean([x.reward for x in tokens]):.4f}", *shares])
    title = f"How much does the critic know? {cli.steps} steps of the {cli.policy} policy"
    note = "Explained variance of the returns, 1 - Var(R - V) / Var(R) over all tokens, +- a standard error over steps."
    more = "The table knows states, from the other half of the problems; the critic was trained on both halves."
    print(analyze.markdown(title, rows, [note, more]))
    note = "On course: all sentences so far are the solution's; left: those still to come, with the answer."
    columns, more = ("answers", "right", "V", "sd of V"), "V should be the share of these answers that is right."
    print(beside("What is V where an answer enters a state?", seen, profile, columns, note, more))
    note = "By group, in mixed ones by answer. Divided: by the batch's standard deviation, at least by --adv-floor."
    print(beside("How large are advantages?", seen, scale, ("tokens", "mean raw", "rms raw", "rms divided"), note))


if __name__ == "__main__":
    main()
