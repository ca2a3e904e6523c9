"""What is verified before and after a training, so that no arm wins or loses by a fault: each check is a figure, a
verdict (pass, warn or fail) and a line that a person can read.

Every arm begins with `shared` and the checks of its priors, `hints` and `teachers`; `critics` follows value
pretraining; `audit` looks at the checkpoint before it answers. `report` prints the gates, files them and stops where
one failed. `analyze.py gates` makes the table of all runs.
"""

import json
import math
from dataclasses import replace

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch

from judge import extract, grade

# nats a token by which two forwards may differ; under bf16 it is 0.016 at the 2B's shape, off by one position 0.05
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


def gate(name, good, value, text, remedy="", bad="fail"):
    """One check: its figure, in words, and where it is not good, which row shows that and what to do about it."""
    verdict, text = ("pass", text) if good else (bad, f"{text}; {remedy}" if remedy else text)
    return dict(name=name, verdict=verdict, value=value, text=text)


@torch.no_grad()
def shared(policy, processor, pool, args, run):
    """What every arm checks before training, on one step's rollouts -> list of gates."""
    run.begin("gates")
    problems = common.next_problems(pool, 0, args, run)
    batch = common.sample(policy, processor, problems, args, run)
    rewards, grades = common.reward(batch, problems)
    gap = ((common.score(policy, batch, args) - batch.logp) * batch.mask).abs()
    m = run.mean(common.rollout_stats(batch, rewards, grades, args) | dict(gap=gap.sum() / batch.mask.sum()))
    close = CLOSE[run.dtype]
    few = pool[:: math.ceil(len(pool) / 64)]
    odd = next(filter(None, (image_fault(p, policy, processor, run) for p in few)), None)
    lengths = [(processor.length(p), p["id"]) for p in pool[run.rank :: run.world]]
    most = (gap.max().item(), problems[gap.amax(1).argmax()]["id"])
    every = run.gather((max(lengths, default=(0, "")), most))
    (longest, wide), (most, worst) = (max(x) for x in zip(*every, strict=True))
    room = policy.model.config.text_config.max_position_embeddings
    trained, whole = (sum(p.numel() for p in policy.parameters() if p.requires_grad or k) for k in (0, 1))
    dropout = policy.model.config.text_config.attention_dropout
    expected = (1 - m["reward"]) ** args.group  # by Jensen, the least that independent rollouts allow
    noise = 3 * (expected * (1 - expected) / args.problems) ** 0.5
    choice = sum(p["kind"] == "choice" for p in pool) / len(pool)
    solved, stored = (sum(bool(p.get(k)) for p in pool) / len(pool) for k in ("solution", "teacher"))
    three = range(0, len(grades), math.ceil(len(grades) / 3))
    read = lambda i: f"{extract(batch.text[i], problems[i]['choices'])!r}, gold {problems[i]['answer']!r}: {grades[i]}"
    return [
        gate("pool", True, len(pool), f"{len(pool)} problems, every image readable; {choice:.0%} multiple choice, "
             f"{solved:.0%} with a reference solution, {stored:.0%} with a stored teacher answer"),
        gate("prompt", longest + args.max_new_tokens <= room, longest,
             f"the longest of {len(pool)} prompts takes {longest} tokens, an answer {args.max_new_tokens}, of {room}",
             f"it is row {wide}: lower --max-pixels or --max-new-tokens, or remove the row"),
        gate("image", not odd, len(few), odd or f"image tokens and features are equally many in {len(few)} rows",
             "take preprocessor_config.json and config.json of one and the same Qwen2-VL"),
        gate("weights", dropout == 0, trained, f"{trained:,} of {whole:,} are trained, in fp32, dropout {dropout}",
             f"dropout makes log-probs random: set attention_dropout in {args.model}/config.json to 0"),
        gate("sampling", m["distinct"] > 1 / args.group or args.group == 1, m["distinct"],
             f"temperature {args.temperature}, no top-k, no top-p, ends at {policy.eos}; "
             f"{m['distinct']:.0%} of a group's answers are distinct",
             f"all to row {problems[0]['id']} are {batch.text[0][-90:]!r}: raise --temperature"),
        gate("log-probs", m["gap"] < close, m["gap"],
             f"sampler and training forward differ by {m['gap']:.1e} nats a token, {most:.1e} at most",
             f"over {close:.0e} is a fault in positions, masks, images or weights, worst in row {worst}: install the "
             "versions of requirements.txt"),
        gate("rollouts", True, len(grades), f"three of {len(grades)}, with the answer read and its grade:"
             + "".join(f"\n        {batch.text[i][-90:]!r} is read as {read(i)}" for i in three)),
        gate("success", 0 < m["reward"] < 1, m["reward"], f"{m['reward']:.1%} of rollouts right (paper: 3.6%)",
             "nothing to learn from these: if the three above are graded as they should be, take other rows", "warn"),
        gate("dead groups", m["all_wrong"] >= expected - noise, m["all_wrong"],
             f"{m['all_wrong']:.0%} of groups all wrong (paper: 85-97%), at least {expected:.0%} expected",
             "see in rollouts.jsonl whether the answers of a group belong to one problem", "warn"),
        gate("parsed", m["unparsed"] < 0.5, 1 - m["unparsed"],
             f"{1 - m['unparsed']:.0%} of answers can be read, {m['truncated']:.0%} are cut off by the limit",
             "failures are of format: raise --max-new-tokens, or ask for <answer> in --instruction", "warn"),
    ]  # fmt: skip


