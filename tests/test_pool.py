"""Raw folders in the published layouts -> rows -> rollouts -> pool -> solutions -> a hint arm and its table; what each
step refuses, and what it must not lose. Small folders are made here; `real_samples` is used where it is present."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path

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
from data.rows import check_image
from data.toy import world as toy

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
    asked = f"<image>\n{f'Hint: {wish}' if wish else ''}\nQuestion: {question}"
    asked += f"\nChoices:{options}" * bool(choices)
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
    ("因此。\n<answer>5。 So; 6. Then</answer>", ["因此。", "\n", "<answer>5。 So; 6. Then</answer>"]),
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
    (("Find x.", "5。"), {}, "Find x.", "5"),
    (("Find x.", "so 4. the answer is 5"), {}, "Find x.", "5"),
    (("Points (A) and (B) are marked. Find x.", "5"), {}, "Points (A) and (B) are marked. Find x.", "5"),
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
    ([record(0, "S/0.png", "?", "1")], "other fields"),
    (record(0, "S/0.png", "Half of \ud83d?", "1"), "half a surrogate pair stands in its text"),
    (record(0, "S/\udc00.png", "?", "1"), "half a surrogate pair stands in its text"),
    (record(0, "S/0.png", "?", "1") | {"image": 3}, "not one question and one answer on one image"),
    (record(0, None, "?", "1"), "not one question and one answer on one image"),
    (record(0, ["S/0.png"], "?", "1"), "not one question and one answer on one image"),
    (record(0, "S/0.png", "?", "1") | {"conversations": None}, "not one question and one answer on one image"),
])  # fmt: skip
def test_a_record_that_is_no_problem_says_why(bad, words):
    assert words in mathv360k.parse_record(bad)


def test_a_long_list_is_read_as_the_json_module_reads_it(tmp_path):
    draw = random.Random(0)
    records = [record(i, "S/π.png", "Wie groß? 三 " * draw.randrange(40), "] [{") for i in range(4000)]
    records[0], records[7], records[-1] = [records[0]], [[records[7], 3]], []  # lists themselves
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
    ImageDraw.Draw(image).text((10, 20), text, fill="black")
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
        {"id": "identity_21", "image": [name(0)]}, record(22, name(1), "Same?", "A", ["1", "1"]),
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
    assert why["18"] == "its prompt is longer than .. tokens"
    assert why["19"] == "its source VizWiz is no mathematics (--skip)"
    assert "stands in the text" in why["20"] and "other fields" in why["21"] and "options are equal" in why["22"]
    assert "is empty" in why["23"]
    printed = capsys.readouterr().out
    assert "| Geometry3K | 8 | 2 | 6 |" in printed and "| all, on 4 images | 8 | 2 | 6 |" in printed
    assert "| it repeats an earlier row | 3 | mathv360k-8 |" in printed and "9 images, 5 distinct" in printed
    assert "1 with transparent parts" in printed and "3 missing or bad" in printed
    loaded = common.load_pool(tmp_path / "out" / "rows.jsonl")
    processor = common.Processor("data/toy/student", common.parse(grpo.Args, ["--toy"]))
    assert [len(processor.encode(row).ids) for row in loaded] == [row["prompt_tokens"] for row in rows]
    assert common.load_image(loaded[1]["image"]).getpixel((0, 0)) == (255, 255, 255)


def test_odd_records_are_dropped_one_by_one(raw, tmp_path):
    whole, path = prepare(raw, tmp_path / "whole"), raw / "train_samples_all_tuning.json"
    records = json.loads(path.read_text())
    odd = [record(24, "Geometry3K/images/0.png", "Half of \ud83d?", "1"), [records[0]], record(26, "", "Empty?", "1")]
    odd += [record(27, "UniGeo/images", "A folder?", "1"), record(28, "Geometry3K/\udc00.png", "Half?", "1")]
    path.write_text(json.dumps([*records, *odd]))
    rows, dropped = prepare(raw, tmp_path / "out")
    why = {x["id"].split("-")[1]: x["reason"] for x in dropped}
    assert (
        rows == whole[0]
        and why["24"] == why["28"] == "half a surrogate pair stands in its text"
        and "other fields" in why["25"]
    )
    assert why["26"] == why["27"] == "the image's name is empty or a folder's"


@pytest.mark.parametrize("one, two, kept", [
    (("B", ["1", "2"]), ("A", ["1", "3"]), False),  # each rejects what the other says
    (("B", ["1", "2"]), ("B", ["1", "3"]), True),
    (("B", ["1", "2"]), ("A", ["3", " 2"]), False),  # one rejects it
    (("B", ["1", "2"]), ("A", ["2 ", "3"]), True),  # the same gold among other options
    (("B", ["rain", "snow"]), ("A", ["wind", "fog"]), True),  # other problems: Which is true?
    (("B", ["1", "2"]), ("2.0", []), True), (("B", ["1", "2"]), ("1", []), False),
    (("5", []), ("B", ["1", "2"]), False),
])  # fmt: skip
def test_golds_of_one_question_contradict_each_other_across_its_options(raw, tmp_path, one, two, kept):
    path, name = raw / "train_samples_all_tuning.json", "Geometry3K/images/1.png"
    path.write_text(json.dumps([record(i, name, "Which?", *x) for i, x in enumerate([one, two])]))
    rows, dropped = prepare(raw, tmp_path / "out")
    assert len(rows) == 2 * kept and len(dropped) == 2 * (not kept)
    assert {x["reason"] for x in dropped} <= {"its question has another gold elsewhere"}
    assert [x["fault"].split(": ")[1] for x in dropped] == ["mathv360k-1", "mathv360k-0"][: len(dropped)]


def test_golds_contradict_whatever_the_order_of_rows(raw, tmp_path):
    path, options = raw / "train_samples_all_tuning.json", ["1", "2"]
    three = [("B", options), ("A", options), ("2", [])]
    for k, order in enumerate([(0, 1, 2), (1, 0, 2), (2, 1, 0)]):
        made = [record(i, "Geometry3K/images/1.png", "Which?", *three[j]) for i, j in enumerate(order)]
        path.write_text(json.dumps(made))
        rows, dropped = prepare(raw, tmp_path / f"out{k}")
        assert not rows and len(dropped) == 3
        assert all(x["id"] not in x["fault"] for x in dropped), "a row is not named as its own contradiction"


def test_faults_of_many_bad_files_are_a_few_reasons(tmp_path):
    for i, data in enumerate([b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"0" * 30, b"GIF89a"] * 3):
        (tmp_path / f"it's {i} (a: 'b').png").write_bytes(data)
    picture(tmp_path / "cut.png", "picture")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:200])
    faults = {convert.reason(convert.look(path)["fault"]) for path in tmp_path.iterdir()}
    assert faults == {"the image can't be read"}
    assert convert.reason("it can't be 'a' and isn't \"b's\" at 7: do so") == "it can't be .. and isn't .. at .."
    odd = ("a: b", "the image (left)", "c")
    golds = {convert.reason(f"the gold {x!r} is none of its 4 options: drop it") for x in odd}
    assert golds == {"the gold .. is none of its .. options"}


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


def test_workers_end_with_the_process_that_was_killed():
    code = "from data import convert\nfor x in convert.in_order(abs, iter(int, 1), 2): print(x, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    assert process.stdout.readline() == b"0\n"
    process.kill()
    try:
        process.communicate(timeout=60)  # the pipe ends with the last process that holds it
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_other_settings_start_the_conversion_anew(raw, tmp_path):
    out = tmp_path / "out"
    prepare(raw, out)
    with pytest.raises(SystemExit, match=r"rows.jsonl is there already: remove it to convert again"):
        prepare(raw, out)
    (out / "rows.jsonl").rename(out / "rows.jsonl.part")  # as if it had not ended
    assert len(prepare(raw, out, max_prompt=10)[0]) == 0


@pytest.mark.parametrize("break_it, words", [
    (lambda raw: next(raw.glob("*.json")).unlink(), "download Zhiqiang007/MathV360K and name its folder"),
    (lambda raw: (next(raw.glob("*.json")).unlink(), (raw / "train_samples_all_tuning.json").mkdir()), "is no file"),
    (lambda raw: next(raw.glob("*.json")).write_text("[]"), "json has no record with an image at its start: download"),
    (lambda raw: next(raw.glob("*.json")).write_text('[{"image": ["a.png"]}]'), "json has no record with an image"),
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


def test_a_tokenizer_that_is_not_there_is_missed_before_the_pictures_are_looked_at(raw, tmp_path):
    with pytest.raises(SystemExit, match="The model nowhere is neither a folder with a whole checkpoint nor .*: name"):
        prepare(raw, tmp_path / "out", model="nowhere")
    assert not (tmp_path / "out" / "images.jsonl").exists()


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
    assert rows[3]["answer_type"] == "multiple choice", "for analysis to count by"
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
    (dict(source=""), "There is no folder '': download DynaMath/DynaMath_Sample, .* its folder with --source"),
    (dict(source="nowhere"), "There is no folder 'nowhere': download"),
    (dict(source="data"), "data holds 0 of 2 variants .*: download DynaMath/DynaMath_Sample"),
    (dict(variants=3), "holds 2 of 3 variants"),
    (dict(seeds=5), "holds 4 questions, not 5: download it again"),
    (dict(gone=True), "1 of 8 rows are bad, first dynamath_q003_v01: the image .* is missing"),
    (dict(write=lambda rows: rows | {"2": rows["2"] | {"question": None}}),
     "Question 2 of variant 1 has no text but None: download the data again"),
    (dict(write=lambda rows: [*rows.values()]), "trial1/dataset.json does not hold questions by their numbers"),
    (dict(write=lambda rows: rows | {"2": 7}), "trial1/dataset.json does not hold questions by their numbers"),
    (dict(write=lambda rows: rows | {"two": rows["2"]}), "dataset.json does not hold questions by their numbers"),
])  # fmt: skip
def test_a_dynamath_that_is_not_whole_is_refused(tmp_path, change, words):
    folder = repository(tmp_path / "git", [(seed, v, *rest) for v in (1, 2) for seed, *rest in ITEMS])
    args = dict(source=str(folder), out=str(tmp_path / "out"), variants=2, seeds=4)
    if change.pop("gone", False):
        next(folder.rglob("trial1/image/image3.png")).unlink()
    if write := change.pop("write", None):
        path = next(folder.rglob("trial1/dataset.json"))
        path.write_text(json.dumps(write(json.loads(path.read_text()))))
    with pytest.raises(SystemExit, match=words):
        dynamath.main(dynamath.Args(**(args | change)))
    assert not (tmp_path / "out" / "dynamath.jsonl").exists()


@pytest.mark.parametrize("name", ["trial7", "sample5"])
def test_the_name_of_the_downloaded_folder_is_no_variant(tmp_path, name):
    folder = repository(tmp_path / name, [(seed, v, *rest) for v in (1, 2) for seed, *rest in ITEMS])
    (folder / "dataset.json").write_text("{}")  # of something else
    assert sorted(dynamath.find_variants(folder)) == [1, 2]


@needs_real
def test_real_dynamath_questions_are_converted(tmp_path):
    real = [x for x in map(json.loads, (REAL / "samples.jsonl").read_text().splitlines()) if x["source"] == "DynaMath"]
    items = [(x["seed_id"], x["variant"], x["question"], x["answer"], x["answer_type"]) for x in real]
    dynamath.main(dynamath.Args(str(repository(tmp_path / "git", items)), str(tmp_path / "out"), 3, 12))
    rows = {row["id"]: row for row in common.load_pool(tmp_path / "out" / "dynamath.jsonl")}
    assert all((rows[x["id"]]["choices"], rows[x["id"]]["answer"]) == (x["choices"], x["answer"]) for x in real)
    assert len(rows) == 36


# ---- measure


@pytest.fixture
def rows(tmp_path, world):
    """Ten rows on five images -> the path of rows.jsonl as the converter leaves it."""
    made = []
    for i, row in enumerate(common.read_jsonl(world / "train.jsonl")[:10]):
        made.append(row | dict(image=str(world / row["image"]), image_sha=f"s{i // 2}", image_dhash=f"{i // 2:016x}",
                               solution=[], solution_source=None))  # fmt: skip
    return write_lines(tmp_path / "rows.jsonl", made)


def measuring(make_args, rows, runs, module=measure, **more):
    small = {k: v for k, v in vars(make_args()).items() if k != "name"} | dict(eval="", pool=rows, runs=str(runs))
    return module.Args(**(small | dict(batch=16) | more))


def lines_of(folder):
    return {x["id"]: x for x in measure.read_measured(folder)}


@pytest.fixture
def graded(monkeypatch):
    """A stand-in for the grader, as the tiny model never answers anything: graded(f), f(row id, count) -> grade."""

    def use(f):
        counts = {}

        def reward(batch, problems):
            grades = []
            for p, done in zip(problems, batch.finished.tolist(), strict=True):
                counts[p["id"]] = counts.get(p["id"], -1) + 1
                grades.append(f(p["id"], counts[p["id"]]) if done else "unparsed")
            return torch.tensor([float(g == "right") for g in grades]), grades

        monkeypatch.setattr(common, "reward", reward)

    return use


def always_done(monkeypatch):
    sample = common.sample

    def finished(*args, **more):
        batch = sample(*args, **more)
        return replace(batch, finished=torch.ones_like(batch.finished))

    monkeypatch.setattr(common, "sample", finished)


def test_rollouts_are_counted_in_rounds_while_a_row_is_hard_and_readable(
    make_args, rows, tmp_path, graded, monkeypatch
):
    always_done(monkeypatch)
    grades = {"train0": "wrong", "train1": "unparsed", "train2": "right"}
    graded(lambda id, n: "right" if (id, n) == ("train3", 5) else grades.get(id, "wrong"))
    measure.main(measuring(make_args, rows, tmp_path / "p", rollouts="4,4,8"))
    found = lines_of(tmp_path / "p" / "candidates-s0")
    assert len(found) == 10
    count = lambda i: [found[f"train{i}"]["profile"][k] for k in ("n", "correct", "formatted", "truncated")]
    assert count(0) == [16, 0, 16, 0] and count(1) == [4, 0, 0, 0] and count(2) == [4, 4, 4, 0]
    assert count(3) == [8, 1, 8, 0]  # right once in the second round, so not in the third
    assert all(len(x["answers"]) == x["profile"]["n"] and {"row"} < x.keys() for x in found.values())


def test_an_answer_that_the_limit_cut_off_is_told_from_one_that_cannot_be_read(make_args, rows, tmp_path):
    measure.main(measuring(make_args, rows, tmp_path / "p", rollouts="8", max_new_tokens=6))
    found = lines_of(tmp_path / "p" / "candidates-s0").values()
    cut = sum(x["profile"]["truncated"] for x in found)
    assert 0 < cut < 80 and cut == sum(grade == "cut" for x in found for grade, _ in x["answers"])


def test_measuring_uses_the_sampler_and_the_settings_of_training():
    default = {k: v for k, v in vars(grpo.Args()).items() if k not in ("name", "pool", "eval", "runs", "steps")}
    for module, own in ((measure, {}), (precondition, {}), (solutions, dict(model=""))):  # the teacher or an endpoint
        assert {k: vars(module.Args())[k] for k in default} == default | own


def test_a_measurement_that_was_killed_goes_on_with_other_processes_and_loses_nothing(
    make_args, rows, tmp_path, monkeypatch
):
    args = measuring(make_args, rows, tmp_path / "p", rollouts="4", batch=8)
    append, calls = common.append_jsonl, []

    def dies(path, *lines):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(path, *lines)

    with monkeypatch.context() as m:
        m.setattr(common, "append_jsonl", dies)
        with pytest.raises(KeyboardInterrupt):
            measure.main(args)
    first = tmp_path / "p" / "candidates-s0" / "rollouts-0.jsonl"
    kept = [json.loads(x) for x in first.read_text().splitlines()]
    assert len(kept) == 4
    first.rename(first.with_name("rollouts-5.jsonl"))  # another process's
    with open(first.with_name("rollouts-5.jsonl"), "a") as file:
        file.write('{"id": "tor')
    measure.main(args)
    found = list(measure.read_measured(first.parent))
    assert len(found) == 10 == len({x["id"] for x in found}) and [x for x in found if x in kept] == kept
    changed = common.read_jsonl(rows)
    changed[0]["answer"] = "77"
    write_lines(rows, changed)
    measure.main(args)
    found = list(measure.read_measured(first.parent))
    assert [x["id"] for x in found].count("train0") == 2, "a row that has changed is measured again"


def test_rows_are_counted_when_all_processes_have_written(make_args, rows, tmp_path, monkeypatch, capsys):
    folder, wait, append, late = tmp_path / "p" / "candidates-s0", common.dist.barrier, common.append_jsonl, []

    def barrier():
        if late:  # at the end: another process takes longer
            write_lines(folder / "rollouts-1.jsonl", late)
        wait()

    with monkeypatch.context() as m:
        m.setattr(common, "append_jsonl", lambda path, *lines: (late.append(lines[-1]), append(path, *lines[:-1])))
        m.setattr(common.dist, "barrier", barrier)
        measure.main(measuring(make_args, rows, tmp_path / "p", rollouts="4", limit=3))
    measure.main(measuring(make_args, rows, tmp_path / "p", rollouts="4", limit=2))
    printed = capsys.readouterr().out
    assert "3 of 3 rows are measured. Next: python -m data.pool.filter" in printed and "2 of 2 rows" in printed


def test_rollouts_without_their_settings_are_refused(make_args, rows, tmp_path):
    args = measuring(make_args, rows, tmp_path / "p", rollouts="4", limit=1)
    measure.main(args)
    (tmp_path / "p" / "candidates-s0" / "config.json").unlink()
    with pytest.raises(SystemExit, match="config.json is missing beside rollouts"):
        measure.main(args)


@pytest.mark.parametrize("flag", ["temperature", "max_new_tokens", "instruction", "rollouts", "readable", "pool"])
def test_measurements_of_other_settings_never_mix(make_args, rows, tmp_path, flag):
    args = measuring(make_args, rows, tmp_path / "p", rollouts="4", limit=1)
    measure.main(args)
    other = {"temperature": 0.7, "max_new_tokens": 9, "instruction": "Say it.", "rollouts": "8", "readable": 0.5}
    other = (other | dict(pool=write_lines(tmp_path / "other.jsonl", common.read_jsonl(rows))))[flag]
    with pytest.raises(SystemExit, match=rf"was made with --{flag.replace('_', '-')} .* use the same flags, or"):
        measure.main(replace(args, **{flag: other}))


@pytest.mark.parametrize("rollouts", ["4,x", "", "0", "4,,4", "-4"])
def test_rounds_that_are_no_numbers_are_refused(make_args, rows, tmp_path, rollouts):
    with pytest.raises(SystemExit, match=f"--rollouts {rollouts} has to be the sizes of rounds, such as 16,16,32,64"):
        measure.main(measuring(make_args, rows, tmp_path / "p", rollouts=rollouts))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("module, more", [
    (measure, {}), (precondition, dict(rollouts=4)), (solutions, {}),
    (solutions, dict(address="http://localhost", endpoint_model="m")),
])  # fmt: skip
def test_a_wrong_pool_leaves_nothing_behind(make_args, tmp_path, module, more):
    with pytest.raises(SystemExit, match="gone.jsonl does not exist"):
        module.main(measuring(make_args, str(tmp_path / "gone.jsonl"), tmp_path / "p", module, **more))
    assert not (tmp_path / "p").exists()


def test_two_processes_share_the_rows_out(make_args, rows, tmp_path):
    args = vars(measuring(make_args, rows, tmp_path / "p", rollouts="4", limit=9))
    flags = [x for k, v in args.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*command, "-m", "data.pool.measure", *flags], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted((tmp_path / "p" / "candidates-s0").glob("rollouts-*.jsonl"))
    assert [len(x.read_text().splitlines()) for x in files] == [5, 4] and len(lines_of(files[0].parent)) == 9


# ---- filter


def profile(n, correct, formatted=None):
    return dict(n=n, correct=correct, formatted=n if formatted is None else formatted, truncated=0)


KINDS = {
    "hard": lambda i: profile(128, 0), "format": lambda i: profile(16, 0, 3), "easy": lambda i: profile(16, 15),
    "tail": lambda i: profile(16, 8), "once": lambda i: profile(32, 1), "few": lambda i: profile(32, 0),
    "new": lambda i: None,
}  # fmt: skip


@pytest.fixture
def candidates(tmp_path):
    """Rows of seven kinds, two on an image, with rollouts for all but the `new` ones -> flags of the filter."""
    counts, made, lines = dict(hard=60, format=40, easy=20, tail=30, once=10, few=10, new=30), [], []
    for kind, count in counts.items():
        for i in range(count):
            k = len(made)
            choices = ["1", "2", "3", "4"] if k % 3 else []
            row = dict(id=f"{kind}{i}", source="S", split="m", image=f"images/{k // 2}.png", question=f"Find x{k}.",
                       answer="A" if choices else "1", kind="choice" if choices else "free", choices=choices,
                       solution=[], solution_source=None, image_sha=f"s{k // 2}",
                       image_dhash=f"{random.Random(k // 2).getrandbits(64):016x}")  # fmt: skip
            made.append(row)
            if found := KINDS[kind](i):
                lines.append(dict(id=row["id"], row=measure.fingerprint(row), profile=found, answers=[]))
    (tmp_path / "measured").mkdir()
    write_lines(tmp_path / "measured" / "rollouts-0.jsonl", lines[::2])
    write_lines(tmp_path / "measured" / "rollouts-1.jsonl", lines[1::2])
    rows = write_lines(tmp_path / "rows.jsonl", made)
    places = dict(rows=rows, measured=str(tmp_path / "measured"), out=str(tmp_path / "pool"))
    return pool_filter.Args(**places, sparse=8, old=16, train=1000, tail_share=0.1)


def filtered(args):
    pool_filter.main(args)
    return {name: common.read_jsonl(Path(args.out) / f"{name}.jsonl") for name in ("train", "sparse", "old")}


def test_a_row_that_was_measured_again_by_another_process_is_measured(candidates, capsys):
    rows, folder = common.read_jsonl(candidates.rows), Path(candidates.measured)
    new = [row | dict(question=row["question"] + " New.") if row["id"].startswith("hard") else row for row in rows]
    write_lines(candidates.rows, new)
    (folder / "rollouts-0.jsonl").rename(folder / "rollouts-5.jsonl")
    again = [dict(id=row["id"], row=measure.fingerprint(row), profile=profile(128, 0), answers=[]) for row in new[:60]]
    write_lines(folder / "rollouts-0.jsonl", again)
    filtered(candidates)
    assert re.search(r"^\| not measured \| 30 \|", capsys.readouterr().out, re.M)


def test_the_filter_keeps_what_is_wrong_though_readable_and_not_what_cannot_be_read(candidates, capsys):
    sets = filtered(candidates)
    kind = lambda row: row["id"].rstrip("0123456789")
    assert {kind(row) for row in sets["train"]} == {"hard", "tail"}
    assert {kind(row) for row in sets["sparse"]} == {"hard"}
    tail = sum(kind(row) == "tail" for row in sets["train"])
    assert tail == round((len(sets["train"]) - tail) / 9) and len(sets["sparse"]) == 8
    printed = capsys.readouterr().out
    row = lambda name: next(x.split("|")[1:-1] for x in printed.splitlines() if x.startswith(f"| {name}"))
    assert [int(x) for x in row("an answer can be read in less than 75%")[1:]] == [40, 130]
    assert int(row("not measured")[1]) == 30 and int(row("right in more than 0%")[1]) == 30
    assert int(row("fewer than 64 rollouts")[1]) == 10 and int(row("tail (40% to 60%")[1]) == 30
    # by reward alone: hard 60, few 10 and the 40 format failures, which are mostly unreadable
    assert [int(x) for x in row("by reward alone")[1:3]] == [110, 40]
    assert [int(x) for x in row("what reward alone would have let in")[1:3]] == [40, 40]
    assert [int(x) for x in row("wrong and readable")[1:3]] == [len(sets["train"]), 0]
    assert row("what reward alone")[4].strip() == f"{3 / 16:.1%}"
    assert row("by reward alone")[4].strip() == f"{(70 + 40 * 3 / 16) / 110:.1%}"


def test_the_removed_rows_add_up_to_what_is_left(candidates, capsys):
    sets = filtered(candidates)
    table = [x.split("|")[2:4] for x in capsys.readouterr().out.split("| rule |")[1].split("\n\n")[0].splitlines()[2:]]
    left = 200
    for removed, now in table[1:]:
        left -= int(removed)
        assert int(now) == left
    assert left == len(sets["train"]) and len(table) == 11


def test_no_image_is_shared_and_old_is_drawn_from_all_rows_with_its_share_of_choice(candidates):
    sets = filtered(candidates)
    images = {name: {row["image_sha"] for row in rows} for name, rows in sets.items()}
    assert all(not images[a] & images[b] for a, b in combinations(sets, 2))
    old = sets["old"]
    assert len(old) == 16 == len(images["old"]) and sum(row["kind"] == "choice" for row in old) == 11
    assert all(len(row["choices"]) in (0, 4) for row in old)
    assert {"new", "easy"} & {row["id"].rstrip("0123456789") for row in old}, "not hard rows alone"
    assert all(row["split"] == name for name, rows in sets.items() for row in rows)
    assert filtered(replace(candidates)) == sets and filtered(replace(candidates, seed=1)) != sets


def test_rows_measured_before_they_changed_are_not_measured(candidates):
    changed = common.read_jsonl(candidates.rows)
    write_lines(candidates.rows, [row | dict(question="New?") if row["id"] == "hard0" else row for row in changed])
    assert "hard0" not in {row["id"] for name in ("train", "sparse") for row in filtered(candidates)[name]}


def test_near_duplicates_between_splits_are_named(candidates, capsys):
    made = common.read_jsonl(candidates.rows)
    for row in made:
        if row["id"].startswith("hard"):  # one picture, but for a sign; questions that differ in numbers only
            row["image_dhash"] = f"{1 << int(row['id'][4:]) % 3:016x}"
    write_lines(candidates.rows, made)
    lines = [x | dict(row=measure.fingerprint(row)) for x in measure.read_measured(candidates.measured)
             for row in made if row["id"] == x["id"]]  # fmt: skip
    write_lines(Path(candidates.measured) / "rollouts-0.jsonl", lines)
    sets = filtered(candidates)
    found = json.loads((Path(candidates.out) / "near_duplicates.json").read_text())["train and sparse"]
    alike = lambda a, b: bool(a["choices"]) == bool(b["choices"])
    hard = [row for row in sets["train"] if row["id"].startswith("hard")]
    expected = {(a["id"], b["id"]) for a in hard for b in sets["sparse"] if alike(a, b)}
    assert {(x["a"], x["b"]) for x in found} == expected and all(x["distance"] in (0, 2) for x in found)
    assert f"train and sparse: 0 images shared, {len(found)} near-duplicates" in capsys.readouterr().out


@pytest.mark.parametrize("change, words", [
    (dict(least=8), r"--least 8: .* select by more than the 8 of a training group"),
    (dict(measured="nowhere"), r"nowhere does not exist: run .*data.pool.measure"),
    (dict(rows="nowhere.jsonl"), r"nowhere.jsonl does not exist or is empty: run .*data.mathv360k.prepare"),
    (dict(sparse=60), r"\d+ rows are readable and never right in 64 rollouts, and sparse alone takes 60; 10 more are "
     "never right in fewer: measure more candidates, or lower --sparse or --least"),
    (dict(old=200), r"old needs \d+ more rows with four options and \d+ more free ones"),
])  # fmt: skip
def test_what_cannot_be_filtered_is_refused_in_a_sentence(candidates, change, words):
    with pytest.raises(SystemExit, match=words):
        pool_filter.main(replace(candidates, **change))
    assert not Path(candidates.out).exists()


def test_a_filter_that_stops_says_what_each_rule_removed(candidates, capsys):
    with pytest.raises(
        SystemExit, match=r"^0 rows .* in 200 rollouts, and sparse alone takes 8; 70 more are never right"
    ):
        pool_filter.main(replace(candidates, least=200))
    assert "| fewer than 200 rollouts | 70 | 30 |" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"0 more are never right in fewer: measure more candidates, or lower --sparse\.$"
    ):
        pool_filter.main(replace(candidates, least=9, sparse=70))


HINTED = dict(id="hard0", row="", profile=profile(8, 0), answers=[], shown=0.5)


@pytest.mark.parametrize("file, lines, words", [
    ("rows", lambda rows: [], r"rows.jsonl does not exist or is empty: run .*data.mathv360k.prepare"),
    ("rows", lambda rows: [7], r"rows.jsonl, line 1 has no field id: name rows that data.mathv360k.prepare wrote"),
    ("rows", lambda rows: [rows[0], {k: v for k, v in rows[1].items() if k != "image_sha"}], "line 2 has no .*_sha:"),
    ("rows", lambda rows: rows[-1:], r"None of the 1 rows of .*rows.jsonl is among the 170 measured in .*: both"),
    ("measured", lambda rows: [], r"measured holds no rollouts of data.pool.measure: name its folder with --measured"),
    ("measured", lambda rows: [HINTED], r"measured holds no rollouts of data.pool.measure"),  # those of precondition
])  # fmt: skip
def test_a_wrong_file_is_named(candidates, file, lines, words):
    paths = dict(rows=[candidates.rows], measured=Path(candidates.measured).iterdir())
    for path, made in [(path, lines(common.read_jsonl(candidates.rows))) for path in paths[file]]:
        write_lines(path, made)
    with pytest.raises(SystemExit, match=words):
        pool_filter.main(candidates)
    assert not Path(candidates.out).exists()


@pytest.mark.parametrize("made", [dict(solution=["a", "b"]), dict(teacher=[1, 2])])
def test_a_pool_with_solutions_is_not_overwritten(candidates, made):
    filtered(candidates)
    sets = filtered(candidates)
    write_lines(path := Path(candidates.out) / "train.jsonl", [row | made for row in sets["train"]])
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"train.jsonl holds solutions or teacher answers: remove it to filter again"):
        pool_filter.main(candidates)
    assert path.read_bytes() == before


def test_rows_that_were_all_wrong_in_few_rollouts_come_back_to_the_mean():
    """Why `--least` has to be above a group: by 8 rollouts, rows that are right one time in ten pass as never right."""
    draw, args = random.Random(0), pool_filter.Args(group=4, least=8)
    rates = [draw.choice([0.0, 0.1]) for _ in range(4000)]
    kept = {n: [p for p in rates if not any(draw.random() < p for _ in range(n))] for n in (8, 128)}
    few, many = (sum(x) / len(x) for x in kept.values())
    assert few > 0.02 and many < 1e-4
    assert pool_filter.judge_row(profile(8, 0), args) == "hard"
    assert pool_filter.judge_row(profile(8, 0), replace(args, least=64)) == "few rollouts"


# ---- precondition


def measured(rates, n, draw, shown=0.0):
    """Lines of rows whose n rollouts are right at the given rates."""
    counts = [sum(draw.random() < p for _ in range(n)) for p in rates]
    return [dict(id=i, shown=shown, hint=int(10 * shown), of=20, profile=profile(n, k)) for i, k in enumerate(counts)]


def test_the_all_wrong_share_is_that_of_every_possible_group():
    for n, correct, group in [(8, 0, 8), (8, 1, 8), (9, 2, 4), (10, 3, 3), (6, 4, 3)]:
        won = [i < correct for i in range(n)]
        groups = [not any(some) for some in combinations(won, group)]
        assert precondition.all_wrong(profile(n, correct), group) == pytest.approx(sum(groups) / len(groups))


def test_figures_are_means_over_rows_and_keep_their_bounds():
    draw = random.Random(0)
    rates = [draw.choice([0.0, 0.0, 0.0, 0.5]) for _ in range(500)]
    lines = measured(rates, 16, draw) + measured([p + 0.3 for p in rates], 16, draw, 0.5)
    found = precondition.figures(lines, 8)
    base = found["0.0"]
    assert base["right"] == pytest.approx(sum(x["profile"]["correct"] for x in lines[:500]) / 8000)
    assert base["floor"] == pytest.approx((1 - base["right"]) ** 8) and base["ceiling"] == 1 - base["right"]
    truth = sum((1 - p) ** 8 for p in rates) / 500
    assert abs(base["all_wrong"] - truth) < 3 * base["all_wrong_error"] and base["floor"] < base["all_wrong"]
    assert found["0.5"]["right"] > base["right"] + 0.2
    assert (found["0.5"]["hinted"], found["0.5"]["tokens"], base["tokens"]) == (1, 0.25, 0)  # 5 of 20 tokens
    equal = precondition.figures(measured([0.1] * 2000, 8, draw), 8)["0.0"]
    assert equal["all_wrong"] == pytest.approx(equal["floor"], abs=3 * equal["all_wrong_error"])


def verdicts(lines, solved=1.0):
    return {g["name"]: g["verdict"] for g in precondition.gates(precondition.figures(lines, 8), solved, 8)}


def test_the_gates_pass_on_a_pool_like_the_papers_and_each_fails_on_what_it_is_for():
    draw = random.Random(0)
    rates = [0.6 if i % 16 == 0 else 0.0 for i in range(640)]
    good = measured(rates, 8, draw) + measured([0.34] * 640, 8, draw, 0.5)
    assert set(verdicts(good).values()) == {"pass"} and len(verdicts(good)) == 5
    failed = lambda lines, **more: [k for k, v in verdicts(lines, **more).items() if v == "fail"]
    assert failed(measured([0.3] * 640, 8, draw)) == ["GRPO will stall"]
    assert failed(good, solved=0.5) == ["solutions"]
    assert failed(measured(rates, 8, draw) + measured(rates, 8, draw, 0.5)) == ["hints unlock"]
    unread = [x | dict(profile=x["profile"] | dict(formatted=3)) for x in good]
    assert failed(unread) == ["readable"]
    impossible = [
        dict(id=0, shown=0.0, hint=0, of=9, profile=profile(8, 1))
    ] * 640  # no group is all wrong at 12 % right
    assert "consistent" in failed(impossible)


def shown(counts, share):
    """Lines of rows 0, 1, ... with so many of eight rollouts right."""
    return [dict(id=i, shown=share, hint=1, of=2, profile=profile(8, n)) for i, n in enumerate(counts)]


@pytest.mark.parametrize("without, half, others, verdict", [
    ([0] * 90 + [1] * 10, [0] * 50 + [1] * 50, [], "pass"),
    ([0] * 80 + [2] * 20, [0] * 75 + [3] * 25, [], "fail"),  # sure, but not twice as often right
    ([0] * 9 + [1], [0] * 9 + [2], [], "fail"),  # twice as often right, but by one row
    ([0] * 90 + [1] * 10, [0] * 50 + [1] * 50, [4] * 100, "pass"),  # rows that get no hint are no measure of one
    ([0] * 50 + [1] * 50, [0] * 30 + [1] * 70, [0] * 900, "fail"),
    ([1] * 50, [2] * 50, [], "pass"),  # every row gains
    ([8] * 5 + [0] * 395, [8] * 10 + [0] * 390, [], "pass"),  # rows differ more than what a hint does to each
])  # fmt: skip
def test_what_a_hint_adds_is_measured_row_by_row(without, half, others, verdict):
    found = precondition.figures(shown(without + others, 0.0) + shown(half, 0.5), 8)
    gains = [(b - a) / 8 for a, b in zip(without, half, strict=True)]
    lift, n = sum(gains) / len(gains), len(gains)
    assert found["0.5"]["gain"] == pytest.approx(lift) and found["0.0"]["gain"] == 0
    assert found["0.5"]["gain_error"] == pytest.approx((sum((x - lift) ** 2 for x in gains) / n) ** 0.5 / n**0.5)
    assert found["0.5"]["right_without"] == pytest.approx(sum(without) / 8 / n)
    gate = next(g for g in precondition.gates(found, 1.0, 8) if g["name"] == "hints unlock")
    pool = sum(without + others) / 8 / len(without + others)
    assert f"with none {sum(without) / 8 / n:.1%} on the same {n} rows, {pool:.1%} on all" in gate["text"]
    assert gate["verdict"] == verdict


def test_hints_grow_with_the_share_shown_and_never_hold_the_answer():
    row = dict(answer="9", choices=[], solution=["a. ", "b. ", "c. ", "it is 9. ", "<answer>9</answer>"])
    assert [precondition.hint_of(row, x) for x in (0, 0.25, 0.5, 0.75, 1)] == [
        "",
        "a. ",
        "a. b. ",
        "a. b. c. ",
        "a. b. c. ",
    ]
    assert precondition.hint_of(dict(answer="9", choices=[], solution=None), 0.5) == ""


@pytest.mark.parametrize("steps, counts", [(1, "0 1 1"), (2, "1 1 1"), (3, "1 2 2"), (4, "1 2 3"), (6, "2 3 4")])
def test_a_share_of_the_steps_is_the_nearest_number_of_them_and_no_tie_makes_it_none_or_all(steps, counts):
    row = dict(answer="99", choices=[], solution=["a. "] * steps + ["<answer>99</answer>"])
    hints = [precondition.hint_of(row, share) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert [len(hint) // 3 for hint in hints] == [0, *map(int, counts.split()), steps]


@pytest.mark.parametrize("change, words", [
    (dict(rollouts=3), "--rollouts 3: it takes a group of 4 at least"),
    *((dict(shown=x), f"--shown {x} has to be shares of a solution, such as .* 0 among them, the rollouts without a")
      for x in ("0.5", "0,half", "", "0,,0.5", "0,-1", "0,50", "0,inf")),
])  # fmt: skip
def test_a_precondition_that_could_not_be_told_is_refused(make_args, rows, tmp_path, change, words):
    with pytest.raises(SystemExit, match=words):
        precondition.main(measuring(make_args, rows, tmp_path / "p", precondition, **(dict(rollouts=4) | change)))
    assert not (tmp_path / "p").exists()


def test_what_comes_next_is_said_after_the_gates_and_only_if_they_pass(make_args, rows, tmp_path, capsys):
    args = measuring(make_args, rows, tmp_path / "p", precondition, rollouts=4, limit=4, gates="stop")
    with pytest.raises(SystemExit, match="the gates .*readable and solutions failed"):
        precondition.main(args)
    assert "Next" not in capsys.readouterr().out
    precondition.main(replace(args, gates="warn"))
    assert re.search(r"(?s)fail  solutions: .*\nNext: python analyze.py sparsity", capsys.readouterr().out)


def test_the_toys_preconditions_were_measured_on_the_pool_as_it_is():
    assert "THE POOL HAS CHANGED" not in analyze.precondition_note("data/toy/train.jsonl")


# ---- solutions

ROW = dict(id="a", image="a.png", question="Find x.", answer="12", kind="free", choices=[])
CHOICE = ROW | dict(answer="B", kind="choice", choices=["11", "12"])


@pytest.mark.parametrize("row, text, why", [
    (ROW, "Add 5 and 5. Then add 2. <answer>12</answer>", None),
    (CHOICE, "Add 5 and 5. Then add 2. <answer>B</answer>", None),
    (ROW, "Add 5 and 7. The answer is 12", None),
    (ROW, "Add 5 and 5. <answer>10</answer>", "wrong"),
    (ROW, "Add 5 and 5 and <answer>", "wrong"),
    (ROW, "<answer>12</answer>", "nothing to show"),
    (ROW, "It is 12. <answer>12</answer>", "nothing to show"),
    (ROW, "Look at <|image_pad|>. Add. <answer>12</answer>", "speaks of the gold"),
    (ROW, "So x is 12 for this one and later y is 13. Add 1. Add 2. Add 3. Go on. <answer>12</answer>", "leaks"),
])  # fmt: skip
def test_an_answer_is_kept_where_it_is_right_and_can_be_shown_in_part(row, text, why):
    solution, reason = solutions.make_solution(row, text)
    assert reason == why
    if solution:
        assert solution[-1] == f"<answer>{row['answer']}</answer>" and len(solution) > 1
        hints = ["".join(common.segments(row | dict(solution=solution))[:k]) for k in range(6)]
        assert all(not x or judge.grade(x, row["answer"], row["choices"]) != "right" for x in hints)


@pytest.mark.parametrize("row, first, tells", [
    (ROW, "So x = 12 here, which fits. ", True), (ROW, "The value is 12, as one checks. ", True),
    (ROW, "The answer is (12) because of that. ", True), (CHOICE, "Of these option B is right, see below. ", True),
    (ROW, "We find that x is 12 for this one and later that y is 13. ", True), (ROW, "It is 12. ", True),
    (CHOICE, "It can be option B or option A, we will see. ", True), (CHOICE, "The sum is 12 in all, so go on. ", True),
    (ROW, "It is 12.5 long, or 120 mm. ", False), (ROW, "Take 12 apples and halve them. ", False),
    (CHOICE, "The angle at K is on the left. ", False),
])  # fmt: skip
def test_a_hint_that_gives_the_answer_away_is_cut_or_refused(row, first, tells):
    row = row | dict(solution=["Look. ", first, "More. ", "Then. ", f"<answer>{row['answer']}</answer>"])
    shown = first in "".join(common.segments(row))
    assert solutions.leaks(row) is (shown and tells) and (shown or tells)


def test_the_leak_check_sees_what_the_ends_of_sentences_do_not_show():
    row = ROW | dict(solution=["We find that x is 12 for this one and later that y is 13. ", "a. ", "b. ", "c. "])
    assert common.segments(row)[0] and solutions.leaks(row)


def test_the_shortest_solution_with_some_steps_is_chosen():
    one, two = "Compute all of it at once. <answer>12</answer>", "Add 5 and 5, which is 10. Then 2. <answer>12</answer>"
    long = "Add 1 and 1. " * 9 + "<answer>12</answer>"
    assert solutions.choose(ROW, [long, one, two, "<answer>7</answer>"]) == solutions.make_solution(ROW, two)[0]
    assert solutions.choose(ROW, [one]) == solutions.make_solution(ROW, one)[0]
    assert solutions.choose(ROW, ["<answer>7</answer>"]) is None
    assert solutions.choose(ROW, ["The known answer is 12. So on. <answer>12</answer>"], told=True) is None


@pytest.fixture
def pool(tmp_path, world):
    """A pool of six rows, one with a solution of its source -> its path."""
    made = [row | dict(image=str(world / row["image"]), solution=[], solution_source=None, teacher=None)
            for row in common.read_jsonl(world / "train.jsonl")[:6]]  # fmt: skip
    made[0] |= dict(solution=["Look. ", "Read. ", f"<answer>{made[0]['answer']}</answer>"], solution_source="book")
    return write_lines(tmp_path / "pool.jsonl", made)


def solving(make_args, pool, tmp_path, world, **more):
    more = dict(teacher=str(world / "student"), tries=4, rationalise=2, runs=tmp_path / "p") | more
    return measuring(make_args, pool, more.pop("runs"), solutions, **more)


def test_the_teachers_answers_are_kept_as_solutions_and_as_token_ids_for_replay(
    make_args, pool, tmp_path, world, monkeypatch, capsys
):
    sample, taught = common.sample, []

    def answers(policy, processor, problems, args, run, *rest, **more):
        """The sampler's own batch, with texts as a teacher would write them: right for odd rows, or when told."""
        batch = sample(policy, processor, problems, args, run, *rest, **more)
        for i, p in enumerate(problems):
            number, told = int(p["id"][5:]), "known to be" in p["question"]
            good = number % 2 or (told and number == 2)
            batch.finished[i] |= bool(good)  # an untrained teacher may run into the limit
            batch.text[i] = f"First step. Then {i} more. <answer>{p['answer'] if good else 'no'}</answer>"
            taught.append((p["id"], told, batch.ids[i, -batch.mask.shape[1] :][batch.mask[i] > 0].tolist(),
                           bool(batch.finished[i])))  # fmt: skip
        return batch

    monkeypatch.setattr(common, "sample", answers)
    args = solving(make_args, pool, tmp_path, world)
    solutions.main(args)
    made = common.load_pool(pool)
    assert [row["solution_source"] for row in made] == ["book", "teacher", "rationalised", "teacher", None, "teacher"]
    assert made[0]["solution"][:2] == ["Look. ", "Read. "]
    assert made[1]["solution"][-1] == f"<answer>{made[1]['answer']}</answer>" and any(common.segments(made[1]))
    processor = common.Processor(args.model, args)
    ends = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for row in made:
        first = next(
            (ids for id, told, ids, done in taught if id == row["id"] and done and not told and len(ids) > 1), None
        )
        first = first[:-1] if first and first[-1] in ends else first
        assert row["teacher"] == first, "the first whole answer less its end token"
        assert 0 in common.teacher_cuts(row, processor)
    assert any(row["teacher"] for row in made)
    printed = capsys.readouterr().out
    assert all(x in printed for x in ("| teacher | 3 | 50.0% |", "| rationalised | 1 | 16.7% |", "| none | 1 |"))
    calls = len(taught)
    solutions.main(args)
    assert len(taught) == calls and common.load_pool(pool) == made, "nobody is asked twice"
    solutions.main(replace(args, tries=8))
    assert {id for id, *_ in taught[calls:]} == {"train4"}, "more tries are for those without a solution"


