"""Loading and exporting weights: two pipeline stages against transformers, which loads the whole model.

A synthetic LLaVA-OneVision model of 2 GB (fp32, random) in shards of 0.5 GB. Every side runs in processes of
its own, whose resident memory is sampled: two stages side by side, or one process of transformers alone.
Files are in the page cache, and nothing is flushed to disk: memory and processing are compared, not a disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file as well

from benchmarks import environment

SCHEMA_VERSION = 1
SEED = 0
NUM_STAGES = 2
SHARD_BYTES = 500_000_000
SAMPLE_EVERY_S = 0.01
GB = 1e9


def main() -> int:
    """Run both sides, print a table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--layers", type=int, default=26, help="decoder blocks; 26 make 2 GB")
    parser.add_argument("--folder", type=Path, help="where the three models are written (6 GB)")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "STAGE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        side, stage, folder = arguments.child
        print(json.dumps(SIDES[side](Path(folder), int(stage))))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        num_bytes = write_model(folder / "model", arguments.layers)
        found = {
            "transformers": run("transformers", folder, 1),
            "dflop_ds": run("dflop_ds", folder, NUM_STAGES),
        }
        check_same(folder)
    result = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.describe(),
        "seed": SEED,
        "model_bytes": num_bytes,
        "num_stages": NUM_STAGES,
        "shard_bytes": SHARD_BYTES,
        "processes": found,
        "summary": summarise(found, num_bytes),
    }
    show(result)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2))
    return 0


def model_config(num_layers: int) -> Any:
    """A LLaVA-OneVision configuration of about 70 MB of fp32 weights per decoder block."""
    from transformers import LlavaOnevisionConfig, Qwen2Config, SiglipVisionConfig

    vision = SiglipVisionConfig(
        image_size=56,
        patch_size=14,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    )
    return LlavaOnevisionConfig(
        architectures=["LlavaOnevisionForConditionalGeneration"],
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_grid_pinpoints=[[56, 56], [112, 112]],
        image_token_index=31998,
        video_token_index=31999,
        tie_word_embeddings=False,
    )


def write_model(directory: Path, num_layers: int) -> int:
    """Write random weights shard by shard; the size in bytes."""
    import torch

    from dflop_ds.models.export import HuggingFaceWriter, whole_model_shapes

    config = model_config(num_layers)
    config.save_pretrained(directory.with_name("config"))
    directory.mkdir()
    shapes = whole_model_shapes(config)
    generator = torch.Generator().manual_seed(SEED)
    writer = HuggingFaceWriter(
        directory,
        directory.with_name("config"),
        config,
        [shapes],
        torch.float32,
        max_shard_bytes=SHARD_BYTES,
    )
    writer.write_stage(0, lambda name: torch.rand(shapes[name], generator=generator))
    writer.write_rest()
    return sum(4 * math.prod(shape) for shape in shapes.values())


