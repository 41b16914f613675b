"""What a launch configuration names and does not get is an error, at construction."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from games import make_trainer

from agile_trainers.config.launch_checks import check_engine


@pytest.mark.parametrize(("size", "kind"), [("cp_size", "context"), ("sp_size", "sequence"), ("tp_size", "tensor")])
def test_dividing_an_episode_is_refused(embedded_model, tmp_path, monkeypatch, size, kind):
    expected = rf"{size}=2 \({kind} parallelism\) divides an episode"
    with pytest.raises(ValueError, match=f"does not support .*{size} > 1|{expected}"):  # TRL's words or ours
        make_trainer(embedded_model, tmp_path, parallelism_config=ParallelismConfig(**{size: 2}))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{size.upper()}", "2")
    with pytest.raises(ValueError, match=expected):
        make_trainer(embedded_model, tmp_path)


def test_fsdp_that_is_not_there_is_refused(embedded_model, tmp_path, monkeypatch):
    """As ``accelerate launch`` names it."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="names FSDP, but accelerate would silently run NO"):
        make_trainer(embedded_model, tmp_path)


def engine(**state) -> SimpleNamespace:
    return SimpleNamespace(
        distributed_type=DistributedType.NO,
        num_processes=1,
        state=SimpleNamespace(**{"fsdp_plugin": None, "deepspeed_plugin": None, **state}),
    )


def test_processes_that_know_nothing_of_each_other(monkeypatch):
    args = SimpleNamespace(ds3_gather_for_generation=True, use_vllm=False)
    check_engine(engine(), args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started, but each would train by itself.*use_cpu=True"):
        check_engine(engine(), args)


@pytest.mark.parametrize(
    ("stage", "gather", "vllm", "refused"),
    [(3, False, False, True), (3, True, False, False), (3, False, True, False), (2, False, False, False)],
)
def test_weights_gathered_token_by_token(stage, gather, vllm, refused):
    args = SimpleNamespace(ds3_gather_for_generation=gather, use_vllm=vllm)
    accelerator = engine(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    if not refused:
        return check_engine(accelerator, args)
    with pytest.raises(ValueError, match="ds3_gather_for_generation=False"):
        check_engine(accelerator, args)


def test_the_first_fsdp_is_refused():
    with pytest.raises(ValueError, match=r"fsdp_version=1 .*accelerate_configs/fsdp2.yaml"):
        check_engine(engine(fsdp_plugin=SimpleNamespace(fsdp_version=1)), SimpleNamespace())
