"""Benchmark, not collected by pytest: where a GRPO step spends its time, and the sampler against stock `generate`.

    python tests/bench_step.py                      # the toy, on a CPU or a GPU
    python tests/bench_step.py --size 2b            # Qwen2-VL-2B's published shape with random weights, on a GPU

Both samplers answer the same problems in the same run, in turn; speed is quoted as the ratio of the medians. Stock
`generate` runs a prompt for every answer, as a user of it would. Only tokens up to the end token count, on both sides.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ["PYTHONPATH"] = str(ROOT := Path(__file__).resolve().parent.parent)
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import transformers
from PIL import Image

import common
import grpo

# Qwen/Qwen2-VL-2B-Instruct, config.json; the vocabulary holds 151,665 tokens in 151,936 rows
TEXT_2B = dict(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]), bos_token_id=None,
)  # fmt: skip
VISION_2B = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, hidden_size=1536)


def random_2b(folder):
    """A checkpoint of the published shape with random weights; 64 problems of 256 image tokens and 90 of text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data/toy/student")
    tokenizer.add_tokens([f"filler{i}" for i in range(151665 - len(tokenizer))])
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]), strict=True))  # fmt: skip
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = transformers.Qwen2VLConfig(text_config=TEXT_2B | ends, vision_config=VISION_2B, tie_word_embeddings=True,
                                        **{f"{k}_token_id": v for k, v in ids.items()})  # fmt: skip
    with torch.device("cuda"):
        model = transformers.Qwen2VLForConditionalGeneration(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.Qwen2VLImageProcessorPil().save_pretrained(folder)
    rng, rows = np.random.default_rng(0), []
    for i in range(64):
        Image.fromarray(rng.integers(0, 256, (448, 448, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        words = "".join(f"filler{j}" for j in rng.integers(0, 99999, 90))
        rows.append(dict(id=f"r{i}", image=f"{i}.png", question=words, answer="1", kind="free", choices=[]))
    common.write_text(folder / "train.jsonl", "")
    common.append_jsonl(folder / "train.jsonl", *rows)
    return dict(model=str(folder), pool=str(folder / "train.jsonl"), eval=str(folder / "train.jsonl"), eval_size=1)


def stage_seconds(args, steps):
    """Median seconds of each stage over `steps` steps of grpo.main after one to warm up -> {stage: seconds}, rows."""
    grpo.main(replace(args, name="bench", steps=steps + 1, gates="off", eval_every=0, save_every=10**9))
    rows = common.read_jsonl(Path(args.runs) / f"bench-s{args.seed}" / "metrics.jsonl")[1:]
    stages = [k for k in rows[0] if k.startswith("seconds_")]
    return {k.removeprefix("seconds_"): statistics.median(row[k] for row in rows) for k in stages}, rows


@torch.no_grad()
def stock(policy, processor, problems, args, run):
    """Tokens that plain `generate` samples for the same problems, every answer with a prompt of its own."""
    prompts = [processor.encode(p) for p in problems]
    width = max(len(p.ids) for p in prompts)
    ids = common.left_pad([torch.tensor(p.ids) for p in prompts], width, policy.eos[1]).to(run.device)
    seen = common.left_pad([torch.ones(len(p.ids), dtype=torch.long) for p in prompts], width).to(run.device)
    out = policy.sampler.generate(
        input_ids=ids, attention_mask=seen, pixel_values=torch.cat([p.pixels for p in prompts]).to(run.device),
        image_grid_thw=torch.cat([p.grid for p in prompts]).to(run.device), do_sample=True, temperature=1.0, top_k=0,
        mm_token_type_ids=(ids == policy.model.config.image_token_id).int(), top_p=1.0, repetition_penalty=1.0,
        max_new_tokens=args.max_new_tokens, eos_token_id=policy.eos, pad_token_id=policy.eos[1],
        suppress_tokens=policy.banned.isinf().nonzero().flatten().tolist(),
    )  # fmt: skip
    new = out[:, width:]
    ends = torch.isin(new, torch.tensor(policy.eos, device=run.device))
    return torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1]).sum().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["toy", "2b"], default="toy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--new", type=int, help="tokens an answer at most; toy 56, 2b 256")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        base = common.parse(grpo.Args, ["--toy"] if flags.size == "toy" else [])
        full = random_2b(Path(tmp)) if flags.size == "2b" else {}
        new = flags.new or (256 if flags.size == "2b" else base.max_new_tokens)
        args = replace(base, runs=f"{tmp}/runs", problems=flags.problems, max_new_tokens=new, **full)
        stages, rows = stage_seconds(args, flags.repeats)
        run = common.start(args)
        policy, processor = common.load_policy(args.model, args, run), common.Processor(args.model, args)
        problems = common.next_problems(common.load_pool(args.pool), 0, args, run)
        ours = lambda: common.sample(policy, processor, problems, args, run).mask.sum().item()
        peer = lambda: stock(policy, processor, problems, args, run)
        rates = {ours: [], peer: []}
        for i in range(flags.repeats + 1):  # the first round warms up
            for f in rates:
                run.begin("bench", i)
                tokens = f()
                run.lap("rollout")
                rates[f] += [tokens / run.laps["seconds_rollout"]] * (i > 0)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU, one thread"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    shape = f"{flags.size}: {args.problems} problems x {args.group}, at most {new} tokens, {flags.repeats} repeats"
    print(f"\n{time.strftime('%Y-%m-%d')}, {device}, {versions}; {shape}")
    total, tokens = sum(stages.values()), statistics.median(row["tokens"] for row in rows)
    print(
        f"step {total:.2f} s, {tokens:.0f} tokens: "
        + ", ".join(f"{k} {v:.2f} s ({v / total:.0%})" for k, v in stages.items())
    )
    print(f"peak memory {max(row.get('memory_gb', 0) for row in rows):.1f} GiB") if torch.cuda.is_available() else None
    for name, f in (("sample", ours), ("stock generate", peer)):
        low, mid, high = min(rates[f]), statistics.median(rates[f]), max(rates[f])
        print(f"{name}: {mid:.0f} tokens/s (from {low:.0f} to {high:.0f})")
    print(f"ratio {statistics.median(rates[ours]) / statistics.median(rates[peer]):.1f}")


if __name__ == "__main__":
    main()
