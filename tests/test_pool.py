"""Raw folders in the published layouts -> rows -> rollouts -> pool -> solutions -> a hint arm and its table; what each
step refuses, and what it must not lose. Small folders are made here; `real_samples` is used where it is present."""

import base64
import io
import json
import math
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from PIL import Image, ImageDraw

import analyze
import common
import grpo
import hint
import judge
from data import convert
from data.dynamath import prepare as dynamath
from data.mathv360k import prepare as mathv360k
from data.pool import filter as pool_filter
from data.pool import measure, precondition, solutions
from data.toy import world

REAL = ROOT.parent / "shared" / "real_samples"
LETTER = "Please answer the question and provide the correct option letter, e.g., A, B, C, D, at the end."
FINAL = "Please answer the question and provide the final answer at the end."
needs_real = pytest.mark.skipif(not REAL.exists(), reason="the pack of real problems is not here")


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def write_lines(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def record(i, image, question, gold, choices=(), wish=None, before=""):
    """A record of MathV360K as it is published; `wish` is what its hint line asks for."""
    wish = (LETTER if choices else FINAL) if wish is None else wish
    options = "".join(f"\n({letter}) {text}" for letter, text in zip("ABCDEFGH", choices, strict=False))
    asked = f"<image>\n{f'Hint: {wish}' if wish else ''}\nQuestion: {question}" + (
        f"\nChoices:{options}" * bool(choices)
    )
    told = [{"from": "human", "value": asked}, {"from": "gpt", "value": f"{before}The answer is {gold}"}]
    return {"id": f"identity_{i}", "image": image, "conversations": told}


def parse(*args, **more):
    return mathv360k.parse_record(record(0, "Geometry3K/images/0.png", *args, **more))


# ---- text


@pytest.mark.parametrize("text, question, options", [
    ("Is it? Choices: (A) yes (B) no", "Is it?", ["yes", "no"]),
    ("Which?  choice:(A) A (B) B (C) The same ", "Which?", ["A", "B", "The same"]),
    ("Which data structure is it?  (A) heap (B) stack ", "Which data structure is it?", ["heap", "stack"]),
    ("Which group?\nA. Group 1\nB. Group 2\nC. Group 3", "Which group?", ["Group 1", "Group 2", "Group 3"]),
    ("What of (A)?\nChoices:\n(A) 5 \\sqrt { 2 }\n(B) 7", "What of (A)?", ["5 \\sqrt { 2 }", "7"]),
    ("Seen?\nChoices:\n(A) A: the left lung\n(B) B: the right lung", "Seen?", ["the left lung", "the right lung"]),
    ("Missing part.  Choice: (A) ↗  (B) ↖ ", "Missing part.", ["↗", "↖"]),
    ("Points (A) and (C) are marked. Find x.", "Points (A) and (C) are marked. Find x.", []),
    ("Which square?", "Which square?", []),
])  # fmt: skip
def test_options_are_taken_out_of_a_question(text, question, options):
    assert convert.split_options(text) == (question, options)


@pytest.mark.parametrize("text, parts", [
    ("One is 3.5 long. So 7!  Then\nit is done", ["One is 3.5 long. ", "So 7!  ", "Then\n", "it is done"]),
    ("1. First. 2. Then x <answer>4</answer>", ["1. First. ", "2. Then x ", "<answer>4</answer>"]),
    ("+3=37;-7=30;<answer>30</answer>", ["+3=37;", "-7=30;", "<answer>30</answer>"]),
])  # fmt: skip
def test_sentences_joined_as_they_are_make_up_the_text(text, parts):
    assert convert.sentences(text) == parts and "".join(parts) == text


def test_a_record_becomes_a_row():
    row = parse("Find x.", "(B).", ["12", "13"])
    assert (row["question"], row["answer"], row["choices"], row["kind"]) == ("Find x.", "B", ["12", "13"], "choice")
    assert (row["source"], row["image"]) == ("Geometry3K", "images/Geometry3K/images/0.png")
    assert row["solution"] == [] and row["source_id"] == "identity_0"


@pytest.mark.parametrize("args, more, question, answer", [
    (("Find x.\\n", "3."), {}, "Find x.", "3"),
    (("Find x.", "0.5"), dict(wish=""), "Find x.", "0.5"),
    (("Find x.", ": 10^4"), {}, "Find x.", "10^4"),
    (("Which point is on the line?", "C"), {}, "Which point is on the line?", "C"),
    (("Find x.", "1.5"), dict(wish="Answer with a floating-point number with one decimal place, e.g., 1.2"),
     "Find x. Give the answer with one decimal place.", "1.5"),
    (("Pick.", "thirteen"), dict(choices=["twelve", "thirteen"]), "Pick.", "B"),
])  # fmt: skip
def test_golds_are_unwrapped_and_hints_stripped(args, more, question, answer):
    row = parse(*args, **more)
    assert (row["question"], row["answer"]) == (question, answer) and not convert.check_gold({"id": "x"} | row)


def test_work_before_the_answer_is_kept_as_the_solution():
    row = parse("Find x.", "7", before="Add 3 and 4. So it is 7.\n")
    assert row["solution"] == ["Add 3 and 4. ", "So it is 7.\n", "<answer>7</answer>"]
    assert row["solution_source"] == "mathv360k" and common.segments(row) == ["Add 3 and 4. ", "", ""]


@pytest.mark.parametrize("bad, words", [
    (record(0, "S/0.png", "Which?", "B", wish=LETTER), "its gold is a letter and it has no options"),
    (record(0, "S/0.png", "Which?", "B", wish=""), "its gold is a letter and it has no options"),
    ({"id": "x", "image": "S/0.png"}, "other fields"),
    (record(0, "S/0.png", "?", "1") | {"conversations": [{"from": "gpt", "value": "1"}]}, "not one question"),
    (7, "other fields"),
])  # fmt: skip
def test_a_record_that_is_no_problem_says_why(bad, words):
    assert words in mathv360k.parse_record(bad)


def test_a_long_list_is_read_as_the_json_module_reads_it(tmp_path):
    draw = random.Random(0)
    records = [record(i, "S/π.png", "Wie groß? 三 " * draw.randrange(40), "] [{") for i in range(4000)]
    (tmp_path / "a.json").write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
    assert (tmp_path / "a.json").stat().st_size > 2 << 20  # so that records lie across pieces
    assert list(mathv360k.read_records(tmp_path / "a.json")) == records
    (tmp_path / "a.json").write_text(json.dumps(records)[:-5000])
    with pytest.raises(SystemExit, match=r"a.json is no whole JSON list, it breaks off after record 39\d\d: download"):
        list(mathv360k.read_records(tmp_path / "a.json"))


# ---- MathV360K


def picture(path, text, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new(mode, (84, 84), "white" if mode == "RGB" else (0, 0, 0, 0))
    ImageDraw.Draw(image).text((10, 20 + hash(text) % 30), text, fill="black")
    image.save(path)


@pytest.fixture
def raw(tmp_path):
    """A folder as downloaded: eight good records on four images, and one of each kind that has to go."""
    folder = tmp_path / "raw" / "data_images"
    for i, mode in enumerate(["RGB", "RGBA", "RGB", "RGB"]):
        picture(folder / f"Geometry3K/images/{i}.png", f"picture {i}", mode)
    (folder / "UniGeo/images").mkdir(parents=True)
    (folder / "UniGeo/images/copy.png").write_bytes((folder / "Geometry3K/images/0.png").read_bytes())
    (folder / "UniGeo/images/torn.png").write_bytes((folder / "Geometry3K/images/0.png").read_bytes()[:200])
    Image.new("RGB", (1, 300)).save(folder / "UniGeo/images/strip.png")
    picture(folder / "VizWiz/images/0.png", "cat")
    name = lambda i: f"Geometry3K/images/{i}.png"
    records = [record(i, name(i % 4), f"Find x{i}.", str(i)) for i in range(6)]
    records += [record(6, name(2), "Pick.", "B", ["1", "2"]), record(7, name(3), "Pick.", "A", ["1", "2"])]
    records += [
        record(8, name(0), "Find  x0.", "0.0"),  # a duplicate in other spelling
        record(9, "UniGeo/images/copy.png", "Find x0.", "0"),  # and one on the same picture by another name
        record(10, name(2), "Pick.", "A", ["2", "1"]),  # and one with its options in another order
        record(11, name(0), "Conflict?", "1"), record(12, name(0), "Conflict?", "2"),
        record(13, "UniGeo/images/gone.png", "Missing?", "1"), record(14, "UniGeo/images/torn.png", "Torn?", "1"),
        record(15, "UniGeo/images/strip.png", "Strip?", "1"), record(16, name(1), "Which?", "C", wish=LETTER),
        record(17, name(1), "Which?", "D", ["1", "2"]), record(18, name(1), "Long? " * 300, "1"),
        record(19, "VizWiz/images/0.png", "What animal?", "cat"), record(20, name(1), "Token <|im_end|>?", "1"),
        {"id": "identity_21", "image": name(0)}, record(22, name(1), "Same?", "A", ["1", "1"]),
        record(23, name(1), "Empty?", ""),
    ]  # fmt: skip
    (tmp_path / "raw" / "train_samples_all_tuning.json").write_text(json.dumps(records))
    return tmp_path / "raw"


def prepare(raw, out, **more):
    args = common.parse(mathv360k.Args, ["--toy", "--source", str(raw), "--out", str(out), "--workers", "1"])
    mathv360k.main(replace(args, **(dict(bad_images=0.5, max_prompt=200) | more)))
    return common.read_jsonl(out / "rows.jsonl"), common.read_jsonl(out / "dropped.jsonl")


def test_the_converter_keeps_what_is_sound_and_counts_the_rest(raw, tmp_path, capsys):
    rows, dropped = prepare(raw, tmp_path / "out")
    assert [row["id"] for row in rows] == [f"mathv360k-{i}" for i in range(8)]
    why = {x["id"].split("-")[1]: x["reason"] for x in dropped}
    assert len(why) == len(dropped) == 16 and why["8"] == why["9"] == why["10"] == "it repeats an earlier row"
    assert why["11"] == why["12"] == "its question has another gold elsewhere"
    assert why["13"] == "the image is missing" and "can't be read" in why["14"] and "longer than" in why["15"]
    assert why["16"] == "its gold is a letter and it has no options" and "is none of its .. options" in why["17"]
    assert (
        why["18"] == "its prompt is longer than .. tokens"
        and why["19"] == "its source VizWiz is no mathematics (--skip)"
    )
    assert "stands in the text" in why["20"] and "other fields" in why["21"] and "options are equal" in why["22"]
    assert "is empty" in why["23"]
    printed = capsys.readouterr().out
    assert "| Geometry3K | 8 | 2 | 6 |" in printed and "| all, on 4 images | 8 | 2 | 6 |" in printed
    assert "| it repeats an earlier row | 3 | mathv360k-8 |" in printed and "8 images" in printed
    assert "1 with transparent parts" in printed and "3 missing or bad" in printed
    loaded = common.load_pool(tmp_path / "out" / "rows.jsonl")
    processor = common.Processor("data/toy/student", common.parse(grpo.Args, ["--toy"]))
    assert [len(processor.encode(row).ids) for row in loaded] == [row["prompt_tokens"] for row in rows]
    assert common.load_image(loaded[1]["image"]).getpixel((0, 0)) == (255, 255, 255)


def test_two_processes_convert_as_one_does(raw, tmp_path):
    assert prepare(raw, tmp_path / "one") == prepare(raw, tmp_path / "two", workers=2)


def test_a_conversion_that_was_killed_goes_on_and_ends_the_same(raw, tmp_path, monkeypatch):
    whole = prepare(raw, tmp_path / "whole")
    in_order, islice = convert.in_order, mathv360k.islice
    monkeypatch.setattr(mathv360k, "islice", lambda it, n: islice(it, min(n, 3)))  # chunks of three

    def broken(function, chunks, workers):
        for i, lines in enumerate(in_order(function, chunks, workers)):
            if i == 4:
                raise KeyboardInterrupt
            yield lines

    monkeypatch.setattr(convert, "in_order", broken)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(raw, out)
    monkeypatch.setattr(convert, "in_order", in_order)
    lines = (out / "rows.jsonl.part").read_text().splitlines()
    (out / "rows.jsonl.part").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])  # torn in its last line
    seen, look = [], convert.look
    monkeypatch.setattr(convert, "look", lambda path: seen.append(Path(path).name) or look(path))
    assert prepare(raw, out) == whole
    assert seen == ["gone.png"], "only what was missing is looked at again"
    assert not list(out.glob("*.part"))