class Server(BaseHTTPRequestHandler):
    """An endpoint that misbehaves: `script` maps a question to the replies it gets, one after the other, then good."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"][1]["text"]
        assert body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
        with self.server.lock:
            self.server.seen.append((text, self.headers.get("Authorization"), body))
            reply = self.server.script.pop(0) if self.server.script else self.server.good
        reply = reply(text) if callable(reply) else reply
        if isinstance(reply, int):
            self.send_response(reply)
            self.send_header("Retry-After", "0")
            self.send_header("Location", "/elsewhere")  # where the key would go if a redirect were followed
            self.end_headers()
        else:
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + (50 if isinstance(reply, bytes) else 0)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def said(text, finish="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@pytest.fixture
def server(pool, monkeypatch):
    golds = {judge.prompt_text(row): row["answer"] for row in common.read_jsonl(pool)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.handle_error = lambda *_: None  # whoever asked hangs up at the deadline
    good = lambda text: said(f"First look. Then read. <answer>{golds.get(text, 'no')}</answer>")
    server.script, server.seen, server.lock, server.good = [], [], threading.Lock(), good
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    monkeypatch.setattr(judge, "PAUSE", 0.0)
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    yield server
    server.shutdown()


def asking(make_args, pool, tmp_path, world, server, **more):
    more = dict(address=f"http://127.0.0.1:{server.server_port}/v1", endpoint_model="m", workers=2) | more
    return solving(make_args, pool, tmp_path, world, **more)


def distinct(pool):
    """Questions of their own, so that the server can tell the rows apart."""
    made = common.read_jsonl(pool)
    return write_lines(pool, [row | dict(question=f"{row['question']} {row['id']}") for row in made])


def test_of_several_lines_of_a_row_the_one_with_a_solution_counts(
    make_args, pool, tmp_path, world, monkeypatch, capsys
):
    """Lines of an earlier call by more processes lie in files that are read later."""
    taught(monkeypatch, set())
    args = solving(make_args, pool, tmp_path, world, rationalise=0)
    solutions.main(args)
    folder = tmp_path / "p" / "solutions-s0"
    (folder / "rollouts-0.jsonl").rename(folder / "rollouts-3.jsonl")
    taught(monkeypatch, {f"train{i}" for i in range(9)})
    for _ in range(2):
        solutions.main(replace(args, tries=8))
        assert [row["solution_source"] for row in common.load_pool(pool)] == ["book"] + ["teacher"] * 5


def test_an_endpoint_is_asked_for_what_the_teacher_has_only_rationalised(
    make_args, pool, tmp_path, world, server, capsys
):
    golds = {judge.prompt_text(row): row["answer"] for row in common.read_jsonl(distinct(pool))}
    made = [row | dict(solution=["One. ", "Two. ", f"<answer>{row['answer']}</answer>"], solution_source=source)
            for row, source in zip(common.read_jsonl(pool), ["book"] + ["rationalised"] * 5, strict=True)]  # fmt: skip
    write_lines(pool, made)
    server.good = lambda text: said(f"First look. Then read. <answer>{golds[text]}</answer>")
    for _ in range(2):
        solutions.main(asking(make_args, pool, tmp_path, world, server))
        assert [row["solution_source"] for row in common.load_pool(pool)] == ["book"] + ["api"] * 5
        assert len(server.seen) == 5
    write_lines(pool, [row | dict(id=f"new-{row['id']}", solution_source="book") for row in made])
    solutions.main(asking(make_args, pool, tmp_path, world, server, name="other"))
    assert len(server.seen) == 5 and "Of 0 answers 0.0% are right" in capsys.readouterr().out


def test_an_endpoint_is_asked_until_it_answers_and_its_key_is_written_nowhere(
    make_args, pool, tmp_path, world, server, capsys, monkeypatch
):
    golds = {judge.prompt_text(row): row["answer"] for row in common.read_jsonl(distinct(pool))}
    server.good = lambda text: said(f"First look. Then read. <answer>{golds[text]}</answer>")
    server.script = [429, 500, said("\ud800, no"), said(""), said(None), {"choices": []}, {"error": "?"}]
    server.script += [b'{"choices": [', 503, [], 529]
    monkeypatch.setattr(judge, "TRIES", 20)
    solutions.main(asking(make_args, pool, tmp_path, world, server, extra='{"top_p": 0.9, "temperature": null}'))
    made = common.load_pool(pool)
    assert [row["solution_source"] for row in made] == ["book"] + ["api"] * 5
    assert all(row["teacher"] is None for row in made), "an endpoint's tokens are not the teacher's"
    assert {key for _, key, _ in server.seen} == {"Bearer very-secret"} and len(server.seen) == 16
    settings = dict(model="m", max_tokens=20, top_p=0.9)
    assert all({k: v for k, v in body.items() if k != "messages"} == settings for *_, body in server.seen)
    assert not [x for x in tmp_path.rglob("*") if x.is_file() and b"very-secret" in x.read_bytes()]
    assert "very-secret" not in "".join(capsys.readouterr())


def test_a_row_whose_requests_failed_stays_open_and_is_asked_on_the_next_call(
    make_args, pool, tmp_path, world, server, capsys
):
    golds = {judge.prompt_text(row): row["answer"] for row in common.read_jsonl(distinct(pool))}
    unlucky = next(text for text in golds if "train3" in text)
    answer = lambda text: said(f"First look. Then read. <answer>{golds[text]}</answer>")
    server.good = lambda text: 500 if text == unlucky else answer(text)
    args = asking(make_args, pool, tmp_path, world, server)
    for _ in range(2):  # the second time it is the only row that is asked
        solutions.main(args)
        printed = capsys.readouterr()
        assert "1 are still open (call again)" in printed.out and "open 1, retries 5" in printed.err
    assert [row["solution_source"] for row in common.load_pool(pool)] == ["book", "api", "api", None, "api", "api"]
    server.good, asked = answer, len(server.seen)
    solutions.main(args)
    assert common.load_pool(pool)[3]["solution_source"] == "api" and len(server.seen) == asked + 1


def taught(monkeypatch, right):
    """A teacher that solves the rows of these ids and no others, gold told or not."""
    sample = common.sample

    def answers(policy, processor, problems, args, run, *rest, **more):
        batch = sample(policy, processor, problems, args, run, *rest, **more)
        batch.finished[:] = True
        batch.text[:] = [f"One. Two. <answer>{p['answer'] if p['id'] in right else 'no'}</answer>" for p in problems]
        return batch

    monkeypatch.setattr(common, "sample", answers)


def test_a_second_source_adds_to_the_first_and_takes_nothing_away(
    make_args, pool, tmp_path, world, server, monkeypatch, capsys
):
    """The teacher, an endpoint that is always wrong, and one that is right: as the readme's commands run, one name."""
    golds = {judge.prompt_text(row): row["answer"] for row in common.read_jsonl(distinct(pool))}
    taught(monkeypatch, {"train1", "train4"})
    solutions.main(solving(make_args, pool, tmp_path, world, rationalise=0))
    made = common.load_pool(pool)
    assert [row["solution_source"] for row in made] == ["book", "teacher", None, None, "teacher", None]
    server.good = said("One. Two. <answer>no</answer>")
    solutions.main(asking(make_args, pool, tmp_path, world, server, tries=2))
    assert common.load_pool(pool) == made
    asked = lambda: {re.search(r"train\d", text)[0] for text, *_ in server.seen}
    assert asked() == {"train2", "train3", "train5"}
    server.good, server.seen[:] = lambda text: said(f"One. Two. <answer>{golds[text]}</answer>"), []
    solutions.main(asking(make_args, pool, tmp_path, world, server, name="other"))
    assert asked() == {"train2", "train3", "train5"} and len(server.seen) == 3
    now = common.load_pool(pool)
    assert [row["solution_source"] for row in now] == ["book", "teacher", "api", "api", "teacher", "api"]
    assert [now[i] for i in (0, 1, 4)] == [made[i] for i in (0, 1, 4)]
    taught(monkeypatch, set())
    solutions.main(solving(make_args, pool, tmp_path, world, name="third"))
    assert common.load_pool(pool) == now, "nor does a teacher that solves none"


