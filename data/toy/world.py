"""What the toy world is: its knobs, chains of cards and pictures. readme.md tells why, and prepare.py makes it."""

import os
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# ------------------------------------------------------------------------------------------------------------- knobs

KIN = False  # whether the teacher's bad habits are all its student's, too: changed.py
SEED = 0  # of corpora, habits, models and rows; prepare.py --seed makes another world
VALUES = range(100, 1000)  # no right or careless result leaves it: three digits, always
STARTS = (200, 799)
CARDS = [f"{op}{digit}{zero}" for zero in ("", "0") for op in "+-" for digit in range(1, 10)]
ROWS, COLUMNS = 3, 4  # of cells of 28 x 28 px, one image token each
CELLS = ROWS * COLUMNS

OPEN = [
    "Start from the boxed number and apply each card in order. What is the result?",
    "Apply the cards one by one to the boxed number. Find the final value.",
    "What number do you get after all the cards?",
]
CHOICE = [*OPEN, "Which option equals the result of all the cards?", "Choose the correct final value."]
CROSS = [
    "Read down the columns and evaluate the whole puzzle. Report the outcome.",
    "Going down each column, which value comes out at the end?",
]
PASTEL = [(255, 205, 205), (205, 235, 205), (205, 215, 255), (250, 235, 180)]  # fills, light style; without meaning
FONT = (17, 15)  # size of the digits, light and dark style
WORN = (0.5, 0.15)  # contrast that is left and deviation of the noise, in worn print
LOUD = [(255, 90, 90), (90, 230, 120), (110, 160, 255), (250, 210, 60)]  # outlines, dark style


@dataclass(frozen=True)
class Part:
    """Part of a corpus or set: chains of so many cards, each wanted hard with one of the chances `hard` (a chain).

    fall: by how much of itself that chance has fallen at the last card.
    """

    cards: tuple[int, int]
    hard: tuple[float, ...]
    fall: float = 0.0
    dark: bool = False
    choice: bool = False
    share: float = 0.0  # of the corpus
    direct: float = 0.0  # share answered without work


@dataclass(frozen=True)
class Recipe:
    """A model's corpus, habits, size and schedule."""

    parts: tuple[Part, ...]
    bad: float  # share of the cards with a bad habit
    slips: tuple[float, float]  # chance of a slip on a hard step with such a card, drawn once per card
    careful: float  # the same for the other cards
    hidden: int
    layers: int
    heads: int
    mlp: int
    vision: int
    spare: int  # embedding rows beyond the tokenizer's: of the real pair, too, the teacher is the wider one
    steps: int
    lr: float
    problems: int = 120_000
    batch: int = 128


RECIPES = {
    "student": Recipe(
        (Part((1, 4), (0.15,), share=0.25, direct=0.1),
         Part((3, 6), (0.3, 0.6, 0.9), share=0.4, direct=0.4),
         Part((3, 6), (0.6,), choice=True, share=0.15, direct=0.85),
         Part((1, 6), (0.2, 0.5, 0.8), dark=True, share=0.2, direct=0.3)),
        bad=0.5, slips=(0.9, 0.97), careful=0.0,
        hidden=128, layers=4, heads=4, mlp=384, vision=64, spare=0, steps=5000, lr=2e-3,
    ),
    "teacher": Recipe(
        (Part((1, 4), (0.15,), share=0.2, direct=0.05),
         Part((3, 6), (0.3, 0.6, 0.9), share=0.4, direct=0.05),
         Part((3, 6), (0.6,), choice=True, share=0.15, direct=0.85),
         Part((1, 6), (0.2, 0.5, 0.8), dark=True, share=0.25, direct=0.05)),
        bad=0.25, slips=(0.8, 0.9), careful=0.02,
        hidden=192, layers=6, heads=6, mlp=576, vision=96, spare=8, steps=4000, lr=1e-3,
    ),
}  # fmt: skip

SETS = {
    "old": [(220, Part((5, 6), (0.9,), choice=True)), (99, Part((1, 4), (0.3,)))],
    "cross": [(400, Part((3, 6), (0.6,), dark=True))],
    "easy": [(200, Part((1, 4), (0.15,)))],
}
NAMES = ("train", "sparse", *SETS)
POOL, CANDIDATES = Part((5, 6), (1.0,), fall=0.75), 3000
ROUNDS = (16, 16, 32, 64, 128)  # rollouts a candidate: it stays while none is right, or while the share fits the tail
TAIL, TAIL_SHARE = (0.5, 0.7), 0.055  # right, of a tail item's rollouts; tail items, of the pool
SPARSE = 4  # every fourth selected row is for evaluation, the others for training

