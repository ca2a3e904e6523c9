"""Makes the toy world of readme.md: a 1 M-parameter Qwen2-VL, a 3 M teacher, drawn problems; and measures it.

python -m data.toy.prepare                 draw the pictures that are missing (seconds), write worn.jsonl
python -m data.toy.prepare --calibrate     measure the shipped world again (--limit 100: on 100 rows of each set)
python -m data.toy.prepare --rebuild       all of it from the seed: tokenizer, models, rows, table (a GPU, minutes)
python -m data.toy.prepare --rebuild --seed 1      another world, in data/toy/seed1: other corpora, habits, models, rows
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that one seed pretrains one model

import common  # isort: skip  # first: it says in a sentence which package is missing
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.vision_utils import get_vision_position_ids

import grpo
from data.toy import world

HERE = Path(__file__).parent  # of the world in hand: other seeds have folders of their own in it

FRESH = 32 if torch.cuda.is_available() else 8  # rollouts a row in the calibration, a multiple of 8
WORKERS = 12 if torch.cuda.is_available() else 2  # processes that sample

# ---------------------------------------------------------------------------------------------- tokenizer and models

SPECIAL = [
    f"<|{x}|>" for x in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
]
TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    """Byte-level BPE that has merged the prompts' words only: each character of a solution is a token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
    bpe.train_from_iterator(
        [*world.CHOICE, *world.CROSS, "user\n", "assistant\n", *(f"\n({x}) " for x in "ABCD")], trainer
    )
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in ("<answer>", "</answer>")])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   extra_special_tokens=SPECIAL, chat_template=TEMPLATE)  # fmt: skip


def make_model(recipe, tokenizer):
    """A Qwen2-VL of the recipe's size with random weights."""
    start, _, end, vision_start, vision_end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL)
    text = {
        "vocab_size": math.ceil(len(tokenizer) / 8) * 8 + recipe.spare, "hidden_size": recipe.hidden,
        "intermediate_size": recipe.mlp, "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": start, "eos_token_id": end, "pad_token_id": start,
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": recipe.vision, "num_heads": 4, "mlp_ratio": 2, "hidden_size": recipe.hidden}
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
                      vision_start_token_id=vision_start, vision_end_token_id=vision_end, tie_word_embeddings=True)
    )  # fmt: skip
    # near-greedy chat settings, like those of the published model, which a sampler must not fall for
    model.generation_config = GenerationConfig(bos_token_id=start, pad_token_id=start, eos_token_id=[end, start],
                                               do_sample=True, temperature=0.01, top_k=1, top_p=0.001)  # fmt: skip
    return model


def make_images():
    return Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * world.CELLS)


# ------------------------------------------------------------------------------------------------ corpus, pretraining


def make_corpus(name, tokenizer):
    """-> ids (N, L) right-padded; labels (N, L), -100 outside answers; cells (N, CELLS) index tiles (n, 4, 1176).

    A tile's four patches stand together in the patch order of its picture too, so its tiles make up its patches.
    """
    recipe, rng, (rates, _) = world.RECIPES[name], random.Random(f"{world.SEED}/{name}"), world.habits(name)
    prompts, answers, cells, tiles = [], [], [], {}
    for part in recipe.parts:
        for row in world.make_problems(part, round(recipe.problems * part.share), rng, set()):
            answer = world.work(world.chain_of(row["draw"]), rates, rng)
            if rng.random() < part.direct:
                answer = (row["solution"] if part.choice else answer)[-1:]
            answers.append("".join(answer) + "<|im_end|>")
            content = [{"type": "image"}, {"type": "text", "text": common.prompt_text(row)}]
            prompts.append([{"role": "user", "content": content}])
            keys = [(part.dark, *(cell or ("", 0, 0))) for cell in row["draw"]["cells"]]
            cells.append([tiles.setdefault(key, len(tiles)) for key in keys])
    prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(
        [prompt.replace("<|image_pad|>", "<|image_pad|>" * world.CELLS) for prompt in prompts]
    ).input_ids
    answers = tokenizer(answers).input_ids
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids, labels = np.full((2, len(prompts), width), [[[tokenizer.pad_token_id]], [[-100]]])
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : len(p) + len(a)], labels[i, len(p) : len(p) + len(a)] = p + a, a
    patches = make_images()([world.draw_tile(*key) for key in tiles], return_tensors="pt")["pixel_values"]
    return torch.from_numpy(ids), torch.from_numpy(labels), torch.tensor(cells), patches.view(len(tiles), 4, -1)


PATCHES = 4 * world.CELLS  # 14 x 14 px each


