"""A tiny random world for the tests: a two-layer Qwen2-VL, its tokenizer and pools of drawn numbers, built anew in each
session. Properties are tested on it, so that no test of a property depends on data/toy or on training."""

import json
import os
import random
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # for subprocesses, too

import pytest
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

import common
import grpo
from data import gates

torch.set_num_threads(1)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = [(84, 84), (56, 84), (84, 28), (112, 56), (28, 140)]  # 9, 6, 3, 8 and 5 image tokens
TINY = dict(
    instruction="", problems=4, group=4, max_new_tokens=20, max_pixels=84 * 84, steps=2, warmup=1, weight_decay=0.0,
    minibatches=2, micro_batch=4, checkpointing=0, gates="off", save_every=100, eval_every=0,
)  # fmt: skip


def build_tokenizer():
    """Bytes and a few merges, the special tokens of Qwen2-VL, and two added tokens that are not special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=SPECIAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.train_from_iterator(["Which number is it?\nuser\nassistant\n(A) (B)"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        extra_special_tokens=SPECIAL[1:2] + SPECIAL[3:])  # fmt: skip
    tokenizer.add_tokens(["<answer>", "</answer>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer):
    """Random weights, large enough that tokens, images and positions matter; an answer ends now and then, by either end
    token. Like the published model it has padded rows in its embedding and near-greedy generation settings."""
    torch.manual_seed(0)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    text = dict(
        vocab_size=len(tokenizer) + 8, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]), bos_token_id=None,
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], tie_word_embeddings=True,
    )  # fmt: skip
    vision = dict(depth=2, embed_dim=32, num_heads=2, mlp_ratio=2, hidden_size=64, patch_size=14, spatial_merge_size=2,
                  temporal_patch_size=2, initializer_range=0.2)  # fmt: skip
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"], tie_word_embeddings=True,
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    ))  # fmt: skip
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    with torch.no_grad():
        model.lm_head.weight[ends] = torch.tensor([[0.4], [0.28]]) * torch.randn(2, 64)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.001, temperature=0.01,
                                               repetition_penalty=1.05, eos_token_id=ends)  # fmt: skip
    return model


def build_rows(folder, name, n):
    """n drawn numbers, on images of several sizes, every third with options -> <folder>/<name>.jsonl."""
    draw, rows = random.Random(name), []
    for i in range(n):
        number, image = draw.randrange(100), f"images/{name}{i}.png"
        picture = Image.new("RGB", SIZES[i % len(SIZES)], draw.choice(["white", "yellow", "pink"]))
        ImageDraw.Draw(picture).text((6, 8), str(number), fill="black")
        picture.save(folder / image)
        choices = [str(number - 1), str(number)] if i % 3 == 2 else []
        answer = "B" if choices else str(number)
        rows.append(dict(
            id=f"{name}{i}", source="tiny", split=name, image=image, question="Which number is it?"[: 10 + i % 10],
            answer=answer, kind="choice" if choices else "free", choices=choices, solution_source="drawn", teacher=None,
            solution=["I look at it.", f"I see {number}.", f"So <answer>{answer}</answer>"], profile=None,
        ))  # fmt: skip
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The folder with student/, train.jsonl (23 rows), sparse.jsonl (7) and old.jsonl (3)."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "images").mkdir()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    model.save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=84 * 84).save_pretrained(folder / "student")
    for name, n in dict(train=23, sparse=7, old=3).items():
        build_rows(folder, name, n)
    return folder


@pytest.fixture(scope="session")
def make_args(world, tmp_path_factory):
    """make_args(arm=grpo, **overrides) -> the arm's Args for the tiny world, in a runs folder of its own."""

    def make(arm=grpo, **overrides):
        places = dict(
            model=str(world / "student"), pool=str(world / "train.jsonl"), runs=str(tmp_path_factory.mktemp("runs")),
            eval=f"{world / 'sparse.jsonl'},{world / 'old.jsonl'}",
        )  # fmt: skip
        small = dict(teacher=str(world / "student"), value_steps=3, critic_lr=1e-3)
        prior = {f.name: small[f.name] for f in fields(arm.Args) if f.name in small}
        return replace(arm.Args(), **(places | prior | TINY | overrides))

    return make


@pytest.fixture(scope="session")
def load(make_args):
    """load(**overrides) -> namespace of args, run, policy, processor, pool: what `main` sets up first."""

    def load(args=None, **overrides):
        args = args or make_args(**overrides)
        run = common.start(args)
        policy, processor = common.load_policy(args.model, args, run), common.Processor(args.model, args)
        return SimpleNamespace(args=args, run=run, policy=policy, processor=processor, pool=common.load_pool(args.pool))

    return load


@pytest.fixture(scope="session")
def stock(world):
    """The published model code with the same weights, for one answer at a time."""
    return Qwen2VLForConditionalGeneration.from_pretrained(world / "student").eval()


def banned(arm):
    """Every id that must never be sampled: special tokens but the two ends, and the padded tail of the embedding."""
    tokenizer = arm.processor.tokenizer
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    width = arm.policy.model.config.text_config.vocab_size
    return [i for i in range(width) if i >= len(tokenizer) or (i in tokenizer.all_special_ids and i not in ends)]


def inputs(arm, problem, answer=()):
    """What the published model wants to see of one problem, without any padding."""
    prompt = arm.processor.encode(problem)
    ids = torch.tensor([prompt.ids + list(answer)])
    image = (ids == arm.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    assert image.sum() == prompt.grid.prod() / 4
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=image, pixel_values=prompt.pixels,
                image_grid_thw=prompt.grid)  # fmt: skip


