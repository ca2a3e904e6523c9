"""data/toy/critics.py: states of answers, the table critic and its explained variance by hand, and the command."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_toy import RIGHT, ROW, answers

import common
import grpo
import vapo
from data.toy import critics, prepare

SOLUTION = ["491;", "+50=541;", "-1=540;", "<answer>540</answer>"]
ON, OFF = "on course, {:2} left".format, "off course, {:2} left".format


def token(state="", reward=0.0, value=0.0, half=0, step=0, group="", enters=True, raw=0.0, adv=0.0):
    return critics.Token(step, half, group, state, enters, value, reward, raw, adv)


# ---- states


@pytest.mark.parametrize("width", [1, 3])
def test_a_state_is_that_of_the_sentences_that_have_ended_before_the_token(width):
    text = "491;+50=541;-1=539;<answer>539</answer>"  # sentences end at 4, 12 and, wrong, at 19 characters
    texts = [text[i : i + width] for i in range(0, len(text), width)]
    starts = range(0, len(text), width)
    expected = [ON(4) if i < 4 else ON(3) if i < 12 else ON(2) if i < 19 else OFF(1) for i in starts]
    assert critics.states(texts, SOLUTION) == expected
    assert critics.states(texts[:-20], SOLUTION) == expected[:-20]  # what follows is not known


def test_states_of_work_in_todays_format_of_guesses_and_of_work_that_never_ends():
    assert (
        critics.states(["+8=", "45;", "<answer>", "45"], ["+8=45;", "<answer>45</answer>"]) == [ON(2)] * 2 + [ON(1)] * 2
    )
    assert critics.states(["<answer>", "540", "</answer>", ""], SOLUTION) == [ON(4)] + ["no work"] * 3
    assert critics.states(["491;", "<answer>", "540"], SOLUTION) == [ON(4), ON(3), ON(3)]  # work that stops short
    assert critics.states(["7;"] * 6, SOLUTION) == [ON(4), OFF(3), OFF(2), OFF(1), OFF(0), OFF(0)]
    assert critics.states(["491;+50", "=541;"], SOLUTION) == [ON(4), ON(3)]  # a token may hold a sentence's end


# ---- what is told of tokens


def test_the_table_is_the_mean_of_the_other_half_and_its_explained_variance_that_of_numpy():
    tokens = [
        token("a", 1.0), token("a", 0.0), token("a", 0.0, step=1), token("b", 1.0, step=1),
        token("a", 1.0, half=1, step=2), token("a", 1.0, half=1, step=2), token("c", 0.0, half=1, step=3),
    ]  # fmt: skip
    table = critics.table_critic(tokens)
    assert table == pytest.approx([1, 1, 1, 2 / 3, 1 / 3, 1 / 3, 1 / 2])  # b and c are unknown to the other half
    returns = np.array([1, 0, 0, 1, 1, 1, 0])
    expected = 1 - np.var(returns - table) / np.var(returns)
    share, error = critics.explained(tokens, table)
    assert share == pytest.approx(expected, abs=1e-6) and error > 0
    assert critics.explained(tokens, returns.tolist()) == pytest.approx((1, 0), abs=1e-6)
    assert critics.explained(tokens, [0.3] * 7)[0] == pytest.approx(0, abs=1e-6)
    assert np.isnan(critics.explained([token(), token()], [0.1, 0.2])[0])
    alike = [x._replace(step=s) for s in range(9) for x in tokens]  # every draw of steps is the same
    assert critics.explained(alike, table * 9) == pytest.approx((expected, 0), abs=1e-6)


def test_where_each_sentence_is_a_token_the_table_is_that_of_prepare():
    texts = [RIGHT, *["327;+8=325;-20=305;-60=245;<answer>245</answer>"] * 2,
             "327;+8=335;-20=315;-60=155;<answer>155</answer>"]  # fmt: skip
    tokens = [token(state, float(text == RIGHT), half=half) for half in (0, 1) for text in texts
              for state in critics.states(prepare.sentences(text), ROW["solution"])]  # fmt: skip
    theirs = np.mean(prepare.table_critic([ROW] * 2, [answers(*texts)] * 2))
    assert critics.explained(tokens, critics.table_critic(tokens))[0] == pytest.approx(theirs, abs=1e-6)


def test_profile_and_scale_are_those_of_numpy():
    rng, tokens = np.random.default_rng(0), []
    for _ in range(60):
        reward, value, raw, adv = rng.random(4)
        tokens.append(token(rng.choice(["a", "b"]), float(reward > 0.5), value, enters=reward > 0.2, raw=raw - 0.5,
                            adv=adv, group=rng.choice(["x", "y"])))  # fmt: skip
    profile, scale = critics.profile(tokens), critics.scale(tokens)
    assert profile.keys() == {"a", "b"} and scale.keys() == {"x", "y"}
    for state, found in profile.items():
        v, r = np.array([(x.value, x.reward) for x in tokens if x.state == state and x.enters]).T
        assert found == pytest.approx((len(v), r.mean(), v.mean(), v.std()))
    for group, found in scale.items():
        raw, adv = np.array([(x.raw, x.adv) for x in tokens if x.group == group]).T
        assert found == pytest.approx((len(raw), raw.mean(), (raw**2).mean() ** 0.5, (adv**2).mean() ** 0.5))


# ---- the command


@pytest.fixture(scope="module")
def run(make_args):
    """The folder of a tiny vapohl run that has ended, its groups mixed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "reward", reward)
        vapo.main(args := make_args(vapo, steps=1, gates="warn", critic_loss="hlgauss", lambda_floor=0.95, eval=""))
    return Path(args.runs) / f"{args.name}-s{args.seed}"