def picture_attention(module, q, k, v, *args, **kwargs):
    """Attention within pictures of `PATCHES` patches: three (1, heads, patches, head) -> (1, patches, heads, head).

    The stock tower loops over the pictures in Python, except for an attention that it takes for a flash one.
    """
    q, k, v = (x[0].unflatten(1, (-1, PATCHES)).transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)[None], None


AttentionInterface.register("flash_pictures", picture_attention)


def answer_loss(model, ids, labels, pixels, first, positions, places):
    """Mean negative log-likelihood of the labels -> scalar: the stock forward, but it never waits for the device.

    ids, labels: (B, L) right-padded; pixels: (B, PATCHES, 1176). All pictures have one shape and stand at one place, so
    these are known: the first image column, M-RoPE positions (3, 1, L), each patch's row and column (PATCHES, 2).
    """
    B, lm = len(ids), model.model.language_model
    features = model.model.visual(
        pixels.flatten(0, 1),
        None,
        position_ids=places.repeat(B, 1),
        cu_seqlens=torch.arange(B + 1) * PATCHES,
        max_seqlen=PATCHES,
    ).pooler_output.view(B, world.CELLS, -1)
    embeds = lm.embed_tokens(ids)
    embeds = torch.cat([embeds[:, :first], features, embeds[:, first + world.CELLS :]], 1)  # (B, L, hidden)
    positions, causal = positions.expand(3, B, -1), {"full_attention": None}  # padding on the right needs no mask
    hidden = lm(inputs_embeds=embeds, attention_mask=causal, position_ids=positions, use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def layout(model, ids):
    """One row's ids (L,) -> what `answer_loss` takes as known, on the model's device."""
    seen, grid = ids[None].cpu() == model.config.image_token_id, torch.tensor([[1, 2 * world.ROWS, 2 * world.COLUMNS]])
    positions, _ = model.model.get_rope_index(ids[None].cpu(), seen.long(), grid)
    return seen[0].int().argmax().item(), positions.to(model.device), get_vision_position_ids(grid, 2).to(model.device)


def pretrain(name, tokenizer):
    """A new model, taught its recipe's corpus; on the GPU if there is one.

    Steps of so small a model are all launches: on a GPU one is recorded as a CUDA graph and replayed.
    """
    recipe, device = world.RECIPES[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(world.SEED)
    model = make_model(recipe, tokenizer).to(device)
    ids, labels, cells, tiles = (x.to(device) for x in make_corpus(name, tokenizer))
    order, known = torch.randint(len(ids), (recipe.steps, recipe.batch)).to(device), layout(model, ids[0])
    rows, lr, graph = order[0].clone(), torch.zeros((), device=device), None
    optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.98), weight_decay=0.01, fused=True,
                                  capturable=device.type == "cuda")  # fmt: skip
    model.model.visual.config._attn_implementation = "flash_pictures"

    def update():
        loss = answer_loss(model, ids[rows], labels[rows], tiles[cells[rows]].flatten(1, 2), *known)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    bar = tqdm(range(recipe.steps), f"pretraining the {name}", unit="step")
    for i in bar:
        rows.copy_(order[i])
        lr.fill_(recipe.lr * min((i + 1) / 100, 0.525 + 0.475 * math.cos(math.pi * i / recipe.steps)))
        if device.type == "cuda" and i == 3:  # by now the optimiser has its state
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = update()
        if graph:
            graph.replay()
        else:
            loss = update()
        if i % 250 == 249:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model


# ------------------------------------------------------------------------------------------------- rollouts and pool


@cache
def load(model, runs):
    """A sampling process's own run, policy and processor."""
    args = arguments(runs, name=f"{model.name}-{os.getpid()}")
    run = common.start(args)
    return run, common.load_policy(model, args, run), common.Processor(model, args)


def arguments(runs, **changed):
    """The settings of grpo.py --toy, so that what is measured here is what the arms will see."""
    changed = {"runs": runs, "seed": world.SEED} | changed
    return common.parse(grpo.Args, ["--toy", *(x for k, v in changed.items() for x in (f"--{k}", str(v)))])


