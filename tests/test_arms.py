"""Whole runs: what a run leaves behind, what a killed one loses (nothing), and what is refused, with a sentence."""

import ast
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

import common
import grpo
import judge

ELEVEN = {
    "grpo": ("grpo", {}),
    "hintonly": ("hint", {}),
    "uft001": ("uft", dict(sft_coef=0.001)),
    "uft002": ("uft", dict(sft_coef=0.002)),
    "opd": ("opd", dict(mix="pure")),
    "opd-annealed": ("opd", dict(mix="annealed")),
    "opd-gated": ("opd", dict(mix="gated")),
    "reopd": ("reopd", {}),
    "vapo": ("vapo", dict(critic_loss="mse")),
    "vapohl": ("vapo", dict(critic_loss="hlgauss")),
    "stack": ("stack", {}),
}


def folder(args):
    return Path(args.runs) / f"{args.name}-s{args.seed}"


def outputs(args):
    return [(row["set"], row["id"], row["output"]) for row in common.read_jsonl(folder(args) / "outputs.jsonl")]


def contents(path):
    """{relative path: hash} of everything below a folder."""
    return {str(p.relative_to(path)): sha256(p.read_bytes()).hexdigest() for p in path.rglob("*") if p.is_file()}


def steps(path):
    """The lines of metrics.jsonl without what a clock says."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in common.read_jsonl(path / "metrics.jsonl")]


# ---- complete runs


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("name", ELEVEN)
def test_a_run_leaves_a_complete_folder_whose_checkpoint_is_the_model_that_answered(name, make_args, teacher):
    script, prior = ELEVEN[name]
    if not (ROOT / f"{script}.py").exists():
        pytest.skip(f"{script}.py is not written yet.")
    arm = importlib.import_module(script)
    prior = prior | {"teacher": teacher} if "teacher" in {f.name for f in fields(arm.Args)} else prior
    args = make_args(
        arm,
        name=name,
        steps=3,
        lr=1e-2,
        gates="warn" if script == "vapo" else "stop",
        save_every=2,
        eval_every=2,
        eval_size=5,
        **prior,
    )
    arm.main(args)
    run = folder(args)
    critic = {"pretraining.jsonl", "critic.safetensors"} if script == "vapo" else set()
    assert {p.name for p in run.iterdir()} == {"config.json", "gates.json", "metrics.jsonl", "rollouts.jsonl",
                                               "checkpoint", "outputs.jsonl"} | critic  # fmt: skip
    config = json.loads((run / "config.json").read_text())
    assert {k: config["args"][k] for k in asdict(args)} == asdict(args)
    assert config["sha256"][args.pool] == sha256(Path(args.pool).read_bytes()).hexdigest()

    lines = common.read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in lines] == [0, 1, 2]
    for row in lines:
        numbers = [x for k, x in row.items() if k != "calibration"] + sum(row.get("calibration", []), [])
        assert all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
        assert {"reward", "all_wrong", "all_right", "mixed", "tokens", "length", "truncated", "loss"} < set(row)
        assert ("eval_sparse" in row) == ("eval_old" in row) == (row["step"] == 1)

    gates = json.loads((run / "gates.json").read_text())["gates"]
    between = {"after value pretraining"} if critic else set()
    assert {g["when"] for g in gates} == {"before training", "after training"} | between
    assert {g["verdict"] for g in gates if g["name"] != "critic"} <= {"pass", "warn"}  # three steps teach it nothing

    shown = common.read_jsonl(run / "rollouts.jsonl")
    assert len(shown) == args.group and {x["id"] for x in shown} == {shown[0]["id"]}
    assert all({"step", "question", "forced", "sampled", "reward"} <= set(x) for x in shown)

    sets = {Path(path).stem: [row["id"] for row in common.read_jsonl(path)] for path in args.eval.split(",")}
    assert [(s, i) for s, i, _ in outputs(args)] == [(s, i) for s, ids in sets.items() for i in ids]

    again = make_args(name="again", steps=0, model=str(run / "checkpoint"))  # any checkpoint is a valid --model
    grpo.main(again)
    assert outputs(again) == outputs(args)
    base = make_args(name="base", steps=0)
    grpo.main(base)
    assert sum(a != b for a, b in zip(outputs(base), outputs(args), strict=True)) > 3


def test_no_steps_give_the_answers_of_the_untouched_model(make_args, load, stock):
    args = make_args(name="base", steps=0, gates="stop")
    grpo.main(args)
    arm = load(replace(args, name="other"))
    rows = {row["id"]: row for path in args.eval.split(",") for row in common.load_pool(path)}
    single = replace(args, group=1)
    for _, i, text in outputs(args):
        assert common.sample(arm.policy, arm.processor, [rows[i]], single, arm.run, greedy=True).text == [text]
    saved = common.load_model(folder(args) / "checkpoint", torch.float32).state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in stock.state_dict().items())
    assert common.read_jsonl(folder(args) / "metrics.jsonl") == []


def test_the_evaluation_counts_right_answers_of_the_first_rows_of_each_set(make_args, monkeypatch):
    def grade(output, answer, choices):
        seen.append(answer)
        return "right" if len(seen) % 5 in (1, 2) else "wrong"

    seen, args = [], make_args(steps=2, eval_every=1, eval_size=5)
    monkeypatch.setattr(common, "reward", lambda batch, problems: (torch.zeros(16), ["wrong"] * 16))
    monkeypatch.setattr(common, "grade", grade)
    grpo.main(args)
    golds = [row["answer"] for path in args.eval.split(",") for row in common.read_jsonl(path)[:5]]
    assert seen == golds * 2 and len(golds) == 8
    assert [row["eval_sparse"] for row in steps(folder(args))] == [0.4, 0.4]
    assert [row["eval_old"] for row in steps(folder(args))] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]


def test_dead_training_warns_every_patience_steps_and_living_training_never(make_args, monkeypatch, capsys):
    def train(rewards, **more):
        monkeypatch.setattr(common, "reward", lambda batch, problems: (torch.tensor(rewards), ["wrong"] * 16))
        grpo.main(make_args(steps=5, patience=2, **more))
        return capsys.readouterr().out.count("WARNING")

    assert train([0.0] * 16) == 2
    assert train([1.0] * 16) == 2
    assert train([0.0] * 15 + [1.0]) == 0


# ---- killed runs

# Each job runs in a process of its own, forked from one that has imported everything. A hook counts its writes below
# the run's folder and kills it at the n-th, leaving half of what was being written.
KILLER = """
import json, os, shutil, signal, sys
sys.path.insert(0, sys.argv[1])
import common, conftest, grpo

