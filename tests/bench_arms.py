"""Benchmark, not collected by pytest: seconds and peak memory of three steps of whole arms, stage by stage, and what
that comes to on an 80 GB card when everything is sharded over 8.

    python tests/bench_arms.py --arms grpo opd vapo stack               # full size, on a GPU
    python tests/bench_arms.py --processes 1 2 --problems 64            # the same steps on one GPU and on two
    python tests/bench_arms.py --size toy --processes 1 2 --problems 8  # that it runs, anywhere

An arm runs as users run it, in processes of its own, with its own defaults and 8 problems x 8 answers a GPU; what it
would save is left out. At full size models have Qwen2-VL-2B's and, for teachers, 7B's published shape and random
weights: their answers hardly ever end, so all are as long as they may be, the worst case for memory. Every second
answer counts as right, or there would be no gradient; hints stay as long as at their start. Flags that are not listed
here go to the arms: `--max-new-tokens 256`.

With the same --problems, the first step of every number of processes learns from the answers of the first, so that
losses can be compared. Times are medians of the steps after the first, memory is their peak, by PyTorch's count: what
CUDA and NCCL take for themselves comes on top. A prediction is for cards with as many problems each as here.
"""

import argparse
import json
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(ROOT := Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch
import torch.distributed as dist
import transformers
from bench_step import random_2b

from data import gates

# Qwen/Qwen2-VL-7B-Instruct, config.json, where it differs from the 2B's
TEXT_7B = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
               vocab_size=152064, tie_word_embeddings=False)  # fmt: skip
ARMS = ("grpo", "hint", "uft", "opd", "reopd", "vapo", "stack")
TEACHERS, HINTS = ("opd", "reopd", "stack"), ("hint", "uft", "stack")
CARD, OVER, GIB = 79, 8, 2**30  # an 80 GB card has 79 GiB for PyTorch; everything sharded over 8 of them

# ------------------------------------------------------------------------------------- the worlds


def random_7b(folder, student):
    """A teacher's checkpoint of the published shape with random bf16 weights and the student's tokenizer."""
    config = transformers.Qwen2VLConfig.from_pretrained(student)
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | TEXT_7B)
    config.vision_config.hidden_size, config.tie_word_embeddings = TEXT_7B["hidden_size"], False
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen2VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    common.load_tokenizer(student).save_pretrained(folder)


def tell(pool, told, tokenizer, sentences=5, words=30):
    """Copy a pool with solutions of that many sentences and words, and stored teacher answers likewise."""
    rows = common.read_jsonl(pool)
    for i, row in enumerate(rows):
        parts = ["".join(f"filler{i * 997 + j * 31 + k}" for k in range(words)) for j in range(sentences - 1)]
        row["answer"], row["solution"] = "gold", [f"{x}.\n" for x in parts] + ["<answer>gold</answer>"]
        row["teacher"] = tokenizer("".join(row["solution"]), add_special_tokens=False).input_ids
    common.write_text(told, "".join(json.dumps(row) + "\n" for row in rows))


def build(folder, teacher):
    """The models and rows of the full size, in a folder that may hold them already -> flags for every arm."""
    student, pool = folder / "student", folder / "student/told.jsonl"
    if not pool.exists():
        student.mkdir(parents=True, exist_ok=True)
        random_2b(student)
        tell(student / "train.jsonl", pool, common.load_tokenizer(student))
    if teacher and not (folder / "teacher/tokenizer_config.json").exists():
        random_7b(folder / "teacher", student)
    torch.cuda.empty_cache()  # the arms need the GPU
    return ["--model", str(student), "--pool", str(pool)]


# ---------------------------------------------------------------------------------------- one arm


def alternate(batch, problems):
    """A stand-in for `common.reward`: every second answer is right."""
    right = torch.arange(len(batch.text), device=batch.mask.device) % 2 == 0
    return right.float(), ["right" if x else "wrong" for x in right.tolist()]


