"""The toy world: its generator, its pictures, its shipped rows and checkpoints, and (slow) its calibration."""

import dataclasses
import hashlib
import json
import random
import re
from collections import Counter, defaultdict

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, Qwen2VLForConditionalGeneration

import common
import grpo
import opd
from data.toy import changed, prepare, world

LIGHT, DARK = world.Part((3, 6), (0.3, 0.6, 0.9)), world.Part((3, 6), (0.6,), dark=True)
CHOICE = world.Part((3, 6), (0.6,), choice=True)


def make(part, count, seed=0):
    return world.make_problems(part, count, random.Random(seed), set())


def by_digits(value, card):
    """The right result, and the one on paper that does not carry (or borrows twice)."""
    right, place = eval(f"{value}{card}"), len(card) - 2
    digits, digit = [int(d) for d in f"{value:03}"[::-1]], int(card[1])
    if card[0] == "+" and digits[place] + digit > 9:
        digits[place] += digit - 10
        return right, digits[0] + 10 * digits[1] + 100 * digits[2]
    if card[0] == "-" and digits[place] < digit:
        digits[place] += 10 - digit
        digits[place + 1] -= 2
        return right, digits[0] + 10 * digits[1] + 100 * digits[2]
    return right, right


def values_of(chain):
    """The values after each card, by Python's own arithmetic."""
    values = [int(chain[0])]
    for card in chain[1:]:
        values.append(eval(f"{values[-1]}{card}"))
    return values


@pytest.fixture(scope="module")
def shipped():
    """The shipped rows of all sets, with their pictures drawn -> {set: rows}."""
    prepare.draw_missing()
    return {name: common.load_pool(prepare.HERE / f"{name}.jsonl") for name in world.NAMES}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(prepare.HERE / "student")


# ---------------------------------------------------------------------------------------------------------- generator


def test_a_step_and_its_slip_are_those_of_paper_arithmetic():
    for value in world.VALUES:
        for card in world.CARDS:
            assert world.step(value, card) == by_digits(value, card)


@pytest.mark.parametrize("part", [LIGHT, DARK, CHOICE], ids=["light", "dark", "choice"])
def test_chains_stay_in_range_right_or_after_one_slip(part):
    for row in make(part, 500):
        chain = world.chain_of(row["draw"])
        values = values_of(chain)
        slipped = [by_digits(v, card)[1] for v, card in zip(values, chain[1:], strict=False)]
        assert all(100 <= v < 1000 for v in values + slipped)
        assert part.cards[0] <= len(chain) - 1 <= part.cards[1]


def test_chains_are_as_hard_as_wanted_where_the_cards_allow_it():
    share = []
    for wanted in (0.0, 0.5, 1.0):
        hard = []
        for row in make(world.Part((3, 8), (wanted,)), 500):
            chain = world.chain_of(row["draw"])
            hard += [len({*by_digits(v, c)}) == 2 for v, c in zip(values_of(chain), chain[1:], strict=False)]
        share.append(sum(hard) / len(hard))
    assert share[0] == 0 and abs(share[1] - 0.5) < 0.04 and share[2] > 0.99


def test_the_pool_is_hard_where_its_chains_begin():
    hard = [[] for _ in range(6)]
    for row in make(world.Part((6, 6), (1.0,), fall=0.9), 600):
        chain = world.chain_of(row["draw"])
        for k, (v, c) in enumerate(zip(values_of(chain), chain[1:], strict=False)):
            hard[k].append(len({*by_digits(v, c)}) == 2)
    for k, found in enumerate(hard):
        assert abs(sum(found) / len(found) - (1 - 0.9 * k / 5)) < 0.07  # three standard errors are 0.061


def test_a_right_solution_reads_the_start_has_a_step_for_each_card_and_ends_in_the_answer():
    for row in make(LIGHT, 200) + make(DARK, 200):
        chain = world.chain_of(row["draw"])
        values = values_of(chain)
        steps = [f"{card}={value};" for card, value in zip(chain[1:], values[1:], strict=True)]
        assert row["solution"] == [f"{chain[0]};", *steps, f"<answer>{values[-1]}</answer>"]
        assert row["answer"] == str(values[-1])


