"""The hardware table: complete, with sources, and true to what its own figures imply."""

import pytest

from jaxpar.errors import JaxparError
from jaxpar.hardware import chip, chip_of, chips

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = ("a100", "h100", "h200", "b200")


def test_every_chip_says_where_its_figures_are_from():
    assert tuple(chips()) == TPUS + GPUS
    for found in chips().values():
        subjects = {"compute", "memory", "links", "scale_out"}
        assert set(found.source) == subjects | ({"clock"} if found.clock_hz else set())
        assert all(len(text) > 15 for text in found.source.values())


def test_figures_are_in_the_units_that_the_names_say():
    for found in chips().values():
        assert 1e14 < found.peak_flops["bf16"] < 1e16
        assert 1e10 < found.hbm_bytes < 1e12
        assert 5e11 < found.hbm_bytes_per_s < 1e13
        assert 2e10 < found.link_bytes_per_s < 2e11
        assert found.scale_out_bytes_per_s <= found.link_bytes_per_s * found.num_links
        assert found.clock_hz is None or 1e9 <= found.clock_hz < 3e9


def test_tpus_have_a_clock_and_gpus_have_none():
    assert all(chip(name).clock_hz and chip(name).platform == "tpu" for name in TPUS)
    assert all(chip(name).clock_hz is None and chip(name).platform == "gpu" for name in GPUS)


@pytest.mark.parametrize(
    ("name", "flops_per_cycle"),
    [("v4", 2 * 131072), ("v5e", 131072), ("v5p", 262144), ("v6e", 524288), ("tpu7x", 524288)],
)
def test_the_clock_times_what_the_matrix_units_do_is_the_peak(name, flops_per_cycle):
    found = chip(name)
    assert found.clock_hz * flops_per_cycle == pytest.approx(found.flops_per_s("bf16"), rel=2e-3)


def test_a_torus_says_when_its_dims_are_rings_and_a_switch_has_none():
    sizes = {name: it.wrap_size for name, it in chips().items() if it.topology == "torus"}
    assert sizes == {"v4": 4, "v5e": 16, "v5p": 4, "v6e": 16, "tpu7x": 4}
    assert all(it.wrap_size is None for it in chips().values() if it.topology == "switch")


def test_published_totals_of_the_links_come_out():
    both_ways = {name: 2 * it.link_bytes_per_s * it.num_links for name, it in chips().items()}
    assert both_ways["v5e"] == 400e9 and both_ways["v6e"] == 800e9
    assert both_ways["v5p"] == both_ways["tpu7x"] == 1200e9
    assert both_ways["a100"] == 600e9 and both_ways["b200"] == 1800e9
    assert both_ways["h100"] == both_ways["h200"] == 900e9


def test_the_two_devices_of_a_tpu7x_share_its_compute_and_memory():
    found = chip("tpu7x")
    assert found.flops_per_s("bf16") == 2307e12 / 2
    assert found.device_hbm_bytes_per_s == 7380e9 / 2


def test_an_element_type_without_a_published_peak_gets_that_of_bf16():
    assert chip("h100").flops_per_s("f8e4m3fn") == 1978.9e12
    assert chip("h100").flops_per_s("f32") == 494.7e12
    assert chip("v5e").flops_per_s("f32") == chip("v5e").flops_per_s("f16") == 197e12


def test_a_name_is_known_in_any_case_and_a_slip_gets_a_suggestion():
    assert chip("V5P") == chips()["v5p"]
    with pytest.raises(JaxparError, match=r"chip='h10' .* Did you mean 'h100'\?"):
        chip("h10")


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100-PCIE-80GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("TPU v4 lite", None),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_a_device_kind_names_its_chip_and_a_similar_one_does_not(device_kind, name):
    assert chip_of(device_kind) == name