def only(arm, stored, *flags):
    """Run an arm's script, less what it saves. `stored` is a file for the answers of its first step: they are written
    to it, or learnt from if it is there."""
    begin, sample, stored, now = common.Run.begin, common.sample, Path(stored), {"key": None}

    def begun(run, *key):
        now["key"] = key
        begin(run, *key)

    def sampled(policy, processor, problems, args, run, *prefix, **more):
        batch = sample(policy, processor, problems, args, run, *prefix, **more)
        if now["key"] != (0,):  # a later step, or value pretraining
            return batch
        if stored.exists():
            known = json.loads(stored.read_text())
            answers = [known[p["id"]][i % args.group] for i, p in enumerate(problems)]
            return sample(policy, processor, problems, args, run, *prefix, answers=answers)
        mine, T = {}, batch.mask.shape[1]
        for p, ids, mask in zip(problems, batch.ids[:, -T:], batch.mask > 0, strict=True):
            mine.setdefault(p["id"], []).append(ids[mask].tolist())
        dist.all_gather_object(every := [None] * run.world, mine)
        if run.rank == 0:
            common.write_text(stored, json.dumps({k: v for x in every for k, v in x.items()}))
        return batch

    def ended(policy, processor, sets, args, run):
        if run.rank == 0:
            common.write_text(run.dir / "cache.json", json.dumps(policy.decoders[0].keys.shape))

    common.Run.begin, common.sample, common.reward, common.write_outputs = begun, sampled, alternate, ended
    common.Run.save = common.save_critic = common.save_checkpoint = gates.audit = lambda *_: None
    sys.argv = [f"{arm}.py", *flags]
    runpy.run_path(str(ROOT / f"{arm}.py"), run_name="__main__")


def measure(arm, n, problems, flags, folder):
    """Run an arm in n processes -> the folder of its run, or None and why."""
    name = f"{arm}-{n}-{problems}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)] if n > 1 else []
    given = ["--name", name, "--problems", str(problems), "--runs", str(folder), *flags]
    command = [sys.executable, *launcher, __file__, "--only", arm, str(folder / f"{arm}-{problems}.json"), *given]
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT)
        log.seek(0)
        return (None, log.read()[-8000:]) if done.returncode else (folder / f"{name}-s0", "")


# ---------------------------------------------------------------------------------- the reckoning


def count(path, freeze_vision=1, critic=0):
    """Parameters of a model, or of a critic of that many outputs, from the checkpoint's config alone: all, trained."""
    with torch.device("meta"):
        model = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig.from_pretrained(path))
        model.model.visual.requires_grad_(not freeze_vision)
        module = common.Critic(model, critic) if critic else model
    return tuple(sum(p.numel() for p in module.parameters() if every or p.requires_grad) for every in (1, 0))


def held(stage, policy, cache, critic=None, teacher=None, width=2, several=True):
    """What surely lies on the cards at a stage's peak -> ({name: bytes over all cards}, {name: bytes on each card}).

    policy, critic, teacher: their `count`. cache: the shape of the sampler's keys. width: bytes of the compute dtype.
    several: whether a minibatch takes more than one micro-batch.
    FSDP2 shards fp32 weights, trained or not, their gradients and AdamW's moments. In the update gradients come and go,
    but of policy and critic one always has its own. As one unit that is not resharded after a forward (`common.shard`),
    a module is gathered whole in the compute dtype from its first forward to the end of its next backward, which holds
    all its gradients in that dtype before it reduces them, or adds them to the fp32 sum of several micro-batches. A
    critic is updated while the policy is still gathered.
    """
    both = [policy] + ([critic] if critic else [])
    weights, trained = (sum(x[i] for x in both) for i in (0, 1))
    graded = trained - max(x[1] for x in both) if stage == "update" else trained
    sharded = {"fp32 master weights, 4 B": 4 * weights, "AdamW's moments, 8 B": 8 * trained}
    sharded["fp32 gradients, 4 B"] = 4 * graded
    whole = {"sampler": width * policy[0], "KV cache": 2 * width * torch.Size(cache).numel()}
    if teacher:
        whole["teacher"] = width * teacher[0]
    if stage != "rollout":
        whole["gathered weights"] = width * weights
    if stage == "update":
        whole["gradients of a micro-batch"] = width * both[-1][1]
        whole["their fp32 sum"] = 4 * both[-1][1] * several
    return sharded, whole