def test_slips_happen_on_hard_steps_only_and_at_the_rate_of_their_card():
    rates = {card: random.Random(card).choice((0.0, 0.3, 0.7, 1.0)) for card in world.CARDS}
    slips, rng = defaultdict(list), random.Random(1)
    for row in make(world.Part((1, 1), (0.8,)), 6000):  # one card: no work starts over
        start, card = world.chain_of(row["draw"])
        right, careless = by_digits(int(start), card)
        value = int(re.search(r"=(\d+);", world.work([start, card], rates, rng)[1])[1])
        assert value in (right, careless)
        if right != careless:
            slips[card].append(value == careless)
    assert len(slips) == len(world.CARDS)
    for card, slipped in slips.items():
        assert abs(sum(slipped) / len(slipped) - rates[card]) < 3.5 * (0.25 / len(slipped)) ** 0.5


def test_work_goes_on_from_the_wrong_value_and_stays_in_range():
    always, rng = dict.fromkeys(world.CARDS, 1.0), random.Random(0)
    told = world.work(["327", "+8", "-20", "-60"], always, rng)
    assert told == ["327;", "+8=325;", "-20=305;", "-60=145;", "<answer>145</answer>"]
    assert world.work(["327", "+8", "-20", "-60"])[-1] == "<answer>255</answer>"
    rates = dict.fromkeys(world.CARDS, 0.5)
    for row in make(LIGHT, 300):
        told = world.work(world.chain_of(row["draw"]), rates, rng)
        assert all(int(n) in world.VALUES for n in re.findall(r"[=>](-?\d+)", "".join(told)))


def test_slips_never_cancel():
    """A slip loses, and no card brings two values together or into another order, so a loss is for good."""
    for card in world.CARDS:
        pairs = [world.step(value, card) for value in world.VALUES]
        assert all(careless <= right for right, careless in pairs)
        assert all(a < b for (a, _), (b, _) in zip(pairs, pairs[1:], strict=False))
    rates, rng, wrong = dict.fromkeys(world.CARDS, 0.5), random.Random(0), 0
    for row in make(LIGHT, 3000):
        told = world.work(world.chain_of(row["draw"]), rates, rng)
        assert (told[-1] == row["solution"][-1]) == (told == row["solution"])
        wrong += told != row["solution"]
    assert wrong > 1000


def test_habits_are_a_models_own_and_of_two_kinds():
    recipe = world.RECIPES["student"]
    rates, bad = world.habits("student")
    assert rates.keys() == set(world.CARDS) and len(bad) == round(recipe.bad * len(world.CARDS))
    for card, rate in rates.items():
        assert recipe.slips[0] <= rate <= recipe.slips[1] if card in bad else rate == recipe.careful
    assert world.habits("student") == (rates, bad) and set(world.habits("teacher")[1]) != set(bad)


def test_another_seed_makes_another_world(monkeypatch, tokenizer):
    monkeypatch.setitem(
        world.RECIPES, "student", dataclasses.replace(world.RECIPES["student"], problems=40, steps=2, batch=4)
    )
    first, (ids, *_), weights = world.habits("student"), *made(tokenizer)
    monkeypatch.setattr(world, "SEED", 1)
    again, (other, *_), others = world.habits("student"), *made(tokenizer)
    assert first != again and ids.tolist() != other.tolist()
    assert all(not torch.equal(weights[k], others[k]) for k in weights if weights[k].dim() > 1)


def made(tokenizer):
    return prepare.make_corpus("student", tokenizer), prepare.pretrain("student", tokenizer).state_dict()


def test_the_same_seed_makes_the_same_rows_and_no_picture_twice():
    seen, rng = set(), random.Random(3)
    rows = [row for part in (LIGHT, DARK, CHOICE) for row in world.make_problems(part, 300, rng, seen)]
    again, rng = set(), random.Random(3)
    assert rows == [row for part in (LIGHT, DARK, CHOICE) for row in world.make_problems(part, 300, rng, again)]
    assert len({str(row["draw"]) for row in rows}) == len(rows) == len(seen)


# ------------------------------------------------------------------------------------------------------------ options


def test_the_right_option_is_among_four_and_has_its_letter():
    for row in make(CHOICE, 300):
        value = values_of(world.chain_of(row["draw"]))[-1]
        assert len(set(row["choices"])) == 4
        assert row["choices"]["ABCD".index(row["answer"])] == str(value)
        assert row["solution"][-1] == f"<answer>{row['answer']}</answer>"


