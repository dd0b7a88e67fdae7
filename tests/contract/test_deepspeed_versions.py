"""The version gate, and that our readings of DeepSpeed match the installed one."""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import json
import types
from pathlib import Path

import pytest

from dflop_ds.config import BatchSizes, load_ds_config
from dflop_ds.errors import ConfigError, EnvironmentProblem, UnsupportedVersionError
from dflop_ds.runtime import doctor, versions

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize("version", ["0.19.3", "0.19.8", "0.19.11", "0.19.8+cpu", "0.19.3.post1"])
def test_supported_releases_pass(version):
    versions.require_supported_deepspeed(version)


@pytest.mark.parametrize("version", ["0.18.3", "0.18.9", "0.19.0", "0.19.2", "0.9.5"])
def test_earlier_releases_are_refused_with_the_reason(version):
    with pytest.raises(UnsupportedVersionError, match="gradients of early pipeline stages") as caught:
        versions.require_supported_deepspeed(version)
    assert f"found {version}" in str(caught.value)
    assert "pip install 'deepspeed>=0.19.3,<0.20'" in str(caught.value)


@pytest.mark.parametrize("version", ["0.20.0", "0.20", "0.20.0rc1", "1.0"])
def test_later_releases_are_refused(version):
    with pytest.raises(UnsupportedVersionError, match="not tested"):
        versions.require_supported_deepspeed(version)


def test_nonsense_is_refused():
    with pytest.raises(UnsupportedVersionError, match="release numbers"):
        versions.require_supported_deepspeed("unknown")


def test_installed_release_passes():
    versions.require_supported_deepspeed()


def test_missing_package_is_explained(monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install"):
        versions.require_supported_deepspeed()


def test_gate_and_package_metadata_agree():
    requirements = importlib.metadata.requires("dflop_ds") if _installed() else None
    if requirements is None:
        pytest.skip("the package is not installed")
    found = {text.replace(" ", "").split(";")[0] for text in requirements}
    for name in ("torch", "deepspeed", "transformers"):
        first, *rest = versions.supported_range(name).split(",")
        assert found & {f"{name}{','.join(order)}" for order in itertools.permutations([first, *rest])}


def _installed():
    return versions.installed_version("dflop_ds") is not None


def test_name_of_the_cpu_op():
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    assert ShareMemCommBuilder.NAME == doctor.CPU_OP


def test_torch_locks_a_build_with_the_file_that_the_doctor_looks_for():
    from torch.utils import cpp_extension

    assert "FileBaton(os.path.join(build_directory, 'lock'))" in inspect.getsource(cpp_extension).replace(
        '"', "'"
    )


def deepspeed_rule(keys, replicas):
    """Return what DeepSpeed's own methods resolve, or None where they refuse."""
    from deepspeed.runtime.config import DeepSpeedConfig

    state = types.SimpleNamespace(
        train_batch_size=keys.get(TRAIN),
        train_micro_batch_size_per_gpu=keys.get(MICRO),
        gradient_accumulation_steps=keys.get(STEPS),
        world_size=replicas,
    )
    try:
        DeepSpeedConfig._set_batch_related_parameters(state)
        DeepSpeedConfig._batch_assertion(state)
    except AssertionError:
        return None
    return state.train_batch_size, state.train_micro_batch_size_per_gpu, state.gradient_accumulation_steps


def our_rule(keys, replicas):
    try:
        sizes = BatchSizes.from_ds_config(keys, replicas)
    except ConfigError:
        return None
    return sizes.train_batch_size, sizes.micro_batch_size, sizes.num_microbatches


def test_batch_sizes_follow_deepspeed():
    values = (None, 1, 2, 3, 4, 8, 12, 24)
    accepted = 0
    for train, micro, steps, replicas in itertools.product(values, values, values, (1, 2, 3, 4)):
        keys = {key: value for key, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)) if value}
        expected = deepspeed_rule(keys, replicas)
        assert our_rule(keys, replicas) == expected, (keys, replicas)
        accepted += expected is not None
    assert accepted > 200


def test_deepspeed_reads_the_cpu_example_and_ignores_our_block():
    from deepspeed.runtime.config import DeepSpeedConfig

    path = Path(__file__).resolve().parents[2] / "ds_configs" / "llava_onevision_tiny_cpu.json"
    theirs = DeepSpeedConfig(json.loads(path.read_text()))
    ours = BatchSizes.from_ds_config(load_ds_config(path), 1)
    assert theirs.train_batch_size == ours.train_batch_size == 48
    assert theirs.train_micro_batch_size_per_gpu == ours.micro_batch_size == 2
    assert theirs.gradient_accumulation_steps == ours.num_microbatches == 24