@pytest.mark.parametrize("was, new, now", [
    ("teacher", "rationalised", "teacher"), ("api", "rationalised", "api"), ("rationalised", "rationalised", "before"),
    ("rationalised", "teacher", "teacher"), ("rationalised", "api", "api"), ("teacher", "api", "teacher"),
    ("book", "teacher", "book"), ("rationalised", None, "before"),
])  # fmt: skip
def test_a_solution_gives_way_to_a_better_one_alone(pool, was, new, now):
    made = common.read_jsonl(pool)[:1]
    made[0]["solution_source"] = was
    write_lines(pool, made)
    solution = ["New. ", "Work. ", f"<answer>{made[0]['answer']}</answer>"] if new else None
    line = dict(teacher=None, solution=solution, solution_source=new)
    (row,) = solutions.attach(pool, {(made[0]["id"], solutions.fingerprint(made[0])): line})
    assert row["solution"] == (solution if now == new != was else made[0]["solution"])
    assert row["solution_source"] == (was if now == "before" else now)


def test_a_solution_that_leaks_goes_even_where_nothing_takes_its_place(pool):
    made = common.read_jsonl(pool)[:1]
    gold = f"<answer>{made[0]['answer']}</answer>"
    write_lines(pool, [made[0] | dict(solution=[f"So x is {made[0]['answer']} for one. ", "Go on. ", gold])])
    line = dict(teacher=None, solution=None, solution_source=None)
    (row,) = solutions.attach(pool, {(made[0]["id"], solutions.fingerprint(made[0])): line})
    assert row["solution"] == [] and row["solution_source"] is None