def test_options_alone_give_nothing_away():
    """Rules learnt on half of the rows from what a picture-blind reader sees, each scored on the other half."""
    rows = make(CHOICE, 12_000)
    random.Random(0).shuffle(rows)

    def sights(row, i):
        values = [int(x) for x in row["choices"]]
        rank = sum(v < values[i] for v in values)
        mates = sum((v - values[i]) % 10 == 0 for v in values)
        gaps = tuple(sorted((v - values[i]) % 900 for v in values))
        yield from (
            ("letter", i),
            ("value", values[i] % 100),
            ("rank", rank),
            ("mates", mates),
            ("gaps", gaps),
            ("rank, mates", rank, mates),
        )

    right, seen = Counter(), Counter()
    for row in rows[:6000]:
        for i in range(4):
            for sight in sights(row, i):
                seen[sight] += 1
                right[sight] += "ABCD"[i] == row["answer"]
    for j, name in enumerate(("letter", "value", "rank", "mates", "gaps", "rank, mates")):
        best = lambda row, j=j: max(range(4), key=lambda i: right[s := [*sights(row, i)][j]] / max(seen[s], 1))
        score = sum("ABCD"[best(row)] == row["answer"] for row in rows[6000:]) / 6000
        assert abs(score - 0.25) < 0.025, (name, score)  # four standard errors are 0.022


# ----------------------------------------------------------------------------------------------------------- pictures


