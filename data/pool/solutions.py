"""Reference solutions for the pool's rows that have none, and stored teacher answers for replay.

    torchrun --nproc_per_node 8 -m data.pool.solutions           the teacher, by training's own sampler
    python -m data.pool.solutions --address https://HOST/v1 --endpoint-model NAME      any OpenAI-compatible endpoint

The endpoint's key is read from JUDGE_KEY in the environment, as judge.py reads its own.

A solution is kept when its final answer is the gold and some of it can be shown without giving that away: the shortest
of those with some steps. Where none of `tries` is, one is asked for with the gold told ("rationalised"), if at all.
The teacher's first whole answer, right or wrong, is stored as token ids for reopd. Everything that was answered lies in
the run's folder; called again, only rows without an answer are asked. The pool's file is written anew at the end. One
source after the other adds to it: a solution that can be shown gives way to no other, but a rationalised one to both.
"""

import base64
import io
import json
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch.distributed as dist
from tqdm import tqdm

import grpo
import judge
from data import convert
from data.pool import measure
from judge import grade, letters, pick, prompt_text, read_jsonl


@dataclass
class Args(grpo.Args):
    name: str = "solutions"  # an endpoint's is solutions-api where none is given
    pool: str = "data/pool/train.jsonl"
    eval: str = ""
    steps: int = 0
    runs: str = "data/pool"
    model: str = ""  # what answers: set to the teacher or the endpoint's model
    teacher: str = "Qwen/Qwen2-VL-7B-Instruct"
    tries: int = 8  # answers to a row
    rationalise: int = 2  # answers with the gold told, where none of the others will do; 0 for never
    batch: int = 256  # the teacher's answers at a time on one process
    address: str = ""  # of an endpoint, what stands before /chat/completions; none: the teacher answers
    endpoint_model: str = ""  # what the endpoint calls it
    key_env: str = "JUDGE_KEY"  # the environment variable with the endpoint's key, which is written nowhere
    extra: str = "{}"  # JSON, more fields of a request; null removes one
    workers: int = 16  # requests at a time
    deadline: float = 180.0  # seconds for one request


TOLD = (
    "\n(The final answer is known to be {}. Write down the reasoning that leads to it, as if you did not know it, and "
    "do not mention this remark.)"
)
MENTIONS = r"\b(?:known|given|provided|correct|stated|reference) (?:final )?answer\b|\bremark\b|\bas if\b"
SAME = "address endpoint_model teacher extra pool instruction temperature max_new_tokens max_pixels seed".split()
FILING = threading.Lock()


# ------------------------------------------------------------------------------------------------------ what is kept


def make_solution(row, text, told=False):
    """An answer's text -> (sentences, None), the last one `<answer>gold</answer>`, or (None, why it will not do)."""
    if grade(text, row["answer"], row["choices"]) != "right":
        return None, "wrong"
    body = text[: text.rindex("<answer>")] if "<answer>" in text else text
    solved = row | {"solution": [*convert.sentences(body.rstrip() + "\n"), f"<answer>{row['answer']}</answer>"]}
    parts = common.segments(solved)
    if not any(parts):
        return None, "nothing to show"
    if re.search(r"<\|\w+\|>|<image>", body) or (told and re.search(MENTIONS, body, re.I)):
        return None, "speaks of the gold"
    if leaks(solved):
        return None, "leaks"
    return solved["solution"], None


def leaks(row):
    """Whether a hint that can be cut from a row's solution gives the answer away.

    It does where it is graded right as it stands, or where some clause of it says `= gold`, `is gold` or `option B`:
    `segments` looks at the ends of sentences only.
    """
    cuts = [common.segments(row), common.segments(row, most=10**6)]
    hints = dict.fromkeys("".join(parts[:k]) for parts in cuts for k in range(1, len(parts) + 1))
    gold, letter = gold_of(row)
    says = rf"(?:[=≈]|\b(?:is|are|be|equals?|gives?)\b|\banswer\b(?: is)?:?)[\s$(*]*{re.escape(gold)}(?!\w|\.\d)"
    says += rf"|\b(?:option|choice|answer)(?: is)?:?[\s(*]*{letter}(?![\w'])" if letter else ""
    graded = lambda hint: grade(hint, row["answer"], row["choices"]) == "right"
    return any(hint and (re.search(says, hint) or graded(hint)) for hint in hints)


