"""MathV360K as downloaded -> rows.jsonl, one checked row a problem, and dropped.jsonl with the reason for every other.

    python -m data.mathv360k.prepare --source DIR

DIR holds train_samples_all_tuning.json and its unpacked images. Called again after a break, it goes on where it was.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import combinations, islice
from pathlib import Path

import common  # isort: skip  # first: it says in a sentence which package is missing
from tqdm import tqdm

import grpo
from data import convert
from judge import letters, pick, same_answer


@dataclass
class Args:
    source: str = ""  # the downloaded folder
    records: str = "train_samples_all_tuning.json"  # the file in it
    out: str = "data/mathv360k"
    # sources that are no mathematics
    skip: str = "A-OKVQA,VQA2.0,KVQA,ParsVQA-Caps,TextVQA,VizWiz,PMC-VQA,VQA-RAD,VQA-AS"
    max_prompt: int = 1024  # tokens of a prompt, its image's included; longer rows are dropped, never cut
    bad_images: float = 0.02  # stop where a larger share of the images is missing or can't be read
    workers: int = 0  # processes, 0 for one a core
    model: str = grpo.Args.model  # whose tokenizer counts; this and the next two as in training
    instruction: str = grpo.Args.instruction
    max_pixels: int = grpo.Args.max_pixels


def read_records(path):
    """The objects of one long JSON list, piece by piece: the whole file is never in memory."""
    decoder, between, text, place, count = json.JSONDecoder(), re.compile(r"[\s,]*"), "", 0, 0
    with open(path, encoding="utf-8") as file:
        piece = file.read(1 << 20).lstrip().removeprefix("[")  # only this one: a record may be a list itself
        while len(text) - place < 1 << 26 and piece:
            text, place = text[place:] + piece, 0
            while (start := between.match(text, place).end()) < len(text) and text[start] != "]":
                try:
                    record, place = decoder.raw_decode(text, start)
                except json.JSONDecodeError:
                    break  # it goes on in the next piece
                yield record
                count += 1
            piece = file.read(1 << 20)
    if text[place:].strip(" \r\n\t,") != "]":
        raise SystemExit(f"{path} is no whole JSON list, it breaks off after record {count}: download it again.")


def parse_record(record):
    """A record as it was published -> its row, or what is wrong with it, a text.

    The human turn is `<image>\\nHint: ...\\nQuestion: ...\\nChoices:\\n(A) ...`, the other one `The answer is X`. What
    comes before `The answer is`, if anything does, is kept as the row's solution.
    """
    if not (isinstance(record, dict) and record.keys() >= {"id", "image", "conversations"}):
        return "its record has other fields than id, image and conversations"
    if re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
        return "half a surrogate pair stands in its text"  # which no tokenizer and no file takes
    said = record["conversations"] if isinstance(record["conversations"], list) else []
    turns = [(x.get("from"), x.get("value")) for x in said if isinstance(x, dict)]
    texts = [record["image"], *(text for _, text in turns)]
    if [who for who, _ in turns] != ["human", "gpt"] or not all(isinstance(x, str) for x in texts):
        return "it is not one question and one answer on one image"
    human, gpt = texts[1].replace("<image>", "").strip(), texts[2]
    asked = re.fullmatch(r"(?:Hint:(.*?)(?:\n|(?=Question:)|$))?\s*(?:Question:)?(.*)", human, re.S)
    hint, question, choices = asked[1] or "", asked[2], []
    letter_wanted = not hint or "option letter" in hint
    if letter_wanted or re.search(r"\b(?:choices|options)\s*:", question, re.I):  # else (A) and (B) may be points
        question, choices = convert.split_options(question)
    question = re.sub(r"(?:\\n|\s)+$", "", question).strip()
    if digits := re.search(r"(?:one|two|three|four|\d) decimal places?", hint):
        question += f" Give the answer with {digits[0]}."  # else a rounded gold makes right answers wrong
    *_, told = [None, *re.finditer(r"(?i)\bthe answer is\b", gpt)]
    work, answer = (gpt[: told.start()], gpt[told.end() :]) if told else ("", gpt)
    answer = re.sub(r"\s*[.。]$", "", answer.strip(" :\n"))
    if not choices and re.fullmatch(r"\(?[A-H]\)?", answer) and letter_wanted:
        return "its gold is a letter and it has no options"
    place = pick(answer, choices) if choices and answer else None
    answer = letters(choices)[place] if place not in (None, -1) else answer
    return dict(
        source=record["image"].split("/")[0], split="mathv360k", image=f"images/{record['image']}", question=question,
        answer=answer, kind="choice" if choices else "free", choices=choices,
        solution=convert.sentences(f"{work.strip()}\n<answer>{answer}</answer>") if work.strip() else [],
        solution_source="mathv360k" if work.strip() else None, source_id=record["id"],
    )  # fmt: skip


@cache
def processor_of(model, instruction, max_pixels):
    """A process's own."""
    return common.Processor(model, Args(instruction=instruction, max_pixels=max_pixels))