def test_a_picture_is_the_same_each_time_and_has_a_token_a_cell(tmp_path):
    args = prepare.arguments(tmp_path)
    processor = common.Processor(prepare.HERE / "student", args)
    for i, row in enumerate(make(LIGHT, 3) + make(DARK, 3)):
        row["image"] = f"{i}.png"
        world.draw_row(row, tmp_path / "a")
        world.draw_tile.cache_clear()
        world.draw_row(row, tmp_path / "b")
        assert (tmp_path / "a" / f"{i}.png").read_bytes() == (tmp_path / "b" / f"{i}.png").read_bytes()
        prompt = processor.encode(row | {"image": tmp_path / "a" / f"{i}.png"})
        assert prompt.grid.tolist() == [[1, 6, 8]]
        assert prompt.ids.count(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 12
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [f"{i}.png" for i in range(6)]  # no half-written files


def test_light_chains_are_laid_along_rows_and_dark_ones_down_columns():
    texts = ["7", "0", "+3", None, "8", "+10", None, None, "9", None, "-2", None]  # three rows of four
    cells = [text and [text, 0, 0] for text in texts]
    assert world.chain_of({"dark": True, "cells": cells}) == ["789", "0", "+10", "+3", "-2"]
    assert world.chain_of({"dark": False, "cells": cells})[0] == "70+3"
    for row in make(LIGHT, 20) + make(DARK, 20):
        cells = row["draw"]["cells"]
        order = [cells[4 * i + j] for j in range(4) for i in range(3)] if row["draw"]["dark"] else cells
        texts = [cell[0] for cell in order if cell]
        assert row["solution"][0] == "".join(texts[:3]) + ";" and all(text.isdigit() for text in texts[:3])
        assert [step.split("=")[0] for step in row["solution"][1:-1]] == texts[3:]


def test_the_corpus_shows_a_model_what_the_processor_will(monkeypatch, tmp_path, tokenizer):
    rows, original = [], world.make_problems
    monkeypatch.setattr(world, "make_problems", lambda *a: rows.extend(new := original(*a)) or new)
    monkeypatch.setitem(world.RECIPES, "student", dataclasses.replace(world.RECIPES["student"], problems=40))
    ids, labels, cells, tiles = prepare.make_corpus("student", tokenizer)
    processor = common.Processor(prepare.HERE / "student", prepare.arguments(tmp_path))
    assert len(rows) == len(ids) == 40
    for i, row in enumerate(rows):
        world.draw_row(row | {"image": "x.png"}, tmp_path)
        prompt = processor.encode(row | {"image": tmp_path / "x.png"})
        assert ids[i, : len(prompt.ids)].tolist() == prompt.ids
        assert (labels[i, : len(prompt.ids)] == -100).all()
        assert torch.equal(tiles[cells[i]].flatten(0, 1), prompt.pixels)
        answer = labels[i][labels[i] != -100]
        assert torch.equal(answer, ids[i, len(prompt.ids) : len(prompt.ids) + len(answer)])
        told = r"(\d{3};([+-]\d0?=\d{3};)+)?<answer>(\d{3}|[A-D])</answer><\|im_end\|>"
        assert re.fullmatch(told, tokenizer.decode(answer))


# -------------------------------------------------------------------------------------------------------- pretraining


def test_the_pretraining_loss_is_that_of_the_published_forward(monkeypatch, tokenizer):
    recipe = dataclasses.replace(world.RECIPES["student"], problems=40)
    monkeypatch.setitem(world.RECIPES, "student", recipe)
    ids, labels, cells, tiles = prepare.make_corpus("student", tokenizer)
    rows = torch.tensor([0, 20, 30, 39])  # a short one, a long one, options, the dark style
    ids, labels, pixels = ids[rows], labels[rows], tiles[cells[rows]].flatten(1, 2)
    model = prepare.make_model(recipe, tokenizer)
    seen = ids == model.config.image_token_id
    theirs = model(
        input_ids=ids, labels=labels, pixel_values=pixels.flatten(0, 1), image_grid_thw=torch.tensor([[1, 6, 8]] * 4),
        mm_token_type_ids=seen.int(), attention_mask=(ids != tokenizer.pad_token_id).int(),
    ).loss  # fmt: skip
    model.model.visual.config._attn_implementation = "flash_pictures"
    ours = prepare.answer_loss(model, ids, labels, pixels, *prepare.layout(model, ids[0]))
    assert abs(ours.item() - theirs.item()) < 1e-5


def test_pretraining_learns_and_gives_the_same_model_again(monkeypatch, tokenizer):
    recipe = dataclasses.replace(world.RECIPES["student"], problems=100, batch=8, steps=12)
    monkeypatch.setitem(world.RECIPES, "student", recipe)
    first, second = (prepare.pretrain("student", tokenizer).state_dict() for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)
    torch.manual_seed(world.SEED)
    new = prepare.make_model(recipe, tokenizer)
    ids, labels, cells, tiles = prepare.make_corpus("student", tokenizer)
    known, losses = prepare.layout(new, ids[0]), []
    for weights in (new.state_dict(), first):
        new.load_state_dict(weights)
        new.model.visual.config._attn_implementation = "flash_pictures"
        losses.append(prepare.answer_loss(new, ids[:32], labels[:32], tiles[cells[:32]].flatten(1, 2), *known).item())
    assert losses[1] < losses[0] - 0.3


# --------------------------------------------------------------------------------------------------------------- pool


def test_selection_keeps_what_is_never_right_and_a_tail_and_counts_every_rollout(monkeypatch):
    monkeypatch.setattr(world, "ROUNDS", (4, 8))
    monkeypatch.setattr(world, "TAIL", (0.4, 0.6))
    habits = {"never": [0, 0], "late": [0, 1], "half": [2, 4], "fades": [2, 0], "easy": [4, 8]}
    rows, asked = [{"id": f"{k}{i}"} for i in range(40) for k in habits], Counter()

    def ask(model, rows, key, group):
        n = (4, 8).index(group)
        asked.update(row["id"] for row in rows)
        wins = [habits[row["id"].rstrip("0123456789")][n] for row in rows]
        return [[("", "right")] * k + [("", "unparsed")] + [("", "wrong")] * (group - k - 1) for k in wins]

    never, tail = prepare.select(lambda *a: [x[: a[3]] for x in ask(*a)], rows)
    assert [row["id"] for row in never] == [f"never{i}" for i in range(40)]
    assert {row["id"].rstrip("0123456789") for row in tail} == {"half"} and len(tail) <= 200 // 40
    assert never[0]["profile"] == {"n": 12, "correct": 0, "formatted": 10}
    assert tail[0]["profile"] == {"n": 12, "correct": 6, "formatted": 10}
    assert asked["easy0"] == 1 and asked["never0"] == 2


# ------------------------------------------------------------------------------------------------------- shipped world


def test_shipped_rows_are_whole_and_their_answers_right(shipped):
    assert {name: len(shipped[name]) for name in world.SETS} == {"old": 319, "cross": 400, "easy": 200}
    assert len(shipped["train"]) >= 300 and len(shipped["sparse"]) >= 100
    for name, rows in shipped.items():
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            value = values_of(world.chain_of(row["draw"]))[-1]
            shown = row["choices"]["ABCD".index(row["answer"])] if row["kind"] == "choice" else row["answer"]
            assert shown == str(value) and row["split"] == name and row["source"] == "toy"
            assert common.grade("".join(row["solution"]), row["answer"], row["choices"]) == "right"


def test_shipped_solutions_show_the_steps_and_reveal_the_answer_in_the_last_sentence_only(shipped):
    for row in (row for rows in shipped.values() for row in rows):
        *steps, last = row["solution"]
        chain = world.chain_of(row["draw"])
        shown = [f"{card}={value};" for card, value in zip(chain[1:], values_of(chain)[1:], strict=True)]
        assert steps == [f"{chain[0]};", *shown]
        assert last == f"<answer>{row['answer']}</answer>"
        for k in range(len(row["solution"])):
            assert "answer" not in "".join(row["solution"][:k])


def test_pool_rows_carry_their_selection_and_a_teacher_sample(shipped, tokenizer):
    asked, tails = sum(world.ROUNDS), {}
    for name in ("train", "sparse"):
        tails[name] = [row for row in shipped[name] if row["profile"]["correct"]]
        assert all(row["profile"]["n"] == asked for row in shipped[name])
        assert all(world.TAIL[0] <= row["profile"]["correct"] / asked <= world.TAIL[1] for row in tails[name])
        assert 0.6 * world.TAIL_SHARE < len(tails[name]) / len(shipped[name]) < 1.5 * world.TAIL_SHARE
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert all(row["teacher"] and end not in row["teacher"] for row in shipped["train"])
    worked = [re.match(r"\d+;[+-]\d0?=\d+;", tokenizer.decode(row["teacher"])) for row in shipped["train"]]
    assert sum(map(bool, worked)) > 0.8 * len(worked)


def test_no_picture_is_in_two_rows(shipped):
    hashes = Counter()
    for row in (row for rows in shipped.values() for row in rows):
        hashes[hashlib.sha256(Image.open(row["image"]).convert("RGB").tobytes()).hexdigest()] += 1
    assert max(hashes.values()) == 1 and len(hashes) == sum(map(len, shipped.values()))


def test_the_tokenizer_keeps_the_answer_tags_and_cuts_where_sentences_end(shipped, tokenizer):
    assert tokenizer.get_vocab() == prepare.make_tokenizer().get_vocab()
    for tag in ("<answer>", "</answer>"):
        assert len(tokenizer(tag).input_ids) == 1 and tag not in tokenizer.all_special_tokens
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    assert special == set(prepare.SPECIAL)
    for row in shipped["cross"] + shipped["old"]:
        text = "".join(row["solution"])
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert len(ids) == len(re.sub("</?answer>", "#", text))  # a token for each character
        cut = tokenizer("".join(row["solution"][:2])).input_ids
        assert ids[: len(cut)] == cut
        prompt = common.prompt_text(row)
        assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt


def test_the_checkpoints_are_small_and_load_like_the_published_model(tokenizer):
    paths = {name: prepare.HERE / name for name in ("student", "teacher")}
    assert sum(p.stat().st_size for folder in paths.values() for p in folder.iterdir()) < 10_000_000
    student, teacher = (Qwen2VLForConditionalGeneration.from_pretrained(path) for path in paths.values())
    assert 0.9e6 < student.num_parameters() < 1.2e6 and 2.8e6 < teacher.num_parameters() < 3.4e6
    assert len(tokenizer) <= student.config.text_config.vocab_size < teacher.config.text_config.vocab_size
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for path in paths.values():
        assert GenerationConfig.from_pretrained(path).eos_token_id == ends
        assert (path / "tokenizer.json").read_text() == (paths["student"] / "tokenizer.json").read_text()
        weights = load_file(path / "model.safetensors")
        assert all(w.dtype == torch.float16 and w.isfinite().all() for w in weights.values())


def test_prepare_draws_only_what_is_missing_and_says_so(monkeypatch, tmp_path, capsys):
    for name in world.NAMES:
        lines = (prepare.HERE / f"{name}.jsonl").read_text().splitlines(keepends=True)[:2]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    for name in world.RECIPES:
        (tmp_path / name).symlink_to(prepare.HERE / name)
    monkeypatch.setattr(prepare, "HERE", tmp_path)
    prepare.main([])
    assert "10 of 10 pictures drawn" in capsys.readouterr().out
    (tmp_path / "images" / "old-0001.png").unlink()
    prepare.main([])
    assert "1 of 10 pictures drawn" in capsys.readouterr().out
    assert len(common.load_pool(tmp_path / "old.jsonl")) == 2
    rows = common.read_jsonl(tmp_path / "old.jsonl")  # another world's, under the same names
    rows[0]["draw"], rows[1]["draw"] = rows[1]["draw"], rows[0]["draw"]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = [(tmp_path / row["image"]).read_bytes() for row in rows]
    prepare.main([])
    assert "10 of 10 pictures drawn" in capsys.readouterr().out
    assert [(tmp_path / row["image"]).read_bytes() for row in rows] == before[::-1]


@pytest.mark.parametrize("gone", ["old.jsonl", "teacher/model.safetensors"])
def test_a_missing_file_of_the_world_is_named_in_a_sentence(monkeypatch, tmp_path, gone):
    for name in [f"{name}.jsonl" for name in world.NAMES] + [f"{name}/model.safetensors" for name in world.RECIPES]:
        if name != gone:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    monkeypatch.setattr(prepare, "HERE", tmp_path)
    with pytest.raises(SystemExit) as stop:
        prepare.main([])
    assert gone in str(stop.value) and "git checkout data/toy" in str(stop.value) and "--rebuild" in str(stop.value)


def test_another_seed_has_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "HERE", tmp_path)
    monkeypatch.setattr(world, "SEED", 0)
    with pytest.raises(SystemExit) as stop:
        prepare.main(["--seed", "1"])
    assert "seed1" in str(stop.value) and "--rebuild --seed 1" in str(stop.value) and "git" not in str(stop.value)
    assert tmp_path / "seed1" == prepare.HERE and not list(tmp_path.iterdir())
    args = common.parse(opd.Args, ["--toy", "data/toy/seed1", "--steps", "3"])
    assert {args.model, args.pool, args.teacher} == {
        f"data/toy/seed1/{x}" for x in ("student", "train.jsonl", "teacher")
    }
    assert args.eval.count("data/toy/seed1/") == 4 and args.steps == 3
    assert common.parse(opd.Args, ["--toy"]).model == "data/toy/student" and common.parse(opd.Args, []).steps == 300


