"""The arithmetic of tests/bench_arms.py: the bytes that it reckons with are those of the real objects."""

import json
from dataclasses import asdict, replace

import bench_arms
import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp
import transformers
from bench_step import TEXT_2B, VISION_2B

import common
import opd
import vapo


def size(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_the_bytes_reckoned_for_a_card_are_those_of_the_real_objects(make_args, monkeypatch, micro_batch):
    args = make_args(vapo)
    run = common.start(args)
    run.dtype = torch.bfloat16  # as on a GPU
    policy, processor = common.load_policy(args.model, args, run), common.Processor(args.model, args)
    critic, teacher = common.load_critic(args.model, 51, args, run), common.load_frozen(args.model, processor, run)
    modules = (policy, common.token_logps), (critic, common.token_values)
    reduce, unreduced, moments = fsdp.foreach_reduce, [], []

    def reduced(params, gradients, *rest, **more):
        unreduced.append((gradients[0].dtype, size(gradients)))
        return reduce(params, gradients, *rest, **more)

    monkeypatch.setattr(fsdp, "foreach_reduce", reduced)
    batch = common.sample(policy, processor, common.next_problems(common.load_pool(args.pool), 0, args, run), args, run)
    for module, read in modules:
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
        for rows in common.micro_batches(module, torch.arange(4), replace(args, micro_batch=micro_batch)):
            read(module, batch, rows, args).sum().backward()
        optimizer.step()
        moments += [x for state in optimizer.state.values() for name, x in state.items() if name != "step"]

    cache, student = policy.decoders[0].keys, bench_arms.count(args.model)
    counts = dict(policy=student, critic=bench_arms.count(args.model, critic=51), teacher=student, cache=cache.shape)
    held = lambda stage: bench_arms.held(stage, **counts, several=micro_batch < 4)
    rollout, advantage, update = map(held, ("rollout", "advantage", "update"))
    shards, head = [p for module, _ in modules for p in module.parameters()], size(critic.head.parameters())
    gradients = [p.grad for p in shards if p.requires_grad]
    least = min(size(p.grad for p in module.parameters() if p.requires_grad) for module, _ in modules)
    assert [*rollout[0].values()] == [size(map(common._local, x)) for x in (shards, moments, gradients)]
    assert rollout[1] == {"sampler": size(policy.sampler.parameters()), "KV cache": 2 * size([cache]),
                          "teacher": size(teacher.model.parameters())}  # fmt: skip

    for module, read in modules:
        common.score(module, batch, args, read)
    gathered = size(p for module, _ in modules for p in module.parameters()) - head / 2  # of fp32: counted as bf16
    assert advantage == (rollout[0], rollout[1] | {"gathered weights": gathered})

    assert update[0] == rollout[0] | {"fp32 gradients, 4 B": least}
    several = micro_batch < 4
    _, (dtype, body), (fp32, of_head) = sorted(unreduced, key=lambda x: -x[1])  # each reduced just once
    assert dtype == (torch.float32 if several else torch.bfloat16) and (fp32, of_head) == (torch.float32, head)
    assert update[1] == advantage[1] | {
        "gradients of a micro-batch": (body / 2 if several else body) + head / 2,
        "their fp32 sum": (body + head) * several,
    }


def test_a_prediction_takes_away_what_other_cards_hold_and_adds_the_buffer_of_the_gather():
    gib, sharded, whole = 2**30, {"a": 16 * 2**30}, {"b": 2**30}
    for n, stage, expected in ((1, "rollout", 6), (1, "update", 9), (2, "update", 14), (8, "update", 20)):
        predicted, told = bench_arms.reckoning(stage, 20.0, n, 3 * gib, sharded, whole)
        assert (
            predicted == expected and f"{20 - 16 / n - 1:.2f} of activations" in told and f" {expected}.00 of" in told
        )


@pytest.mark.parametrize(
    "text, vision, whole, tower",
    [({}, {}, 2_208_985_600, 665_271_296), (bench_arms.TEXT_7B, dict(hidden_size=3584), 8_291_375_616, 675_759_104)],
)
def test_full_size_models_have_the_published_number_of_parameters(text, vision, whole, tower, tmp_path):
    tied = (TEXT_2B | text)["tie_word_embeddings"]
    config = dict(text_config=TEXT_2B | text, vision_config=VISION_2B | vision, tie_word_embeddings=tied)
    transformers.Qwen2VLConfig(**config).save_pretrained(tmp_path)
    assert bench_arms.count(tmp_path) == (whole, whole - tower) and bench_arms.count(tmp_path, 0) == (whole, whole)


def test_an_arm_starts_on_two_processes_with_the_answers_and_the_loss_that_it_had_on_one(
    make_args, teacher, tmp_path, capsys
):
    args = asdict(make_args(opd, problems=4, teacher=teacher))
    flags = [x for k, v in args.items() if k not in ("name", "runs") for x in ("--" + k.replace("_", "-"), str(v))]
    rows, table = {}, []
    for n in (1, 2):
        run, why = bench_arms.measure("opd", n, 4, flags, tmp_path)
        assert run, why
        assert {x.name for x in run.iterdir()} == {"config.json", "cache.json", "metrics.jsonl", "rollouts.jsonl"}
        rows[n], cache = (common.read_jsonl(run / x) for x in ("metrics.jsonl", "cache.json"))
        for row in rows[n]:  # as a GPU's are
            row |= {f"memory_{stage}": 50.0 for stage in ("rollout", "advantage", "update")} | dict(memory_gb=51.0)
        config = json.loads((run / "config.json").read_text())["args"]
        table.append(bench_arms.summary("opd", n, rows[n], cache[0], config))
    for name in ("loss", "grad_norm", "tokens"):
        assert rows[1][0][name] == pytest.approx(rows[2][0][name], rel=1e-4) and rows[1][0][name]
    assert rows[1][1]["loss"] != pytest.approx(rows[2][1]["loss"], rel=1e-2)  # from then on each draws its own
    told = capsys.readouterr().out
    assert told.count("measured =") == 6 and "of the 79 GiB of an 80 GB card" in told and "51.00 GiB" in told
    head, _, *lines = bench_arms.markdown(table).splitlines()
    assert len(lines) == 2 and all(x.count("|") == head.count("|") for x in lines) and "over 8, at most GiB" in head
