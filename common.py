"""The machinery that is the same in all arms: run folders, sharding, rollouts, log-probs, reward, outputs.

What an arm might change (advantages, losses, schedules, prefixes) is written out in the arm, never here. Problems are
read and drawn by data/rows.py, what is verified before and after training stands in data/gates.py.

**B** sequences on this rank = problems x group; **T** response width (forced, then sampled tokens): the last T columns;
**S** whole width, prompts padded on the left; **b** rows of a micro-batch; **V** rows of the embedding: some are no
tokens or never sampled, and have logit -inf.
"""

import argparse
import atexit
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from inspect import signature
from pathlib import Path

from judge import grade, need, prompt_text, read_jsonl

need("torch", "transformers", "PIL", "numpy", "scipy", "tqdm")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoTokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb

# some of these for the arms alone, which say common.load_pool, common.segments and so on
from data.rows import MARKS, load_image, load_pool, load_sets, next_problems, segments, teacher_cuts  # noqa: F401

torch._dynamo.config.recompile_limit = 256  # two for each number of rows and width of the cache; the next run eager
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans every new shape anew: 10x slower where lengths vary
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# ---------------------------------------------------------------------------------------------------------- 1 config

# `--toy` replaces the defaults of those fields that an arm has; nothing else in the project knows about the toy.
# `--toy FOLDER` is another world of its kind (data/toy/prepare.py --rebuild --seed 1).
TOY = dict(
    model="data/toy/student", pool="data/toy/train.jsonl", instruction="",
    eval="data/toy/sparse.jsonl,data/toy/cross.jsonl,data/toy/old.jsonl,data/toy/easy.jsonl",
    problems=8, max_new_tokens=60, max_pixels=84 * 112, steps=200, lr=5e-5, warmup=1, weight_decay=0.0,
    minibatches=1, micro_batch=64, checkpointing=0, eval_every=100, eval_size=50, teacher="data/toy/teacher",
    critic_lr=3e-4, value_steps=300, lambda_floor=0.95,
)  # fmt: skip

CHOICES = dict(gates=("stop", "warn", "off"), mix=("pure", "annealed", "gated"), gate=("rollout", "group"),
               replay=("position", "staircase"), critic_loss=("mse", "hlgauss"))  # fmt: skip


def flag(name):
    return "--" + name.replace("_", "-")