def convert_record(index, record, facts, args):
    """A record and the facts of its image -> a row to be written, or what is wrong with it, a text."""
    row = parse_record(record)
    if isinstance(row, str):
        return row
    row = {"id": f"mathv360k-{index}"} | row
    if row["source"] in args.skip.split(","):
        return f"its source {row['source']} is no mathematics (--skip)"
    if fault := facts["fault"] or convert.check_gold(row):
        return fault
    processor = processor_of(args.model, args.instruction, args.max_pixels)
    tokens = processor.length(row | {"image": f"{args.out}/{row['image']}"})
    if tokens > args.max_prompt:
        return f"its prompt is longer than {args.max_prompt} tokens"
    return row | {"prompt_tokens": tokens, "image_sha": facts["sha"], "image_dhash": facts["dhash"]}


def convert_chunk(job):
    """(args, list of (index, record, facts)) -> one line of JSON each, a row's or a drop's."""
    args, chunk = job
    rows = [convert_record(*item, args) for item in chunk]
    drop = lambda i, why: dict(id=f"mathv360k-{i}", reason=convert.reason(why), fault=why)
    rows = [drop(i, row) if isinstance(row, str) else row for (i, _, _), row in zip(chunk, rows, strict=True)]
    return [("question" in row, json.dumps(row, ensure_ascii=False) + "\n") for row in rows]


def key_of(row):
    """Two numbers, one for an image's content and a question, one for its options in any order: equal in duplicates.

    Rows with the first alone in common (`Which is true?`) are different problems, unless they contradict each other: a
    gold is an option that the other row offers and rejects, or one row has no options and their golds differ.
    """
    asked = [row["image_sha"], " ".join(row["question"].split())]
    number = lambda what: int.from_bytes(hashlib.sha256(json.dumps(what).encode()).digest()[:8], "big")
    return number(asked), number(sorted(" ".join(x.split()) for x in row["choices"]))


def contradict(gold, options, other, others):
    """Whether two golds of one question on one image can't both be right, given the options of each, if any."""
    if options and others:
        return gold != other and (gold in others or other in options)
    return not (same_answer(gold, other) or same_answer(other, gold))


def find_golds(read):
    """{key: (first id, gold)} of the rows that each call of `read` gives in file order; the gold is None where a row of
    that key has another one, or one of another key, whose first id it then is, contradicts it."""

    def parts(row):
        options = [" ".join(x.split()) for x in row["choices"]]
        return key_of(row), options[letters(options).index(row["answer"])] if options else row["answer"], options

    golds, asked = {}, defaultdict(dict)
    for row in read():
        key, gold, options = parts(row)
        first, known = golds.setdefault(key, (row["id"], gold))
        if known not in (None, gold) and (options or not same_answer(gold, known)):
            golds[key] = first, None
    counts = Counter(question for question, _ in golds)
    for row in read():  # once more, to hold the options of those alone that may contradict each other
        key, *said = parts(row)
        if counts[key[0]] > 1:
            asked[key[0]].setdefault((key, said[0]), (row["id"], *said))
    for alike in asked.values():
        for ((a, _), (first, *one)), ((b, _), (second, *two)) in combinations(alike.items(), 2):
            if contradict(*one, *two):
                golds[a], golds[b] = (second, None), (first, None)
    return golds


