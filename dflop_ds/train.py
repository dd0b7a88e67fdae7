"""The launcher's entry point: ``deepspeed --module dflop_ds.train --deepspeed_config FILE``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
from deepspeed import comm as dist

from dflop_ds.config import DflopConfig, TrainConfig, load_ds_config, parse_dflop, require_optimizer
from dflop_ds.errors import ConfigError, DflopError
from dflop_ds.runtime import compat, distributed
from dflop_ds.runtime.adapter import save_adapter
from dflop_ds.runtime.export import export_engine
from dflop_ds.runtime.initialize import initialize
from dflop_ds.runtime.report import rewrite_lines, write_reports
from dflop_ds.runtime.setup import Setup, prepare
from dflop_ds.runtime.stop import on_signals
from dflop_ds.runtime.versions import require_supported_deepspeed

logger = logging.getLogger("dflop_ds.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the configuration says; the exit code is 0 on success, 2 on a stated error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        train(args)
    except DflopError as error:
        rank = dist.get_rank() if dist.is_initialized() else args.local_rank
        logger.error("rank %d: %s", rank, error)
        return 2
    return 0


def train(args: argparse.Namespace) -> None:
    """Prepare, train, report."""
    require_supported_deepspeed()
    ds_config = load_ds_config(args.deepspeed_config or "")
    config = parse_dflop(ds_config)
    require_optimizer(ds_config, compat.optimizer_names())
    distributed.start()
    setup = prepare(ds_config, config)
    engine, _, _, _ = initialize(
        model=setup.model,
        model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
        training_data=setup.dataset,
        collate_fn=setup.collate_fn,
        config=ds_config,
    )
    try:
        resume(engine, config)
        run_steps(engine, setup, config)
        write_reports(engine, config)
        if config.finetune.lora is not None:
            save_adapter(setup.model, Path(config.train.output_dir) / "adapter", config.model.path or "")
        if config.train.export_dir is not None:
            source, out = config.model.path or "", config.train.export_dir
            export_engine(engine, source, out, config.train.export_dtype)
    finally:
        engine.destroy()


def resume(engine: Any, config: DflopConfig) -> None:
    """Load the checkpoint that ``dflop.train.resume`` names; a collective call.

    Raises
    ------
    ConfigError
        If it names one that is not there.
    """
    wanted = config.train.resume
    if wanted is None:
        return
    folder = Path(_checkpoint_dir(config) if wanted == "auto" else wanted)
    path, _ = engine.load_checkpoint(str(folder))
    if path is None and wanted != "auto":
        raise ConfigError(
            f"dflop.train.resume must name a checkpoint or a folder of checkpoints, found none in {folder}; "
            'correct it, or set it to "auto" or null.'
        )
    if path is not None and dist.get_rank() == 0:
        logger.info("resumed after %d steps from %s", engine.global_steps, path)


def run_steps(engine: Any, setup: Setup, config: DflopConfig) -> None:
    """The training loop; rank 0 logs and appends one line per step to ``metrics.jsonl``.

    SIGTERM and Ctrl-C end it after the running step.
    """
    num_steps = total_steps(config, len(setup.dataset.table), engine.train_batch_size())
    metrics = MetricsFile(Path(config.train.output_dir) / "metrics.jsonl", num_kept=engine.global_steps)
    with on_signals(engine.request_stop) if config.enabled else contextlib.nullcontext():
        for step in range(engine.global_steps + 1, num_steps + 1):
            start_s = time.perf_counter()
            loss = float(engine.train_batch())
            line = {"step": step, "loss": loss, "step_time_s": time.perf_counter() - start_s}
            stopping = config.enabled and engine.stopping
            evaluating = config.enabled and not stopping and due(config.train.eval_every, step)
            if evaluating and setup.eval_dataset is not None:
                eval_loss = engine.evaluate(setup.eval_dataset)
                stopping = engine.stopping
                if not stopping:
                    line["eval_loss"] = eval_loss
            if dist.get_rank() == 0:
                metrics.append(line)
                if step % config.train.log_every == 0:
                    logger.info("%d steps: %s", num_steps, " ".join(f"{k} {v:.6g}" for k, v in line.items()))
            if must_save(config.train, step, step == num_steps, stopping):
                engine.save_checkpoint(_checkpoint_dir(config))
            if stopping:
                logger.info("rank %d: stopped after step %d of %d", dist.get_rank(), step, num_steps)
                return


def _checkpoint_dir(config: DflopConfig) -> str:
    return str(Path(config.train.output_dir) / "checkpoints")


class MetricsFile:
    """JSON lines of what was measured, complete after every step.

    Parameters
    ----------
    path : Path
    num_kept : int
        Steps before which a resumed run goes on: lines of later steps are dropped, and all of them by a
        new run.
    """

    def __init__(self, path: Path, num_kept: int = 0) -> None:
        self.path = path
        self.num_kept = num_kept
        self._started = False

    def append(self, line: dict[str, Any]) -> None:
        """Add one line; what is not finite becomes ``null``."""
        if not self._started:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rewrite_lines(self.path, lambda known: known["step"] <= self.num_kept)
            self._started = True
        line = {key: value if math.isfinite(value) else None for key, value in line.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens now."""
    return every is not None and step % every == 0


def must_save(train: TrainConfig, step: int, is_last: bool, stopping: bool) -> bool:
    """Whether a checkpoint is saved after a step: when one is due, after the last one, and on the way out."""
    wanted = train.save_every is not None and (is_last or due(train.save_every, step))
    return wanted or (stopping and train.save_on_stop)


def total_steps(config: DflopConfig, num_samples: int, batch_size: int) -> int:
    """Optimizer steps to train."""
    if config.train.num_steps is not None:
        return config.train.num_steps
    per_epoch = (
        num_samples // batch_size if config.data.tail == "drop" else math.ceil(num_samples / batch_size)
    )
    # Rounded first: 0.07 epochs of 100 steps are 7 steps, although 0.07 * 100 > 7.
    return math.ceil(round((config.train.num_epochs or 0) * per_epoch, 6))


def run() -> NoReturn:
    """Leave the process with the exit code of :func:`main`."""
    distributed.leave(main())


if __name__ == "__main__":
    run()
