"""Rows and images: what is refused, with which sentence, and real problems through the whole of the loop."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import analyze
import common
import grpo
import judge

REAL = Path(__file__).parents[2] / "shared" / "real_samples"
TOY = Path(__file__).parents[1] / "data" / "toy"


def write_pool(folder, *changes):
    """Good rows, one for each dict of changes, and their images -> the pool's path."""
    rows = []
    for i, change in enumerate(changes):
        Image.new("RGB", (56, 56), "white").save(folder / f"{i}.png")
        row = dict(id=f"p{i}", image=f"{i}.png", question="How many?", answer="4", kind="free", choices=[]) | change
        rows.append({k: v for k, v in row.items() if v is not None})
    path = folder / "pool.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("change, words", [
    (dict(image="none.png"), "none.png is missing; check the path"),
    (dict(image="corrupt.png"), "corrupt.png can't be read"),
    (dict(image="cut.png"), "cut.png can't be read"),
    (dict(image="strip.png"), "strip.png is 1 x 300, longer than 200 : 1: remove the row"),
    (dict(question="  "), "question or answer is empty: remove the row"),
    (dict(answer=""), "question or answer is empty: remove the row"),
    (dict(question="<image>\nHow many?"), "<image> stands in the text: take it out"),
    (dict(question="How many <|image_pad|>?"), "<|image_pad|> stands in the text: take it out"),
    (dict(kind="choice", answer="B", choices=["<|vision_start|>", "2"]), "<|vision_start|> stands in the text"),
    (dict(kind="choice", answer="C"), "the gold 'C' is none of its 0 options: parse them or drop the row"),
    (dict(kind="choice", answer="C", choices=["1", "2"]), "the gold 'C' is none of its 2 options"),
    (dict(id="p0"), "its id is that of line 1 too: give each row its own"),
    (dict(choices=None), "there is no field choices: a row has id, image"),
    (dict(choices="1, 2"), "choices, solution and teacher have to be lists: write [] where there is nothing"),
    (dict(choices=0), "choices, solution and teacher have to be lists"),
    (dict(solution="one sentence"), "choices, solution and teacher have to be lists"),
    (dict(teacher="abc"), "choices, solution and teacher have to be lists"),
    (dict(teacher=["abc"]), "its teacher answer holds something else than token ids: write a list of whole numbers"),
    (dict(teacher=[1, -1]), "something else than token ids"),
    (dict(teacher=[True]), "something else than token ids"),
    (dict(answer=4), "each option and each sentence have to be text: write 4 as"),
    (dict(question="half \ud800"), "half a character (a lone surrogate such as \\ud800) stands in its text"),
    (dict(image=3), "have to be text"),
    (dict(id=[]), "have to be text"),
    (dict(kind="choice", choices=[1, 2], answer="A"), "have to be text"),
    (dict(solution=["one", 2]), "have to be text"),
    (dict(kind="foo"), "its kind is 'foo': write choice or free"),
    (dict(kind="choice", choices=["3", "3"], answer="A"), "two of its options are equal, or there are more than 26"),
    (dict(kind="choice", choices=[str(i) for i in range(27)], answer="A"), "more than 26"),
    (dict(image="0.png", answer="5"), "line 1 asks the same and has another gold: drop both"),
])  # fmt: skip
def test_a_bad_row_is_refused_in_one_sentence_with_file_line_and_remedy(tmp_path, change, words):
    (tmp_path / "corrupt.png").write_bytes(b"no image at all")
    Image.effect_noise((64, 64), 90).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    Image.new("RGB", (1, 300)).save(tmp_path / "strip.png")
    path = write_pool(tmp_path, {}, change, {})
    with pytest.raises(SystemExit) as error:
        common.load_pool(path)
    assert str(error.value).startswith(f"{path}, line 2 (id ") and words in str(error.value)
    assert "\n" not in str(error.value) and "more rows" not in str(error.value)


