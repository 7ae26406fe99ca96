"""How long an instruction computes and a transfer takes, by hand-worked figures."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpar.audit.cost import Cost
from jaxpar.audit.dataflow import Dataflow
from jaxpar.audit.links import Transfers
from jaxpar.audit.reader import read_hlo
from jaxpar.audit.result import Collective
from jaxpar.errors import AuditError
from jaxpar.hardware import chip

# One FLOP in bf16 is a nanosecond, one byte of memory a nanosecond.
CHIP = replace(chip("h100"), peak_flops={"bf16": 1e9, "f32": 5e8}, hbm_bytes_per_s=1e9)
A = "  %a = bf16[8,16]{1,0} parameter(0)\n"
B = "  %b = bf16[16,32]{1,0} parameter(1)\n"
STACK = "  %stack = bf16[100,16]{1,0} parameter(2)\n  %i = s32[] parameter(3)\n"


def cost_of(line, others="", on=CHIP):
    """(seconds, computes) of the instruction on `line`, which reads a, b, stack or i."""
    text = (
        f"HloModule m, is_scheduled=true\n{others}\n"
        "ENTRY %main (a: bf16[8,16]) -> bf16[8,16] {\n"
        f"{A}{B}{STACK}  %it = {line}\n  ROOT %last = bf16[8,16]{{1,0}} negate(%a)\n}}\n"
    )
    module = read_hlo(text)
    assert not module.problems
    cost = Cost(Dataflow(module), on)
    found = module.entry.instructions["it"]
    return cost.seconds(module.entry, found), cost.computes(found)


def test_a_matmul_takes_two_flops_per_element_and_step():
    line = "bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert cost_of(line) == (pytest.approx(2 * 8 * 32 * 16 * 1e-9), True)


def test_a_matmul_of_another_type_runs_at_the_peak_of_that_type():
    line = "f32[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert cost_of(line)[0] == pytest.approx(8192e-9)  # operands are bf16
    assert cost_of(line, on=replace(CHIP, peak_flops={"bf16": 5e8}))[0] == pytest.approx(16384e-9)


def test_a_matmul_of_a_library_is_costed_by_its_own_dimension_numbers():
    config = (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    )
    line = (
        "(bf16[8,32]{1,0}, s8[4096]{0}) custom-call(%a, %b), "
        f'custom_call_target="__cublas$gemm", {config}'
    )
    assert cost_of(line)[0] == pytest.approx(8192e-9)


def test_matmuls_inside_fusions_inside_fusions_count():
    others = """
