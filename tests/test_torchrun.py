"""Two and eight real processes (gloo) against one: the same problems, gradients, weights, files and answers."""

import json
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, close
from safetensors.torch import load_file

import common
import grpo
import opd
import vapo

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

# Runs under one process and under two. The answers of the `fed` run come from a file: every rank takes those to its
# own problems. The others sample for themselves; `broken` and `left` fail with a state saved; `broken` is run again.
SCRIPT = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
import common, conftest, grpo

args, out = grpo.Args(**json.loads(Path(sys.argv[2]).read_text())), Path(sys.argv[3])
facts, gradients = {"ids": [], "widths": []}, {}
common.reward = conftest.alternate
sample, clip, next_problems = common.sample, common.clip_gradient, common.next_problems

def fed(policy, processor, problems, args, run, **more):
    if more:
        return sample(policy, processor, problems, args, run, **more)
    batch = common.Batch(**torch.load(sys.argv[4]))
    rows = torch.arange(len(batch.text)).view(-1, args.group)[run.rank :: run.world].flatten()
    facts["widths"].append(batch[rows].mask.shape[1])
    return batch[rows]

def watched(policy, max_norm):
    names = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
    gradients.update({f"{len(gradients) // len(names)} {n}": p.grad.full_tensor().clone() for n, p in names})
    return clip(policy, max_norm)

def drawn(pool, step, args, run):
    problems = next_problems(pool, step, args, run)
    facts["ids"].append([p["id"] for p in problems])
    return problems

def fails(pool, step, args, run):
    if step == 2:
        raise RuntimeError("a failure on purpose")
    return next_problems(pool, step, args, run)

def logged(run, step, **values):
    run.laps["seconds_rollout"] += 100 * run.rank  # so long another rank than the first has taken
    facts["laps"] = dict(run.laps)
    log(run, step, **values)

log, common.Run.log = common.Run.log, logged
common.sample, common.clip_gradient, common.next_problems = fed, watched, drawn
grpo.main(replace(args, name="fed"))
common.sample, common.clip_gradient, common.Run.log = sample, clip, log
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
if world > 1:
    more = replace(args, steps=3, save_every=2)
    facts["ids"].clear()
    grpo.main(replace(more, name="whole"))
    common.next_problems = fails
    for name in ("broken", "left"):
        try:
            grpo.main(replace(more, name=name))
        except RuntimeError:
            facts["states"] = [p.name for p in Path(args.runs).glob("broken-s0/state/*/*")]
    common.next_problems = next_problems
    grpo.main(replace(more, name="broken"))
    try:
        common.start(replace(args, name="odd", problems=3))
    except SystemExit as refusal:
        facts["odd"] = str(refusal)
    run = common.start(replace(args, name="draws"))
    torch.distributed.barrier()
    run.begin(0)
    time.sleep(0.5 * rank)
    run.lap("rollout")
    facts["waited"] = run.laps["seconds_rollout"]
    policy, processor = common.load_policy(args.model, args, run), common.Processor(args.model, args)
    run.begin(0)
    problem = common.load_pool(args.pool)[0]
    facts["texts"] = sample(policy, processor, [problem] * args.group, args, run).text
(out / f"facts{world}-{rank}.json").write_text(json.dumps(facts))
if rank == 0:
    save_file(gradients, out / f"gradients{world}.safetensors")