def find_images(source, path):
    """The folder that the image names in the records start from."""
    records = islice(read_records(path), 1000)
    names = [x["image"] for x in records if isinstance(x, dict) and isinstance(x.get("image"), str)]
    if not names:
        raise SystemExit(f"{path} has no record with an image at its start: download it again, or name its file with "
                         "--records.")  # fmt: skip
    for folder in (source / "data_images", source / "images_data", source):
        if any((folder / name).exists() for name in names):
            return folder.resolve()
    remedy = "unpack" if (source / "data_images.zip").exists() else "download and unpack"
    raise SystemExit(f"None of the first {len(names)} images is below {source}: {remedy} data_images.zip there.")


def main(args):
    source, out = Path(args.source), Path(args.out)
    path, link, record = source / args.records, out / "images", out / "prepare.json"
    if not args.source or not path.is_file():
        raise SystemExit(f"{path} is no file: download Zhiqiang007/MathV360K and name its folder with --source.")
    if (out / "rows.jsonl").exists():
        raise SystemExit(f"{out / 'rows.jsonl'} is there already: remove it to convert again.")
    if link.exists() and not link.is_symlink():
        raise SystemExit(f"{link} is in the way of a link to the source's images: move it away.")
    folder = find_images(source, path)
    processor_of(args.model, args.instruction, args.max_pixels)  # stops here where there is none
    out.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    parts = {name: out / f"{name}.jsonl.part" for name in ("rows", "dropped")}
    settings = asdict(args) | {"bytes": path.stat().st_size, "source": str(folder), "workers": 0, "bad_images": 0}
    if not record.exists() or json.loads(record.read_text()) != settings:  # what other settings made is of no use
        for part in parts.values():
            part.unlink(missing_ok=True)
        common.write_text(record, json.dumps(settings, indent=1))

    names, total = {}, 0
    for x in tqdm(read_records(path), "1 records", unit="record"):
        total += 1
        if isinstance(x, dict) and isinstance(x.get("image"), str):
            names.setdefault(x["image"])
    images = convert.look_at_all([*names], folder, out / "images.jsonl", "2 images")
    convert.check_bad_images(images, args.bad_images, folder)

    for part in parts.values():
        convert.drop_torn_line(part)
    done = {int(x["id"].split("-")[1]) for part in parts.values() for x in convert.read_whole_lines(part)}
    left = (
        (i, x, images.get(x["image"]) if isinstance(x, dict) and isinstance(x.get("image"), str) else None)
        for i, x in enumerate(read_records(path))
        if i not in done
    )
    chunks = ((args, chunk) for chunk in iter(lambda: list(islice(left, 500)), []))
    bar = tqdm(desc="3 rows", total=total, initial=len(done), unit="row")
    with open(parts["rows"], "a", encoding="utf-8") as rows, open(parts["dropped"], "a", encoding="utf-8") as dropped:
        for lines in convert.in_order(convert_chunk, chunks, args.workers or os.cpu_count()):
            for good, line in lines:
                (rows if good else dropped).write(line)
            rows.flush(), dropped.flush()
            bar.update(len(lines))
    bar.close()

    # conflicts and duplicates show only when all rows are there
    golds, extra = find_golds(partial(convert.read_whole_lines, parts["rows"])), []
    with open(out / "rows.jsonl.new", "w", encoding="utf-8") as file:
        for row in tqdm(convert.read_whole_lines(parts["rows"]), "4 golds", total, unit="row"):
            first, gold = golds[key_of(row)]
            if gold is not None and first == row["id"]:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                why = "it repeats an earlier row" if gold is not None else "its question has another gold elsewhere"
                extra.append(dict(id=row["id"], reason=why, fault=f"{why}: {first}" if first != row["id"] else why))
    drops = [*convert.read_whole_lines(parts["dropped"]), *extra]
    common.write_text(out / "dropped.jsonl", common.jsonl(drops))
    (out / "rows.jsonl.new").replace(out / "rows.jsonl")
    for part in parts.values():
        part.unlink()
    convert.print_counts(convert.read_whole_lines(out / "rows.jsonl"), drops)
    print(f"{out / 'rows.jsonl'} is ready, {out / 'dropped.jsonl'} names every dropped row. "
          "Next: torchrun --nproc_per_node 8 -m data.pool.measure")  # fmt: skip


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
