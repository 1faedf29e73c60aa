"""`from_pretrained` under transformers' `HfDeepSpeedConfig` in stage 3: it loads by
module, and no rank holds the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

LOADS = """
import json, sys, threading, time, torch
import deepspeed
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations import HfDeepSpeedConfig

folder, out, dtype = sys.argv[1:]
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": "auto"}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
config["bf16"] = {"enabled": dtype == "bfloat16"}
kept = HfDeepSpeedConfig(config)  # before the process group exists, as in scripts

def memory():  # bytes that are this process's own: pages of the checkpoint's files are the kernel's
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=getattr(torch, dtype))
with deepspeed.zero.GatheredParameters(classifier.score.weight):
    score = classifier.score.weight.detach().float().clone()  # not in the checkpoint
del classifier
most, first = [0], memory()
done = threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], memory() - first)
thread = threading.Thread(target=watch)
thread.start()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
done.set()
thread.join()
size = sum(p.ds_numel * p.element_size() for p in model.parameters())
shards = sum(p.ds_tensor.nbytes for p in model.parameters())
assert all(p.numel() == 0 and p.dtype == getattr(torch, dtype) for p in model.parameters())
model.resize_token_embeddings(2016)
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
weights = engine.module_state_dict()
assert all(bool(x.isfinite().all()) for x in weights.values())
x = torch.arange(1, 11)[None]
loss = engine(input_ids=x, labels=x).loss
engine.backward(loss)
engine.step()
rank = deepspeed.comm.get_rank()
torch.save(weights, f"{out}/weights{rank}.pt")
assert not engine.metrics.overflow
found = {"size": size, "shards": shards, "peak": most[0], "loss": loss.item(), "score": score.std().item()}
open(f"{out}/found{rank}.json", "w").write(json.dumps(found | {"sum": score.sum().item()}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_a_model_is_loaded_without_being_whole(tmp_path: Path, dtype: str) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "vocab_size": 2000,
    }
    config = Qwen2Config(**sizes, **heads, pad_token_id=0)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model", max_shard_size="30MB")
    (tmp_path / "loads.py").write_text(LOADS)
    # With a fixed threshold malloc returns freed tensors to the system, so that the peak is that of
    # tensors.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    program = [str(tmp_path / "loads.py"), str(tmp_path / "model"), str(tmp_path), dtype]
    command = [
        sys.executable,
        "-m",
        "fzero",
        "run",
        "--as-deepspeed",
        "--no_local_rank",
        "--num_procs",
        "2",
        *program,
    ]
    subprocess.run(command, env=environment, check=True, timeout=300)
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2)]
    expected = model.state_dict()
    for rank, of_rank in enumerate(found):
        assert of_rank["size"] == sum(p.nbytes for p in model.parameters())
        assert 0.5 <= of_rank["shards"] / of_rank["size"] < 0.51
        assert of_rank["peak"] < of_rank["shards"] + 0.12 * of_rank["size"], (
            "one module and its message beside the shards"
        )
        assert 0.015 < of_rank["score"] < 0.025 and of_rank["sum"] == found[0]["sum"], (
            "transformers' own initialisation"
        )
        weights = torch.load(tmp_path / f"weights{rank}.pt")
        assert weights["model.embed_tokens.weight"].shape == (2016, 512)
        for name, value in expected.items():
            assert torch.equal(weights[name][: len(value)], value.float()), name