"""


def launch(*commands):
    """Run commands, side by side, to their ends. When one fails or time is up the others are ended, too."""
    with tempfile.TemporaryFile("w+") as log:
        jobs = [subprocess.Popen(list(map(str, command)), stdout=log, stderr=log) for command in commands]
        try:
            late = time.monotonic() + 600
            while not any(codes := [job.poll() for job in jobs]) and None in codes and time.monotonic() < late:
                time.sleep(0.1)
        finally:
            for job in jobs:
                job.terminate()  # torchrun ends its processes
            for job in jobs:
                job.wait(60)
        log.seek(0)
        assert codes == [0] * len(jobs), f"{codes}\n{log.read()[-6000:]}"


@pytest.fixture(scope="module")
def both(load, tmp_path_factory):
    """The script under one process and under two -> args of each, and the folder with what it noted down."""
    out = tmp_path_factory.mktemp("both")
    (out / "script.py").write_text(SCRIPT)
    arm = load(problems=4, group=4, max_new_tokens=24, steps=1, lr=1e-4)
    torch.manual_seed(0)
    problems = common.next_problems(arm.pool, 0, arm.args, arm.run)
    batch = common.sample(arm.policy, arm.processor, problems, arm.args, arm.run)
    odd = (torch.arange(16) // 4 % 2 == 1)[:, None]  # the second rank's answers end after five tokens
    batch.mask[odd & (batch.mask.cumsum(1) > 5)] = 0
    batch.attention[:, -batch.mask.shape[1] :] &= batch.mask > 0
    torch.save(vars(batch), out / "batch.pt")
    runs = {}
    for world, start in ((1, [sys.executable]), (2, TORCHRUN)):
        runs[world] = replace(arm.args, runs=str(out / f"runs{world}"))
        (out / f"args{world}.json").write_text(json.dumps(asdict(runs[world])))
        launch([*start, out / "script.py", ROOT / "tests", out / f"args{world}.json", out, out / "batch.pt"])
    facts = {(w, r): json.loads((out / f"facts{w}-{r}.json").read_text()) for w, r in ((1, 0), (2, 0), (2, 1))}
    return SimpleNamespace(out=out, args=runs, facts=facts, pool=arm.pool)


def folder(both, name, world=2):
    return Path(both.args[world].runs) / f"{name}-s0"


def steps(path):
    return [{k: v for k, v in row.items() if "second" not in k} for row in common.read_jsonl(path / "metrics.jsonl")]


def test_two_processes_get_the_problems_of_one_and_no_problem_twice(both):
    for step, (a, b) in enumerate(zip(both.facts[2, 0]["ids"], both.facts[2, 1]["ids"], strict=True)):
        run = SimpleNamespace(rank=0, world=1)
        one = [p["id"] for p in common.next_problems(both.pool, step, both.args[1], run)]
        assert not set(a) & set(b) and sorted(a + b) == sorted(one)
    assert step == 2


def test_two_processes_with_answers_of_unequal_length_take_the_gradients_of_one(both):
    assert {both.facts[2, r]["widths"][-1] for r in (0, 1)} == {5, 24}
    one, two = (load_file(both.out / f"gradients{w}.safetensors") for w in (1, 2))
    assert one.keys() == two.keys() and {k.split()[0] for k in one} == {"0", "1"}  # two minibatches
    for name, gradient in one.items():
        assert gradient.any() and close(two[name], gradient, 1e-5 * gradient.abs().max().item())


def test_they_log_the_seconds_of_the_slowest_and_its_rate(both):
    laps, row = [both.facts[2, r]["laps"] for r in (0, 1)], common.read_jsonl(folder(both, "fed") / "metrics.jsonl")[0]
    assert {k for k in row if k.startswith("seconds")} == {"seconds_rollout", "seconds_advantage", "seconds_update"}
    assert row | {k: max(x[k] for x in laps) for k in laps[0]} == row and row["seconds_rollout"] > 100
    assert row["tokens_per_second"] == round(row["tokens"] / max(sum(x.values()) for x in laps), 1)


def test_waiting_for_the_slowest_counts_as_its_stage(both):
    assert all(both.facts[2, rank]["waited"] > 0.45 for rank in (0, 1))


def test_they_log_the_same_and_end_with_the_same_weights(both):
    one, two = steps(folder(both, "fed", 1))[0], steps(folder(both, "fed"))[0]
    for row in (one, two):
        del row["entropy"], row["mismatch"]  # means of the ranks' own means
    assert one == pytest.approx(two, rel=1e-5, abs=1e-7)
    weights = [load_file(folder(both, "fed", w) / "checkpoint" / "model.safetensors") for w in (1, 2)]
    assert all(close(x, weights[1][name], 1e-5) for name, x in weights[0].items())
    base = load_file(Path(both.args[1].model) / "model.safetensors")
    assert sum(not close(x, base[name], 5e-5) for name, x in weights[0].items()) > 20


def test_ranks_draw_different_answers_to_the_same_problem(both):
    texts = [set(both.facts[2, r]["texts"]) for r in (0, 1)]
    assert texts[0] & texts[1] <= {""} and len(texts[0]) > 1 < len(texts[1])


def test_a_run_of_two_processes_that_broke_off_ends_as_if_nothing_had_happened(both):
    assert both.facts[2, 0]["states"] and len(set(both.facts[2, 0]["states"])) == 2  # a file of each rank
    broken, whole = folder(both, "broken"), folder(both, "whole")
    assert steps(broken) == steps(whole) and len(steps(whole)) == 3
    for name in ("checkpoint/model.safetensors", "outputs.jsonl", "rollouts.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert not (broken / "state").exists()


def test_a_prime_number_of_rows_is_answered_once_each_as_one_process_with_the_checkpoint_answers(both, make_args):
    whole, args = folder(both, "whole"), make_args(name="one", steps=0, model=str(folder(both, "whole") / "checkpoint"),
                                                   max_new_tokens=24)  # fmt: skip
    grpo.main(args)
    rows = common.read_jsonl(whole / "outputs.jsonl")
    assert [row["id"] for row in rows] == [f"sparse{i}" for i in range(7)] + [f"old{i}" for i in range(3)]
    assert rows == common.read_jsonl(Path(args.runs) / "one-s0" / "outputs.jsonl")
    assert json.loads((whole / "config.json").read_text())["args"]["processes"] == 2


def test_problems_that_do_not_divide_are_refused_and_so_is_another_number_of_processes(both):
    for rank in (0, 1):
        assert both.facts[2, rank]["odd"] == "--problems 3 must be a multiple of the 2 processes."
    assert not folder(both, "odd").exists()
    with pytest.raises(SystemExit, match=r"left-s0 was started with .* 2 .* 1"):
        common.start(replace(both.args[2], name="left", steps=3, save_every=2))


# Both critics taught on answers that lie in one folder, by one process or by two; then a critic arm's training by two,
# whole and broken off before its second and its third step.
CRITIC = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
import common, conftest, vapo

args, out = vapo.Args(**json.loads(Path(sys.argv[2]).read_text())), Path(sys.argv[2]).parent
clip, begin = common.clip_gradient, common.Run.begin
common.reward = conftest.alternate

def watched(critic, max_norm):
    names = [(n, p) for n, p in critic.named_parameters() if p.requires_grad]
    gradients.update({f"{len(gradients) // len(names)} {n}": p.grad.full_tensor().clone() for n, p in names})
    return clip(critic, max_norm)

def fails(run, *key):
    if key == (stop,):
        raise RuntimeError("a failure on purpose")
    begin(run, *key)

common.clip_gradient = watched
for loss in ("mse", "hlgauss"):
    gradients = {}
    vapo.main(replace(args, name=f"{loss}{sys.argv[3]}", critic_loss=loss))
    if torch.distributed.get_rank() == 0:
        save_file(gradients, out / f"{loss}{sys.argv[3]}.safetensors")
common.clip_gradient, more = clip, replace(args, steps=3, save_every=2, lr=1e-3)
if sys.argv[3] == "2":
    vapo.main(replace(more, name="whole"))
    common.Run.begin = fails
    for stop in (1, 2):  # after value pretraining, and after a save
        try:
            vapo.main(replace(more, name="broken"))
        except RuntimeError:
            assert len({p.name for p in out.glob("broken-s0/state/*/*")}) == 2
    common.Run.begin = begin
    vapo.main(replace(more, name="broken"))
"""


