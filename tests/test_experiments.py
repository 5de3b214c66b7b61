"""Experiments and searches of conf/ are those that the paper has, each number by its tables."""

import pytest
from omegaconf import OmegaConf

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.config import to_config
from alpa_hpc.launch.locations import config_folder
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.llama import Llama
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.profiling.options import CostSource
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.options import RematChoice
from alpa_hpc.training.options import DataKind, OptimiserKind, ParamDtype
from tests.configs import composed, config_of

EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_composes_and_its_values_win(name: str) -> None:
    wanted = OmegaConf.load(config_folder() / "experiment" / f"{name}.yaml")
    del wanted["defaults"]  # pyright: ignore[reportArgumentType]  # untyped container
    got = composed(f"+experiment={name}")
    assert wanted
    assert OmegaConf.merge(got, wanted) == got
    config = to_config(got)
    assert config.name == name


def test_all_experiments_of_the_paper_are_there() -> None:
    gpt, moe = ("350m", "1_3b", "2_6b", "6_7b", "15b", "39b"), ("380m", "1_3b", "2_4b", "10b", "27b", "70b")
    sizes = {"gpt": gpt, "moe": moe, "wresnet": ("250m", "1b", "2b", "4b", "6_8b", "13b")}
    assert {f"{family}{size}" for family, each in sizes.items() for size in each} <= set(EXPERIMENTS)


@pytest.mark.parametrize(
    ("name", "devices", "billions", "petaflop", "microbatches", "layers"),
    [
        ("gpt350m", 1, 0.3547, 3.285, 512, 8),
        ("gpt1_3b", 4, 1.3134, 11.637, 128, 6),
        ("gpt2_6b", 8, 2.6486, 23.343, 128, 8),
        ("gpt6_7b", 16, 6.6537, 57.614, 64, 8),
        ("gpt15b", 32, 15.364, 132.535, 128, 16),
        ("gpt39b", 64, 39.079, 333.653, 1024, 16),
    ],
)
def test_the_papers_points_are_those_of_its_tables(
    name: str, devices: int, billions: float, petaflop: float, microbatches: int, layers: int
) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert isinstance(config.model, GPT)
    assert config.model.num_params() / 1e9 == pytest.approx(billions, rel=3e-4)
    assert config.model.iteration_flops(config.training.batch_size, True) / 1e15 == pytest.approx(petaflop, rel=3e-4)
    assert (config.model.dtype, config.training.param_dtype) == ("float16", ParamDtype.FLOAT16)
    assert (config.cluster.num_devices, config.schedule.num_microbatches, config.layers.num_layers) == (devices, microbatches, layers)
    assert (config.training.batch_size, config.search.remat, config.launcher.kind) == (1024, RematChoice.ALWAYS, LauncherKind.SLURM)
    assert config.profiling.source is CostSource.ANALYTIC


@pytest.mark.parametrize(
    ("name", "devices", "billions", "petaflop", "microbatches", "layers"),
    [
        ("moe380m", 1, 0.3835, 1.580, 512, 4),
        ("moe1_3b", 4, 1.3468, 3.006, 32, 8),
        ("moe2_4b", 8, 2.3830, 4.993, 32, 8),
        ("moe10b", 16, 10.170, 10.446, 16, 8),
        ("moe27b", 32, 26.648, 17.871, 128, 8),
        ("moe70b", 64, 70.415, 35.333, 64, 8),
    ],
)
def test_the_papers_mixtures_are_those_of_its_tables(
    name: str, devices: int, billions: float, petaflop: float, microbatches: int, layers: int
) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert isinstance(config.model, MoE)
    assert config.model.num_params() / 1e9 == pytest.approx(billions, rel=3e-4)
    assert config.model.iteration_flops(config.training.batch_size, True) / 1e15 == pytest.approx(petaflop, rel=3e-4)
    assert (config.model.dtype, config.model.group_size, config.model.capacity_factor) == ("float16", 2048, 2.0)
    assert config.training.param_dtype is ParamDtype.FLOAT16
    assert (config.cluster.num_devices, config.schedule.num_microbatches, config.layers.num_layers) == (devices, microbatches, layers)
    assert (config.training.batch_size, config.training.optimiser, config.search.remat) == (
        1024,
        OptimiserKind.ADAFACTOR,
        RematChoice.ALWAYS,
    )
    tokens = config.training.batch_size // microbatches * config.model.sequence
    assert tokens % config.model.group_size == 0, "a microbatch holds whole groups"


