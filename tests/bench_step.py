"""Benchmark, not collected by pytest: seconds of a GRPO step by stage, and the sampler against stock `generate`; at
full size also decoding against the memory's speed, training against the chip's, sampler against training forward.

    python tests/bench_step.py                            # the toy, on a CPU or a GPU
    python tests/bench_step.py --size 2b --problems 16    # Qwen2-VL-2B's published shape with random weights, on a GPU

All samplers answer the same problems in the same run, in turn; speed is quoted as the ratio of the medians. Stock
`generate` runs a prompt for every answer, as a user of it would. Only tokens up to the end token count, on all sides.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

import common  # isort: skip  # first: it says in a sentence which package is missing
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

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
def stock(policy, processor, problems, args, run, cache=None):
    """Tokens that plain `generate` samples for the same problems, every answer with a prompt of its own.

    cache: None for the library's default, which grows; "static" for the one that it compiles.
    """
    prompts = [p for p in map(processor.encode, problems[:: args.group]) for _ in range(args.group)]
    width = max(len(p.ids) for p in prompts)
    ids = common.left_pad([torch.tensor(p.ids) for p in prompts], width, policy.eos[1]).to(run.device)
    seen = common.left_pad([torch.ones(len(p.ids), dtype=torch.long) for p in prompts], width).to(run.device)
    out = policy.sampler.generate(
        input_ids=ids, attention_mask=seen, pixel_values=torch.cat([p.pixels for p in prompts]).to(run.device),
        image_grid_thw=torch.cat([p.grid for p in prompts]).to(run.device), do_sample=True, temperature=1.0, top_k=0,
        mm_token_type_ids=(ids == policy.model.config.image_token_id).int(), top_p=1.0, repetition_penalty=1.0,
        max_new_tokens=args.max_new_tokens, eos_token_id=policy.eos, pad_token_id=policy.eos[1],
        suppress_tokens=policy.banned.isinf().nonzero().flatten().tolist(), cache_implementation=cache,
    )  # fmt: skip
    new = out[:, width:]
    ends = torch.isin(new, torch.tensor(policy.eos, device=run.device))
    return torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1]).sum().item()


def decode_table(policy, context):
    """Milliseconds of one decode step at several batch sizes, and the share of the time in which the memory could bring
    its weights and its keys and values."""
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    bandwidth = 2 * x.numel() / seconds(lambda: x[: 2**31].copy_(x[2**31 :])) / 2
    lm = policy.sampler.model.language_model
    weights = 2 * (sum(p.numel() for p in lm.layers.parameters()) + lm.embed_tokens.weight.numel())
    print(f"\ndecode step at context {context}; memory copies {bandwidth / 1e12:.2f} TB/s, read and write counted")
    for rows in (128, 64, 32, 8):  # the largest first: its buffers serve all
        decoder = policy.decoder(rows, 2 * context)
        decoder.seen[:, : context - 1] = True

        def step(decoder=decoder, rows=rows):
            decoder.slot.fill_(context - 1)
            decoder.advance(rows, decoder.span(context), 1.0, False)

        took = seconds(step)
        kv = 2 * 2 * decoder.keys[:, :rows, :, :context].numel()
        print(f"  {rows:4} rows: {took * 1e3:.2f} ms, {rows / took:,.0f} tokens/s, "
              f"{(weights + kv) / bandwidth / took:.0%} of the memory's speed")  # fmt: skip


def seconds(f, repeats=30, warm=5):
    """Median seconds of f on the GPU, after some calls to warm up."""
    times = []
    for _ in range(repeats + warm):
        torch.cuda.synchronize()
        clock = time.perf_counter()
        f()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - clock)
    return statistics.median(times[warm:])


def ragged(policy, processor, problems, args, run, mean=300, most=1024):
    """Answers that end at random, as trained models' do: one token in `mean` is an end token -> batch, end tokens."""
    ends = np.random.default_rng(0).permutation(150000)[: 150000 // mean] + 500
    policy.eos, before = policy.eos + ends.tolist(), policy.eos
    ends = torch.tensor(policy.eos, device=run.device)
    policy.decoders.clear()
    for i in range(3):
        run.begin("ragged", i)
        batch = common.sample(policy, processor, problems, replace(args, max_new_tokens=most), run)
        run.lap("rollout")
        length, took = batch.mask.sum(1), run.laps["seconds_rollout"]
        print(f"{len(length)} answers of {length.min():.0f} to {length.max():.0f} tokens, mean {length.mean():.0f}: "
              f"{took:.2f} s, {length.sum() / took:,.0f} tokens/s" + " (captures graphs)" * (i == 0))  # fmt: skip
    policy.eos = before
    policy.decoders.clear()
    return batch, ends


@torch.no_grad()
def mismatch(policy, batch, ends, args):
    """Mean nats between the sampler and the packed training forward, beside those between two training forwards; end
    tokens drawn, beside those expected; how far log-probs with a gradient are from those without, on which the first
    ratio rests."""
    of = lambda logp: ((logp - packed) * batch.mask).abs().sum().item() / batch.mask.sum().item()
    packed, padded = common.score(policy, batch, args), torch.zeros_like(batch.logp)
    model, T, expected = policy.sampler, batch.mask.shape[1], 0.0
    for rows in torch.arange(len(padded)).split(4):
        b = batch[rows]
        embeds = common.embed(model, b.ids, b.image, b.pixels, b.grid)
        states = model.model.language_model(
            inputs_embeds=embeds, attention_mask=b.attention, position_ids=b.positions, use_cache=False
        ).last_hidden_state
        t = b.mask.shape[1]
        logits = common.next_logits(states[:, -t - 1 : -1], model.lm_head.weight, policy.banned, args.temperature)
        logp = logits.log_softmax(-1)
        padded[rows] = F.pad(logp.gather(-1, b.ids[:, -t:, None]).squeeze(-1), (0, T - t))
        expected += (logp[..., ends].exp().sum(-1) * b.mask).sum().item()
    print(f"nats a token from the packed training forward: sampler {of(batch.logp):.4f}, padded forward "
          f"{of(padded):.4f}, ratio {of(batch.logp) / of(padded):.2f}")  # fmt: skip
    drawn = (torch.isin(batch.ids[:, -T:], ends) * batch.mask).sum().item()
    print(f"end tokens drawn: {drawn:.0f}, expected {expected:.0f} +- {expected**0.5:.0f}")
    rows = torch.arange(args.micro_batch)
    with torch.enable_grad():
        graded = common.token_logps(policy, batch, rows, args).detach()
    off = (graded - packed[rows]).abs().max().item()
    print(f"log-probs with a gradient differ from those without by {off:.1e} nats at most")


def training_table(policy, batch, args):
    """Seconds, memory, model FLOP utilisation of forward and backward over the whole batch: of the work that is done,
    in which a group's prompt runs once, and of that which it replaces, in which every answer brings its own."""
    config, lm = policy.model.config.text_config, policy.model.model.language_model
    body, head = sum(p.numel() for p in lm.layers.parameters()), lm.embed_tokens.weight.numel()
    length, answer = batch.attention.sum(1).double(), (batch.mask + batch.forced > 0).sum(1).double()
    spared = length - answer  # of each answer its prompt's tokens, but where it is the group's first
    spared[:: args.group] = 0
    response, whole, fewer = (x.sum().item() for x in (answer, length, length - spared))
    work = lambda tokens, squares: 6 * (body * tokens + head * response + (
        config.num_hidden_layers * config.hidden_size * squares.sum().item()))  # fmt: skip  # causal: half the square
    done, replaced = work(fewer, length**2 - spared**2), work(whole, length**2)
    print(f"\nforward and backward of {len(length)} answers, {whole:.0f} tokens, {response:.0f} of them in responses; "
          f"with each prompt once {fewer:.0f}")  # fmt: skip
    for checkpointing in (1, 0):
        for micro in (16, 32, 64) if checkpointing else (16, 32):
            policy.model.gradient_checkpointing_disable()
            if checkpointing:
                policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            policy.model.disable_input_require_grads()

            def update(micro=micro):
                policy.zero_grad(set_to_none=False)
                for rows in common.micro_batches(policy, torch.arange(len(length)), replace(args, micro_batch=micro)):
                    common.token_logps(policy, batch, rows, args).sum().backward()

            update()  # before the peak is reset, so that gradients are there
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            took = seconds(update, 3, warm=1)
            print(f"  checkpointing {checkpointing}, {micro:2} answers a micro-batch: {took:.2f} s, "
                  f"{done / took / 990e12:.0%} of 990 TFLOP/s, {replaced / took / 990e12:.0%} if each ran alone, "
                  f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.1f} GiB above what was there")  # fmt: skip


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
        device = torch.cuda.get_device_name() if run.device.type == "cuda" else f"{platform.machine()} CPU, one thread"
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        shape = f"{flags.size}: {args.problems} problems x {args.group}, at most {new} tokens, {flags.repeats} repeats"
        print(f"\n{time.strftime('%Y-%m-%d')}, {device}, {versions}; {shape}")
        total, tokens = sum(stages.values()), statistics.median(row["tokens"] for row in rows)
        parts = ", ".join(f"{k} {v:.2f} s ({v / total:.0%})" for k, v in stages.items())
        peak = max(row.get("memory_gb", 0) for row in rows)
        print(f"step {total:.2f} s, {tokens:.0f} tokens: {parts}" + (f"; peak memory {peak:.1f} GiB" if peak else ""))
        if flags.size == "2b":
            decode_table(policy, 800)
            batch, ends = ragged(policy, processor, problems, args, run)
            mismatch(policy, batch, ends, args)
            training_table(policy, batch[torch.arange(64, device=run.device)], args)
        samplers = {
            "sample": lambda: common.sample(policy, processor, problems, args, run).mask.sum().item(),
            "stock generate": lambda: stock(policy, processor, problems, args, run),
        }
        if run.device.type == "cuda":
            samplers["stock generate, static cache"] = lambda: stock(policy, processor, problems, args, run, "static")
        rates = {name: [] for name in samplers}
        for i in range(flags.repeats + 1):  # the first round warms up
            for name, f in samplers.items():
                run.begin("bench", i)
                tokens = f()
                run.lap("rollout")
                rates[name] += [tokens / run.laps["seconds_rollout"]] * (i > 0)
        print()
        mine = statistics.median(rates["sample"])
        for name, x in rates.items():
            ratio = f"; ours is {mine / statistics.median(x):.1f} times as fast" * (name != "sample")
            print(f"{name}: {statistics.median(x):.0f} tokens/s (from {min(x):.0f} to {max(x):.0f}){ratio}")


if __name__ == "__main__":
    main()