@pytest.fixture(scope="module")
def critics(make_args, tmp_path_factory):
    """The script under two processes, which store the answers, then under one, which finds them -> the folder."""
    out = tmp_path_factory.mktemp("critics")
    (out / "script.py").write_text(CRITIC)
    (out / "args.json").write_text(
        json.dumps(asdict(make_args(vapo, steps=0, runs=str(out), max_new_tokens=12, eval="")))
    )
    for world, start in ((2, TORCHRUN), (1, [sys.executable])):
        launch([*start, out / "script.py", ROOT / "tests", out / "args.json", world])
    return out


@pytest.mark.parametrize("loss", ["mse", "hlgauss"])
def test_two_processes_teach_the_critic_with_the_gradients_of_one(critics, loss):
    assert len(list(critics.glob("rollouts-*"))) == 1
    one, two = (load_file(critics / f"{loss}{w}.safetensors") for w in (1, 2))
    assert one.keys() == two.keys() and {k.split()[0] for k in one} == set("012345")  # two minibatches a step
    for name, gradient in one.items():
        assert gradient.any() or name[0] == "0" and "head" not in name  # the trunk has none while the head is 0
        assert close(two[name], gradient, 2e-4 * gradient.abs().max().item() + 1e-9), name
    logs = [common.read_jsonl(critics / f"{loss}{w}-s0" / "pretraining.jsonl") for w in (1, 2)]
    for a, b in zip(*logs, strict=True):
        del a["calibration"], b["calibration"]
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6)
    weights = [load_file(critics / f"{loss}{w}-s0" / "critic.safetensors") for w in (1, 2)]
    assert all(close(x, weights[1][n], 1e-4) for n, x in weights[0].items())