def answers(batch):
    """The ids of each response, taken from its masks -> list of (forced ids, sampled ids)."""
    T = batch.mask.shape[1]
    rows = zip(batch.ids[:, -T:], batch.forced > 0, batch.mask > 0, strict=True)
    return [(ids[forced].tolist(), ids[sampled].tolist()) for ids, forced, sampled in rows]


def stock_logps(stock, arm, problem, forced, sampled):
    """Log-probs of a whole response by the published forward, one answer at a time, without padding or cache."""
    answer = forced + sampled
    logits = stock(**inputs(arm, problem, answer)).logits[0, -len(answer) - 1 : -1]
    return gather(arm, logits, answer)


def gather(arm, logits, ids):
    """Log-probs of n ids under n rows of raw logits, at the arm's temperature, over all that can be sampled."""
    logits[:, banned(arm)] = -torch.inf
    return (logits / arm.args.temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def close(a, b, tolerance=1e-5):
    return (a - b).abs().max().item() < tolerance


def alternate(batch, problems):
    """A stand-in for `common.reward` under which every group is mixed: every second answer is right."""
    right = torch.arange(len(batch.text)) % 2 == 0
    return right.float(), ["right" if x else "wrong" for x in right]


@pytest.fixture
def mixed(monkeypatch):
    """Mixed groups everywhere: the random model itself never answers anything."""
    monkeypatch.setattr(common, "reward", alternate)


# ---- the arms with a prior


@pytest.fixture(scope="session")
def rich(world):
    """The training pool with solutions of 4 to 8 sentences and stored teacher answers of 3 to 7 -> its path."""
    tokenizer, rows = (
        PreTrainedTokenizerFast.from_pretrained(world / "student"),
        common.read_jsonl(world / "train.jsonl"),
    )
    for i, row in enumerate(rows):
        told = f"<answer>{row['answer']}</answer>"
        row["solution"] = [f"Step {'abcdefgh'[k]} {'of it ' * ((i + k) % 3)}is done. " for k in range(3 + i % 5)] + [
            told
        ]
        stored = "".join(f"I look {'again ' * ((i + k) % 2)}at {k}.\n" for k in range(2 + i % 5)) + told
        row["teacher"] = tokenizer(stored).input_ids + [tokenizer.eos_token_id]
    (world / "rich.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(world / "rich.jsonl")


@pytest.fixture(scope="session")
def teacher(world, tmp_path_factory):
    """A checkpoint of the student's family with other weights -> its folder."""
    folder, model = tmp_path_factory.mktemp("teacher"), common.load_model(world / "student", torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(world / "student").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def watch(monkeypatch):
    """watch(arm, args) runs arm.main, less its last answers -> what each update saw, and the weights at the end.

    batches: (problems, batch) a step; advs: (B, T) a step; ratios: log-ratios (b, T) a micro-batch; gradients, norms
    before clipping and what was clipped, {name: tensor} a minibatch; metrics; weights.
    """

    def gradient(policy):
        trained = ((n.removeprefix("model."), p) for n, p in policy.named_parameters() if p.requires_grad)
        return {n: p.grad.full_tensor().clone() for n, p in trained}

    def watch(arm, args):
        seen = SimpleNamespace(batches=[], advs=[], ratios=[], gradients=[], norms=[], clipped=[])
        begin, sample, clip, loss = common.Run.begin, common.sample, common.clip_gradient, arm.policy_loss
        lap, now, parts = common.Run.lap, SimpleNamespace(stage=None), []

        def begin_(run, *key):
            now.stage = key[0] if isinstance(key[0], int) else None
            begin(run, *key)

        def sample_(policy, processor, problems, *rest, **more):
            batch = sample(policy, processor, problems, *rest, **more)
            if now.stage is not None:
                seen.batches.append((problems, batch))
                now.stage, seen.policy = None, policy
            return batch

        def loss_(logp, old_logp, adv, args):
            parts.append(adv)
            seen.ratios.append((logp - old_logp).detach())
            return loss(logp, old_logp, adv, args)

        def clip_(policy, max_norm):
            if max_norm == float("inf"):
                return clip(policy, max_norm)  # the norm of a term, for the log
            seen.gradients.append(gradient(policy))
            seen.norms.append(clip(policy, max_norm))
            seen.clipped.append(gradient(policy))
            return seen.norms[-1]

        def lap_(run, name):
            if name == "update":
                seen.advs.append(torch.cat(parts))
            parts.clear()
            lap(run, name)

        def checkpoint_(policy, *rest):
            common.refresh(policy)
            seen.weights = policy.sampler.state_dict()  # what the checkpoint would hold

        with monkeypatch.context() as m:
            m.setattr(common.Run, "begin", begin_)
            m.setattr(common.Run, "lap", lap_)
            m.setattr(common, "sample", sample_)
            m.setattr(common, "save_checkpoint", checkpoint_)
            m.setattr(gates, "audit", lambda *_: None)
            m.setattr(common, "write_outputs", lambda *_: None)
            m.setattr(common, "clip_gradient", clip_)
            m.setattr(arm, "policy_loss", loss_)
            arm.main(args)
        folder = Path(args.runs) / f"{args.name}-s{args.seed}"
        seen.metrics = common.read_jsonl(folder / "metrics.jsonl")
        seen.problems, seen.batch = seen.batches[0]
        return seen

    return watch


def equal(a, b, tolerance=1e-5):
    """Two gradients agree, as measured against the largest entry of each tensor."""
    assert a.keys() == b.keys() and len(a) > 20
    return all(close(a[k], b[k], tolerance * b[k].abs().max().item() + 1e-9) for k in a)