def test_answers_of_a_row_whose_later_request_fails_are_filed_and_not_asked_again(
    make_args, pool, tmp_path, world, server, monkeypatch
):
    distinct(pool)
    monkeypatch.setattr(judge, "TRIES", 1)
    server.good, server.script = 500, [said("One. Two. <answer>no</answer>")] * 3
    args = asking(make_args, pool, tmp_path, world, server, workers=1)
    with pytest.raises(SystemExit, match="the same command goes on"):
        monkeypatch.setattr(judge, "STREAK", 1)
        solutions.main(args)
    path = tmp_path / "p" / "solutions-api-s0" / "answers.jsonl"
    assert [(x["id"], x["told"]) for x in common.read_jsonl(path)] == [("train1", False)] * 3
    with open(path, "a") as file:
        file.write('{"id": "tor')
    server.good, server.seen[:] = said("One. Two. <answer>no</answer>"), []
    solutions.main(args)
    asked = [("known to be" in text, re.search(r"train\d", text)[0]) for text, *_ in server.seen]
    assert asked.count((False, "train1")) == 1 and asked.count((True, "train1")) == 2
    assert asked.count((False, "train2")) == 4 and len(common.read_jsonl(path)) == 5 * 6
    assert [x["grade"] for x in lines_of(path.parent)["train1"]["answers"]] == ["wrong"] * 4
    server.seen[:] = []
    solutions.main(replace(args, tries=5))
    assert len(server.seen) == 5, "more tries are only the tries more"