def reward(batch, problems):
    """Of each group of four the second answer is right, but for the last group, which is all wrong."""
    right = [i % 4 == 1 and i < len(problems) - 4 for i in range(len(problems))]
    return common.torch.tensor(right).float(), ["right" if x else "wrong" for x in right]


@pytest.mark.parametrize("policy", ["base", "trained"])
def test_tokens_are_what_the_update_would_have_made_of_them(run, policy, monkeypatch):
    monkeypatch.setattr(common, "reward", reward)
    tokens = critics.study(run, 2, policy)
    for step in (0, 1):
        mine = [x for x in tokens if x.step == step]
        raw = np.array([x.raw for x in mine])
        assert np.array([x.adv for x in mine]) == pytest.approx(raw / max(raw.std(), 0.1), rel=1e-4)
        ends = [
            i for i, x in enumerate(mine) if i + 1 == len(mine) or (mine[i + 1].enters and mine[i + 1].state == ON(3))
        ]
        assert len(ends) == 16
        for i in ends:  # what is left at the last token is return less V
            assert mine[i].raw == pytest.approx(mine[i].reward - mine[i].value, abs=1e-6)
        for i in set(range(len(mine))) - set(ends):  # answers of up to 20 tokens: lambda is at its floor
            a, b = mine[i], mine[i + 1]
            assert a.raw == pytest.approx(b.value - a.value + 0.95 * b.raw, abs=1e-6)
        wins = [mine[i].reward for i in ends]
        assert wins == ([0, 1, 0, 0] * 3 + [0] * 4) and {x.half for x in mine} == {0, 1}
        groups = [mine[i].group for i in ends]
        assert groups == ["mixed, wrong", "mixed, right", "mixed, wrong", "mixed, wrong"] * 3 + ["all wrong"] * 4
    assert len({x.value for x in tokens}) > 20  # a trained critic: V moves with what it sees
    assert critics.study(run, 2, policy) == tokens


def test_the_command_prints_a_table_for_each_question_with_runs_side_by_side(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "reward", reward)
    shutil.copytree(run, other := tmp_path / "other-s0")
    critics.main([str(run), str(other), "--steps", "2"])
    out = capsys.readouterr().out
    lines = [[x.strip() for x in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("| ")]
    assert out.count("### ") == 3 and "2 steps of the base policy" in out
    first, again = lines[1], lines[2]
    assert (
        (first[0], again[0]) == (run.name, "other-s0")
        and first[1:] == again[1:]
        and "%" in first[3]
        and "%" in first[4]
    )
    rows = {line[0]: line[1:] for line in lines[3:]}
    assert {ON(3), "mixed, wrong", "mixed, right", "all wrong"} <= rows.keys()
    assert rows[ON(3)][:2] == ["32", "0.1875"]  # all answers begin there; 6 of 32 are right
    assert all(row[: len(row) // 2] == row[len(row) // 2 :] for key, row in rows.items() if key)
    tokens = critics.study(run, 2)
    for cell, values in zip(first[3:], ([x.value for x in tokens], critics.table_critic(tokens)), strict=True):
        share, error = critics.explained(tokens, values)
        assert cell == f"{share:.1%} +- {error:.1%}"
    assert int(first[1]) == len(tokens) == sum(int(rows[k][0]) for k in rows if k.startswith(("mixed", "all")))
    assert not (Path(run).parent / "vapo-s12345").exists()  # its own run folder is gone


def test_what_it_cannot_study_is_said_in_a_sentence(run, tmp_path, make_args):
    def refused(*argv):
        with pytest.raises(SystemExit) as stop:
            critics.main([str(x) for x in argv])
        return str(stop.value)

    def without(part):
        shutil.copytree(run, folder := tmp_path / part.replace(".", "-"))
        (folder / part).rename(folder / "gone")
        return folder

    assert "is no run of a critic arm" in refused(tmp_path)
    plain = common.start(make_args(grpo)).dir
    assert f"{plain} is no run of a critic arm" in refused(plain)
    assert "has not ended" in refused(without("outputs.jsonl"))
    assert "lacks critic.safetensors" in refused(run, folder := without("critic.safetensors"))
    assert str(folder) in refused(run, folder)  # before the first is studied
    assert "lacks checkpoint" in refused(without("checkpoint"), "--policy", "trained")
    assert "--steps 0 has to be above 0" in refused(run, "--steps", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "load_pool", lambda path: [dict(id="a7", solution=None)])
        assert "id a7: there is no solution" in refused(run)
    shutil.copytree(run, other := tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["sha256"][config["args"]["pool"]] = "0"
    (other / "config.json").write_text(json.dumps(config))
    assert f"is not the file that {other} was trained on" in refused(other)
