"""Reference solutions for the pool's rows that have none, and stored teacher answers for replay.

    torchrun --nproc_per_node 8 -m data.pool.solutions                            the teacher, by training's own sampler
    python -m data.pool.solutions --api https://HOST/v1 --api-model NAME          any OpenAI-compatible endpoint

A solution is kept when its final answer is the gold and some of it can be shown without giving that away: the shortest
of those with some steps. Where none of `tries` is, one is asked for with the gold told ("rationalised"), if at all.
The teacher's first whole answer, right or wrong, is stored as token ids for reopd. Everything that was answered lies in
the run's folder; called again, only rows without an answer are asked. The pool's file is written anew at the end.
"""

import base64
import http.client
import io
import json
import os
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import common  # isort: skip  # first: it says in a sentence which package is missing
import torch.distributed as dist
from tqdm import tqdm

import grpo
from data import convert
from data.pool import measure
from judge import grade, letters, pick, prompt_text, read_jsonl


@dataclass
class Args(grpo.Args):
    name: str = "solutions"
    pool: str = "data/pool/train.jsonl"
    eval: str = ""
    steps: int = 0
    runs: str = "data/pool"
    teacher: str = "Qwen/Qwen2-VL-7B-Instruct"
    tries: int = 8  # answers to a row
    rationalise: int = 2  # answers with the gold told, where none of the others will do; 0 for never
    batch: int = 256  # the teacher's answers at a time on one process
    api: str = ""  # address of an endpoint, up to /v1; none: the teacher answers
    api_model: str = ""
    key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the key; it is written nowhere
    workers: int = 16  # requests at a time
    retries: int = 6  # of a failed request, ever longer apart


TOLD = (
    "\n(The final answer is known to be {}. Write down the reasoning that leads to it, as if you did not know it, and "
    "do not mention this remark.)"
)
MENTIONS = r"\b(?:known|given|provided|correct|stated|reference) (?:final )?answer\b|\bremark\b|\bas if\b"
OURS = ("teacher", "api", "rationalised")  # sources of solutions that are made here
SAME = "pool instruction temperature max_new_tokens max_pixels seed teacher api api_model".split()


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
    ids = next((x["ids"] for x in answers if x["ids"]), None)
    drop = lambda xs: [{k: v for k, v in x.items() if k != "ids"} for x in xs]
    return dict(id=row["id"], row=fingerprint(row), model=model, solution=solution, solution_source=source, teacher=ids,
                answers=drop(answers), told=drop(told))  # fmt: skip


def fingerprint(row):
    return measure.fingerprint(row | {"solution": None})


# ------------------------------------------------------------------------------------------------------ the endpoint

FINAL = {401: "the key is missing or wrong (set {key})", 402: "the account is empty", 403: "the key may not do this",
         404: "there is no such address or model", 422: "it takes no such request",
         **dict.fromkeys((301, 302, 303, 307, 308), "it redirects; give the address that it leads to")}  # fmt: skip