def test_worn_print_is_old_again_and_nobody_can_read_it(monkeypatch, tmp_path, tokenizer):
    rows = common.read_jsonl(prepare.HERE / "old.jsonl")
    worn = [prepare.wear(row) for row in rows]
    for one, two in zip(rows, worn, strict=True):
        if one["kind"] == "free":
            assert one == two
        else:
            assert {k for k in one if one[k] != two[k]} == {"id", "image", "split", "draw"}
            assert two["draw"] == one["draw"] | {"worn": True} and two["id"].startswith("worn-")
    some = [i for i, row in enumerate(rows) if row["kind"] == "choice"][:24]
    shown = []
    for part in (rows, worn):  # asked openly, so that work is shown
        part = [part[i] | {"kind": "free", "choices": [], "question": world.OPEN[0]} for i in some]
        for row in part:
            row["answer"] = row["solution"][-2].split("=")[1].strip(";")
            world.draw_row(row, tmp_path)
            before = (tmp_path / row["image"]).read_bytes()
            world.draw_row(row, tmp_path)
            assert (tmp_path / row["image"]).read_bytes() == before
            row["image"] = str(tmp_path / row["image"])
        shown.append(part)
    args = common.parse(grpo.Args, ["--toy", "--runs", str(tmp_path / "runs")])
    run, processor = common.start(args), common.Processor(args.model, args)
    student = common.load_frozen(args.model, processor, run)
    read = [sum(x.startswith(row["solution"][0]) for x, row in zip(
        common.greedy_outputs(student, processor, part, args, run), part, strict=True)) for part in shown]  # fmt: skip
    assert read[0] > 12 and read[1] <= 2  # the start