def run(side: str, folder: Path, num_processes: int) -> list[dict[str, float]]:
    """Start the processes of one side at the same time; what each of them measured."""
    command = [sys.executable, __file__, "--child", side]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, str(stage), str(folder)], stdout=subprocess.PIPE, env=environ)
        for stage in range(num_processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a process of {side} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def with_transformers(folder: Path, stage: int) -> dict[str, float]:
    """``from_pretrained`` and ``save_pretrained`` of the whole model."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    from dflop_ds.models.export import whole_model_shapes

    whole_model_shapes(AutoConfig.from_pretrained(folder / "model"))  # imports the model's code

    def load() -> Any:
        model = AutoModelForMultimodalLM.from_pretrained(folder / "model", dtype=torch.float32)
        touch(model.parameters())
        return model

    model, loaded = measured(load)
    out = folder / "transformers"
    _, saved = measured(lambda: model.save_pretrained(out, max_shard_size=SHARD_BYTES))
    return as_result(loaded, saved, model.parameters())


def with_dflop(folder: Path, stage: int) -> dict[str, float]:
    """Build and load the layers of one stage, then write them."""
    import torch
    from transformers import AutoConfig

    from dflop_ds.models.export import HuggingFaceWriter, whole_model_shapes
    from dflop_ds.models.llava_onevision import pipeline_layers
    from dflop_ds.models.weights import (
        Checkpoint,
        check_weights,
        load_layers,
        named_weights,
        uninitialised,
    )

    config = AutoConfig.from_pretrained(folder / "model")
    plans = pipeline_layers(config)
    whole_model_shapes(config)  # imports the model's code
    with torch.device("meta"):
        sizes = [{n: tuple(p.shape) for n, p in named_weights(plan.build()).items()} for plan in plans]
    bounds = equal_parts([sum(math.prod(shape) for shape in layer.values()) for layer in sizes])

    def load() -> Any:
        source = Checkpoint(folder / "model")
        with torch.device("meta"):
            check_weights([plan.build() for plan in plans], source, whole_model_shapes(config))
        with uninitialised():
            layers = [plan.build() for plan in plans[bounds[stage] : bounds[stage + 1]]]
        load_layers(layers, source)
        touch(parameter for layer in layers for parameter in layer.parameters())
        return layers

    layers, loaded = measured(load)
    weights = {name: p.detach() for layer in layers for name, p in named_weights(layer).items()}
    stages = [
        {name: shape for layer in sizes[start:stop] for name, shape in layer.items()}
        for start, stop in itertools.pairwise(bounds)
    ]
    out = folder / "dflop_ds"
    out.mkdir(exist_ok=True)

    def save() -> None:
        options = {"max_shard_bytes": SHARD_BYTES}
        writer = HuggingFaceWriter(out, folder / "model", config, stages, torch.float32, **options)
        writer.write_stage(stage, weights.__getitem__)
        if stage == 0:
            writer.write_rest()

    _, saved = measured(save)
    return as_result(loaded, saved, weights.values())


SIDES: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "transformers": with_transformers,
    "dflop_ds": with_dflop,
}


def equal_parts(numels: list[int]) -> list[int]:
    """Boundaries of the stages, by number of parameters."""
    ends = list(itertools.accumulate(numels))
    inner = [
        1 + min(range(len(ends) - 1), key=lambda i: abs(ends[i] - ends[-1] * part / NUM_STAGES))
        for part in range(1, NUM_STAGES)
    ]
    return [0, *inner, len(numels)]


def touch(parameters: Any) -> None:
    """Read every weight once, so that what is only mapped into memory is loaded as well."""
    for parameter in parameters:
        parameter.detach().sum()


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run something; its result, seconds, and most memory beyond what there was before, in bytes."""
    stop, most = threading.Event(), {"RssAnon": 0, "VmRSS": 0}
    before = resident()

    def watch() -> None:
        while not stop.wait(SAMPLE_EVERY_S):
            for key, value in resident().items():
                most[key] = max(most[key], value - before[key])

    thread = threading.Thread(target=watch)
    thread.start()
    start_s = time.perf_counter()
    try:
        result = work()
        seconds = time.perf_counter() - start_s
    finally:
        stop.set()
        thread.join()
    return result, {"seconds": seconds, "peak_bytes": most["VmRSS"], "peak_anonymous_bytes": most["RssAnon"]}


def resident() -> dict[str, int]:
    """Resident memory of this process in bytes: all of it, and what is no page of a file."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "RssAnon"):
            found[key] = 1024 * int(value.split()[0])
    return found


def as_result(loaded: dict[str, float], saved: dict[str, float], weights: Any) -> dict[str, float]:
    """What a process reports."""
    own_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    load = {f"load_{key}": value for key, value in loaded.items()}
    return {"own_bytes": own_bytes, **load, **{f"export_{key}": value for key, value in saved.items()}}


def check_same(folder: Path) -> None:
    """Make sure that both exports hold the weights that were loaded."""
    import torch

    from dflop_ds.families.llava_onevision import FAMILY
    from dflop_ds.models.export import whole_model_shapes
    from dflop_ds.models.weights import Checkpoint

    names = list(whole_model_shapes(model_config(1)))
    sides = [
        Checkpoint(folder / name, FAMILY.published_names) for name in ("model", "transformers", "dflop_ds")
    ]
    for name in names:
        (_, first), *others = (next(iter(side.read([name]))) for side in sides)
        if not all(torch.equal(first, other) for _, other in others):
            raise SystemExit(f"the exports differ in {name}")


def summarise(found: dict[str, list[dict[str, float]]], num_bytes: int) -> dict[str, float]:
    """The largest process of each side, and bytes of the whole model per second."""
    summary: dict[str, float] = {"model_gb": num_bytes / GB}
    for side, processes in found.items():
        summary[f"{side}_own_gb"] = max(p["own_bytes"] for p in processes) / GB
        for work in ("load", "export"):
            seconds = max(p[f"{work}_seconds"] for p in processes)
            summary[f"{side}_{work}_gb_per_s"] = num_bytes / GB / seconds
            summary[f"{side}_{work}_peak_gb"] = max(p[f"{work}_peak_bytes"] for p in processes) / GB
            summary[f"{side}_{work}_peak_anonymous_gb"] = (
                max(p[f"{work}_peak_anonymous_bytes"] for p in processes) / GB
            )
    return summary


def show(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(json.dumps(result["environment"]))
    print(f"seed {SEED}; {result['summary']['model_gb']:.2f} GB in shards of {SHARD_BYTES / GB} GB")
    print(f"{'MEASURED, page cache warm':<28}{'transformers':>16}{'dflop_ds, 2 stages':>20}")
    rows = {
        "own weights, GB": "own_gb",
        "load, GB/s": "load_gb_per_s",
        "load, peak of a process, GB": "load_peak_gb",
        "  of that anonymous, GB": "load_peak_anonymous_gb",
        "export, GB/s": "export_gb_per_s",
        "export, peak beyond that, GB": "export_peak_gb",
    }
    for title, key in rows.items():
        values = [result["summary"][f"{side}_{key}"] for side in ("transformers", "dflop_ds")]
        print(f"{title:<28}{values[0]:>16.2f}{values[1]:>20.2f}")


if __name__ == "__main__":
    sys.exit(main())