class Stay(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would take the key along to wherever it leads."""

    def redirect_request(self, *_):
        return None


OPENER = urllib.request.build_opener(Stay)


def ask(row, args):
    """One answer of the endpoint -> {grade, text}, or None where it failed for good this time.

    Failed requests (429, 5xx, time-outs, torn, blank or odd replies) are repeated, each time after a longer pause.
    """
    picture = io.BytesIO()
    common.load_image(row["image"]).save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}},
               {"type": "text", "text": prompt_text(row, args.instruction)}]  # fmt: skip
    body = dict(model=args.api_model, messages=[{"role": "user", "content": content}], temperature=args.temperature,
                max_tokens=args.max_new_tokens)  # fmt: skip
    head = {"Content-Type": "application/json"}
    if key := os.environ.get(args.key_env):
        head["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{args.api.rstrip('/')}/chat/completions", json.dumps(body).encode(), head)
    for attempt in range(args.retries):
        pause = min(60, 2**attempt) * random.uniform(0.5, 1)
        try:
            with OPENER.open(request, timeout=180) as response:
                reply = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code in FINAL:
                why = FINAL[error.code].format(key=args.key_env)
                raise SystemExit(f"{args.api} answered {error.code}: {why}. Nothing is lost; call again.") from None
            if error.code == 400:
                return None  # this one row's request is refused
            after = error.headers.get("Retry-After", "")
            pause = min(60, int(after)) if after.isdigit() else pause
        except (OSError, http.client.HTTPException, ValueError):
            pass  # no connection, a time-out, a torn reply
        else:
            if (answer := read_reply(reply, row)) is not None:
                return answer
        time.sleep(pause)
    return None


def read_reply(reply, row):
    """A reply -> {grade, text}; None where it holds no text."""
    if not isinstance(reply, dict) or not isinstance(found := reply.get("choices"), list) or not found:
        return None
    message = found[0].get("message") if isinstance(found[0], dict) else None
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str) or not text.strip():
        return None
    cut = found[0].get("finish_reason") == "length"
    return dict(grade="cut" if cut else grade(text, row["answer"], row["choices"]), text=text)


def ask_row(row, args):
    """A row asked until a solution will do -> its line, or None where a request failed: the next call asks it again."""
    answers, told = [], []
    for number in range(args.tries + args.rationalise):
        late = number >= args.tries
        answer = ask(with_gold(row) if late else row, args)
        if answer is None:
            return None
        (told if late else answers).append(answer | {"ids": None})
        if answer["grade"] == "right" and (solution := choose(row, [answer["text"]], told=late)):
            return line(row, args.api_model, ("rationalised" if late else "api", solution), answers, told)
    return line(row, args.api_model, None, answers, told)


def by_endpoint(rows, args):
    """Rows asked `workers` at a time -> yields [line], or [] for a row that stays open."""
    with ThreadPoolExecutor(args.workers) as pool:
        waiting = deque()
        for row in rows:
            waiting.append(pool.submit(ask_row, row, args))
            if len(waiting) >= 2 * args.workers:
                yield [x] if (x := waiting.popleft().result()) else []
        while waiting:
            yield [x] if (x := waiting.popleft().result()) else []


# -------------------------------------------------------------------------------------------------------------- main


def attach(path, found):
    """Write the pool anew, each row with its solution and stored answer; a solution of the source's own is kept."""
    rows = read_jsonl(path)
    for row in rows:
        if new := found.get((row["id"], fingerprint(row))):
            row["teacher"] = new["teacher"] or row.get("teacher")
            if not usable(row) or row["solution_source"] in OURS:
                row |= {"solution": new["solution"] or [], "solution_source": new["solution_source"]}
    common.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def main(args):
    if args.api and not args.api_model:
        raise SystemExit("--api takes the name of a model, too: --api-model NAME.")
    run, path = measure.start(args, SAME), Path(args.pool)
    if args.api and run.world > 1:
        raise SystemExit("--api needs no GPU and one process: python -m data.pool.solutions --api ...")
    rows = common.load_pool(path, decode=False)
    own = {row["id"] for row in rows if row.get("solution_source") not in (None, *OURS) and usable(row)}
    whole = lambda x: len(x["answers"]) >= args.tries and len(x["told"]) >= args.rationalise
    done = {(x["id"], x["row"]) for x in measure.read_measured(run.dir)
            if x["solution"] or x["id"] in own or whole(x)}  # fmt: skip
    dist.barrier()  # all have read before the first writes
    left = [row for row in rows if (row["id"], fingerprint(row)) not in done]
    if args.api:  # it stores no teacher answers, so it need not see rows that come with a solution
        left = [row for row in left if row["id"] not in own]
    mine = left[run.rank :: run.world]
    bar = tqdm(desc=f"{run.dir}", total=len(rows), initial=len(rows) - len(left), unit="row", disable=run.rank > 0)
    solved = asked = 0
    for lines in by_endpoint(mine, args) if args.api else by_teacher(mine, args, run) if mine else []:
        common.append_jsonl(run.dir / f"rollouts-{run.rank}.jsonl", *lines)
        solved, asked = solved + sum(bool(x["solution"]) for x in lines), asked + len(lines)
        bar.update(min(len(lines) * run.world, bar.total - bar.n))
        bar.set_postfix_str(f"{solved / max(1, asked):.0%} with a solution")
    bar.close()
    dist.barrier()
    if run.rank == 0:
        found = {(x["id"], x["row"]): x for x in measure.read_measured(run.dir)}
        rows = attach(path, found)
        report(rows, found, args)
    dist.barrier()


def report(rows, found, args):
    """What the pool has now, and why answers were not kept."""
    sources = Counter(row.get("solution_source") or "none" for row in rows)
    grades, why = Counter(), Counter()
    for row in rows:
        for answer in (found.get((row["id"], fingerprint(row))) or {"answers": []})["answers"]:
            grades[answer["grade"]] += 1
            if answer["grade"] == "right":
                why[make_solution(row, answer["text"])[1] or "will do"] += 1
    total, n = sum(grades.values()) or 1, len(rows)
    open_rows = sum((row["id"], fingerprint(row)) not in found and not usable(row) for row in rows)
    hinted = sum(map(usable, rows))
    print("\n| solution | rows | share |\n| --- | --- | --- |")
    for source, count in sources.most_common():
        print(f"| {source} | {count} | {count / n:.1%} |")
    print(f"\nOf {total} answers {grades['right'] / total:.1%} are right, {grades['cut'] / total:.1%} cut off. "
          f"Right ones: {', '.join(f'{k} {v}' for k, v in why.most_common()) or 'none'}.\n"
          f"{hinted} of {n} rows can be hinted, {sum(bool(row.get('teacher')) for row in rows)} have a stored teacher "
          f"answer, {open_rows} are still open{' (call again)' * (open_rows > 0)}. "
          "Next: torchrun --nproc_per_node 8 -m data.pool.precondition", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(common.parse(Args, sys.argv[1:]))