@pytest.mark.parametrize(
    ("name", "devices", "billions", "depth", "channels", "width", "batch", "microbatches"),
    [
        ("wresnet250m", 1, 0.25, 50, 160, 2, 1536, 24),
        ("wresnet1b", 4, 1.0, 50, 320, 2, 1536, 24),
        ("wresnet2b", 8, 2.0, 50, 448, 2, 1536, 24),
        ("wresnet4b", 16, 4.0, 50, 640, 2, 1536, 32),
        ("wresnet6_8b", 32, 6.8, 50, 320, 16, 1536, 32),
        ("wresnet13b", 64, 13.0, 101, 320, 16, 1520, 38),
    ],
)
def test_the_papers_wide_resnets_are_those_of_its_tables(
    name: str, devices: int, billions: float, depth: int, channels: int, width: int, batch: int, microbatches: int
) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert config.model == WideResNet(depth=depth, channels=channels, width=width, num_classes=1024, image=224, dtype="float32")
    assert isinstance(config.model, WideResNet)
    assert config.model.num_params() / 1e9 == pytest.approx(billions, rel=0.05)
    assert (config.cluster.num_devices, config.schedule.num_microbatches, config.training.batch_size) == (devices, microbatches, batch)
    assert config.layers.num_layers == {50: 16, 101: 33}[depth], "a layer each residual block"
    assert (config.training.optimiser, config.search.remat, config.data.kind) == (OptimiserKind.SGD, RematChoice.ALWAYS, DataKind.SYNTHETIC)


@pytest.mark.parametrize(("name", "devices", "num_params"), [("llama1_1b", 8, 1_100_048_384), ("llama8b", 32, 8_030_261_248)])
def test_the_llamas_are_of_published_sizes(name: str, devices: int, num_params: int) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert isinstance(config.model, Llama)
    assert config.model.num_params() == num_params
    assert (config.cluster.num_devices, config.model.dtype, config.training.param_dtype) == (devices, "bfloat16", ParamDtype.FLOAT32)


def test_the_quickstarts_model_is_of_about_a_million_parameters() -> None:
    model = to_config(composed("+experiment=quickstart")).model
    assert isinstance(model, GPT)
    assert model.num_layers >= 4
    assert 0.7e6 < model.num_params() < 1.5e6


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("alpa", {}),
        ("intra_only", {"partitions": "one_stage"}),
        ("inter_only", {"submesh_shapes": "one_device"}),
        ("pp_dp", {"strategies": "data_parallel", "logical_shapes": "rows"}),
        ("equal_layer", {"partitions": "equal_layers"}),
        ("equal_operator", {"clustering": "equal_operators"}),
        ("megatron", {"partitions": "grid", "strategies": "megatron", "num_best": 16}),
        ("manual", {"partitions": "manual", "manual": ["layer 0 on 8x8 as 8x8"]}),
        ("wide", {"submesh_shapes": "all", "remat": "search", "num_best": 8}),
    ],
)
def test_each_search_is_that_of_the_paper_with_what_restricts_it(name: str, changed: dict[str, object]) -> None:
    given = ["search.manual=[layer 0 on 8x8 as 8x8]"] if name == "manual" else []
    base, found = (
        OmegaConf.to_container(composed("+experiment=gpt39b", f"search={one}", *words).search)
        for one, words in (("alpa", ()), (name, given))
    )
    assert isinstance(base, dict) and base["name"] == "alpa"
    assert found == {**base, "name": name, **changed}
    config = config_of("+experiment=gpt39b", f"search={name}", *given)
    assert config.search.given == ((StageCandidate(0, 1, Submesh(8, 8), MeshShape(8, 8), remat=False),) if given else ())


def test_each_search_is_tried_above() -> None:
    names = {path.stem for path in (config_folder() / "search").glob("*.yaml")}
    assert names == {"alpa", "intra_only", "inter_only", "pp_dp", "equal_layer", "equal_operator", "megatron", "manual", "wide"}
