"""One rank of `benchmarks/hf_trainer.py`: trains the same samples with each way to form microbatches."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from benchmarks.hf_data import (
    PackedCollator,
    PaddedCollator,
    Sample,
    SyntheticSamples,
    build_model,
    tiny_llava,
)
from dflop_ds.integrations.hf_trainer import DflopCallback
from dflop_ds.runtime.distributed import leave
from dflop_ds.runtime.shared_memory import forget_segment_names

COLLATORS = {"padded": PaddedCollator, "packed": PackedCollator}
SAMPLING = {"group_by_length": "group_by_length", "batch_rebalance": "batch_rebalance"}


class StepClock(TrainerCallback):
    """Wall-clock seconds of each optimizer step, loading included."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._last_s = 0.0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock when all ranks are ready."""
        torch.distributed.barrier()
        self._last_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note a step."""
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self._last_s)
        self._last_s = now_s


def run(
    spec: dict[str, Any], dataset: SyntheticSamples, collator: str, strategy: str, cost: str
) -> list[float]:
    """Train one epoch; `calibrate` measures costs into the file that `ours` then uses."""
    unset_hf_deepspeed_config()  # an earlier ZeRO 3 run would partition this model while it is built
    config = tiny_llava(**spec["model"])
    arguments = TrainingArguments(
        str(Path(spec["out"]) / "trainer"),
        per_device_train_batch_size=spec["batch_size"],
        gradient_accumulation_steps=spec["accumulation"],
        num_train_epochs=1,
        max_steps=spec["warmup_steps"] + 2 if strategy == "calibrate" else -1,
        learning_rate=1e-4,
        train_sampling_strategy=SAMPLING.get(strategy, "random"),
        data_seed=spec["seed"],
        seed=spec["seed"],
        deepspeed=spec["ds_config"],
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    trainer = Trainer(
        model=build_model(config, spec["seed"]),
        args=arguments,
        train_dataset=dataset,
        data_collator=COLLATORS[collator](),
    )
    if strategy in ("calibrate", "ours"):
        settings: dict[str, Any] = {"collator": collator, "warmup_steps": spec["warmup_steps"]}
        settings |= {"save_profile": cost} if strategy == "calibrate" else {"profile": cost}
        trainer.add_callback(DflopCallback(trainer, config=settings))
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.train()
    return clock.steps_s


def main() -> None:
    """Run every strategy under both collators and write the step times of this rank."""
    spec = json.loads(Path(sys.argv[-1]).read_text())
    samples = [Sample(text, tuple((high, wide) for high, wide in images)) for text, images in spec["samples"]]
    dataset = SyntheticSamples(samples, tiny_llava(**spec["model"]), spec["seed"])
    times: dict[str, dict[str, list[float]]] = {}
    for collator in COLLATORS:
        cost = str(Path(spec["out"]) / f"cost_{collator}.json")
        run(spec, dataset, collator, "calibrate", cost)
        times[collator] = {strategy: [] for strategy in spec["strategies"]}
        for turn in range(spec["num_rounds"]):  # there and back, so that drift of the machine cancels
            for strategy in spec["strategies"][:: 1 if turn % 2 == 0 else -1]:
                times[collator][strategy] += run(spec, dataset, collator, strategy, cost)
    rank = int(os.environ["RANK"])
    (Path(spec["out"]) / f"rank{rank}.json").write_text(json.dumps(times))
    forget_segment_names()
    leave()


if __name__ == "__main__":
    main()