def test_other_settings_start_the_conversion_anew(raw, tmp_path):
    out = tmp_path / "out"
    prepare(raw, out)
    with pytest.raises(SystemExit, match=r"rows.jsonl is there already: remove it to convert again"):
        prepare(raw, out)
    (out / "rows.jsonl").rename(out / "rows.jsonl.part")  # as if it had not ended
    assert len(prepare(raw, out, max_prompt=10)[0]) == 0


@pytest.mark.parametrize("break_it, words", [
    (lambda raw: next(raw.glob("*.json")).unlink(), "download Zhiqiang007/MathV360K and name its folder"),
    (lambda raw: ((raw / "data_images").rename(raw / "x"), (raw / "data_images.zip").touch()), ": unpack data_images"),
    (lambda raw: (raw / "data_images").rename(raw / "x"), "download and unpack data_images.zip there"),
    (lambda raw: [x.unlink() for x in raw.rglob("Geometry3K/images/*.png") if x.name != "0.png"],
     "6 of 9 images below .* can't be used .* unpack the archive again, or go on without their rows with --bad-images"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused(raw, tmp_path, break_it, words):
    break_it(raw)
    with pytest.raises(SystemExit, match=words):
        prepare(raw, tmp_path / "out")
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_hashes_of_like_pictures_are_near_and_of_others_far(tmp_path):
    draw = random.Random(1)
    for name in "ab":
        image = Image.new("RGB", (200, 150), "white")
        for _ in range(12):
            x, y = draw.randrange(150), draw.randrange(110)
            ImageDraw.Draw(image).rectangle((x, y, x + 40, y + 30), fill=(draw.randrange(256),) * 3)
        image.save(tmp_path / f"{name}.png")
    Image.open(tmp_path / "a.png").resize((300, 225)).save(tmp_path / "c.jpg")
    bits = {x.stem: int(convert.look(x)["dhash"], 16) for x in tmp_path.iterdir()}
    assert (bits["a"] ^ bits["c"]).bit_count() <= 4 < 15 < (bits["a"] ^ bits["b"]).bit_count()


@needs_real
def test_real_problems_in_the_published_shape_are_converted(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train_samples_all_tuning.json").write_bytes((REAL / "mathv360k_shape.json").read_bytes())
    (tmp_path / "raw" / "data_images").mkdir()
    (tmp_path / "raw" / "data_images" / "images").symlink_to(REAL / "images")
    rows, dropped = prepare(tmp_path / "raw", tmp_path / "out", max_prompt=1024)
    samples = {x["image"].split("/")[1]: x for x in map(json.loads, (REAL / "samples.jsonl").read_text().splitlines())}
    assert len(rows) == 22 and not dropped
    for row in rows:
        sample = samples[Path(row["image"]).name]
        assert (row["choices"], row["answer"]) == (sample["choices"], sample["answer"])
        assert sample["question"].startswith(row["question"]) and len(row["question"]) > 5


# ---- DynaMath


def repository(folder, items):
    """items: (seed, variant, question, answer, type) -> the repository's layout."""
    for variant in {v for _, v, *_ in items}:
        trial, rows = folder / "samples and result" / "10trials" / f"trial{variant}", {}
        for seed, v, question, answer, kind in items:
            if v == variant:
                picture(trial / "image" / f"image{seed}.png", f"{seed}/{v}")
                rows[str(seed)] = dict(question=question, answer=answer, image=f"image/image{seed}.png",
                                       answer_type=kind, subject="algebra", level="high school")  # fmt: skip
        (trial / "dataset.json").write_text(json.dumps(rows))
    return folder


ITEMS = [
    (1, "Period?", "2.0944", "float"), (2, "Is it? Choices: (A) yes (B) no", "B", "multiple choice"),
    (3, "Time?", "8:0", "text"), (4, "Which letter in the picture?", "F", "multiple choice"),
]  # fmt: skip


def test_both_published_forms_of_dynamath_give_the_same_rows(tmp_path, monkeypatch, capsys):
    items = [(seed, v, *rest) for v in (1, 10) for seed, *rest in ITEMS]
    args = dynamath.Args(str(repository(tmp_path / "git", items)), str(tmp_path / "a"), variants=2, seeds=4)
    dynamath.main(args)
    rows = common.load_pool(tmp_path / "a" / "dynamath.jsonl")
    assert [row["id"] for row in rows][:5] == [f"dynamath_q00{i}_v01" for i in (1, 2, 3, 4)] + ["dynamath_q001_v10"]
    assert rows[1]["choices"] == ["yes", "no"] and rows[1]["answer"] == "B" and rows[1]["question"] == "Is it?"
    assert (rows[3]["kind"], rows[3]["answer"]) == ("free", "F") and rows[2]["answer"] == "8:0"
    assert (
        "| DynaMath | 8 | 2 | 6 |" in (printed := capsys.readouterr().out)
        and "2 multiple choice rows have no" in printed
    )

    table = {}
    for seed, v, question, answer, kind in items:
        image = tmp_path / "git" / "samples and result" / "10trials" / f"trial{v}" / "image" / f"image{seed}.png"
        table.setdefault(v, []).append(dict(
            id=str(seed), question=question, image=f"images/{seed}.png", ground_truth=answer, answer_type=kind,
            subject="algebra", knowledge_level="high school", decoded_image=dict(bytes=image.read_bytes(), path=None),
        ))  # fmt: skip
    for v in table:
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / "data" / f"sample{v}-00000-of-{v:05d}.parquet").touch()
    read = lambda path: list(map(dynamath.from_hub, table[int(re.search(r"sample(\d+)", path.name)[1])]))
    with monkeypatch.context() as m:
        m.setattr(dynamath, "read_hub", read)
        dynamath.main(replace(args, source=str(tmp_path / "hub"), out=str(tmp_path / "b")))
    hub = common.load_pool(tmp_path / "b" / "dynamath.jsonl")
    strip = lambda rows: [{k: x for k, x in row.items() if k != "image"} for row in rows]
    assert strip(hub) == strip(rows)
    assert all(Path(a["image"]).read_bytes() == Path(b["image"]).read_bytes() for a, b in zip(hub, rows, strict=True))


def test_the_hubs_parquet_files_are_read_or_the_package_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamath, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install pyarrow"):
        dynamath.read_hub(tmp_path / "sample1.parquet")


@pytest.mark.parametrize("change, words", [
    (dict(source=""), "holds 0 of 10 variants .*: download DynaMath/DynaMath_Sample"),
    (dict(variants=3), "holds 2 of 3 variants"),
    (dict(seeds=5), "holds 4 questions, not 5: download it again"),
    (dict(gone=True), "1 of 8 rows are bad, first dynamath_q003_v01: the image .* is missing"),
])  # fmt: skip
def test_a_dynamath_that_is_not_whole_is_refused(tmp_path, change, words):
    folder = repository(tmp_path / "git", [(seed, v, *rest) for v in (1, 2) for seed, *rest in ITEMS])
    args = dict(source=str(folder), out=str(tmp_path / "out"), variants=2, seeds=4)
    if change.pop("gone", False):
        next(folder.rglob("trial1/image/image3.png")).unlink()
    elif "source" in change:
        args["variants"] = 10
    with pytest.raises(SystemExit, match=words):
        dynamath.main(dynamath.Args(**(args | change)))
    assert not (tmp_path / "out" / "dynamath.jsonl").exists()


@needs_real
def test_real_dynamath_questions_are_converted(tmp_path):
    real = [x for x in map(json.loads, (REAL / "samples.jsonl").read_text().splitlines()) if x["source"] == "DynaMath"]
    items = [(x["seed_id"], x["variant"], x["question"], x["answer"], x["answer_type"]) for x in real]
    dynamath.main(dynamath.Args(str(repository(tmp_path / "git", items)), str(tmp_path / "out"), 3, 12))
    rows = {row["id"]: row for row in common.load_pool(tmp_path / "out" / "dynamath.jsonl")}
    assert all((rows[x["id"]]["choices"], rows[x["id"]]["answer"]) == (x["choices"], x["answer"]) for x in real)
    assert len(rows) == 36
