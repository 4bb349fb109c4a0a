"""The cost model against what was published, and its behaviour where nothing was."""

from __future__ import annotations

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from custom_ops.cost_model import CHIPS, TPU7X, V5E, Links, collective_time
from custom_ops.tpu_compiler import topology
from torchqwen_tpu.planning.calibration import collectives

HOST = Links(8, 4, (2, 2))


def test_published_collectives_are_met_within_two_per_cent():
    assert len(list(collectives())) == 2 and all(abs(row.error) < 0.02 for row in collectives())


def test_one_device_needs_no_links():
    assert collective_time("all-reduce", 1 << 30, Links(1, 1, ()), TPU7X) == 0


def test_cores_of_one_chip_use_the_link_between_the_dies():
    between = collective_time("all-gather", 1 << 26, Links(2, 1, ()), TPU7X)
    assert between == pytest.approx((1 << 25) / TPU7X.die_to_die, rel=0.1)
    assert between < collective_time("all-gather", 1 << 26, HOST, TPU7X)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    parts = [collective_time(kind, 1 << 24, HOST, TPU7X) for kind in ("reduce-scatter", "all-gather", "all-reduce")]
    assert parts[2] == pytest.approx(parts[0] + parts[1])


def test_longer_dimensions_have_two_links():
    long, short = (collective_time("all-gather", 1 << 30, links, V5E) for links in (Links(8, 8, (8,)), Links(2, 2, (2,))))
    # 7/8 of the array over two links against half of it over one.
    assert long / short == pytest.approx(7 / 8, rel=0.01)


def test_matrix_units_without_fp8_multiply_as_in_bf16():
    assert V5E.matrix_rate("float8_e4m3fn") == V5E.matrix_rate("bfloat16")
    assert all(chip.measured_bandwidth < chip.hbm_bandwidth for chip in CHIPS.values())


@pytest.mark.parametrize("name", ["tpu7x:1x1x1", "v6e:1x1", "v5e:1x1"])
def test_constants_of_a_core_are_those_that_jax_has(name):
    pytest.importorskip("libtpu")
    (device, *_) = topology(name).devices
    with jax.default_device(device):
        known = pltpu.get_tpu_info()
    chip = CHIPS[device.device_kind]
    assert chip.vmem_bytes == known.vmem_capacity_bytes
    assert chip.hbm_bytes < known.hbm_capacity_bytes < 1.1 * chip.hbm_bytes
    assert chip.hbm_bandwidth == pytest.approx(known.mem_bw_bytes_per_second, rel=0.01)
    assert chip.matrix["bfloat16"] == pytest.approx(known.bf16_ops_per_second, rel=0.01)