common.reward = conftest.alternate

def tear(event, path, mode):
    if event == "open" and "a" in mode:
        with open(path, "a") as f:
            f.write('{"step": 1, "rewa')
    elif event == "open":
        open(path, "w").close()
    elif event in ("os.rename", "shutil.rmtree"):
        files = [os.path.join(d, f) for d, _, fs in os.walk(path) for f in fs] or [path]
        for f in files[::2]:
            os.truncate(f, os.path.getsize(f) // 2) if event == "os.rename" else os.remove(f)

def run(job):
    args, moments, off = grpo.Args(**job["args"]), [], []
    def hook(event, args):
        if off or event not in ("open", "os.rename", "os.mkdir", "shutil.rmtree"):
            return
        path, mode = str(args[0]), str(args[1]) if event == "open" else ""
        if not path.startswith(job["args"]["runs"]) or event == "open" and not set(mode) & set("wax"):
            return
        moments.append(f"{event} {path[len(job['args']['runs']) + 1:]}")
        if len(moments) == job["kill"]:
            off.append(1)
            tear(event, path, mode)
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    grpo.main(args)
    off.append(1)
    if job["moments"]:
        json.dump(moments, open(job["moments"], "w"))

for line in sys.stdin:
    if (child := os.fork()) == 0:
        try:
            run(json.loads(line))
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed(make_args, tmp_path_factory):
    """kill(args, n): run until the n-th write (0: to the end) -> exit code; `.moments`: the writes of a whole run."""
    place = tmp_path_factory.mktemp("killer")
    script, moments = place / "killer.py", place / "moments.json"
    script.write_text(KILLER)
    process = subprocess.Popen([sys.executable, script, ROOT / "tests"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip

    def kill(args, n, moments=""):
        process.stdin.write(json.dumps(dict(args=asdict(args), kill=n, moments=str(moments))) + "\n")
        process.stdin.flush()
        while not (line := process.stdout.readline()).strip().lstrip("-").isdigit():
            assert line, "the killer has died"
        return int(line)

    kill.args = dict(steps=5, save_every=2, gates="warn", lr=1e-2, eval_every=3, eval_size=3, max_new_tokens=12)
    kill.whole = make_args(**kill.args)
    assert kill(kill.whole, 0, moments) == 0
    kill.moments = json.loads(moments.read_text())
    kill.last = lambda event, part: [i for i, x in enumerate(kill.moments, 1) if x.startswith(event) and part in x][-1]
    kill.moments = kill.moments[: kill.last("", "outputs.jsonl")]  # after that the run is finished
    yield kill
    process.stdin.close()
    process.wait(60)


def differences(args, whole):
    """Names of what the two runs have not left alike: metrics, rollouts, answers, weights, a file more or less."""
    a, b = folder(args), folder(whole)
    one, other = contents(a), contents(b)
    names = {k for k in one | other if one.get(k) != other.get(k)} - {"config.json", "gates.json"}
    return names - {"metrics.jsonl"} if steps(a) == steps(b) else names


def test_a_run_writes_at_many_moments(killed):
    assert len(killed.moments) > 25
    for event, part in (("open", "metrics.jsonl"), ("os.rename", "/state/"), ("os.rename", "/checkpoint")):
        assert killed.last(event, part) < len(killed.moments)
    rows = steps(folder(killed.whole))
    assert len(rows) == 5 and min(row["grad_norm"] for row in rows) > 0


@pytest.mark.parametrize("n", range(2, 40, 5))
def test_a_run_killed_at_any_write_and_started_again_ends_as_if_nothing_had_happened(killed, make_args, n):
    if n > len(killed.moments):
        pytest.skip("A whole run writes less often.")
    args = make_args(**killed.args)
    assert killed(args, n) == -9
    assert killed(args, 0) == 0
    assert not differences(args, killed.whole), f"killed at: {killed.moments[n - 1]}"


@pytest.mark.parametrize(
    "event, part, then",
    [
        ("os.rename", "/state/", 12),
        ("shutil.rmtree", "/state/", 4),
        ("os.rename", "/checkpoint", 8),
        ("open", "/outputs", 6),
    ],
)
def test_so_does_a_run_killed_twice_in_the_middle_of_a_write(killed, make_args, event, part, then):
    args = make_args(**killed.args)
    assert killed(args, killed.last(event, part)) == -9
    assert killed(args, then) == -9  # while it resumes, or soon after
    assert killed(args, 0) == 0
    assert not differences(args, killed.whole)


def test_a_killed_run_keeps_its_last_whole_state_alone_and_goes_on_from_there(killed, make_args, capsys, monkeypatch):
    args = make_args(**killed.args)
    assert killed(args, killed.last("open", "metrics.jsonl")) == -9
    assert [p.name for p in (folder(args) / "state").iterdir()] == ["000004"]
    assert (folder(args) / "metrics.jsonl").read_text().count("\n") == 4  # and a torn line
    drawn, next_problems = [], common.next_problems
    note = lambda pool, step, *rest: drawn.append(step) or next_problems(pool, step, *rest)
    monkeypatch.setattr(common, "next_problems", note)
    grpo.main(args)
    assert drawn[-1] == 4 and set(drawn) <= {0, 4}  # 0: the gates


def test_the_gates_of_a_resumed_run_are_those_of_its_first_start(killed, make_args):
    """They describe the model before training; measured again on half-trained weights they would describe neither."""
    args = make_args(**killed.args)
    assert killed(args, len(killed.moments)) == -9
    before = (folder(args) / "gates.json").read_text()
    assert killed(args, 0) == 0
    assert (folder(args) / "gates.json").read_text() == before


# ---- refusals


def refused(args, *words):
    """One sentence with these words, and every file as it was."""
    before = contents(Path(args.runs)) if Path(args.runs).is_dir() else {}
    with pytest.raises(SystemExit) as refusal:
        grpo.main(args)
    sentence = str(refusal.value)
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith(".") and "\n" not in sentence
    assert (contents(Path(args.runs)) if Path(args.runs).is_dir() else {}) == before
    return True


def test_a_run_that_is_still_going_is_refused_to_a_second_process(make_args):
    args = make_args(steps=1)
    folder(args).mkdir(parents=True)
    hold = (
        "import common, pathlib, sys; common.lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold, folder(args)], stdin=-1, stdout=-1, cwd=ROOT) as first:
        assert first.stdout.readline() == b"held\n"
        assert refused(args, "grpo-s0", "still going", "--name")
        first.communicate(b"\n")
    grpo.main(args)


def test_the_name_of_a_finished_run_is_refused(make_args):
    args = make_args(steps=1)
    grpo.main(args)
    assert refused(args, "grpo-s0", "finished", "--name", "--seed")
    grpo.main(replace(args, seed=1))


def test_other_flags_than_those_of_the_unfinished_run_are_refused(killed, make_args):
    args = make_args(**killed.args)
    assert killed(args, len(killed.moments) - 8) == -9
    assert refused(replace(args, lr=3e-3), "--lr", "0.01", "0.003", "--name")
    assert refused(replace(args, max_new_tokens=13), "--max-new-tokens", "12", "13")
    config = folder(args) / "config.json"
    config.write_text(config.read_text().replace('"processes": 1', '"processes": 4'))
    assert refused(args, "processes: 4 and can't go on with 1", "--name")
    config.write_text(config.read_text().replace('"processes": 4', '"processes": 1'))
    assert killed(args, 0) == 0 and not differences(args, killed.whole)


def test_a_folder_that_cannot_be_written_is_named(make_args, tmp_path):
    (tmp_path / "file").write_text("")
    assert refused(make_args(runs=str(tmp_path / "file" / "runs")), "Can't write", str(tmp_path / "file"), "--runs")


def test_a_pool_smaller_than_a_step_is_refused(make_args):
    with pytest.raises(SystemExit, match=r"train.jsonl holds 23 problems.*24.*--problems"):
        grpo.main(make_args(problems=24))


@pytest.mark.parametrize("flag", ["pool", "eval"])
def test_a_missing_file_is_named_before_any_training(make_args, flag, monkeypatch):
    monkeypatch.setattr(common, "sample", None)
    with pytest.raises(SystemExit, match=r"nowhere/rows.jsonl does not exist"):
        grpo.main(make_args(**{flag: "nowhere/rows.jsonl"}))


def test_a_model_that_is_nowhere_is_named_and_the_way_without_a_download_shown(make_args):
    for model in ("Qwen/Qwen2-VL-2B-Instruct", "/nowhere/student"):
        with pytest.raises(SystemExit) as refusal:
            grpo.main(make_args(model=model))
        assert model in str(refusal.value) and "name such a folder, or try --toy" in str(refusal.value)


def without_tokenizer(folder):
    for path in folder.glob("token*"):
        path.unlink()


def with_half_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def with_a_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"version": ')


def without_chat_template(folder):
    (folder / "chat_template.jinja").unlink()


def without_config(folder):
    (folder / "config.json").unlink()


def wider(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


def other_patches(folder):
    config = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(config | {"patch_size": 28}))


def cut_off(folder):
    os.truncate(folder / "model.safetensors", 100_000)


def cut_in_the_header(folder):
    os.truncate(folder / "model.safetensors", 500)


def empty(folder):
    os.truncate(folder / "model.safetensors", 0)


def a_pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def a_dangling_link(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/0123")


def less_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "damage, words",
    [
        (without_tokenizer, "does not know <|im_end|> and <|image_pad|>: put tokenizer.json and"),
        (with_half_a_tokenizer, "is neither a folder with a whole checkpoint nor"),
        (with_a_broken_tokenizer, "is neither a folder with a whole checkpoint nor"),
        (without_chat_template, "has no chat template"),
        (without_config, "has no config.json: copy the whole checkpoint."),
        (other_patches, "images are cut into (patch, merge, frames) (28, 2, 2), by config.json (14, 2, 2): take"),
        (wider, "or has them in other sizes, model.language_model.layers.0.mlp.down_proj.weight first"),
        (cut_off, "model.safetensors is cut off, or no safetensors file: copy it again."),
        (cut_in_the_header, "model.safetensors is cut off"),
        (empty, "model.safetensors is cut off"),
        (a_pointer, "model.safetensors is cut off, or no safetensors file"),
        (a_dangling_link, "model.safetensors is cut off, or no safetensors file"),
        (less_a_weight, "lacks 1 weights of its config.json's Qwen2-VL, or has them"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(make_args, world, tmp_path, damage, words):
    model = shutil.copytree(world / "student", tmp_path / "student")
    assert common.is_whole(model / "model.safetensors")
    damage(model)
    with pytest.raises(SystemExit) as refusal:
        grpo.main(make_args(model=str(model)))
    assert str(model) in str(refusal.value) and words in str(refusal.value) and "\n" not in str(refusal.value)


# ---- the command line


def test_every_field_is_a_flag_of_its_type():
    for field in fields(grpo.Args):
        value = {"gates": "off"}.get(field.name) or {int: "7", float: "0.125", str: "x"}[field.type]
        args = common.parse(grpo.Args, ["--" + field.name.replace("_", "-"), value])
        assert asdict(args) == asdict(grpo.Args()) | {field.name: field.type(value)}
    assert common.parse(grpo.Args, []) == grpo.Args()


def test_toy_swaps_only_fields_that_the_arm_has_and_a_given_flag_beats_it():
    @dataclass
    class Args:
        model: str = "big"
        seed: int = 3
        steps: int = 300

    args = common.parse(Args, ["--toy", "--steps", "300"])
    assert "toy" in args.model and args.seed == 3 and args.steps == 300
    assert common.parse(Args, ["--steps", "0", "--toy"]).steps == 0
    toy, default = common.parse(grpo.Args, ["--toy"]), grpo.Args()
    assert "toy" in toy.pool and "toy" in toy.eval and toy.steps < default.steps
    assert all(vars(toy)[k] == vars(default)[k] for k in ("name", "group", "temperature", "clip_low", "clip_high"))


def test_help_shows_the_words_that_a_flag_may_take(capsys):
    with pytest.raises(SystemExit):
        common.parse(grpo.Args, ["--help"])
    assert "--gates {stop,warn,off}" in capsys.readouterr().out


def test_blanks_around_the_commas_of_eval_are_no_part_of_a_path():
    assert common.parse(grpo.Args, ["--eval", " a.jsonl, b c.jsonl ,d.jsonl"]).eval == "a.jsonl,b c.jsonl,d.jsonl"


@pytest.mark.parametrize("argv", [["--stepz", "3"], ["--step", "3"], ["--steps", "many"], ["--lr"], ["--gates", "of"]])
def test_a_flag_that_does_not_exist_is_short_or_has_no_number_is_an_error(argv, capsys):
    with pytest.raises(SystemExit) as refusal:
        common.parse(grpo.Args, argv)
    assert refusal.value.code == 2 and argv[0] in capsys.readouterr().err


def test_progress_is_counted_in_things_that_have_a_name():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("data/**/*.py")]:
        calls = [x for x in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(x, ast.Call)]
        bars = [x for x in calls if isinstance(x.func, ast.Name) and x.func.id == "tqdm"]
        assert all("unit" in {k.arg for k in x.keywords} for x in bars), path


def test_text_with_unusual_line_ends_survives_being_written_and_read(tmp_path):
    rows = [dict(text="a\u2028b\u0085c\x0cd\r\ne"), dict(text="second")]
    common.append_jsonl(tmp_path / "rows.jsonl", *rows)
    assert common.read_jsonl(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(gates="of"), "--gates of is none of stop, warn and off"),
        (dict(group=1), "--group 1: advantages compare"),
        (dict(group=0, steps=0), "--group 0 has to be above 0"),
        (dict(steps=-3), "--steps -3 has to be 0 or above"),
        (dict(lr=-1.0), "--lr -1.0 has to be 0 or above"),
        (dict(lr=math.nan), "--lr nan has to be 0 or above, and finite"),
        (dict(lr=math.inf), "--lr inf has to be 0 or above, and finite"),
        (dict(weight_decay=-1.0), "--weight-decay -1.0 has to be 0 or above"),
        (dict(temperature=math.nan), "--temperature nan has to be above 0, and finite"),
        (dict(max_pixels=0), "--max-pixels 0 is less than the 28 x 28 = 784"),
        (dict(max_pixels=783), "--max-pixels 783 is less than the 28 x 28 = 784"),
        (dict(instruction="See <|image_pad|>."), r"<\|image_pad\|> stands in --instruction: take it out"),
        (dict(name="a/b"), "--name a/b names a folder inside --runs: letters"),
        (dict(warmup=0), "--warmup 0 has to be above 0"),
        (dict(save_every=0), "--save-every 0 has to be above 0"),
        (dict(temperature=0.0), "--temperature 0.0 has to be above 0"),
        (dict(minibatches=5), "--minibatches 5 does not divide"),
    ],
)
def test_flags_that_make_no_sense_are_refused(make_args, flags, words):
    with pytest.raises(SystemExit, match=words):
        grpo.main(args := make_args(**flags))
    assert not any(Path(args.runs).iterdir())


def test_a_run_without_evaluation_sets_ends_with_no_outputs(make_args):
    grpo.main(args := make_args(eval="", steps=1, eval_every=1))
    assert (folder(args) / "outputs.jsonl").read_text() == ""


def broken_off(make_args, monkeypatch, **flags):
    """Args of a run that was stopped after its first save, and its folder."""
    args = make_args(steps=3, save_every=1, **flags)
    with monkeypatch.context() as m:
        m.setattr(common.Run, "log", stop_at(1, common.Run.log))
        with pytest.raises(KeyboardInterrupt):
            grpo.main(args)
    assert list((folder(args) / "state").iterdir())
    return args


def stop_at(last, log):
    def log_(run, step, **values):
        if step == last:
            raise KeyboardInterrupt
        log(run, step, **values)

    return log_


def test_a_run_does_not_go_on_with_another_pool(make_args, world, tmp_path, monkeypatch):
    pool = world / "swapped.jsonl"
    pool.write_text((world / "train.jsonl").read_text())
    args = broken_off(make_args, monkeypatch, pool=str(pool))
    before = (folder(args) / "config.json").read_text()
    pool.write_text("".join(reversed(pool.read_text().splitlines(keepends=True))))
    with pytest.raises(SystemExit, match="is not the file that .* was started with: put that one back"):
        grpo.main(args)
    assert (folder(args) / "config.json").read_text() == before


def test_flags_that_change_no_weight_may_change_on_resume(make_args, monkeypatch):
    args = broken_off(make_args, monkeypatch, gates="stop")
    grpo.main(replace(args, gates="warn", patience=7, save_every=2))
    assert (folder(args) / "outputs.jsonl").exists()


@pytest.mark.usefixtures("mixed")
def test_a_start_that_ended_before_its_first_state_leaves_nothing_to_the_next_one(make_args, monkeypatch):
    left = ("gates.json", "pretraining.jsonl", "critic.safetensors")
    args = make_args(steps=3, gates="warn")
    with monkeypatch.context() as m:
        m.setattr(common.Run, "log", stop_at(1, common.Run.log))
        with pytest.raises(KeyboardInterrupt):
            grpo.main(args)
    assert (folder(args) / "gates.json").exists() and not (folder(args) / "state").exists()
    for name in left:
        (folder(args) / name).write_text('{"gates": [{"name": "of another start"}]}\n')
    grpo.main(replace(args, gates="off", lr=1e-3, steps=1))
    assert [g["when"] for g in json.loads((folder(args) / "gates.json").read_text())["gates"]] == ["after training"] * 3
    assert {p.name for p in folder(args).iterdir()} & set(left) == {"gates.json"}


def test_a_machine_without_git_trains_all_the_same(make_args, monkeypatch):
    monkeypatch.setattr(common.shutil, "which", lambda name: None)
    grpo.main(args := make_args(steps=1))
    assert json.loads((folder(args) / "config.json").read_text())["commit"] == ""


SCRIPTS = [f"-m data.{x}" for x in ("toy.prepare", "toy.critics", "toy.replicate", "probes.prepare", "pool.measure")]
SCRIPTS += ["grpo.py", "hint.py", "judge.py", "analyze.py", "tests/bench_step.py", "tests/bench_arms.py"]


@pytest.mark.parametrize("command", [f"{script} --help" for script in SCRIPTS])
def test_a_missing_package_gets_one_sentence(command):
    done = subprocess.run([sys.executable, "-S", *command.split()], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("The package ") and done.stderr.count("\n") == 1
    assert "is missing: run `pip install -r requirements.txt`" in done.stderr


def test_another_python_gets_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match="is not supported: use 3.11, 3.12 or 3.13"):
        judge.need()


def test_another_arm_does_not_go_on_with_a_killed_run_of_the_same_name(make_args, monkeypatch):
    args = broken_off(make_args, monkeypatch)
    hint = importlib.import_module("hint")
    with pytest.raises(SystemExit, match=r"--hint-\w+ None and can't go on with .*: use the same script"):
        hint.main(hint.Args(**asdict(args)))
    config = json.loads((folder(args) / "config.json").read_text())
    config["args"]["hint_start"] = 0.95  # what was killed was hint.py
    (folder(args) / "config.json").write_text(json.dumps(config))
    assert refused(args, "--hint-start 0.95", "None", "--name")
