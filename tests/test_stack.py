"""Stack: the teacher reads the hint that the student read, and both priors and the reward meet in one advantage."""

from dataclasses import replace

import pytest
import torch
from conftest import answers, close, stock_logps
from transformers import Qwen2VLForConditionalGeneration

import hint
import stack
from data import gates


@pytest.mark.usefixtures("mixed")
def test_the_teacher_scores_answers_given_the_hint(watch, make_args, load, rich, teacher, stock):
    args = make_args(stack, steps=2, lr=0.0, kl_until=1.0, hint_until=1.0, pool=rich, teacher=teacher, kl_coef=0.4)
    seen, arm = watch(stack, args), load(replace(args, name="reference"))
    master = Qwen2VLForConditionalGeneration.from_pretrained(teacher).eval()
    hinted = 0
    for step, share in (0, 1.0), (1, 0.5):
        problems, batch = seen.batches[step]
        reward = (torch.arange(16) % 2 == 0).float()
        rest = seen.advs[step] - hint.group_advantage(reward, args)[:, None] * batch.mask
        assert not (seen.advs[step] * (1 - batch.mask)).any() and not seen.advs[step].requires_grad
        for i in range(0, 16, 3):
            forced, sampled = answers(batch)[i]
            ours, given = (stock_logps(m, arm, problems[i], forced, sampled)[len(forced) :] for m in (stock, master))
            without = stock_logps(master, arm, problems[i], [], sampled)
            kl = rest[i][batch.mask[i] > 0]
            assert close(kl, share * 0.4 * (given - ours).detach().clamp(-10, 5), 1e-4)
            if forced:
                hinted += 1
                assert not close(given, without, 0.1)
                assert not close(kl, share * 0.4 * (without - ours).detach().clamp(-10, 5), 0.02)
    assert hinted > 6


def test_its_gates_are_those_of_both_priors(watch, make_args, monkeypatch):
    reports = []
    monkeypatch.setattr(gates, "report", lambda checks, *rest: reports.append([g["name"] for g in checks]))
    watch(stack, make_args(stack, steps=1, gates="warn"))
    assert {"solutions", "no leak", "half hint", "teacher's eyes", "self-teaching", "ceiling", "sampling"} <= {
        *reports[0]
    }