def test_an_answer_that_was_filed_without_its_line_is_kept(make_args, pool, tmp_path, world, server):
    golds = {row["id"]: row for row in common.read_jsonl(distinct(pool))}
    server.good = lambda text: said(f"One. Two. <answer>{golds[re.search(r'train.', text)[0]]['answer']}</answer>")
    args = asking(make_args, pool, tmp_path, world, server)
    solutions.main(args)
    made = common.load_pool(pool)
    (tmp_path / "p" / "solutions-api-s0" / "rollouts-0.jsonl").unlink()
    write_lines(pool, golds.values())
    server.seen[:] = []
    solutions.main(args)
    assert common.load_pool(pool) == made and not server.seen


def test_the_config_names_what_answers(make_args, pool, tmp_path, world, server, monkeypatch):
    taught(monkeypatch, set())
    flags = ["--toy", "--pool", pool, "--runs", str(tmp_path / "p"), "--tries", "1", "--rationalise", "0"]
    small = ["--max-new-tokens", "20", "--teacher", str(world / "student")]
    solutions.main(common.parse(solutions.Args, [*flags, *small]))
    address = ["--address", f"http://127.0.0.1:{server.server_port}/v1"]
    with pytest.raises(SystemExit, match="--endpoint-model NAME"):
        solutions.main(common.parse(solutions.Args, [*flags, *address]))
    solutions.main(common.parse(solutions.Args, [*flags, *address, "--endpoint-model", "m"]))
    read = lambda name: json.loads((tmp_path / "p" / name / "config.json").read_text())["args"]
    assert read("solutions-s0")["model"] == str(world / "student")
    assert (read("solutions-api-s0")["model"], read("solutions-api-s0")["teacher"]) == ("m", "")
    assert {body["model"] for *_, body in server.seen} == {"m"}