def test_all_bad_rows_are_counted_and_the_first_is_named(tmp_path):
    path = write_pool(tmp_path, {}, dict(question=""), dict(answer=""), dict(answer=" "))
    with pytest.raises(SystemExit, match=r"line 2 .*\(2 more rows are bad\)"):
        common.load_pool(path)


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "pool.jsonl does not exist: check the path"),
        (b"", "is empty"),
        (b'{"id": 1,\n', "line 1 is not JSON"),
        (b"3\n", "is no JSON object"),
        (b'{"id": "p\xc3\xa9"}\n{"id": "p\xe9"}\n', "pool.jsonl, line 2 is not UTF-8: save the file in that encoding"),
        ("{}\n".encode("utf-16"), "line 1 is not UTF-8"),
    ],
)
def test_a_pool_that_is_absent_empty_or_no_json_is_refused(tmp_path, text, words):
    path = tmp_path / "pool.jsonl"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(SystemExit, match=words):
        common.load_pool(path)


def test_a_pool_smaller_than_a_step_is_refused(tmp_path):
    path = write_pool(tmp_path, {}, {}, {})
    assert len(common.load_pool(path, least=3)) == 3
    with pytest.raises(SystemExit, match="holds 3 problems and a step takes 4: lower --problems or add rows"):
        common.load_pool(path, least=4)


def test_rows_are_read_and_drawn_without_torch():
    code = "import sys; from data import convert, rows; rows.load_pool('data/toy/train.jsonl', decode=False); "
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], cwd=TOY.parents[1])
    assert done.returncode == 0


def test_a_missing_toy_image_names_the_script_that_draws_it(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "toy"
    folder.mkdir(parents=True)
    (folder / "prepare.py").touch()
    write_pool(folder, dict(image="images/0.png"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"is missing; run `python -m data.toy.prepare`"):
        common.load_pool("data/toy/pool.jsonl")
    with pytest.raises(SystemExit, match=r"other.jsonl does not exist: data/toy holds pool.jsonl\.$"):
        common.load_pool("data/toy/other.jsonl")
    with pytest.raises(SystemExit, match=r"data/toy is a folder: data/toy holds pool.jsonl\.$"):
        common.load_pool("data/toy")
    (folder / "pool.jsonl").unlink()  # now nothing has been made yet
    with pytest.raises(SystemExit, match=r"pool.jsonl does not exist: run `python -m data.toy.prepare`"):
        common.load_pool("data/toy/pool.jsonl")


def test_a_missing_pool_names_the_readme_that_says_how_to_make_it(tmp_path):
    (tmp_path / "readme.md").touch()
    with pytest.raises(SystemExit, match=r"train.jsonl does not exist: .*readme.md says how to make it"):
        common.load_pool(tmp_path / "train.jsonl")


def test_a_bad_evaluation_set_stops_the_run_before_training(make_args, tmp_path):
    with pytest.raises(SystemExit, match="absent.jsonl does not exist"):
        grpo.main(args := make_args(eval=str(tmp_path / "absent.jsonl")))
    assert not (Path(args.runs) / "grpo-s0" / "metrics.jsonl").exists()


def test_two_evaluation_sets_of_one_name_are_refused(make_args, world):
    args = make_args(eval=f"{world}/sparse.jsonl,{world}/other/sparse.jsonl")
    with pytest.raises(SystemExit, match="names two files alike"):
        common.load_sets(args)


def test_transparent_parts_of_an_image_become_white(tmp_path):
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 20, 40))
    image.save(tmp_path / "a.png")
    loaded = common.load_image(tmp_path / "a.png")
    assert (
        loaded.mode == "RGB" and loaded.getpixel((30, 5)) == (255, 255, 255) and loaded.getpixel((5, 5)) == (255, 0, 0)
    )


