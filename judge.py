"""judge.py: the outputs of all runs in, one verdict per distinct output out, blind to who wrote it.

Protocol
  1. Every run's outputs are joined with the evaluation sets its config.json names. A judged item is the question as the
     model read it (options included), the reference answer, and the whole output, never an extracted answer.
  2. There the run's name ends: the queue holds no arm, seed, set or row id. Identical items are one item, so equal
     outputs get equal verdicts, and an arm that says nothing new costs nothing.
  3. The queue is shuffled with a seed, which stands in every verdict's line.
  4. A verdict is true or false, appended as one line {key, verdict, judge, seed} the moment it is known. Whenever the
     judge is killed, the next call judges only what is missing.
  5. A verdicts file holds one judge. Accuracies by different judges are not comparable.

Judges
  rule   the training reward's grader, not the paper's LLM judge. It reads answers by their form, and form differs
         between arms: for the toy and for CI, never a number to set beside the paper's.

  python judge.py runs/* --judge rule
  python analyze.py
"""

import argparse
import hashlib
import json
import os
import random
from pathlib import Path

from tqdm import tqdm

from common import grade, prompt_text, read_jsonl

LABEL = {"rule": "rule judge, not the paper's LLM judge"}
VERDICTS = Path("runs/verdicts.jsonl")


def key(question, reference, output):
    """sha256 of one judged item, three strings. JSON keeps their borders: ("ab", "c") is not ("a", "bc")."""
    return hashlib.sha256(json.dumps([question, reference, output]).encode()).hexdigest()


def read_answers(run):
    """A run folder's greedy answers: a list of {set, id, key, question, reference, choices, output} in the order of its
    evaluation sets. Stops with a sentence where the run is unfinished or the sets are not those it answered."""
    if not (run / "config.json").exists():
        raise SystemExit(f"{run} is no run folder (no config.json): name run folders only, such as runs/grpo-s0.")
    paths = [Path(path) for path in json.loads((run / "config.json").read_text())["args"]["eval"].split(",") if path]
    for path in paths:
        if not path.exists():
            raise SystemExit(f"{run} was evaluated on {path}, which is not here: call from the folder that holds it.")
    if not (run / "outputs.jsonl").exists():
        raise SystemExit(f"{run} is unfinished: give its command again, which resumes it, or move the folder away.")
    rows = {(path.stem, row["id"]): row for path in paths for row in read_jsonl(path)}
    outputs = {(line["set"], line["id"]): line["output"] for line in read_jsonl(run / "outputs.jsonl")}
    if unmatched := sorted(rows.keys() ^ outputs.keys()):
        raise SystemExit(
            f"{run}/outputs.jsonl and the evaluation sets differ in {len(unmatched)} rows, {unmatched[0][1]} of "
            f"{unmatched[0][0]} first: put the sets back as they were, or delete the folder and run the arm again."
        )
    answers = []
    for (name, id), row in rows.items():
        item = {"question": prompt_text(row), "reference": row["answer"], "output": outputs[name, id]}
        answers.append({"set": name, "id": id, "key": key(**item), "choices": row["choices"], **item})
    return answers


def blind_queue(answers, seed):
    """Distinct items to judge, without run, set or id, in an order that depends on the items and the seed alone."""
    fields = ("key", "question", "reference", "choices", "output")
    items = {answer["key"]: {field: answer[field] for field in fields} for answer in answers}
    queue = [items[k] for k in sorted(items)]
    random.Random(seed).shuffle(queue)
    return queue


def read_verdicts(path, judge=None):
    """A verdicts file as (judge, {key: bool}), an absent one as (judge, {}). Stops with a sentence where it holds
    another judge than the one asked for, or a line that is no verdict."""
    lines = read_jsonl(path) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not ({"key", "judge"} <= line.keys() and isinstance(line.get("verdict"), bool)):
            raise SystemExit(f"{path}, line {number} is no verdict (key, judge, true or false): is it a verdicts file?")
    judges = {line["judge"] for line in lines}
    if len(judges) > 1 or (judge and judges - {judge}):
        raise SystemExit(
            f"{path} holds verdicts by {' and '.join(sorted(judges))}, asked is {judge or 'one judge'}: verdicts of "
            "different judges never mix, name another file with --verdicts."
        )
    return judges.pop() if judges else judge, {line["key"]: line["verdict"] for line in lines}


def drop_torn_line(path):
    """Cuts off what a killed judge left behind the last newline of the verdicts file."""
    text = path.read_bytes() if path.exists() else b""
    if torn := len(text) - text.rfind(b"\n") - 1:
        os.truncate(path, len(text) - torn)
        print(f"{path} ended in a torn line ({torn} bytes, a judge was killed while writing): dropped, judged again.")


def rule(item):
    """Whether the training reward's grader calls the output right; an unparsed output is not right. -> bool"""
    return grade(item["output"], item["reference"], item["choices"]) == "right"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; plain files among them are skipped")
    parser.add_argument("--judge", choices=["rule"], default="rule")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument("--seed", type=int, default=0, help="order of the queue")
    args = parser.parse_args(argv)

    runs = [path for path in args.runs if not path.is_file()]  # runs/* names the verdicts file as well
    if not runs:
        raise SystemExit(f"{args.runs[0]} is no run folder: name run folders, such as runs/grpo-s0.")
    answers = [answer for run in runs for answer in read_answers(run)]
    drop_torn_line(args.verdicts)
    verdicts = read_verdicts(args.verdicts, args.judge)[1]
    queue = blind_queue(answers, args.seed)
    todo = [item for item in queue if item["key"] not in verdicts]
    args.verdicts.parent.mkdir(parents=True, exist_ok=True)
    with open(args.verdicts, "a") as file:
        for item in tqdm(todo, desc=LABEL[args.judge], unit="output"):
            line = {"key": item["key"], "verdict": rule(item), "judge": args.judge, "seed": args.seed}
            file.write(json.dumps(line) + "\n")
            file.flush()  # a verdict that is known is on disk
    elsewhere = f" --runs {runs[0].parent} --verdicts {args.verdicts}"
    print(
        f"{len(runs)} runs, {len(answers)} outputs, {len(queue)} distinct: {len(todo)} judged now, "
        f"{len(queue) - len(todo)} reused ({LABEL[args.judge]}).\nVerdicts: {args.verdicts}. Next: python analyze.py"
        + elsewhere
        * (args.verdicts != VERDICTS)
    )


if __name__ == "__main__":
    main()