%inner (p: bf16[8,16], q: bf16[16,32]) -> bf16[8,32] {
  %p = bf16[8,16]{1,0} parameter(0)
  %q = bf16[16,32]{1,0} parameter(1)
  ROOT %d = bf16[8,32]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (p: bf16[8,16], q: bf16[16,32]) -> bf16[8,32] {
  %p = bf16[8,16]{1,0} parameter(0)
  %q = bf16[16,32]{1,0} parameter(1)
  ROOT %f = bf16[8,32]{1,0} fusion(%p, %q), kind=kCustom, calls=%inner
}
"""
    line = "bf16[8,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%outer"
    assert cost_of(line, others)[0] == pytest.approx(8192e-9)


def test_a_convolution_takes_two_flops_per_element_and_kernel_cell():
    line = "bf16[8,32]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    assert cost_of(line)[0] == pytest.approx(2 * 8 * 32 * 16 * 1e-9)


def test_elementwise_work_costs_the_bytes_it_moves():
    assert cost_of("bf16[8,16]{1,0} add(%a, %a)")[0] == pytest.approx(3 * 256e-9)


SLICE = """
%takes (p: bf16[100,16], j: s32[]) -> bf16[1,16] {
  %p = bf16[100,16]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %z = s32[] constant(0)
  %v = bf16[100,16]{1,0} bitcast(%p)
  ROOT %s = bf16[1,16]{1,0} dynamic-slice(%v, %j, %z), dynamic_slice_sizes={1,16}
}
"""
UPDATE = """
%puts (p: bf16[100,16], j: s32[], u: bf16[1,16]) -> bf16[100,16] {
  %p = bf16[100,16]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %u = bf16[1,16]{1,0} parameter(2)
  %z = s32[] constant(0)
  ROOT %s = bf16[100,16]{1,0} dynamic-update-slice(%p, %u, %j, %z)
}
"""


def test_a_fusion_that_slices_a_stack_reads_the_slice_and_not_the_stack():
    line = "bf16[1,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%takes"
    assert cost_of(line, SLICE)[0] == pytest.approx((32 + 4 + 32) * 1e-9)


def test_a_fusion_that_also_reads_the_stack_otherwise_reads_all_of_it():
    others = SLICE.replace("%v = bf16", "%w = bf16[100,16]{1,0} negate(%p)\n  %v = bf16")
    line = "bf16[1,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%takes"
    assert cost_of(line, others)[0] == pytest.approx((3200 + 4 + 32) * 1e-9)


def test_a_fusion_that_updates_in_place_moves_only_the_update():
    line = "bf16[100,16]{1,0} fusion(%stack, %i, %a), kind=kLoop, calls=%puts"
    assert cost_of(line, UPDATE)[0] == pytest.approx((4 + 32 + 32) * 1e-9)
    line = "bf16[100,16]{1,0} dynamic-update-slice(%stack, %a, %i, %i)"
    assert cost_of(line)[0] == pytest.approx(2 * 256e-9)


def test_what_xla_estimated_counts_where_the_chip_has_a_clock():
    line = 'bf16[8,16]{1,0} copy(%a), backend_config={"estimated_cycles":"3000"}'
    assert cost_of(line, on=replace(CHIP, clock_hz=1e9))[0] == pytest.approx(3e-6)
    assert cost_of(line)[0] == pytest.approx(512e-9)


def test_the_largest_number_of_cycles_is_no_estimate():
    line = f'bf16[8,16]{{1,0}} copy(%a), backend_config={{"estimated_cycles":"{2**63 - 1}"}}'
    assert cost_of(line, on=replace(CHIP, clock_hz=1e9))[0] == pytest.approx(512e-9)


LOOP = """
%body (s: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %s = (s32[], bf16[8,16]{1,0}) parameter(0)
  %c = s32[] get-tuple-element(%s), index=0
  %v = bf16[8,16]{1,0} get-tuple-element(%s), index=1
  %w = bf16[8,16]{1,0} negate(%v)
  ROOT %t = (s32[], bf16[8,16]{1,0}) tuple(%c, %w)
}

%cond (k: (s32[], bf16[8,16])) -> pred[] {
  %k = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}
"""
WHILE = "(s32[], bf16[8,16]{1,0}) while(%a), condition=%cond, body=%body"


def test_a_loop_costs_its_body_as_often_as_it_runs_and_once_where_that_is_unknown():
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    assert cost_of(WHILE + known, LOOP) == (pytest.approx(7 * 512e-9), True)
    assert cost_of(WHILE, LOOP) == (pytest.approx(512e-9), True)


def test_a_loop_that_only_counts_computes_nothing():
    idle = LOOP.replace("bf16[8,16]{1,0} negate(%v)", "bf16[8,16]{1,0} bitcast(%v)")
    assert cost_of(WHILE, idle) == (0.0, False)


def test_a_conditional_costs_its_cheapest_branch():
    branches = LOOP.replace("%body", "%dear").split("\n%cond")[0] + LOOP.replace(
        "%body", "%cheap"
    ).replace("negate(%v)", "bitcast(%v)")
    line = "(s32[], bf16[8,16]{1,0}) conditional(%i, %a, %a), branch_computations={%dear, %cheap}"
    assert cost_of(line, branches) == (0.0, True)


@pytest.mark.parametrize(
    "line",
    [
        "bf16[16,8]{1,0} bitcast(%a)",
        "s32[] add(%i, %i)",
        "((bf16[8,16]{1,0}), bf16[8,16]{1,0}, u32[]) copy-start(%a)",
        'bf16[8,16]{1,0} custom-call(%a), custom_call_target="ConcatBitcast"',
        '((), (), s32[8]) custom-call-start(), async_execution_thread="sparsecore"',
    ],
)
def test_bookkeeping_copies_by_dma_and_other_cores_leave_the_device_free(line):
    assert cost_of(line) == (0.0, False)


def test_absurd_dims_are_refused_and_negative_ones_cost_nothing():
    huge = ",".join(["999999999999999999"] * 40)
    with pytest.raises(AuditError, match="no memory holds"):
        cost_of(f"bf16[{huge}] add(%a, %a)")
    below = "bf16[-800,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert cost_of(below)[0] == 0.0


def collective(kind, group_size, payload_bytes, wire_bytes, groups=()):
    return Collective(
        kind=kind,
        axes=("x",),
        axes_note=None,
        group_size=group_size,
        num_groups=1,
        dtype="bf16",
        program_dtype="bf16",
        count=1,
        count_min=1,
        count_max=1,
        payload_bytes=payload_bytes,
        wire_bytes=wire_bytes,
        phase="unknown",
        scope="",
        source=None,
        is_async=True,
        exposed_fraction=None,
        buffers=(),
        groups=groups,
    )


TORUS = replace(chip("v5e"), link_bytes_per_s=1e9)
SWITCH = replace(
    chip("h100"), link_bytes_per_s=1e9, num_links=4, domain_size=8, scale_out_bytes_per_s=1e8
)


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        (collective("all-gather", 8, 8000, 7000), 3500e-9),  # both ways round the ring
        (collective("all-gather", 2, 8000, 4000), 4000e-9),  # a single link
        (collective("collective-permute", 8, 8000, 8000), 8000e-9),  # to the neighbour
        (collective("all-to-all", 8, 8000, 7000), 8000e-9),  # scaling book: payload n/4 over both
        (collective("all-to-all", 2, 8000, 4000), 4000e-9),
        (collective("all-to-all", 3, 9000, 6000), 3000e-9),
    ],
)
def test_a_torus_is_a_ring_per_group(found, seconds):
    assert Transfers(TORUS).seconds(found) == pytest.approx(seconds)


def test_behind_a_switch_all_links_carry_and_beyond_it_the_network_of_the_members_does():
    inside = np.arange(8).reshape(2, 4)
    beyond = np.array([[0, 1, 8, 9], [2, 3, 10, 11]])
    strided = np.array([[0, 8, 16, 24]])
    transfers = Transfers(SWITCH)
    near = collective("all-gather", 4, 8000, 6000, inside)
    assert transfers.seconds(near) == pytest.approx(6000 / 4e9)
    assert transfers.seconds(replace(near, groups=beyond)) == pytest.approx(6000 / 2e8)
    assert transfers.seconds(replace(near, groups=strided)) == pytest.approx(6000 / 1e8)
    assert transfers.seconds(replace(near, groups=(np.arange(3), np.arange(5, 8)))) == 6000 / 4e9


def test_a_permute_is_as_slow_as_the_slowest_of_its_pairs():
    pairs = np.array([[0, 1], [7, 8]])
    found = collective("collective-permute", 16, 1000, 1000, pairs)
    assert Transfers(SWITCH).seconds(found) == pytest.approx(1000 / 1e8)
    near = replace(found, groups=pairs[:1])
    assert Transfers(SWITCH).seconds(near) == pytest.approx(1000 / 4e9)