@pytest.mark.parametrize(
    "size, tokens", [((56, 56), 4), ((84, 28), 3), ((300, 200), 6), ((10, 10), 1), ((2000, 20), 30)]
)
def test_image_tokens_equal_image_features_at_any_size(load, tmp_path, size, tokens):
    it = load()
    Image.new("RGB", size, "pink").save(tmp_path / "a.png")
    prompt = it.processor.encode(dict(image=str(tmp_path / "a.png"), question="Which?", choices=["1", "2"]))
    features = it.policy.sampler.model.get_image_features(prompt.pixels, prompt.grid).pooler_output[0]
    pad = it.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert prompt.ids.count(pad) == len(features) == tokens
    assert prompt.positions.shape == (3, len(prompt.ids))


def real_rows():
    """The 58 real problems in the project's rows: options, which stand in the question too, are taken out of it."""
    rows = []
    for x in map(json.loads, (REAL / "samples.jsonl").read_text().splitlines()):
        question = re.split(r"\s*choices?:", x["question"], flags=re.I)[0] if x["choices"] else x["question"]
        solution = re.split(r"(?<=[.!?])\s+", x["solution"]) if x.get("solution") else []
        rows.append(dict(id=x["id"], source=x["source"], split="real", image=str(REAL / x["image"]), question=question,
                         answer=x["answer"], kind="choice" if x["choices"] else "free", choices=x["choices"],
                         solution=solution, solution_source=x["source"] if solution else None))  # fmt: skip
    return rows


@pytest.mark.skipif(not REAL.exists(), reason="the pack of real problems is not here")
def test_real_problems_go_through_gates_training_outputs_judge_and_table(tmp_path, capsys):
    path = tmp_path / "real.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in real_rows()))
    args = common.parse(grpo.Args, [
        "--toy", "--pool", str(path), "--eval", str(path), "--instruction", grpo.Args.instruction, "--steps", "2",
        "--model", str(TOY / "student"), "--runs", str(tmp_path / "runs"), "--max-pixels", "50176", "--gates", "warn",
        "--group", "4", "--micro-batch", "4", "--max-new-tokens", "24",
    ])  # fmt: skip
    grpo.main(args)
    run = tmp_path / "runs" / "grpo-s0"
    gates = {g["name"]: g["verdict"] for g in json.loads((run / "gates.json").read_text())["gates"]}
    assert gates["pool"] == gates["log-probs"] == gates["sampling"] == gates["saved"] == "pass"
    assert len(common.read_jsonl(run / "metrics.jsonl")) == 2 and len(common.read_jsonl(run / "outputs.jsonl")) == 58
    verdicts = str(tmp_path / "runs" / "verdicts.jsonl")
    judge.main([str(run), "--judge", "rule", "--verdicts", verdicts])
    analyze.main(["main", "--runs", str(tmp_path / "runs"), "--verdicts", verdicts])
    assert "real (n = 58)" in capsys.readouterr().out


@pytest.mark.skipif(not REAL.exists(), reason="the pack of real problems is not here")
def test_every_real_gold_is_graded_right_against_itself():
    for row in real_rows():
        forms = [row["answer"], f"The answer is {row['answer']}.", f"So <answer>{row['answer']}</answer>"]
        assert [common.grade(form, row["answer"], row["choices"]) for form in forms] == ["right"] * 3, row["id"]


@pytest.mark.skipif(not REAL.exists(), reason="the pack of real problems is not here")
def test_real_images_keep_their_size_up_to_the_pixel_limit():
    args = common.parse(grpo.Args, ["--toy", "--max-pixels", "401408"])
    processor = common.Processor(str(TOY / "student"), args)
    for row in real_rows():
        grid = processor.encode(row).grid[0]
        width, height = Image.open(row["image"]).size
        area = (grid.prod() * 14 * 14).item()
        assert area <= 401408 and torch.all(grid[1:] % 2 == 0)
        assert area == 401408 or abs(area / (width * height) - 1) < 0.25 or width * height > 401408, row["id"]