@pytest.mark.parametrize("change", ["notail", "rich", "kin"])
def test_a_changed_world_differs_in_one_thing(monkeypatch, tmp_path, change, capsys):
    for name in world.NAMES:
        lines = (prepare.HERE / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:12] if name != "train" else lines))
    for name in world.RECIPES:
        (tmp_path / name).symlink_to(prepare.HERE / name)
    monkeypatch.setattr(prepare, "HERE", tmp_path)
    monkeypatch.setattr(world, "KIN", False)
    if change != "notail":
        rows = common.read_jsonl(tmp_path / "train.jsonl")
        rows.sort(key=lambda row: row["profile"]["correct"] == 0)
        (tmp_path / "train.jsonl").write_text(common.jsonl([rows[0], *rows[-6:]]))  # one of the tail
        monkeypatch.setattr(prepare, "WORKERS", 1)
        monkeypatch.setattr(changed, "BATCH", 40)
    if change == "kin":  # the shipped teacher stands in for the one that is trained
        (tmp_path / "kin").mkdir()
        (tmp_path / "kin/teacher").symlink_to("../teacher")
    changed.main([change])
    was, now = (common.read_jsonl(tmp_path / part / "train.jsonl") for part in (".", change))
    args = common.parse(opd.Args, ["--toy", str(tmp_path / change)])
    for path in [*args.eval.split(","), tmp_path / change / "worn.jsonl"]:
        assert len(common.load_pool(path)) == 12  # pictures and all
    assert len(common.load_pool(args.pool)) == len(now)
    if change == "notail":
        assert now == [row for row in was if row["profile"]["correct"] == 0] and 0.93 < len(now) / len(was) < 0.96
        monkeypatch.delattr(common, "jsonl")  # a second time it is killed at the end
        with pytest.raises(AttributeError):
            changed.main([change])
        assert not (tmp_path / change / "train.jsonl").exists()
        return
    assert all(row["teacher"] for row in now) and "teacher's answers to these" in capsys.readouterr().out
    if change == "rich":
        new = now[len(was) :]
        assert now[: len(was)] == was and len(new) == 2 and len({row["id"] for row in now}) == 9  # 3 of 9 are tail
        for row in new:
            n, chain = row["profile"]["n"], world.chain_of(row["draw"])
            assert n == 32 and 0.5 <= row["profile"]["correct"] / n <= 0.7 and row["solution"] == world.work(chain)
            world.draw_row(row, tmp_path)
            assert (tmp_path / row["image"]).read_bytes() == (tmp_path / "rich" / row["image"]).read_bytes()
    else:
        assert [row | {"teacher": 0} for row in now] == [row | {"teacher": 0} for row in was]
        assert set(world.habits("teacher")[1]) < set(world.habits("student")[1])
        assert not set(world.habits("teacher", kin=False)[1]) < set(world.habits("student")[1])


