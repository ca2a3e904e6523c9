"""The diff between two arms is the documentation of what they differ in: this file keeps the diffs short and honest."""

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import fields
from itertools import combinations

import pytest
from conftest import ROOT

ARMS = [name for name in ("grpo", "hint", "uft", "opd", "reopd", "vapo", "stack") if (ROOT / f"{name}.py").exists()]
BUDGETS = {
    ("grpo", "hint"): 35,
    ("hint", "uft"): 14,
    ("grpo", "opd"): 38,
    ("grpo", "reopd"): 40,
    ("opd", "reopd"): 45,
    ("hint", "stack"): 25,
    ("grpo", "stack"): 45,
    ("grpo", "vapo"): 95,
}
BANNERS = ["1. problems", "2. rollout", "3. advantage", "4. update", "5. log and save"]
PACKAGES = {"common", "torch", "transformers", "PIL", "numpy", "scipy", "tqdm"}
OWN = {("vapo", "clip_high")}  # defaults that are the arm's own: VAPO clips higher (2504.05118, section 4)

pairs = pytest.mark.parametrize("a, b", list(combinations(ARMS, 2)) or [("grpo", "grpo")])
each = pytest.mark.parametrize("arm", ARMS)


def source(arm):
    return (ROOT / f"{arm}.py").read_text(encoding="utf-8")


def function(arm, name):
    """The text of a top-level function, or None."""
    found = [x for x in ast.parse(source(arm)).body if isinstance(x, ast.FunctionDef) and x.name == name]
    return ast.get_source_segment(source(arm), found[0]) if found else None


@pytest.mark.parametrize("pair, budget", BUDGETS.items())
def test_a_diff_stays_within_its_budget(pair, budget):
    if not set(pair) <= set(ARMS):
        pytest.skip(f"{' or '.join(set(pair) - set(ARMS))} is not written yet.")
    diff = subprocess.run(["diff", *(ROOT / f"{arm}.py" for arm in pair)], capture_output=True, text=True)
    lines = sum(line[:1] in "<>" for line in diff.stdout.splitlines())
    assert diff.returncode == 1 and lines <= budget, f"diff {pair[0]}.py {pair[1]}.py: {lines} lines, budget {budget}"


@each
def test_the_loop_has_the_same_five_banners_in_the_same_order(arm):
    assert re.findall(r"^        # -+ (.*)$", function(arm, "main"), re.M) == BANNERS


@each
def test_an_arm_imports_only_common_the_gates_the_standard_library_and_the_packages_of_the_card(arm):
    names = {
        name
        for node in ast.walk(ast.parse(source(arm)))
        for name in ([x.name for x in node.names] if isinstance(node, ast.Import) else
                     [f"{node.module}.{x.name}" for x in node.names] if isinstance(node, ast.ImportFrom) else [])
    }  # fmt: skip
    assert {"common", "data.gates"} <= names
    assert {name.split(".")[0] for name in names - {"data.gates"}} <= PACKAGES | sys.stdlib_module_names


@each
def test_an_arm_is_docstring_args_functions_main_guard_in_that_order(arm):
    body = ast.parse(source(arm)).body
    kinds = [type(x).__name__ for x in body if not isinstance(x, ast.Import | ast.ImportFrom)]
    assert kinds[:2] == ["Expr", "ClassDef"] and kinds[-1] == "If"
    assert body[-2].name == "main" and function(arm, "policy_loss")
    names = [x.name for x in body if isinstance(x, ast.FunctionDef)]
    last = [n for n in ("group_advantage", "policy_loss", "main") if n in names]
    assert names[-len(last) :] == last, "a prior's functions come before those that all arms share"


@pairs
def test_settings_that_two_arms_share_have_the_same_type_default_and_order(a, b):
    first, second = ({f.name: (f.type, f.default) for f in fields(importlib.import_module(arm).Args)} for arm in (a, b))
    shared = [name for name in first if name in second]
    assert shared == [name for name in second if name in first]
    assert {"seed", "pool", "eval", "problems", "group", "lr", "steps", "max_new_tokens", "temperature"} <= set(shared)
    for name in shared:
        own = name == "name" or {(a, name), (b, name)} & OWN
        assert own or first[name] == second[name], f"{a}.py and {b}.py differ in --{name.replace('_', '-')}"


@each
def test_the_default_name_of_a_run_is_the_arms_own(arm):
    others = {importlib.import_module(x).Args().name for x in ARMS if x != arm}
    assert importlib.import_module(arm).Args().name not in others


@pytest.mark.parametrize("name", ["group_advantage", "policy_loss"])
def test_what_all_arms_share_is_the_same_to_the_letter(name):
    texts = {arm: function(arm, name) for arm in ARMS}
    assert texts["grpo"]
    assert {text for text in texts.values() if text} == {texts["grpo"]}


def test_the_diff_sizes_in_the_readme_are_those_of_the_files():
    table = re.findall(r"^\| [\w-]+ \| `(\w+)\.py.*\| ([^|]*\d) \|$", (ROOT / "README.md").read_text(), re.M)
    told = {(a, b, int(n)) for b, cell in table for a, n in re.findall(r"(\w+) (\d+)", cell)}
    diff = lambda a, b: (
        subprocess.run(["diff", ROOT / f"{a}.py", ROOT / f"{b}.py"], capture_output=True, text=True).stdout
    )
    assert len(told) >= 8
    assert told == {(a, b, sum(x[:1] in "<>" for x in diff(a, b).splitlines())) for a, b, _ in told}
