"""What the distributed workers share: configurations and reference models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def worker_arguments() -> dict[str, Any]:
    """Arguments that ``run_ranks`` passed to this worker."""
    return json.loads(sys.argv[1])


def report(arguments: dict[str, Any], content: dict[str, Any]) -> None:
    """Hand a result back to the test."""
    path = Path(arguments["out"]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(content))


def ds_config(
    demo: dict[str, str], out: str | Path, dflop: dict[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    """A DeepSpeed configuration for the tiny demo; ``dflop`` is merged one level deep.

    ``demo`` has ``model_dir``, ``train_path`` and ``media_root``.
    """
    block: dict[str, Any] = {
        "seed": 7,
        "model": {"path": demo["model_dir"]},
        "data": {"train_path": demo["train_path"], "media_root": demo["media_root"], "num_workers": 0},
        "parallel": {"pipeline_stages": 2},
        "train": {"num_steps": 2, "output_dir": str(out)},
        "cost": {"profile_budget_s": 2.0},
        "scheduler": {"deterministic_time_s": 0.02, "deadline_s": 60.0},
    }
    for key, value in (dflop or {}).items():
        block[key] = {**block[key], **value} if isinstance(value, dict) and key in block else value
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 100000,
        "dflop": block,
    }
    return {**config, **top}


def demo_paths(demo: Any) -> dict[str, str]:
    """The ``tiny_demo`` fixture as JSON."""
    return {
        "model_dir": str(demo.model_dir),
        "train_path": str(demo.train_path),
        "media_root": str(demo.media_root),
    }


def start(config: dict[str, Any]) -> tuple[Any, Any]:
    """Prepare and initialize as ``dflop_ds.train`` does; returns (engine, setup)."""
    import deepspeed

    import dflop_ds
    from dflop_ds.config import parse_dflop

    deepspeed.init_distributed(dist_backend="gloo")
    setup = dflop_ds.prepare(config, parse_dflop(config))
    engine, *_ = dflop_ds.initialize(
        model=setup.model,
        model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
        training_data=setup.dataset,
        collate_fn=setup.collate_fn,
        config=config,
    )
    return engine, setup


def keep_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Dictionary that will hold the reduced gradients (by Hugging Face name) of the last step."""
    from deepspeed.runtime.pipe import schedule

    kept: dict[str, torch.Tensor] = {}
    original = dict(engine._INSTRUCTION_MAP)

    def keep_then_step(self: Any, **kwargs: Any) -> None:
        for layer in self.module.local_layers():
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    # DeepSpeed's bf16 optimizer sums in fp32, beside the parameter.
                    summed = getattr(parameter, "_hp_grad", None)
                    gradient = parameter.grad if summed is None else summed.view_as(parameter)
                    kept[layer.hf_name(name)] = gradient.detach().double().clone()
        original[schedule.OptimizerStep](self, **kwargs)

    engine._INSTRUCTION_MAP = {**original, schedule.OptimizerStep: keep_then_step}
    return kept


def reference_model(model_dir: str) -> Any:
    """The ``transformers`` model with the weights that the pipeline starts from."""
    import transformers

    architecture = transformers.AutoConfig.from_pretrained(model_dir).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(model_dir).eval()
    for name, parameter in model.named_parameters():
        # The class freezes this table when it is built; loading weights makes every parameter trainable.
        if name.endswith("audio_tower.embed_positions.weight"):
            parameter.requires_grad_(False)
    return model


def hugging_face_inputs(sample: Any) -> dict[str, torch.Tensor]:
    """Inputs of one sample for the ``transformers`` model."""
    from dflop_ds.data.layout import MediaKind

    inputs = {"input_ids": sample.input_ids[None]}
    sizes = [item.num_rows for item in sample.media]
    tiles = list(sample.media_values.split(sizes)) if sample.media else []
    images = [(t, m) for t, m in zip(tiles, sample.media, strict=True) if m.kind is not MediaKind.CLIP]
    clips = [t for t, m in zip(tiles, sample.media, strict=True) if m.kind is MediaKind.CLIP]
    if any(m.kind is MediaKind.AUDIO for m in sample.media):
        return audio_inputs(sample.input_ids, tiles, [m.extent[0] for m in sample.media])
    if images:
        most = max(len(t) for t, _ in images)
        padded = [torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])]) for t, _ in images]
        inputs["pixel_values"] = torch.stack(padded)
        inputs["image_sizes"] = torch.tensor([m.extent for _, m in images])
        inputs["batch_num_images"] = torch.tensor([len(images)])
    if clips:
        inputs["pixel_values_videos"] = torch.stack(clips)
    return {
        key: value.to(torch.float64) if value.is_floating_point() else value for key, value in inputs.items()
    }


def audio_inputs(
    input_ids: torch.Tensor, rows: list[torch.Tensor], lengths: list[int]
) -> dict[str, torch.Tensor]:
    """Inputs of Qwen2-Audio: mel frames in whole windows of 30 s, of recordings of so many samples."""
    windows = [torch.nn.functional.pad(frames.T, (0, 3000 - len(frames))) for frames in rows]
    num_frames = torch.tensor([-(-min(length, 480_000) // 160) for length in lengths])
    return {
        "input_ids": input_ids[None],
        "attention_mask": torch.ones_like(input_ids)[None],
        "input_features": torch.stack(windows).double(),
        "feature_attention_mask": (torch.arange(3000) < num_frames[:, None]).long(),
    }


def reference_loss(model: Any, dataset: Any, indices: list[int], reduction: str = "token") -> torch.Tensor:
    """Loss of a global batch, one sample after the other, by ``transformers`` alone in fp64."""
    terms = []
    for index in indices:
        sample = dataset[index]
        logits = model(**hugging_face_inputs(sample)).logits[0, :-1]
        labels = sample.labels[1:]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        terms.append((losses.sum(), int((labels != -100).sum())))
    if reduction == "token":
        return sum(total for total, _ in terms) / sum(count for _, count in terms)
    means = [total / count for total, count in terms if count]
    return sum(means) / len(means)