def test_an_attempt_that_brought_nothing_claims_no_name_and_one_that_did_names_what_differs(
    make_args, pool, tmp_path, world, server, monkeypatch
):
    monkeypatch.setattr(judge, "TRIES", 1)
    args = asking(make_args, pool, tmp_path, world, server)
    with pytest.raises(SystemExit, match="gives no answers"):
        solutions.main(replace(args, address="http://127.0.0.1:1/v1"))
    solutions.main(args)
    other = replace(args, address="http://127.0.0.1:1/v1", endpoint_model="n", temperature=0.5)
    with pytest.raises(SystemExit, match="was made with --address 'http.*v1' and can't go on with 'http.*:1/v1': use"):
        solutions.main(other)
    with pytest.raises(SystemExit, match="was made with --endpoint-model 'm' and can't go on with 'n'"):
        solutions.main(replace(other, address=args.address))


def test_wrong_and_cut_answers_are_no_solutions_and_the_gold_is_told_last(make_args, pool, tmp_path, world, server):
    golds = {row["id"]: row["answer"] for row in common.read_jsonl(distinct(pool))}
    find = lambda text: golds[re.search(r"train\d", text)[0]]

    def reply(text):
        if "known to be" in text:
            return said(f"First look. Then read. <answer>{find(text)}</answer>")
        return said("Look. Read. <answer>no</answer>") if "train1" in text else said(f"<answer>{find(text)}", "length")

    server.good = reply
    solutions.main(asking(make_args, pool, tmp_path, world, server))
    assert [row["solution_source"] for row in common.load_pool(pool)] == ["book"] + ["rationalised"] * 5
    asked = [text for text, *_ in server.seen if "train1" in text]
    assert len(asked) == 5 and ["known to be" in text for text in asked] == [False] * 4 + [True]
    lines = lines_of(tmp_path / "p" / "solutions-api-s0")
    assert {x["grade"] for x in lines["train2"]["answers"]} == {"cut"}


