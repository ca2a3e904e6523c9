"""Two real processes under torchrun (gloo) against one: the same problems, gradients, weights, files and answers."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, close
from safetensors.torch import load_file

import common
import grpo
import vapo

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

# Runs under one process and under two. The answers of the `fed` run come from a file: every rank takes those to its
# own problems. The others sample for themselves; `broken` and `left` fail with a state saved; `broken` is run again.
SCRIPT = """
import json, sys
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

common.sample, common.clip_gradient, common.next_problems = fed, watched, drawn
grpo.main(replace(args, name="fed"))
common.sample, common.clip_gradient = sample, clip
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
    policy, processor = common.load_policy(args.model, args, run), common.Processor(args.model, args)
    run.begin(0)
    problem = common.load_pool(args.pool)[0]
    facts["texts"] = sample(policy, processor, [problem] * args.group, args, run).text
(out / f"facts{world}-{rank}.json").write_text(json.dumps(facts))
if rank == 0:
    save_file(gradients, out / f"gradients{world}.safetensors")
"""


def launch(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


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
        launch(*start, out / "script.py", ROOT / "tests", out / f"args{world}.json", out, out / "batch.pt")
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
    assert json.loads((whole / "config.json").read_text())["args"]["nproc_per_node"] == 2


def test_problems_that_do_not_divide_are_refused_and_so_is_another_number_of_processes(both):
    for rank in (0, 1):
        assert both.facts[2, rank]["odd"] == "--problems 3 must be a multiple of the 2 processes."
    assert not folder(both, "odd").exists()
    with pytest.raises(SystemExit, match=r"left-s0 was started with .* 2 .* 1"):
        common.start(replace(both.args[2], name="left", steps=3, save_every=2))


def test_the_command_line_of_the_readme_runs_to_its_end(make_args):
    args = make_args(steps=1)
    launch(*TORCHRUN, ROOT / "grpo.py", *(x for k, v in asdict(args).items() for x in (f"--{k.replace('_', '-')}", v)))
    assert len(common.read_jsonl(Path(args.runs) / "grpo-s0" / "outputs.jsonl")) == 10


# Both critics taught on answers that lie in one folder, by one process or by two; then a critic arm's training by two,
# whole and broken off before its second and its third step.
CRITIC = """
import json, sys
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
        launch(*start, out / "script.py", ROOT / "tests", out / "args.json", world)
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