def reckoning(stage, peak, n, gather, sharded, whole):
    """A measured peak on n cards, in GiB, and what `held` knows of it -> (GiB over 8 cards at most, how in words).

    gather: bytes of the flat buffer out of which gathered weights are copied; there is none on a single card.
    """
    S, W = sum(sharded.values()) / GIB, sum(whole.values()) / GIB
    extra = gather / GIB if n == 1 and stage != "rollout" else 0.0
    predicted = peak - S / n + S / OVER + extra
    told = lambda parts: " + ".join(f"{name} {x / GIB:.2f}" for name, x in parts.items() if x)
    return predicted, (
        f"  {stage}: {peak:.2f} GiB measured = {S:.2f} / {n} sharded ({told(sharded)})\n"
        f"    + {W:.2f} whole on each card ({told(whole)})\n"
        f"    + {peak - S / n - W:.2f} of activations, logits, passing buffers\n"
        f"    over {OVER} cards, predicted: at most {peak:.2f} - {S:.2f} / {n} + {S:.2f} / {OVER}"
        + (f" + {extra:.2f} for the buffer of the gather" if extra else "")
        + f" = {predicted:.2f} of the {CARD} GiB of an 80 GB card"
    )


def summary(arm, n, rows, cache, args):
    """Print what the lines of metrics.jsonl say of an arm -> a row of the table."""
    later = rows[1:]
    stages = [k.removeprefix("seconds_") for k in rows[0] if k.startswith("seconds_")]
    seconds = [statistics.median(row[f"seconds_{k}"] for row in later) for k in stages]
    step = statistics.median(row["tokens"] / row["tokens_per_second"] for row in later)
    rollouts, tokens = args["problems"] * args["group"], statistics.median(row["tokens_per_second"] for row in later)
    first = sum(rows[0][f"seconds_{k}"] for k in stages)
    print(f"{arm}, {n} process{'es' * (n > 1)}, {args['problems']} problems x {args['group']} answers of "
          f"{statistics.mean(row['length'] for row in rows):.0f} tokens on average, "
          f"{statistics.mean(row['truncated'] for row in rows):.0%} cut off at {args['max_new_tokens']}")  # fmt: skip
    print(
        "  "
        + ", ".join(f"{k} {x:.2f} s" for k, x in zip(stages, seconds, strict=True))
        + f"; step {step:.2f} s, {rollouts / step:.2f} rollouts/s, {tokens:,.0f} tokens/s; first step {first:.2f} s"
    )
    learnt = [rows[0][k] for k in ("loss", "grad_norm", "entropy")]
    print("  first step: loss {:.6f}, gradient norm {:.5f}, entropy {:.5f}".format(*learnt))
    cuda = "memory_gb" in rows[0]
    critic = count(args["model"], args["freeze_vision"], 51 if args["critic_loss"] == "hlgauss" else 1) \
        if "critic_loss" in args else None  # fmt: skip
    policy, teacher = count(args["model"], args["freeze_vision"]), count(args["teacher"]) if "teacher" in args else None
    peaks, predicted = [], []
    print(
        f"  parameters: policy {policy[0]:,}, of which {policy[1]:,} trained"
        + (f"; critic {critic[0]:,}, {critic[1]:,}" if critic else "")
        + (f"; teacher {teacher[0]:,}" if teacher else "")
        + f"; keys and values 2 x {' x '.join(map(str, cache))}"
    )
    for stage in stages if cuda else []:
        several = rollouts // n // args["minibatches"] > args["micro_batch"]
        known = held(stage, policy, cache, critic, teacher, several=several)
        peaks.append(max(row[f"memory_{stage}"] for row in later))
        gather = 2 * max(policy[0], critic[0] if critic else 0)
        most, told = reckoning(stage, peaks[-1], n, gather, *known)
        predicted.append(most)
        print(told)
    if cuda:
        peaks.append(max(row["memory_gb"] for row in rows))
        print(f"  peak of all steps, the first included: {peaks[-1]:.2f} GiB")
    sys.stdout.flush()
    return dict(arm=arm, processes=n, problems=args["problems"]) | {
        f"{k} s": f"{x:.2f}" for k, x in zip([*stages, "step"], [*seconds, step], strict=True)
    } | {"rollouts/s": f"{rollouts / step:.2f}", "tokens/s": f"{tokens:,.0f}"} | {
        f"{k} GiB": f"{x:.1f}" for k, x in zip([*stages, "any step"], peaks, strict=False)
    } | ({f"over {OVER}, at most GiB": f"{max(predicted):.1f} (predicted)"} if cuda else {}) | {
        "first loss": f"{learnt[0]:.6f}", "first gradient norm": f"{learnt[1]:.5f}"
    }  # fmt: skip