def test_new_rows_of_the_tail_pass_two_rounds_of_rollouts_of_their_own_and_are_not_known(monkeypatch):
    def ask(model, rows, key, group):
        keys.append(key)
        rng = random.Random(key)
        return [[("", "right" if rng.random() < 0.6 else "wrong") for _ in range(group)] for _ in rows]

    keys = []
    monkeypatch.setattr(changed, "BATCH", 40)
    tail = changed.draw_tail(ask, 30, set())
    assert len(set(keys)) == len(keys) >= 4 and len(tail) == 30
    assert all(row["profile"]["n"] == 32 and 16 <= row["profile"]["correct"] <= 22 for row in tail)
    seen = {str(row["draw"]) for row in tail[:5]}
    assert not seen & {str(row["draw"]) for row in changed.draw_tail(ask, 30, {*seen})}


# -------------------------------------------------------------------------------------------------------- calibration


def answers(*texts):
    """Sampled answers as `calibrate` sees them: text and grade; the right one is 255."""
    return [(text, "right" if "<answer>255<" in text else "wrong") for text in texts]


ROW = {
    "solution": ["327;", "+8=335;", "-20=315;", "-60=255;", "<answer>255</answer>"],
    "draw": {"dark": False, "cells": [[text, 0, 0] for text in ("3", "2", "7", "+8", "-20", "-60")] + [None] * 6},
}
RIGHT = "".join(ROW["solution"])