def usable(row):
    """Whether a row has a solution that can be shown in part without a leak."""
    return any(common.segments(row)) and not leaks(row)


def choose(row, texts, told=False):
    """Of several answers the solution to keep, or None: the shortest of those with two steps or more, else of all."""
    good = [s for s, _ in (make_solution(row, text, told) for text in texts) if s]
    return min(good, key=lambda s: (len(s) < 3, len("".join(s))), default=None)


def gold_of(row):
    """-> the gold as text and, where there are options, its letter, else None."""
    place = pick(row["answer"], row["choices"]) if row["choices"] else None
    return (row["answer"], None) if place is None else (row["choices"][place], letters(row["choices"])[place])


def with_gold(row):
    gold, letter = gold_of(row)
    return row | {"question": row["question"] + TOLD.format(f"({letter}) {gold}" if letter else gold)}


# ------------------------------------------------------------------------------------------------------- the teacher


def by_teacher(rows, args, run):
    """Each row answered up to `tries` times -> yields batches of finished lines."""
    processor = common.Processor(args.teacher, args)
    teacher = common.load_frozen(args.teacher, processor, run)

    def answer(some, count, key):
        """`count` answers to each row -> for each a list of {grade, text, ids}; ids less the end, None if cut off."""
        problems, answers = [row for row in some for _ in range(count)], []
        for part in measure.batched(problems, max(1, args.batch // count) * count):
            run.begin("solutions", key, part[0]["id"])
            batch = common.sample(teacher, processor, part, replace(args, group=count), run)
            for i, word in enumerate(common.reward(batch, part)[1]):
                ids = batch.ids[i, -batch.mask.shape[1] :][batch.mask[i] > 0].tolist()
                ids = (ids[:-1] if ids[-1] in teacher.eos else ids) if batch.finished[i] else None
                answers.append(dict(grade=word if ids is not None else "cut", text=batch.text[i], ids=ids))
        return measure.batched(answers, count)

    for part in measure.batched(rows, max(1, args.batch // 4)):
        got, kept = {row["id"]: [] for row in part}, {}
        texts = lambda row, got=got: [x["text"] for x in got[row["id"]] if x["ids"] is not None]
        while left := [r for r in part if r["id"] not in kept and len(got[r["id"]]) < args.tries]:
            for row, new in zip(left, answer(left, min(4, args.tries), len(got[left[0]["id"]])), strict=True):
                got[row["id"]] += new
                if solution := choose(row, texts(row)):
                    kept[row["id"]] = "teacher", solution
        told = {}
        if args.rationalise and (left := [r for r in part if r["id"] not in kept]):
            for row, new in zip(left, answer(list(map(with_gold, left)), args.rationalise, "told"), strict=True):
                told[row["id"]] = new
                if solution := choose(row, [x["text"] for x in new if x["ids"] is not None], told=True):
                    kept[row["id"]] = "rationalised", solution
        yield [line(row, args.teacher, kept.get(row["id"]), got[row["id"]], told.get(row["id"], [])) for row in part]


def line(row, model, kept, answers, told):
    """What is filed of a row: the kept solution and its source, the stored ids, and every answer."""
    source, solution = kept or (None, None)
    ids = next((x["ids"] for x in answers if x.get("ids")), None)
    plain = lambda xs: [dict(grade=x["grade"], text=x["text"]) for x in xs]
    return dict(id=row["id"], row=fingerprint(row), model=model, solution=solution, solution_source=source, teacher=ids,
                answers=plain(answers), told=plain(told))  # fmt: skip


def fingerprint(row):
    return measure.fingerprint(row | {"solution": None})


# ------------------------------------------------------------------------------------------------------ the endpoint


def endpoint(args):
    """The address, called as the judge calls its own but with this sampler's settings -> judge.Api."""
    if not args.endpoint_model:
        raise SystemExit("--address takes the name of a model, too: --endpoint-model NAME.")
    extra = judge.extra_fields(args.extra)
    flags = vars(args) | dict(model=args.endpoint_model, extra=extra, dry_run=False)
    api = judge.endpoint(SimpleNamespace(**flags), "Without --address the teacher answers.")
    limits = dict(temperature=args.temperature, max_tokens=args.max_new_tokens)
    api.settings = {k: v for k, v in (limits | extra).items() if v is not None}
    return api


def request_body(row, args, api):
    """The JSON of one request, as bytes: the picture as PNG, then the question as the teacher reads it."""
    picture = io.BytesIO()
    common.load_image(row["image"]).save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}},
               {"type": "text", "text": prompt_text(row, args.instruction)}]  # fmt: skip
    body = api.settings | dict(model=api.model, messages=[{"role": "user", "content": content}])
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def ask_row(row, api, note, args, past, path):
    """A row asked until a solution will do -> (whether one did, the model's name, its line). judge.Failed where a
    request failed for good: the row stays open, and the next call goes on from its answers.

    past: {(id, fingerprint): answers of earlier calls}, from the file `path`, which each new one is added to.
    """
    key, model = dict(id=row["id"], row=fingerprint(row)), api.served
    answers, told = ([x for x in past.get(tuple(key.values()), []) if x["told"] == late] for late in (False, True))
    once = lambda problem, api: judge.complete(request_body(problem, args, api), api)
    while not (kept := keep(row, answers, told)) and (len(answers) < args.tries or len(told) < args.rationalise):
        late = len(answers) >= args.tries
        text, model, cut = judge.ask(with_gold(row) if late else row, api, note, once)
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair, which no file takes, becomes "?"
        word = "cut" if cut else grade(text, row["answer"], row["choices"])
        (told if late else answers).append(new := key | dict(model=model, told=late, grade=word, text=text))
        with FILING:
            common.append_jsonl(path, new)
    return kept is not None, model, line(row, model, kept, answers, told)


def keep(row, answers, told):
    """Of an endpoint's answers to a row, some with the gold told -> (source, solution) to keep, or None."""
    for source, some in (("api", answers), ("rationalised", told)):
        if solution := choose(row, [x["text"] for x in some if x["grade"] == "right"], some is told):
            return source, solution


# -------------------------------------------------------------------------------------------------------------- main


def solve(left, total, args, run):
    """This process's share of the rows that are left, by the teacher; each batch is filed as it is done."""
    mine, solved, asked = left[run.rank :: run.world], 0, 0
    bar = tqdm(desc=f"{run.dir}", total=total, initial=total - len(left), unit="row", disable=run.rank > 0)
    for lines in by_teacher(mine, args, run) if mine else []:
        common.append_jsonl(run.dir / f"rollouts-{run.rank}.jsonl", *lines)
        solved, asked = solved + sum(bool(x["solution"]) for x in lines), asked + len(lines)
        bar.update(min(len(lines) * run.world, bar.total - bar.n))
        bar.set_postfix_str(f"{solved / max(1, asked):.0%} with a solution")
    bar.close()


def attach(path, found):
    """Write the pool anew, each row with its solution and stored answer. A usable solution gives way to none, but a
    rationalised one to one that is not; one that would leak goes even where nothing takes its place."""
    rows = read_jsonl(path)
    for row in tqdm(rows, f"{path}", unit="row", leave=False):
        if new := found.get((row["id"], fingerprint(row))):
            row["teacher"] = new["teacher"] or row.get("teacher")
            better = new["solution_source"] in ("teacher", "api") and row.get("solution_source") == "rationalised"
            if better or not usable(row):
                row |= {"solution": new["solution"] or [], "solution_source": new["solution_source"]}
    common.write_text(path, common.jsonl(rows))
    return rows


def main(args):
    if min(args.tries, args.workers, args.deadline) <= 0:
        raise SystemExit("--tries, --workers and --deadline are above zero.")
    api, path = endpoint(args) if args.address else None, Path(args.pool)
    rows = common.load_pool(path, decode=False)
    if api and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit("--address takes one process and no GPU: python -m data.pool.solutions --address ...")
    if api:
        name = "solutions-api" if args.name == Args.name else args.name
        args = replace(args, name=name, model=args.endpoint_model, teacher="")
    else:
        args = replace(args, model=args.teacher, endpoint_model="", extra="{}")
    run = measure.start(args, SAME)
    own = {row["id"] for row in rows if usable(row) and row.get("solution_source") != "rationalised"}
    whole = lambda x: len(x["answers"]) >= args.tries and len(x["told"]) >= args.rationalise
    done = {(x["id"], x["row"]) for x in measure.read_measured(run.dir)
            if x["solution"] or x["id"] in own or whole(x)}  # fmt: skip
    dist.barrier()  # all have read before the first writes
    left = [row for row in rows if (row["id"], fingerprint(row)) not in done]
    if api:  # it stores no teacher answers, so it need not see rows that have a solution
        left = [row for row in left if row["id"] not in own]
        past, filed = defaultdict(list), run.dir / "answers.jsonl"
        convert.drop_torn_line(filed)
        for x in convert.read_whole_lines(filed):
            past[x["id"], x["row"]].append(x)
            api.served = x["model"]
        record = lambda row, marks, solved, model, new: common.append_jsonl(run.dir / "rollouts-0.jsonl", new)
        answer = partial(ask_row, args=args, past=past, path=filed)
        words = "answer", "row", "with a solution", "open"
        judge.ask_all([(row, {}) for row in left], api, args.workers, record, f"{run.dir}", answer, words)
    else:
        solve(left, len(rows), args, run)
    dist.barrier()
    if run.rank == 0:
        lines = sorted(measure.read_measured(run.dir), key=lambda x: (bool(x["solution"]), len(x["answers"])))
        found = {(x["id"], x["row"]): x for x in lines}  # of several lines of a row the one with a solution
        rows = attach(path, found)
        report(rows, found, args)


def report(rows, found, args):
    """What the pool has now, and why answers were not kept."""
    sources = Counter(row.get("solution_source") or "none" for row in rows)
    grades, why = Counter(), Counter()
    for row in rows:
        for answer in (found.get((row["id"], fingerprint(row))) or {"answers": []})["answers"]:
            grades[answer["grade"]] += 1
            if answer["grade"] == "right":
                why[make_solution(row, answer["text"])[1] or "will do"] += 1
    total, n = sum(grades.values()), len(rows)
    open_rows = sum((row["id"], fingerprint(row)) not in found and not usable(row) for row in rows)
    hinted = sum(map(usable, rows))
    print("\n| solution | rows | share |\n| --- | --- | --- |")
    for source, count in sources.most_common():
        print(f"| {source} | {count} | {count / n:.1%} |")
    share = lambda grade: f"{grades[grade] / max(1, total):.1%}"
    print(f"\nOf {total} answers {share('right')} are right, {share('cut')} cut off. "
          f"Right ones: {', '.join(f'{k} {v}' for k, v in why.most_common()) or 'none'}.\n"
          f"{hinted} of {n} rows can be hinted, {sum(bool(row.get('teacher')) for row in rows)} have a stored teacher "
          f"answer, {open_rows} are still open{' (call again)' * (open_rows > 0)}. "
          "Next: torchrun --nproc_per_node 8 -m data.pool.precondition", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