def test_a_critic_arm_of_two_processes_that_broke_off_twice_ends_as_if_nothing_had_happened(critics):
    broken, whole = critics / "broken-s0", critics / "whole-s0"
    assert steps(broken) == steps(whole) and len(steps(whole)) == 3
    for name in ("checkpoint/model.safetensors", "critic.safetensors", "rollouts.jsonl", "pretraining.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert not (broken / "state").exists()


# ---- eight processes

# Three arms under eight processes, forked from one so that the imports are paid for once, then under one. The answers
# of the training step come from a file; those to the evaluation sets, and of the critic's stored rollouts, are sampled.
EIGHT = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
import common, conftest, grpo, opd, vapo

out = Path(sys.argv[2])
every = {x.__name__: x.Args(**json.loads((out / f"{x.__name__}.json").read_text())) for x in (grpo, opd, vapo)}
sample, clip, read, next_problems = common.sample, common.clip_gradient, common.token_logps, common.next_problems

def part(rank, world):
    if world > 1:
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=sys.argv[3])
    dead, facts = {p["id"] for p in read_rows(every["grpo"])[7::8]}, {}

    def fed(policy, processor, problems, args, run, **more):
        if more or not training:
            return sample(policy, processor, problems, args, run, **more)
        batch = common.Batch(**torch.load(out / "batch.pt"))
        batch = batch[torch.arange(len(batch.text)).view(-1, args.group)[rank::world].flatten()]
        note["widths"].append(batch.mask.shape[1])
        return batch

    def reward(batch, problems):
        right = [i % 2 == 0 and p["id"] not in dead for i, p in enumerate(problems)]
        return torch.tensor(right).float(), ["right" if x else "wrong" for x in right]

    def drawn(pool, step, args, run):
        problems = next_problems(pool, step, args, run)
        note["ids"].append([p["id"] for p in problems])
        return problems

    def watched(module, max_norm):
        names = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        kind = type(module).__name__.removeprefix("FSDP")
        turn = sum(k.startswith(kind) for k in gradients) // len(names)
        gradients.update({f"{kind} {turn} {n}": p.grad.full_tensor().clone() for n, p in names})
        return clip(module, max_norm)

    def counted(*rest):
        note["forwards"] += 1
        return read(*rest)

    def ended(policy, processor, sets, args, run):
        common.reshard(policy)
        weights = {n: p.full_tensor().clone() for n, p in policy.named_parameters()}
        if rank == 0:
            save_file(weights, out / f"{args.name}-weights.safetensors")
        write_outputs(policy, processor, sets, args, run)

    def begin(run, *key):
        nonlocal training
        training = isinstance(key[0], int)
        if broken and key == (1,):
            raise RuntimeError("a failure on purpose")
        began(run, *key)

    began, write_outputs, training, broken = common.Run.begin, common.write_outputs, False, False
    common.Run.begin, common.sample, common.reward = begin, fed, reward
    common.write_outputs, common.LATE = ended, 1
    common.clip_gradient, common.token_logps, common.next_problems = watched, counted, drawn
    common.grade = lambda text, *_: "right" if len(text) % 2 else "wrong"
    for name, args in every.items():
        note, gradients = facts.setdefault(name, dict(ids=[], widths=[], forwards=0)), {}
        sys.modules[name].main(replace(args, name=f"{name}{world}"))
        if rank == 0:
            save_file(gradients, out / f"{name}{world}.safetensors")
    if world > 1:
        broken, note = True, dict(ids=[], widths=[], forwards=0)
        try:
            grpo.main(replace(every["grpo"], name="left", steps=2, save_every=1))
        except RuntimeError:
            pass
        (out / f"node{rank // 4}").mkdir(exist_ok=True)
        os.chdir(out / f"node{rank // 4}")
        for name, args in dict(
            apart=replace(every["grpo"], runs="runs"), differ=replace(every["grpo"], lr=1e-5 * (rank // 4))
        ).items():
            try:
                common.start(replace(args, name=name))
            except SystemExit as refusal:
                facts[name] = str(refusal)
    (out / f"facts{world}-{rank}.json").write_text(json.dumps(facts))

def read_rows(args):
    run = type("Run", (), dict(rank=0, world=1))
    return next_problems(common.load_pool(args.pool), 0, replace(args, group=1), run)

for world in (8, 1):
    torch.multiprocessing.start_processes(part, (world,), world, start_method="fork")
"""


def free_port():
    """A port nobody listens at, below those that the kernel gives to others in the meantime."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port


@pytest.fixture(scope="module")
def eight(make_args, load, teacher, tmp_path_factory):
    """The script -> args of the arms, the folder, and what each rank noted down."""
    out = tmp_path_factory.mktemp("eight")
    shape = dict(problems=16, group=4, max_new_tokens=24, steps=1, lr=1e-4, micro_batch=3, runs=str(out))
    args = dict(
        grpo=make_args(grpo, **shape, eval_every=1, eval_size=5),
        opd=make_args(opd, **shape, teacher=teacher, mix="annealed", eval=""),
        vapo=make_args(vapo, **shape, value_steps=2, eval=""),
    )
    arm = load(replace(args["grpo"], name="draws"))
    torch.manual_seed(0)
    problems = common.next_problems(arm.pool, 0, arm.args, arm.run)
    batch = common.sample(arm.policy, arm.processor, problems, arm.args, arm.run)
    most = torch.tensor([24, 1, 5, 24, 2, 17, 24, 3])[torch.arange(64) // 4 % 8, None]  # of each rank's answers
    batch.mask[batch.mask.cumsum(1) > most] = 0
    batch.attention[:, -batch.mask.shape[1] :] &= batch.mask > 0
    torch.save(vars(batch), out / "batch.pt")
    (out / "script.py").write_text(EIGHT)
    for name, x in args.items():
        (out / f"{name}.json").write_text(json.dumps(asdict(x)))
    launch([sys.executable, out / "script.py", ROOT / "tests", out, free_port()])
    facts = {(w, r): json.loads((out / f"facts{w}-{r}.json").read_text()) for w in (1, 8) for r in range(w)}
    return SimpleNamespace(out=out, args=args, facts=facts)


ARMS = pytest.mark.parametrize("name", ["grpo", "opd", "vapo"])


@ARMS
def test_eight_processes_get_the_problems_of_one(name, eight):
    one, ranks = eight.facts[1, 0][name], [eight.facts[8, r][name] for r in range(8)]
    for step in range(len(one["ids"])):
        groups = [r["ids"][step][k : k + 4] for k in (0, 4) for r in ranks]
        assert sum(groups, []) == one["ids"][step]


@ARMS
def test_eight_processes_with_answers_of_unequal_length_take_the_gradients_of_one(name, eight):
    ranks = [eight.facts[8, r][name] for r in range(8)]
    assert [r["widths"] for r in ranks] == [[w] for w in (24, 1, 5, 24, 2, 17, 24, 3)]
    assert len({r["forwards"] for r in ranks}) == 1  # in step, whatever the lengths
    one, more = (load_file(eight.out / f"{name}{w}.safetensors") for w in (1, 8))
    assert one.keys() == more.keys()
    updates = {"Policy 0", "Policy 1"} | ({f"Critic {i}" for i in range(6)} if name == "vapo" else set())
    assert updates == {" ".join(k.split()[:2]) for k in one}
    for update in updates:
        a, b = (torch.cat([x.flatten() for k, x in g.items() if k.startswith(update)]) for g in (one, more))
        assert (b - a).norm() < 1e-5 * a.norm(), update


@ARMS
def test_eight_processes_log_the_same_and_end_with_the_same_weights(name, eight):
    one, more = steps(eight.out / f"{name}1-s0"), steps(eight.out / f"{name}8-s0")
    means = {"entropy", "mismatch", "teacher_kl", "clamped", "rms_teacher", "rms_reward", "calibration"}
    for a, b in zip(one, more, strict=True):
        assert a.keys() == b.keys() and ("eval_sparse" in a) == (name == "grpo")
        assert {k: v for k, v in a.items() if k not in means} == pytest.approx(
            {k: v for k, v in b.items() if k not in means}, rel=1e-5, abs=1e-7
        )  # those are means of the ranks' own means
    for file in ("checkpoint/model.safetensors", *(["critic.safetensors"] if name == "vapo" else [])):
        a, b = (load_file(eight.out / f"{name}{w}-s0" / file) for w in (1, 8))
        assert a.keys() == b.keys() and all(close(x, b[k], 1e-5) for k, x in a.items())


def test_what_eight_processes_wrote_loads_in_one(eight, load):
    run, args = eight.out / "grpo8-s0", replace(eight.args["grpo"], name="one", steps=0)
    args = replace(args, model=str(run / "checkpoint"))
    arm, ended = load(replace(args, name="loads")), load_file(eight.out / "grpo8-weights.safetensors")
    loaded = {n: p.full_tensor() for n, p in arm.policy.named_parameters()}
    assert loaded.keys() == ended.keys() and all(torch.equal(x, ended[n]) for n, x in loaded.items())
    grpo.main(args)
    rows = common.read_jsonl(run / "outputs.jsonl")  # 7 and 3 of them, less than one a process
    assert len(rows) == 10 and rows == common.read_jsonl(eight.out / "one-s0" / "outputs.jsonl")
    critic, args = eight.out / "vapo8-s0" / "critic.safetensors", eight.args["vapo"]
    loaded = common.load_critic(args.model, 1, args, arm.run, critic)
    whole = {n: p.full_tensor() for n, p in loaded.named_parameters()}
    assert all(torch.equal(x, whole[name]) for name, x in load_file(critic).items())


def test_a_run_of_eight_processes_is_not_continued_by_one(eight):
    assert len(list(eight.out.glob("left-s0/state/000001/*"))) == 8
    with pytest.raises(SystemExit, match=r"left-s0 was started with .* 8 .* 1: "):
        common.start(replace(eight.args["grpo"], name="left", steps=2, save_every=1))


def test_a_runs_folder_that_two_nodes_do_not_share_is_refused_on_the_second(eight):
    told = [eight.facts[8, r].get("apart") for r in range(8)]
    assert told[:4] == [None] * 4
    assert all(x.endswith("isn't here: --runs has to be a folder that all share.") for x in told[4:])


def test_a_file_of_another_node_that_shows_late_is_waited_for(tmp_path, monkeypatch):
    threading.Timer(0.7, (tmp_path / "late").touch).start()
    assert common.appears(tmp_path / "late")
    monkeypatch.setattr(common, "LATE", 0.1)
    assert not common.appears(tmp_path / "never")


def test_flags_in_which_two_nodes_differ_are_refused_on_both(eight):
    assert all("given different flags" in eight.facts[8, r]["differ"] for r in range(8))
    assert not (eight.out / "differ-s0").exists()


# ---- two nodes


@pytest.mark.parametrize("each", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_two_nodes_started_by_the_line_of_the_readme_end_as_one_node_does(each, make_args):
    """Two torchrun agents on this machine, with `each` processes, against one with twice as many."""
    one, two = (make_args(steps=2, problems=8, save_every=1, eval_every=1) for _ in range(2))
    flags = [[x for k, v in asdict(a).items() for x in (f"--{k.replace('_', '-')}", v)] for a in (one, two)]
    launch([*TORCHRUN[:-1], 2 * each, ROOT / "grpo.py", *flags[0]])
    (line,) = [x for x in (ROOT / "README.md").read_text().splitlines() if "--nnodes" in x]
    torchrun, *words = shlex.split(line, comments=True)
    assert torchrun == "torchrun" and {"HOST", "R", "29500", "8", "grpo.py"} < set(words)
    put = {"HOST": "127.0.0.1", "29500": free_port(), "8": each, "grpo.py": ROOT / "grpo.py"}
    nodes = [[(put | {"R": node}).get(x, x) for x in words] for node in (0, 1)]
    launch(*([*TORCHRUN[:3], *node, *flags[1]] for node in nodes))
    one, two = (Path(a.runs) / "grpo-s0" for a in (one, two))
    assert steps(one) == steps(two) and len(steps(one)) == 2
    for name in ("checkpoint/model.safetensors", "outputs.jsonl", "rollouts.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert len(common.read_jsonl(one / "outputs.jsonl")) == 10
    assert json.loads((two / "config.json").read_text())["args"]["processes"] == 2 * each