@pytest.mark.parametrize("reply, words", [
    (401, "the key is missing, wrong or not for this model .status 401"), (402, "the account has no balance left"),
    (302, "it redirects; give the address that it leads to as --address"), (422, "status 422"), (404, "status 404"),
    (500, "gives no answers, last: status 500"), (b"torn", "gives no answers, last: malformed reply"),
])  # fmt: skip
@pytest.mark.parametrize("late", [False, True])
def test_an_endpoint_that_fails_for_good_is_left_with_a_sentence_and_what_it_gave_is_kept(
    make_args, pool, tmp_path, world, server, reply, words, late, monkeypatch
):
    """At its first answer, and after some, where a streak of failures shows that it is gone."""
    monkeypatch.setattr(judge, "TRIES", 2)
    row = common.read_jsonl(pool)[1]
    made = [row | dict(id=f"train{i}", question=f"{row['question']} {i}") for i in range(40)]
    before = Path(write_lines(pool, made)).read_bytes()
    answer = said(f"First look. Then read. <answer>{row['answer']}</answer>")
    server.good, server.script = reply, [answer] * 9 * late
    args = asking(make_args, pool, tmp_path, world, server)
    with pytest.raises(SystemExit, match=f"{words}.* Every answer so far is on disk, and the same command goes on"):
        solutions.main(args)
    assert Path(pool).read_bytes() == before and len(server.seen) < 9 + 2 * 22
    kept, asked = lines_of(tmp_path / "p" / "solutions-api-s0"), len(server.seen)
    assert 9 * late - 1 <= len(kept) <= 9 * late, "the last good answer may come in after the failure"
    server.good = answer
    solutions.main(args)
    assert all(row["solution_source"] == "api" for row in common.load_pool(pool))
    assert not kept.keys() & {f"train{text.split()[-1]}" for text, *_ in server.seen[asked:]}, "nobody is asked twice"