def image_fault(problem, policy, processor, run):
    """Where the prompt and the vision tower disagree about a row's image, or None."""
    prompt = processor.encode(problem)
    pixels, grid = prompt.pixels.to(run.device, run.dtype), prompt.grid.to(run.device)
    features = len(policy.sampler.model.visual(pixels, grid).pooler_output)
    tokens = prompt.ids.count(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    if tokens != features:
        return f"row {problem['id']} has {tokens} image tokens and {features} image features"
    if len(prompt.ids) != (length := processor.length(problem)):
        return f"the prompt of row {problem['id']} has {len(prompt.ids)} tokens, by its image's size {length}"


def hints(policy, processor, pool, args, run):
    """What the hint arms check besides: every row has a solution, half of one unlocks, none gives the answer away."""
    cut = [common.segments(p) for p in pool]
    bare = [p["id"] for x, p in zip(cut, pool, strict=True) if not any(x)]
    leaks = [p["id"] for x, p in zip(cut, pool, strict=True) if grade("".join(x), p["answer"], p["choices"]) == "right"]
    solved = 1 - len(bare) / len(pool)
    run.begin("hint gates")
    problems = common.next_problems(pool, 0, args, run)
    halves = [processor.tokenize("".join(common.segments(p, 2))) for p in problems]
    without = common.reward(common.sample(policy, processor, problems, args, run), problems)[0]
    half = common.reward(common.sample(policy, processor, problems, args, run, halves), problems)[0]
    m = run.mean(dict(without=without, half=half))
    return [
        gate("solutions", solved >= 0.9, solved, f"{solved:.0%} of problems have a solution that can be shown in part",
             f"not {', '.join(bare[:3])}: run data.pool.solutions, or remove the rows that have none"),
        gate("no leak", not leaks, len(leaks), f"{len(leaks)} hints state the answer",
             f"first {', '.join(leaks[:3])}: rewrite these rows' solutions"),
        gate("half hint", m["half"] > m["without"], m["half"],
             f"half a solution lifts {m['without']:.1%} right to {m['half']:.1%} (paper: 7.2 to 34.4%)",
             "so it doesn't help: read some solutions, and take more --problems for a surer figure", "warn"),
    ]  # fmt: skip


def teachers(teacher, policy, processor, pool, sets, args, run):
    """What the teacher arms check besides: it sees the image, a student would teach itself nothing, and its ceiling."""
    run.begin("teacher gates")
    problems = common.next_problems(pool, 0, args, run)
    batch = common.sample(policy, processor, problems, args, run)
    blind = replace(batch, pixels=[torch.zeros_like(x) for x in batch.pixels])
    seen = ((common.score(teacher, batch, args) - common.score(teacher, blind, args)) * batch.mask).abs().sum(1)
    itself = common.Policy(policy.sampler, policy.sampler, processor.tokenizer).to(run.device).eval()
    old_logp = common.score(policy, batch, args)
    m = run.mean(dict(sees=(seen > 0).double(), self=common.teacher_gap(itself, old_logp, batch, args).abs(),
                      kl=-common.teacher_gap(teacher, old_logp, batch, args).sum() / batch.mask.sum()))  # fmt: skip
    right = common.accuracy(teacher, processor, sets, args, run)
    ceiling = ", ".join(f"{name} {share:.1%}" for name, share in right.items())
    return [
        gate("teacher's eyes", m["sees"] == 1, m["sees"], f"{m['sees']:.0%} of its scores change with the image",
             f"least that of row {problems[seen.argmin()]['id']}: take another --teacher than {args.teacher}"),
        gate("self-teaching", m["self"] < CLOSE[run.dtype], m["self"],
             f"a student that teaches itself has an advantage of {m['self']:.1e} nats",
             "teacher and student are not scored alike: install the versions of requirements.txt"),
        gate("ceiling", True, max(right.values(), default=0.0), f"the teacher, greedy: {ceiling}; KL {m['kl']:.2f}"),
    ]  # fmt: skip


def critics(rate, seen, window):
    """What the critic arms check after value pretraining, from the `moments` of each of its steps: V at its start, and
    that in its last steps the critic knew more than a constant, of rollouts on which it had not been trained yet.
    """
    n, target, _, error, _ = seen[0].tolist()
    start, explained = (target - error) / n, common.explained_variance(seen[-window:])
    return [
        gate("value at start", abs(start - rate) < 0.005, start,
             f"V is {start:.4f}; {rate:.4f} of the stored rollouts are right (paper: 3.6%)",
             "the head does not start at its bias: install the versions of requirements.txt"),
        gate("critic", explained > 0.05, "" if math.isnan(explained) else explained,
             f"the returns of the last {window} steps are all equal: nothing to explain" if math.isnan(explained) else
             f"after {len(seen)} steps it explains {explained:.1%} of the variance of unseen returns, a constant 0%",
             "5% are wanted: raise --critic-lr or --value-steps, or take other rows",
             "warn" if explained > 1e-3 else "fail"),
    ]  # fmt: skip


def audit(policy, args, run):
    """What every arm checks after training, in the checkpoint that it has saved, and reports."""
    checks = []
    if run.rank == 0:
        model, folder = policy.sampler, run.dir / "checkpoint"
        before, saved = (common.load_model(path, model.dtype).state_dict() for path in (args.model, folder))
        live = {name: x.cpu() for name, x in model.state_dict().items()}
        moved = sum(not torch.equal(x, before[name]) for name, x in live.items())
        torn = [name for name, x in live.items() if not x.isfinite().all()]
        other = [name for name, x in live.items() if not torch.equal(x, saved[name]) and name not in torn]
        checks = [
            gate("moved", (moved > 0) == (args.steps > 0), moved,
                 f"{moved} of {len(live)} tensors differ from {args.model} after {args.steps} steps",
                 "see `mixed` and `grad_norm` in metrics.jsonl", "warn"),
            gate("finite", not torn, "", f"{len(torn)} tensors are not finite",
                 f"first {', '.join(torn[:3])}: train again under another --name with a lower --lr"),
            gate("saved", not other, "", f"{len(other)} tensors of the checkpoint are not those that answer",
                 f"first {', '.join(other[:3])}: look for room on the disk, and give the same command again"),
        ]  # fmt: skip
    report(run.gather(checks)[0], args, run, "after training")


def report(checks, args, run, when="before training"):
    """Print the gates, file them in gates.json, and stop where one failed (--gates stop|warn|off)."""
    if run.rank == 0:
        path = run.dir / "gates.json"
        filed = json.loads(path.read_text())["gates"] if path.exists() else []
        filed += [g | {"when": when} for g in checks]
        filed = {(g["when"], g["name"]): g for g in filed}  # one that is checked again keeps its place
        common.write_text(path, json.dumps({"gates": [*filed.values()]}, indent=1))
        told = [f"  {g['verdict']}  {g['name']}: {g['text']}" for g in checks]
        print(f"{run.dir}: gates {when}", *told, sep="\n", flush=True)
    failed = [g["name"] for g in checks if g["verdict"] == "fail"]
    if failed and args.gates == "stop":
        names = f"{'s' * (len(failed) > 1)} {' and '.join(failed)}"
        raise SystemExit(f"{run.dir}: the gate{names} failed, see above; --gates warn goes on regardless.")