TARGETS = [  # model, rows, share of the steps given, greedy, bounds of the share that is right
    ("student", "train", 0, False, 0.03, 0.04),
    ("student", "train", 0.25, False, 0, 1),
    ("student", "train", 0.5, False, 0.25, 1),
    ("student", "train", 0.75, False, 0, 1),
    ("student", "sparse", 0, False, 0, 1),
    ("student", "sparse", 0, True, 0, 1),
    ("student", "cross", 0, True, 0.15, 0.25),
    ("student", "easy", 0, True, 0.6, 1),
    ("student", "old choice", 0, True, 0.21, 0.29),
    ("student", "old choice", 0.15, True, 0, 0.25),  # the start is given, so that work is shown
    ("student", "old open", 0, True, 0, 1),
    ("teacher", "train", 0, False, 0.1, 0.6),
    ("teacher", "sparse", 0, False, 0.1, 0.6),
    ("teacher", "sparse", 0, True, 0, 1),
    ("teacher", "cross", 0, True, 0.5, 0.6),
    ("teacher", "easy", 0, True, 0, 1),
]
DEAD, BARE = (0.85, 0.97), (0.9, 1)  # bounds: all-wrong groups of 8 on train; bare letters in old choice
DIRECT, GUESS = (0.3, 0.4), (0, 0.005)  # answers without work, on train; those of them that are right
CHAIN, CRITIC, HABIT = (0.6, 1), (0.3, 1), (0.6, 1)  # see `calibrate`

# --------------------------------------------------------------------------------------------------- chains of cards


def step(value, card):
    """-> the right result and the careless one, which are equal where the step is easy.

    The careless drop a carry, or borrow twice: ten times the card's unit is lost. A result never grows by a slip, and
    what is less stays less under any card, so that slips add up and never cancel.
    """
    amount, unit = int(card), 10 if card[2:] else 1
    hard = value // unit % 10 + amount // unit not in range(10)
    return value + amount, value + amount - 10 * unit * hard


@cache
def fitting(value, hard):
    """Cards that keep the value in range and are as hard as wanted; else any that keep it in range."""
    legal = [card for card in CARDS if all(result in VALUES for result in step(value, card))]
    return [card for card in legal if len({*step(value, card)}) == 1 + hard] or legal


def make_chain(part, rng):
    """-> ["137", "+8", "-20", ...]: the start and its cards."""
    value, chance, n = rng.randint(*STARTS), rng.choice(part.hard), rng.randint(*part.cards)
    chain = [str(value)]
    for k in range(n):
        hard = rng.random() < chance * (1 - part.fall * k / max(n - 1, 1))
        chain.append(rng.choice(fitting(value, hard)))
        value, _ = step(value, chain[-1])
    return chain


def habits(name, seed=None, kin=None):
    """A model's chance of a slip on a hard step with each card -> {card: rate}, and its cards with a bad habit."""
    seed, kin = SEED if seed is None else seed, KIN if kin is None else kin
    recipe, rng = RECIPES[name], random.Random(f"{seed}/{name}/habits")
    cards = habits("student", seed)[1] if kin and name == "teacher" else CARDS
    bad = rng.sample(cards, round(recipe.bad * len(CARDS)))  # independent of each other: no single switch mends them
    return {card: rng.uniform(*recipe.slips) if card in bad else recipe.careful for card in CARDS}, bad


def work(chain, rates=None, rng=None):
    """Sentences of a worked solution: the start, a step a card, the answer; right unless rates are given.

    rates: {card: chance of a slip on a hard step}. The work goes on from the wrong value, and starts over where that
    leads out of range.
    """
    while True:
        value, sentences = int(chain[0]), [f"{chain[0]};"]
        for card in chain[1:]:
            value = step(value, card)[rates is not None and rng.random() < rates[card]]
            sentences.append(f"{card}={value};")
            if value not in VALUES:
                break
        else:
            return [*sentences, f"<answer>{value}</answer>"]


def make_options(answer, letter, rng):
    """Four values {b, b + 10, b - 10, b +- 1 or 2} within VALUES, whose ends meet: any may be right, at `letter`."""
    pattern = [0, 10, -10, rng.choice((1, -1, 2, -2))]
    gaps = rng.sample(pattern, 4)
    gaps = [gap - gaps["ABCD".index(letter)] for gap in gaps]
    return [str(VALUES[(answer - VALUES[0] + gap) % len(VALUES)]) for gap in gaps]