def test_a_request_ends_at_its_deadline(make_args, pool, tmp_path, world, server, monkeypatch, capsys):
    monkeypatch.setattr(judge, "TRIES", 1)
    server.good = lambda text: (time.sleep(2), said("late"))[1]
    with pytest.raises(SystemExit, match="gives no answers, last: no answer in 0.3 s"):
        solutions.main(asking(make_args, pool, tmp_path, world, server, deadline=0.3))


@pytest.mark.parametrize("change, words", [
    (dict(endpoint_model=""), "--address takes the name of a model, too: --endpoint-model NAME"),
    (dict(address="https://host/v1", key_env="NONE"), "needs a key: .* as NONE. Without --address the teacher answers"),
    (dict(address="https://host/v1?key=1"), "--address is what stands before /chat/completions"),
    (dict(extra="{"), "--extra { is not JSON"), (dict(extra="[]"), "--extra is a JSON object"),
    (dict(workers=0), "--tries, --workers and --deadline are above zero"),
    (dict(tries=0), "--tries, --workers and --deadline are above zero"),
])  # fmt: skip
def test_an_endpoint_that_cannot_be_asked_is_refused(make_args, pool, tmp_path, world, server, change, words):
    with pytest.raises(SystemExit, match=words):
        solutions.main(asking(make_args, pool, tmp_path, world, server, **change))
    assert not (tmp_path / "p").exists() and not server.seen


def test_a_key_goes_over_no_open_line(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    ask = lambda address: solutions.endpoint(solutions.Args(address=address, endpoint_model="m"))
    with pytest.raises(SystemExit, match="is not encrypted, so whoever .* see the key in JUDGE_KEY"):
        ask("http://192.0.2.1/v1")
    for address in ("http://localhost:8000/v1", "https://host/v1"):
        assert "very-secret" not in repr(ask(address))


# ---- all of it


@pytest.fixture
def downloaded(tmp_path):
    """Toy problems in MathV360K's layout: hard ones, easy ones, and multiple choice with four options."""
    records, folder = [], tmp_path / "raw" / "data_images"
    for name, count in dict(train=30, old=40, easy=12).items():
        for row in common.read_jsonl(f"data/toy/{name}.jsonl")[:count]:
            row["image"] = f"Toy{name}/images/{row['id']}.png"
            (folder / row["image"]).parent.mkdir(parents=True, exist_ok=True)
            toy.draw_row(row, folder)
            wish = "" if not row["choices"] else LETTER
            records.append(record(len(records), row["image"], row["question"], row["answer"], row["choices"], wish))
    (tmp_path / "raw" / "train_samples_all_tuning.json").write_text(json.dumps(records))
    return tmp_path / "raw"


def test_raw_folder_to_rows_to_pool_to_solutions_to_hint_arm_to_table(downloaded, tmp_path, capsys):
    out, pool, runs = tmp_path / "mathv360k", tmp_path / "pool", tmp_path / "runs"
    rows, dropped = prepare(downloaded, out)
    assert len(rows) == 82 and not dropped
    read = lambda module, *flags: common.parse(module.Args, ["--toy", "--runs", str(pool), *flags])

    measure.main(read(measure, "--pool", str(out / "rows.jsonl"), "--rollouts", "4,12", "--batch", "128"))
    pool_filter.main(pool_filter.Args(
        rows=str(out / "rows.jsonl"), measured=str(pool / "candidates-s0"), out=str(pool), group=8, least=16, sparse=5,
        old=16, tail_low=0.2, tail_high=0.8, tail_share=0.2,
    ))  # fmt: skip
    train = common.load_pool(pool / "train.jsonl")
    assert len(train) >= 8 and all(row["profile"]["n"] == 16 for row in train if not row["profile"]["correct"])
    assert sum(row["kind"] == "choice" for row in common.load_pool(pool / "old.jsonl")) == 11

    path = str(pool / "train.jsonl")
    solutions.main(read(solutions, "--pool", path, "--tries", "16"))
    solved = [row for row in common.load_pool(path) if row["solution"]]
    assert solved and all(row["solution_source"] in ("teacher", "rationalised") for row in solved)
    assert all(row["solution"][-1] == f"<answer>{row['answer']}</answer>" for row in solved)
    assert all(row["teacher"] for row in common.load_pool(path))

    precondition.main(read(precondition, "--pool", path, "--shown", "0,0.5", "--gates", "warn"))
    capsys.readouterr()
    analyze.main(["sparsity", "--runs", str(pool)])
    assert "| 50% " in (printed := capsys.readouterr().out)
    assert not re.findall(r"(candidates|solutions|precondition)-s0", printed), "folders of data are no runs"
    facts = json.loads((pool / "train.precondition.json").read_text())
    assert 0.3 < facts["shown"]["0.5"]["tokens"] < 0.7 and facts["shown"]["0.0"]["tokens"] == 0
    assert facts["shown"]["0.0"]["rows"] == len(train) and facts["shown"]["0.5"]["rows"] == len(solved)
    assert facts["shown"]["0.5"]["hinted"] > 0.5 and facts["solutions"]["teacher"] > 0
    assert "hints unlock" in {
        g["name"] for g in json.loads((pool / "precondition-s0" / "gates.json").read_text())["gates"]
    }

    sets = f"{pool / 'sparse.jsonl'},{pool / 'old.jsonl'}"
    more = ["--steps", "2", "--eval-every", "0", "--gates", "warn", "--hint-start", "1"]
    args = common.parse(hint.Args, ["--toy", "--pool", path, "--eval", sets, "--runs", str(runs), *more])
    hint.main(args)
    shown = common.read_jsonl(runs / "hintonly-s0" / "rollouts.jsonl")
    assert len(common.read_jsonl(runs / "hintonly-s0" / "metrics.jsonl")) == 2 and len(shown) == 8
    texts = {row["question"] + row["answer"]: "".join(row["solution"]) for row in common.load_pool(path)}
    assert all(texts[x["question"] + x["answer"]].startswith(x["forced"]) for x in shown)

    judge.main([str(runs / "hintonly-s0"), "--judge", "rule", "--verdicts", str(runs / "verdicts.jsonl")])
    capsys.readouterr()
    analyze.main(["sparsity", "main", "--runs", str(runs), "--verdicts", str(runs / "verdicts.jsonl")])
    printed = capsys.readouterr().out
    assert "sparse (n = 5)" in printed and "old (n = 16)" in printed
    base = facts["shown"]["0.0"]
    line = next(x for x in printed.splitlines() if x.strip().startswith("| 0% "))
    assert f"| {100 * base['right']:.1f} +- {200 * base['right_error']:.1f}" in line and "85-97" in line
    assert f"{100 * base['floor']:.1f} to {100 * base['ceiling']:.1f}" in line and "CHANGED" not in printed
    with open(path, "a") as file:
        file.write("\n")
    assert "THE POOL HAS CHANGED" in analyze.precondition_note(path)
    assert analyze.precondition_note(str(out / "rows.jsonl")) is None


def test_a_pools_images_are_decoded_once_each_and_need_not_be(tmp_path, monkeypatch, rows):
    seen = []
    monkeypatch.setattr("data.rows.check_image", lambda path: seen.append(path) or check_image(path))
    made = common.read_jsonl(rows)
    twice = write_lines(tmp_path / "twice.jsonl", made + [x | dict(id=x["id"] + "b", question="Other?") for x in made])
    assert len(common.load_pool(twice)) == 20 and len(seen) == 10
    assert len(common.load_pool(twice, decode=False)) == 20 and len(seen) == 10
    write_lines(tmp_path / "twice.jsonl", [made[0] | dict(image="gone.png")])
    with pytest.raises(SystemExit, match="gone.png is missing"):
        common.load_pool(twice, decode=False)
