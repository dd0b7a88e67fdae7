"""Trains small cases with ``transformers.Trainer`` and reports what the model saw and learned."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.hf_data import IGNORED, SyntheticSamples
from dflop_ds.integrations.hf_trainer import DflopCallback
from dflop_ds.runtime.distributed import leave
from tests.support.hf import build, make_samples, make_trainer


def supervised(batch):
    """Supervised tokens of each row (padded) or segment (packed): they identify the samples."""
    labels = batch["labels"]
    if "position_ids" in batch:
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        labels = torch.tensor_split(labels[0], starts[1:])
    return [row[row != IGNORED].tolist() for row in labels]


def weights(model):
    """All weights as one vector, gathered from the ranks under ZeRO 3."""
    parameters = list(model.parameters())
    gather = contextlib.nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        gather = deepspeed.zero.GatheredParameters(parameters)
    with gather:
        return torch.cat([parameter.detach().float().flatten().cpu() for parameter in parameters])


def run_case(case, out, rank):
    config, samples = build(), make_samples(case.get("samples", "mixed"), case["num_samples"])
    dataset = SyntheticSamples(samples, config)
    seen = []
    trainer = make_trainer(case, config, dataset, out)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(supervised(kwargs)) if module.training else None,
        with_kwargs=True,
    )
    callback = None
    settings = dict(case.get("config", {}))
    if "profile" in settings:
        settings["profile"] = settings["profile"].format(rank=rank)
    if case.get("callback", True):
        callback = DflopCallback(
            trainer,
            shape_fn=None if case.get("measure") else dataset_shape(dataset),
            config=settings,
        )
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=case.get("resume"))
    name = f"{case['name']}-rank{rank}"
    torch.save(weights(trainer.model), out / f"{name}.pt")
    return {
        "seen": seen,
        "log": trainer.state.log_history,
        "global_step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "lr": trainer.lr_scheduler.get_last_lr()[0],
        "progress": None if callback is None else callback.progress,
    }


def dataset_shape(dataset):
    """Sizes by identity of content: `shape_fn` gets samples, not indices."""

    def shape_fn(sample):
        pixels = sample.get("pixel_values")
        tiles = 0 if pixels is None else int((pixels.abs().sum(dim=(2, 3, 4)) > 0).sum())
        return {"llm_tokens": len(sample["input_ids"]), "num_tiles": tiles}

    return shape_fn


def main():
    arguments = json.loads(sys.argv[-1])
    out, rank = Path(arguments["out"]), int(os.environ["RANK"])
    report = {case["name"]: run_case(case, out, rank) for case in arguments["cases"]}
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    if any(case.get("zero") is not None for case in arguments["cases"]):
        from dflop_ds.runtime.shared_memory import forget_segment_names

        forget_segment_names()
    torch.distributed.barrier()
    leave()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the interpreter's teardown may race with torch's threads and end with a signal