def parse(Args, argv=None):
    """Command line -> Args: each field of the dataclass is a `--kebab-flag`; flags given beat the toy's defaults."""
    parser = argparse.ArgumentParser(description=sys.modules[Args.__module__].__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for f in fields(Args):
        parser.add_argument(flag(f.name), type=f.type, choices=CHOICES.get(f.name), help=f"default: {f.default}")
    parser.add_argument("--toy", nargs="?", const="data/toy", metavar="FOLDER", help="the toy world, data/toy")
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    if "eval" in given:
        given["eval"] = ",".join(map(str.strip, given["eval"].split(",")))
    folder = given.pop("toy", None)
    toy = {f.name: TOY[f.name] for f in fields(Args) if f.name in TOY} if folder else {}
    toy = {k: v.replace("data/toy", folder) if isinstance(v, str) else v for k, v in toy.items()}
    return Args(**(toy | given))


# ------------------------------------------------------------------------------------------------------------- 2 run


def write_text(path, text):
    """Write a whole file or nothing: a reader never sees half of it."""
    new = Path(f"{path}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def jsonl(rows):
    """Rows -> the text of a JSONL file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_jsonl(path, *rows):
    with open(path, "a", encoding="utf-8") as f:
        f.write(jsonl(rows))


LATE = 90  # seconds


def appears(path):
    """Whether a file that another process has written is here: NFS remembers for up to a minute that it was not."""
    late = time.monotonic() + LATE
    while not path.exists() and time.monotonic() < late:
        time.sleep(0.5)
    return path.exists()


def clock():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


@cache
def lock_folder(path):
    """Keep other processes out of a run's folder for as long as this one lives."""
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{path} is being written by a run that is still going: wait for it, or use another --name."
                         ) from None  # fmt: skip
    except OSError:
        pass  # a file system without locks


def start(args):
    """Join the other processes of torchrun, if any, then open or make the run's folder -> Run."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(backend, **alone)
        atexit.register(dist.destroy_process_group)
    return Run(args)


POSITIVE = ("problems", "group", "warmup", "save_every", "patience", "minibatches", "micro_batch", "eval_size",
            "max_new_tokens", "temperature", "value_steps", "kl_until")  # fmt: skip
LEFT = ("gates.json", "pretraining.jsonl", "critic.safetensors")  # of a start that ended before its first state
FREE = ("runs", "gates", "patience", "save_every")  # flags that change no weight and may differ when a run is resumed


def check_flags(args, world):
    """Stop with a sentence where a flag of `args` can't be meant, alone or for that many processes."""
    for k, x in vars(args).items():
        if isinstance(x, int | float) and not (0 < x < math.inf or x == 0 and k not in POSITIVE):
            bound = "above 0" if k in POSITIVE else "0 or above"
            raise SystemExit(f"{flag(k)} {x} has to be {bound}, and finite.")
    if args.problems % world:
        raise SystemExit(f"--problems {args.problems} must be a multiple of the {world} processes.")
    if args.steps and args.group < 2:
        raise SystemExit(f"--group {args.group}: advantages compare the answers of a group: it takes two or more.")
    if args.problems // world * args.group % args.minibatches:
        raise SystemExit(f"--minibatches {args.minibatches} does not divide the {args.problems // world} x "
                         f"{args.group} answers of a process: then there would be fewer updates.")  # fmt: skip
    for k, words in CHOICES.items():  # argparse has looked at the command line, nobody at an Args made in Python
        if (word := vars(args).get(k, words[0])) not in words:
            raise SystemExit(f"{flag(k)} {word} is none of {', '.join(words[:-1])} and {words[-1]}.")
    if args.max_pixels < 28 * 28:
        raise SystemExit(f"--max-pixels {args.max_pixels} is less than the 28 x 28 = 784 of one image token.")
    if found := MARKS.search(args.instruction):
        raise SystemExit(f"{found[0]} stands in --instruction: take it out, the prompt places the image itself.")
    if not re.fullmatch(r"\w[\w.+-]{0,99}", args.name):
        raise SystemExit(f"--name {args.name} names a folder inside --runs: letters, digits, _ . + - and no more.")


class Run:
    """One arm's process: its place among the ranks, its folder, its log. `step` is the first step still to do."""

    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if torch.cuda.is_available():
            self.device, self.dtype = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.bfloat16
            torch.cuda.set_device(self.device)
        else:
            self.device, self.dtype = torch.device("cpu"), torch.float32
            torch.set_num_threads(1)  # a toy model is several times slower on two threads than on one
        self.args, self.dir, self.step = args, Path(args.runs) / f"{args.name}-s{args.seed}", 0
        self.laps, self.clock, self.last_mixed, self.bar = {}, time.perf_counter(), -1, None
        check_flags(args, self.world)
        if os.path.exists(self.dir / "outputs.jsonl"):  # pathlib raises where a folder above may not be searched
            shutil.rmtree(self.dir / "state", ignore_errors=True)  # of a run killed after its very last write
            raise SystemExit(f"{self.dir} is a finished run: choose another --name or --seed, or delete the folder.")
        config, now = self.dir / "config.json", asdict(args) | {"processes": self.world}
        settings = [f"{args.model}/{x}.json" for x in ("preprocessor_config", "tokenizer", "config")]
        files = [p for p in (args.pool, *args.eval.split(","), *settings) if Path(p).is_file()]
        hashes = {p: hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in files}
        if os.path.exists(self.dir / "state") and config.exists():
            was = json.loads(config.read_text())
            for k in sorted((now.keys() | was["args"].keys()) - set(FREE)):  # another arm has other flags
                if now.get(k) != (old := was["args"].get(k)):
                    what = "processes:" if k == "processes" else flag(k)
                    raise SystemExit(f"{self.dir} was started with {what} {old} and can't go on with {now.get(k)}: "
                                     "use the same script and flags, or another --name.")  # fmt: skip
            for p in hashes:
                if hashes[p] != was["sha256"].get(p):
                    raise SystemExit(f"{p} is not the file that {self.dir} was started with: put that one back, or use "
                                     "another --name.")  # fmt: skip
        every = self.gather((now, hashes))  # all have looked before the first writes
        if any(x != every[0] for x in every):
            raise SystemExit("The processes were given different flags, or different files lie at --model, --pool or "
                             "--eval: give every node the same command and data.")  # fmt: skip
        if self.rank == 0:
            git = ["git", "describe", "--always", "--dirty", "--abbrev=40"] if shutil.which("git") else ["true"]
            commit = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
            facts = dict(args=now, commit=commit, sha256=hashes, python=sys.version.split()[0], torch=torch.__version__,
                         transformers=transformers.__version__, device=device_name(), started=clock())  # fmt: skip
            try:
                self.dir.mkdir(parents=True, exist_ok=True)
                lock_folder(self.dir)
                for x in [] if (self.dir / "state").exists() else LEFT:
                    (self.dir / x).unlink(missing_ok=True)
                write_text(config, json.dumps(facts, indent=1))
            except OSError as error:
                raise SystemExit(f"Can't write to {self.dir} ({error.strerror}): choose another --runs.") from None
        dist.barrier()
        if not appears(config):
            raise SystemExit(f"{config} was written by another node and isn't here: --runs has to be a folder that all "
                             "share.")  # fmt: skip

    def begin(self, *key):
        """Seed torch by (seed, key, rank): a step is a pure function of its number, so that resuming costs nothing."""
        torch.manual_seed(random.Random(f"{self.args.seed}/{key}/{self.rank}").getrandbits(63))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.clock = time.perf_counter()

    def gather(self, x):
        """Any object of each rank -> list of them all, on every rank."""
        dist.all_gather_object(every := [None] * self.world, x)
        return every

    def sum(self, x):
        """Sum of a tensor over ranks."""
        dist.all_reduce(x := x.clone())
        return x

    def mean(self, values):
        """{name: number or tensor} -> {name: float}, each the mean of its elements and then over ranks. Lists pass."""
        means = {k: torch.as_tensor(v, dtype=torch.float64, device=self.device).mean() for k, v in values.items()
                 if not isinstance(v, list)}  # fmt: skip
        return values | dict(zip(means, (self.sum(torch.stack([*means.values()])) / self.world).tolist(), strict=True))

    def lap(self, name):
        """Time and, on a GPU, the peak memory since the last lap belong to the stage `name`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.laps[f"memory_{name}"] = self.peak()
        dist.barrier()  # or the wait for the slowest would count as the next stage of the others
        now = time.perf_counter()
        self.laps[f"seconds_{name}"], self.clock = round(now - self.clock, 4), now

    def peak(self):
        """GiB of this rank's GPU, at most since the last call."""
        most = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.reset_peak_memory_stats()
        return most

    def log(self, step, **values):
        """Means over ranks; of seconds and GiB the maximum -> one line of metrics.jsonl and the progress line."""
        laps = self.laps | {"seconds": sum(x for k, x in self.laps.items() if k.startswith("seconds_"))}
        if self.device.type == "cuda":
            laps["memory_gb"] = max([self.peak(), *(x for k, x in laps.items() if k.startswith("memory_"))])
        most = torch.tensor([*laps.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        row = {"step": step} | self.mean(values) | dict(zip(laps, most.tolist(), strict=True))
        row["tokens"] *= self.world  # of all ranks, like the rate
        row["tokens_per_second"] = round(row["tokens"] / row.pop("seconds"), 1)
        self.last_mixed = step if row["mixed"] > 0 else self.last_mixed
        if self.rank:
            return
        append_jsonl(self.dir / "metrics.jsonl", row)
        self.bar = self.bar or tqdm(total=self.args.steps, initial=step, desc=self.dir.name, unit="step", smoothing=0.1)
        self.bar.set_postfix_str(f"reward {row['reward']:.3f}, groups all wrong {row['all_wrong']:.0%}, "
                                 f"{row['tokens_per_second']:.0f} tokens/s")  # fmt: skip
        self.bar.update()
        dead = step - self.last_mixed
        if dead and dead % self.args.patience == 0:
            tqdm.write(f"WARNING {self.dir.name}: no group held right and wrong answers for {dead} steps, so reward "
                       "gave no gradient: the pool is too hard (or too easy) for this arm as it is.")  # fmt: skip

    def note(self, step, **values):
        """A step of value pretraining, none of the run's own -> a line of pretraining.jsonl, and a progress line."""
        row = {"step": step} | self.mean(values)
        if self.rank:
            return
        if step == 0:
            write_text(self.dir / "pretraining.jsonl", "")
            self.fit_bar = tqdm(total=self.args.value_steps, desc=f"{self.dir.name}: value pretraining", unit="step")
        append_jsonl(self.dir / "pretraining.jsonl", row)
        self.fit_bar.set_postfix_str(f"V {row['value_start']:.3f} to {row['value_end']:.3f}, "
                                     f"explained {row.get('explained_variance', 0):.0%}")  # fmt: skip
        self.fit_bar.update()

    def show(self, step, batch, problems, reward, adv):
        """Every 20 steps, the first group in readable form -> rollouts.jsonl. Read this file first."""
        if self.rank == 0 and step % 20 == 0:
            mean_adv = (adv.sum(1) / batch.mask.sum(1)).tolist()
            append_jsonl(self.dir / "rollouts.jsonl", *(
                dict(step=step, id=p["id"], question=p["question"], answer=p["answer"], forced=batch.hint[i],
                     sampled=batch.text[i], finished=bool(batch.finished[i]), reward=reward[i].item(), adv=mean_adv[i])
                for i, p in enumerate(problems[: self.args.group])))  # fmt: skip

    def save(self, step, *pairs):
        """Every `save_every` steps, weights and moments of each (module, optimizer) pair -> state/<step>/, or nothing.

        One safetensors file a rank, with its shards. Older states go only when the new one has its final name.
        """
        if (step + 1) % self.args.save_every:
            return
        final = self.dir / "state" / f"{step + 1:06d}"
        new = final.with_suffix(".new")
        new.mkdir(parents=True, exist_ok=True)
        tensors = {name: _local(t).detach().cpu().contiguous() for name, t in _state(pairs).items()}
        save_file(tensors, new / f"rank{self.rank}.safetensors")
        dist.barrier()
        if self.rank == 0:
            new.rename(final)
            for old in set(final.parent.iterdir()) - {final}:
                shutil.rmtree(old)
        dist.barrier()

    def resume(self, *pairs):
        """Load the newest whole state and cut the logs back to it. Sets `step` -> whether there was a state."""
        states = sorted(p for p in (self.dir / "state").glob("*") if p.suffix != ".new")
        if states:
            self.step = int(states[-1].name)
            saved = load_file(states[-1] / f"rank{self.rank}.safetensors")
            with torch.no_grad():
                for name, t in _state(pairs).items():
                    _local(t).copy_(saved[name])
        if self.rank == 0:
            for log in (self.dir / "metrics.jsonl", self.dir / "rollouts.jsonl"):
                rows = read_jsonl(log, torn=True) if log.exists() else []
                kept = [row for row in rows if row["step"] < self.step]
                write_text(log, jsonl(kept))
                self.last_mixed = max([self.last_mixed, *(row["step"] for row in kept if row.get("mixed"))])
            if states:
                print(f"{self.dir}: resuming at step {self.step}", flush=True)
        dist.barrier()
        return bool(states)


def _local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def _state(pairs):
    """{name: tensor} of the trained weights and their moments, for each (module, optimizer) pair."""
    state = {}
    for i, (module, optimizer) in enumerate(pairs):
        reshard(module)
        for name, p in module.named_parameters():
            if p.requires_grad:
                if not optimizer.state[p]:  # AdamW makes its moments on the first step, alike
                    zeros = (torch.zeros(()), torch.zeros_like(p), torch.zeros_like(p))
                    optimizer.state[p] = dict(zip(("step", "exp_avg", "exp_avg_sq"), zeros, strict=True))
                state |= {f"{i}.{name}": p} | {f"{i}.{name}.{k}": v for k, v in optimizer.state[p].items()}
    return state


# ---------------------------------------------------------------------------------------------------------- 3 models


CAUSAL = {"window_size": (-1, 0)} if "window_size" in signature(varlen_attn).parameters else {"is_causal": True}


def packed_attention(module, q, k, v, attention_mask, scaling, cu_seq_lens_q=None, cu_seq_lens_k=None,
                     max_length_q=None, max_length_k=None, keys_at=None, is_causal=True, **others):  # fmt: skip
    """Attention within each of the sequences laid end to end: (1, heads, N, head) x 3 -> (1, N, heads, head), None.

    `cu_seq_lens_q` and `_k` hold the bounds of queries and keys, (sequences + 1,); without them it is the library's own
    attention. A sequence's queries are its last tokens. keys_at: where its keys lie among the N, if not in their order.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling, **others)
    if keys_at is not None:  # in fp32, in which the gradients of a token that lies in several sequences are added up
        k, v = (x.float()[:, :, keys_at].to(x.dtype) for x in (k, v))
    if q.is_cuda and q.dtype != torch.float32:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        bounds, kind = (cu_seq_lens_q.int(), cu_seq_lens_k.int()), CAUSAL if is_causal else {}
        return varlen_attn(q, k, v, *bounds, max_length_q, max_length_k, scale=scaling, **kind)[None], None
    cut = cu_seq_lens_q.diff().tolist(), *[cu_seq_lens_k.diff().tolist()] * 2
    parts = zip(*(x.split(lengths, 2) for x, lengths in zip((q, k, v), cut, strict=True)), strict=True)
    attend = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    seen = lambda n, m: torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n) if is_causal else None
    return torch.cat([attend(*x, seen(x[0].shape[2], x[1].shape[2])) for x in parts], 2).transpose(1, 2), None


for name in ("packed", "flash_packed"):
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, sdpa_mask)


def load_model(path, dtype):
    """A published checkpoint, from a folder or by its hub name, in plain transformers."""
    if cut := [file for file in Path(path).glob("*.safetensors") if not (file.exists() and is_whole(file))]:
        raise SystemExit(f"{min(cut)} is cut off, or no safetensors file: copy it again.")
    if Path(path).is_dir() and not Path(path, "config.json").exists():  # the library would build a 70 B default
        raise SystemExit(f"{path} has no config.json: copy the whole checkpoint.")
    options = dict(dtype=dtype, attn_implementation="packed", output_loading_info=True, ignore_mismatched_sizes=True)
    try:
        model, info = Qwen2VLForConditionalGeneration.from_pretrained(path, **options)
    except OSError as error:
        raise no_model(path, error) from None
    if bad := info["missing_keys"] | {k for k, *_ in info["mismatched_keys"]}:  # the library would fill them at random
        raise SystemExit(f"{path} lacks {len(bad)} weights of its config.json's Qwen2-VL, or has them in other sizes, "
                         f"{min(bad)} first: copy the whole checkpoint.")  # fmt: skip
    model.model.visual.config._attn_implementation = "flash_packed"  # by this name it takes all images at once
    return model


def is_whole(file):
    """Whether a safetensors file is as long as it says: the header's length in 8 bytes, the header, the tensors."""
    with open(file, "rb") as f:
        tensors = file.stat().st_size - 8 - (header := int.from_bytes(f.read(8), "little"))
        ends = json.loads(f.read(header)).values() if header and tensors >= 0 else []
    return tensors == max((x["data_offsets"][1] for x in ends if "data_offsets" in x), default=None)


def load_tokenizer(path):
    """The tokenizer of a checkpoint. A folder without its files gives a blank one: that stops the run."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise no_model(path, error) from None
    if missing := {"<|image_pad|>", "<|im_end|>", "<|endoftext|>"} - tokenizer.get_vocab().keys():
        raise SystemExit(f"The tokenizer of {path} does not know {' and '.join(sorted(missing))}: put tokenizer.json "
                         "and tokenizer_config.json of its Qwen2-VL into the folder.")  # fmt: skip
    if tokenizer.chat_template is None:
        raise SystemExit(f"The tokenizer of {path} has no chat template: put that of its Qwen2-VL into the folder.")
    return tokenizer


def no_model(path, error):
    return SystemExit(f"The model {path} is neither a folder with a whole checkpoint nor to be had from the hub "
                      f"({str(error).splitlines()[0]}): name such a folder, or try --toy, which needs no download."
                      )  # fmt: skip


class Policy(torch.nn.Module):
    """The trained model. Its forward gives log-probs, so that the language head, too, runs inside the FSDP unit.

    `sampler` is a second, unsharded copy in the compute dtype: sampling never runs under FSDP. `sample` refreshes it.
    """

    def __init__(self, model, sampler, tokenizer):
        super().__init__()
        self.model, self.__dict__["sampler"] = model, sampler  # past nn.Module: its weights are not this module's
        self.eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])  # either ends an answer
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i not in self.eos]
        banned = torch.zeros(len(model.get_input_embeddings().weight))  # (V,)
        banned[len(tokenizer) :] = -math.inf  # the padded tail of the embedding is no token at all
        banned[special] = -math.inf  # a sampled <|image_pad|> would crash the next forward
        self.register_buffer("banned", banned, persistent=False)
        self.decoders = []  # the one that there is, if any

    def decoder(self, rows, columns):
        """The sampler's decode loop for that many rows and columns at least."""
        size = bucket(rows, self.banned.device), -(-columns // 256) * 256
        for had in self.decoders:
            size = max(size[0], had.rows), max(size[1], had.columns)
        if [(had.rows, had.columns) for had in self.decoders] != [size]:
            self.decoders.clear()  # its memory is free before the next one is made
            self.decoders.append(Decoder(self.sampler, self.banned, self.eos, *size))
        return self.decoders[0]

    def forward(self, batch, temperature):
        """Log-probs of the response tokens under softmax(logits / temperature): Batch -> (b, T), 0 at padding."""
        states, real = predicting(self.model.model, batch)
        targets, head = batch.ids[:, -real.shape[1] :][real], self.model.lm_head.weight
        logp = [
            checkpoint(token_logp, x, head, y, self.banned, temperature, use_reentrant=False)
            for x, y in zip(states.split(2048), targets.split(2048), strict=True)  # (n, V) never exists at once
        ]
        return torch.zeros_like(batch.mask).masked_scatter(real, torch.cat(logp))


class Critic(torch.nn.Module):
    """A second copy of the policy's network, image included, with a linear fp32 head on the final hidden state.

    Like a logit, an output is read where its token is predicted: before it, never from it.
    """

    def __init__(self, model, outputs):
        super().__init__()
        self.model, self.head = model.model, torch.nn.Linear(model.config.text_config.hidden_size, outputs)
        for p in self.head.parameters():
            torch.nn.init.zeros_(p)

    def forward(self, batch):
        """Batch -> (b, T, K) in fp32, 0 at padding."""
        states, real = predicting(self.model, batch)
        output = self.head(states.float())
        return output.new_zeros(*real.shape, output.shape[-1]).masked_scatter(real[..., None], output)

    @torch.no_grad()
    def start_at(self, bias):
        """Give the head, whose weights are 0, this bias: (K,)."""
        old = self.head.bias
        old.copy_(distribute_tensor(bias.to(old.device), old.device_mesh, old.placements))


def predicting(model, batch):
    """Rows laid end to end, without padding, through the model: Batch -> final hidden states that predict the n
    response tokens, (n, hidden), and where those are, (b, T).

    Of rows in a row that share an image, those of a group, only the first brings the prompt; the others attend to it.
    """
    real, response = batch.attention, batch.mask + batch.forced > 0
    answer = F.pad(response, (real.shape[1] - response.shape[1], 0))  # (b, S)
    first = batch.image != F.pad(batch.image[:-1], (1, 0), value=-1)  # (b,)
    own = real & (answer | first[:, None])
    at = (own.flatten().cumsum(0) - 1).view(own.shape)  # (b, S) where a token lies
    at = torch.where(own, at, at[first.nonzero().squeeze(-1)[first.cumsum(0) - 1]])
    bounds = lambda x: F.pad(x.sum(1).cumsum(0), (1, 0))
    states = model.language_model(
        inputs_embeds=embed(model, batch.ids[own][None], batch.image[first], batch.pixels, batch.grid),
        attention_mask={"full_attention": None}, position_ids=batch.positions[:, own][:, None], use_cache=False,
        cu_seq_lens_q=bounds(own), max_length_q=own.sum(1).max().item(), cu_seq_lens_k=bounds(real),
        max_length_k=real.sum(1).max().item(), keys_at=at[real],
    ).last_hidden_state[0]  # (N, hidden)  # fmt: skip
    return states[at.roll(1, 1)[answer]], response


def next_logits(hidden, head, banned, temperature):
    """(n, hidden) -> (n, V) in fp32, divided by the temperature, -inf at tokens that are never sampled."""
    return F.linear(hidden, head).float() / temperature + banned


def token_logp(hidden, head, target, banned, temperature):
    """log softmax over the V tokens, at the target: (n, hidden), (n,) -> (n,)."""
    logits = next_logits(hidden, head, banned, temperature)
    return logits.gather(-1, target[:, None]).squeeze(-1) - logits.logsumexp(-1)


def embed(model, ids, image, pixels, grid):
    """Token embeddings with image features in their places, each image encoded once: (b, S) -> (b, S, hidden).

    image: (b,) index into the lists pixels and grid; rows of a group share one.
    """
    embeds = model.get_input_embeddings()(ids)
    features = model.get_image_features(torch.cat(pixels), torch.cat(grid)).pooler_output
    features = torch.cat([features[i] for i in image.tolist()]).to(embeds.dtype)
    return embeds.masked_scatter((ids == model.config.image_token_id)[..., None], features)


def load_policy(path, args, run):
    """fp32 master weights sharded over ranks by FSDP2 as one unit, compute in run.dtype -> Policy.

    FSDP averages gradients over ranks: an arm's loss carries `* run.world`.
    """
    sampler = load_model(path, run.dtype).to(run.device).eval().requires_grad_(False)  # its rotary tables stay fp32
    return shard(Policy(load_trained(path, args, run), sampler, load_tokenizer(path)), run.dtype, run)


def load_critic(path, outputs, args, run, weights=None):
    """The network of the policy at `path` under a head of `outputs`, all 0, sharded likewise -> Critic.

    weights: a critic.safetensors of `save_critic` to take all weights from. The head computes in fp32, too.
    """
    critic = Critic(load_trained(path, args, run), outputs)
    if weights:
        critic.load_state_dict(load_file(weights))
    shard(critic.head, torch.float32, run)
    return shard(critic, run.dtype, run)


def load_trained(path, args, run):
    model = load_model(path, torch.float32)
    model.model.visual.requires_grad_(not args.freeze_vision)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # with them, a frozen vision tower would take part in the backward pass
    if compiles(model, run.device):
        for layer in model.model.language_model.layers:
            layer.compile(dynamic=True)
    return model


def compiles(model, device):
    """Whether compiling its layers pays: tens of seconds once a process, for a large model on a GPU."""
    return device.type == "cuda" and sum(p.numel() for p in model.parameters()) > 1e8


def shard(module, dtype, run):
    """fp32 weights over all ranks as one FSDP unit that computes in dtype and averages gradients in fp32."""
    mesh = init_device_mesh(run.device.type, (run.world,))
    compute = None if dtype == torch.float32 else dtype
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return fully_shard(module.to(run.device).train(), mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def micro_batches(module, rows, args):
    """Cut the rows of a minibatch, an index tensor, as one forward and backward take them. Weights are gathered once
    and gradients reduced once for all of them. In between, a rank sums its own, whole and in fp32: with more than one
    cut, 4 bytes a trained weight on each GPU, and as much again while they are reduced."""
    cuts = rows.split(args.micro_batch)
    for i, cut in enumerate(cuts, 1):
        module.set_requires_gradient_sync(i == len(cuts))
        module.set_reshard_after_backward(i == len(cuts))
        yield cut


def reshard(module):
    """Put the shards of the fp32 weights back in their places: a forward without a backward leaves whole copies."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def save_critic(critic, run):
    """All weights of the critic, in fp32, as critic.safetensors in the run's folder, which `load_critic` reads."""
    reshard(critic)
    whole, path = {}, run.dir / "critic.safetensors"
    for name, p in critic.named_parameters():
        full = p.full_tensor()  # all ranks together
        whole |= {} if run.rank else {name: full.detach().cpu()}
    if run.rank == 0:
        save_file(whole, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    dist.barrier()


@torch.no_grad()
def refresh(policy):
    """Copy the trained weights into the sampler, all ranks together."""
    for new, old in zip(policy.model.parameters(), policy.sampler.parameters(), strict=True):
        if new.requires_grad:
            new = new.detach().to(old.dtype)  # half the bytes to gather
            old.copy_(new.full_tensor() if isinstance(new, DTensor) else new)  # whole after a forward without backward


def load_frozen(path, processor, run):
    """A teacher: frozen, whole on every device in run.dtype, scored and sampled like a policy -> Policy.

    Stops where its tokenizer is not the student's. What pads its wider vocabulary is banned.
    """
    tokenizer = load_tokenizer(path)
    ours, theirs = (sorted(t.get_vocab().items(), key=lambda x: x[1]) for t in (processor.tokenizer, tokenizer))
    if ours != theirs:
        i = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        raise SystemExit(f"The teacher {path} has another tokenizer: {len(theirs)} tokens, not {len(ours)}, and first "
                         f"{theirs[i : i + 1]} for {ours[i : i + 1]}. Take one of the student's family.")  # fmt: skip
    model = load_model(path, run.dtype).to(run.device).eval().requires_grad_(False)
    return Policy(model, model, tokenizer).to(run.device).eval()


def clip_gradient(policy, max_norm):
    """Clip the gradient's global norm in place -> the norm before, a float. A non-finite gradient stops the run."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if not math.isfinite(norm):
        raise SystemExit("The gradient is not finite; no weight was changed with it and the last saved state is whole: "
                         "start again under another --name with a lower --lr.")  # fmt: skip
    return norm


# --------------------------------------------------------------------------------------------------------- 4 prompts


@dataclass
class Prompt:
    ids: list[int]  # <|image_pad|> once for each image feature
    positions: torch.Tensor  # (3, L) M-RoPE: time, height, width
    pixels: torch.Tensor  # (patches, 1176)
    grid: torch.Tensor  # (1, 3) patches along time, height, width


class Processor:
    """Tokenizer and image processor in one (the library's own asks for torchvision): a problem in, a Prompt out."""

    def __init__(self, path, args):
        limits = dict(min_pixels=28 * 28, max_pixels=args.max_pixels)
        self.tokenizer = load_tokenizer(path)
        try:
            self.images = Qwen2VLImageProcessorPil.from_pretrained(path, **limits)
            tower = Qwen2VLConfig.from_pretrained(path).vision_config
        except OSError as error:
            raise no_model(path, error) from None
        cut = self.images.patch_size, self.images.merge_size, self.images.temporal_patch_size
        if cut != (seen := (tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size)):
            raise SystemExit(f"{path}: by preprocessor_config.json images are cut into (patch, merge, frames) {cut}, "
                             f"by config.json {seen}: take both from one and the same Qwen2-VL.")  # fmt: skip
        self.instruction = args.instruction

    def tokenize(self, text):
        """Token ids of plain text; what looks like a special token in it is text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def length(self, problem):
        """Tokens of its prompt, from the image's size alone."""
        width, height = Image.open(problem["image"]).size
        text = self.tokenizer(self.render(problem), add_special_tokens=False).input_ids
        return len(text) - 1 + self.images.get_number_of_image_patches(height, width, {}) // 4

    def render(self, problem):
        """The prompt in the model's chat template, <|image_pad|> in it once."""
        content = [{"type": "image"}, {"type": "text", "text": prompt_text(problem, self.instruction)}]
        chat = [{"role": "user", "content": content}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    def pixels(self, problem):
        """Its image as patches."""
        return self.images(load_image(problem["image"]), return_tensors="pt")

    def encode(self, problem, image=None):
        """Problem -> Prompt. The image's size decides how many tokens it takes; nothing is ever truncated.

        image: its `pixels`, where they are known already.
        """
        parts = self.render(problem).split("<|image_pad|>")
        before, after = (self.tokenizer(x, add_special_tokens=False).input_ids for x in parts)
        image = image or self.pixels(problem)
        t, h, w = (image["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()  # 2 x 2 patches make one token
        ids = before + [self.tokenizer.convert_tokens_to_ids("<|image_pad|>")] * (t * h * w) + after
        # text counts on along all three axes; an image spans its grid from where the text stopped (2409.12191, 2.1)
        grid = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w)).view(-1, 3).T + len(before)
        tail = torch.arange(len(after)) + len(before) + max(t, h, w)
        positions = torch.cat([torch.arange(len(before)).expand(3, -1), grid, tail.expand(3, -1)], 1)
        return Prompt(ids, positions, image["pixel_values"], image["image_grid_thw"])


# --------------------------------------------------------------------------------------------------------- 5 rollout


@dataclass
class Batch:
    """B responses of this rank, on the device. A response is forced tokens, then sampled ones."""

    ids: torch.Tensor  # (B, S)
    attention: torch.Tensor  # (B, S) True at real tokens
    positions: torch.Tensor  # (3, B, S)
    forced: torch.Tensor  # (B, T) 1.0 at forced tokens (a hint or a replayed prefix)
    mask: torch.Tensor  # (B, T) 1.0 at sampled tokens, the end token included
    logp: torch.Tensor  # (B, T) the sampler's own log-probs, 0 elsewhere
    finished: torch.Tensor  # (B,) False where the token limit cut the answer
    image: torch.Tensor  # (B,) index into pixels and grid
    pixels: list[torch.Tensor]
    grid: list[torch.Tensor]
    text: list[str]  # what was sampled and nothing else: the only text that is ever graded
    hint: list[str]  # what was forced

    def __getitem__(self, rows):
        """The rows of an index tensor as a batch of their own, less the padding and images that only others need."""
        real, prompt = self.attention[rows].any(0).nonzero(), self.ids.shape[1] - self.mask.shape[1]
        left, right = min(real[0].item(), prompt), real[-1].item() + 1  # the responses stay the last columns
        t = right - prompt
        used, image = self.image[rows].unique(return_inverse=True)
        return replace(
            self, **{k: vars(self)[k][..., rows, left:right] for k in ("ids", "attention", "positions")},
            **{k: vars(self)[k][rows, :t] for k in ("forced", "mask", "logp")}, finished=self.finished[rows],
            image=image, pixels=[self.pixels[i] for i in used], grid=[self.grid[i] for i in used],
            text=[self.text[i] for i in rows], hint=[self.hint[i] for i in rows],
        )  # fmt: skip


def left_pad(rows, width, value=0):
    """n tensors (..., L) -> (n, ..., width)."""
    return torch.stack([F.pad(x, (width - x.shape[-1], 0), value=value) for x in rows])


@torch.no_grad()
def sample(policy, processor, problems, args, run, prefix=None, greedy=False, answers=None):
    """Answers to B problems, each `args.group` times in a row -> Batch. All ranks call it together.

    prefix: B lists of token ids that the answers begin with (equal within a group), or None. The other tokens are drawn
    from softmax(logits / temperature): no top-k, no top-p, no penalty, and the model's own generation settings are
    never read. A prompt runs once; its keys and values are shared out to the group.
    answers: B lists of token ids that an earlier call sampled. Then nothing is drawn, and their `logp` is 0.
    """
    refresh(policy)
    model, group, new, device = policy.sampler, args.group, args.max_new_tokens, run.device
    with ThreadPoolExecutor() as pool:  # images take the most of it
        prompts = [*map(processor.encode, problems[::group], pool.map(processor.pixels, problems[::group]))]
    forced = prefix[::group] if prefix else [[]] * len(prompts)

    # prompt and forced tokens of each problem
    context = [torch.tensor(p.ids + f) for p, f in zip(prompts, forced, strict=True)]
    width = max(map(len, context))
    ids = left_pad(context, width, policy.eos[1]).to(device)  # (problems, width)
    attention = left_pad([torch.ones_like(x, dtype=torch.bool) for x in context], width).to(device)
    places = [F.pad(p.positions, (0, len(f))) for p, f in zip(prompts, forced, strict=True)]  # (3, L + forced)
    for x, p in zip(places, prompts, strict=True):
        x[:, len(p.ids) :] = p.positions.max() + 1 + torch.arange(x.shape[1] - len(p.ids))
    positions = left_pad(places, width).transpose(0, 1).to(device)  # (3, problems, width)
    pixels, grid = [p.pixels.to(device) for p in prompts], [p.grid.to(device) for p in prompts]
    # all answers at once
    if answers:
        tokens = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(x) for x in answers], batch_first=True, padding_value=policy.eos[1]
        ).to(device)
        logp = torch.zeros(tokens.shape, device=device)
    else:
        out = model.model.language_model(
            inputs_embeds=embed(model.model, ids, torch.arange(len(prompts)), pixels, grid),
            attention_mask=attention, position_ids=positions, use_cache=True,
        )  # fmt: skip
        decoder = policy.decoder(len(problems), width + new)
        decoder.fill(out, attention, positions[0, :, -1] + 1, group)
        tokens, logp = decoder.run(len(problems), new, args.temperature, greedy)  # (B, steps)

    # assemble: the last T columns are the responses
    share = lambda x, dim=0: x.repeat_interleave(group, dim)
    ids, attention, positions = share(ids), share(attention), share(positions, 1)
    ends = torch.isin(tokens, torch.tensor(policy.eos, device=device))
    length = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1])  # (B,) the end token counts
    longest, steps = max(map(len, forced)), torch.arange(length.max(), device=device)
    sampled = steps < length[:, None]
    given = left_pad([torch.ones(len(f), device=device) for f in forced], longest)
    tokens = tokens[:, : len(steps)].masked_fill(~sampled, policy.eos[1])
    read = lambda rows: processor.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return Batch(
        ids=torch.cat([ids, tokens], 1), attention=torch.cat([attention, sampled], 1),
        positions=torch.cat([positions, positions[:, :, -1:] + 1 + steps], 2),
        forced=F.pad(share(given), (0, len(steps))), mask=F.pad(sampled.float(), (longest, 0)),
        logp=F.pad(logp[:, : len(steps)] * sampled, (longest, 0)), finished=ends.any(1),
        image=torch.arange(len(ids), device=device) // group,
        pixels=pixels, grid=grid, hint=read([f for f in forced for _ in range(group)]),
        text=read([x[:n] for x, n in zip(tokens.tolist(), length.tolist(), strict=True)]),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- 6 fast decoding


class Decoder:
    """Keys, values and state of up to `rows` answers in flight, in buffers that are made once.

    On a GPU each shape of `step` becomes a CUDA graph when it is first met, and the layers of a large model are
    compiled; a CPU runs `step` as it stands. A reader who doesn't care for speed can skip this section: a plain loop
    over the model with `draw` at its end would give the same answers, up to rounding.
    """

    def __init__(self, model, banned, eos, rows, columns):
        lm = self.lm = model.model.language_model
        self.banned, self.head, self.rows, self.columns = banned, model.lm_head.weight, rows, columns
        self.layers, last = [], None
        for layer in lm.layers:
            attn, mlp = layer.self_attn, layer.mlp
            qkv, up = fuse(attn.q_proj, attn.k_proj, attn.v_proj), fuse(mlp.gate_proj, mlp.up_proj)
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            self.layers.append((last, (norms[0], *qkv)))
            last = attn.o_proj.weight, norms[1], up[0], mlp.down_proj.weight
        self.last = last
        cache = (len(lm.layers), rows, attn.num_key_value_heads, columns, attn.head_dim)
        with torch.device(banned.device):
            self.keys, self.values = torch.zeros(cache, dtype=model.dtype), torch.zeros(cache, dtype=model.dtype)
            self.hidden = torch.zeros(rows, lm.config.hidden_size, dtype=model.dtype)  # predicts the next token
            self.seen = torch.zeros(rows, columns, dtype=torch.bool)  # the columns that hold tokens
            self.place, self.row = torch.zeros(2, rows, dtype=torch.long)  # next M-RoPE position; whose answer it is
            self.done = torch.zeros(rows, dtype=torch.bool)
            self.tokens, self.logp = torch.zeros(rows, columns, dtype=torch.long), torch.zeros(rows, columns)
            self.t, self.slot = torch.zeros(2, 1, dtype=torch.long)  # tokens drawn; the next column
            self.eos = torch.tensor(eos)
            self.blocks = torch.arange(columns // 128, dtype=torch.int32).view(1, 1, 1, -1)  # of 128 columns each
        self.graphs = {}
        self.pool = torch.cuda.graph_pool_handle() if banned.is_cuda else None
        self.large = compiles(model, banned.device)
        self.between, self.leave, self.draw = (
            torch.compile(f, dynamic=False) if self.large else f for f in (between, leave, draw)
        )

    def fill(self, prefilled, attention, place, group):
        """Each of P prefilled prompts for `group` answers: its cache, attention (P, width), next position (P,)."""
        P, width = attention.shape
        n = P * group
        share = lambda x: x.repeat_interleave(group, 0)
        for keys, values, layer in zip(self.keys, self.values, prefilled.past_key_values.layers, strict=True):
            keys[:n, :, :width], values[:n, :, :width] = share(layer.keys), share(layer.values)
        self.seen.zero_()
        self.seen[:n, :width], self.place[:n] = share(attention), share(place)
        self.hidden[:n] = share(prefilled.last_hidden_state[:, -1])
        self.t.zero_(), self.slot.fill_(width), self.done.zero_()
        self.done[n:] = True  # rows of a graph that no answer needs
        self.row.copy_(torch.arange(self.rows))
        self.width = width

    def run(self, B, new, temperature, greedy):
        """Draw up to `new` tokens for each of B answers -> tokens and their log-probs, (B, steps)."""
        n = bucket(B, self.banned.device)
        for t in range(1, new + 1):
            self.advance(n, self.span(self.width + t), temperature, greedy)
            if t % 8 == 0:  # looking at `done` makes the host wait for the device
                live = (~self.done[:n]).sum().item()
                if live == 0:
                    break
                if (m := bucket(live, self.banned.device)) < n:
                    self.keep(self.done[:n].int().argsort(stable=True)[:m])  # the living first
                    n = m
        return self.tokens[:B, :t].clone(), self.logp[:B, :t].clone()

    def step(self, n, columns, temperature, greedy):
        """Draw a token for each of the first n rows and run it through the model, over `columns` of the cache."""
        token, logp = self.draw(self.hidden[:n], self.head, self.banned, temperature, greedy)  # (n,)
        at = self.row[:n], self.t
        self.tokens[at], self.logp[at] = token, logp
        self.done[:n] |= (token[:, None] == self.eos).any(1)
        self.seen.index_fill_(1, self.slot, True)
        x, h, eps = self.lm.embed_tokens(token), None, self.lm.norm.variance_epsilon
        cos, sin = self.lm.rotary_emb(x, (self.place[:n] + self.t).expand(3, 1, -1))  # (1, n, head)
        seen, cache = self.seen[:n, :columns], (self.keys[:, :n, :, :columns], self.values[:, :n, :, :columns])
        blocks = ((self.slot // 128 + 1).int().view(1, 1, 1), self.blocks) if self.large else None
        for layer, keys, values in zip(self.layers, *cache, strict=True):
            x, h = self.between(x, h, *layer, eps, cos[0], sin[0], keys, values, self.slot, seen, blocks)
        self.hidden[:n] = self.lm.norm(self.leave(x, h, *self.last, eps))
        self.t += 1
        self.slot += 1

    def keep(self, rows):
        """Move these rows to the front."""
        n, width = len(rows), self.slot.item()
        for x in (self.hidden, self.seen, self.place, self.row, self.done):
            x[:n] = x[rows]
        for x in (*self.keys, *self.values):
            x[:n, :, :width] = x[rows, :, :width]

    def span(self, slots):
        """Columns of the cache in a step: all filled ones, on a GPU up to the next multiple of 128. Those of a large
        model get all: its attention stops by itself."""
        unit = self.columns if self.large else 128 if self.banned.is_cuda else 1
        return min(-(-slots // unit) * unit, self.columns)

    def advance(self, *shape):
        """`step`, on a GPU as a graph."""
        if not self.banned.is_cuda:
            return self.step(*shape)
        if shape not in self.graphs:
            clock = time.perf_counter()
            state = self.hidden, self.done, self.tokens, self.logp, self.t, self.slot
            before, seed, side = [x.clone() for x in state], torch.cuda.get_rng_state(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step(*shape)  # compiles, and makes what a graph can't make
            torch.cuda.current_stream().wait_stream(side)
            torch._C._cuda_clearCublasWorkspaces()  # so that the graph's lies in this pool, and lives as long
            self.graphs[shape] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[shape], pool=self.pool):
                self.step(*shape)
            for x, old in zip(state, before, strict=True):
                x.copy_(old)
            torch.cuda.set_rng_state(seed)
            if (took := time.perf_counter() - clock) > 1 and dist.get_rank() == 0:
                tqdm.write(f"The sampler has compiled its step for {shape[0]} answers in {took:.0f} s, once a run.")
        self.graphs[shape].replay()


def bucket(n, device):
    """Rows of the graph that takes n: few shapes on a GPU, exactly n on a CPU."""
    if device.type == "cpu":
        return n
    return next(x for x in (8, 16, 32, 64, 96, 128, -(-n // 64) * 64) if x >= n)


def fuse(*linears):
    """Weight (and bias) of several linear layers as one, of which theirs become views: what is copied into them
    later reaches it."""
    fused = []
    for parts in zip(*(x.parameters() for x in linears), strict=True):
        fused.append(torch.cat([p.data for p in parts]))
        for p, view in zip(parts, fused[-1].split([len(p) for p in parts]), strict=True):
            p.data = view
    return fused


def between(x, h, last, first, eps, cos, sin, keys, values, slot, seen, blocks):
    """From what one layer attended to, None before the first, to that of the next: `leave` with the weights `last` of
    the one, `enter` with `first` of the other -> residual stream (n, hidden), attended (n, heads * head).

    Compiled as one, the stream is written and read once less a layer.
    """
    if h is not None:
        x = leave(x, h, *last, eps)
    q = enter(x, *first, eps, cos, sin, keys, values, slot)
    return x, attend(q, keys, values, seen, blocks).flatten(1)


def enter(x, norm, weight, bias, eps, cos, sin, keys, values, slot):
    """From the residual stream into attention: fills `slot` of the cache -> queries (n, key heads, queries, head)."""
    n, heads, _, head = keys.shape
    q, k, v = F.linear(rms_norm(x, norm, eps), weight, bias).view(n, -1, head).split(
        [weight.shape[0] // head - 2 * heads, heads, heads], 1)  # fmt: skip
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    keys[:, :, slot], values[:, :, slot] = k[:, :, None], v[:, :, None]
    return q.view(n, heads, -1, head)


def attend(q, keys, values, seen, blocks):
    """Attention of a token to the columns `seen` of its row, (n, columns); queries and what comes back as in `enter`.

    The heads that share a key head are its queries: keys are read once and never copied. Compiled for a large model,
    it reads blocks of 128 columns, the same for all rows. blocks: how many, (1, 1, 1), and the numbers of all,
    (1, 1, 1, columns / 128), so that one graph serves every context; None for other models.
    """
    if blocks is None:
        return F.scaled_dot_product_attention(q, keys, values, seen[:, None, None])
    mask = BlockMask.from_kv_blocks(*blocks, mask_mod=lambda row, _, i, at: seen[row, at], compute_q_blocks=False,
                                    seq_lengths=(q.shape[2], keys.shape[2]))  # fmt: skip
    options = dict(BLOCK_N=64, num_warps=4, num_stages=3)  # the fastest of those tried on an H200, results/speed.md
    return flex_attention(q, keys, values, block_mask=mask, kernel_options=options)


def leave(x, attended, out, norm, gate_up, down, eps):
    """From attention back into the residual stream, and through the MLP."""
    # the sum in bf16; but `x + product` the compiler makes one product that adds to a copy of x
    add = lambda x, y: (x.float() + y).to(x.dtype)
    x = add(x, F.linear(attended, out))
    gate, up = F.linear(rms_norm(x, norm, eps), gate_up).chunk(2, -1)
    return add(x, F.linear(F.silu(gate) * up, down))


def rms_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def draw(hidden, head, banned, temperature, greedy):
    """A token of each row from its softmax, by Gumbel-max, or the likeliest; its log-prob: (n, hidden) -> (n,) x 2."""
    logits = next_logits(hidden, head, banned, temperature)  # (n, V)
    noise = 0 if greedy else -torch.empty_like(logits).exponential_().clamp_min_(1e-30).log_()
    token = (logits + noise).argmax(-1)
    return token, logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)


# --------------------------------------------------------------------------------------------------------- 7 scoring


def token_logps(policy, batch, rows, args):
    """Log-probs of the responses of `rows`, an index tensor, with gradient -> (b, T); 0 at padding."""
    logp = policy(batch[rows], args.temperature)
    return F.pad(logp, (0, batch.mask.shape[1] - logp.shape[1]))


def token_values(critic, batch, rows, args):
    """The critic's K outputs before each response token of `rows`, with gradient -> (b, T, K); 0 at padding."""
    outputs = critic(batch[rows])
    return F.pad(outputs, (0, 0, 0, batch.mask.shape[1] - outputs.shape[1]))


@torch.no_grad()
def score(model, batch, args, read=token_logps):
    """`read` of the whole batch without gradient -> (B, T, ...), cut as the update cuts it: the first ratio is 1."""
    cuts = [m.split(args.micro_batch) for m in torch.arange(len(batch.mask)).chunk(args.minibatches)]
    return torch.cat([read(model, batch, rows, args) for cut in cuts for rows in cut])


# ----------------------------------------------------------------------------------------- 8 reward, teacher, critic


def teacher_gap(teacher, old_logp, batch, args):
    """log p_T - log p_S of each sampled token: minus the sampled reverse KL -> (B, T), constant in the weights.

    0, so no advantage at all, at tokens that were not sampled or that the teacher did not score.
    """
    gap = score(teacher, batch, args) - old_logp
    return torch.where((batch.mask > 0) & gap.isfinite(), gap, 0.0)


def teacher_stats(gap, kl, adv, batch):
    """For the log: reverse KL to the teacher, share of clamped tokens, RMS of both parts of the advantage."""
    tokens = batch.mask.sum()
    rms = lambda x: (x.square().sum() / tokens).sqrt()
    return dict(teacher_kl=-gap.sum() / tokens, clamped=((gap < -10) | (gap > 5)).sum() / tokens,
                rms_teacher=rms(kl), rms_reward=rms(adv - kl))  # fmt: skip


def term_norms(step, policy, optimizer, batch, old_logp, adv, policy_loss, args, run):
    """Every 10 steps, the gradient norm of UFT's two terms, each alone -> {policy_norm, hint_norm}, for the log.

    Each is a mean over its own tokens of the whole batch.
    """
    terms = dict(
        policy=(batch.mask, lambda logp, rows: policy_loss(logp, old_logp[rows], adv[rows], args)),
        hint=(batch.forced, lambda logp, rows: -args.sft_coef * logp),
    )
    norms = {}
    for name, (mask, term) in terms.items() if step % 10 == 0 else []:
        tokens = run.sum(mask.sum()).clamp(min=1)
        optimizer.zero_grad()  # the update's own gradient is still there
        for rows in micro_batches(policy, torch.arange(len(mask)), args):
            loss = term(token_logps(policy, batch, rows, args), rows) * mask[rows]
            (loss.sum() / tokens * run.world).backward()
        norms[f"{name}_norm"] = clip_gradient(policy, math.inf)
        optimizer.zero_grad()
    return norms


def masked_std(x, mask, run):
    """Standard deviation of x over the real tokens of all ranks."""
    n, total, square = run.sum(torch.stack([mask, x * mask, x * x * mask]).double().sum((1, 2)))
    return (square / n - (total / n) ** 2).clamp(min=0).sqrt().float()


def moments(value, target, mask, run):
    """Sums over the real tokens of all ranks -> count, target, target^2, error, error^2; error is target - value."""
    terms = torch.stack([mask, target, target**2, target - value, (target - value) ** 2]).double()
    return run.sum((terms * mask).sum((1, 2)))


def explained_variance(sums):
    """1 - Var(R - V) / Var(R) over the tokens of all these `moments`; nan where the returns R are all equal."""
    n, target, targets, error, errors = sum(sums).tolist()
    spread = targets / n - (target / n) ** 2
    return 1 - (errors / n - (error / n) ** 2) / spread if spread > 1e-9 else math.nan


CALIBRATION = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # the log tells eight bins of V apart, which these numbers part


def critic_stats(value, target, mask, run):
    """What a critic arm logs of its values: explained variance, where there is variance; V before the first, the middle
    and the last token; its mean squared error; and `calibration`: of each bin of V, the sums of V and of returns, and
    its tokens.
    """
    length, at = mask.sum(1).long(), lambda i: value.gather(1, i[:, None])
    bins, most = torch.bucketize(value, value.new_tensor(CALIBRATION))[mask > 0], len(CALIBRATION) + 1
    binned = torch.stack([torch.bincount(bins, x[mask > 0].double(), most) for x in (value, target, mask)], 1)
    sums = moments(value, target, mask, run)
    stats = dict(value_start=value[:, 0], value_middle=at(length // 2), value_end=at(length - 1),
                 value_error=sums[4] / sums[0],
                 calibration=[[round(x, 3) for x in row] for row in run.sum(binned).tolist()])  # fmt: skip
    explained = explained_variance([sums])
    return stats if math.isnan(explained) else stats | {"explained_variance": explained}


def fit_critic(critic, optimizer, critic_loss, batch, value, target, args, run):
    """One pass over a batch towards the targets, cut as the policy's update is -> what to log of it and of the values.

    value, target: (B, T). critic_loss: outputs (b, T, K), value and target (b, T) -> loss of each token, where clipped.
    """
    sums = 0.0
    for minibatch in torch.arange(len(value)).chunk(args.minibatches):
        optimizer.zero_grad()
        tokens = run.sum(batch.mask[minibatch].sum())  # of all ranks
        for rows in micro_batches(critic, minibatch, args):
            loss = critic_loss(token_values(critic, batch, rows, args), value[rows], target[rows], args)
            loss, clipped = ((x * batch.mask[rows]).sum() / tokens * run.world for x in loss)
            loss.backward()
            sums += torch.stack([loss.detach(), clipped, torch.zeros_like(clipped)])
        sums[2] += clip_gradient(critic, args.max_grad_norm)
        optimizer.step()
    fitted = zip(("critic_loss", "value_clipped", "critic_grad_norm"), sums / args.minibatches, strict=True)
    return critic_stats(value, target, batch.mask, run) | dict(fitted)


def reward(batch, problems):
    """Strict {0, 1} reward (B,) and the grades behind it, a list of B words. Reads sampled text only.

    An answer that the token limit cut off counts as unparsed.
    """
    answers = zip(batch.text, problems, batch.finished.tolist(), strict=True)
    grades = [grade(text, p["answer"], p["choices"]) if done else "unparsed" for text, p, done in answers]
    return torch.tensor([float(g == "right") for g in grades], device=batch.mask.device), grades


def rollout_stats(batch, reward, grades, args):
    """What every arm logs of its rollouts: shares of grades, of dead and mixed groups, of distinct answers; lengths."""
    groups, texts = reward.view(-1, args.group).mean(1), [batch.text[i :: args.group] for i in range(args.group)]
    return dict(
        reward=reward, **{g: grades.count(g) / len(grades) for g in ("right", "wrong", "unparsed")},
        all_wrong=(groups == 0).double(), all_right=(groups == 1).double(),
        mixed=((groups > 0) & (groups < 1)).double(),
        distinct=sum(len(set(x)) for x in zip(*texts, strict=True)) / len(grades), tokens=batch.mask.sum(),
        length=batch.mask.sum(1), truncated=(~batch.finished).double(),
    )  # fmt: skip


def stored_rollouts(policy, processor, pool, args, run):
    """`value_steps` rollout batches of the untrained policy, which all runs of one model, pool, seed and sampling share
    -> share of right answers, iterator of (batch, reward).

    They lie beside the run folders in rollouts-<hash of all these>, a whole file a step, of any number of processes.
    What a killed or another run has left there is used, what is missing is sampled first.
    """
    sampling = ("model", "instruction", "seed", "problems", "group", "temperature", "max_new_tokens", "max_pixels")
    facts = {k: vars(args)[k] for k in sampling}
    facts["pool"] = hashlib.sha256(Path(args.pool).read_bytes()).hexdigest()
    facts["weights"] = sum(p.view(torch.int16).sum(dtype=torch.int64).item() for p in policy.sampler.parameters())
    folder = run.dir.parent / f"rollouts-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"
    paths = [folder / f"{step:06d}.jsonl" for step in range(args.value_steps)]
    bar = tqdm(paths, f"{run.dir.name}: rollouts to learn V from", unit="step", disable=run.rank > 0)
    for step, path in enumerate(bar):
        if run.sum(torch.tensor(float(path.exists()), device=run.device)) == run.world:
            continue
        run.begin("stored rollouts", step)
        problems = next_problems(pool, step, args, run)
        batch = sample(policy, processor, problems, args, run)
        rewards, ids = reward(batch, problems)[0].tolist(), batch.ids[:, -batch.mask.shape[1] :]
        every = run.gather([
            dict(id=p["id"], reward=rewards[i], sampled=batch.text[i], ids=ids[i][batch.mask[i] > 0].tolist())
            for i, p in enumerate(problems)
        ])  # fmt: skip
        if run.rank == 0:
            folder.mkdir(exist_ok=True)
            rows = [every[k % run.world][k // run.world * args.group + j]  # problem k is with rank k % world
                    for k in range(args.problems) for j in range(args.group)]  # fmt: skip
            for final, text in ((folder / "settings.json", json.dumps(facts, indent=1)), (path, jsonl(rows))):
                write_text(folder / run.dir.name, text)  # a name of its own: another run may be at the same step
                (folder / run.dir.name).replace(final)
        dist.barrier()

    def replay(step, path):
        problems, rows = next_problems(pool, step, args, run), read_jsonl(path)
        mine = [rows[i * args.group + j] for i in range(run.rank, args.problems, run.world) for j in range(args.group)]
        batch = sample(policy, processor, problems, args, run, answers=[row["ids"] for row in mine])
        return batch, torch.tensor([row["reward"] for row in mine], device=run.device)

    if not all(map(appears, paths)):
        raise SystemExit(f"{folder} is not whole on this node: --runs has to be a folder that all share.")
    right = [row["reward"] for path in paths for row in read_jsonl(path)]
    return sum(right) / len(right), map(replay, range(len(paths)), paths)


# --------------------------------------------------------------------------------------------------------- 9 outputs


def greedy_outputs(policy, processor, rows, args, run, desc=None):
    """Greedy answers to all rows, shared out over the ranks -> list of texts in the order of rows, on every rank."""
    single, share = replace(args, group=1), math.ceil(len(rows) / run.world)
    mine = [rows[i % len(rows)] for i in range(run.rank, share * run.world, run.world)]  # equal: ranks stay in step
    size, texts = args.problems * args.group // run.world, []
    with tqdm(desc=desc, total=len(rows), unit="answer", disable=desc is None or run.rank > 0, leave=False) as bar:
        for i in range(0, share, size):
            texts += sample(policy, processor, mine[i : i + size], single, run, greedy=True).text
            bar.update(min(size * run.world, len(rows) - bar.n))
    every = run.gather(texts)
    return [every[i % run.world][i // run.world] for i in range(len(rows))]


def accuracy(policy, processor, sets, args, run):
    """{set: greedy accuracy by the rule grader on its first `eval_size` rows}."""
    scores = {}
    for name, rows in sets.items():
        texts = greedy_outputs(policy, processor, rows := rows[: args.eval_size], args, run)
        right = [grade(x, p["answer"], p["choices"]) == "right" for x, p in zip(texts, rows, strict=True)]
        scores[name] = sum(right) / len(right)
    return scores


def evaluate(policy, processor, sets, step, args, run):
    """Every `eval_every` steps, `accuracy` for the log -> {eval_<set>: accuracy}."""
    due = args.eval_every and (step + 1) % args.eval_every == 0
    return {f"eval_{k}": v for k, v in accuracy(policy, processor, sets, args, run).items()} if due else {}


def save_checkpoint(policy, processor, run):
    """checkpoint/: the trained model, whole and in run.dtype, a valid --model."""
    refresh(policy)
    folder = run.dir / "checkpoint"
    if run.rank == 0:
        for part in (policy.sampler, processor.tokenizer, processor.images):
            part.save_pretrained(folder.with_suffix(".new"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".new").rename(folder)
    dist.barrier()


def write_outputs(policy, processor, sets, args, run):
    """Greedy answers to every evaluation set in outputs.jsonl, which ends the run."""
    lines = []
    for name, rows in sets.items():
        texts = greedy_outputs(policy, processor, rows, args, run, f"{run.dir.name}: answers to {name}")
        lines += [dict(set=name, id=p["id"], output=x) for p, x in zip(rows, texts, strict=True)]
    if run.rank == 0:
        config = run.dir / "config.json"
        write_text(config, json.dumps(json.loads(config.read_text()) | {"ended": clock()}, indent=1))
        write_text(run.dir / "outputs.jsonl", jsonl(lines))
        shutil.rmtree(run.dir / "state", ignore_errors=True)
        tqdm.write(f"{run.dir}: finished. Next: python judge.py {run.dir.parent}/* --judge rule")
    dist.barrier()
