"""What the toy world is: its knobs, chains of cards and pictures. `prepare.py` tells what it is for, and makes it."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

# ------------------------------------------------------------------------------------------------------------- knobs

SEED = 0
VALUES = range(100)  # no right or careless result leaves it
STARTS = (2, 60)
CARDS = [f"{op}{d}" for op, digits in (("+", range(1, 10)), ("-", range(1, 10)), ("x", range(2, 6))) for d in digits]
TIMES = ["x2", "x2", "x3", "x4", "x5"]  # 30 % of the cards that are wanted hard are drawn from these

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
LOUD = [(255, 90, 90), (90, 230, 120), (110, 160, 255), (250, 210, 60)]  # outlines, dark style


@dataclass(frozen=True)
class Part:
    """Part of a corpus or set: chains of so many cards, each wanted hard with one of the chances `hard` (a chain)."""

    cards: tuple[int, int]
    hard: tuple[float, ...]
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
    problems: int = 60_000
    batch: int = 128


RECIPES = {
    "student": Recipe(
        (Part((1, 4), (0.15,), share=0.35, direct=0.15),
         Part((3, 8), (0.3, 0.6, 0.8), share=0.35, direct=0.6),
         Part((3, 7), (0.6,), choice=True, share=0.15, direct=0.85),
         Part((1, 6), (0.1, 0.4, 0.7), dark=True, share=0.15, direct=0.3)),
        bad=1.0, slips=(0.35, 0.8), careful=0.0,
        hidden=128, layers=4, heads=4, mlp=384, vision=64, spare=0, steps=3000, lr=2e-3,
    ),
    "teacher": Recipe(
        (Part((1, 4), (0.15,), share=0.20, direct=0.05),
         Part((3, 8), (0.3, 0.6, 0.8), share=0.40, direct=0.05),
         Part((3, 7), (0.6,), choice=True, share=0.15, direct=0.85),
         Part((1, 7), (0.1, 0.4, 0.7), dark=True, share=0.25, direct=0.05)),
        bad=0.4, slips=(0.5, 0.8), careful=0.03,
        hidden=192, layers=6, heads=6, mlp=576, vision=96, spare=8, steps=2500, lr=1e-3,
    ),
}  # fmt: skip

SETS = {
    "old": [(220, Part((3, 7), (0.6,), choice=True)), (99, Part((1, 4), (0.3,)))],
    "cross": [(400, Part((2, 6), (0.4,), dark=True))],
    "easy": [(200, Part((1, 4), (0.15,)))],
}
NAMES = ("train", "sparse", *SETS)
POOL, CANDIDATES = Part((5, 7), (0.8,)), 20_000
ROUNDS = (16, 16, 32, 64)  # rollouts a candidate: it stays while none is right, or while the share fits the tail
TAIL, TAIL_SHARE = (0.4, 0.6), 0.05  # right, of a tail item's rollouts; tail items, of the pool
SPARSE = 4  # every fourth selected row is for evaluation, the others for training

TARGETS = [  # model, rows, share of the steps given, greedy, bounds of the share that is right
    ("student", "train", 0, False, 0.03, 0.04),
    ("student", "train", 0.25, False, 0, 1),
    ("student", "train", 0.5, False, 0.25, 1),
    ("student", "train", 0.75, False, 0, 1),
    ("student", "sparse", 0, False, 0, 1),
    ("student", "sparse", 0, True, 0, 1),
    ("student", "cross", 0, True, 0.12, 0.3),
    ("student", "easy", 0, True, 0.6, 1),
    ("student", "old choice", 0, True, 0.18, 0.32),
    ("student", "old open", 0, True, 0, 1),
    ("teacher", "train", 0, False, 0.1, 0.6),
    ("teacher", "sparse", 0, False, 0.1, 0.6),
    ("teacher", "sparse", 0, True, 0, 1),
    ("teacher", "cross", 0, True, 0.3, 0.9),
    ("teacher", "easy", 0, True, 0, 1),
]
DEAD, BARE = (0.85, 0.97), (0.9, 1)  # bounds: all-wrong groups of 8 on train; bare letters in old choice

# --------------------------------------------------------------------------------------------------- chains of cards


def step(value, card):
    """-> the right result and the careless one (carry dropped, borrow forgotten, times read as plus): equal if easy."""
    digit = int(card[1:])
    if card[0] == "+":
        return value + digit, value + digit - 10 * (value % 10 + digit > 9)
    if card[0] == "-":
        return value - digit, value - digit + 10 * (value % 10 < digit)
    return value * digit, value + digit


@cache
def fitting(value, hard, times):
    """Cards that keep the value in range and are as hard as wanted (`times`: multiplications); else any in range."""
    legal = [card for card in CARDS if all(result in VALUES for result in step(value, card))]
    wanted = [card for card in legal if len({*step(value, card)}) == 1 + hard]
    return [card for card in (TIMES if times else CARDS) if card in wanted] or legal


def make_chain(part, rng):
    """-> ["37", "+8", "x2", ...]: the start and its cards."""
    value, chance = rng.randint(*STARTS), rng.choice(part.hard)
    chain = [str(value)]
    for _ in range(rng.randint(*part.cards)):
        hard = rng.random() < chance
        chain.append(rng.choice(fitting(value, hard, hard and rng.random() < 0.3)))
        value, _ = step(value, chain[-1])
    return chain


def work(chain, rates=None, rng=None):
    """Sentences of a worked solution: a step a card, then the answer; right unless rates are given.

    rates: {card: chance of a slip on a hard step}. The work goes on from the wrong value, and starts over where that
    leads out of range.
    """
    while True:
        value, steps = int(chain[0]), []
        for card in chain[1:]:
            value = step(value, card)[rates is not None and rng.random() < rates[card]]
            steps.append(f"{card}={value};")
            if value not in VALUES:
                break
        else:
            return [*steps, f"<answer>{value}</answer>"]


def make_options(answer, rng):
    """Four values {b, b + 10, b - 10, b +- 1 or 2} modulo 100, shuffled; any of them is the right one."""
    pattern = [0, 10, -10, rng.choice((1, -1, 2, -2))]
    first = answer - rng.choice(pattern)
    return rng.sample([str((first + p) % 100) for p in pattern], 4)


def make_problems(part, count, rng, seen):
    """`count` rows without id and image, their picture recipes (`draw`) not in `seen`, which grows.

    In multiple choice all values are right equally often: likelier answers would be given away by the options alone.
    """
    rows, used = [], Counter()
    while len(rows) < count:
        chain = make_chain(part, rng)
        solution, choices = work(chain), []
        answer = re.search(r"\d+", solution[-1])[0]
        if part.choice:
            if used[answer] >= count / len(VALUES):
                continue
            used[answer] += 1
            choices = make_options(int(answer), rng)
            answer = "ABCD"[choices.index(answer)]
            solution[-1] = f"<answer>{answer}</answer>"
        cells, places = [None] * 9, sorted(rng.sample(range(9), len(chain))) if part.dark else range(len(chain))
        for place, text in zip(places, chain, strict=True):
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
    """The nine cells in reading order: along the rows, or down the columns."""
    return (0, 3, 6, 1, 4, 7, 2, 5, 8) if dark else range(9)


def chain_of(draw):
    """The chain that a picture shows."""
    return [draw["cells"][i][0] for i in reading(draw["dark"]) if draw["cells"][i]]


@cache
def draw_tile(dark, text, colour, shift):
    """A cell of 28 x 28 px, one image token; an empty text is a blank."""
    tile = Image.new("RGB", (28, 28), (28, 28, 40) if dark else "white")
    if text:
        pen, ink = ImageDraw.Draw(tile), (235, 235, 235) if dark else (25, 25, 25)
        look = {"outline": LOUD[colour], "width": 2} if dark else {"fill": PASTEL[colour]}
        low, middle, high = 3 + shift, 14 + shift, 25 + shift
        if text[0] == "+":
            pen.ellipse((low, low, high, high), **look)
        elif text[0] == "-":
            pen.rectangle((low, low, high, high), **look)
        elif text[0] == "x":
            pen.polygon([(middle, low - 2), (high + 2, high), (low - 2, high)], **look)
        else:  # the start
            pen.rectangle((1, 5, 26, 23), **({"outline": ink, "width": 2} | look))
        font, height = ImageFont.load_default(13 if dark else 15), 18 if text[0] == "x" else 14
        pen.text((middle, height), text.lstrip("+-x"), ink, font, "mm")
    return tile


def draw_row(row, folder):
    """Draw the row's picture below the folder, whole or not at all: 3 x 3 cells, so 36 patches and 9 image tokens."""
    picture, path = Image.new("RGB", (84, 84)), Path(folder, row["image"])
    for i, cell in enumerate(row["draw"]["cells"]):
        picture.paste(draw_tile(row["draw"]["dark"], *(cell or ("", 0, 0))), (i % 3 * 28, i // 3 * 28))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    picture.save(new, "png")
    new.replace(path)