def make_problems(part, count, rng, seen):
    """`count` rows without id and image, their picture recipes (`draw`) not in `seen`, which grows."""
    rows = []
    while len(rows) < count:
        chain = make_chain(part, rng)
        solution, choices = work(chain), []
        answer = re.search(r"\d+", solution[-1])[0]
        if part.choice:
            letter = "ABCD"[len(rows) % 4]
            choices, answer = make_options(int(answer), letter, rng), letter
            solution[-1] = f"<answer>{answer}</answer>"
        texts, cells = [*chain[0], *chain[1:]], [None] * CELLS
        places = sorted(rng.sample(range(CELLS), len(texts))) if part.dark else range(len(texts))
        for place, text in zip(places, texts, strict=True):
            cells[reading(part.dark)[place]] = [text, rng.randrange(4), rng.randint(-1, 1)]  # and its colour and shift
        draw = {"dark": part.dark, "cells": cells}
        if str(draw) not in seen:
            seen.add(str(draw))
            question = rng.choice(CROSS if part.dark else CHOICE if part.choice else OPEN)
            rows.append({"question": question, "answer": answer, "kind": "choice" if part.choice else "free",
                         "choices": choices, "solution": solution, "draw": draw})  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------- pictures


def reading(dark):
    """The cells in reading order: along the rows, or down the columns."""
    return [i * COLUMNS + j for j in range(COLUMNS) for i in range(ROWS)] if dark else range(CELLS)


def chain_of(draw):
    """The chain that a picture shows: three digits of the start, then its cards."""
    texts = [draw["cells"][i][0] for i in reading(draw["dark"]) if draw["cells"][i]]
    return ["".join(texts[:3]), *texts[3:]]


def hard_steps(output, chain):
    """The hard steps that an answer takes while all before them are right -> [(card, whether it is right)]."""
    start, *said = output.split(";")
    value, found = int(chain[0]), []
    for card, sentence in zip(chain[1:] if start == chain[0] else [], said, strict=False):
        right, careless = step(value, card)
        found += [(card, sentence == f"{card}={right}")] * (right != careless)
        if sentence != f"{card}={right}":
            break
        value = right
    return found


@cache
def draw_tile(dark, text, colour, shift):
    """A cell of 28 x 28 px, one image token; an empty text is a blank."""
    tile = Image.new("RGB", (28, 28), (28, 28, 40) if dark else "white")
    if text:
        pen, ink = ImageDraw.Draw(tile), (235, 235, 235) if dark else (25, 25, 25)
        look = {"outline": LOUD[colour], "width": 2} if dark else {"fill": PASTEL[colour]}
        low, middle, high = 2 + shift, 14 + shift, 26 + shift
        shape, height = text[0] + text[2:], middle
        if shape == "+":
            pen.ellipse((low, low, high, high), **look)
        elif shape == "-":
            pen.rectangle((low + 1, low + 1, high - 1, high - 1), **look)
        elif shape == "+0":
            pen.polygon([(middle, low), (high, high), (low, high)], **look)
            height = middle + 4
        elif shape == "-0":
            pen.polygon([(low, low), (high, low), (middle, high)], **look)
            height = middle - 4
        else:  # a digit of the start
            pen.rectangle((0, 2, 27, 25), **({"outline": ink, "width": 2} | look))
        pen.text((middle, height), text.strip("+-")[0], ink, ImageFont.load_default(FONT[dark]), "mm")
    return tile


def draw_row(row, folder):
    """Draw the row's picture below the folder, whole or not at all."""
    picture, path = Image.new("RGB", (28 * COLUMNS, 28 * ROWS)), Path(folder, row["image"])
    for i, cell in enumerate(row["draw"]["cells"]):
        tile = draw_tile(row["draw"]["dark"], *(cell or ("", 0, 0)))
        picture.paste(tile, (i % COLUMNS * 28, i // COLUMNS * 28))
    if row["draw"].get("worn"):
        contrast, deviation = WORN
        noise = np.random.default_rng([*path.name.encode()]).normal(0, deviation, (picture.height, picture.width, 3))
        picture = Image.fromarray(
            np.uint8(255 * np.clip(0.5 + (np.array(picture) / 255 - 0.5) * contrast + noise, 0, 1))
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    picture.save(new, "png")
    new.replace(path)
