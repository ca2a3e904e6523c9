"""Benchmark, not collected by pytest: whole GRPO steps of grpo.py and of a peer, with the same weights, in one run.

    python tests/bench_peers.py                  # Qwen2-VL-2B's published shape, on a GPU
    python tests/bench_peers.py --size toy       # that it runs, anywhere

Every contender has a process of its own and takes the same shape: 8 problems x 8 answers of 256 tokens, one optimiser
step. TRL generates with transformers and gets text prompts as long as ours, which hold an image that it is spared.
A peer that is not installed is skipped.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import transformers
from bench_step import random_2b

import common
import grpo
from data import gates


def ours(args, steps, checkpointing):
    args = replace(args, name="ours", steps=steps, gates="off", eval="", eval_every=0, save_every=10**9,
                   checkpointing=checkpointing, minibatches=1)  # fmt: skip
    common.save_checkpoint = gates.audit = common.write_outputs = lambda *_: None  # 4 GB to write are no part of a step
    grpo.main(args)
    rows = common.read_jsonl(Path(args.runs) / "ours-s0/metrics.jsonl")
    stages = [k for k in rows[0] if k.startswith("seconds_")]
    peak = max(row.get("memory_gb", 0) for row in rows)  # PyTorch's own count begins anew at each stage
    return [sum(row[k] for k in stages) for row in rows], rows[-1]["tokens"], peak


def trl(args, steps, dtype):
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    run = common.start(replace(args, name="trl"))
    processor, pool = common.Processor(args.model, args), common.load_pool(args.pool)
    texts = [
        row["question"] * -(-len(processor.encode(row).ids) // len(processor.tokenize(row["question"]))) for row in pool
    ]
    prompts = datasets.Dataset(datasets.table.InMemoryTable.from_pydict({"prompt": texts}), fingerprint="peer")
    seconds, tokens = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.cuda.synchronize() if run.device.type == "cuda" else None
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            torch.cuda.synchronize() if run.device.type == "cuda" else None
            seconds.append(time.perf_counter() - self.start)

    def reward(completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [float(i % 2) for i in range(len(completion_ids))]

    cpu = run.device.type == "cpu"
    config = GRPOConfig(
        output_dir=f"{args.runs}/trl", per_device_train_batch_size=args.group, num_generations=args.group,
        gradient_accumulation_steps=args.problems, max_completion_length=args.max_new_tokens, learning_rate=args.lr,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, max_steps=steps, gradient_checkpointing=True, save_strategy="no",
        bf16=not cpu, use_cpu=cpu, report_to="none", model_init_kwargs={"dtype": dtype} if dtype else None,
    )  # fmt: skip
    trainer = GRPOTrainer(
        args.model, reward, config, prompts, processing_class=processor.tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    return seconds, statistics.mean(tokens), 0 if cpu else torch.cuda.max_memory_allocated() / 2**30


CONTENDERS = {
    "grpo.py, checkpointing": (ours, 1),
    "grpo.py, none": (ours, 0),
    "TRL, its default (fp32 weights)": (trl, None),
    "TRL, loaded in bf16": (trl, "bfloat16"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["toy", "2b"], default="2b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--args", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.only:
        contender, setting = CONTENDERS[flags.only]
        seconds, tokens, peak = contender(grpo.Args(**json.loads(flags.args)), flags.steps, setting)
        print("\n" + json.dumps(dict(first=seconds[0], step=statistics.median(seconds[1:]), tokens=tokens, peak=peak)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as tmp:
        args = common.parse(grpo.Args, ["--toy"] if flags.size == "toy" else [])
        if flags.size == "2b":
            args = replace(args, max_new_tokens=256, **random_2b(Path(tmp)))
        args = vars(replace(args, runs=tmp, problems=8))
        base = None
        for name, (contender, _) in CONTENDERS.items():
            if contender is trl and not importlib.util.find_spec("trl"):
                print(f"{name}: not installed, skipped")
                continue
            given = ["--only", name, "--steps", str(flags.steps), "--args", json.dumps(args)]
            done = subprocess.run([sys.executable, __file__, *given], capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: failed\n{done.stderr[-2000:]}")
                continue
            r = json.loads(done.stdout.splitlines()[-1])
            base = base or r["step"]
            version = f" {importlib.metadata.version('trl')}" if contender is trl else ""
            print(f"{name}{version}: first step {r['first']:.1f} s, then {r['step']:.2f} s a step "
                  f"({r['tokens']:.0f} tokens), peak {r['peak']:.1f} GiB; {r['step'] / base:.1f} times the first line",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