def markdown(rows):
    """Dicts with the same keys -> a Markdown table."""
    lines = [[*rows[0]], ["---"] + ["---:"] * (len(rows[0]) - 1), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--size", choices=["toy", "2b"], default="2b")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grpo", "opd", "vapo", "stack"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="numbers of GPUs to try, in turn")
    parser.add_argument("--problems", type=int, help="a step, over all processes; default: 8 for each of them")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", type=lambda x: Path(x).absolute(), help="a folder to keep the random models in")
    flags, more = parser.parse_known_args()
    gpus, most = torch.cuda.device_count(), max(flags.processes)
    if most > gpus and (gpus or flags.size == "2b"):
        raise SystemExit(f"--processes {most} takes as many GPUs, here are {gpus}: lower it, or try --size toy.")
    if flags.steps < 2:
        raise SystemExit("--steps has to be 2 or more: the first step is not counted.")
    with tempfile.TemporaryDirectory() as tmp:
        teacher, world = [], ["--toy"]
        if flags.size == "2b":
            folder, taught = flags.models or Path(tmp), not {*flags.arms}.isdisjoint(TEACHERS)
            world = build(folder, taught)
            print("random weights: hardly an answer ends before the limit, the worst case for memory", flush=True)
            teacher = ["--teacher", str(folder / "teacher")]
        rows = []
        for n in flags.processes:
            for arm in flags.arms:
                given = [*world, "--eval", "", "--gates", "off", "--eval-every", "0", "--steps", str(flags.steps)]
                given += teacher if arm in TEACHERS else []
                given += ["--hint-end", "1", "--hint-until", "1"] if arm in HINTS else []
                given += ["--value-steps", "2"] if arm == "vapo" else []
                run, why = measure(arm, n, flags.problems or 8 * n, given + more, Path(tmp))
                if run is None:
                    print(f"{arm}, {n} process{'es' * (n > 1)}: failed\n{why}", flush=True)
                    continue
                config = json.loads((run / "config.json").read_text())
                cache = json.loads((run / "cache.json").read_text())
                row = summary(arm, n, common.read_jsonl(run / "metrics.jsonl"), cache, config["args"])
                if len(flags.processes) > 1:
                    first = [x for x in [*rows, row] if (x["arm"], x["processes"]) == (arm, flags.processes[0])]
                    ratio = [f"{float(row['rollouts/s']) / float(x['rollouts/s']):.2f}" for x in first]
                    row["rollouts/s, ratio"] = "".join(ratio)
                rows.append(row)
    print(f"\n{time.strftime('%Y-%m-%d')}, {common.device_name()}, torch {torch.__version__}, transformers "
          f"{transformers.__version__}, `python tests/bench_arms.py {shlex.join(sys.argv[1:])}`\n")  # fmt: skip
    print(markdown(rows) if rows else "No arm has run.")


if __name__ == "__main__":
    only(*sys.argv[2:]) if sys.argv[1:2] == ["--only"] else main()