def roll(job):
    """One process's share of the answers, see `sampler`."""
    model, rows, group, hint, greedy, key, runs = job
    run, policy, processor = load(model, runs)
    for row in rows:
        if not Path(row["image"]).exists():  # candidates
            world.draw_row(row, "")
    args, size, answers = arguments(runs, group=group), max(1, 4096 // group), []
    for start in range(0, len(rows), size):
        problems = [row for row in rows[start : start + size] for _ in range(group)]
        hints = ["".join(row["solution"][: round(hint * (len(row["solution"]) - 1))]) for row in problems]
        run.begin(key, start)
        prefix = processor.tokenizer(hints).input_ids if hint else None
        batch = common.sample(policy, processor, problems, args, run, prefix, greedy)
        answers += zip(batch.text, common.reward(batch, problems)[1], strict=True)
    return [answers[i : i + group] for i in range(0, len(answers), group)]


@contextmanager
def sampler():
    """The arms' own sampler and reward, in several processes, for most of the time goes by on the host -> a function:

    ask(model, rows, key, group, hint, greedy): `group` answers to each row, the first `hint` of its steps given
    -> for each row a list of (text, grade). Another key draws other answers.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as runs, ProcessPoolExecutor(WORKERS, spawn) as pool:

        def ask(model, rows, key, group=1, hint=0, greedy=False):
            cut = [rows[i : i + 50] for i in range(0, len(rows), 50)]
            jobs = [
                (HERE / model, part, group, hint, greedy, (world.SEED, key, hint, i), runs)
                for i, part in enumerate(cut)
            ]
            bar = tqdm(pool.map(roll, jobs), f"{model}, {key}", len(jobs), unit="50 rows", leave=False)
            return [x for done in bar for x in done]

        yield ask


def filtered(ask, rows, key, group):
    """Count `group` more rollouts of each row in its `profile` -> rows of which a tail item's share is right."""
    for row, answers in zip(rows, ask("student", rows, key, group), strict=True):
        grades, profile = [grade for _, grade in answers], row["profile"]
        profile["n"] += group
        profile["correct"] += grades.count("right")
        profile["formatted"] += group - grades.count("unparsed")
    return [row for row in rows if world.TAIL[0] <= row["profile"]["correct"] / row["profile"]["n"] <= world.TAIL[1]]


def select(ask, candidates):
    """Candidates -> (rows never right in all rounds, rows of the tail). `profile` counts a row's rollouts."""
    never, tail = candidates, []
    for row in candidates:
        row["profile"] = {"n": 0, "correct": 0, "formatted": 0}
    for i, group in enumerate(world.ROUNDS):
        rows = never + tail
        tail = filtered(ask, rows, f"filter {i}", group)[: len(candidates) // 40]  # as many as can be needed
        never = [row for row in rows if row["profile"]["correct"] == 0]
        print(f"{len(rows)} candidates x {group} rollouts: {len(never)} never right so far, {len(tail)} in the tail")
    return never, tail


# ------------------------------------------------------------------------------------------------------- calibration


@dataclass
class Figure:
    """A measured share: one value for each item, and the bounds that its mean should keep."""

    name: str
    values: list[float]
    low: float = 0
    high: float = 1

    def __post_init__(self):
        self.n = len(self.values)
        self.mean, self.error = (np.mean(self.values), np.std(self.values) / self.n**0.5) if self.n else (math.nan, 0.0)

    def __str__(self):
        target, met = (
            f"{100 * self.low:g}% to {100 * self.high:g}%",
            "yes" if self.low <= self.mean <= self.high else "**no**",
        )
        target, met = (target, met) if (self.low, self.high) != (0, 1) else ("", "")
        return f"| {self.name} | {target} | {self.mean:.1%} | {2 * self.error:.1%} | {self.n} | {met} |"


def right(group):
    return [grade == "right" for _, grade in group]


def calibrate(limit=0):
    """Measure the shipped world on fresh rollouts, on `limit` rows of each set (0 for all) -> list of Figure."""
    rows = {name: common.load_pool(HERE / f"{name}.jsonl") for name in world.NAMES}
    for kind, name in (("choice", "old choice"), ("free", "old open")):
        rows[name] = [row for row in rows["old"] if row["kind"] == kind]
    rows = {name: random.Random(world.SEED).sample(r, min(limit or len(r), len(r))) for name, r in rows.items()}
    figures, answers = [], {}
    with sampler() as ask:
        for model, name, hint, greedy, low, high in world.TARGETS:
            got = ask(model, rows[name], "calibration", 1 if greedy else FRESH, hint, greedy)
            answers[model, name, hint] = got
            given, how = f", {hint:.0%} of the steps given" * (hint > 0), ", greedy" * greedy
            label = f"{model}, {name}{given}{how}: right"
            figures.append(Figure(label, [np.mean(right(group)) for group in got], low, high))
    base, letters = answers["student", "train", 0], answers["student", "old choice", 0]
    dead = [np.mean([not any(right(group[i : i + 8])) for i in range(0, FRESH, 8)]) for group in base]
    bare = [re.fullmatch("<answer>[A-D]</answer>", text) is not None for [(text, _)] in letters]
    figures.insert(1, Figure("student, train: groups of 8 all wrong", dead, *world.DEAD))
    figures.append(Figure("student, old choice, greedy: bare letter", bare, *world.BARE))
    ways = []  # how each answer came about
    for row, group in zip(rows["train"], base, strict=True):
        for (text, _), won in zip(group, right(group), strict=True):
            chain = "by a right chain" if text.startswith("".join(row["solution"][:-1])) else "by a wrong chain"
            ways.append((chain if "=" in text else "without work", won))
    any_, bounds = (0, 1), {("without work", 0): world.DIRECT, ("without work", 1): world.GUESS,
                            ("by a right chain", 2): world.CHAIN}  # fmt: skip
    for way in ("without work", "by a right chain", "by a wrong chain"):
        label = f"student, train, answers {way}"
        shares = [w == way for w, _ in ways], [won for w, won in ways if w == way], [w == way for w, won in ways if won]
        for i, of in enumerate(("of all answers", "right", "of the right answers")):
            figures.append(Figure(f"{label}: {of}", shares[i], *bounds.get((way, i), any_)))
    figures.append(Figure("student, train: variance that a table critic explains", table_critic(rows["train"], base),
                          *world.CRITIC))  # fmt: skip
    slips = [by_habit(row, text) for row, group in zip(rows["train"], answers["teacher", "train", 0], strict=True)
             for (text, _), won in zip(group, right(group), strict=True) if not won]  # fmt: skip
    figures.append(Figure("teacher, train, wrong answers: first fault is a bad habit's", slips, *world.HABIT))
    return figures


def sentences(text):
    return re.findall("[^;]*;|[^;]+", text)


def table_critic(rows, groups):
    """The share of the variance of returns that V(right so far, sentences left) explains on rows that it was not
    fitted on -> a value for each row, of which it is the mean. The states of an answer are those before its sentences.
    """
    told, folds = [], ([], [])  # (row, state, return)
    for i, (row, group) in enumerate(zip(rows, groups, strict=True)):
        for (text, _), won in zip(group, right(group), strict=True):
            said = sentences(text)
            told += [(i, (said[:j] == row["solution"][:j], len(row["solution"]) - j), won) for j in range(len(said))]
    for i, state, won in told:
        folds[i % 2].append((state, won))
    tables, total = [], np.var([won for *_, won in told]) or math.nan
    for fold in folds:
        returns = {}
        for state, won in fold:
            returns.setdefault(state, []).append(won)
        tables.append({state: np.mean(won) for state, won in returns.items()})
    unexplained = np.zeros(len(rows))
    for i, state, won in told:
        unexplained[i] += (won - tables[1 - i % 2].get(state, 0)) ** 2
    return list(1 - unexplained * len(rows) / (len(told) * total))


def by_habit(row, text):
    """Whether the first wrong sentence of a teacher's answer is the slip of a card for which it has a bad habit."""
    chain, solution, (_, bad) = world.chain_of(row["draw"]), row["solution"], world.habits("teacher")
    said = sentences(text)
    j = next((j for j, pair in enumerate(zip(said, solution, strict=False)) if pair[0] != pair[1]), 0)
    if not 0 < j < len(chain):
        return False
    before = int(re.search(r"(\d+);", solution[j - 1])[1])
    return chain[j] in bad and said[j] == f"{chain[j]}={world.step(before, chain[j])[1]};"


def table(figures):
    """Figures as Markdown, with what they were measured on."""
    device = common.device_name()
    return (
        f"Seed {world.SEED}, {device}, {FRESH} fresh rollouts a row at temperature 1, or one greedy answer.\n\n"
        "| what | target | measured | +- 2 s.e. | over | met |\n| --- | --- | --- | --- | --- | --- |\n"
        + "".join(f"{figure}\n" for figure in figures)
    )


# -------------------------------------------------------------------------------------------------------------- main

FIELDS = ["image", "question", "answer", "kind", "choices", "solution", "solution_source", "teacher", "profile", "draw"]


def check_files():
    """Stop with a sentence if part of the shipped world is missing."""
    for name in [f"{name}.jsonl" for name in world.NAMES] + [f"{name}/model.safetensors" for name in world.RECIPES]:
        if not (HERE / name).exists():
            shipped, seed = "get it back with `git checkout data/toy`, or ", f" --seed {world.SEED}"
            shipped, seed = ("", seed) if world.SEED else (shipped, "")
            raise SystemExit(f"{HERE / name} is missing: {shipped}make a new world with "
                             f"`python -m data.toy.prepare --rebuild{seed}` (a GPU, minutes).")  # fmt: skip


def wear(row):
    """The same question in print that is too worn to be read, if it is multiple choice."""
    if row["kind"] == "free":
        return row
    new = {key: row[key].replace("old", "worn") for key in ("id", "image", "split")}
    return row | new | {"draw": row["draw"] | {"worn": True}}


def draw_missing():
    """Draw the pictures of the shipped rows that are not there yet; those of other rows go first. And those of
    worn.jsonl, which is `old` with its multiple choice in worn print."""
    rows = [row for name in world.NAMES for row in common.read_jsonl(HERE / f"{name}.jsonl")]
    worn = [wear(row) for row in rows if row["split"] == "old"]
    if not (path := HERE / "worn.jsonl").exists() or common.read_jsonl(path) != worn:  # it keeps its time for make
        common.write_text(path, common.jsonl(worn))
    rows += [row for row in worn if row["kind"] == "choice"]
    drawn, now = HERE / "images/rows.sha256", hashlib.sha256(json.dumps([row["draw"] for row in rows]).encode())
    if not drawn.exists() or drawn.read_text() != now.hexdigest():
        shutil.rmtree(drawn.parent, ignore_errors=True)
        drawn.parent.mkdir()
        common.write_text(drawn, now.hexdigest())
    missing = [row for row in rows if not (HERE / row["image"]).exists()]
    for row in tqdm(missing, "drawing", unit="picture", disable=not missing):
        world.draw_row(row, HERE)
    print(f"{HERE}: {len(missing)} of {len(rows)} pictures drawn, the others were there.")


def build_models(folder, names):
    """Tokenizer and models from the seed; the model is saved last."""
    if not torch.cuda.is_available():
        print("There is no GPU: what takes minutes on one takes many hours here.")
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    tokenizer = make_tokenizer()
    for name in names:
        for part in (tokenizer, make_images(), pretrain(name, tokenizer).half()):
            part.save_pretrained(folder / name)


def build_rows():
    """All sets from the seed; the student selects the pool's rows, the teacher answers those for training."""
    tokenizer = make_tokenizer()
    rng, seen = random.Random(f"{world.SEED}/rows"), set()
    draw = lambda parts: [row for count, part in parts for row in world.make_problems(part, count, rng, seen)]
    sets = {name: draw(parts) for name, parts in world.SETS.items()}
    candidates = draw([(world.CANDIDATES, world.POOL)])
    with tempfile.TemporaryDirectory() as scratch, sampler() as ask:
        for i, row in enumerate(candidates):
            row["image"] = f"{scratch}/{i}.png"
        never, tail = select(ask, candidates)
        tail = tail[: round(len(never) * world.TAIL_SHARE / (1 - world.TAIL_SHARE))]
        sets["sparse"] = never[:: world.SPARSE] + tail[:: world.SPARSE]
        sets["train"] = [row for rows in (never, tail) for i, row in enumerate(rows) if i % world.SPARSE]
        for row, [(text, _)] in zip(sets["train"], ask("teacher", sets["train"], "replay"), strict=True):
            row["teacher"] = tokenizer(text).input_ids  # one sample, right or wrong, less its end token
    shutil.rmtree(HERE / "images", ignore_errors=True)
    for name, rows in sets.items():
        rng.shuffle(rows)
        for i, row in enumerate(rows):
            row |= {"image": f"images/{name}-{i:04d}.png", "solution_source": "generator"}
            rows[i] = {"id": f"{name}-{i:04d}", "source": "toy", "split": name} | {key: row.get(key) for key in FIELDS}
        common.write_text(HERE / f"{name}.jsonl", common.jsonl(rows))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="measure the shipped world")
    parser.add_argument("--rebuild", action="store_true", help="make the world anew, measure it, write readme.md")
    parser.add_argument("--limit", type=int, default=0, help="rows of each set to measure, 0 for all")
    parser.add_argument("--seed", type=int, default=world.SEED, help="another one makes another world")
    args = parser.parse_args(argv)
    global HERE
    if args.seed != world.SEED:
        world.SEED, HERE = args.seed, HERE / f"seed{args.seed}"
    if args.rebuild:
        build_models(HERE, world.RECIPES)
        build_rows()
    check_files()
    draw_missing()
    if args.calibrate or args.rebuild:
        text = table(calibrate(args.limit))
        print(text)
    if args.rebuild:
        prose = Path(__file__).with_name("readme.md").read_text(encoding="utf-8").split("## Measured\n")[0]
        if world.SEED:
            prose = f"# The toy world of seed {world.SEED}\n\nWhat it is, the readme above tells.\n\n"
        common.write_text(HERE / "readme.md", f"{prose}## Measured\n\n{text}")  # last: it says that all is there


if __name__ == "__main__":
    main()
