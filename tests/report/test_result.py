"""What a step got through is told in the unit of its batch: tokens of text, or examples."""

import pytest

from alpa_hpc.report.result import Unit, Work, training_figures

FIGURES = {"step_seconds": 0.5, "first_loss": 2.0, "last_loss": 1.0}
PLANNING = {"iteration_flop": 6e15}


@pytest.mark.parametrize("unit", list(Unit))
def test_rates_are_work_over_seconds(unit: Unit) -> None:
    figures = training_figures(FIGURES, PLANNING, num_devices=4, work=Work(unit, 1536))
    assert figures[f"{unit.value}_per_second"] == 3072
    assert (figures["pflops"], figures["tflops_per_device"]) == (12.0, 3000.0)
    assert sum(name.endswith("_per_second") for name in figures) == 1