def test_the_table_critic_explains_what_it_can_know():
    """Two kinds of rows, each with its own law: the table's variance against the law's own, state by state."""
    wrong, late = "327;+8=325;-20=305;-60=245;<answer>245</answer>", "327;+8=335;-20=315;-60=155;<answer>155</answer>"
    rows = [ROW] * 400
    mixed = prepare.table_critic(rows, [answers(RIGHT, wrong, wrong, late)] * 400)
    # V before each of the five sentences: of those that are right so far, one in four, one in two, then all are right
    states = [[0.25, 0.25, 0.5, 0.5, 1], [0.25, 0.25, 0, 0, 0], [0.25, 0.25, 0, 0, 0], [0.25, 0.25, 0.5, 0.5, 0]]
    rest = sum((won - v) ** 2 for won, row in zip((1, 0, 0, 0), states, strict=True) for v in row) / 20
    assert abs(sum(mixed) / 400 - (1 - rest / (0.25 * 0.75))) < 1e-9 and len(mixed) == 400
    guesses = answers("<answer>255</answer>", "<answer>111</answer>")
    assert abs(sum(prepare.table_critic(rows, [guesses] * 400)) / 400) < 1e-9  # there is nothing to know before a guess
    odd = [answers(RIGHT, RIGHT) if i % 2 else answers(wrong, wrong) for i in range(400)]
    assert sum(prepare.table_critic(rows, odd)) < 0  # held out: what was learnt on one half does not hold on the other


def test_a_fault_is_a_bad_habits_where_its_first_wrong_sentence_is_that_cards_slip(monkeypatch):
    monkeypatch.setattr(world, "habits", lambda name: ({}, ["+8"] if name == "teacher" else world.CARDS))
    assert prepare.by_habit(ROW, "327;+8=325;-20=305;-60=245;<answer>245</answer>")
    assert not prepare.by_habit(ROW, "327;+8=336;-20=305;-60=245;<answer>245</answer>")  # some other fault
    assert not prepare.by_habit(ROW, "317;+8=325;-20=305;-60=245;<answer>245</answer>")  # the start is misread
    assert not prepare.by_habit(ROW, "327;+8=335;-20=315;-60=155;<answer>155</answer>")  # of a card without bad habit
    assert not prepare.by_habit(ROW, "<answer>245</answer>") and not prepare.by_habit(ROW, RIGHT[:-4])


@pytest.mark.slow
def test_the_shipped_world_keeps_its_calibration():
    """Fresh rollouts on 150 rows of each set: every figure within its bounds, give or take three standard errors.

    Among them: most of the base's successes come by right chains, and a table critic explains its returns.
    """
    figures = prepare.calibrate(limit=150)
    print(*figures, sep="\n")
    missed = [str(f) for f in figures if not f.low - 3 * f.error <= f.mean <= f.high + 3 * f.error]
    assert not missed and len(figures) == len(world.TARGETS) + 13
    bounds = {f.name: f.low for f in figures}
    assert bounds["student, train, answers by a right chain: of the right answers"] == 0.6
    assert bounds["student, train: variance that a table critic explains"] == 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tiny_world_can_be_rebuilt_from_the_seed(monkeypatch, tmp_path, seed):
    recipes = {k: dataclasses.replace(r, problems=1000, steps=3, batch=8) for k, r in world.RECIPES.items()}
    sets = {name: [(n // 10, part) for n, part in parts] for name, parts in world.SETS.items()}
    monkeypatch.setattr(prepare, "HERE", tmp_path)
    monkeypatch.setattr(world, "SEED", 0)
    for name, value in dict(RECIPES=recipes, SETS=sets, CANDIDATES=60, ROUNDS=(4, 4)).items():
        monkeypatch.setattr(world, name, value)
    prepare.main(["--rebuild", "--limit", "4", "--seed", str(seed)])
    place = tmp_path / "seed1" if seed else tmp_path
    assert {name: len(common.load_pool(place / f"{name}.jsonl")) for name in world.NAMES}["cross"] == 40
    assert ("designed" in (place / "readme.md").read_text()) == (seed == 0)
    assert f"Seed {seed}, " in (place / "readme.md").read_text()
    assert len(list(tmp_path.iterdir())) == (1 if seed else len(world.NAMES) + 4)
